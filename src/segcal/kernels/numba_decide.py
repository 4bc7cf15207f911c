"""Decisions on the CPU by numba: by a threshold for each class (see `segcal.evaluation.rules`), or for the largest."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from segcal.kernels.numba_cache import cached_njit
from segcal.kernels.numba_cpu import run_segments, segments_of
from segcal.kernels.numba_math import OPTIONS

Array = NDArray[Any]


def choose(probabilities: Array, lowest: Array, factor: Array, bins: int, *, threads: int) -> tuple[Array, Array]:
    """The class of each voxel, and of each class (3, class) the voxels, their confidence, and (first) the contested.

    lowest, factor: of all classes but the first, which is the background.
    """
    classes, voxels = probabilities.shape
    segments = segments_of(voxels)
    sums = np.zeros((len(segments), 3, classes))
    places = np.empty(voxels, np.uint8 if classes <= 256 else np.int32)

    def segment(_: int, s: int) -> None:
        _choose(probabilities, lowest, factor, bins, *segments[s], places, sums[s])

    run_segments(segment, 1, len(segments), threads)
    return places, sums.sum(0)


@cached_njit(**OPTIONS)
def _choose(probabilities, lowest, factor, bins, start, stop, places, sums):
    for v in range(start, stop):
        chosen = wanted = 0
        best = own = 0.0
        for c in range(1, probabilities.shape[0]):
            p = np.float64(probabilities[c, v])
            if p * bins >= lowest[c - 1]:
                score = factor[c - 1] * p
                wanted += 1
                if wanted == 1 or score > best:
                    chosen, best, own = c, score, p
        places[v] = chosen
        if wanted > 0:
            sums[0, chosen] += 1
            sums[1, chosen] += own
        if wanted > 1:
            sums[2, 0] += 1


BLOCK = 1024  # voxels


def same_largest(before: Array, after: Array, *, threads: int) -> bool:
    """Whether the largest class of every voxel, the first of equals, is the same in both of (class, voxel)."""
    segments = segments_of(before.shape[1])
    different = np.zeros(len(segments), np.bool_)

    def segment(_: int, s: int) -> None:
        different[s] = _differ(before, after, *segments[s])

    run_segments(segment, 1, len(segments), threads)
    return not different.any()


@cached_njit(**OPTIONS)
def _differ(before, after, start, stop):
    one, two = np.empty(BLOCK, np.int32), np.empty(BLOCK, np.int32)
    best = np.empty(BLOCK, before.dtype)
    for first in range(start, stop, BLOCK):
        n = min(BLOCK, stop - first)
        _largest(before[:, first : first + n], n, best, one)
        _largest(after[:, first : first + n], n, best, two)
        different = 0
        for v in range(n):
            different |= one[v] ^ two[v]
        if different:
            return True
    return False


@cached_njit(**OPTIONS)
def _largest(x, n, best, found):
    for v in range(n):
        best[v] = x[0, v]
        found[v] = 0
    for c in range(1, x.shape[0]):
        row = x[c]
        for v in range(n):
            found[v] = np.int32(c) if row[v] > best[v] else found[v]
            best[v] = row[v] if row[v] > best[v] else best[v]
