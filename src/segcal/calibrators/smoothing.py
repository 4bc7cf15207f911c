"""Probabilities averaged with those of the neighbors, decisions left as they are."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from segcal.calibrators.calibrator import Activation, decided
from segcal.calibrators.stream import PIECE_ELEMENTS
from segcal.kernels.threads import pass_threads

LEAST = 1e-9  # of a probability, before its logarithm
AHEAD = 1e-3  # of logits: a decision that the neighbors would change stays by this much


def around(values: Tensor, shape: Sequence[int], places: Tensor) -> Tensor:
    """(axis, class, voxel): for each axis the mean of the two neighbors along it; an edge repeats itself.

    values: (class, voxel) of all voxels of a grid of this shape.
    places: those that are asked for.

    >>> around(torch.tensor([[0.0, 0.2, 1.0]]), (3,), torch.arange(3))
    tensor([[[0.1000, 0.5000, 0.6000]]])
    """
    means = []
    for axis, size in enumerate(shape):
        stride = math.prod(shape[axis + 1 :])
        place = places // stride % size
        before, after = places - stride * (place > 0), places + stride * (place < size - 1)
        means.append((values[:, before] + values[:, after]) / 2)
    return torch.stack(means)


def smooth_volume(logits: Tensor, shares: Tensor, activation: Activation) -> Tensor:
    """All logits (class, ...) of a grid, as `smoothed` gives them, in pieces."""
    if compiled(logits):
        from segcal.kernels import numba_local

        found = numba_local.smooth(
            logits.flatten(1).contiguous().numpy(), logits.shape[1:], shares.numpy(),
            softmax=activation == "softmax", least=LEAST, ahead=AHEAD, threads=pass_threads(),
        )  # fmt: skip
        return torch.from_numpy(found).reshape(logits.shape)
    values, flat = probabilities(logits, activation).flatten(1), logits.flatten(1)
    result = torch.empty_like(flat)
    step = max(1024, PIECE_ELEMENTS // len(flat))
    for start in range(0, flat.shape[1], step):
        places = torch.arange(start, min(start + step, flat.shape[1]))
        near = around(values, logits.shape[1:], places)
        result[:, places] = smoothed(flat[:, places], near, shares, activation)
    return result.reshape(logits.shape)


def smoothed(
    logits: Tensor, neighbors: Tensor, shares: Tensor, activation: Activation, *, largest: Tensor | None = None
) -> Tensor:
    """Logits of probabilities of which `shares` (axis) come from the `neighbors`; the decisions are those before.

    largest: the classes that the logits decide for, as `decided` gives them, where they are known.
    """
    own = probabilities(logits, activation)
    mean = (1 - shares.sum()) * own + torch.einsum("a,a...->...", shares.to(own), neighbors)
    if activation == "sigmoid":
        found = mean.clamp(min=LEAST).log() - (1 - mean).clamp(min=LEAST).log()
        return torch.where(logits > 0, found.clamp(min=AHEAD), torch.where(logits < 0, found.clamp(max=-AHEAD), found))
    found = mean.clamp(min=LEAST).log()
    largest = decided(logits) if largest is None else largest
    ahead = found.scatter(0, largest, -torch.inf).amax(0, keepdim=True) + AHEAD
    return found.scatter(0, largest, torch.maximum(found.gather(0, largest), ahead))


def compiled(logits: Tensor) -> bool:
    """Whether the compiled passes can take them."""
    return logits.device.type == "cpu" and logits.dtype == torch.float32


def probabilities(logits: Tensor, activation: Activation) -> Tensor:
    return logits.softmax(0) if activation == "softmax" else logits.sigmoid()
