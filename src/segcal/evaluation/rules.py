"""From probabilities to decisions, by a threshold for each class. All in numpy, as the sums are.

A voxel is wanted by every class whose probability reaches the class's threshold. Where classes overlap, that is the
decision. Of exclusive classes the one with the largest multiple of its probability gets it, and the background what
nobody wants.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from segcal.evaluation.options import Options
from segcal.evaluation.voxels import region_values
from segcal.kernels.numba_decide import choose
from segcal.volumes.averaging import sigmoid, softmax

Array = NDArray[Any]
BLOCK = 1 << 15  # voxels that are decided together, in the cache


@dataclass(frozen=True, eq=False)
class Cuts:
    """What a voxel must reach to be of each class but the background, (class,) float64.

    lowest: times the number of bins: a class wants a voxel where p * bins >= lowest; infinite: it wants none. The
        product of a float32 and 1,200 is exact in float64, so that decisions agree with bins on every edge.
    factor: an exclusive voxel goes to the class with the largest factor * p.
    """

    lowest: Array
    factor: Array

    @staticmethod
    def at(threshold: float, classes: int, bins: int) -> Cuts:
        """One threshold for all; the most probable class gets a voxel."""
        lowest = threshold * bins
        near = round(lowest)
        lowest = near if abs(near - lowest) < 1e-9 * bins else lowest  # 0.7 means an edge, as 840 of 1,200 bins is one
        return Cuts(np.full(classes, float(lowest)), np.ones(classes))

    @staticmethod
    def at_bins(places: Array, bins: int) -> Cuts:
        """At these bins; a voxel goes to the class whose threshold it exceeds by the largest factor."""
        lowest = np.where(places >= bins, np.inf, places).astype(np.float64)
        return Cuts(lowest, bins / np.maximum(places, 0.5))


class Chosen(NamedTuple):
    """What was decided of some voxels.

    decided: the class of each (voxel), 0: background; or yes or no (class, voxel), without the background.
    sums: (2, class) without the background: voxels, and the sum of their probabilities.
    contested: voxels that several classes wanted.
    """

    decided: Array
    sums: Array
    contested: int


def probabilities_of(values: Array, options: Options) -> Array:
    """What `measure_voxels` measures of (class, voxel) values: probabilities of classes, or of regions."""
    overlapping = options.sigmoid or len(values) == 1
    if options.logits:
        values = sigmoid(values) if overlapping else softmax(values)
    return region_values(values, options) if overlapping or options.regions is not None else values


def choose_classes(probabilities: Array, cuts: Cuts, bins: int, *, threads: int = 1) -> Chosen:
    """Decisions on exclusive classes (class, voxel), the background first."""
    places, sums = choose(probabilities, cuts.lowest, cuts.factor, bins, threads=threads)
    return Chosen(places, sums[:2, 1:], int(sums[2, 0]))


def choose_masks(probabilities: Array, cuts: Cuts, bins: int) -> Chosen:
    """Decisions on each (class, voxel) by itself; none of them is the background's."""
    masks = np.empty(probabilities.shape, bool)
    sums = np.zeros((2, len(masks)))
    for c, (row, lowest) in enumerate(zip(probabilities, cuts.lowest, strict=True)):
        for start in range(0, len(row), BLOCK):
            p = row[start : start + BLOCK].astype(np.float64)
            wanted = p * bins >= lowest
            masks[c, start : start + BLOCK] = wanted
            sums[:, c] += wanted.sum(), p[wanted].sum()
    return Chosen(masks, sums, 0)
