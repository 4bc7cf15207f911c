"""Counts beside the bins: overlap for Dice, and the sums of two proper scores. They add up as bin statistics do.

`of_classes` and `of_regions` make them from tensors, with the sums per class that the losses use (`segcal.collect`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from typing import Literal, Self, TypeVar

import torch
from torch import Tensor

from segcal.collect import Activation, Voxels, activated, read_voxels, sums_of
from segcal.errors import RangeError, ShapeError, one_of
from segcal.kernels.spec import (
    CROSS_ENTROPY,
    INTERSECTION,
    LABEL,
    PROBABILITY_SQUARED,
    SUM_TOLERANCE,
    TOLERANCE,
    VOXELS,
    squared_error,
)

OfClasses = Literal["softmax", "none"]
OfRegions = Literal["sigmoid", "none"]


@dataclass(frozen=True, eq=False)
class ClassSums:
    """Float64 sums, each (case, class)."""

    def __post_init__(self) -> None:
        shapes = {name: tuple(getattr(self, name).shape) for name in self.names()}
        if len(set(shapes.values())) != 1 or len(next(iter(shapes.values()))) != 2:
            raise ShapeError(
                f"the sums must share one shape (case, class); got {shapes}."
                " Build them from the same cases and classes."
            )

    def __add__(self, other: Self) -> Self:
        """Sums over the voxels of both; case i is added to case i."""
        return map_sums(torch.add, self, other)

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """Of the sums, in the order of the constructor."""
        return tuple(field.name for field in fields(cls))

    @classmethod
    def of_classes(
        cls,
        inputs: Tensor,
        labels: Tensor,
        *,
        activation: OfClasses = "none",
        mask: Tensor | None = None,
        ignore_index: int | None = None,
    ) -> Self:
        """Of exclusive classes.

        Errors are those of `bin_statistics`; RangeError, too, where the probabilities of a voxel do not sum to 1.

        inputs: (case, class, ...), probabilities or logits of two classes or more.
        labels: as `bin_statistics` takes them.
        activation: "none" if the inputs are probabilities, "softmax" if they are logits.
        mask: voxels where it is 0 are left out.
        ignore_index: voxels with this label are left out.
        """
        return cls._of(_read(inputs, labels, activation, mask, ignore_index, exclusive=True), activation)

    @classmethod
    def of_regions(
        cls,
        inputs: Tensor,
        labels: Tensor,
        *,
        activation: OfRegions = "none",
        mask: Tensor | None = None,
        ignore_index: int | None = None,
    ) -> Self:
        """Of classes that may overlap, each by itself.

        Errors are those of `bin_statistics`.

        inputs: (case, class, ...), probabilities or logits.
        labels: a channel per class, or an integer map where no two classes overlap in the labels.
        activation: "none" if the inputs are probabilities, "sigmoid" if they are logits.
        mask: voxels where it is 0 are left out.
        ignore_index: voxels with this label are left out.
        """
        voxels = _read(inputs, labels, activation, mask, ignore_index, exclusive=False)
        return cls._of(voxels, activation, exclusive=False)

    @classmethod
    def _of(cls, voxels: Voxels, activation: Activation, *, exclusive: bool = True) -> Self:
        raise NotImplementedError


_Sums = TypeVar("_Sums", bound=ClassSums)


def map_sums(function: Callable[..., Tensor], *parts: _Sums) -> _Sums:
    """Apply a function to each of the sums of all parts."""
    kind = type(parts[0])
    return kind(**{name: function(*(getattr(part, name) for part in parts)) for name in kind.names()})


def concatenate_sums(parts: Iterable[_Sums]) -> _Sums:
    """The cases of all parts, in order."""
    return map_sums(lambda *tensors: torch.cat(tensors), *parts)


@dataclass(frozen=True, eq=False)
class OverlapCounts(ClassSums):
    """Voxels that are predicted to be of a class, that are of it, and both; each (case, class), float64.

    Of exclusive classes a voxel is predicted to be of its most probable one (the first, among equals); one that may
    overlap others is predicted where its probability is at least 1/2. The counts add up over voxels, cases and
    processes. `dice` works out the coefficient. Counts whose shapes differ are a ShapeError.

    predicted: voxels that are predicted to be of the class.
    true: voxels whose label is the class.
    both: voxels that are predicted to be of the class and are.

    >>> counts = OverlapCounts.of_classes(torch.tensor([[[0.9, 0.2], [0.1, 0.8]]]), torch.tensor([[0, 0]]))
    >>> counts.predicted.tolist(), counts.true.tolist(), counts.both.tolist()
    ([[1.0, 1.0]], [[2.0, 0.0]], [[1.0, 0.0]])
    """

    predicted: Tensor
    true: Tensor
    both: Tensor

    @classmethod
    def _of(cls, voxels: Voxels, activation: Activation, *, exclusive: bool = True) -> Self:
        """From decisions, zeros and ones: sums of their squares, of labels, and of both multiplied."""
        if exclusive:
            best = voxels.inputs.argmax(1, keepdim=True)
            decided = torch.zeros_like(voxels.inputs).scatter_(1, best, 1.0)
        else:
            decided = (voxels.inputs >= (0.0 if activation == "sigmoid" else 0.5)).to(voxels.inputs)
        sums = _class_sums(voxels._replace(inputs=decided), exclusive=exclusive)
        return cls(sums[..., PROBABILITY_SQUARED], sums[..., LABEL], sums[..., INTERSECTION])


def dice(counts: OverlapCounts) -> Tensor:
    """Dice coefficient, (case, class), float64; NaN where a class is not present, whether it is predicted or not.

    So MONAI has it, and the paper. Voxels predicted of an absent class count in pooled Dice, and in every error.

    counts: overlap of predictions and labels, as `OverlapCounts.of_classes` finds it.

    >>> counts = OverlapCounts.of_classes(torch.tensor([[[0.9, 0.2], [0.1, 0.8]]]), torch.tensor([[0, 0]]))
    >>> dice(counts)
    tensor([[0.6667,    nan]], dtype=torch.float64)
    """
    total = counts.predicted + counts.true
    return torch.where(counts.true > 0, 2 * counts.both / total.clamp(min=1), torch.nan)


@dataclass(frozen=True, eq=False)
class ScoreSums(ClassSums):
    """Sums over voxels of the squared error and of the negative log-likelihood; each (case, class), float64.

    Of a class they are binary, the class against the rest; both are proper scores. `joint_of_classes` gives those of
    the whole distribution, one number a case. They add up over voxels, cases and processes; `brier` and `nll` work out
    the means. Probabilities count as at least 2^-24 in the logarithm. Sums whose shapes differ are a ShapeError.

    squared_error: of probability and label.
    log_loss: negative log-likelihood of the label.
    voxels: how many were counted.

    >>> scores = ScoreSums.of_classes(torch.tensor([[[0.8, 0.4], [0.2, 0.6]]]), torch.tensor([[0, 0]]))
    >>> scores.squared_error, scores.voxels
    (tensor([[0.4000, 0.4000]], dtype=torch.float64), tensor([[2., 2.]], dtype=torch.float64))
    """

    squared_error: Tensor
    log_loss: Tensor
    voxels: Tensor

    @classmethod
    def _of(cls, voxels: Voxels, activation: Activation, *, exclusive: bool = True) -> Self:
        """Of each class against the rest: the log loss where it is there, and where it is not."""
        voxels = _activated(voxels, activation)
        sums = _class_sums(voxels, exclusive=exclusive)
        absent = [_absent_log_loss(voxels, c) for c in range(voxels.inputs.shape[1])]
        return cls(squared_error(sums), sums[..., CROSS_ENTROPY] + torch.cat(absent, 1), sums[..., VOXELS])

    @staticmethod
    def joint_of_classes(
        inputs: Tensor,
        labels: Tensor,
        *,
        activation: OfClasses = "none",
        mask: Tensor | None = None,
        ignore_index: int | None = None,
    ) -> ScoreSums:
        """Of the distribution over exclusive classes, (case, 1): cross-entropy, and the squared error of all classes.

        Of two classes the squared error is that of one of them, as everywhere else for a binary decision. Errors are
        those of `of_classes`.

        inputs: (case, class, ...), probabilities or logits of two classes or more.
        labels: as `bin_statistics` takes them.
        activation: "none" if the inputs are probabilities, "softmax" if they are logits.
        mask: voxels where it is 0 are left out.
        ignore_index: voxels with this label are left out.
        """
        voxels = _read(inputs, labels, activation, mask, ignore_index, exclusive=True)
        sums = _class_sums(_activated(voxels, activation), exclusive=True)
        squared = squared_error(sums).sum(1, keepdim=True) / (2 if sums.shape[1] == 2 else 1)
        return ScoreSums(squared, sums[..., CROSS_ENTROPY].sum(1, keepdim=True), sums[:, :1, VOXELS])


def brier(scores: ScoreSums) -> Tensor:
    """Mean over voxels of the squared distance between probability and label, float64; NaN without voxels.

    scores: sums, as `ScoreSums.of_classes` collects them; the result has their shape, (case, class).

    >>> brier(ScoreSums.of_classes(torch.tensor([[[0.8, 0.4], [0.2, 0.6]]]), torch.tensor([[0, 0]])))
    tensor([[0.2000, 0.2000]], dtype=torch.float64)
    """
    return _per_voxel(scores.squared_error, scores)


def nll(scores: ScoreSums) -> Tensor:
    """Mean over voxels of the negative log-likelihood, float64; NaN without voxels.

    scores: sums, as `ScoreSums.of_classes` collects them; the result has their shape, (case, class).

    >>> nll(ScoreSums.joint_of_classes(torch.tensor([[[0.5, 0.5], [0.5, 0.5]]]), torch.tensor([[0, 1]])))
    tensor([[0.6931]], dtype=torch.float64)
    """
    return _per_voxel(scores.log_loss, scores)


def _absent_log_loss(voxels: Voxels, c: int) -> Tensor:
    """(case, 1): the sum of -log(1 - p) over voxels that are not of the class: the cross-entropy of what it is not."""
    mapped = voxels.labels.shape[1] != voxels.inputs.shape[1]
    absent = (voxels.labels != c).to(torch.uint8) if mapped else 1 - voxels.labels[:, c : c + 1]
    complement = 1 - voxels.inputs[:, c : c + 1].double().clamp(0, 1)
    return _class_sums(Voxels(complement, absent.contiguous(), voxels.mask), exclusive=False)[..., CROSS_ENTROPY]


def _class_sums(voxels: Voxels, *, exclusive: bool) -> Tensor:
    """Sums per case and class of probabilities, (case, class, 6): see `segcal.kernels.spec`."""
    cases, classes, _ = voxels.inputs.shape
    if not exclusive and classes > 1 and voxels.labels.shape[1] == classes:
        voxels = _each_alone(voxels)
    _, sums = sums_of(voxels, binning=None, activation="none", classes=True, backend=None)
    return sums.reshape(cases, classes, -1)


def _activated(voxels: Voxels, activation: Activation) -> Voxels:
    return voxels._replace(inputs=activated(voxels.inputs, activation))


def _each_alone(voxels: Voxels) -> Voxels:
    """Every class as the only one of a case of its own: then labels may overlap."""
    _, classes, size = voxels.inputs.shape
    mask = None if voxels.mask is None else voxels.mask.repeat_interleave(classes, 0)
    return Voxels(voxels.inputs.reshape(-1, 1, size), voxels.labels.reshape(-1, 1, size), mask)


def _read(
    inputs: Tensor,
    labels: Tensor,
    activation: Activation,
    mask: Tensor | None,
    ignore_index: int | None,
    *,
    exclusive: bool,
) -> Voxels:
    """Inputs, labels and mask as lists of voxels; refuses what is not what it is said to be."""
    one_of("activation", activation, ("softmax", "none") if exclusive else ("sigmoid", "none"))
    voxels = read_voxels(inputs, labels, mask=mask, ignore_index=ignore_index)
    voxels = voxels._replace(inputs=voxels.inputs.detach())
    if exclusive and voxels.inputs.shape[1] == 1:
        raise ShapeError(
            "exclusive classes must be two or more; got one. A single channel is a region: use of_regions."
        )
    _need_range(voxels, activation)
    if exclusive and activation == "none":
        _need_whole(voxels)
    return voxels


def _need_range(voxels: Voxels, activation: Activation) -> None:
    """RangeError for NaN and, where there is no activation, for what is no probability."""
    wrong = voxels.inputs.isnan()
    if activation == "none":
        wrong |= (voxels.inputs < -TOLERANCE) | (voxels.inputs > 1 + TOLERANCE)
    if voxels.mask is not None:
        wrong &= voxels.mask[:, None]
    if bool(wrong.any()):
        case, channel, voxel = wrong.nonzero()[0].tolist()
        must = "probabilities must lie in [0, 1]" if activation == "none" else "logits must be numbers"
        hint = f" If these are logits, give their activation; got activation={activation!r}."
        raise RangeError(
            f"{must}; case {case}, class {channel} holds {voxels.inputs[case, channel, voxel].item():.6g}."
            f"{hint if activation == 'none' else ''}"
        )


def _need_whole(voxels: Voxels) -> None:
    """RangeError where the probabilities of a voxel do not sum to 1."""
    total = voxels.inputs.sum(1)
    wrong = (total - 1).abs() > SUM_TOLERANCE
    if voxels.mask is not None:
        wrong &= voxels.mask
    if bool(wrong.any()):
        case, voxel = wrong.nonzero()[0].tolist()
        raise RangeError(
            f"the probabilities of a voxel must sum to 1; one of case {case} has {total[case, voxel].item():.4g}. "
            f"For logits give activation='softmax'; for classes that overlap use of_regions."
        )


def _per_voxel(sums: Tensor, scores: ScoreSums) -> Tensor:
    return torch.where(scores.voxels > 0, sums / scores.voxels.clamp(min=1), torch.nan)
