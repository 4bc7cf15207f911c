"""What is doubtful about a case that can be measured all the same, and values that are not what they are said to be.

A doubt is a word that is kept with the sums of its case; a cohort's notes name all cases of a doubt.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from segcal.errors import RangeError
from segcal.volumes.grids import BARE_HEADER, CONTRADICTING_HEADERS

Array = NDArray[Any]

HARD_DECISIONS = "hard decisions"
SAVE_PROBABILITIES = "give the probabilities (nnU-Net: --save_probabilities)"
MEANINGS = {
    HARD_DECISIONS: "predictions hold only zeros and ones. These are decisions, not probabilities: their calibration "
    f"errors say little. If the network has probabilities, {SAVE_PROBABILITIES}.",
    BARE_HEADER: "one of the headers of prediction and label says nothing of the place, so that the voxels are taken "
    "to lie in the same order.",
    CONTRADICTING_HEADERS: "the headers of prediction and label give several places (sform, qform, voxel sizes), of "
    "which only some agree.",
}
"""The message for each kind of doubt."""
OF_GRIDS = (BARE_HEADER, CONTRADICTING_HEADERS)
_BLOCK = 1 << 15  # voxels looked at before it is asked whether the rest still matters
_NEAR = 1e-3  # of a sum to 1; logits never come that close everywhere


class Watch:
    """Looks at the values of a case as they are read; `hard`: all so far are exactly 0 or 1."""

    def __init__(self, *, logits: bool, overlapping: bool) -> None:
        self.logits, self.overlapping = logits, overlapping
        self.hard, self._first = not logits, True

    def see(self, values: Array) -> None:
        """The next (class, voxel) values; RangeError where the first of them are label maps, or no logits."""
        if self._first:
            self._first = False
            _refuse_labels(values)
            if self.logits:
                _refuse_probabilities(values, overlapping=self.overlapping)
        self.hard = self.hard and all(((part == 0) | (part == 1)).all() for part in _parts(values))


def _refuse_probabilities(logits: Array, *, overlapping: bool) -> None:
    """Refuse values in [0, 1] that, of exclusive classes, sum to 1 in every voxel: no network has such logits."""
    alone = overlapping or len(logits) == 1
    for part in _parts(logits):
        if not ((part >= 0) & (part <= 1)).all() or not (alone or (np.abs(part.sum(0) - 1) <= _NEAR).all()):
            return
    what = "all lie in [0, 1]" if alone else "lie in [0, 1] and sum to 1 in every voxel"
    raise RangeError(f"logits must not be probabilities; these values {what}. Leave out --logits.")


def _refuse_labels(values: Array) -> None:
    """Refuse a single channel of whole numbers beyond 1."""
    if len(values) == 1 and all(((part == np.rint(part)) & (part >= 0)).all() for part in _parts(values)):
        largest = values.max()
        if largest > 1:
            raise RangeError(
                f"predictions must be probabilities; this looks like a label map: a single channel of whole "
                f"numbers up to {largest:g}. Instead {SAVE_PROBABILITIES}."
            )


def _parts(values: Array) -> list[Array]:
    return [values[:, start : start + _BLOCK] for start in range(0, values.shape[1], _BLOCK)]
