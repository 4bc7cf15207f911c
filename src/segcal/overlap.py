"""Counts beside the bins: overlap for Dice, and the sums of two proper scores. They add up as bin statistics do."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from typing import Self, TypeVar

import torch
from torch import Tensor

from segcal.errors import ShapeError
from segcal.kernels.spec import CROSS_ENTROPY, INTERSECTION, LABEL_SQUARED, PROBABILITY_SQUARED, VOXELS


@dataclass(frozen=True, eq=False)
class _CaseSums:
    """Float64 sums, each (case, class)."""

    def __post_init__(self) -> None:
        shapes = {name: tuple(getattr(self, name).shape) for name in self.names()}
        if len(set(shapes.values())) != 1 or len(next(iter(shapes.values()))) != 2:
            raise ShapeError(f"the sums must share one shape (case, class); got {shapes}.")

    def __add__(self, other: Self) -> Self:
        return map_sums(torch.add, self, other)

    @classmethod
    def names(cls) -> tuple[str, ...]:
        return tuple(field.name for field in fields(cls))


_Sums = TypeVar("_Sums", bound=_CaseSums)


def map_sums(function: Callable[..., Tensor], *parts: _Sums) -> _Sums:
    """Apply a function to each of the sums of all parts."""
    kind = type(parts[0])
    return kind(**{name: function(*(getattr(part, name) for part in parts)) for name in kind.names()})


def concatenate_sums(parts: Iterable[_Sums]) -> _Sums:
    """The cases of all parts, in order."""
    return map_sums(lambda *tensors: torch.cat(tensors), *parts)


@dataclass(frozen=True, eq=False)
class OverlapCounts(_CaseSums):
    """Voxels that a case predicts to be of a class, that are of it, and both.

    >>> counts = OverlapCounts.of_classes(torch.tensor([[[0.9, 0.2], [0.1, 0.8]]]), torch.tensor([[0, 0]]))
    >>> dice(counts)
    tensor([[0.6667, 0.0000]], dtype=torch.float64)
    """

    predicted: Tensor
    true: Tensor
    both: Tensor

    @staticmethod
    def of_classes(probabilities: Tensor, labels: Tensor) -> OverlapCounts:
        """Of exclusive classes: a voxel is predicted to be of its most probable one (the first, among equals).

        Probabilities are (case, class, voxel), labels whole numbers, (case, voxel).
        """
        return OverlapCounts.of_prediction(probabilities.argmax(1), labels, classes=probabilities.shape[1])

    @staticmethod
    def of_prediction(predicted: Tensor, labels: Tensor, *, classes: int) -> OverlapCounts:
        """Of predicted and true classes, both (case, voxel)."""
        cases = len(predicted)
        pair = labels.long() * classes + predicted
        pair += classes**2 * torch.arange(cases, device=pair.device)[:, None]
        confusion = torch.bincount(pair.flatten(), minlength=cases * classes**2).double().view(cases, classes, classes)
        return OverlapCounts(confusion.sum(1), confusion.sum(2), confusion.diagonal(dim1=1, dim2=2).clone())

    @staticmethod
    def of_regions(probabilities: Tensor, labels: Tensor) -> OverlapCounts:
        """Of classes that may overlap, predicted where the probability is at least 1/2; both (case, class, voxel)."""
        predicted, true = probabilities >= 0.5, labels > 0
        return OverlapCounts(*(where.sum(2).double() for where in (predicted, true, predicted & true)))


def dice(counts: OverlapCounts) -> Tensor:
    """Dice coefficient per case and class; NaN where a class is neither present nor predicted."""
    total = counts.predicted + counts.true
    return torch.where(total > 0, 2 * counts.both / total.clamp(min=1), torch.nan)


@dataclass(frozen=True, eq=False)
class ScoreSums(_CaseSums):
    """Sums over voxels of the squared error and of the negative log-likelihood, and the number of voxels."""

    squared_error: Tensor
    log_loss: Tensor
    voxels: Tensor

    @staticmethod
    def of_class_sums(sums: Tensor) -> ScoreSums:
        """From the class sums that come with bin statistics."""
        squared = sums[..., PROBABILITY_SQUARED] - 2 * sums[..., INTERSECTION] + sums[..., LABEL_SQUARED]
        return ScoreSums(squared, sums[..., CROSS_ENTROPY], sums[..., VOXELS])


def brier(scores: ScoreSums) -> Tensor:
    """Mean squared distance between probability and label; NaN without voxels."""
    return _per_voxel(scores.squared_error, scores)


def nll(scores: ScoreSums) -> Tensor:
    """Negative log-likelihood per voxel of the image.

    Of exclusive classes, a class's part is that of its own voxels, and the parts of all classes add up to the
    cross-entropy; of regions, each has a binary one. NaN without voxels.
    """
    return _per_voxel(scores.log_loss, scores)


def _per_voxel(sums: Tensor, scores: ScoreSums) -> Tensor:
    return torch.where(scores.voxels > 0, sums / scores.voxels.clamp(min=1), torch.nan)
