"""Tensors of any shape, type, stride and content, and what a backend makes of them: numbers, or a refusal."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from hypothesis import strategies as st
from torch import Tensor

from segcal import ACELoss, Binning, SegcalError, SegmentationLoss, bin_statistics

INPUT_TYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
LABEL_TYPES = (
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32,
    torch.float16, torch.bfloat16, torch.float32, torch.float64,
)  # fmt: skip
# No softmax of these lies so near to an edge of 13 hard bins that its last bit could decide.
PLAIN = (0.0, 0.25, -0.75, 2.0, -3.0, 5.5)
EXTREME = (*PLAIN, 1e4, -1e4, 3e38, -3e38, float("inf"), -float("inf"), float("nan"), 1e-40, -1e-40, -0.0)
SHARES = (0.0, 1.0, 0.5, 0.25, 1e-40, 0.99, -1e-4, 1.0001, 2.0, float("nan"))
KERNELS = ("hard", "triangular", "gaussian", "bspline")


class Example(NamedTuple):
    """What a loss or `bin_statistics` takes."""

    inputs: Tensor
    labels: Tensor
    mask: Tensor | None
    ignore_index: int | None


@st.composite
def examples(draw: st.DrawFn, values: tuple[float, ...] = EXTREME) -> Example:
    """Inputs of these values with labels that fit most of the time, all laid out in any way."""
    cases, classes = draw(st.integers(0, 2)), draw(st.integers(1, 3))
    space = draw(st.lists(st.integers(0, 4), min_size=1, max_size=3))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**20)))
    kind = draw(st.sampled_from(["any", "plain"]))
    usual = tuple(value for value in values if value in PLAIN or 0 <= value <= 1)
    numbers = torch.tensor(values if kind == "any" else usual, dtype=torch.float64)
    index = torch.randint(len(numbers), (cases, classes, *space), generator=generator)
    inputs = numbers[index].to(draw(st.sampled_from(INPUT_TYPES)))
    shape = draw(st.sampled_from([(cases, *space), (cases, 1, *space), (cases, classes, *space)]))
    label_type = draw(st.sampled_from(LABEL_TYPES))
    highest = draw(st.sampled_from([classes - 1, 1, classes]))
    labels = torch.randint(highest + 1, shape, generator=generator)
    if label_type.is_floating_point and draw(st.booleans()):
        labels = labels * 0.5
    mask = torch.rand((cases, *space), generator=generator) < 0.6 if draw(st.booleans()) else None
    ignore_index = draw(st.sampled_from([None, None, 0, 1, -1, 255]))
    return Example(_strided(draw, inputs), _strided(draw, labels.to(label_type)), mask, ignore_index)


def _strided(draw: st.DrawFn, tensor: Tensor) -> Tensor:
    """The same values in another layout in memory; expanded ones repeat the first of an axis."""
    how = draw(st.sampled_from(["as it is", "transposed", "sliced", "expanded"]))
    if how == "transposed":
        return tensor.movedim(-1, 0).contiguous().movedim(0, -1)
    if how == "sliced":
        return torch.stack([tensor, tensor], -1)[..., 0]
    if how == "expanded" and tensor.shape[-1]:
        return tensor[..., :1].expand(tensor.shape)
    return tensor


def ace_loss(example: Example, binning: Binning, activation: str, backend: str) -> list[Tensor]:
    loss = ACELoss(binning, activation=activation, ignore_index=example.ignore_index, backend=backend)
    return _with_gradient(example, lambda inputs: loss(inputs, example.labels, mask=example.mask))


def segmentation_loss(example: Example, binning: Binning, activation: str, backend: str) -> list[Tensor]:
    loss = SegmentationLoss(binning=binning, activation=activation, ignore_index=example.ignore_index, backend=backend)
    return _with_gradient(example, lambda inputs: loss(inputs, example.labels, mask=example.mask))


def statistics(example: Example, binning: Binning, activation: str, backend: str) -> list[Tensor]:
    inputs, labels, mask, ignore_index = example
    stats = bin_statistics(inputs, labels, binning=binning, mask=mask, ignore_index=ignore_index, backend=backend)
    return [stats.count, stats.confidence_sum, stats.label_sum]


def _with_gradient(example: Example, loss: Callable[[Tensor], Tensor]) -> list[Tensor]:
    inputs = example.inputs.clone().requires_grad_()
    value = loss(inputs)
    (gradient,) = torch.autograd.grad(value, inputs)
    return [value.detach(), gradient]


Call = Callable[[Example, Binning, str, str], list[Tensor]]


def assert_same_end(call: Call, example: Example, binning: Binning, activation: str) -> None:
    """numba and torch give the same numbers, NaN where the other has NaN, or refuse with the same class of error."""
    ends: list[list[Tensor] | type[SegcalError]] = []
    for name in ("numba", "torch"):
        try:
            ends.append(call(example, binning, activation, name))
        except SegcalError as error:
            ends.append(type(error))
    got, expected = ends
    if isinstance(expected, type) or isinstance(got, type):
        assert got == expected, f"numba ends in {got}, the reference in {expected}"
        return
    for a, b in zip(got, expected, strict=True):
        digits = {torch.float64: 1e-9, torch.float32: 1e-5}.get(b.dtype, 1e-2)
        largest = max([1.0, *b[b.isfinite()].abs().flatten().tolist()])  # what adds up to zero does so to rounding
        torch.testing.assert_close(a, b, rtol=digits, atol=digits * largest, equal_nan=True)
