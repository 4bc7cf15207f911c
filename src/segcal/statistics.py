"""The three sums from which every calibration number follows.

For each case, class and bin: how much probability mass of membership fell there (`count`), the sum of
the probabilities (`confidence_sum`) and of the labels (`label_sum`). Sums add, means do not: streaming,
several processes, micro and macro averages need no formula of their own.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from segcal._io.files import read_npz, write_npz
from segcal.binning import Binning, need_common_edges
from segcal.errors import ConfigError, SegcalError, ShapeError, check_integer, one_of

FORMAT = "segcal bin statistics 1"
SUMS = ("count", "confidence_sum", "label_sum")


@dataclass(frozen=True, eq=False)
class BinStatistics:
    """Float64 sums, each (case, class, bin), and the binning that made them.

    `bin_statistics` makes them. Sums whose shapes differ, or do not fit the binning, are a ShapeError.
    Laws: adding is associative and commutative; any split of the voxels adds up to the same sums (counts
    of hard bins exactly, the rest to rounding); pooling what was concatenated equals adding;
    0 <= label_sum <= count. Equal-mass bins (`segcal.equal_mass`) have other edges in each case and class: their sums
    can be selected and concatenated, and are refused (ConfigError) where sums of different voxels would be added.

    count: voxels in each bin; for soft bins, their summed weights.
    confidence_sum: sum of the probabilities of these voxels.
    label_sum: sum of their labels, which are 0 or 1, or shares in between.
    binning: the bins and their kernel.

    >>> from segcal import bin_statistics
    >>> one = bin_statistics(torch.tensor([[[0.1, 0.3]]]), torch.tensor([[[0.0, 1.0]]]), bins=2)
    >>> one.count
    tensor([[[2., 0.]]], dtype=torch.float64)
    >>> (one + one).frequency
    tensor([[[0.5000,    nan]]], dtype=torch.float64)
    """

    count: Tensor
    confidence_sum: Tensor
    label_sum: Tensor
    binning: Binning

    def __post_init__(self) -> None:
        shape = self.count.shape
        if len(shape) != 3 or any(getattr(self, name).shape != shape for name in SUMS):
            came = ", ".join(f"{name} {tuple(getattr(self, name).shape)}" for name in SUMS)
            raise ShapeError(
                f"the three sums must share one shape (case, class, bin); got {came}."
                " Build them from the same cases and classes."
            )
        if shape[2] != self.binning.bins:
            raise ShapeError(
                f"the sums must have one entry per bin; got {shape[2]} for {self.binning.bins} bins."
                " Use the binning of the sums."
            )

    @property
    def cases(self) -> int:
        return self.count.shape[0]

    @property
    def classes(self) -> int:
        return self.count.shape[1]

    @property
    def occupied(self) -> Tensor:
        """Where a bin holds enough to have a mean; elsewhere it is empty. NaN is not empty: it must show."""
        return ~((self.count < float(self.binning.empty_below)) | (self.count <= 0))

    @property
    def mean_confidence(self) -> Tensor:
        """Mean probability per bin; NaN where empty."""
        return self._mean(self.confidence_sum)

    @property
    def frequency(self) -> Tensor:
        """Observed share of the class per bin; NaN where empty."""
        return self._mean(self.label_sum)

    @property
    def signed_gap(self) -> Tensor:
        """Mean confidence less frequency: positive where probabilities are too high; NaN where empty."""
        return self._mean(self.confidence_sum - self.label_sum)

    @property
    def gap(self) -> Tensor:
        """Distance between confidence and frequency per bin; NaN where empty."""
        return self.signed_gap.abs()

    def _mean(self, sums: Tensor) -> Tensor:
        # The division is guarded before it happens: a NaN in the branch not taken would still reach the gradient.
        occupied = self.occupied
        mean = torch.where(occupied, sums, 0) / torch.where(occupied, self.count, 1)
        return torch.where(occupied, mean, torch.nan)

    def __add__(self, other: BinStatistics) -> BinStatistics:
        """Sums over the voxels of both; case i is added to case i.

        ConfigError where the binnings differ or the bins are equal-mass ones, ShapeError where cases or classes differ.
        """
        if not isinstance(other, BinStatistics):
            return NotImplemented
        self._check_partner(other)
        need_common_edges(self.binning, "added")
        if self.count.shape != other.count.shape:
            raise ShapeError(
                f"statistics to add must have the same cases and classes; got {tuple(self.count.shape[:2])} and "
                f"{tuple(other.count.shape[:2])}. Put different cases side by side with BinStatistics.concatenate."
            )
        return self._map(lambda name: getattr(self, name) + getattr(other, name))

    @staticmethod
    def concatenate(parts: Iterable[BinStatistics]) -> BinStatistics:
        """The cases of all parts, in order.

        parts: one or more statistics. ConfigError where their binnings differ, ShapeError where their classes do.
        """
        parts = list(parts)
        if not parts:
            raise ShapeError("there must be at least one part to concatenate; got none. Pass at least one part.")
        for other in parts[1:]:
            parts[0]._check_partner(other)
            if other.classes != parts[0].classes:
                raise ShapeError(
                    f"parts must have the same classes; got {parts[0].classes} and {other.classes}."
                    " Select the same classes first."
                )
        return parts[0]._map(lambda name: torch.cat([getattr(part, name) for part in parts]))

    def pool(self, axis: Literal["case", "class"]) -> BinStatistics:
        """Sums over one axis, which is kept with length one; ConfigError for equal-mass bins.

        axis: "case" adds all cases, "class" all classes.
        """
        one_of("axis", axis, ("case", "class"))
        need_common_edges(self.binning, "pooled")
        dim = 0 if axis == "case" else 1
        return self._map(lambda name: getattr(self, name).sum(dim, keepdim=True))

    def select(
        self, *, cases: Sequence[int] | Tensor | None = None, classes: Sequence[int] | Tensor | None = None
    ) -> BinStatistics:
        """Only some of the cases and classes; ShapeError for an index that is out of range.

        cases: indices, or a boolean tensor with one entry per case; all if not given.
        classes: the same for classes.
        """
        rows, columns = self._index(cases, 0), self._index(classes, 1)
        return self._map(lambda name: take(take(getattr(self, name), 0, rows), 1, columns))

    def rebin(self, bins: int) -> BinStatistics:
        """The same sums in fewer bins, exact on every edge.

        Soft bins are refused (ConfigError): they overlap, so what a voxel would weigh in other bins cannot be told from
        their sums. Equal-mass bins are refused, too.

        bins: how many; must divide the number there is.
        """
        need_common_edges(self.binning, "rebinned")
        if self.binning.kernel != "hard":
            raise ConfigError(
                f"only hard bins can be rebinned; these are {self.binning.kernel}. Soft bins overlap: collect them "
                f"again with bins={bins}."
            )
        bins = check_integer("bins", bins)
        if self.binning.bins % bins:
            raise ConfigError(f"bins must divide {self.binning.bins}; got {bins!r}.")
        together = self.binning.bins // bins
        return self._map(lambda name: getattr(self, name).unflatten(2, (bins, together)).sum(3), bins=bins)

    def detach(self) -> BinStatistics:
        """The same sums without a gradient."""
        return self._map(lambda name: getattr(self, name).detach())

    def to(self, device: torch.device | str) -> BinStatistics:
        """The same sums on another device.

        device: as torch names it.
        """
        return self._map(lambda name: getattr(self, name).to(device))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write one .npz file (no pickle inside), whole or not at all.

        path: the file, which is replaced if it is there.
        """
        arrays = {name: getattr(self, name).detach().cpu().numpy() for name in SUMS}
        write_npz(Path(path), {"format": FORMAT, "binning": asdict(self.binning)}, arrays)

    @staticmethod
    def load(path: str | os.PathLike[str]) -> BinStatistics:
        """Read what `save` wrote; SegcalError where the file holds something else.

        path: the file.
        """
        header, arrays = read_npz(path, kind=FORMAT)
        try:
            count, confidence_sum, label_sum = (torch.from_numpy(arrays[name].astype(np.float64)) for name in SUMS)
            return BinStatistics(count, confidence_sum, label_sum, Binning(**header["binning"]))
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise SegcalError(
                f"{path} must hold three sums and their binning; {error}. Save the statistics again."
            ) from error

    def _check_partner(self, other: BinStatistics) -> None:
        if other.binning == self.binning:
            return
        remedy = "Collect both alike, or rebin one of them."
        if other.binning.equal_mass_above != self.binning.equal_mass_above:
            remedy = (
                "Equal-mass bins go with equal-mass bins of the same threshold alone: use segcal.equal_mass on both."
            )
        raise ConfigError(f"statistics must share one binning; got {self.binning} and {other.binning}. {remedy}")

    def _index(self, wanted: Sequence[int] | Tensor | None, dim: int) -> Tensor:
        length, word = (self.cases, self.classes)[dim], ("case", "class")[dim]
        index = torch.arange(length) if wanted is None else torch.as_tensor(wanted)
        if index.dtype == torch.bool:
            if index.shape != (length,):
                raise ShapeError(
                    f"a boolean choice must have one entry per {word} ({length}); got {len(index)}."
                    " Pass one entry for each."
                )
            index = index.nonzero().flatten()
        if index.ndim != 1:
            raise ShapeError(
                f"{word} indices must be a list of whole numbers; got {wanted!r}. Pass a list of integers."
            )
        index = index.long()
        if index.numel() and not -length <= int(index.min()) <= int(index.max()) < length:
            raise ShapeError(
                f"{word} indices must lie in 0..{length - 1}; got {index.tolist()}. Use an index in this range."
            )
        return torch.where(index < 0, index + length, index).to(self._device)

    @property
    def _device(self) -> torch.device:
        return self.count.device

    def _map(self, function: Callable[[str], Tensor], *, bins: int | None = None) -> BinStatistics:
        count, confidence_sum, label_sum = (function(name) for name in SUMS)
        binning = self.binning if bins is None else replace(self.binning, bins=bins)
        return BinStatistics(count, confidence_sum, label_sum, binning)


def take(sums: Tensor, dim: int, index: Tensor) -> Tensor:
    """These entries along an axis; a view where they stand side by side."""
    if len(index) and torch.equal(index, torch.arange(int(index[0]), int(index[0]) + len(index), device=index.device)):
        return sums.narrow(dim, int(index[0]), len(index))
    return sums.index_select(dim, index)
