"""Likelihood of logits that are linear in parameters, with its first two derivatives, summed over voxels in float64."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from segcal.calibrators.calibrator import decided
from segcal.calibrators.stream import Piece
from segcal.kernels.numba_likelihood import NO_WEIGHTS, temperature_sums
from segcal.kernels.threads import pass_threads


def log_odds(logits: Tensor, activation: str) -> Tensor:
    """log p / (1 - p) of each class: the logits themselves of a sigmoid.

    >>> log_odds(torch.tensor([[0.0], [0.0], [0.0]]), "softmax")[0].exp()
    tensor([0.5000])
    """
    if activation == "sigmoid":
        return logits
    top = logits.amax(0)
    weights = (logits - top).exp()
    total = weights.sum(0)
    others = total - weights
    # Of the largest class the rest is added up by itself: the difference would drown it.
    largest = decided(logits)
    others.scatter_(0, largest, weights.scatter(0, largest, 0).sum(0, keepdim=True))
    tiny = torch.finfo(logits.dtype).tiny
    return logits - top - others.clamp(min=tiny).log()


class Sums(NamedTuple):
    """Over the voxels of a piece."""

    value: float
    """Negative log-likelihood."""
    gradient: Tensor
    """(class, feature)."""
    curvature: Tensor
    """(class, feature, class, feature)."""
    wrong: Tensor
    """Voxels that are wrong: of each class, or together."""

    def plus(self, other: Sums) -> Sums:
        """Over the voxels of both pieces."""
        return Sums(
            self.value + other.value,
            self.gradient + other.gradient,
            self.curvature + other.curvature,
            self.wrong + other.wrong,
        )


def output(parameters: Tensor, x: Tensor) -> Tensor:
    """(class, voxel) calibrated logits."""
    return (parameters[..., None] * x).sum(1)


def truth_of(piece: Piece, classes: int) -> Tensor:
    """(class, voxel) of zeros and ones."""
    if piece.labels.ndim == 2:
        return piece.labels
    return torch.zeros(classes, len(piece.labels), dtype=torch.float64).scatter_(0, piece.labels[None], 1)


def residual_of(out: Tensor, labels: Tensor) -> Tensor:
    """Probability minus truth; of the true class as minus the sum of the others, since a difference would cancel."""
    residual = out.softmax(0).scatter(0, labels[None], 0)
    return residual.scatter_(0, labels[None], -residual.sum(0, keepdim=True))


def exclusive(piece: Piece, x: Tensor, parameters: Tensor) -> Sums:
    labels = piece.labels[None]
    out = output(parameters, x)
    out = out - out.gather(0, labels)
    residual = residual_of(out, piece.labels)
    probabilities = residual.scatter(0, labels, 1 + residual.gather(0, labels))
    losses = out.logsumexp(0)
    wrong = (out.scatter(0, labels, -math.inf).amax(0) >= 0).sum()[None]
    weighted = probabilities[:, None] * x
    flat = weighted.flatten(0, 1)
    if piece.weights is not None:
        losses, residual, flat = losses * piece.weights, residual * piece.weights, flat * piece.weights
    classes, features = x.shape[:2]
    curvature = -(flat @ weighted.flatten(0, 1).T).reshape(classes, features, classes, features)
    own = flat.reshape(weighted.shape) @ x.mT
    curvature.diagonal(dim1=0, dim2=2).add_(own.permute(1, 2, 0))
    gradient = (x @ residual[..., None])[..., 0]
    return Sums(float(losses.sum()), gradient, curvature, wrong)


def each_by_itself(piece: Piece, x: Tensor, parameters: Tensor) -> Sums:
    out = output(parameters, x)
    truth = truth_of(piece, len(out))
    side = torch.where(truth > 0, -out, out)  # the larger, the worse
    missing = side.sigmoid()
    losses, residual, bend = -logsigmoid(-side), torch.where(truth > 0, -missing, missing), missing * (1 - missing)
    wrong = (side >= 0).sum(1)
    classes, features = x.shape[:2]
    if piece.weights is not None:
        losses, residual, bend = losses * piece.weights, residual * piece.weights, bend * piece.weights
    curvature = x.new_zeros(classes, features, classes, features)
    curvature.diagonal(dim1=0, dim2=2).add_(((bend[:, None] * x) @ x.mT).permute(1, 2, 0))
    gradient = (x @ residual[..., None])[..., 0]
    return Sums(float(losses.sum()) / classes, gradient / classes, curvature / classes, wrong)


def of_temperature(piece: Piece, inverse: float) -> Sums:
    """The same of one temperature for all classes, by a compiled pass."""
    classes = len(piece.logits)
    weights = NO_WEIGHTS if piece.weights is None else piece.weights.numpy()
    arrays = piece.logits.numpy(), piece.labels.numpy(), weights
    value, slope, curvature, wrong = torch.from_numpy(temperature_sums(*arrays, inverse, threads=pass_threads()))
    share = classes if piece.labels.ndim == 2 else 1
    return Sums(float(value) / share, slope[None] / share, curvature[None] / share, wrong[None])
