"""Dice against the raters of a case and between them, and the floor of calibration errors, from counts of their votes.

Definitions are in docs/reference/numbers.md.
"""

from __future__ import annotations

import math
import warnings
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from segcal.binning import Binning
from segcal.evaluation.rated import Votes
from segcal.metrics import ace, ece, mce
from segcal.statistics import BinStatistics

Array = NDArray[Any]
ERRORS = {"ace": ace, "ece": ece, "mce": mce}


def numbers_of_votes(votes: Votes) -> dict[str, Array]:
    """Return the number of raters and the Dice scores of a case by metric, each an array (class)."""
    number, classes = len(votes.raters), votes.classes
    pairs = [(a, b) for a in range(number) for b in range(a + 1, number)]
    each, between, majority = np.zeros((classes, number)), np.zeros((classes, len(pairs))), np.zeros(classes)
    for c in range(classes):
        chosen, counts, decided = votes.of_class(c)
        each[c] = _pair_dice(decided @ chosen, decided.sum(), counts @ chosen)
        both = (chosen * counts[:, None]).T @ chosen
        between[c] = [_pair_dice(both[a, b], both[a, a], both[b, b]) for a, b in pairs]
        most = chosen.mean(1) > 0.5
        if counts[most].sum() > 0:
            majority[c] = _pair_dice(decided[most].sum(), decided.sum(), counts[most].sum())
        else:
            majority[c] = math.nan
    return {
        "raters": np.full(classes, float(number)),
        "dice_each": _nanmean(each),
        "dice_spread": deviation(each.T),
        "dice_between": _nanmean(between),
        "dice_majority": majority,
    }


def floor_sums(votes: Votes, bins: int) -> BinStatistics:
    """(rater, class, bin): what is predicted is the mean of the other raters, the labels are those of the rater.

    A single rater has no floor: all sums are 0.
    """
    number = len(votes.raters)
    sums = np.zeros((3, number, votes.classes, bins))
    for c in range(votes.classes):
        chosen, counts, _ = votes.of_class(c)
        for r in range(number if number > 1 else 0):
            others = (chosen.sum(1) - chosen[:, r]) / (number - 1)
            cells = np.minimum((others * bins).astype(np.int64), bins - 1)
            for i, values in enumerate((counts, counts * others, counts * chosen[:, r])):
                sums[i, r, c] = np.bincount(cells, values, minlength=bins)
    count, confidence, labels = torch.from_numpy(sums).unbind()
    return BinStatistics(count, confidence, labels, Binning(bins))


def floor_errors(stats: BinStatistics) -> dict[str, Array]:
    """Calibration errors of each class, averaged over raters; NaN where there is one rater alone."""
    return {metric: _nanmean(error(stats).numpy().T) for metric, error in ERRORS.items()}


def _pair_dice(both: Any, one: Any, other: Any) -> Array:
    """Return the Dice of two masks from their voxels: 0 if one of the masks is empty, NaN if both are."""
    total = np.asarray(one + other)
    return np.where(total > 0, 2 * both / np.where(total > 0, total, 1), math.nan)


def _nanmean(values: Array) -> Array:
    """Over the last axis; NaN where there is nothing."""
    return torch.from_numpy(np.asarray(values, np.float64)).nanmean(-1).numpy()


def deviation(values: Array) -> Array:
    """Over the first axis, of a sample; NaN of fewer than two."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # numpy warns of fewer than two
        return np.asarray(np.nanstd(values, axis=0, ddof=1))
