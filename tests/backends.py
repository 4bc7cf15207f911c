"""Random batches, and what a backend makes of them, to compare backends with the reference."""

from __future__ import annotations

import torch
from torch import Tensor

from segcal.kernels.operator import voxel_sums

ACTIVATIONS = ("softmax", "sigmoid", "none")
VOXELS = 70_000  # more than one segment of numba's, and a last block that is not full


def batch(
    labeled: str, dtype: torch.dtype, activation: str, label_dtype: torch.dtype | None = None, *, voxels: int = VOXELS
) -> tuple[Tensor, Tensor]:
    """Two cases, three classes; labels in patches as in images, most of them background."""
    logits = 3 * torch.randn(2, 3, voxels)
    logits[:, 0] += 4
    # The last bit of an activation may differ, so no probability may lie that near an edge of 13 hard bins.
    p = logits.sigmoid() if activation == "sigmoid" else logits.softmax(1)
    near = ((p * 13 - (p * 13).round()).abs() < 1e-4) & (p > 0.01)
    logits.masked_fill_(near.any(1, keepdim=True), 0)
    labels = (torch.randint(0, 12, (2, voxels // 100)).clamp(max=3) % 3).repeat_interleave(100, 1)
    if labeled == "map":
        y = labels.to(label_dtype or torch.int64)
    else:
        y = torch.nn.functional.one_hot(labels, 3).movedim(-1, 1).to(label_dtype or torch.float32)
        if labeled == "soft":
            y = 0.9 * y + 0.1 * torch.rand(y.shape, dtype=y.dtype).softmax(1)
    return (logits if activation != "none" else logits.softmax(1)).to(dtype), y


def edge_batch(activation: str) -> tuple[Tensor, Tensor]:
    """Probabilities of zero and one, and on edges and centers of 10 bins; after an activation, logits as extreme."""
    grid = torch.arange(41) / 40
    inputs = torch.stack([grid, 1 - grid])[None]
    if activation != "none":
        inputs = torch.where(inputs == 0, -1e4, torch.where(inputs == 1, 1e4, inputs))
    return inputs, (grid > 0.5).long()[None]


def sums_and_gradient(voxels, binning: tuple, activation: str, backend: str) -> tuple[Tensor, Tensor, Tensor]:
    inputs = voxels.inputs.clone().requires_grad_()
    bin_sums, class_sums = voxel_sums(inputs, voxels.labels, voxels.mask, *binning, activation, True, backend)
    generator = torch.Generator().manual_seed(1)
    both = bin_sums, class_sums
    upstream = [torch.randn(sums.shape, generator=generator, dtype=torch.float64).to(sums.device) for sums in both]
    (gradient,) = torch.autograd.grad(both, inputs, upstream)
    return bin_sums.detach(), class_sums.detach(), gradient


def assert_close(got: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> None:
    """To the digits of the inputs; a gradient adds up large terms of both signs and has one digit less."""
    single = got[2].dtype == torch.float32
    for a, b, digits in zip(got, expected, (5e-7, 5e-7, 5e-6) if single else (1e-12, 1e-12, 1e-11), strict=True):
        largest = b.abs().max().item() if b.numel() else 0
        torch.testing.assert_close(a, b, rtol=digits, atol=digits * largest)


def assert_agreement(voxels, binning: tuple, activation: str) -> None:
    assert_close(*(sums_and_gradient(voxels, binning, activation, name) for name in ("numba", "torch")))
