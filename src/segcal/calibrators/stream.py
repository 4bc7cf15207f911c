"""Cases as calibrators read them: again and again, piece by piece, never all at once.

A case is a tuple (logits, labels), logits (class, ...) and labels (...) as class indices, or (class, ...) as zeros and
ones for classes that overlap; or it is an object whose `slabs()` yields such tuples of some
of its voxels each, so that not even one case need fit in memory, and whose `volume()` gives the whole of it. If it has
`voxels(classes)`, that tells how many there are without reading them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence, Sized
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from segcal.collect import check_classes
from segcal.errors import ConfigError, LabelError, RangeError, ShapeError, check_seed

PIECE_ELEMENTS = 1 << 21  # numbers taken to float64 at a time
CACHED_ELEMENTS = 1 << 17  # numbers transformed at a time, so that what is made on the way stays in the cache
SURE = (0.9, 0.999)  # largest probabilities that divide doubtful voxels from sure ones


CaseStream = Iterable[Any]
"""Cases that can be gone through again: a list, or an object with `__iter__`."""


class Piece(NamedTuple):
    """Some voxels of a case: logits (class, voxel); labels (voxel), or (class, voxel) where they overlap."""

    logits: Tensor
    labels: Tensor
    weights: Tensor | None = None
    """(voxel): how many voxels each stands for; None: one."""

    @property
    def voxels(self) -> float:
        return float(self.logits.shape[1]) if self.weights is None else float(self.weights.sum())


def check_stream(cases: CaseStream) -> int:
    """The number of cases; refuses what can be gone through only once."""
    if iter(cases) is cases:
        raise ConfigError(
            "cases must be a list, or another object that can be iterated again; got an iterator. Pass a list."
        )
    number = len(cases) if isinstance(cases, Sized) else sum(1 for _ in cases)
    if not number:
        raise ConfigError("there must be cases to fit a calibrator on; got none. Pass at least one case.")
    return number


def need_finite(logits: Tensor) -> None:
    # Of finite numbers the sum nearly always is, and is found much sooner than each of them is looked at.
    if not bool(logits.sum().isfinite()) and not bool(logits.isfinite().all()):
        raise RangeError(
            "logits must be finite numbers to fit a calibrator; they hold NaN or infinity."
            " Check the network for overflow."
        )


def need_same_classes(first: int, classes: int, case: int) -> None:
    if classes != first:
        raise ShapeError(
            f"every case must have {first} classes, as the first has; case {case} has {classes}."
            " Use cases of one network."
        )


def no_voxels() -> ConfigError:
    return ConfigError("there must be voxels to fit a calibrator on; the cases have none. Add cases with voxels.")


def flat_labels(labels: Tensor, logits: Tensor) -> Tensor:
    """Labels (voxel) or (class, voxel) of labels on the grid of (class, ...) logits."""
    return labels.reshape(*labels.shape[: labels.ndim - logits.ndim + 1], -1)


def slabs_of(case: Any) -> Iterator[tuple[Tensor, Tensor]]:
    """Logits and labels of a case, in one or several parts."""
    if hasattr(case, "slabs"):
        yield from case.slabs()
    else:
        yield case[0], case[1]


def volume_of(case: Any) -> tuple[Tensor, Tensor]:
    """Return logits and labels of a whole case."""
    if hasattr(case, "volume"):
        logits, labels = case.volume()
        return logits, labels
    return case[0], case[1]


def voxels_of(case: Any, classes: int) -> int:
    """How many voxels a case of so many classes has."""
    if hasattr(case, "voxels"):
        return int(case.voxels(classes))
    return sum(logits[0].numel() for logits, _ in slabs_of(case))


def pieces_of(case: Any, activation: str, *, width: int = 1) -> Iterator[Piece]:
    """The voxels of a case, checked, in pieces that are small even with `width` numbers for each class and voxel."""
    for logits, labels in slabs_of(case):
        flat, truth = flatten(logits, labels, activation)
        step = max(1024, PIECE_ELEMENTS // (len(flat) * width))
        for start in range(0, flat.shape[1], step):
            part = flat[:, start : start + step]
            need_finite(part)
            yield Piece(part, truth[..., start : start + step])


def flatten(logits: Tensor, labels: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    """Logits (class, voxel), and labels (voxel) for a softmax, (class, voxel) of 0 and 1 for a sigmoid."""
    flat = (logits if logits.dtype in (torch.float32, torch.float64) else logits.float()).detach().flatten(1)
    classes, voxels = flat.shape
    truth = labels.detach()
    if truth.shape == logits.shape[1:]:
        truth = truth.reshape(-1)
    elif truth.shape == logits.shape:
        truth = truth.flatten(1)
    else:
        raise ShapeError(
            f"labels must lie on the grid of the logits {tuple(logits.shape)}; got {tuple(labels.shape)}."
            " Resample the labels to the grid of the logits."
        )
    if activation == "sigmoid":
        if truth.ndim == 1:
            if classes != 1:
                raise ShapeError(
                    f"labels must have a channel for each of {classes} classes that overlap; got one map."
                    " Pass one channel per class."
                )
            truth = truth[None]
        if voxels and not bool(((truth == 0) | (truth == 1)).all()):
            raise LabelError("labels of classes that overlap must be 0 or 1. Check the labels.")
        return flat, truth.double()
    if truth.ndim != 1:
        raise ShapeError("labels must be one map of class indices; got one for each class. Use activation='sigmoid'.")
    check_classes(classes, activation)
    truth = truth.long()
    if voxels:
        least, most = int(truth.min()), int(truth.max())
        if not 0 <= least <= most < classes:
            wrong = least if least < 0 else most
            raise LabelError(
                f"labels must be classes from 0 to {classes - 1}; one is {wrong}. Check the labels or set ignore_index."
            )
    return flat, truth


@dataclass(frozen=True, eq=False)
class Sample:
    """Voxels drawn from every case, and what the whole stream holds."""

    cases: tuple[tuple[Piece, ...], ...]
    """Of each case the strata that it has."""
    voxels: int
    true_voxels: Tensor
    """(class): voxels of each class in all labels."""

    @property
    def drawn(self) -> int:
        return sum(piece.logits.shape[1] for case in self.cases for piece in case)

    @property
    def classes(self) -> int:
        return len(self.true_voxels)

    def pieces(self) -> Iterator[Piece]:
        for case in self.cases:
            yield from case

    def select(self, which: Sequence[int]) -> Sample:
        """The same of some cases only."""
        cases = tuple(self.cases[i] for i in which)
        counts = torch.zeros_like(self.true_voxels)
        voxels = 0.0
        for case in cases:
            for piece in case:
                counts += _true_voxels(piece)
                voxels += piece.voxels
        return Sample(cases, round(voxels), counts.round())


def draw_sample(cases: CaseStream, *, voxels: int, activation: str, seed: int) -> Sample:
    """About `voxels` voxels in one pass, the same number from every case, true class and level of sureness.

    Rare classes and doubtful voxels are drawn as often as the background; weights make up for it, so that sums over
    the sample estimate sums over all voxels without bias. Every voxel of a small stratum is taken.
    """
    check_seed(seed)
    number = check_stream(cases)
    found: list[tuple[Piece, ...]] = []
    total, counts = 0, None
    for i, case in enumerate(cases):
        random = torch.Generator().manual_seed(seed * 1_000_003 + i)
        strata: list[_Stratum] = []
        for piece in pieces_of(case, activation):
            classes = len(piece.logits)
            if counts is None:
                counts = torch.zeros(classes, dtype=torch.float64)
            need_same_classes(len(counts), classes, i)
            counts += _true_voxels(piece)
            total += piece.logits.shape[1]
            share = max(8, voxels // (number * (classes + (activation == "sigmoid")) * (len(SURE) + 1)))
            kinds = _kinds(piece)
            keys = torch.rand(len(kinds), generator=random)
            if not strata:
                most = (classes + 1) * (len(SURE) + 1)
                strata, limits = [_Stratum(share) for _ in range(most)], torch.full((most,), 2.0)
            seen = torch.bincount(kinds, minlength=len(strata))
            offered = (keys < limits[kinds]).nonzero()[:, 0]  # few, once the strata are full
            for kind, stratum in enumerate(strata):
                if seen[kind]:
                    stratum.add(piece, offered[kinds[offered] == kind], keys, int(seen[kind]))
                    limits[kind] = stratum.limit
        found.append(tuple(stratum.piece() for stratum in strata if stratum.seen))
    if counts is None or not total:
        raise no_voxels()
    return Sample(tuple(found), total, counts)


class _Stratum:
    """The voxels with the smallest random keys among all that were offered: a draw without replacement."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.seen = 0
        self.kept: list[Tensor] = []  # keys, logits, labels

    @property
    def limit(self) -> float:
        """Larger keys need not be offered."""
        return float(self.kept[0][-1]) if len(self.kept[0]) == self.most else 2.0

    def add(self, piece: Piece, where: Tensor, keys: Tensor, seen: int) -> None:
        """Offer the voxels at `where`, of `seen` that there are."""
        self.seen += seen
        offered = [keys[where], piece.logits[:, where], piece.labels[..., where]]
        if self.kept:
            offered = [torch.cat(pair, dim=-1) for pair in zip(self.kept, offered, strict=True)]
        order = offered[0].argsort(stable=True)[: self.most]
        self.kept = [part[..., order] for part in offered]

    def piece(self) -> Piece:
        keys, logits, labels = self.kept
        return Piece(logits, labels, torch.full((len(keys),), self.seen / len(keys), dtype=torch.float64))


def _kinds(piece: Piece) -> Tensor:
    """A number for each voxel: its true class, and how sure the network is."""
    if piece.labels.ndim == 1:
        top = piece.logits.amax(0)
        surest, truth = 1 / (piece.logits - top).exp_().sum(0), piece.labels
    else:
        surest = piece.logits.abs().sigmoid().amin(0)
        first = torch.arange(1, len(piece.labels) + 1, dtype=torch.float64)
        truth = (piece.labels * first[:, None]).amax(0).long()
    sure = sum((surest > limit).long() for limit in SURE)
    return truth * (len(SURE) + 1) + sure


def _true_voxels(piece: Piece) -> Tensor:
    weights = torch.ones(piece.logits.shape[1], dtype=torch.float64) if piece.weights is None else piece.weights
    if piece.labels.ndim == 2:
        return piece.labels @ weights
    return torch.bincount(piece.labels, weights, minlength=len(piece.logits))
