"""What a backend is asked to sum, and the columns of what it returns."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

if TYPE_CHECKING:  # torch takes seconds to import; who reads files with numpy and numba alone need not wait
    from torch import Tensor

Array = TypeVar("Array", bound=Any)  # a tensor, or an array of numpy

# Columns of the sums per case and class. The first three carry a gradient.
CROSS_ENTROPY, INTERSECTION, PROBABILITY_SQUARED, LABEL_SQUARED, LABEL, VOXELS = range(6)
CLASS_SUMS = 6
SMALLEST = 2.0**-24
"""Probabilities below float16's smallest number count as that number in the cross-entropy of probabilities."""

TOLERANCE = 1e-3
"""Sums of probabilities, rounded to half precision on the way, pass 1 by less than this; they count as 1."""

SUM_TOLERANCE = 0.05
"""How far the probabilities of a voxel may sum from 1; maps in 8 bits or half precision stay well below it."""


class Spec(NamedTuple):
    """How to read the inputs (the activation), where the cells lie, and which sums are wanted."""

    activation: str  # "softmax", "sigmoid" or "none"
    scale: float
    shift: float
    cells: int  # 0: no sums per cell
    degree: int
    closed: str
    classes: bool  # sums per class wanted


class Sums(NamedTuple):
    """Float64 sums of one batch."""

    moments: Tensor
    """(case, class, cell, degree + 2): sums of u to the power 0, 1, ..., degree + 1."""
    label_moments: Tensor
    """(case, class, cell, degree + 1): sums of label times u to the power 0, ..., degree."""
    class_sums: Tensor
    """(case, class, 6): see the columns above."""
    wrong_label: int
    """Flat position in `labels` of a label that is none of the classes (or outside [0, 1]), or -1."""
    outside: bool
    """Whether, without activation, an input lies outside [0, 1] by more than the tolerance. NaN does not."""


class Gradients(NamedTuple):
    """Derivatives of the loss, float64."""

    slopes: Tensor
    """(case, class, cell, degree + 1): by a probability, as a polynomial of its position u in the cell."""
    label_slopes: Tensor
    """(case, class, cell, degree): what a label of 1 adds to that."""
    class_sums: Tensor
    """(case, class, 6): by the class sums; only the first three columns are used."""


def squared_error(class_sums: Array) -> Array:
    """Sum over voxels of (p - y)^2, (...), from sums per class (..., 6): those of p^2, p y and y^2."""
    error: Array = class_sums[..., PROBABILITY_SQUARED] - 2 * class_sums[..., INTERSECTION]
    error += class_sums[..., LABEL_SQUARED]
    return error
