"""Connected components of a predicted and a true mask: how large they are, how sure, and which of them overlap."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from segcal.errors import ConfigError, is_number, one_of

Array = NDArray[Any]
Confidence = Literal["max", "mean"]
CONNECTIVITIES = {6: 1, 18: 2, 26: 3}
"""Neighbors of a voxel, and along how many axes they may differ: by faces, edges or corners, too."""
_SIZE = re.compile(r"(?P<number>[0-9.eE+-]+) *(?P<unit>voxels?|mm3|mm\u00b3)?")


@dataclass(frozen=True)
class Rules:
    """What counts as a lesion, and when a predicted one is real.

    threshold: a voxel belongs to a predicted lesion where the probability of the class is at least this.
    confidence: of a predicted lesion: the largest ("max") or the mean ("mean") probability of its voxels.
    overlap: a predicted and a true lesion match where their intersection over union is at least this; 0: where they
        share a voxel.
    connectivity: 6, 18 or 26 neighbors of a voxel are connected with it.
    min_size: smaller lesions are left out, as 5 voxels or, as text, "10mm3".

    >>> Rules(min_size="10mm3").least_voxels(voxel_mm3=4.0)
    3
    """

    threshold: float = 0.5
    confidence: Confidence = "max"
    overlap: float = 0.0
    connectivity: int = 26
    min_size: float | str = 0

    def __post_init__(self) -> None:
        if not (is_number(self.threshold) and 0 < self.threshold <= 1):
            raise ConfigError(f"threshold must be a number above 0 and at most 1; got {self.threshold!r}.")
        if not (is_number(self.overlap) and 0 <= self.overlap <= 1):
            raise ConfigError(f"overlap must be a number from 0 to 1; got {self.overlap!r}.")
        one_of("confidence", self.confidence, ("max", "mean"))
        one_of("connectivity", self.connectivity, tuple(CONNECTIVITIES))
        self._least()

    def _least(self) -> tuple[float, str]:
        """The smallest size, and its unit."""
        match = _SIZE.fullmatch(str(self.min_size).strip())
        try:
            number = float(match["number"]) if match else math.nan
        except ValueError:
            number = math.nan
        if match is None or not 0 <= number < math.inf:
            raise ConfigError(f"min_size must be a number of voxels, as 5, or of mm3, as 10mm3; got {self.min_size!r}.")
        return number, "mm3" if (match["unit"] or "").startswith("mm") else "voxels"

    def least_voxels(self, voxel_mm3: float) -> int:
        """The voxels that a lesion must have; ConfigError where mm3 are asked for and the file does not tell them."""
        number, unit = self._least()
        if unit == "mm3" and math.isnan(voxel_mm3):
            raise ConfigError(
                f"min_size {self.min_size} needs files that tell the size of a voxel, as NIfTI; this one does not. "
                f"Give it in voxels."
            )
        return math.ceil(number / (voxel_mm3 if unit == "mm3" else 1))


class Components(NamedTuple):
    """The components of a mask: voxels and center of each, (component,) and (component, axis)."""

    voxels: Array
    center: Array


class Matched(NamedTuple):
    """What two masks have in common.

    predicted, true: their components.
    confidence: of the predicted ones.
    pairs: (2, pair): places of a predicted and a true component that match.
    """

    predicted: Components
    true: Components
    confidence: Array
    pairs: Array


def match_components(probabilities: Array, truth: Array, rules: Rules, *, least_voxels: int = 0) -> Matched:
    """Components of the probabilities that reach the threshold, those of the truth, and which of them match.

    Components below `least_voxels` are left out on both sides. So is a predicted one that overlaps no true one but
    such: it is neither right nor wrong. They come in the order of their centers.
    """
    from scipy import ndimage

    mask = probabilities >= rules.threshold
    found = ndimage.find_objects((mask | (truth != 0)).view(np.uint8))
    if not found:
        nothing = Components(np.zeros(0, np.int64), np.zeros((0, truth.ndim)))
        return Matched(nothing, nothing, np.zeros(0), np.zeros((2, 0), np.int64))
    box = found[0]  # lesions fill a small part of a volume
    predicted, number = label_components(mask[box], rules.connectivity)
    true, true_number = label_components(truth[box] != 0, rules.connectivity)
    corner = np.array([side.start for side in box])
    (own, places), (real, real_places) = (
        _components(*labeled, corner) for labeled in ((predicted, number), (true, true_number))
    )
    confidence = np.empty(number)
    confidence[places] = _confidences(probabilities[box], predicted, number, rules.confidence)
    both = (predicted > 0) & (true > 0)
    pairs = np.array([places[predicted[both] - 1], real_places[true[both] - 1]])
    shared, voxels = np.unique(pairs, axis=1, return_counts=True)
    large, real_large = own.voxels >= least_voxels, real.voxels >= least_voxels
    touches, touches_large = np.zeros(number, bool), np.zeros(number, bool)
    touches[shared[0]] = True
    touches_large[shared[0][real_large[shared[1]]]] = True
    large &= touches_large | ~touches
    union = own.voxels[shared[0]] + real.voxels[shared[1]] - voxels
    match = (voxels >= rules.overlap * union) & large[shared[0]] & real_large[shared[1]]
    left, real_left = np.cumsum(large) - 1, np.cumsum(real_large) - 1
    return Matched(
        Components(own.voxels[large], own.center[large]),
        Components(real.voxels[real_large], real.center[real_large]),
        confidence[large],
        np.array([left[shared[0][match]], real_left[shared[1][match]]]),
    )


def label_components(mask: Array, connectivity: int) -> tuple[Array, int]:
    """The number of each voxel's component, from 1 on, 0 outside; and how many there are.

    By cc3d where it is installed (`segcal[lesions]`), in a third to an eighth of scipy's time; numbers may differ.
    """
    try:
        import cc3d
    except ImportError:
        from scipy import ndimage

        labels, number = ndimage.label(mask, ndimage.generate_binary_structure(mask.ndim, CONNECTIVITIES[connectivity]))
    else:
        find: Any = cc3d.connected_components  # its types know no whole number that is computed
        # cc3d 4.1.1 raises RuntimeError for some flat masks: an axis of one voxel gets a second, empty one.
        padded = np.pad(mask, [(0, int(length == 1)) for length in mask.shape])
        labels, number = find(np.ascontiguousarray(padded), connectivity=connectivity, return_N=True)
        labels = labels[tuple(map(slice, mask.shape))]
    return labels, int(number)


def _components(labels: Array, number: int, corner: Array) -> tuple[Components, Array]:
    """Of numbered voxels in a box with this corner, in the order of their centers; and the place of each number."""
    where = np.nonzero(labels)
    names = labels[where]
    voxels = np.bincount(names, minlength=number + 1)[1:]
    center = np.stack([np.bincount(names, axis, minlength=number + 1)[1:] / voxels for axis in where], 1) + corner
    order = np.lexsort((voxels, *center.T[::-1]))
    places = np.empty(number, np.int64)
    places[order] = np.arange(number)
    return Components(voxels[order], center[order]), places


def _confidences(probabilities: Array, labels: Array, number: int, kind: Confidence) -> Array:
    where = labels > 0
    names, values = labels[where] - 1, probabilities[where].astype(np.float64)
    if kind == "mean":
        voxels = np.bincount(names, minlength=number)
        return np.bincount(names, values, minlength=number) / np.maximum(voxels, 1)
    largest = np.zeros(number)
    np.maximum.at(largest, names, values)
    return largest
