"""Predictions without labels: read them whole, write other values in their place.

What is written has the format, layout, type, header and compression of what was read, so that whatever read the one
reads the other; or, if that is wanted, arrays become NIfTI images in the place of the label map beside them. Only where
the type cannot express the values (integers that would have to reach beyond their scale) is it float32 instead. Opening
reads headers only; rewriting a case part by part takes the memory of its new arrays, which compressed ones become.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from segcal._io.files import new_file, writing
from segcal.errors import ConfigError, FileError, GridError, ShapeError
from segcal.volumes.arrays import (
    NNUNET_KEYS,
    Geometry,
    StoredArray,
    read_array,
    refuse_objects,
)
from segcal.volumes.cases import (
    MOST_CLASSES,
    PROBABILITY_KEYS,
    Mean,
    Source,
    Watcher,
    boxes,
    gather,
    in_stored_order,
    with_full_scale,
)
from segcal.volumes.finding import PredictionFiles, places
from segcal.volumes.grids import Grid, arrange, fit
from segcal.volumes.pairing import is_array, is_picture
from segcal.volumes.steps import StoredAs, in_steps
from segcal.volumes.stored import no_values
from segcal.volumes.writing import (
    FLOAT32,
    Form,
    fill,
    form_of,
    own_form,
    room_for,
    write_like,
    write_maps,
    write_npy,
    write_picture,
)

_WHOLE = (slice(None),) * 3
Change = Callable[[NDArray[Any]], NDArray[Any]]


def open_prediction(files: PredictionFiles, *, classes: int | None = None) -> Prediction:
    """The prediction in these files; `ShapeError` where it has not as many `classes` as are asked for.

    Of the predictions only headers are read. Without `classes` the last axis of a NIfTI image of four, and the first
    of another array is that of classes.
    """
    if files.lacking:
        raise FileError(
            f"{files.name}: every member must have a prediction of the case; {files.lacking[0]} has none. Predict it."
        )
    with _naming(files.name):
        stored = [read_array(path, keys=PROBABILITY_KEYS, peek=True) for path in files.predictions]
        reference = None if files.reference is None else _without_values(read_array(files.reference))
        for path, array in zip(files.predictions, stored, strict=True):
            if array.key is not None:
                refuse_objects(path)
    return Prediction(files, stored, reference, classes)


def _without_values(stored: StoredArray) -> StoredArray:
    """Release the values of an array; its file was read to the end, so that the header is what the checksum says."""
    return replace(stored, values=no_values(stored.values.shape, stored.values.dtype), mapping=None)


class Prediction:
    """A prediction on disk, to be read whole, and to be written elsewhere with other values."""

    def __init__(
        self, files: PredictionFiles, stored: list[StoredArray], reference: StoredArray | None, classes: int | None
    ):
        self.name = files.name
        self._given, self._files = files, files.predictions
        self._reference, self._wanted = reference, classes
        self._held: list[Source] | None = None
        # Without an image beside it, what nnU-Net stores as (class, z, y, x) is read in reverse all the same.
        self._reversed = stored[0].key in NNUNET_KEYS and reference is None
        views, self.grid = self._arrange(stored)
        self.classes = sum(len(view) for view in views)
        self.watch: Watcher = lambda values: None
        """Sees all (class, voxel) values that are rewritten, those of each member."""
        self._others = None
        if files.members:
            others = [open_prediction(member, classes=classes) for member in files.members]
            for other in others:
                self._sources_of(other, peek=True)  # refuses what lies elsewhere
            self._others = Mean([partial(self._sources_of, other) for other in others], self.classes, files.averaging)

    def read(self) -> NDArray[Any]:
        """The values (class, x, y, z) as meant, of several members their mean; float32, or float64 where a file is.

        An image of two axes gets a third of length one. Integers are read as by `open_case`.
        """
        return self._meant(self._sources(), _WHOLE)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Inside, files are read once, whatever is asked for and how often."""
        self._held = self._sources()
        try:
            yield
        finally:
            self._held = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the grid, with a third axis of length one for images that have two."""
        return (*self.grid.shape, 1)[:3]

    def slabs(self, most_voxels: int) -> Iterator[NDArray[Any]]:
        """Values (class, voxel) of at most so many voxels each, in the order in which they are stored.

        A slab may be a view of what is held: read it, do not write to it.
        """
        sources = self._sources()
        views = in_stored_order(*(source.view for source in sources))
        for box in boxes(views[0].shape[1:], most_voxels):
            yield gather(sources, [view[(slice(None), *box)] for view in views])
            for source in sources:
                source.stored.release()

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """The lengths of the axes in the order in which slabs go through them, the last one fastest."""
        (view,) = in_stored_order(self._sources()[-1].view)
        return view.shape[1:]

    def on_grid(self, rows: NDArray[Any]) -> NDArray[Any]:
        """What slabs became, (channel, voxel) in their order, as (channel, x, y, z)."""
        found = np.empty((len(rows), *self.shape), rows.dtype)
        turned, _ = in_stored_order(found, self._sources()[-1].view)
        turned[...] = rows.reshape(turned.shape)
        return found

    def write_labels(self, labels: NDArray[Any], target: Path) -> None:
        """Write labels (x, y, z), or masks (channel, x, y, z), as the image, picture or array that `target` is named.

        An image has the header of the prediction's, or of the reference beside an array. An array and a picture have
        the axes of space as the prediction has them, below that of the channels.
        """
        with writing(target.parent):
            target.parent.mkdir(parents=True, exist_ok=True)
        masks, flat = labels.ndim == 4, len(self.grid.shape) == 2
        if target.suffix == ".npy":
            labels = labels[..., 0] if flat else labels
            if self._reversed:
                labels = np.moveaxis(labels.T, -1, 0) if masks else labels.T
            with new_file(target) as file:
                write_npy(file, np.ascontiguousarray(labels))
            return
        if is_picture(target):
            with _naming(self.name), new_file(target) as file:
                write_picture(file, target, labels[..., 0] if flat else labels)
            return
        like = self._image_beside() if is_array(self._files[0]) else self._files[0]
        labels = labels[..., 0] if flat and not masks else labels
        values = labels.transpose(0, 3, 2, 1) if masks else labels.T  # the first axis of the image runs fastest
        with _naming(self.name), new_file(target) as file:
            write_maps(file, like, np.ascontiguousarray(values), compressed=target.suffix == ".gz")

    def rewrite(
        self,
        change: Change,
        folder: Path,
        root: Path,
        *,
        nifti: bool = False,
        dtype: StoredAs | None = None,
        exclusive: bool = False,
        most_voxels: int | None = None,
    ) -> tuple[Path, ...]:
        """Write what `change` makes of the values (class, x, y, z) to `folder`, at the same place as under `root`.

        It gets them all, or about `most_voxels` voxels after the other; maybe twice, for integers are rounded to the
        steps of their scale, and a file becomes float32 where that cannot express a value. `exclusive`: they are
        probabilities of exclusive classes, whose steps then sum to 1 (see `in_steps`). `dtype`: of all files. `nifti`:
        arrays become NIfTI images (x, y, z, class) with the header of the reference, of float32 if no type is given.
        Nobody ever sees a part of a file.
        """
        if nifti and is_picture(self._files[0]):
            raise FileError(
                f"{self.name}: a NIfTI image must say where its voxels lie; {self._files[0].name} does not. Leave out "
                f"--nifti."
            )
        targets = self._targets(folder, root, nifti=nifti)
        reference = self._image_beside() if nifti and is_array(self._files[0]) else None
        sources = self._sources()
        own = [own_form(source) for source in sources]
        converted = any(one.suffix != other.suffix for one, other in zip(targets, self._files, strict=True))
        if dtype is not None or converted:
            told = not (is_array(targets[0]) or is_picture(targets[0]))
            forms = [form_of(dtype or "float32", told=told)] * len(own)
        else:
            forms = [Form(form.dtype) if form.dtype.kind == "f" else form for form in own]
        anew = reference is not None
        changed = partial(self._changed, change, exclusive=exclusive, most_voxels=most_voxels, anew=anew)
        new, unfit = changed(sources, forms)
        if unfit:
            forms = [FLOAT32 if i in unfit else form for i, form in enumerate(forms)]
            del new, sources  # whose memory may be that of the other
            new, _ = changed(self._sources(), forms)
        with _naming(self.name), ExitStack() as stack:  # all files appear together, at its end
            for i, target in enumerate(targets):
                target.parent.mkdir(parents=True, exist_ok=True)
                file = stack.enter_context(new_file(target))
                if reference is not None:
                    write_maps(file, reference, new[i].values, slope=forms[i].slope)
                else:
                    write_like(file, self._files[i], new[i], None if forms[i] == own[i] else forms[i])
        return targets

    def _changed(
        self,
        change: Change,
        sources: list[Source],
        forms: list[Form],
        *,
        exclusive: bool,
        most_voxels: int | None,
        anew: bool,
    ) -> tuple[list[StoredArray], set[int]]:
        """Arrays of the changed values, and which of them cannot express theirs; `anew`: as (class, z, y, x)."""
        if anew:
            shapes = [(len(source.view), *source.view.shape[:0:-1]) for source in sources]
            new = [StoredArray(np.empty(shape, form.dtype)) for shape, form in zip(shapes, forms, strict=True)]
            views = [array.values.transpose(0, 3, 2, 1) for array in new]
        else:
            new = [room_for(source.stored, form) for source, form in zip(sources, forms, strict=True)]
            views, _ = self._arrange(new)
        unfit: set[int] = set()
        reaching: set[int] = set()  # beyond numbers that mean something else where no header tells the scale
        most = MOST_CLASSES if self.classes == 1 else 1
        steps = forms[0].steps if exclusive and all(form == forms[0] for form in forms) else 0
        for box in [_WHOLE] if most_voxels is None else _boxes_along(sources[0].view, most_voxels):
            values = self._meant(sources, box)
            changed = change(values)
            if changed.shape != values.shape:
                raise ShapeError(
                    f"{self.name}: values must have the shape {values.shape}; got {changed.shape}. Keep the shape."
                )
            parts = np.split(changed, len(forms))
            for i, (form, part) in enumerate(zip(forms, parts, strict=True)):
                if not form.expresses(part):
                    unfit.add(i)
                if part.max() * form.full_scale >= most + 0.5:
                    reaching.add(i)
                if not steps:
                    fill(views[i][:, *box], part, form)
            if steps and not unfit:
                for view, numbers in zip(views, np.split(in_steps(changed, steps), len(forms)), strict=True):
                    view[:, *box] = numbers
        unscaled = {i for i, form in enumerate(forms) if form.full_scale != 1} - unfit
        if not unscaled & reaching:
            unfit |= unscaled  # zeros and ones would mean 0 and 1
        return new, unfit

    def _meant(self, sources: list[Source], box: tuple[slice, ...]) -> NDArray[Any]:
        """The values (class, x, y, z) in a box, of several members their mean."""
        values = _values(sources, box)
        flat = values.reshape(len(values), -1)
        self.watch(flat)
        if self._others is None:
            return values
        blocks = [view[:, *box] for view in self._others.views(self.watch)]
        mean = self._others.take(blocks, self.watch, beside=flat)
        self._others.release()
        return mean.reshape(values.shape)

    def _sources_of(self, other: Prediction, *, peek: bool = False) -> list[Source]:
        """Another prediction on the grid of this one, turned where it is stored so; GridError where it lies elsewhere.

        Where this one does not say where its voxels lie, the shape must be the same.
        """
        name = f"{self.name}, {other._files[0].parent}"
        with _naming(name):
            stored = [read_array(path, keys=PROBABILITY_KEYS, peek=peek) for path in other._files]
        try:
            views = other._arrange(stored)[0]
            if self.grid.affine is not None:
                beside = is_array(other._files[0]) and other.grid.affine is not None
                placed = [other._placed(np.moveaxis(view, 0, -1)) for view in views] if beside else stored
                views = fit(name, self._placed(np.broadcast_to(np.uint8(0), self.grid.shape)), placed)[1]
        except GridError:
            views = []
        if not views or views[0].shape[1:] != self.shape:
            here, there = (f"{' x '.join(map(str, grid.shape))} voxels" for grid in (self.grid, other.grid))
            raise GridError(
                f"{name}: members must lie on one grid; the first is {here} and this {there}, or elsewhere."
                " Resample the maps to one grid."
            )
        if sum(len(view) for view in views) != self.classes:
            raise ShapeError(
                f"{name}: members must have the same classes; the first has {self.classes} channels."
                " Use maps of the same classes."
            )
        sources = list(map(Source, views, stored))
        return sources if peek else with_full_scale(name, sources)

    def _placed(self, values: NDArray[Any]) -> StoredArray:
        """Values along the axes of the grid as an image that says where they lie."""
        affine = self.grid.affine
        assert affine is not None  # asked for where it is known
        bare = bool(np.array_equal(np.abs(affine), np.eye(4)))
        zooms = self.grid.spacing_mm or (1.0,) * len(self.grid.shape)
        return StoredArray(values, geometry=Geometry((affine,), zooms, bare))

    def _image_beside(self) -> Path:
        """The label map beside an array, which says where its voxels lie."""
        reference = self._given.reference
        if reference is None or self.grid.spacing_mm is None:
            came = "there is none" if reference is None else f"{reference.name} has another shape, or is a picture"
            raise FileError(
                f"{self.name}: a NIfTI image needs a label map of the same name and shape beside the array, which says "
                f"where the voxels lie, as nnU-Net writes it; {came}."
                " Copy the label map beside it, or leave out --nifti."
            )
        return reference

    def _arrange(self, stored: Sequence[StoredArray]) -> tuple[list[NDArray[Any]], Grid]:
        """Views (class, x, y, z) of arrays that are laid out as those in the files."""
        return arrange(self.name, stored, classes=self._wanted, reference=self._reference)

    def _sources(self) -> list[Source]:
        if self._held is not None:
            return self._held
        with _naming(self.name):
            stored = [read_array(path, keys=PROBABILITY_KEYS) for path in self._files]
        views, _ = self._arrange(stored)
        return with_full_scale(self.name, [Source(*each) for each in zip(views, stored, strict=True)])

    def _targets(self, folder: Path, root: Path, *, nifti: bool) -> tuple[Path, ...]:
        base = root.parent if root.is_file() else root
        for path in self._files:
            if not path.is_relative_to(base):
                raise ConfigError(f"{self.name}: predictions must lie under {base}; {path} does not.")
            target = folder / path.relative_to(base)
            if target.exists() and target.samefile(path):
                raise ConfigError(
                    f"--out must be another folder than the predictions; it would overwrite {path}."
                    " Choose another folder."
                )
        return tuple(folder / place for place in places(self._given, base, nifti=nifti))


def _boxes_along(view: NDArray[Any], most_voxels: int) -> Iterator[tuple[slice, ...]]:
    """Boxes of about so many voxels, along the axis of (class, x, y, z) that the file goes through last."""
    axis = int(np.argmax(np.abs(view.strides[1:])))
    length = view.shape[1 + axis]
    step = max(1, most_voxels * length // math.prod(view.shape[1:]))
    for start in range(0, length, step):
        yield (*_WHOLE[:axis], slice(start, start + step), *_WHOLE[axis + 1 :])


def _values(sources: Sequence[Source], box: tuple[slice, ...]) -> NDArray[Any]:
    """What the numbers in a box mean (class, x, y, z), as an array of its own; what was mapped is let go."""
    blocks = [source.view[:, *box] for source in sources]
    classes = sum(len(block) for block in blocks)
    values = np.empty((classes, *blocks[0].shape[1:]), np.result_type(*(source.type for source in sources)))
    row = 0
    for source, block in zip(sources, blocks, strict=True):
        source.read(block, values[row : row + len(block)])
        source.stored.release()
        row += len(block)
    return values


@contextmanager
def _naming(case: str) -> Iterator[None]:
    """What is wrong with a file is told with its case."""
    try:
        yield
    except FileError as error:
        raise FileError(f"{case}: {error}") from error
