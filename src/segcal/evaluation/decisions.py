"""What decisions promised and what came of them, over the labeled cases of one evaluation.

Four views of each class, all from the sums that an evaluation keeps: expected against actual Dice; the risk that is
left where only the cases with the best promises are taken (risk-coverage); Dice, sensitivity and precision at every
threshold; decided, expected and true volumes (Bland and Altman, Lancet 1986). Numbers only: tables, figures and pages
are handed these.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from segcal.decisions import curves_of, dice_curves, sums_above
from segcal.evaluation.agreement import DiceAgreement, case_dices, dice_agreement
from segcal.evaluation.columns import Label
from segcal.evaluation.evaluation import Evaluation
from segcal.evaluation.fine import blocks, decision_numbers
from segcal.statistics import BinStatistics

Array = NDArray[Any]

THRESHOLDS = 101  # of a curve that is kept; the best one is sought among all fine edges
NORMAL_95 = 1.96  # Bland and Altman's limits hold 95 % of normal differences
CURVES = (
    "dice",
    "expected_dice",
    "sensitivity",
    "expected_sensitivity",
    "precision",
    "expected_precision",
)


@dataclass(frozen=True, eq=False)
class RiskCoverage:
    """The mean risk, 1 - Dice, of the cases with the largest expected Dice, as more and more of them are taken.

    coverage: share of cases taken, 1/n to 1.
    risk: of cases ordered by expected Dice; those that are equal count as in random order.
    ideal: of cases ordered by their actual Dice.
    area, ideal_area, random_area: means over all coverages; a random order has the mean risk throughout.
    """

    coverage: Array
    risk: Array
    ideal: Array
    area: float
    ideal_area: float
    random_area: float


class Optimum(NamedTuple):
    """A common threshold, and the mean Dice there: against the labels, and as the probabilities promise."""

    threshold: float
    dice: float
    expected_dice: float


@dataclass(frozen=True, eq=False)
class ThresholdMeans:
    """Means over the cases with the class of what each common threshold gives, and the best of them.

    thresholds: at most 101, from 0 to the last fine edge below 1.
    dice, sensitivity, precision: against the labels; precision over the cases in which anything is decided.
    expected_dice, expected_sensitivity, expected_precision: the same as the probabilities promise.
    best: where the mean Dice is largest; among equals the highest threshold.
    promised: where the mean expected Dice is largest, which can be told without labels.
    decision_dice: mean Dice of the decisions that were taken.
    """

    thresholds: Array
    dice: Array
    expected_dice: Array
    sensitivity: Array
    expected_sensitivity: Array
    precision: Array
    expected_precision: Array
    best: Optimum
    promised: Optimum
    decision_dice: float


@dataclass(frozen=True, eq=False)
class VolumeAgreement:
    """Bland and Altman: differences of a volume from the true one, against the mean of both.

    mean, difference: of each case; NaN where the class is neither decided nor there, which says nothing.
    bias: mean difference; NaN where no case counts.
    low, high: 95 % limits of agreement, bias -+ 1.96 standard deviations; NaN with fewer than two cases.
    """

    mean: Array
    difference: Array
    bias: float
    low: float
    high: float


@dataclass(frozen=True, eq=False)
class ClassAgreement:
    """Of one class, or of the mean of all, which has no volumes.

    expected, actual: Dice of each case; actual is NaN where the labels have not the class.
    """

    expected: Array
    actual: Array
    dice: DiceAgreement
    risk: RiskCoverage
    thresholds: ThresholdMeans
    decided_volume: VolumeAgreement | None = None
    expected_volume: VolumeAgreement | None = None


@dataclass(frozen=True, eq=False)
class Agreement:
    """Of one evaluation: of each class and, where there are several, of their mean (None).

    unit: of volumes, "ml"; "voxels" where the size of a voxel is not known of every case.
    """

    cases: tuple[str, ...]
    labels: dict[Label, ClassAgreement]
    unit: str


def agreement_of(evaluation: Evaluation) -> Agreement | None:
    """All of it, of the classes that the evaluation has; None where it was made without sums of decisions.

    Leave out the background first (`Evaluation.foreground`). Cases whose labels have not a class count in nothing
    but its volumes.
    """
    if evaluation.decisions is None:
        return None
    pairs = case_dices(evaluation)
    voxel_ml = evaluation.decisions.voxel_ml
    measured = not bool(voxel_ml.isnan().any())
    volumes = _volumes(evaluation, voxel_ml if measured else torch.ones_like(voxel_ml))
    means = _threshold_means(evaluation.statistics, {label: actual for label, (_, actual) in pairs.items()})
    found = {
        label: ClassAgreement(
            *(expected, actual, dice_agreement(expected, actual), risk_coverage(expected, actual), curves),
            *volumes.get(label, (None, None)),
        )
        for (label, (expected, actual)), curves in zip(pairs.items(), means, strict=True)
    }
    return Agreement(evaluation.cases, found, "ml" if measured else "voxels")


def agreements_of(evaluations: Mapping[str, Evaluation]) -> dict[str, Agreement]:
    """Of each evaluation that has sums of decisions, to be shown beside each other: volumes are all in one unit."""
    found = {name: agreement_of(each) for name, each in evaluations.items()}
    units = {each.unit for each in found.values() if each is not None}
    if len(units) > 1:
        found = {name: agreement_of(_in_voxels(each)) for name, each in evaluations.items()}
    return {name: each for name, each in found.items() if each is not None}


def _in_voxels(evaluation: Evaluation) -> Evaluation:
    sums = evaluation.decisions
    unknown = sums and replace(sums, voxel_ml=torch.full_like(sums.voxel_ml, torch.nan))
    return replace(evaluation, decisions=unknown)


def _volumes(evaluation: Evaluation, size: Tensor) -> dict[Label, tuple[VolumeAgreement, VolumeAgreement]]:
    """Agreement of the decided and of the expected volume of each class with the true one."""
    overlap, promised = evaluation.overlap, decision_numbers(evaluation.statistics, evaluation.bins)["expected"]
    decided, expected, true = ((voxels * size).T.numpy() for voxels in (overlap.predicted, promised, overlap.true))
    silent = (decided == 0) & (true == 0)
    return {
        name: (
            volume_agreement(np.where(silent[i], np.nan, decided[i]), true[i]),
            volume_agreement(np.where(silent[i], np.nan, expected[i]), true[i]),
        )
        for i, name in enumerate(evaluation.classes)
    }


def risk_coverage(expected: Array, actual: Array) -> RiskCoverage:
    """Of one class, from a number for each case; cases without an actual Dice (NaN) are left out.

    >>> import numpy as np
    >>> found = risk_coverage(np.array([0.9, 0.8, 0.7]), np.array([0.8, 0.9, 0.4]))
    >>> found.risk.round(3).tolist(), found.ideal.round(3).tolist()
    ([0.2, 0.15, 0.3], [0.1, 0.15, 0.3])
    >>> round(found.area, 4), round(found.ideal_area, 4), round(found.random_area, 4)
    (0.2167, 0.1833, 0.3)
    """
    known = ~np.isnan(actual)
    expected, loss = expected[known], 1 - actual[known]
    number = np.arange(1, len(loss) + 1)
    # Of cases that promise the same, any order is as good: each counts as their mean.
    _, place, ties = np.unique(-expected, return_inverse=True, return_counts=True)
    shared = (np.bincount(place, weights=loss) / ties)[place] if len(loss) else loss
    risk, ideal = (np.cumsum(losses) / number for losses in (shared[np.argsort(-expected)], np.sort(loss)))
    areas = [float(values.mean()) if len(loss) else math.nan for values in (risk, ideal, loss)]
    return RiskCoverage(number / max(len(loss), 1), risk, ideal, *areas)


def volume_agreement(volume: Array, true: Array) -> VolumeAgreement:
    """Of one class, from a volume for each case; cases in which either is NaN are left out.

    >>> import numpy as np
    >>> found = volume_agreement(np.array([11.0, 8.0, 12.0]), np.array([10.0, 10.0, 10.0]))
    >>> found.mean.tolist(), found.difference.tolist()
    ([10.5, 9.0, 11.0], [1.0, -2.0, 2.0])
    >>> round(found.bias, 3), round(found.low, 3), round(found.high, 3)  # standard deviation: sqrt(13 / 3)
    (0.333, -3.747, 4.413)
    """
    difference = volume - true
    known = difference[~np.isnan(difference)]
    bias = float(known.mean()) if len(known) else math.nan
    reach = NORMAL_95 * float(known.std(ddof=1)) if len(known) > 1 else math.nan
    return VolumeAgreement((volume + true) / 2, difference, bias, bias - reach, bias + reach)


def _threshold_means(stats: BinStatistics, actual: dict[Label, Array]) -> Iterator[ThresholdMeans]:
    """Of each class and at last of the mean of all, if asked for; few cases at a time, so that few curves are held."""
    bins = stats.binning.bins
    kept = _kept(bins)
    total, number = torch.zeros(()), torch.zeros(())
    for block in blocks(stats):
        curves = _case_curves(block, kept)
        if None in actual:
            curves = torch.cat([curves, curves.nanmean(1, keepdim=True)], 1)
        total, number = total + curves.nansum(0), number + (~curves.isnan()).sum(0)
    for mean, of_cases in zip(total / number, actual.values(), strict=True):
        yield _means(mean, kept, bins, of_cases)


def _case_curves(stats: BinStatistics, kept: Tensor) -> Tensor:
    """(case, class, ...): both curves of Dice at all edges, the others at those to keep, one after the other.

    NaN in the cases without the class, of what is expected, too.
    """
    above, bins = sums_above(stats), stats.binning.bins
    dice, expected = dice_curves(*above)
    # Nothing decided and nothing expected where there is something: a promise of 0.
    some = curves_of(*above, bins, edges=kept)
    curves = torch.cat([dice, expected.nan_to_num(0.0), *(getattr(some, name) for name in CURVES[2:])], 2)
    curves[some.true_volume == 0] = torch.nan
    return curves


def _kept(bins: int) -> Tensor:
    """Places of the thresholds to keep among the edges of bins; the last edge, which decides nothing, is not one."""
    even = (torch.arange(THRESHOLDS, dtype=torch.float64) * bins / (THRESHOLDS - 1)).round().long()
    return torch.tensor(sorted(set(even.clamp(max=bins - 1).tolist())))


def _means(curve: Tensor, kept: Tensor, bins: int, actual: Array) -> ThresholdMeans:
    sizes = [bins + 1] * 2 + [len(kept)] * (len(CURVES) - 2)
    dice, expected, *others = np.split(curve.numpy(), np.cumsum(sizes)[:-1])
    thinned = [dice[kept], expected[kept], *others]
    known = actual[~np.isnan(actual)]
    return ThresholdMeans(
        **dict(zip(CURVES, thinned, strict=True)),
        thresholds=kept.double().numpy() / bins,
        best=_optimum(dice, dice, expected),
        promised=_optimum(expected, dice, expected),
        decision_dice=float(known.mean()) if len(known) else math.nan,
    )


def _optimum(curve: Array, dice: Array, expected: Array) -> Optimum:
    """Where the curve is largest, the last edge left out, which decides nothing."""
    bins = len(curve) - 1
    if np.isnan(curve[:-1]).all():
        return Optimum(math.nan, math.nan, math.nan)
    # Among equals the highest: bins without voxels between two thresholds decide nothing.
    place = bins - 1 - int(np.nanargmax(curve[-2::-1]))
    return Optimum(place / bins, float(dice[place]), float(expected[place]))
