"""Calibration errors per case and class, as functions of bin statistics.

Macro averages are means of these over cases; for micro averages pool the cases first:
`ace(stats.pool("case"))`. The paper's equations (mL1-ECE, mL1-ACE, mL1-MCE: Barfoot et al., Average
Calibration Losses for Reliable Uncertainty in Medical Image Segmentation) are these, averaged over classes.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from segcal.errors import one_of
from segcal.statistics import BinStatistics


def ece(stats: BinStatistics) -> Tensor:
    """Average gap between confidence and frequency, each voxel counting once.

    An empty bin has no gap. A class without voxels has no error: NaN, not zero.

    >>> from segcal import bin_statistics
    >>> probabilities = torch.tensor([[[0.9, 0.9]]])  # one case, one class, two voxels
    >>> labels = torch.tensor([[[1.0, 0.0]]])
    >>> ece(bin_statistics(probabilities, labels, bins=10))
    tensor([[0.4000]], dtype=torch.float64)
    """
    weight = torch.where(stats.occupied, stats.count, 0)
    total = weight.sum(-1)
    weighted = (weight * stats.gap.nan_to_num(0.0)).sum(-1) / total.clamp(min=torch.finfo(total.dtype).tiny)
    return torch.where(total > 0, weighted, torch.nan)


def ace(stats: BinStatistics, *, empty_bins: Literal["skip", "zero"] = "skip") -> Tensor:
    """Average gap, each occupied bin counting once.

    `empty_bins="zero"` divides by all bins, as the paper's formula reads; its code and ours skip empty ones.

    >>> from segcal import bin_statistics
    >>> stats = bin_statistics(torch.tensor([[[0.1, 0.3, 0.7, 0.9]]]), torch.tensor([[[0, 0, 1, 1]]]), bins=5)
    >>> ace(stats), ace(stats, empty_bins="zero")
    (tensor([[0.2000]], dtype=torch.float64), tensor([[0.1600]], dtype=torch.float64))
    """
    one_of("empty_bins", empty_bins, ("skip", "zero"))
    occupied = stats.occupied.sum(-1)
    bins = occupied if empty_bins == "skip" else stats.binning.bins
    mean = torch.where(stats.occupied, stats.gap, 0).sum(-1) / torch.as_tensor(bins).clamp(min=1)
    return torch.where(occupied > 0, mean, torch.nan)


def mce(stats: BinStatistics) -> Tensor:
    """Largest gap of all occupied bins.

    >>> from segcal import bin_statistics
    >>> mce(bin_statistics(torch.tensor([[[0.1, 0.4]]]), torch.tensor([[[0, 1]]]), bins=5))
    tensor([[0.6000]], dtype=torch.float64)
    """
    largest = torch.where(stats.occupied, stats.gap, -torch.inf).amax(-1)
    return torch.where(largest >= 0, largest, torch.nan)
