"""Measure one case: read it slab by slab, add up every sum that an evaluation needs.

All in numpy: torch takes seconds to import, and a worker process that only reads and counts need not wait for it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from segcal._io.files import read_header, read_npz, write_npz
from segcal.errors import ConfigError, FileError, GridError, LabelError, RangeError, SegcalError, ShapeError
from segcal.evaluation.doubts import HARD_DECISIONS, MEANINGS, SAVE_PROBABILITIES, Watch
from segcal.kernels.spec import (
    CROSS_ENTROPY,
    HAS_NUMBA,
    SMALLEST,
    SUM_TOLERANCE,
    VOXELS,
    Spec,
    squared_error,
)
from segcal.volumes import Case, CaseFiles, open_case
from segcal.volumes.regions import Regions

if TYPE_CHECKING:
    from segcal.calibrators import Calibrator

Array = NDArray[Any]

FORMAT = "segcal case 3"
FINE_BINS = 1200  # divisible by every bin count in use
SLAB_ELEMENTS = 1 << 25  # probabilities read at a time: 128 MiB of float32
BLOCK = 1 << 15  # voxels that are classified together, in the cache


@dataclass(frozen=True)
class Options:
    """How to read predictions and what to report."""

    bins: int = 20
    background: bool = False
    logits: bool = False
    sigmoid: bool = False
    regions: Regions | None = None
    class_names: tuple[tuple[int, str], ...] | None = None
    ignore: int | None = None
    """Label of voxels that are left out of everything."""
    calibrator: str | None = None
    """File of a calibrator that predictions go through first."""
    calibrator_fingerprint: str | None = None
    values: tuple[int, ...] | None = None
    """Label value of each class, where they are not 0, 1, 2 and so on."""
    strict_grid: bool = False
    """Refuse cases whose headers leave the place of the voxels open."""

    def __post_init__(self) -> None:
        if not 1 <= self.bins <= 10 * FINE_BINS:
            raise ConfigError(f"bins must be a whole number from 1 to {10 * FINE_BINS}; got {self.bins}.")

    @property
    def fine_bins(self) -> int:
        """1,200, or the nearest multiple of the bins that are reported where those do not divide it."""
        return self.bins * max(1, round(FINE_BINS / self.bins))


@dataclass(frozen=True, eq=False)
class CaseSums:
    """The sums of one case, float64; they add up over slabs."""

    bins: Array
    """(3, class, fine bin): count, confidence sum, label sum."""
    top_label: Array
    """(3, fine bin): the same of each voxel's most probable class; no bins where classes overlap."""
    overlap: Array
    """(3, class): voxels predicted, true, and both."""
    scores: Array
    """(3, class): squared error and log loss of the class against the rest, voxels."""
    joint: Array
    """(3, 1): the same of the distribution over all classes; where classes overlap, the mean over them."""
    labels: Array
    """(1, label): voxels of each trained label but the background, for regions that are unions of labels; else none."""

    def __add__(self, other: CaseSums) -> CaseSums:
        return CaseSums(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))

    def save(self, path: Path, case: str, sources: Sequence[Path], *, doubts: Sequence[str] = ()) -> None:
        """Write them to a file of their own, with the stamps of what they were read from and what is doubtful there."""
        stamps = {source.name: stamp(source) for source in sources}
        header = {"format": FORMAT, "case": case, "classes": self.bins.shape[1], "files": stamps}
        header["notes"] = list(doubts)
        write_npz(path, header, {f.name: getattr(self, f.name) for f in fields(self)})

    @staticmethod
    def classes_in(path: Path) -> int:
        """How many classes the sums in a file have, without reading them."""
        return int(read_header(path, kind=FORMAT)["classes"])

    @staticmethod
    def doubts_in(path: Path) -> list[str]:
        """What is doubtful about the case in a file."""
        return [str(doubt) for doubt in read_header(path, kind=FORMAT).get("notes", [])]

    @staticmethod
    def load(path: Path) -> tuple[CaseSums, dict[str, Any]]:
        """What `save` wrote: the sums and the stamps."""
        header, arrays = read_npz(path, kind=FORMAT)
        try:
            sums, stamps = CaseSums(**arrays), header["files"]
            sums._check(header["classes"])
        except (LookupError, TypeError, ValueError) as error:
            raise SegcalError(f"{path} must hold the sums of a case; {error}.") from error
        return sums, stamps

    def _check(self, named: object) -> None:
        """Refuse what `measure_voxels` never makes. Scores may be infinite, or below 0 by rounding; sums may not."""
        arrays = [np.asarray(getattr(self, f.name)) for f in fields(self)]
        shapes = [array.shape for array in arrays]
        (_, classes, bins), (_, top_bins), *_, (_, labels) = shapes
        expected = [(3, classes, bins), (3, top_bins), (3, classes), (3, classes), (3, 1), (1, labels)]
        if shapes != expected or top_bins not in (0, bins):
            raise ValueError(f"its arrays have the shapes {shapes}")
        if named != classes:
            raise ValueError(f"its header names {named} classes, and it has {classes}")
        if any(array.dtype != np.float64 for array in arrays):
            raise ValueError("its arrays are not float64")
        if not all(((array >= 0) & (array < 2**60)).all() for array in (*arrays[:3], arrays[5])):
            raise ValueError("its sums are not finite numbers of at least 0")

    @staticmethod
    def are_in(path: Path, options: Options) -> bool:
        """Whether a file has the sums of a case; it may be missing, or spoilt since it was written."""
        try:
            return bool(CaseSums.load(path)[0].bins.shape[2] == options.fine_bins)
        except (SegcalError, OSError):
            return False


def stamp(path: Path) -> dict[str, int]:
    """Size and times of change, which tell whether a file is still the same.

    A copy may bring the time of its content along; `replaced_ns` is the system's own, which nobody can set.
    """
    try:
        status = path.stat()
    except OSError:
        return {"bytes": -1, "changed_ns": -1, "replaced_ns": -1}
    return {"bytes": status.st_size, "changed_ns": status.st_mtime_ns, "replaced_ns": status.st_ctime_ns}


@contextmanager
def unchanged(sources: Sequence[Path]) -> Iterator[None]:
    """Refuse what was read from files that changed meanwhile."""
    before = [stamp(source) for source in sources]
    yield
    for source, then in zip(sources, before, strict=True):
        if stamp(source) != then:
            raise FileError(f"files must stay as they are while they are read; {source} changed. Start again.")


class Measured(NamedTuple):
    """The sums of a case, and what is doubtful about it (see `segcal.evaluation.doubts`)."""

    sums: CaseSums
    doubts: tuple[str, ...]


def measure_case(
    files: CaseFiles, options: Options, *, threads: int | None = None, calibrator: Calibrator | None = None
) -> Measured:
    """The sums of one case, read slab by slab, through the calibrator given or that of the options."""
    if calibrator is None and options.calibrator is not None:
        from segcal.evaluation.calibrated import loaded

        calibrator = loaded(options.calibrator, options.calibrator_fingerprint)
    total: CaseSums | None = None
    with open_case(files) as case:
        doubts = case.grid.doubts
        if options.strict_grid and doubts:
            raise GridError(f"{files.name}: the grid must be certain, as --strict-grid asks; {MEANINGS[doubts[0]]}")
        watch = Watch(logits=options.logits, overlapping=options.sigmoid)
        case.watch = watch.see
        for values, labels, ranked in _slabs(case, options, calibrator):
            sums = measure_voxels(values, labels, options, ranked=ranked, threads=threads)
            total = sums if total is None else total + sums
    if total is None or not total.scores[2].any():
        ignored = "" if options.ignore is None else f" whose label is not {options.ignore}, which is ignored"
        raise ShapeError(f"the volume must have voxels{ignored}; it has none.")
    return Measured(total, (*doubts, HARD_DECISIONS) if watch.hard else doubts)


def _slabs(case: Case, options: Options, calibrator: Calibrator | None) -> Iterator[tuple[Array, Array, Array | None]]:
    """Values, labels, and what decisions are taken on where that is something else than the values."""
    if calibrator is not None:
        from segcal.evaluation.calibrated import calibrated_slabs

        yield from calibrated_slabs(case, options, calibrator)
        return
    for values, labels in case.slabs(slab_voxels(case.classes)):
        yield values, labels, None


def slab_voxels(classes: int) -> int:
    """How many voxels of a case to have in hand at a time."""
    return max(1 << 16, SLAB_ELEMENTS // classes)


def slabs_of(values: Array) -> Iterator[slice]:
    """Where to cut (class, voxel) values that are worked through a part at a time."""
    step = slab_voxels(len(values))
    return (slice(start, start + step) for start in range(0, values.shape[1], step))


def measure_voxels(
    values: Array, labels: Array, options: Options, *, ranked: Array | None = None, threads: int | None = None
) -> CaseSums:
    """The sums of (class, voxel) values and of their labels: (voxel), or (region, voxel) for classes that overlap.

    Decisions are taken on `ranked`, values in the same order that tell apart what rounding joined; or on the values.
    """
    counted, threads = counted_voxels(labels, options), threads or os.cpu_count() or 1
    values, labels = values[:, counted], places_of(labels[..., counted], len(values), options)
    overlapping, ranked = options.sigmoid or len(values) == 1, values if ranked is None else ranked[:, counted]
    if options.logits:
        values = sigmoid(values) if overlapping else softmax(values)
    collect = partial(_collect, fine_bins=options.fine_bins, threads=threads)
    if overlapping or options.regions is not None:
        probabilities, truth = regions_of(values, labels, options)
        bins, scores = collect(probabilities, truth)
        scores[1] += _absent_log_loss(probabilities, truth, threads)
        own = overlapping and len(ranked) == len(probabilities)  # each region has its channel
        predicted = ranked >= (0.0 if options.logits else 0.5) if own else probabilities >= 0.5
        true = truth == 1
        overlap = np.array([where.sum(1) for where in (predicted, true, predicted & true)], dtype=np.float64)
        joint = scores.mean(1, keepdims=True)
        return CaseSums(bins, np.zeros((3, 0)), overlap, scores, joint, _trained_labels(labels, options))
    if labels.ndim != 1:
        raise ShapeError(
            f"labels must be one map of exclusive classes; got {len(labels)} channels. "
            f"For classes that overlap use --sigmoid."
        )
    bins, scores = collect(values, labels[None])
    joint = scores.sum(1, keepdims=True) / (1 if len(values) > 2 else np.array([[2], [1], [1]]))
    joint[2] = scores[2, 0]
    scores[1] += _absent_log_loss(values, labels, threads)
    top, right, overlap = _classify(values, labels, ranked)
    of_top = collect(top[None], right[None], scores=False)[0][:, 0]
    return CaseSums(bins, of_top, overlap, scores, joint, np.zeros((1, 0)))


def _absent_log_loss(probabilities: Array, labels: Array, threads: int) -> Array:
    """For each class, the sum of -log(1 - p) over the voxels that are not of it; labels (voxel) or (class, voxel)."""
    if HAS_NUMBA:
        from segcal.kernels.numba_likelihood import absent_log_loss

        return absent_log_loss(probabilities, labels, threads=threads)
    absent = [labels != c for c in range(len(probabilities))] if labels.ndim == 1 else labels != 1
    rows = (1 - p[where].astype(np.float64) for p, where in zip(probabilities, absent, strict=True))
    return np.array([-np.log(np.maximum(row, SMALLEST)).sum() for row in rows])


def _trained_labels(labels: Array, options: Options) -> Array:
    """(1, label): voxels of each label that the regions are unions of; none where label maps are of regions."""
    regions = options.regions
    if regions is None or labels.ndim == 2:
        return np.zeros((1, 0))
    trained = sorted(set(regions.values or ()).union(*regions.members.values()) - {0})
    aliases = dict(regions.aliases)
    found, counts = np.unique(labels, return_counts=True)
    number = dict.fromkeys(trained, 0)
    for value, count in zip(found.tolist(), counts.tolist(), strict=True):
        meaning = aliases.get(value, value)
        if meaning in number:
            number[meaning] += count
    return np.array([list(number.values())], dtype=np.float64)


def counted_voxels(labels: Array, options: Options) -> Array | slice:
    """Which voxels have another label than the ignored one; a slice where all of them count."""
    if options.ignore is None:
        return slice(None)
    if labels.ndim != 1:
        raise ShapeError(f"labels must be one map for a label to be ignored; got {len(labels)} channels.")
    keep: Array = labels != options.ignore
    return slice(None) if keep.all() else keep


def places_of(labels: Array, channels: int, options: Options) -> Array:
    """Labels as places among the options' values; as they are where there are none."""
    if options.values is None:
        return labels
    if labels.ndim != 1:
        raise ShapeError(f"labels must be one map for their values to be told; got {len(labels)} channels.")
    if len(options.values) != (2 if channels == 1 else channels):
        raise ShapeError(
            f"predictions must have a channel for each label value {list(options.values)}; they have {channels}."
        )
    order = np.argsort(options.values)
    known = np.array(options.values)[order]
    where = np.searchsorted(known, labels).clip(max=len(known) - 1)
    if not np.array_equal(known[where], labels):
        raise _unknown_label(labels, options.values)
    places: Array = order.astype(np.uint8 if len(order) < 256 else np.int64)[where]
    return places


def _collect(
    probabilities: Array, labels: Array, *, fine_bins: int, threads: int, scores: bool = True
) -> tuple[Array, Array]:
    """Sums per bin (3, class, bin) and scores (3, class; zeros if not asked for) of (class, voxel) probabilities."""
    spec = Spec("none", float(fine_bins), 0.0, fine_bins, 0, "left", scores)
    moments, label_moments, class_sums, wrong, outside = _sums(
        np.ascontiguousarray(probabilities), np.ascontiguousarray(labels), spec, threads
    )
    if wrong >= 0:
        raise _unknown_label(labels, range(len(probabilities)))
    if outside:
        raise not_probabilities(probabilities)
    counts, above = moments[..., 0], moments[..., 1]
    confidences = (above + np.arange(fine_bins) * counts) / fine_bins
    if not np.isfinite(confidences).all():
        bad = int(np.argwhere(~np.isfinite(confidences))[0][0])
        raise RangeError(f"probabilities must be numbers; class {bad} contains NaN.")
    bins = np.array([counts, confidences, label_moments[..., 0]])
    return bins, np.array([squared_error(class_sums), class_sums[:, CROSS_ENTROPY], class_sums[:, VOXELS]])


def _sums(values: Array, labels: Array, spec: Spec, threads: int) -> tuple[Array, Array, Array, int, bool]:
    if HAS_NUMBA:
        from segcal.kernels.numba_cpu import NO_MASK, array_sums

        *sums, wrong, outside = array_sums(values[None], labels[None], NO_MASK, spec, threads=threads)
    else:
        import torch

        from segcal.kernels import reference

        *tensors, wrong, outside = reference.forward(
            torch.from_numpy(values)[None], torch.from_numpy(labels)[None], None, spec
        )
        sums = [tensor.numpy() for tensor in tensors]
    moments, label_moments, class_sums = (array[0] for array in sums)
    return moments, label_moments, class_sums, wrong, outside


def _classify(probabilities: Array, labels: Array, ranked: Array | None = None) -> tuple[Array, Array, Array]:
    """Largest probability of each voxel, whether its class is the true one, and (3, class) overlap counts.

    `ranked` are the logits, if there are any: they tell classes apart whose probabilities round to the same number, so
    that a temperature changes no decision.
    """
    ranked = probabilities if ranked is None else ranked
    classes, voxels = probabilities.shape
    top, right = np.empty(voxels, probabilities.dtype), np.empty(voxels, np.uint8)
    confusion = np.zeros(classes**2, np.int64)
    for start in range(0, voxels, BLOCK):
        block = slice(start, min(start + BLOCK, voxels))
        rows, scores, true = probabilities[:, block], ranked[:, block], labels[block].astype(np.int64)
        best, predicted, total = scores[0].copy(), np.zeros_like(true), rows[0].copy()
        for c in range(1, classes):
            better = scores[c] > best
            np.copyto(best, scores[c], where=better)
            predicted[better] = c
            total += rows[c]
        if ranked is not probabilities:
            best = np.take_along_axis(rows, predicted[None], 0)[0]
        off = np.abs(total - 1)
        if (off > SUM_TOLERANCE).any():
            raise RangeError(
                f"the probabilities of a voxel must sum to 1; one has {total[off.argmax()]:.4g}. "
                f"For logits use --logits, for classes that overlap --sigmoid."
            )
        top[block], right[block] = best, predicted == true
        confusion += np.bincount(true * classes + predicted, minlength=classes**2)
    square = confusion.reshape(classes, classes).astype(np.float64)
    return top, right, np.array([square.sum(0), square.sum(1), square.diagonal()])


def regions_of(values: Array, labels: Array, options: Options) -> tuple[Array, Array]:
    """Probabilities and 0/1 labels of each region, both (region, voxel)."""
    channels, regions = len(values), options.regions
    if regions is None:
        if labels.ndim == 2:
            return values, _matching(labels, channels)
        first = 1 if channels == 1 else 0  # a single channel is the foreground
        if labels.size and not 0 <= labels.min() <= labels.max() < first + channels:
            raise _unknown_label(labels, range(first + channels), single=channels == 1)
        return values, _members(labels, [(value,) for value in range(first, first + channels)])
    names = list(regions.members)
    if options.sigmoid and channels == len(names):
        together = values
    else:
        expected = channels if regions.values is None else len(regions.values)
        if channels != expected or max(max(regions.channels(name)) for name in names) >= channels:
            needed = regions.values or range(1 + max(max(members) for members in regions.members.values()))
            raise ShapeError(
                f"predictions must have a channel for each label value {list(needed)}; they have {channels}. "
                f"Predictions of the regions themselves need --sigmoid and a channel for each of "
                f"{', '.join(names)}, in that order."
            )
        if not options.sigmoid and 0 in (regions.values or (0,)):
            _classify(values, np.zeros(values.shape[1], np.uint8))  # refuses probabilities that do not sum to 1
        together = np.stack([values[regions.channels(name)].sum(0, dtype=values.dtype) for name in names])
    if labels.ndim == 2:
        return together, _matching(labels, len(names))
    for value, meaning in regions.aliases:
        labels = np.where(labels == value, meaning, labels)
    if regions.values is not None:
        known = sorted({0, *regions.values})  # the background may have no channel
        if not np.isin(labels, known).all():
            raise _unknown_label(labels, known)
    return together, _members(labels, [regions.members[name] for name in names])


def _members(labels: Array, members: Sequence[Sequence[int]]) -> Array:
    return np.stack([np.isin(labels, values) for values in members]).astype(np.uint8)


def _matching(labels: Array, channels: int) -> Array:
    if len(labels) != channels:
        raise ShapeError(f"labels must have a channel for each of {channels} predicted ones; they have {len(labels)}.")
    if not np.isin(labels, (0, 1)).all():
        raise _unknown_label(labels, (0, 1))
    return labels.astype(np.uint8)


def _unknown_label(labels: Array, allowed: Sequence[int], *, single: bool = False) -> LabelError:
    found = set(np.unique(labels).tolist())
    unknown = sorted(found - set(allowed))
    remedy = "Tell their values or regions with --regions, or leave one out with --ignore."
    if single:
        remedy = f"A single channel is one class; if it is a label map, {SAVE_PROBABILITIES}."
    elif 4 in unknown and found <= {0, 1, 2, 4}:
        remedy = "For those of BraTS use --regions brats."
    return LabelError(f"labels must be among {list(allowed)}; they hold {unknown[:5]}. {remedy}")


def not_probabilities(values: Array) -> RangeError:
    known = np.nan_to_num(values, nan=0.0)
    worst = known.flat[np.maximum(-known, known - 1).argmax()]
    return RangeError(
        f"probabilities must lie in [0, 1]; one is {worst:.6g}. If these are logits, use --logits; if scaled integers, "
        f"store the scale in the file."
    )


def softmax(logits: Array) -> Array:
    exponentials: Array = np.exp(logits - logits.max(0))
    exponentials /= exponentials.sum(0)
    return exponentials


def sigmoid(logits: Array) -> Array:
    with np.errstate(over="ignore"):
        probabilities: Array = 1 / (1 + np.exp(-logits))
    return probabilities
