"""numba against the plain torch reference: every sum and gradient, on random upstream gradients."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from segcal.collect import read_voxels
from segcal.kernels.operator import voxel_sums

VOXELS = 70_000  # more than one segment of numba's, and a last block that is not full
ACTIVATIONS = ("softmax", "sigmoid", "none")


def batch(
    labelled: str, dtype: torch.dtype, activation: str, label_dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """Two cases, three classes; labels in patches as in images, most of them background."""
    logits = 3 * torch.randn(2, 3, VOXELS)
    logits[:, 0] += 4
    # The last bit of an activation may differ, so no probability may lie that near an edge of 13 hard bins.
    p = logits.sigmoid() if activation == "sigmoid" else logits.softmax(1)
    near = ((p * 13 - (p * 13).round()).abs() < 1e-4) & (p > 0.01)
    logits.masked_fill_(near.any(1, keepdim=True), 0)
    labels = (torch.randint(0, 12, (2, VOXELS // 100)).clamp(max=3) % 3).repeat_interleave(100, 1)
    if labelled == "map":
        y = labels.to(label_dtype or torch.int64)
    else:
        y = torch.nn.functional.one_hot(labels, 3).movedim(-1, 1).to(label_dtype or torch.float32)
        if labelled == "soft":
            y = 0.9 * y + 0.1 * torch.rand(y.shape, dtype=y.dtype)
    return (logits if activation != "none" else logits.softmax(1)).to(dtype), y


def sums_and_gradient(voxels, binning: tuple, activation: str, backend: str) -> tuple[Tensor, Tensor, Tensor]:
    inputs = voxels.inputs.clone().requires_grad_()
    bin_sums, class_sums = voxel_sums(inputs, voxels.labels, voxels.mask, *binning, activation, True, backend)
    generator = torch.Generator().manual_seed(1)
    upstream = [torch.randn(sums.shape, generator=generator, dtype=torch.float64) for sums in (bin_sums, class_sums)]
    (gradient,) = torch.autograd.grad([bin_sums, class_sums], inputs, upstream)
    return bin_sums.detach(), class_sums.detach(), gradient


def assert_close(got: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> None:
    """To the digits of the inputs; a gradient adds up large terms of both signs and has one digit less."""
    single = got[2].dtype == torch.float32
    for a, b, digits in zip(got, expected, (5e-7, 5e-7, 5e-6) if single else (1e-12, 1e-12, 1e-11), strict=True):
        largest = b.abs().max().item() if b.numel() else 0
        torch.testing.assert_close(a, b, rtol=digits, atol=digits * largest)


def assert_agreement(voxels, binning: tuple, activation: str) -> None:
    assert_close(*(sums_and_gradient(voxels, binning, activation, backend) for backend in ("numba", "torch")))


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(
    ("labelled", "dtype"),
    [*itertools.product(("map", "one-hot", "soft"), (torch.float32,)), ("map", torch.float64), ("soft", torch.float64)],
)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_sums_and_gradients_agree(kernel, activation, labelled, dtype, masked):
    mask = torch.rand(2, VOXELS) < 0.7 if masked else None
    voxels = read_voxels(*batch(labelled, dtype, activation), mask=mask)
    assert_agreement(voxels, (13, kernel, None, "left"), activation)


@pytest.mark.parametrize(
    "binning", [(0, "hard", None, "left"), (1200, "hard", None, "right"), (5, "gaussian", 3.0, "left")]
)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_any_number_of_bins_and_any_side_agree(binning, activation):
    assert_agreement(read_voxels(*batch("map", torch.float64, activation)), binning, activation)


@pytest.mark.parametrize("label_dtype", [torch.uint8, torch.int16, torch.float32])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_label_types_agree(label_dtype, activation):
    voxels = read_voxels(*batch("map", torch.float32, activation, label_dtype), ignore_index=2)
    assert_agreement(voxels, (13, "triangular", None, "left"), activation)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_probabilities_of_zero_and_one_and_on_edges_and_centres_agree(kernel, activation):
    grid = torch.arange(41) / 40
    inputs = torch.stack([grid, 1 - grid])[None]
    if activation != "none":
        inputs = torch.where(inputs == 0, -1e4, torch.where(inputs == 1, 1e4, inputs))
    voxels = read_voxels(inputs, (grid > 0.5).long()[None])
    assert_agreement(voxels, (10, kernel, None, "left"), activation)


@pytest.mark.parametrize("voxels", [1, 63, 64, 65, 1023, 1024, 1025, 2**16 - 1, 2**16 + 1])
def test_images_of_any_length_agree(voxels):
    inputs, labels = torch.randn(1, 2, voxels), torch.randint(0, 2, (1, voxels))
    for mask in (None, torch.rand(1, voxels) < 0.5, torch.zeros(1, voxels)):
        assert_agreement(read_voxels(inputs, labels, mask=mask), (7, "triangular", None, "left"), "softmax")


def test_many_classes_agree():
    inputs, labels = torch.randn(1, 40, 3000), torch.randint(0, 40, (1, 3000))
    assert_agreement(read_voxels(inputs, labels), (20, "triangular", None, "left"), "softmax")


def test_chunks_of_the_reference_add_up(monkeypatch):
    voxels = read_voxels(*batch("map", torch.float32, "softmax"))
    binning = (13, "bspline", None, "left")
    whole = sums_and_gradient(voxels, binning, "softmax", "torch")
    monkeypatch.setattr("segcal.kernels.reference.CHUNK", 20_000)
    assert_close(sums_and_gradient(voxels, binning, "softmax", "torch"), whole)
