"""Logits whose labels were drawn from them, so that the best calibrator is known; and likelihoods in plain numpy."""

from __future__ import annotations

import numpy as np
import torch
from scipy.special import expit, log_softmax, softmax
from torch import Tensor

from segcal.calibrators import CALIBRATORS

SPATIAL = ("local-temperature",)  # has tests of its own
METHODS = tuple(name for name in CALIBRATORS if name not in SPATIAL)
KINDS = [
    (method, activation)
    for method in METHODS
    for activation in ("softmax", "sigmoid")
    if (method, activation) != ("dirichlet", "sigmoid")
]
"""Every method with every activation that it takes."""


def drawn(activation="softmax", *, voxels=4000, classes=3, seed=0, spread=2.0):
    """Logits (class, voxel), and labels drawn from their own probabilities: calibrated by construction."""
    random = np.random.default_rng(seed)
    logits = spread * random.normal(size=(classes, voxels)) - np.arange(classes)[:, None] / 2
    if activation == "sigmoid":
        return torch.from_numpy(logits), torch.from_numpy(
            (random.random(logits.shape) < expit(logits)).astype(np.uint8)
        )
    edges = softmax(logits, axis=0).cumsum(0)
    labels = (random.random(voxels) > edges[:-1]).sum(0)
    return torch.from_numpy(logits), torch.from_numpy(labels)


def probabilities(logits: Tensor, activation: str) -> Tensor:
    return logits.double().softmax(0) if activation == "softmax" else logits.double().sigmoid()


def distance(calibrator, logits: Tensor, truth: Tensor) -> float:
    """Mean absolute difference between calibrated probabilities and those of the true logits."""
    found = probabilities(calibrator.transform(logits), calibrator.activation)
    return float((found - probabilities(truth, calibrator.activation)).abs().mean())


def nll(logits, labels, activation="softmax") -> float:
    """Mean negative log-likelihood of a voxel; of a voxel and class for classes that overlap."""
    z, y = np.asarray(logits, dtype=np.float64), np.asarray(labels)
    if activation == "sigmoid":
        return float(np.logaddexp(0, np.where(y > 0, -z, z)).mean())
    return float(-np.take_along_axis(log_softmax(z, axis=0), y[None], axis=0).mean())
