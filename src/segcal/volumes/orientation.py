"""Which way the axes of a volume run, and volumes turned to right, front and head, and back."""

from __future__ import annotations

from typing import Any

import numpy as np
from nibabel import orientations
from numpy.typing import NDArray

Array = NDArray[Any]

AS_IT_IS = np.array([[axis, 1.0] for axis in range(3)])
_nibabel: Any = orientations  # it has no types


def orientation_of(affine: Array | None) -> Array:
    """nibabel's: which axis goes along the body's, and which way; as they are, where no affine says so."""
    return AS_IT_IS if affine is None else _nibabel.io_orientation(affine)


def way_back(orientation: Array) -> Array:
    """The orientation by which `turned` takes back what it did."""
    back: Array = _nibabel.ornt_transform(AS_IT_IS, orientation)
    return back


def turned(values: Array, orientation: Array) -> Array:
    """A view of (channel, x, y, z) with the axes nearest to right, front and head."""
    moved: Array = np.moveaxis(_nibabel.apply_orientation(np.moveaxis(values, 0, 3), orientation), 3, 0)
    return moved
