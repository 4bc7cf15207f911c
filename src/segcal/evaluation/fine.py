"""Bin statistics of many cases in fine bins, kept packed: a cohort of ten thousand cases fits, and its bins are read in
blocks of a few cases. What follows from them, case by case, is worked out once and goes along with a selection.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from segcal._io.spool import Piece, Spool
from segcal.binning import Binning
from segcal.decisions import uncertain_voxels
from segcal.errors import SegcalError
from segcal.evaluation.packing import pack, unpack
from segcal.metrics import (
    ace,
    ece,
    equal_mass,
    mce,
    occupied,
    overconfidence,
    signed_gap,
    underconfidence,
)
from segcal.statistics import SUMS, BinStatistics, take

CELLS = 48_000  # fine bins of a block, as 10 cases of 4 classes have them: few copies of these fit a processor's cache
COARSE_CELLS = 8_000  # bins of a block of which many copies are made
HELD = 2**18  # fine bins that are held unpacked, once they are: 6 MB
LARGEST = 2.0**60

CaseNumbers = dict[str, Tensor]
"""By name, of every case; (case, class, ...)."""


class _All(NamedTuple):
    """The packed sums of each case, and how many classes they have."""

    pieces: tuple[Piece, ...]
    classes: int


class FineStatistics(BinStatistics):
    """As any statistics; the sums are unpacked when they are asked for, and not held where they are large."""

    def __new__(cls, *sums: Any, **named: Any) -> Any:
        """From sums, plain statistics: `dataclasses.replace` calls this. `packed` makes the others."""
        return BinStatistics(*sums, **named)

    @staticmethod
    def packed(pieces: Sequence[Piece], stored: int, binning: Binning) -> FineStatistics:
        """Of cases whose packed sums are these pieces, each of so many classes."""
        rows, columns = torch.arange(len(pieces)), torch.arange(stored)
        return FineStatistics._made(binning, _All(tuple(pieces), stored), rows, columns, None)

    @staticmethod
    def _made(
        binning: Binning, everything: _All, rows: Tensor, columns: Tensor, origin: FineStatistics | None
    ) -> FineStatistics:
        made: FineStatistics = object.__new__(FineStatistics)
        for name, value in (
            ("binning", binning), ("everything", everything), ("rows", rows), ("columns", columns), ("origin", origin),
            ("known", {}),
        ):  # fmt: skip
            object.__setattr__(made, name, value)
        return made

    def __reduce__(self) -> tuple[Any, ...]:
        """What pickle and copies hold: the packed sums of these cases, not those of the ones left out."""
        contents = [piece.read() for piece in self.pieces]
        return FineStatistics._restored, (self.binning, contents, self.everything.classes, self.columns)

    @staticmethod
    def _restored(binning: Binning, contents: Sequence[bytes], stored: int, columns: Tensor) -> FineStatistics:
        spool = Spool()
        pieces = tuple(spool.add(content) for content in contents)
        return FineStatistics._made(binning, _All(pieces, stored), torch.arange(len(pieces)), columns, None)

    everything: _All
    rows: Tensor
    columns: Tensor
    """Which of all cases and classes these are."""
    origin: FineStatistics | None
    """All of them, where these were selected; what is worked out of most is worked out, and kept, of all."""
    known: dict[str, CaseNumbers]
    """What was worked out, by its key."""

    @property
    def count(self) -> Tensor:
        return self.unpacked().count

    @property
    def confidence_sum(self) -> Tensor:
        return self.unpacked().confidence_sum

    @property
    def label_sum(self) -> Tensor:
        return self.unpacked().label_sum

    @property
    def cases(self) -> int:
        return len(self.rows)

    @property
    def classes(self) -> int:
        return len(self.columns)

    @property
    def whole(self) -> bool:
        """Whether these are all classes that are stored, in their order."""
        return self.columns.tolist() == list(range(self.everything.classes))

    @property
    def pieces(self) -> list[Piece]:
        """The packed sums of each case, with all classes."""
        return [self.everything.pieces[i] for i in self.rows.tolist()]

    def unpacked(self) -> BinStatistics:
        """The same as plain statistics; SegcalError where the bytes hold something else."""
        for source in (self, self.origin):
            if source is not None and "sums" in source.known:
                return _with_sums(self._own(source.known["sums"], source), self.binning)
        made = self._unpack(self.pieces)
        if self.cases * self.classes * self.binning.bins <= HELD:
            self.known["sums"] = _sums_of(made)
        return made

    def _unpack(self, pieces: Sequence[Piece]) -> BinStatistics:
        contents, classes = [piece.read() for piece in pieces], self.everything.classes
        try:
            found = torch.from_numpy(unpack(contents, classes, self.binning.bins))
        except ValueError as error:
            raise SegcalError(
                f"an evaluation must hold the sums of its cases; {error}. Run `segcal evaluate` again."
            ) from error
        if found.numel() and not (found.min() >= 0 and found.max() < LARGEST):  # of NaN, neither holds
            raise SegcalError(
                "an evaluation must hold sums that are finite numbers of at least 0; some are not."
                " Run `segcal evaluate` again."
            )
        made = BinStatistics(found[0], found[1], found[2], self.binning)
        return made if self.whole else made.select(classes=self.columns)

    def blocks(self, together: int) -> Iterator[BinStatistics]:
        """So many cases at a time, as plain statistics."""
        pieces = self.pieces
        for start in range(0, max(self.cases, 1), together):
            yield self._unpack(pieces[start : start + together])

    def select(
        self, *, cases: Sequence[int] | Tensor | None = None, classes: Sequence[int] | Tensor | None = None
    ) -> BinStatistics:
        rows, columns = self._index(cases, 0), self._index(classes, 1)
        chosen = self.rows[rows], self.columns[columns]
        return FineStatistics._made(self.binning, self.everything, *chosen, self.origin or self)

    def numbers(self, key: str, function: Callable[[BinStatistics], CaseNumbers]) -> CaseNumbers:
        """What a function of statistics finds of each case and class, block by block; remembered by its key."""
        if key not in self.known:
            origin = self.origin
            if origin is not None and (key in origin.known or 2 * self.cases >= origin.cases):
                self.known[key] = self._own(origin.numbers(key, function), origin)
            else:
                self.known[key] = _joined(map(function, blocks(self)), self.cases)
        return self.known[key]

    def _own(self, found: CaseNumbers, source: FineStatistics) -> CaseNumbers:
        if source is self:
            return found
        return {name: take(take(values, 0, self.rows), 1, self.columns) for name, values in found.items()}

    def rebin(self, bins: int) -> BinStatistics:
        """As of any statistics, block by block; the result is remembered."""
        errors = f"numbers {bins}"  # of `case_errors`, which has the sums, too
        there = errors in self.known or (self.origin is not None and errors in self.origin.known)
        known = self.numbers(errors if there else f"bins {bins}", lambda block: _sums_of(block.rebin(bins)))
        return _with_sums(known, replace(self.binning, bins=bins))

    def pool(self, axis: Literal["case", "class"]) -> BinStatistics:
        """As of any statistics, block by block."""
        parts = [block.pool(axis) for block in blocks(self)]
        whole = BinStatistics.concatenate(parts)
        return whole.pool(axis) if axis == "case" else whole

    @property
    def _device(self) -> torch.device:
        return torch.device("cpu")


def blocks(stats: BinStatistics, cells: int = CELLS) -> Iterator[BinStatistics]:
    """The cases, some at a time, as plain statistics; one block without a case where there is none."""
    together = max(1, cells // max(1, stats.classes * stats.binning.bins))
    if isinstance(stats, FineStatistics):
        yield from stats.blocks(together)
        return
    for start in range(0, max(stats.cases, 1), together):
        yield stats.select(cases=range(start, min(start + together, stats.cases)))


def _joined(parts: Iterable[CaseNumbers], cases: int) -> CaseNumbers:
    """The parts one below the other, put in their places as they come: they are never held twice."""
    whole: CaseNumbers = {}
    start = 0
    for part in parts:
        if not whole:
            whole = {name: values.new_empty(cases, *values.shape[1:]) for name, values in part.items()}
        number = len(next(iter(part.values())))
        for name, values in part.items():
            whole[name][start : start + number] = values
        start += number
    return whole


def case_errors(stats: BinStatistics, bins: int) -> CaseNumbers:
    """The calibration errors of each case and class in so many bins, and what else their bins tell."""
    found = _of_cases(stats, bins, lambda fine: _in_bins(fine, bins))
    coarse = _with_sums(found, replace(stats.binning, bins=bins))
    errors = _joined(map(_errors, blocks(coarse, COARSE_CELLS)), stats.cases)
    return errors | {"equal_mass_ace": found["equal_mass_ace"]}


def _errors(coarse: BinStatistics) -> CaseNumbers:
    return {
        "ace": ace(coarse),
        "ece": ece(coarse),
        "mce": mce(coarse),
        "occupied": occupied(coarse),
        "signed_gap": signed_gap(coarse),
        "overconfidence": overconfidence(coarse),
        "underconfidence": underconfidence(coarse),
    }


def decision_numbers(stats: BinStatistics, bins: int) -> CaseNumbers:
    """Voxels of each case and class that are "expected", and those whose probability is "uncertain"."""
    return _of_cases(stats, bins, _promised)


def _of_cases(stats: BinStatistics, bins: int, function: Callable[[BinStatistics], CaseNumbers]) -> CaseNumbers:
    """What a function finds of each case; of packed statistics all that is found here, as they are read but once."""
    if isinstance(stats, FineStatistics):
        return stats.numbers(f"numbers {bins}", lambda fine: _in_bins(fine, bins) | _promised(fine))
    return _joined(map(function, blocks(stats)), stats.cases)


def _in_bins(fine: BinStatistics, bins: int) -> CaseNumbers:
    """The sums in so many bins, and the error in as many of equal mass, which needs the fine ones."""
    return _sums_of(fine.rebin(bins)) | {"equal_mass_ace": ace(equal_mass(fine, bins))}


def _promised(fine: BinStatistics) -> CaseNumbers:
    return {"expected": fine.confidence_sum.sum(2), "uncertain": uncertain_voxels(fine)}


def _sums_of(stats: BinStatistics) -> CaseNumbers:
    return {name: getattr(stats, name) for name in SUMS}


def _with_sums(known: CaseNumbers, binning: Binning) -> BinStatistics:
    count, confidence_sum, label_sum = (known[name] for name in SUMS)
    return BinStatistics(count, confidence_sum, label_sum, binning)


def packed_pieces(stats: BinStatistics) -> Sequence[Piece]:
    """The packed sums of each case: those that are there, or made now."""
    if isinstance(stats, FineStatistics) and stats.whole:
        return stats.pieces
    spool = Spool()
    cases = (sums for block in blocks(stats) for sums in torch.stack(list(_sums_of(block).values()), 1))
    return [spool.add(pack(sums.detach().cpu().double().numpy())) for sums in cases]


def packed(stats: BinStatistics) -> FineStatistics:
    """The same statistics, packed."""
    return FineStatistics.packed(packed_pieces(stats), stats.classes, stats.binning)


def concatenate(parts: Iterable[BinStatistics]) -> BinStatistics:
    """The cases of all parts, as `BinStatistics.concatenate`; packed ones stay so."""
    parts = list(parts)
    fine = [part for part in parts if isinstance(part, FineStatistics) and part.whole]
    if len(fine) < len(parts) or len({(part.classes, part.binning) for part in fine}) != 1:
        return BinStatistics.concatenate(parts)
    pieces = [piece for part in fine for piece in part.pieces]
    return FineStatistics.packed(pieces, fine[0].classes, fine[0].binning)
