"""Counts beside the bins: overlap for Dice, and the sums of two proper scores. They add up as bin statistics do."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from typing import Self, TypeVar

import torch
from torch import Tensor

from segcal.errors import ShapeError
from segcal.kernels.spec import SMALLEST


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
    tensor([[0.6667,    nan]], dtype=torch.float64)
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
    """Dice coefficient per case and class; NaN where a class is not present, whether it is predicted or not.

    So MONAI has it, and the paper. Voxels predicted of an absent class count in pooled Dice, and in every error.
    """
    total = counts.predicted + counts.true
    return torch.where(counts.true > 0, 2 * counts.both / total.clamp(min=1), torch.nan)


@dataclass(frozen=True, eq=False)
class ScoreSums(_CaseSums):
    """Sums over voxels of the squared error and of the negative log-likelihood, and the number of voxels.

    Of a class they are binary, the class against the rest; both are proper scores. `joint_of_classes` gives those of
    the whole distribution, one number a case.

    >>> scores = ScoreSums.of_classes(torch.tensor([[[0.8, 0.4], [0.2, 0.6]]]), torch.tensor([[0, 0]]))
    >>> brier(scores)
    tensor([[0.2000, 0.2000]], dtype=torch.float64)
    """

    squared_error: Tensor
    log_loss: Tensor
    voxels: Tensor

    @staticmethod
    def of_classes(probabilities: Tensor, labels: Tensor) -> ScoreSums:
        """Of exclusive classes, each against the rest: probabilities (case, class, voxel), labels (case, voxel)."""
        return ScoreSums.of_regions(probabilities, one_hot(labels, probabilities.shape[1]))

    @staticmethod
    def of_regions(probabilities: Tensor, labels: Tensor) -> ScoreSums:
        """Of classes that may overlap, each by itself; both (case, class, voxel)."""
        p, y = probabilities.double(), labels.double()
        log_loss = -(y * _log(p) + (1 - y) * _log(1 - p)).sum(2)
        return ScoreSums(((p - y) ** 2).sum(2), log_loss, torch.full_like(log_loss, p.shape[2]))

    @staticmethod
    def joint_of_classes(probabilities: Tensor, labels: Tensor) -> ScoreSums:
        """Of the distribution over exclusive classes, (case, 1): cross-entropy, and the squared error of all classes.

        Of two classes the squared error is that of one of them, as everywhere else for a binary decision.
        """
        p, y = probabilities.double(), one_hot(labels, probabilities.shape[1]).double()
        squared = ((p - y) ** 2).sum((1, 2), keepdim=True)[..., 0] / (2 if p.shape[1] == 2 else 1)
        return ScoreSums(squared, -(y * _log(p)).sum((1, 2))[:, None], torch.full_like(squared, p.shape[2]))

    def mean_of_classes(self) -> ScoreSums:
        """What stands for the joint scores where classes overlap and have no joint distribution, (case, 1)."""
        return map_sums(lambda sums: sums.mean(1, keepdim=True), self)


def one_hot(labels: Tensor, classes: int) -> Tensor:
    """(case, voxel) labels as (case, class, voxel) zeros and ones."""
    return torch.nn.functional.one_hot(labels.long(), classes).movedim(-1, 1)


def brier(scores: ScoreSums) -> Tensor:
    """Mean over voxels of the squared distance between probability and label; NaN without voxels."""
    return _per_voxel(scores.squared_error, scores)


def nll(scores: ScoreSums) -> Tensor:
    """Mean over voxels of the negative log-likelihood; NaN without voxels."""
    return _per_voxel(scores.log_loss, scores)


def _log(probabilities: Tensor) -> Tensor:
    return probabilities.clamp(min=SMALLEST).log()


def _per_voxel(sums: Tensor, scores: ScoreSums) -> Tensor:
    return torch.where(scores.voxels > 0, sums / scores.voxels.clamp(min=1), torch.nan)
