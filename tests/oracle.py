"""The formulas of the method, dense and slow, in float64: what every fast path must equal.

Nothing here uses segcal. Memberships are whole (case, class, voxel, bin) arrays and differentiable, so autograd
gives the gradients of the formulas. Labels are dense, (case, class, voxel); `keep` is (case, voxel).
"""

from __future__ import annotations

import math
from fractions import Fraction

import torch
from torch import Tensor
from torch.nn.functional import one_hot as _one_hot


def one_hot(labels: Tensor, classes: int) -> Tensor:
    """(case, ...) label maps as (case, class, ...) zeros and ones."""
    return _one_hot(labels.long(), classes).movedim(-1, 1).double()


def hard_bin(probability: float, bins: int, closed: str = "left") -> int:
    """The bin of a number in exact arithmetic: [k/M, (k+1)/M), the last one closed; or the mirror of that."""
    position = Fraction(probability) * bins
    return min(max(math.floor(position) if closed == "left" else math.ceil(position) - 1, 0), bins - 1)


def memberships(x: Tensor, bins: int, kernel: str = "hard", bandwidth: float = 0.5, closed: str = "left") -> Tensor:
    """psi_m(x) along a new last axis; the row of bins is endless, and what lies beyond it belongs to the outer bins."""
    if kernel == "hard":
        where = torch.tensor([hard_bin(value, bins, closed) for value in x.flatten().tolist()])
        return _one_hot(where.view(x.shape), bins).double()
    reach = math.ceil(12 * bandwidth) + 3
    row = torch.arange(-reach, bins + reach)
    distance = (x.double()[..., None] * bins - (row + 0.5)).abs()  # from each center, in bin widths
    if kernel == "triangular":
        psi = (1 - distance).clamp(min=0)
    elif kernel == "bspline":
        near, far = 2 / 3 - distance**2 + distance**3 / 2, (2 - distance).clamp(min=0) ** 3 / 6
        psi = torch.where(distance < 1, near, far)
    else:
        psi = torch.softmax(-((distance / bandwidth) ** 2) / 2, -1)
    return psi @ _one_hot(row.clamp(0, bins - 1), bins).double()


def bin_sums(p: Tensor, y: Tensor, keep: Tensor | None = None, **binning: object) -> tuple[Tensor, Tensor, Tensor]:
    """Count, confidence sum and label sum, each (case, class, bin)."""
    psi = memberships(p, **binning)  # type: ignore[arg-type]
    if keep is not None:
        psi = psi * keep[:, None, :, None]
    return psi.sum(2), (psi * p[..., None]).sum(2), (psi * y[..., None]).sum(2)


def ace_loss(
    p: Tensor,
    y: Tensor,
    keep: Tensor | None = None,
    *,
    empty_bins: str = "skip",
    empty_below: float = 0.01,
    absent_classes: str = "zero",
    class_weights: list[float] | None = None,
    background: bool = True,
    **binning: object,
) -> Tensor:
    """Mean over cases of the mean over classes of the mean over bins of |o - e|, with the method's options."""
    per_case = []
    for case_sums in zip(*bin_sums(p, y, keep, **binning), strict=True):
        errors, counted = [], []
        for c, (count, confidence, label) in enumerate(zip(*case_sums, strict=True)):
            gaps = [
                abs(label[m] / count[m] - confidence[m] / count[m])
                for m in range(len(count))
                if count[m] >= empty_below and count[m] > 0
            ]
            present = bool(label.sum() > 0) or absent_classes == "include"
            counted.append(bool(gaps) and present)
            error = sum(gaps) / (len(gaps) if empty_bins == "skip" else len(count)) if counted[-1] else p.sum() * 0
            errors.append(error * (1 if class_weights is None else class_weights[c]))
        first = 0 if background else 1
        classes = max(1, sum(counted[first:])) if absent_classes == "skip" else len(errors[first:])
        per_case.append(sum(errors[first:]) / classes)
    return torch.stack(per_case).mean()


def dice_loss(
    p: Tensor,
    y: Tensor,
    keep: Tensor | None = None,
    *,
    class_weights: list[float] | None = None,
    background: bool = True,
) -> Tensor:
    """1 - 2 sum(p y) / (sum(p^2) + sum(y^2) + 1e-5), averaged over cases and classes."""
    inside = torch.ones_like(p) if keep is None else keep[:, None].double()
    overlap, size = (inside * p * y).sum(2), (inside * (p**2 + y**2)).sum(2)
    loss = (1 - 2 * overlap / (size + 1e-5)) * torch.tensor(class_weights or [1.0] * p.shape[1])
    return loss[:, 0 if background else 1 :].mean()


def cross_entropy(logits: Tensor, y: Tensor, keep: Tensor | None = None, *, activation: str = "softmax") -> Tensor:
    """Averaged over voxels; for the sigmoid the binary one, averaged over voxels and classes."""
    inside = torch.ones_like(logits) if keep is None else keep[:, None].double().expand_as(logits)
    if activation == "softmax":
        return -(inside * y * (logits - logits.logsumexp(1, keepdim=True))).sum() / inside[:, 0].sum()
    zero = torch.zeros_like(logits)
    return (
        inside * (y * torch.logaddexp(zero, -logits) + (1 - y) * torch.logaddexp(zero, logits))
    ).sum() / inside.sum()


def activate(logits: Tensor, activation: str) -> Tensor:
    return {"softmax": lambda x: x.softmax(1), "sigmoid": torch.sigmoid, "none": lambda x: x}[activation](logits)
