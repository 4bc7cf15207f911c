"""Several predictions of the same voxels as one: what is added up, and what the sum means. All in numpy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, cast

import numpy as np
from numpy.typing import NDArray

from segcal.errors import RangeError, one_of

Array = NDArray[Any]
Mean = Literal["probabilities", "logits"]
MEANS: tuple[Mean, ...] = ("probabilities", "logits")
LEAST = 1e-7
"""Probabilities are taken as at least this (of a sigmoid also at most 1 less this) before their logarithm."""
_NEAR = 1e-3  # that probabilities may lie outside of [0, 1]


@dataclass(frozen=True)
class Averaging:
    """How the mean of (class, voxel) predictions is taken.

    The mean of probabilities is of probabilities, whatever the maps hold. That of logits is of logits where the maps
    hold these; of maps of probabilities it is what their mean logarithms say, as probabilities.

    >>> maps = np.array([[0.9], [0.1]]), np.array([[0.5], [0.5]])
    >>> for mean in MEANS:
    ...     how = Averaging(mean=mean)
    ...     print(mean, how.finish(sum(map(how.term, maps)), 2).round(3).ravel())
    probabilities [0.7 0.3]
    logits [0.75 0.25]
    """

    mean: Mean = "probabilities"
    logits: bool = False
    """The maps hold logits."""
    sigmoid: bool = False
    """Classes overlap."""

    def __post_init__(self) -> None:
        one_of("mean", self.mean, MEANS)

    @property
    def yields_logits(self) -> bool:
        """Whether what comes of it are logits."""
        return self.logits and self.mean == "logits"

    def term(self, values: Array) -> Array:
        """What a member adds to the sum; RangeError where probabilities are none. The values stay as they are."""
        if not self.logits:
            with np.errstate(invalid="ignore"):
                if ((values < -_NEAR) | (values > 1 + _NEAR)).any():  # the mean would hide it; NaN shows in it
                    raise not_probabilities(values)
        if self.logits == (self.mean == "logits"):
            return values
        if self.logits:
            return self._probabilities(values)
        if self._overlapping(values):
            clipped = np.clip(values, LEAST, 1 - LEAST)
            return cast(Array, np.log(clipped) - np.log1p(-clipped))
        return cast(Array, np.log(np.clip(values, LEAST, 1)))

    def finish(self, total: Array, number: int) -> Array:
        """The mean from the sum of so many members."""
        mean = total / number
        return mean if self.logits or self.mean == "probabilities" else self._probabilities(mean)

    def _probabilities(self, logits: Array) -> Array:
        with np.errstate(invalid="ignore"):
            return sigmoid(logits) if self._overlapping(logits) else softmax(logits)

    def _overlapping(self, values: Array) -> bool:
        """A single channel is a foreground by itself."""
        return self.sigmoid or len(values) == 1


PLAIN = Averaging()
"""The mean of maps of probabilities of exclusive classes."""


def softmax(logits: Array) -> Array:
    """Probabilities of (class, ...) logits of exclusive classes."""
    exponentials: Array = np.exp(logits - logits.max(0))
    exponentials /= exponentials.sum(0)
    return exponentials


def sigmoid(logits: Array) -> Array:
    """Probabilities of logits of classes that overlap."""
    with np.errstate(over="ignore"):
        probabilities: Array = 1 / (1 + np.exp(-logits))
    return probabilities


def not_probabilities(values: Array) -> RangeError:
    """The error that names the value furthest from [0, 1]."""
    known = np.nan_to_num(values, nan=0.0)
    worst = known.flat[np.maximum(-known, known - 1).argmax()]
    return RangeError(
        f"probabilities must lie in [0, 1]; one is {worst:.6g}. If these are logits, use --logits; if scaled integers, "
        f"store the scale in the file."
    )
