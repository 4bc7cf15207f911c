"""Calibration errors of logits with their gradient, for fits that minimize them."""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from segcal.binning import Binning
from segcal.calibrators.stream import flat_labels
from segcal.collect import read_voxels, sums_of
from segcal.losses import ACELoss
from segcal.metrics import ece
from segcal.statistics import BinStatistics


def soft_statistics(logits: Tensor, labels: Tensor, activation: str, *, bins: int = 20) -> BinStatistics:
    """Soft-binned statistics of one case: logits (class, ...), labels (...) or (class, ...)."""
    stats, _ = sums_of(
        read_voxels(logits.flatten(1)[None], flat_labels(labels, logits)[None]),
        binning=Binning(bins, kernel="triangular"), activation=activation, classes=False, backend=None,
    )  # fmt: skip
    assert stats is not None  # there is a binning
    return stats


def average_error(stats: BinStatistics, kind: Literal["ace", "ece"], *, background: bool = True) -> Tensor:
    """Mean over classes that are there; a class without ground truth has no ACE."""
    if kind == "ace":
        return ACELoss(stats.binning, absent_classes="skip", background=background).of(stats)
    return ece(stats).nanmean()
