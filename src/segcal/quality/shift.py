"""Cases unlike those that promises were learned from, which the promises do not cover.

A case is unlike the reference where its summaries lie farther from the middle of all than those of nearly every known
case: the distance is that of Mahalanobis over known cases and the new one together, the largest over classes. Its rank
among the known is a p-value: of cases like the reference, no more than a share p of them has one of p or less, whatever
the distribution. A cohort is unlike the reference where the distribution of a summary is another (test of Kolmogorov
and Smirnov, over patients, corrected by Holm for all summaries and classes), or where too many of its cases are.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from segcal.quality.conformal import standardized

Array = NDArray[Any]

CASE_LEVEL = 0.05  # share of usual cases that are called unlike the reference
COHORT_LEVEL = 0.01  # share of usual cohorts
_PENALTY = 0.05  # keeps summaries that nearly depend on each other from standing out by rounding


def p_values(reference: Array, weights: Array, new: Array) -> Array:
    """Of each new case (case, class, summary): the share of all, itself included, that lie as far from the middle."""
    return np.array([_p_value(reference, weights, case) for case in new])


def _p_value(reference: Array, weights: Array, case: Array) -> float:
    rows, all_weights = np.concatenate([reference, case[None]]), np.append(weights, 1.0)
    distances = np.max([_distances(rows[:, c], all_weights) for c in range(rows.shape[1])], axis=0)
    return float(all_weights @ (distances >= distances[-1] * (1 - 1e-9)) / all_weights.sum())


def _distances(rows: Array, weights: Array) -> Array:
    centered = standardized(rows, weights)
    covariance = (centered * weights[:, None]).T @ centered / weights.sum() + _PENALTY * np.eye(rows.shape[1])
    squared: Array = np.einsum("ij,ij->i", centered @ np.linalg.inv(covariance), centered)
    return squared


class Moved(NamedTuple):
    """A summary of a class whose distribution is another than in the reference."""

    class_index: int
    summary: int
    p: float
    """Corrected for all summaries and classes."""
    higher: bool


def moved_summaries(reference: Array, new: Array, *, level: float = COHORT_LEVEL) -> list[Moved]:
    """Which summaries of (patient, class, summary) are distributed otherwise, the surest first."""
    tests = []
    for c in range(reference.shape[1]):
        for f in range(reference.shape[2]):
            old, fresh = reference[:, c, f], new[:, c, f]
            if np.ptp(np.concatenate([old, fresh])) > 0:
                p = float(stats.ks_2samp(old, fresh, method="asymp").pvalue)
                tests.append(Moved(c, f, p, bool(np.median(fresh) > np.median(old))))
    tests.sort(key=lambda test: test.p)
    found, worst = [], 0.0
    for i, test in enumerate(tests):  # Holm
        worst = max(worst, min(1.0, test.p * (len(tests) - i)))
        if worst > level:
            break
        found.append(test._replace(p=worst))
    return found


def case_level(patients: int) -> float:
    """Share of usual cases that are called unlike a reference of so many patients: with few, no smaller one is seen.

    >>> case_level(60), case_level(9)
    (0.05, 0.1)
    """
    return max(CASE_LEVEL, 1 / (patients + 1))


def too_many_unlike(unlike: int, cases: int, usual: float, *, level: float = COHORT_LEVEL) -> bool:
    """Whether more cases are unlike the reference than chance would show where `usual` is the share to be expected."""
    return bool(stats.binom.sf(unlike - 1, cases, usual) <= level) if unlike else False
