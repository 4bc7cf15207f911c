"""Likelihoods on the CPU by numba: of a temperature, with its first two derivatives, and of what is not there.

Of a temperature, each voxel is taken relative to its true class, so that nothing cancels where all but a few are right.
Voxels are taken in blocks, class by class, so that the loops over them run in vector lanes. As in the sums, indices are
unsigned.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from segcal.kernels.numba_cache import cached_njit
from segcal.kernels.numba_cpu import run_segments, segments_of
from segcal.kernels.numba_math import LANES, OPTIONS, exp_double, inner, jit, log_of, multiply
from segcal.kernels.spec import SMALLEST

VALUE, SLOPE, CURVATURE, WRONG = range(4)
NO_WEIGHTS = np.zeros(0)
BLOCK = np.uint64(512)  # voxels
TOGETHER = 32  # probabilities multiplied before a logarithm is taken; their product stays above 2^-768


def temperature_sums(
    logits: NDArray[Any], labels: NDArray[Any], weights: NDArray[Any], inverse: float, *, threads: int
) -> NDArray[np.float64]:
    """Sums over voxels of the negative log-likelihood of `inverse` times the logits (class, voxel), its first two
    derivatives by it, and the number of voxels that are wrong.

    Labels are class indices (voxel), or zeros and ones (class, voxel) for classes that overlap, each of which counts
    as a voxel by itself. No weights are an empty array.
    """
    classes, voxels = logits.shape
    segments = segments_of(voxels)
    sums = np.zeros((len(segments), 4))
    x, row = _flat(logits)
    y, label_row = (np.ascontiguousarray(labels), 0) if labels.ndim == 1 else _flat(labels)
    weights = np.ascontiguousarray(weights)

    def segment(_: int, s: int) -> None:
        if labels.ndim == 1:
            _exclusive(x, row, classes, y, weights, inverse, *segments[s], sums[s])
        else:
            _overlapping(x, row, classes, y, label_row, weights, inverse, *segments[s], sums[s])

    run_segments(segment, 1, len(segments), threads)
    total: NDArray[np.float64] = sums.sum(0)
    return total


def _flat(array: NDArray[Any]) -> tuple[NDArray[Any], int]:
    """All that lies between the first and the last of an array's numbers, and how far its rows are apart there."""
    if (
        not array.size
        or array.strides[1] != array.itemsize
        or array.strides[0] % array.itemsize
        or array.strides[0] < 0
    ):
        array = np.ascontiguousarray(array)
    row = array.strides[0] // array.itemsize
    length = (len(array) - 1) * row + array.shape[1] if array.size else 0
    return np.lib.stride_tricks.as_strided(array, (length,), (array.itemsize,)), row


@jit
def _exclusive(logits, row, classes, labels, weights, inverse, start, stop, sums):
    own, lead, total, others, first, second = np.empty((6, BLOCK))
    strange, products = np.empty(BLOCK, np.int32), np.zeros(LANES)
    for block in range(np.uint64(start), np.uint64(stop), BLOCK):
        n = min(BLOCK, np.uint64(stop) - block)
        _find_lead(logits, np.uint64(row), classes, labels, block, n, own, lead)
        for v in range(n):
            total[v] = others[v] = first[v] = second[v] = 0.0
            strange[v] = 0
        for k in range(classes):
            at = np.uint64(k) * np.uint64(row) + block
            _add_class(logits, at, k, labels, block, n, inverse, own, lead, total, others, first, second, strange)
        value = slope = curvature = 0.0
        for v in range(n):
            weight = weights[block + v] if weights.size > 0 else 1.0
            part = 1.0 / total[v]
            mean = first[v] * part
            value += weight * (lead[v] * inverse)
            slope += weight * mean
            # Squares are taken from the largest logit: from the true one they would cancel where that is far behind.
            curvature += weight * (second[v] * part - (mean - lead[v]) * (mean - lead[v]))
            # Where the true class leads, its share is 1, and what is left must not be rounded away.
            others[v] = total[v] - 1.0 if lead[v] > 0.0 else others[v]
        sums[VALUE] += value + _logarithms(others, n, weights, block, products)
        sums[SLOPE] += slope
        sums[CURVATURE] += curvature
        for v in range(n):
            sums[WRONG] += strange[v] > 0


@inner
def _find_lead(logits, row, classes, labels, block, n, own, lead):
    """Each voxel's true logit, and by how much the largest is above it."""
    for v in range(n):
        own[v] = logits[np.uint64(labels[block + v]) * row + block + v]
        lead[v] = 0.0
    for k in range(np.uint64(classes)):
        for v in range(n):
            difference = logits[k * row + block + v] - own[v]
            lead[v] = difference if difference > lead[v] else lead[v]


@inner
def _add_class(logits, at, k, labels, block, n, inverse, own, lead, total, others, first, second, strange):
    """Add the share of one class in each voxel, relative to the largest, also by itself where it is not the true one;
    times its logit less the true one; times the square of its logit less the largest."""
    for v in range(n):
        difference = logits[at + v] - own[v]
        behind = difference - lead[v]
        share = exp_double(behind * inverse)
        other = labels[block + v] != k
        total[v] += share
        others[v] += share if other else 0.0
        first[v] += share * difference
        second[v] += share * behind * behind
        strange[v] += other & (difference >= 0.0)


@inner
def _logarithms(q, n, weights, block, products):
    """Weighted sum of log(1 + q); without weights, by few logarithms."""
    if weights.size == 0:
        multiply(q, n, products)
        return log_of(products)
    total = 0.0
    for v in range(n):
        total += weights[block + v] * math.log1p(q[v])
    return total


@jit
def _overlapping(logits, row, classes, labels, label_row, weights, inverse, start, stop, sums):
    small, products = np.empty(BLOCK), np.zeros(LANES)
    for k in range(np.uint64(classes)):
        for block in range(np.uint64(start), np.uint64(stop), BLOCK):
            n = min(BLOCK, np.uint64(stop) - block)
            x, y = k * np.uint64(row) + block, k * np.uint64(label_row) + block
            value = slope = curvature = 0.0
            wrong = 0
            for v in range(n):
                weight = weights[block + v] if weights.size > 0 else 1.0
                side = np.float64(logits[x + v])
                side = -side if labels[y + v] > 0 else side  # the larger, the worse
                scaled = side * inverse
                small[v] = exp_double(-abs(scaled))
                missing = (1.0 if scaled > 0.0 else small[v]) / (1.0 + small[v])
                value += weight * (scaled if scaled > 0.0 else 0.0)
                slope += weight * missing * side
                curvature += weight * missing * (1.0 - missing) * side * side
                wrong += 1 if side >= 0.0 else 0
            sums[VALUE] += value + _logarithms(small, n, weights, block, products)
            sums[SLOPE] += slope
            sums[CURVATURE] += curvature
            sums[WRONG] += wrong


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


@cached_njit(fastmath={"reassoc", "nsz"}, **OPTIONS)
def _absent(p, labels, own):
    total = 0.0
    for first in range(0, p.shape[0], TOGETHER):
        some, true = p[first : first + TOGETHER], labels[first : first + TOGETHER]
        product = 1.0
        for v in range(some.shape[0]):
            product *= 1.0 if true[v] == own else max(1.0 - some[v], SMALLEST)
        total -= math.log(product)
    return total
