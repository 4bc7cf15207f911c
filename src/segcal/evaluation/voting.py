"""What the votes of several raters on one case tell: Dice against all kinds of references, distances, volumes.

Everything follows from how many voxels which raters chose, how many of these are decided for the class, and their
probabilities. Definitions are in docs/reference/numbers.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy import special

from segcal.binning import Binning
from segcal.evaluation.rated import Votes
from segcal.metrics import ace, ece, mce
from segcal.statistics import BinStatistics

Array = NDArray[Any]
ERRORS = {"ace": ace, "ece": ece, "mce": mce}
THRESHOLDS = tuple(i / 10 for i in range(1, 10))
CURVAS_THRESHOLDS = tuple(np.linspace(0.1, 0.8, 6).round(2).tolist())
CURVAS_BINS = 50
CLIPPED = float(special.ndtri(0.99))  # where CURVAS cuts the tails of its normal distribution
REACH = 3.0  # standard deviations to either side over which CURVAS integrates
STAPLE_START = 0.99999  # sensitivity and specificity to begin from, as in ITK


def numbers_of_votes(votes: Votes, *, unit: float = 1.0) -> dict[str, Array]:
    """What the votes of a case tell of each class, by metric, (class).

    unit: Volume of a voxel, of the scores of volumes.
    """
    table, number = _Table(votes), len(votes.raters)
    dices = table.dice
    pairs = [(a, b) for a in range(number) for b in range(a + 1, number)]
    between = np.array([_pair_dice(table.both[:, a, b], table.true[:, a], table.true[:, b]) for a, b in pairs])
    return {
        "raters": np.full(table.classes, float(number)),
        "dice_each": _nanmean(dices),
        "dice_spread": deviation(dices.T),
        "dice_between": _nanmean(between.T) if pairs else np.full(table.classes, math.nan),
        "dice_majority": table.dice_of(lambda share: share > 0.5),
        "dice_consensus": table.consensus_dice(),
        "dice_staple": table.dice_of_staple(),
        "dice_thresholds": threshold_dice(votes, THRESHOLDS),
        "ged": table.energy_distance(),
        "volume_crps": unit * sample_crps(table.volume, table.true),
        "volume_crps_normal": unit * normal_crps(table.volume, table.true.mean(1), table.true.std(1)),
    }


def floor_sums(votes: Votes, bins: int) -> BinStatistics:
    """(rater, class, bin): what is predicted is the mean of the other raters, the labels are those of the rater."""
    table = _Table(votes)
    count, confidence, labels = torch.from_numpy(table.floor_sums(bins)).unbind()
    return BinStatistics(count, confidence, labels, Binning(bins))


def floor_errors(stats: BinStatistics) -> dict[str, Array]:
    """Calibration errors of each class, averaged over raters; NaN where there is one rater alone."""
    return {metric: _nanmean(error(stats).numpy().T) for metric, error in ERRORS.items()}


def curvas_numbers(votes: Votes, ece_of_raters: Array, *, unit: float = 1.0) -> dict[str, Array]:
    """The scores of the CURVAS challenge for a case, by name, (class): as defined, and as its code has them.

    ece_of_raters: (rater), of the most probable class in 50 bins.
    unit: Volume of a voxel; the challenge has mm³.
    """
    table = _Table(votes)
    mean, std = table.true.mean(1), table.true.std(1)
    return {
        "curvas_dsc": table.consensus_dice(),
        "curvas_confidence": table.consensus_confidence(),
        "curvas_ece": np.full(table.classes, ece_of_raters.mean() if ece_of_raters.size else math.nan),
        "curvas_crps": unit * normal_crps(table.volume, mean, std),
        "curvas_crps_published": unit * clipped_crps(table.volume, mean, std),
        "curvas_thresh_dsc": threshold_dice(votes, CURVAS_THRESHOLDS),
        "curvas_staple_dsc": table.dice_of_staple(),
    }


def normal_crps(volume: Array, mean: Array, std: Array) -> Array:
    """Continuous ranked probability score of a normal distribution at `volume`; |volume - mean| where std is 0.

    >>> normal_crps(np.array([1.0, 3.0]), np.array([1.0, 1.0]), np.array([1.0, 0.0])).round(4)
    array([0.2337, 2.    ])
    """
    sure = std == 0
    width = np.where(sure, 1.0, std)
    z = (volume - mean) / width
    score = width * (z * (2 * special.ndtr(z) - 1) + 2 * _density(z) - 1 / math.sqrt(math.pi))
    found: Array = np.where(sure, np.abs(volume - mean), score)
    return found


def clipped_crps(volume: Array, mean: Array, std: Array) -> Array:
    """`normal_crps` as the code of CURVAS computes it; NaN where std is 0.

    The distribution's tails beyond 1 % and 99 % are cut off, and the integral ends 3 standard deviations from the mean:
    however far off a volume is, its score is at most about 3.2 standard deviations.
    """
    with np.errstate(invalid="ignore", divide="ignore"):
        z = np.clip((volume - mean) / std, -REACH, REACH)
    inside = np.clip(z, -CLIPPED, CLIPPED)
    below = _squared(inside) - _squared(np.full_like(inside, -CLIPPED))
    above = _squared(-inside) - _squared(np.full_like(inside, -CLIPPED))
    return np.where(std > 0, std * (below + above + np.abs(z - inside)), math.nan)


def sample_crps(volume: Array, volumes: Array) -> Array:
    """Of the raters' volumes as they are, (class, rater), at `volume`, (class): no distribution is assumed.

    >>> sample_crps(np.array([2.0]), np.array([[1.0, 3.0]]))  # mean distance 1, less half the mean distance of two
    array([0.5])
    """
    apart = np.abs(volumes[:, :, None] - volumes[:, None]).mean((1, 2))
    found: Array = np.abs(volumes - volume[:, None]).mean(1) - apart / 2
    return found


def staple(patterns: Array, counts: Array, raters: int) -> Array:
    """Probability that a voxel is of the class, for each pattern of votes: STAPLE, by expectation maximization.

    Voxels with the same votes have the same probability, so that patterns and how often they come are all it needs.

    patterns: (pattern), a bit for each rater.
    counts: (pattern), voxels.
    """
    chosen = (patterns[:, None] >> np.arange(raters)) & 1 == 1
    weights = counts / counts.sum()
    prior = float((weights @ chosen).mean())
    sensitivity = specificity = np.full(raters, STAPLE_START)
    found = np.full(len(patterns), prior)
    for _ in range(1000):
        with np.errstate(divide="ignore"):
            yes = np.where(chosen, np.log(sensitivity), np.log1p(-sensitivity)).sum(1) + np.log(prior)
            no = np.where(chosen, np.log1p(-specificity), np.log(specificity)).sum(1) + np.log1p(-prior)
        with np.errstate(invalid="ignore"):
            before, found = found, np.nan_to_num(special.expit(yes - no), nan=prior)
        inside, outside = weights * found, weights * (1 - found)
        if inside.sum() > 0:
            sensitivity = np.minimum(inside @ chosen / inside.sum(), 1)
        if outside.sum() > 0:
            specificity = np.minimum(outside @ ~chosen / outside.sum(), 1)
        if np.abs(found - before).max() < 1e-12:
            break
    return found


def threshold_dice(votes: Votes, thresholds: Sequence[float]) -> Array:
    """(class): Dice of p > t against the share of raters > t, averaged over t; NaN where no rater saw the class.

    Where both are empty at a threshold, it counts as 1.
    """
    number, bins = len(votes.raters), votes.joint.shape[2]
    share = np.arange(number + 1) / number
    scores = []
    for threshold in thresholds:
        cut = round(threshold * bins)
        decided, true = votes.joint[:, :, cut:].sum((1, 2)), votes.joint[:, share > threshold].sum((1, 2))
        both = votes.joint[:, share > threshold, cut:].sum((1, 2))
        with np.errstate(invalid="ignore"):
            scores.append(np.where(decided + true > 0, 2 * both / (decided + true), 1.0))
    return np.where(votes.joint[:, 1:].sum((1, 2)) > 0, np.mean(scores, 0), math.nan)


class _Table:
    """The votes of a case, by class."""

    def __init__(self, votes: Votes) -> None:
        self.raters, self.classes = len(votes.raters), len(votes.joint)
        self._of = [votes.place == c for c in range(self.classes)]
        self._votes = votes
        shape = (self.classes, self.raters)
        self.true, self.hits, self.both = np.zeros(shape), np.zeros(shape), np.zeros((*shape, self.raters))
        self.predicted, self.volume = np.zeros(self.classes), np.zeros(self.classes)
        for c in range(self.classes):
            chosen, voxels = self._chosen(c), votes.voxels[self._of[c]]
            self.true[c], self.hits[c] = (voxels[:, i] @ chosen for i in (0, 1))
            self.both[c] = (chosen * voxels[:, :1]).T @ chosen
            self.predicted[c], self.volume[c] = voxels[:, 1].sum(), voxels[:, 2].sum()

    def _chosen(self, c: int) -> Array:
        """(pattern, rater): whether the rater chose the class, as numbers."""
        bits: Array = (self._votes.pattern[self._of[c]][:, None] >> np.arange(self.raters)) & 1
        return bits.astype(np.float64)

    @property
    def dice(self) -> Array:
        """(class, rater), of the decision; NaN if both the decision and the rater's mask are empty."""
        return _pair_dice(self.hits, self.predicted[:, None], self.true)

    def dice_of(self, reference: Callable[[Array], Array]) -> Array:
        """(class): Dice of the decision against voxels that are chosen by the share of raters who chose the class."""
        return np.array([self._against(c, reference(self._chosen(c).mean(1))) for c in range(self.classes)])

    def dice_of_staple(self) -> Array:
        """(class): Dice of the decision against STAPLE, at a probability of 1/2."""
        found = []
        for c in range(self.classes):
            patterns, counts = self._votes.pattern[self._of[c]], self._votes.voxels[self._of[c], 0]
            found.append(self._against(c, staple(patterns, counts, self.raters) >= 0.5))
        return np.array(found)

    def _against(self, c: int, where: Array) -> float:
        counts, predicted, _ = self._votes.voxels[self._of[c]].T
        return float(_dice(predicted[where].sum(), predicted.sum(), counts[where].sum()))

    def consensus_dice(self) -> Array:
        """(class): Dice on the voxels of which all raters say the same."""
        found = []
        for c in range(self.classes):
            share, (counts, predicted, _) = self._chosen(c).mean(1), self._votes.voxels[self._of[c]].T
            inside, agreed = share == 1, (share == 1) | (share == 0)
            found.append(_dice(predicted[inside].sum(), predicted[agreed].sum(), counts[inside].sum()))
        return np.array(found)

    def consensus_confidence(self) -> Array:
        """(class): mean of the probability where all raters see the class, and of 1 - p where none does."""
        found = []
        for c in range(self.classes):
            share, (counts, _, chances) = self._chosen(c).mean(1), self._votes.voxels[self._of[c]].T
            with np.errstate(invalid="ignore"):
                inside, outside = (chances[share == at].sum() / counts[share == at].sum() for at in (1, 0))
            found.append((inside + 1 - outside) / 2)
        return np.array(found)

    def energy_distance(self) -> Array:
        """(class): generalized energy distance of the decision to the raters, with 1 - IoU as the distance."""
        apart = _distance(self.both, self.true[:, :, None], self.true[:, None])
        found: Array = 2 * _distance(self.hits, self.predicted[:, None], self.true).mean(1) - apart.mean((1, 2))
        return found

    def floor_sums(self, bins: int) -> Array:
        """(3, rater, class, bin), as `floor_sums` has them; none of a rater who is alone."""
        sums = np.zeros((3, self.raters, self.classes, bins))
        for c in range(self.classes):
            chosen, counts = self._chosen(c), self._votes.voxels[self._of[c], 0]
            for r in range(self.raters if self.raters > 1 else 0):
                others = (chosen.sum(1) - chosen[:, r]) / (self.raters - 1)
                cells = np.minimum((others * bins).astype(np.int64), bins - 1)
                for i, values in enumerate((counts, counts * others, counts * chosen[:, r])):
                    sums[i, r, c] = np.bincount(cells, values, minlength=bins)
        return sums


def nested_distance(votes: Votes, bins_of_raters: Sequence[Array]) -> Array:
    """(class): generalized energy distance where what is predicted are the sets p >= t, t drawn from 0 to 1.

    Of two such sets one holds the other, so that their IoU is the quotient of their volumes.
    """
    counts = bins_of_raters[0][0]
    volume = _from(counts)[:, 1:]  # within a bin, t is above its lower edge
    true = np.array([bins[2].sum(1) for bins in bins_of_raters])
    hits = np.array([_from(bins[2])[:, 1:] for bins in bins_of_raters])
    to_raters = _distance(hits, volume[None], true[..., None]).mean((0, 2))
    number = volume.shape[1]
    with np.errstate(divide="ignore"):
        inverse = np.where(volume > 0, 1 / np.maximum(volume, 1), 0.0)
    larger = np.cumsum(inverse, 1) - inverse  # sets of lower thresholds, which hold this one
    empty = (volume == 0).sum(1)
    same = (2 * (volume * larger).sum(1) + (volume > 0).sum(1) + empty**2) / number**2
    table = _Table(votes)
    apart = _distance(table.both, table.true[:, :, None], table.true[:, None]).mean((1, 2))
    found: Array = 2 * to_raters - (1 - same) - apart
    return found


def _from(counts: Array) -> Array:
    """(class, edge): sums of all bins from each edge on."""
    total = np.cumsum(counts[:, ::-1], 1)[:, ::-1]
    return np.concatenate([total, np.zeros((len(total), 1))], 1)


def _distance(both: Array, one: Array, other: Array) -> Array:
    """1 - IoU; 0 of two empty sets."""
    union = one + other - both
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.where(union > 0, 1 - both / np.where(union > 0, union, 1), 0.0)


def _dice(both: Any, predicted: Any, true: Any) -> Array:
    """NaN where the class is not there, as everywhere."""
    return np.where(np.asarray(true) > 0, _pair_dice(both, predicted, true), math.nan)


def _pair_dice(both: Any, one: Any, other: Any) -> Array:
    """Return the Dice of two masks from their voxels: 0 if one of the masks is empty, NaN if both are."""
    total = np.asarray(one + other)
    return np.where(total > 0, 2 * both / np.where(total > 0, total, 1), math.nan)


def _nanmean(values: Array) -> Array:
    """Over the last axis; NaN where there is nothing."""
    return torch.from_numpy(np.asarray(values, np.float64)).nanmean(-1).numpy()


def deviation(values: Array) -> Array:
    """Over the first axis, of a sample; NaN of fewer than two."""
    known = ~np.isnan(values)
    number = known.sum(0)
    mean = np.where(known, values, 0).sum(0) / np.maximum(number, 1)
    squares = np.where(known, (values - mean) ** 2, 0).sum(0)
    return np.where(number > 1, np.sqrt(squares / np.maximum(number - 1, 1)), math.nan)


def _density(z: Array) -> Array:
    return np.exp(-(z**2) / 2) / math.sqrt(2 * math.pi)


def _squared(z: Array) -> Array:
    """An antiderivative of the squared normal distribution function."""
    whole = special.ndtr(z)
    found: Array = z * whole**2 + 2 * whole * _density(z) - special.ndtr(math.sqrt(2) * z) / math.sqrt(math.pi)
    return found
