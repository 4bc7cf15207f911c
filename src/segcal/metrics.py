"""Calibration errors per case and class, as functions of bin statistics.

Macro averages are means of these over cases. For micro averages put the cases together first: `ace(micro(stats))`.
The paper's equations (mL1-ECE, mL1-ACE, mL1-MCE: Barfoot et al., Average Calibration Losses for Reliable Uncertainty
in Medical Image Segmentation) are these, averaged over classes.
"""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

from segcal.binning import Binning, need_common_edges
from segcal.errors import ConfigError, is_number, one_of
from segcal.statistics import BinStatistics

MicroReading = Literal["pooled", "paper"]
"""How cases are put together for a micro average; see `micro`."""


def ece(stats: BinStatistics) -> Tensor:
    """Mean gap between confidence and frequency, (case, class), float64; every voxel counts once.

    An empty bin has no gap. A case without voxels has no error: NaN, not zero.

    stats: bin statistics, as `bin_statistics` collects them.

    >>> from segcal import bin_statistics
    >>> probabilities = torch.tensor([[[0.9, 0.9]]])  # one case, one class, two voxels
    >>> labels = torch.tensor([[[1.0, 0.0]]])
    >>> ece(bin_statistics(probabilities, labels, bins=10))
    tensor([[0.4000]], dtype=torch.float64)
    """
    return _per_voxel(stats.gap, stats)


def ace(stats: BinStatistics, *, empty_bins: Literal["skip", "zero"] = "skip") -> Tensor:
    """Mean gap between confidence and frequency, (case, class), float64; every occupied bin counts once.

    A case without voxels has no error: NaN.

    stats: bin statistics, as `bin_statistics` collects them.
    empty_bins: "skip" averages over occupied bins, as the paper's code does; "zero" divides by the number of all bins,
        as the paper's formula reads. Another word is a ConfigError.

    >>> from segcal import bin_statistics
    >>> stats = bin_statistics(torch.tensor([[[0.1, 0.3, 0.7, 0.9]]]), torch.tensor([[[0, 0, 1, 1]]]), bins=5)
    >>> ace(stats), ace(stats, empty_bins="zero")
    (tensor([[0.2000]], dtype=torch.float64), tensor([[0.1600]], dtype=torch.float64))
    """
    one_of("empty_bins", empty_bins, ("skip", "zero"))
    filled = stats.occupied.sum(-1)
    bins = filled if empty_bins == "skip" else stats.binning.bins
    mean = torch.where(stats.occupied, stats.gap, 0).sum(-1) / torch.as_tensor(bins).clamp(min=1)
    return torch.where(filled > 0, mean, torch.nan)


def mce(stats: BinStatistics) -> Tensor:
    """Largest gap of all occupied bins, (case, class), float64; NaN for a case without voxels.

    stats: bin statistics, as `bin_statistics` collects them.

    >>> from segcal import bin_statistics
    >>> mce(bin_statistics(torch.tensor([[[0.1, 0.4]]]), torch.tensor([[[0, 1]]]), bins=5))
    tensor([[0.6000]], dtype=torch.float64)
    """
    largest = torch.where(stats.occupied, stats.gap, -torch.inf).amax(-1)
    return torch.where(largest >= 0, largest, torch.nan)


def occupied(stats: BinStatistics) -> Tensor:
    """Share of the bins that hold voxels, (case, class), float64; NaN for a case without voxels.

    No error, but what `ace` is a mean of: a label map occupies 2 bins of 20, and its ACE says little. Neither a high
    nor a low share is better by itself; where it falls, so may the ACE, for want of bins to be wrong in.

    stats: bin statistics, as `bin_statistics` collects them.

    >>> from segcal import bin_statistics
    >>> occupied(bin_statistics(torch.tensor([[[0.1, 0.15, 0.9]]]), torch.tensor([[[0, 0, 1]]]), bins=5))
    tensor([[0.4000]], dtype=torch.float64)
    """
    share = stats.occupied.double().mean(-1)
    return torch.where(share > 0, share, torch.nan)


def signed_gap(stats: BinStatistics) -> Tensor:
    """Mean probability minus share of the class, (case, class), float64: positive where it is predicted too much.

    NaN for a case without voxels.

    stats: bin statistics, as `bin_statistics` collects them.

    >>> from segcal import bin_statistics
    >>> signed_gap(bin_statistics(torch.tensor([[[0.9, 0.9]]]), torch.tensor([[[1, 0]]]), bins=10))
    tensor([[0.4000]], dtype=torch.float64)
    """
    return _per_voxel(stats.signed_gap, stats)


def overconfidence(stats: BinStatistics) -> Tensor:
    """The part of the ECE from overconfident bins: farther from 1/2 than their frequency, or on its other side.

    A class given 2 % where it is there in 10 % is overconfident, as one given 98 % that is there in 90 %: the network
    is overconfident, for no or for yes. `signed_gap` tells whether a class is predicted too much or too little.
    The result is (case, class), float64; NaN for a case without voxels.

    stats: bin statistics, as `bin_statistics` collects them.

    >>> from segcal import bin_statistics
    >>> labels = torch.tensor([[[0, 0, 1, 1, 1, 1, 0, 0]]])
    >>> stats = bin_statistics(torch.tensor([[[0.25] * 4 + [0.75] * 4]]), labels, bins=10)
    >>> overconfidence(stats), underconfidence(stats)
    (tensor([[0.2500]], dtype=torch.float64), tensor([[0.]], dtype=torch.float64))
    """
    return _per_voxel(_sureness(stats).clamp(min=0), stats)


def underconfidence(stats: BinStatistics) -> Tensor:
    """The part of the ECE from underconfident bins: nearer to 1/2 than their frequency.

    Both parts add up to the ECE. A bin whose confidence is exactly 1/2 can only be underconfident.
    The result is (case, class), float64; NaN for a case without voxels.

    stats: bin statistics, as `bin_statistics` collects them.

    >>> from segcal import bin_statistics
    >>> stats = bin_statistics(torch.tensor([[[0.25] * 4]]), torch.tensor([[[0, 0, 0, 0]]]), bins=10)
    >>> underconfidence(stats)  # 25 % where nothing is there
    tensor([[0.2500]], dtype=torch.float64)
    """
    return _per_voxel((-_sureness(stats)).clamp(min=0), stats)


def _sureness(stats: BinStatistics) -> Tensor:
    """How overconfident a bin is; negative if it is underconfident."""
    return torch.where(
        stats.mean_confidence == 0.5, -stats.gap, stats.signed_gap * (stats.mean_confidence - 0.5).sign()
    )


def micro(stats: BinStatistics, *, reading: MicroReading = "pooled", weights: Tensor | None = None) -> BinStatistics:
    """One case that stands for all cases: its errors are the micro averages.

    "pooled" equals `stats.pool("case")`. "paper" takes as the confidence of a bin the unweighted mean over the cases
    that occupy it, and pools counts and labels.

    stats: bin statistics of all cases. Those of equal-mass bins are refused (ConfigError): the edges differ by case.
    reading: "pooled" adds the sums; "paper" is the paper's variant. Another word is a ConfigError.
    weights: (draw, case), how often each case is taken, for a bootstrap. The result has one case per draw.

    >>> from segcal import bin_statistics
    >>> probabilities = torch.tensor([[[0.2, 0.2, 0.2]], [[0.6, 0.0, 0.0]]])  # two cases, one class
    >>> mask = torch.tensor([[1, 1, 1], [1, 0, 0]])  # the second case has one voxel
    >>> stats = bin_statistics(probabilities, torch.zeros(2, 1, 3), bins=1, mask=mask)
    >>> ace(micro(stats)), ace(micro(stats, reading="paper"))
    (tensor([[0.3000]], dtype=torch.float64), tensor([[0.4000]], dtype=torch.float64))
    """
    one_of("reading", reading, get_args(MicroReading))
    need_common_edges(stats.binning, "put together for a micro average")
    if weights is None:
        weights = stats.count.new_ones(1, stats.cases)

    def over_cases(sums: Tensor) -> Tensor:
        return torch.einsum("dk,kcb->dcb", weights, sums)

    count, label_sum = over_cases(stats.count), over_cases(stats.label_sum)
    if reading == "pooled":
        return BinStatistics(count, over_cases(stats.confidence_sum), label_sum, stats.binning)
    confidences, occupied = confidences_by_case(stats)
    return paper_micro(count, label_sum, over_cases(confidences), over_cases(occupied), stats.binning)


def confidences_by_case(stats: BinStatistics) -> tuple[Tensor, Tensor]:
    """What the paper's micro average adds up over cases: the mean confidence of a bin, and 1; both 0 where empty."""
    return stats.mean_confidence.nan_to_num(0.0), stats.occupied.double()


def paper_micro(
    count: Tensor, label_sum: Tensor, confidences: Tensor, occupied: Tensor, binning: Binning
) -> BinStatistics:
    """The paper's micro average from sums over cases: of counts, of labels and of both of `confidences_by_case`."""
    return BinStatistics(count, confidences / occupied.clamp(min=1) * count, label_sum, binning)


def equal_mass(stats: BinStatistics, bins: int, *, above: float = 0.01) -> BinStatistics:
    """The sums in bins that hold about equally many voxels, cut between fine hard bins, per case and class.

    The edges differ by case and class, and the binning of the result says so (`equal_mass_above`): such statistics can
    be selected and concatenated, but not added, pooled or rebinned.

    stats: bin statistics in fine hard bins, such as 1,200; others are a ConfigError. A fine bin is never split: where
        one holds more than its share, bins beside it stay empty.
    bins: how many equal-mass bins.
    above: probabilities below this are left out (Nixon et al. 2019: thresholded adaptive calibration error).
        Otherwise the background, whose probabilities are next to zero, fills almost all bins, and the error shrinks
        with its share. A number from 0 to below 1; others are a ConfigError.

    >>> from segcal import bin_statistics
    >>> probabilities = torch.tensor([[[0.001, 0.11, 0.12, 0.13, 0.14]]])
    >>> fine = bin_statistics(probabilities, torch.tensor([[[0, 0, 0, 0, 1]]]), bins=1200)
    >>> equal_mass(fine, 2).count, fine.rebin(2).count
    (tensor([[[2., 2.]]], dtype=torch.float64), tensor([[[5., 0.]]], dtype=torch.float64))
    """
    need_common_edges(stats.binning, "cut into equal-mass bins")
    if stats.binning.kernel != "hard":
        raise ConfigError(f"equal-mass bins need hard fine bins; these are {stats.binning.kernel}.")
    if not (is_number(above) and 0 <= above < 1):
        raise ConfigError(f"above must be a probability from 0 to below 1; got {above!r}.")
    binning = Binning(bins, equal_mass_above=float(above))
    first = int((stats.binning.edges[:-1] < above).sum())
    count, confidence_sum, label_sum = (
        sums[..., first:] for sums in (stats.count, stats.confidence_sum, stats.label_sum)
    )
    total = count.sum(-1, keepdim=True)
    middle = count.cumsum(-1) - count / 2
    target = (middle / torch.where(total > 0, total, 1) * bins).long().clamp(max=bins - 1)

    def joined(sums: Tensor) -> Tensor:
        return sums.new_zeros(*sums.shape[:2], bins).scatter_add(-1, target, sums)

    return BinStatistics(joined(count), joined(confidence_sum), joined(label_sum), binning)


ERRORS = {"ace": ace, "ece": ece, "mce": mce}
"""The three calibration errors by their names."""


def _per_voxel(of_bin: Tensor, stats: BinStatistics) -> Tensor:
    """Mean over bins, each by its count; NaN where all are empty."""
    weight = torch.where(stats.occupied, stats.count, 0)
    total = weight.sum(-1)
    weighted = (weight * torch.where(stats.occupied, of_bin, 0)).sum(-1)
    return torch.where(total > 0, weighted / torch.where(total > 0, total, 1), torch.nan)
