"""What decisions on probabilities are worth: expected and true Dice, sensitivity, precision and volume at thresholds.

If probabilities are calibrated, the voxels with a probability of at least t hold as many voxels of the class as the
sum of their probabilities: the expected true positives. Cumulative sums over fine bins give them at all thresholds at
once, and the true ones from the sums of labels. An expectation of a ratio is taken as the ratio of expectations, which
it approaches as volumes grow.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from segcal.binning import need_common_edges
from segcal.errors import ConfigError
from segcal.scores import ClassSums, OverlapCounts
from segcal.statistics import BinStatistics

UNCERTAIN = (0.1, 0.9)


@dataclass(frozen=True, eq=False)
class DecisionSums(ClassSums):
    """What is known of the voxels that were decided to be of a class, each (case, class), float64.

    confidence: sum of the probabilities of the class over the voxels decided for it; what the decision was taken by
        (the most probable class, or a probability of at least 1/2 where classes overlap) does not matter.
    largest: voxels in the largest connected piece of the decision; NaN: not known.
    voxel_ml: volume of a voxel; NaN: not known.

    >>> one = DecisionSums(*(torch.tensor([[x]]).double() for x in (8.5, 9.0, 0.001)))
    >>> one.confidence.item()
    8.5
    """

    confidence: Tensor
    largest: Tensor
    voxel_ml: Tensor


@dataclass(frozen=True, eq=False)
class ThresholdCurves:
    """What each threshold gives: (case, class, threshold), float64, but the thresholds themselves.

    thresholds: from 0 (every voxel is decided to be of the class) to 1 + one bin (none is).
    dice, sensitivity, precision: of the decision p >= threshold against the labels; NaN where they have no value.
    expected_dice, expected_sensitivity, expected_precision: the same if the probabilities are calibrated.
    volume: voxels decided; `expected_volume` and `true_volume`, (case, class), are those that are of the class.
    """

    thresholds: Tensor
    dice: Tensor
    expected_dice: Tensor
    sensitivity: Tensor
    expected_sensitivity: Tensor
    precision: Tensor
    expected_precision: Tensor
    volume: Tensor
    expected_volume: Tensor
    true_volume: Tensor


def threshold_curves(stats: BinStatistics) -> ThresholdCurves:
    """Dice, sensitivity, precision and volume of each case and class at the edges of all bins, true and expected.

    A class that is not present has neither Dice nor sensitivity; where nothing is decided there is no precision: NaN.
    ConfigError for soft bins and for equal-mass ones, whose edges are no thresholds.

    stats: bin statistics of hard bins, best fine ones: those of an `Evaluation` have 1,200.

    >>> from segcal import bin_statistics
    >>> stats = bin_statistics(torch.tensor([[[0.9, 0.6, 0.2]]]), torch.tensor([[[1.0, 0.0, 0.0]]]), bins=2)
    >>> curves = threshold_curves(stats)
    >>> curves.thresholds
    tensor([0.0000, 0.5000, 1.0000], dtype=torch.float64)
    >>> curves.dice, curves.expected_dice[..., 1]  # 2 * 1.5 / (2 + 1.7)
    (tensor([[[0.5000, 0.6667, 0.0000]]], dtype=torch.float64), tensor([[0.8108]], dtype=torch.float64))
    """
    return curves_of(*sums_above(stats), stats.binning.bins)


def sums_above(stats: BinStatistics) -> tuple[Tensor, Tensor, Tensor]:
    """Counts, confidences and labels from each edge on, (case, class, edge); ConfigError as by `threshold_curves`."""
    decided, right, hits = (_above(sums) for sums in _hard(stats))
    return decided, right, hits


def dice_curves(decided: Tensor, right: Tensor, hits: Tensor) -> tuple[Tensor, Tensor]:
    """Dice and expected Dice at all edges, from `sums_above`."""
    return _dices(decided, right, hits, right[..., :1], hits[..., :1])


def _dices(decided: Tensor, right: Tensor, hits: Tensor, expected: Tensor, true: Tensor) -> tuple[Tensor, Tensor]:
    return _ratio(2 * hits, decided + true, where=true > 0), _ratio(2 * right, decided + expected)


def curves_of(
    decided: Tensor, right: Tensor, hits: Tensor, bins: int, *, edges: Tensor | None = None
) -> ThresholdCurves:
    """The curves that follow from `sums_above`, at all edges of so many bins or at some."""
    expected, true = right[..., :1], hits[..., :1]
    if edges is None:
        edges = torch.arange(bins + 1)
    else:
        decided, right, hits = (sums[..., edges] for sums in (decided, right, hits))
    dice, promised = _dices(decided, right, hits, expected, true)
    return ThresholdCurves(
        thresholds=edges.double() / bins,
        dice=dice,
        expected_dice=promised,
        sensitivity=_ratio(hits, true),
        expected_sensitivity=_ratio(right, expected),
        precision=_ratio(hits, decided),
        expected_precision=_ratio(right, decided),
        volume=decided,
        expected_volume=expected[..., 0],
        true_volume=true[..., 0],
    )


def expected_dice(stats: BinStatistics, overlap: OverlapCounts, decisions: DecisionSums) -> Tensor:
    """Dice of the decisions that were taken, (case, class), as the probabilities have it; no label is looked at.

    0 where nothing was decided; NaN where the class has no probability anywhere, either.

    stats: bin statistics of the cases.
    overlap: counts of the same; only the decided voxels matter.
    decisions: probabilities of the decided voxels.

    >>> from segcal import EvaluationAccumulator
    >>> found = EvaluationAccumulator()
    >>> found.update(torch.tensor([[[0.9, 0.2], [0.1, 0.8]]]), torch.tensor([[0, 0]]), ["case 1"])
    >>> evaluation = found.compute()
    >>> expected_dice(evaluation.statistics, evaluation.overlap, evaluation.decisions)  # 2 * 0.9 / 2.1, 2 * 0.8 / 1.9
    tensor([[0.8571, 0.8421]], dtype=torch.float64)
    """
    return dice_of_sums(stats.confidence_sum.sum(2), overlap, decisions)


def dice_of_sums(expected: Tensor, overlap: OverlapCounts, decisions: DecisionSums) -> Tensor:
    """`expected_dice` from the expected voxels of each case and class, the sum of all probabilities."""
    return _ratio(2 * decisions.confidence, overlap.predicted + expected)


def uncertain_voxels(stats: BinStatistics) -> Tensor:
    """Voxels whose probability of the class lies between 0.1 and 0.9, (case, class).

    stats: bin statistics of hard bins; bins count whole, between the edges nearest to 0.1 and 0.9.
    """
    counts, _, _ = _hard(stats)
    bins = stats.binning.bins
    return counts[..., round(UNCERTAIN[0] * bins) : round(UNCERTAIN[1] * bins)].sum(2)


@dataclass(frozen=True, eq=False)
class BestThreshold:
    """The decision with the largest expected Dice, (case, class).

    bin: place of the threshold among the edges of bins; as many as bins: nothing is decided.
    threshold: the same as a probability; above 1 where deciding nothing is best.
    expected_dice: what it promises; of nothing, the probability that the class is absent.
    """

    bin: Tensor
    threshold: Tensor
    expected_dice: Tensor


def best_threshold(stats: BinStatistics) -> BestThreshold:
    """Of each case and class the threshold with the largest expected Dice, from its probabilities alone.

    It is close to half of the Dice that it promises. Nothing is decided where that is better: where the probability
    that the class is absent, all voxels taken as independent, is at least the expected Dice of every other decision
    (nothing decided, nothing there: a Dice of 1). ConfigError as by `threshold_curves`.

    stats: bin statistics of hard bins, best fine ones; label sums are not looked at.

    >>> from segcal import bin_statistics
    >>> certain, doubtful = [[[0.9, 0.4, 0.1]]], [[[0.05, 0.0, 0.0]]]
    >>> probabilities = torch.tensor([certain, doubtful]).squeeze(1)
    >>> found = best_threshold(bin_statistics(probabilities, torch.zeros(2, 1, 3), bins=10))
    >>> found.threshold  # one voxel of 0.9 promises 0.75; with that of 0.4: 0.76; of 0.05 it is better to leave it
    tensor([[0.4000],
            [1.1000]], dtype=torch.float64)
    """
    counts, confidences, _ = _hard(stats)
    decided, right = _above(counts), _above(confidences)
    promised = _ratio(2 * right, decided + right[..., :1]).nan_to_num(0.0)[..., :-1]
    # Among equals the highest: bins without voxels between two thresholds decide nothing.
    best = promised.shape[2] - 1 - promised.flip(2).argmax(2)
    value = promised.gather(2, best[..., None])[..., 0]
    absent = _absence(counts, confidences)
    nothing = absent >= value
    bins = stats.binning.bins
    best = torch.where(nothing, bins, best)
    threshold = torch.where(nothing, 1 + 1 / bins, best.double() / bins)
    return BestThreshold(best, threshold, torch.where(nothing, absent, value))


def _absence(counts: Tensor, confidences: Tensor) -> Tensor:
    """(case, class): the product of 1 - p over all voxels; within a bin they count as equal."""
    mean = confidences / counts.clamp(min=1)
    return (counts * torch.log1p(-mean.clamp(max=1))).nan_to_num(nan=0.0, neginf=-torch.inf).sum(2).exp()


def _hard(stats: BinStatistics) -> tuple[Tensor, Tensor, Tensor]:
    need_common_edges(stats.binning, "cut at thresholds")
    if stats.binning.kernel != "hard" or stats.binning.closed != "left":
        kind = stats.binning.kernel if stats.binning.kernel != "hard" else "closed on the right"
        raise ConfigError(
            f"thresholds need hard bins that are closed on the left, whose edges they are; these are {kind}. "
            f"Collect them with bin_statistics(..., bins=1200)."
        )
    return stats.count, stats.confidence_sum, stats.label_sum


def _above(sums: Tensor) -> Tensor:
    """(..., bin + 1): the sums of all bins from each edge on; the last is 0."""
    total = sums.flip(-1).cumsum(-1).flip(-1)
    return torch.cat([total, torch.zeros_like(total[..., :1])], -1)


def _ratio(part: Tensor, whole: Tensor, *, where: Tensor | None = None) -> Tensor:
    known = whole > 0 if where is None else where & (whole > 0)
    return torch.where(known, part / torch.where(whole > 0, whole, 1), torch.nan)
