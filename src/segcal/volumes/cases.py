"""An opened case: probabilities and labels of the same voxels, slab by slab."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial, reduce
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from segcal.errors import FileError, GridError, ShapeError, check_integer
from segcal.volumes.arrays import StoredArray, read_array
from segcal.volumes.averaging import Averaging
from segcal.volumes.grids import Grid, fit, whole
from segcal.volumes.pairing import CaseFiles, MemberFiles

PROBABILITY_KEYS = ("probabilities", "softmax", "logits", "arr_0")
LABEL_KEYS = ("labels", "label", "segmentation", "seg", "arr_0")
_SCAN_VOXELS = 1 << 20
MOST_CLASSES = 15  # single integers up to this are rather a label map than 255ths of a probability
_FULL_SCALE = {np.dtype(np.uint8): 255, np.dtype(np.uint16): 65535}


@dataclass(frozen=True, eq=False)
class Source:
    """Some classes of a prediction: a view (class, x, y, z) on the case's grid, and how its numbers are meant."""

    view: NDArray[Any]
    stored: StoredArray
    full_scale: int = 1  # the integer that stands for 1

    @property
    def type(self) -> np.dtype[Any]:
        wide = self.view.dtype.kind == "f" and self.view.dtype.itemsize > 4
        return np.dtype(np.float64 if wide else np.float32)

    @property
    def as_stored(self) -> bool:
        return not self.stored.scaled and self.full_scale == 1

    def read(self, block: NDArray[Any], out: NDArray[Any]) -> None:
        """Write the numbers meant by a block of the view to `out`, class by class."""
        for numbers, row in zip(block, out, strict=True):
            into = row.reshape(numbers.shape)
            with np.errstate(over="ignore", invalid="ignore"):  # whoever reads the values judges infinite ones
                if self.stored.scaled and self.stored.inter == 0:
                    np.multiply(numbers, self.stored.slope, out=into, dtype=np.float64, casting="same_kind")
                elif self.stored.scaled:
                    meant = np.multiply(numbers, self.stored.slope, dtype=np.float64)  # in float64, as nibabel does
                    meant += self.stored.inter
                    np.copyto(into, meant, casting="same_kind")
                elif self.full_scale != 1:
                    np.divide(numbers, self.full_scale, out=into, dtype=into.dtype)
                else:
                    np.copyto(into, numbers, casting="same_kind")


Watcher = Callable[[NDArray[Any]], None]


class Sources:
    """One prediction: all classes in one source, or one source for each."""

    def __init__(self, sources: list[Source]) -> None:
        self.sources = sources

    @property
    def classes(self) -> int:
        return sum(len(source.view) for source in self.sources)

    @property
    def plain(self) -> bool:
        """See `is_plain`."""
        return is_plain(self.sources)

    def views(self, watch: Watcher) -> list[NDArray[Any]]:
        """Of each source, (class, x, y, z)."""
        return [source.view for source in self.sources]

    def take(self, blocks: Sequence[NDArray[Any]], watch: Watcher) -> NDArray[Any]:
        """What blocks of the views mean, (class, voxel); the watch sees it first."""
        values = gather(self.sources, blocks)
        watch(values)
        return values

    def release(self) -> None:
        """Let go of what is mapped."""
        for source in self.sources:
            source.stored.release()


class Mean:
    """The mean of several predictions on one grid, each opened by a function.

    Those of compressed files, which are read whole, are added up when first asked for, one after the other, so that
    there is one of them in memory beside the sum. Of the others there is a block each.
    """

    def __init__(self, members: Sequence[Callable[[], list[Source]]], classes: int, averaging: Averaging) -> None:
        self.members, self.classes, self.averaging = members, classes, averaging
        self._opened: tuple[list[Source], list[Sources]] | None = None  # the sum, if there is one; the others

    plain = False

    def views(self, watch: Watcher) -> list[NDArray[Any]]:
        """Of each source, (class, x, y, z); the watch sees all values that are read."""
        total, others = self._open(watch)
        return [*(source.view for source in total), *(view for each in others for view in each.views(watch))]

    def take(
        self, blocks: Sequence[NDArray[Any]], watch: Watcher, *, beside: NDArray[Any] | None = None
    ) -> NDArray[Any]:
        """The mean of blocks of the views, and of values `beside` them, (class, voxel); the watch sees all members'."""
        summed, others = self._open(watch)
        rest = iter(blocks)
        terms = chain(
            (gather([source], [next(rest)]) for source in summed),
            () if beside is None else (self.averaging.term(beside),),
            (self.averaging.term(each.take([next(rest) for _ in each.sources], watch)) for each in others),
        )
        return self.averaging.finish(reduce(np.add, terms), len(self.members) + (beside is not None))

    def release(self) -> None:
        """Let go of what is mapped."""
        for each in self._opened[1] if self._opened else ():
            each.release()

    def _open(self, watch: Watcher) -> tuple[list[Source], list[Sources]]:
        if self._opened is None:
            total: NDArray[Any] | None = None
            others = []
            for load in self.members:
                sources = load()
                if all(source.stored.mapping is not None for source in sources):
                    others.append(Sources(sources))
                else:
                    total = self._added(total, Sources(sources), watch)
            self._opened = [] if total is None else [Source(total, StoredArray(total))], others
        return self._opened

    def _added(self, total: NDArray[Any] | None, member: Sources, watch: Watcher) -> NDArray[Any]:
        """The sum with one member more, slab by slab."""
        first = member.sources[0]
        if total is None:
            total = np.zeros_like(first.view, first.type, shape=(self.classes, *first.view.shape[1:]), subok=False)
        views = in_stored_order(total, *member.views(watch))
        for box in boxes(views[0].shape[1:], _SCAN_VOXELS):
            into, *blocks = (view[(slice(None), *box)] for view in views)
            into += self.averaging.term(member.take(blocks, watch)).reshape(into.shape)
        return total


@dataclass(frozen=True, eq=False)
class Labels:
    """A label map as stored, its view (region, x, y, z) on the case's grid, and who drew it."""

    stored: StoredArray
    view: NDArray[Any]
    rater: str | None = None

    def read(self, case: str, block: NDArray[Any]) -> NDArray[Any]:
        """A block of the view, (voxel) or (region, voxel); what was mapped is let go."""
        labels = whole_numbers(case, block, self.stored)
        self.stored.release()
        return labels if len(labels) > 1 else labels[0]


class Case:
    """Probabilities and labels of one case on one grid, to be read in slabs; close it, or use it in a with block."""

    def __init__(self, name: str, prediction: Sources | Mean, labels: Sequence[Labels], grid: Grid) -> None:
        self.name = name
        self.grid = grid
        self.classes = prediction.classes
        self._prediction = prediction
        self._labels = list(labels)
        self.watch: Callable[[NDArray[Any]], None] = lambda probabilities: None
        """Sees all (class, voxel) values that are read, before whoever asked for them."""

    @property
    def raters(self) -> tuple[str, ...]:
        """Who drew the labels; none where there is one label map of nobody in particular."""
        return tuple(labels.rater for labels in self._labels if labels.rater is not None)

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the grid, with a third axis of length one for images that have two."""
        return (*self.grid.shape, 1)[:3]

    @property
    def plain(self) -> bool:
        """Whether memory holds the probabilities as they are meant; all others are copied slab by slab."""
        return self._prediction.plain

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """The lengths of the axes in the order in which slabs go through them, the last one fastest."""
        return in_stored_order(*self._views())[0].shape[1:]

    def slabs(self, most_voxels: int) -> Iterator[tuple[NDArray[Any], NDArray[Any]]]:
        """Probabilities (class, voxel) and labels (voxel) or (region, voxel), of at most `most_voxels` voxels each.

        Every voxel comes once, in the order in which the prediction is stored. Probabilities are float32, or float64
        where the file is; labels are integers, with an axis of raters before the others where there are some. A slab
        may be a view of the case: read it, do not write to it.
        """
        check_integer("most_voxels", most_voxels)
        views = in_stored_order(*self._views())
        for box in boxes(views[0].shape[1:], most_voxels):
            yield self._block([view[(slice(None), *box)] for view in views])

    def voxels(self, box: tuple[slice, ...]) -> tuple[NDArray[Any], NDArray[Any]]:
        """The same of a box along the axes of the grid (a third of length one for images that have two), as a copy."""
        probabilities, labels = self._block([view[(slice(None), *box)] for view in self._views()])
        return probabilities.copy(), labels

    def on_grid(self, rows: NDArray[Any]) -> NDArray[Any]:
        """(channel, voxel) rows in the order of slabs, as (channel, x, y, z) along the axes of the grid."""
        found = np.empty((len(rows), *self.shape), rows.dtype)
        turned = in_stored_order(found, *self._views())[0]
        np.copyto(turned, rows.reshape(turned.shape))
        return found

    def in_slab_order(self, volumes: NDArray[Any]) -> NDArray[Any]:
        """What `on_grid` took: (channel, x, y, z) volumes as (channel, voxel) rows in the order of slabs."""
        return in_stored_order(volumes, *self._views())[0].reshape(len(volumes), -1)

    def label_map(self) -> NDArray[Any]:
        """All labels, those of the first rater, along the axes of the grid: (x, y, z), or (region, x, y, z)."""
        first = self._labels[0]
        labels = first.read(self.name, first.view)
        return labels.reshape(*labels.shape[:-1], *self.shape)

    def _views(self) -> list[NDArray[Any]]:
        """Of labels and predictions, all on the grid."""
        if not self._labels:
            raise FileError(f"{self.name}: the case must be open; it has been closed. Open it again.")
        return [*(labels.view for labels in self._labels), *self._prediction.views(self.watch)]

    def _block(self, views: list[NDArray[Any]]) -> tuple[NDArray[Any], NDArray[Any]]:
        """Probabilities and labels of a block of the labels and of each source; what was mapped is let go."""
        number = len(self._labels)
        probabilities = self._prediction.take(views[number:], self.watch)
        drawn = [each.read(self.name, view) for each, view in zip(self._labels, views[:number], strict=True)]
        self._prediction.release()
        return probabilities, np.stack(drawn) if self.raters else drawn[0]

    def close(self) -> None:
        """Let go of files and memory."""
        self._labels, self._prediction = [], Sources([])

    def __enter__(self) -> Case:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def is_plain(sources: Sequence[Source]) -> bool:
    """Whether memory holds the values as they are meant, so that they need not be copied to be read."""
    first = sources[0]
    return len(sources) == 1 and first.as_stored and first.stored.mapping is None and first.view.dtype == first.type


def gather(sources: Sequence[Source], blocks: Sequence[NDArray[Any]]) -> NDArray[Any]:
    """Blocks of all sources as one array (class, voxel); without a copy where memory holds just that."""
    block = blocks[0]
    if is_plain(sources) and block.flags.c_contiguous:
        return block.reshape(len(block), -1)
    classes = sum(len(block) for block in blocks)
    out = np.empty((classes, math.prod(block.shape[1:])), np.result_type(*(source.type for source in sources)))
    row = 0
    for source, block in zip(sources, blocks, strict=True):
        source.read(block, out[row : row + len(block)])
        row += len(block)
    return out


def open_case(files: CaseFiles, *, ignored: int | None = None) -> Case:
    """The case of these files, checked to lie on one grid; `FileError` or `GridError` says what is wrong with it.

    Integer maps are read as their makers meant them: with the scale of a NIfTI header where there is one, otherwise
    uint8 as 255ths and uint16 as 65535ths. Zeros and ones that choose one class per voxel, or are a single class, are
    taken as they are. With members, the probabilities are their mean. White of a mask is the label 1, unless it is the
    label that is `ignored`.
    """
    try:
        label = _read_label(files.label, ignored)
        if files.members:
            first = read_array(files.predictions[0], keys=PROBABILITY_KEYS, peek=True)
            return _open_mean(files, whole(label, first), ignored)
        predictions = [read_array(path, keys=PROBABILITY_KEYS) for path in files.predictions]
    except FileError as error:
        raise FileError(f"{files.name}: {error}") from error
    label_view, views, grid = fit(files.name, label, predictions, rater_channels=files.rater_channels)
    sources = [Source(view, stored) for view, stored in zip(views, predictions, strict=True)]
    labels = _drawn(files, Labels(label, label_view), predictions, views, ignored)
    return Case(files.name, Sources(with_full_scale(files.name, sources)), labels, grid)


def _read_label(path: Path, ignored: int | None) -> StoredArray:
    label = read_array(path, keys=LABEL_KEYS)
    void = label.picture and label.scaled and ignored == round(1 / label.slope)
    return replace(label, slope=1.0) if void else label


def _drawn(
    files: CaseFiles,
    first: Labels,
    predictions: Sequence[StoredArray],
    views: Sequence[NDArray[Any]],
    ignored: int | None,
) -> list[Labels]:
    """The label maps of all raters of a case, on the grid of the first; that one alone where there are no raters."""
    if files.rater_channels:
        if len(first.view) < 2:
            raise ShapeError(
                f"{files.name}: labels must have a channel for each rater; {files.label.name} has one."
                " Save one channel per rater."
            )
        return [Labels(first.stored, first.view[i : i + 1], f"rater {i + 1}") for i in range(len(first.view))]
    if not files.raters:
        return [first]
    labels = [replace(first, rater=files.raters[0].rater)]
    for other in files.raters[1:]:
        name = f"{files.name}, rater {other.rater}"
        try:
            stored = _read_label(other.label, ignored)
        except FileError as error:
            raise FileError(f"{name}: {error}") from error
        view, seen, _ = fit(name, stored, predictions)
        alike = all(one.__array_interface__ == same.__array_interface__ for one, same in zip(seen, views, strict=True))
        if not alike or len(view) != len(first.view):
            raise GridError(
                f"{name}: the label maps of all raters must have the same axes and channels; this one differs from "
                f"that of {files.raters[0].rater}. Save them alike."
            )
        labels.append(Labels(stored, view, other.rater))
    return labels


def _open_mean(files: CaseFiles, label: StoredArray, ignored: int | None) -> Case:
    """The mean of the case's members, which must have the same classes and lie on the grid of the label."""
    members = (MemberFiles(files.predictions[0].parent, files.predictions), *files.members)
    fitted = []
    for member in members:
        if not member.predictions:
            raise FileError(f"every member must have a prediction of the case; {member.folder} has none. Predict it.")
        fitted.append(_fit_member(files, label, member, peek=True))
    label_view, _, grid = fitted[0][1]
    numbers = [sum(len(view) for view in views) for _, (_, views, _) in fitted]
    for member, number, (_, (own, _, _)) in zip(members, numbers, fitted, strict=True):
        if number != numbers[0]:
            raise ShapeError(
                f"{files.name}: members must have the same classes; {members[0].folder} has {numbers[0]} channels and "
                f"{member.folder} {number}."
                " Use maps of the same classes."
            )
        if own.__array_interface__ != label_view.__array_interface__:
            raise GridError(
                f"{files.name}: labels must be read alike for all members; {member.folder} differs."
                " Use maps with the same options."
            )

    def load(member: MemberFiles) -> list[Source]:
        stored, (_, views, _) = _fit_member(files, label, member)
        return with_full_scale(_of(files.name, member), list(map(Source, views, stored)))

    doubts = tuple(sorted({doubt for _, (_, _, own) in fitted for doubt in own.doubts}))
    mean = Mean([partial(load, member) for member in members], numbers[0], files.averaging)
    peeked, (_, views, _) = fitted[0]
    labels = _drawn(files, Labels(label, label_view), peeked, views, ignored)
    return Case(files.name, mean, labels, replace(grid, doubts=doubts))


def _fit_member(
    files: CaseFiles, label: StoredArray, member: MemberFiles, *, peek: bool = False
) -> tuple[list[StoredArray], tuple[NDArray[Any], list[NDArray[Any]], Grid]]:
    """A member's arrays, and what `fit` says of them; what is wrong is told with its folder."""
    try:
        stored = [read_array(path, keys=PROBABILITY_KEYS, peek=peek) for path in member.predictions]
    except FileError as error:
        raise FileError(f"{member.folder}: {error}") from error
    return stored, fit(_of(files.name, member), label, stored, rater_channels=files.rater_channels)


def _of(case: str, member: MemberFiles) -> str:
    return f"{case}, {member.folder}"


def count_channels(files: CaseFiles) -> int:
    """Of the predictions of a case, from headers alone; `FileError` or `GridError` as by `open_case`."""
    label = read_array(files.label, keys=LABEL_KEYS, peek=True)
    stored = [read_array(path, keys=PROBABILITY_KEYS, peek=True) for path in files.predictions]
    return sum(len(view) for view in fit(files.name, label, stored, rater_channels=files.rater_channels)[1])


def with_full_scale(case: str, sources: list[Source]) -> list[Source]:
    """The sources, those of unscaled integers with the integer that stands for 1."""
    for source in sources:
        _refuse_rendering(case, source)
    integers = [source for source in sources if source.view.dtype.kind in "ui" and not source.stored.scaled]
    for source in integers:
        if source.view.dtype.newbyteorder("=") not in _FULL_SCALE:
            raise FileError(
                f"{case}: probabilities must be floating point, scaled by a NIfTI slope, or uint8 or uint16; got "
                f"{source.view.dtype.newbyteorder('=')} without a scale. If these are label maps, save probabilities."
            )
    largest = _largest(integers)
    if largest <= 1 and (not integers or _hard(case, sources)):
        return sources
    if sum(len(source.view) for source in sources) == 1 and largest <= MOST_CLASSES:
        raise FileError(
            f"{case}: predictions must be probabilities; this looks like a label map: a single channel of integers up "
            f"to {largest}. Give the probabilities (nnU-Net: --save_probabilities); save as floating point those that "
            f"are so small."
        )
    return [
        replace(source, full_scale=_FULL_SCALE[source.view.dtype.newbyteorder("=")]) if source in integers else source
        for source in sources
    ]


def _refuse_rendering(case: str, source: Source) -> None:
    """A picture in color is three classes where its channels sum to 1, up to rounding; anything else is a drawing."""
    if not source.stored.color:
        return
    full = int(np.iinfo(source.view.dtype).max)
    if np.abs(source.view.sum(0, dtype=np.int64) - full).max() > len(source.view) - 1:
        raise FileError(
            f"{case}: predictions must be probabilities; the colors of a picture are those of {len(source.view)} "
            f"classes only if they sum to {full} in every pixel, and these do not. Save one gray picture per class."
        )


def _largest(sources: list[Source]) -> int:
    """The largest integer, or the first found beyond those of label maps; 0 where there is none."""
    largest = 0
    for source in sources:
        (view,) = in_stored_order(source.view)
        for box in boxes(view.shape[1:], _SCAN_VOXELS):
            largest = max(largest, int(view[(slice(None), *box)].max()))
            if largest > MOST_CLASSES:
                return largest
            source.stored.release()
    return largest


def _hard(case: str, sources: list[Source]) -> bool:
    """True where integers of zeros and ones choose one class per voxel, are a single class, or are all zero.

    Other zeros and ones could mean 1 or 1/255: that is not for us to guess, and is refused.
    """
    views = in_stored_order(*(source.view for source in sources))
    chooses = empty = True
    for box in boxes(views[0].shape[1:], _SCAN_VOXELS):
        total = sum(view[(slice(None), *box)].sum(0, dtype=np.float64) for view in views)
        chooses, empty = chooses and bool(np.all(total == 1)), empty and not np.any(total)
    if chooses or empty or sum(len(view) for view in views) == 1:
        return True
    raise FileError(
        f"{case}: integer probabilities of several classes must reach beyond 1, or choose one class per voxel; these "
        f"are zeros and ones, which could mean 1 or one step of the scale. Save them as floating point."
    )


def in_stored_order(*views: NDArray[Any]) -> list[NDArray[Any]]:
    """The views (class, space) with the axes of space turned alike, so that the last one runs through memory in order.

    Voxels may come in any order, but it must be the same for all; the last view, a prediction, chooses.
    """
    strides = views[-1].strides[1:]
    flips = tuple(slice(None, None, -1 if stride < 0 else 1) for stride in strides)
    order = np.argsort([-abs(stride) for stride in strides], kind="stable")
    return [view[(slice(None), *flips)].transpose(0, *(1 + order)) for view in views]


def boxes(shape: tuple[int, ...], most_voxels: int) -> Iterator[tuple[slice, ...]]:
    """Boxes of at most `most_voxels` voxels that fill the shape, each one run of memory where the array is.

    >>> [[(s.start, s.stop) for s in box] for box in boxes((2, 3), 2)]
    [[(0, 1), (0, 2)], [(0, 1), (2, 3)], [(1, 2), (0, 2)], [(1, 2), (2, 3)]]
    """
    if not shape:
        yield ()
        return
    inner = math.prod(shape[1:])
    step = max(1, most_voxels // inner)
    whole = tuple(slice(0, length) for length in shape[1:])
    for start in range(0, shape[0], step):
        rows = slice(start, min(start + step, shape[0]))
        for rest in [whole] if inner <= most_voxels else boxes(shape[1:], most_voxels):
            yield (rows, *rest)


def whole_numbers(case: str, block: NDArray[Any], label: StoredArray) -> NDArray[Any]:
    """A block of labels as (region, voxel) integers of a type that torch knows."""
    mapped = label.mapping is not None  # what is yielded must outlive the file
    numbers = (np.array(block, order="C") if mapped else np.ascontiguousarray(block)).reshape(len(block), -1)
    kind = numbers.dtype.newbyteorder("=")
    if kind.kind == "f" or label.scaled:
        return _rounded(case, numbers, label)
    if kind == np.uint64 and numbers.max() > np.iinfo(np.int64).max:
        raise FileError(f"{case}: labels must fit 64 bits with a sign; one is {numbers.max()}. Correct the labels.")
    if kind.kind == "b":
        return numbers.astype(np.uint8)
    keep = kind if kind in (np.dtype(np.uint8), np.dtype(np.int16)) else np.dtype(np.int64)
    return numbers.astype(keep, copy=False)


def _rounded(case: str, numbers: NDArray[Any], label: StoredArray) -> NDArray[Any]:
    """Labels stored as floats or scaled integers; fractions are refused, rounding is not.

    Labels squeezed into scaled integers come back up to half a step of the scale away.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        meant = np.multiply(numbers, label.slope, dtype=np.float64)
        meant += label.inter
        whole = np.rint(meant)
        step = abs(label.slope) if numbers.dtype.kind in "ui" else 0.0
        near = np.abs(meant - whole) <= 1e-4 + min(step / 2, 0.1)
    wrong = ~(near & (np.abs(meant) < 2**53))  # NaN is not near anything
    if wrong.any():
        raise FileError(f"{case}: labels must be whole numbers; one is {meant[wrong][0]:.6g}. Correct the labels.")
    integers: NDArray[Any] = whole.astype(np.int64)
    return integers
