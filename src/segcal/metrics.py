"""Calibration errors per case and class, as functions of bin statistics.

Macro averages are means of these over cases; for micro averages pool the cases first:
`ace(stats.pool("case"))`. The paper's equations (mL1-ECE, mL1-ACE, mL1-MCE: Barfoot et al., Average
Calibration Losses for Reliable Uncertainty in Medical Image Segmentation) are these, averaged over classes.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from segcal.binning import Binning
from segcal.errors import ConfigError, one_of
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
    return _per_voxel(stats.gap, stats)


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


def signed_gap(stats: BinStatistics) -> Tensor:
    """Mean probability less share of the class, over all voxels: positive where a class is predicted too much.

    >>> from segcal import bin_statistics
    >>> signed_gap(bin_statistics(torch.tensor([[[0.9, 0.9]]]), torch.tensor([[[1, 0]]]), bins=10))
    tensor([[0.4000]], dtype=torch.float64)
    """
    return _per_voxel(stats.signed_gap, stats)


def overconfidence(stats: BinStatistics) -> Tensor:
    """The part of the ECE from bins that are too sure: further from 1/2 than their frequency, or on its other side.

    A class given 2 % where it is there in 10 % is overconfident, as one given 98 % that is there in 90 %: the network
    is too sure of its answer, no or yes. Whether a class is predicted too much or too little tells `signed_gap`.

    >>> from segcal import bin_statistics
    >>> labels = torch.tensor([[[0, 0, 1, 1, 1, 1, 0, 0]]])
    >>> stats = bin_statistics(torch.tensor([[[0.25] * 4 + [0.75] * 4]]), labels, bins=10)
    >>> overconfidence(stats), underconfidence(stats)
    (tensor([[0.2500]], dtype=torch.float64), tensor([[0.]], dtype=torch.float64))
    """
    return _per_voxel(_sureness(stats).clamp(min=0), stats)


def underconfidence(stats: BinStatistics) -> Tensor:
    """The part of the ECE from bins that are not sure enough: nearer to 1/2 than their frequency.

    Both parts make up the ECE. A bin whose confidence is exactly 1/2 can only be underconfident.
    """
    return _per_voxel((-_sureness(stats)).clamp(min=0), stats)


def _sureness(stats: BinStatistics) -> Tensor:
    """By how much a bin is surer than it may be; negative where it could be surer."""
    return torch.where(
        stats.mean_confidence == 0.5, -stats.gap, stats.signed_gap * (stats.mean_confidence - 0.5).sign()
    )


def micro(
    stats: BinStatistics, *, reading: Literal["paper", "pooled"] = "paper", weights: Tensor | None = None
) -> BinStatistics:
    """One case that stands for all: its errors are the micro averages.

    "pooled" adds the sums. "paper" takes as a bin's confidence the simple mean over the cases that occupy it,
    however many voxels each has there, and pools the rest. `weights`, (draw, case), says how often each case is
    taken, for a bootstrap: the result has a case for each draw.
    """
    one_of("reading", reading, ("paper", "pooled"))
    if weights is None:
        weights = stats.count.new_ones(1, stats.cases)

    def over_cases(sums: Tensor) -> Tensor:
        return torch.einsum("dk,kcb->dcb", weights, sums)

    count, label_sum = over_cases(stats.count), over_cases(stats.label_sum)
    if reading == "pooled":
        return BinStatistics(count, over_cases(stats.confidence_sum), label_sum, stats.binning)
    cases = over_cases(stats.occupied.double())
    confidence = over_cases(stats.mean_confidence.nan_to_num(0.0)) / cases.clamp(min=1)
    return BinStatistics(count, confidence * count, label_sum, stats.binning)


def equal_mass(stats: BinStatistics, bins: int, *, above: float = 0.01) -> BinStatistics:
    """The sums in bins that hold about equally many voxels, cut between fine hard bins, per case and class.

    Voxels with probabilities below `above` are left out (Nixon et al. 2019: thresholded adaptive calibration error):
    else the background, whose probabilities are next to zero, fills all bins but a few, and the error shrinks with
    its share. A fine bin is never split: where one holds more than its share, bins beside it stay empty. The edges
    differ from case to case; those of the result's binning mean nothing.
    """
    if stats.binning.kernel != "hard":
        raise ConfigError(f"equal-mass bins need hard fine bins; these are {stats.binning.kernel}.")
    if not 0 <= above < 1:
        raise ConfigError(f"above must be a probability from 0 to below 1; got {above}.")
    kept = stats.binning.edges[:-1].to(stats.count) >= above
    stats = BinStatistics(stats.count * kept, stats.confidence_sum * kept, stats.label_sum * kept, stats.binning)
    total = stats.count.sum(-1, keepdim=True)
    middle = stats.count.cumsum(-1) - stats.count / 2
    target = (middle / torch.where(total > 0, total, 1) * bins).long().clamp(max=bins - 1)
    sums = (
        torch.zeros(*stats.count.shape[:2], bins, dtype=s.dtype, device=s.device).scatter_add(-1, target, s)
        for s in (stats.count, stats.confidence_sum, stats.label_sum)
    )
    count, confidence_sum, label_sum = sums
    return BinStatistics(count, confidence_sum, label_sum, Binning(bins))


ERRORS = {"ace": ace, "ece": ece, "mce": mce}
"""The three calibration errors by their names."""


def _per_voxel(of_bin: Tensor, stats: BinStatistics) -> Tensor:
    """Mean over bins, each by its count; NaN where all are empty."""
    weight = torch.where(stats.occupied, stats.count, 0)
    total = weight.sum(-1)
    weighted = (weight * torch.where(stats.occupied, of_bin, 0)).sum(-1)
    return torch.where(total > 0, weighted / torch.where(total > 0, total, 1), torch.nan)
