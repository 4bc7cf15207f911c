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

PENALTY = 1.0  # of standardized coefficients, relative to the patients: each is halved, or more where features agree


class Predicted(NamedTuple):
    """A prediction, and the ends of its interval (infinite where all values conform)."""

    value: float
    low: float
    high: float


@dataclass(frozen=True, eq=False)
class Conformal:
    """Known cases: (case, feature) summaries, the number to predict, and who the patient is."""

    features: Array
    truth: Array
    patients: Array

    def predict(self, features: Array, level: float) -> Predicted:
        """The number of a new patient's case, and the interval that holds it with at least this probability."""
        rows, weights = np.vstack([self.features, features]), np.append(patient_weights(self.patients), 0.0)
        value = float(_fitted(rows, weights, np.append(self.truth, 0.0))[-1])
        weights[-1] = 1.0
        if 1 / weights.sum() > 1 - level + 1e-12:
            return Predicted(value, -math.inf, math.inf)  # too few patients: even the worst value conforms
        # With y for the new case the residuals are a + b y: those of the known truth, and of a 1 at the new case.
        known, last = np.append(self.truth, 0.0), np.append(np.zeros(len(self.truth)), 1.0)
        a, b = known - _fitted(rows, weights, known), last - _fitted(rows, weights, last)
        # A case stands out as much as the new one where |a + b y| crosses; between crossings nothing changes.
        with np.errstate(divide="ignore", invalid="ignore"):
            crossings = np.concatenate([(a[-1] - a[:-1]) / (b[:-1] - b[-1]), -(a[-1] + a[:-1]) / (b[:-1] + b[-1])])
        crossings = np.unique(crossings[np.isfinite(crossings)])
        sizes = np.abs(a[:, None] + b[:, None] * crossings)
        conforming = weights @ (sizes >= sizes[-1] * (1 - 1e-9) - 1e-12) / weights.sum()
        kept = crossings[conforming > 1 - level + 1e-12]
        if not len(kept):  # all known residuals are the same
            return Predicted(value, value, value)
        return Predicted(value, float(kept[0]), float(kept[-1]))


def patient_weights(patients: Array) -> Array:
    """Of each case: one for its patient, in equal parts for the patient's cases.

    >>> patient_weights(np.array([7, 7, 8])).tolist()
    [0.5, 0.5, 1.0]
    """
    _, where, number = np.unique(patients, return_inverse=True, return_counts=True)
    weights: Array = 1 / number[where]
    return weights


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


def _fitted(features: Array, weights: Array, truth: Array) -> Array:
    """What a weighted ridge regression with an intercept makes of the truth."""
    design = np.column_stack([np.ones(len(features)), standardized(features, weights)])
    penalty = np.full(design.shape[1], PENALTY * weights.sum())
    penalty[0] = 0
    weighted = design * weights[:, None]
    found: Array = design @ np.linalg.solve(design.T @ weighted + np.diag(penalty), weighted.T @ truth)
    return found
