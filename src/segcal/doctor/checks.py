"""A backend on this machine against the reference: values, gradients, and how long it takes.

The reference is plain torch on the CPU. Probabilities keep away from the edges of bins, where the last bit of an
activation, which devices may round differently, would decide.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from segcal.binning import Binning
from segcal.collect import Backend, bin_statistics
from segcal.losses import SegmentationLoss

BINS, VOXELS = 10, 20_000  # more voxels than a block of any kernel
VALUE_LIMIT, GRADIENT_LIMIT = 5e-7, 5e-6  # of the largest number; a gradient adds up terms of both signs
TIMED_SHAPE = (1, 4, 64, 64, 64)  # case, class, space
REPEATS = 5

Run = Callable[[Backend, str], tuple[Tensor, Tensor]]
"""Values and the gradient, on the CPU, that a backend gives on a device."""


@dataclass(frozen=True)
class BackendCheck:
    """What came of a backend on a device."""

    backend: Backend
    device: str
    value_difference: float
    """The largest difference from the reference, as a share of the largest value; NaN where it gave none."""
    gradient_difference: float
    complaints: tuple[str, ...]
    """What is wrong, a sentence each; none where it agrees."""
    milliseconds: dict[str, float]
    """The fastest of a few runs on 4 classes x 64^3 voxels; empty where there are complaints."""

    @property
    def agrees(self) -> bool:
        return not self.complaints


def check_backend(backend: Backend, device: str) -> BackendCheck:
    """What a backend makes of `bin_statistics` and `SegmentationLoss`, hard and soft, of a softmax and of sigmoids.

    >>> check_backend("torch", "cpu").agrees
    True
    """
    differences, complaints = [], []
    for (name, make), kernel, activation in itertools.product(RUNS.items(), KERNELS, ACTIVATIONS):
        what = f"{name}, {kernel} bins, {activation}"
        run = make(kernel, activation)
        try:
            found = run(backend, device)
        except Exception as error:  # whatever stops it is what the user must know
            complaints.append(f"{what}: {type(error).__name__}: {error}")
            continue
        pair = [_difference(got, right) for got, right in zip(found, run("torch", "cpu"), strict=True)]
        differences.append(pair)
        for part, far, limit in zip(("values", "gradients"), pair, (VALUE_LIMIT, GRADIENT_LIMIT), strict=True):
            if not far <= limit:
                complaints.append(f"{what}: {part} must be within {limit:g} of the reference; they are {far:.2g} away.")
    value, gradient = (max(column) for column in zip(*differences, strict=True)) if differences else (math.nan,) * 2
    timed = {} if complaints else {name: _milliseconds(name, backend, device) for name in RUNS}
    return BackendCheck(backend, device, value, gradient, tuple(complaints), timed)


Kernel = Literal["hard", "triangular"]
Activation = Literal["softmax", "sigmoid"]
KERNELS: tuple[Kernel, ...] = ("hard", "triangular")
ACTIVATIONS: tuple[Activation, ...] = ("softmax", "sigmoid")


def _example(activation: str, shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Logits and a label map, most of it background."""
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(shape, generator=generator)
    logits[:, 0] += 4
    p = _probabilities(logits, activation)
    near = (p * BINS - (p * BINS).round()).abs() < 1e-4
    logits.masked_fill_((near & (p > 0.01)).any(1, keepdim=True), 0)
    labels = torch.randint(0, 12, (shape[0], *shape[2:]), generator=generator) % 4 % shape[1]
    return logits, labels


def _probabilities(logits: Tensor, activation: str) -> Tensor:
    return logits.softmax(1) if activation == "softmax" else logits.sigmoid()


def _statistics(kernel: Kernel, activation: Activation) -> Run:
    logits, labels = _example(activation, (2, 3, VOXELS))
    probabilities = _probabilities(logits, activation)

    def run(backend: Backend, device: str) -> tuple[Tensor, Tensor]:
        inputs = probabilities.to(device).requires_grad_()
        binning = Binning(BINS, kernel=kernel)
        stats = bin_statistics(inputs, labels.to(device), binning=binning, backend=backend)
        sums = torch.stack([stats.count, stats.confidence_sum, stats.label_sum])
        weights = torch.randn(sums.shape, generator=torch.Generator().manual_seed(1), dtype=sums.dtype)
        (gradient,) = torch.autograd.grad((sums * weights.to(device)).sum(), inputs)
        return sums.detach().cpu(), gradient.cpu()

    return run


def _loss(kernel: Kernel, activation: Activation) -> Run:
    logits, labels = _example(activation, (2, 3, VOXELS))

    def run(backend: Backend, device: str) -> tuple[Tensor, Tensor]:
        inputs = logits.to(device).requires_grad_()
        loss = SegmentationLoss(binning=Binning(BINS, kernel=kernel), activation=activation, backend=backend)
        terms = loss.terms(inputs, labels.to(device))
        (gradient,) = torch.autograd.grad(terms.total, inputs)
        return torch.stack(terms).detach().cpu(), gradient.cpu()

    return run


RUNS: dict[str, Callable[[Kernel, Activation], Run]] = {"bin_statistics": _statistics, "SegmentationLoss": _loss}


def _difference(got: Tensor, right: Tensor) -> float:
    """The largest difference, as a share of the largest right value; infinite where one is not a number."""
    far = float((got - right).abs().max() / right.abs().max())
    return far if math.isfinite(far) else math.inf


def _milliseconds(name: str, backend: Backend, device: str) -> float:
    logits, labels = (part.to(device) for part in _example("softmax", TIMED_SHAPE))
    binning = Binning(20, kernel="triangular")
    if name == "bin_statistics":
        probabilities = logits.softmax(1)
        return _fastest(lambda: bin_statistics(probabilities, labels, binning=binning, backend=backend), device)
    loss = SegmentationLoss(binning=binning, backend=backend)
    logits.requires_grad_()
    return _fastest(lambda: torch.autograd.grad(loss(logits, labels), logits), device)


def _fastest(run: Callable[[], object], device: str) -> float:
    """Milliseconds of the fastest of a few runs, after one that compiles."""
    taken = []
    for _ in range(1 + REPEATS):
        start = time.perf_counter()
        run()
        if device.startswith("cuda"):
            torch.cuda.synchronize(device)
        taken.append(time.perf_counter() - start)
    return 1000 * min(taken[1:])
