"""Likelihoods on the CPU by numba: of a temperature, with its first two derivatives, and of what is not there.

Of a temperature, each voxel is taken relative to its true class, so that nothing cancels where all but a few are right.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray

from segcal.kernels.numba_cpu import run_segments, segments_of
from segcal.kernels.spec import SMALLEST

VALUE, SLOPE, CURVATURE, WRONG = range(4)
NO_WEIGHTS = np.zeros(0)
TOGETHER = 32  # probabilities multiplied before a logarithm is taken; their product stays above 2^-768


def temperature_sums(
    logits: NDArray[Any], labels: NDArray[Any], weights: NDArray[Any], inverse: float, *, threads: int
) -> NDArray[np.float64]:
    """Sums over voxels of the negative log-likelihood of `inverse` times the logits (class, voxel), its first two
    derivatives by it, and the number of voxels that are wrong.

    Labels are class indices (voxel), or zeros and ones (class, voxel) for classes that overlap, each of which counts
    as a voxel by itself. No weights are an empty array.
    """
    segments = segments_of(logits.shape[1])
    sums = np.zeros((len(segments), 4))
    one = _exclusive if labels.ndim == 1 else _overlapping

    def segment(_: int, s: int) -> None:
        one(logits, labels, weights, inverse, *segments[s], sums[s])

    run_segments(segment, 1, len(segments), threads)
    total: NDArray[np.float64] = sums.sum(0)
    return total


@njit(nogil=True, cache=True, error_model="numpy")
def _exclusive(logits, labels, weights, inverse, start, stop, sums):
    classes = logits.shape[0]
    for v in range(start, stop):
        true = labels[v]
        own = np.float64(logits[true, v])
        lead = 0.0  # of the largest logit
        for k in range(classes):
            if k != true:
                lead = max(lead, logits[k, v] - own)
        top = lead * inverse
        others = first = second = 0.0
        right = True
        for k in range(classes):
            if k != true:
                difference = logits[k, v] - own
                share = math.exp(difference * inverse - top)
                others += share
                first += share * difference
                second += share * (difference - lead) ** 2
                right = right and difference < 0
        own_share = math.exp(-top)  # of the true class, whose difference is zero
        total = own_share + others
        mean = first / total
        second += own_share * lead * lead
        weight = weights[v] if weights.size else 1.0
        # Where the true class leads, log1p keeps what log would round away.
        sums[VALUE] += weight * (top + math.log(total) if top > 0 else math.log1p(others))
        sums[SLOPE] += weight * mean
        # Squares are taken from the largest logit: from the true one they would cancel where that is far behind.
        sums[CURVATURE] += weight * (second / total - (mean - lead) ** 2)
        sums[WRONG] += not right


@njit(nogil=True, cache=True, error_model="numpy")
def _overlapping(logits, labels, weights, inverse, start, stop, sums):
    for k in range(logits.shape[0]):
        for v in range(start, stop):
            weight = weights[v] if weights.size else 1.0
            side = np.float64(-logits[k, v]) if labels[k, v] > 0 else np.float64(logits[k, v])  # the larger, the worse
            scaled = side * inverse
            small = math.exp(-abs(scaled))
            missing = 1 / (1 + small) if scaled > 0 else small / (1 + small)
            sums[VALUE] += weight * (max(scaled, 0.0) + math.log1p(small))
            sums[SLOPE] += weight * missing * side
            sums[CURVATURE] += weight * missing * (1 - missing) * side * side
            sums[WRONG] += side >= 0


def absent_log_loss(probabilities: NDArray[Any], labels: NDArray[Any], *, threads: int) -> NDArray[np.float64]:
    """For each class of (class, voxel) probabilities, the sum of -log(1 - p) over the voxels that are not of it.

    Labels are class indices (voxel), or zeros and ones (class, voxel).
    """
    segments = segments_of(probabilities.shape[1])
    sums = np.zeros((len(segments), len(probabilities)))
    exclusive = labels.ndim == 1

    def segment(_: int, s: int) -> None:
        start, stop = segments[s]
        for c, row in enumerate(probabilities):
            own = labels if exclusive else labels[c]
            sums[s, c] = _absent(row[start:stop], own[start:stop], c if exclusive else 1)

    run_segments(segment, 1, len(segments), threads)
    total: NDArray[np.float64] = sums.sum(0)
    return total


@njit(nogil=True, cache=True, error_model="numpy", fastmath={"reassoc", "nsz"})
def _absent(p, labels, own):
    total = 0.0
    for first in range(0, p.shape[0], TOGETHER):
        some, true = p[first : first + TOGETHER], labels[first : first + TOGETHER]
        product = 1.0
        for v in range(some.shape[0]):
            product *= 1.0 if true[v] == own else max(1.0 - some[v], SMALLEST)
        total -= math.log(product)
    return total
