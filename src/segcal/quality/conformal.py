"""Intervals that hold the truth as often as they promise, whatever its distribution: conformal prediction.

A ridge regression predicts a number of a case (its Dice, say) from its summaries. Full conformal prediction asks of
each value that the new case could have whether it would stand out: the regression is fitted to the known cases
and the new one with that value, and the value is kept unless too few residuals are as large as the new one's. That
holds the promised coverage exactly if patients are exchangeable, and uses every patient for the fit and for the
interval alike, where a split would give half of them away (Vovk, Gammerman and Shafer: Algorithmic Learning in a Random
World, 2005). A patient counts once, however many cases it has: each of its cases has an equal part of that (Lee, Barber
and Willett: Distribution-free inference with hierarchical data, 2023).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

PENALTY = 0.1  # of the standardized coefficients, in patients' worth of each hundredth of them


class Predicted(NamedTuple):
    """A prediction, and the ends of its interval (infinite where all values conform)."""

    value: float
    low: float
    high: float


@dataclass(frozen=True, eq=False)
class Conformal:
    """Known cases: (case, feature) summaries, the number to predict, the scale of its errors, and who the patient is.

    Scales say in which cases larger errors are to be expected; they must come from the summaries alone.
    """

    features: Array
    truth: Array
    scale: Array
    patients: Array

    def predict(self, features: Array, scale: float, level: float) -> Predicted:
        """The number of a new patient's case, and the interval that holds it with at least this probability."""
        value = float(_smoother(np.vstack([self.features, features]), self._weights(new=0.0))[-1, :-1] @ self.truth)
        weights = self._weights(new=1.0)
        hat = _smoother(np.vstack([self.features, features]), weights)
        # The residuals with y for the new case: (1 - H)(truth, y) = a + b y.
        rest = np.eye(len(weights)) - hat
        scales = np.append(self.scale, scale)
        a, b = rest[:, :-1] @ self.truth / scales, rest[:, -1] / scales
        with np.errstate(divide="ignore", invalid="ignore"):
            crossings = np.concatenate([(a[-1] - a[:-1]) / (b[:-1] - b[-1]), -(a[-1] + a[:-1]) / (b[:-1] + b[-1])])
        crossings = crossings[np.isfinite(crossings)]
        sizes = np.abs(a[:, None] + b[:, None] * crossings)
        tied = 1e-9 * (1 + sizes[-1])
        conforming = weights @ (sizes >= sizes[-1] - tied) / weights.sum()
        kept = crossings[conforming > 1 - level + 1e-12]
        if weights[-1] / weights.sum() > 1 - level + 1e-12 or not len(kept):
            return Predicted(value, -math.inf, math.inf)
        return Predicted(value, float(kept.min()), float(kept.max()))

    def _weights(self, new: float) -> Array:
        """One for each patient, in equal parts for its cases."""
        _, where, number = np.unique(self.patients, return_inverse=True, return_counts=True)
        return np.append(1 / number[where], new)


def fewest_patients(level: float) -> int:
    """With fewer, no interval of this level is finite.

    >>> fewest_patients(0.9), fewest_patients(0.95)
    (9, 19)
    """
    return math.ceil(1 / (1 - level) - 1e-9) - 1


def standardized(features: Array, weights: Array) -> Array:
    """Features with weighted mean 0 and deviation 1; those that never change are 0."""
    mean = weights @ features / weights.sum()
    deviation = np.sqrt(weights @ (features - mean) ** 2 / weights.sum())
    steady = deviation < 1e-9 * (1 + np.abs(mean))
    return np.where(steady, 0.0, (features - mean) / np.where(steady, 1.0, deviation))


def _smoother(features: Array, weights: Array) -> Array:
    """H of the ridge regression with an intercept: fitted values are H @ truth."""
    design = np.column_stack([np.ones(len(features)), standardized(features, weights)])
    penalty = np.full(design.shape[1], PENALTY * weights.sum())
    penalty[0] = 0
    weighted = design * weights[:, None]
    found: Array = design @ np.linalg.solve(design.T @ weighted + np.diag(penalty), weighted.T)
    return found
