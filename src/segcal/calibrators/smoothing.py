"""Probabilities averaged with those of the neighbours, decisions left as they are."""

from __future__ import annotations

import torch
from torch import Tensor

from segcal.calibrators.calibrator import Activation

LEAST = 1e-9  # of a probability, before its logarithm
AHEAD = 1e-3  # of logits: a decision that the neighbours would change stays by this much


def around(logits: Tensor, activation: Activation) -> Tensor:
    """(axis, class, ...): for each axis the mean probability of the two neighbours along it; an edge repeats itself.

    logits: (class, ...).

    >>> around(torch.tensor([[0.0, 0.0, 40.0]]), "sigmoid")
    tensor([[[0.5000, 0.7500, 0.7500]]])
    """
    values = probabilities(logits, activation)
    means = torch.empty(values.ndim - 1, *values.shape, dtype=values.dtype)
    for axis, mean in enumerate(means, start=1):
        size = values.shape[axis]
        ends = values.narrow(axis, 0, 1), values.narrow(axis, size - 1, 1)
        before = torch.cat([ends[0], values.narrow(axis, 0, size - 1)], axis)
        after = torch.cat([values.narrow(axis, 1, size - 1), ends[1]], axis)
        torch.add(before, after, out=mean).div_(2)
    return means


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
