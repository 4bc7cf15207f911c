"""Probabilities averaged with those of the neighbours, decisions left as they are."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from segcal.calibrators.calibrator import Activation
from segcal.calibrators.stream import PIECE_ELEMENTS

LEAST = 1e-9  # of a probability, before its logarithm
AHEAD = 1e-3  # of logits: a decision that the neighbours would change stays by this much


def around(values: Tensor, shape: Sequence[int], places: Tensor) -> Tensor:
    """(axis, class, voxel): for each axis the mean of the two neighbours along it; an edge repeats itself.

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
    values, flat = probabilities(logits, activation).flatten(1), logits.flatten(1)
    result = torch.empty_like(flat)
    step = max(1024, PIECE_ELEMENTS // len(flat))
    for start in range(0, flat.shape[1], step):
        places = torch.arange(start, min(start + step, flat.shape[1]))
        near = around(values, logits.shape[1:], places)
        result[:, places] = smoothed(flat[:, places], near, shares, activation)
    return result.reshape(logits.shape)


def smoothed(logits: Tensor, neighbours: Tensor, shares: Tensor, activation: Activation) -> Tensor:
    """Logits of probabilities of which `shares` (axis) come from the `neighbours`; the decisions are those before."""
    own = probabilities(logits, activation)
    mean = (1 - shares.sum()) * own + torch.einsum("a,a...->...", shares.to(own), neighbours)
    if activation == "sigmoid":
        found = mean.clamp(LEAST, 1 - LEAST).logit(LEAST)
        return torch.where(logits > 0, found.clamp(min=AHEAD), torch.where(logits < 0, found.clamp(max=-AHEAD), found))
    found = mean.clamp(min=LEAST).log()
    decided = logits.argmax(0, keepdim=True)
    ahead = found.scatter(0, decided, -torch.inf).amax(0, keepdim=True) + AHEAD
    return found.scatter(0, decided, torch.maximum(found.gather(0, decided), ahead))


def probabilities(logits: Tensor, activation: Activation) -> Tensor:
    return logits.softmax(0) if activation == "softmax" else logits.sigmoid()
