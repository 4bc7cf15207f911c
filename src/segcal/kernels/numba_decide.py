"""Decisions by a threshold for each class, on the CPU by numba; see `segcal.evaluation.rules`."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray

from segcal.kernels.numba_cpu import run_segments, segments_of

Array = NDArray[Any]


def choose(probabilities: Array, cuts: tuple[Array, Array, Array], bins: int, *, threads: int) -> tuple[Array, Array]:
    """The class of each voxel, and of each class (3, class) the voxels, their confidence, and (first) the contested.

    Cuts are those of all classes but the first, which is the background.
    """
    classes, voxels = probabilities.shape
    segments = segments_of(voxels)
    sums = np.zeros((len(segments), 3, classes))
    places = np.empty(voxels, np.uint8 if classes <= 256 else np.int32)

    def segment(_: int, s: int) -> None:
        _choose(probabilities, *cuts, bins, *segments[s], places, sums[s])

    run_segments(segment, 1, len(segments), threads)
    return places, sums.sum(0)


@njit(nogil=True, cache=True, error_model="numpy")
def _choose(probabilities, lowest, slope, offset, bins, start, stop, places, sums):
    for v in range(start, stop):
        chosen = wanted = 0
        best = own = 0.0
        for c in range(1, probabilities.shape[0]):
            p = np.float64(probabilities[c, v])
            if p * bins >= lowest[c - 1]:
                score = slope[c - 1] * p + offset[c - 1]
                wanted += 1
                if wanted == 1 or score > best:
                    chosen, best, own = c, score, p
        places[v] = chosen
        if wanted > 0:
            sums[0, chosen] += 1
            sums[1, chosen] += own
        if wanted > 1:
            sums[2, 0] += 1
