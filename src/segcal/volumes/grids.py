"""Which axis of a prediction is which, and whether it lies on the label's grid.

A stored array may be read in several ways: classes on the last axis, on the first, or none at all; axes of space in
order or reversed. `fit` takes the first reading, in a fixed order of preference, that lies on the label's grid. An
image whose axes are flipped or exchanged, but whose voxels lie in the same places, is turned by views; nothing is
resampled.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, NamedTuple

import numpy as np
from nibabel.orientations import aff2axcodes, inv_ornt_aff
from numpy.typing import NDArray

from segcal.errors import GridError, ShapeError
from segcal.volumes.arrays import NNUNET_KEYS, Geometry, StoredArray
from segcal.volumes.orientation import orientation_of

_inverse: Any = inv_ornt_aff  # nibabel has no types
BARE_HEADER = "bare header"
CONTRADICTING_HEADERS = "contradicting headers"
_TIMES = "\N{MULTIPLICATION SIGN}"
_SPACING_TOLERANCE = 1e-3  # relative; headers carry rounded voxel sizes
_AFFINE_TOLERANCE_MM = 1e-2  # the two forms of a NIfTI affine differ by rounding


@dataclass(frozen=True, eq=False)
class Grid:
    """Where the voxels of a volume lie. None: the format does not say (.npy, .npz)."""

    shape: tuple[int, ...]
    spacing_mm: tuple[float, ...] | None = None
    affine: NDArray[np.float64] | None = None
    doubts: tuple[str, ...] = ()
    """What had to be assumed for prediction and label to lie here: BARE_HEADER, CONTRADICTING_HEADERS."""

    @property
    def voxel_ml(self) -> float:
        """The volume of a voxel; NaN where the format does not say, and of images with two axes."""
        known = self.spacing_mm is not None and len(self.spacing_mm) == 3
        return math.prod(self.spacing_mm) / 1000 if known and self.spacing_mm is not None else math.nan


@dataclass(frozen=True, eq=False)
class Reading:
    """One way to read a stored array: a view (class or region, x, y, z) and where its voxels lie."""

    values: NDArray[Any]
    geometry: Geometry | None
    classes_first: bool = False
    axes: int = 3  # of space, as stored
    picture: bool = False  # whose first axis is y

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape[1:]

    @property
    def zooms(self) -> tuple[float, ...]:
        """Voxel sizes as the header has them, ones where there is none."""
        return (*(self.geometry.zooms if self.geometry else ()), 1.0, 1.0, 1.0)[:3]

    @property
    def spacing_mm(self) -> tuple[float, ...] | None:
        """Voxel sizes, where the file says so; a bare header of ones says nothing."""
        silent = self.geometry is None or (self.geometry.bare and self.zooms == (1.0, 1.0, 1.0))
        return None if silent else self.zooms

    def grid(self, axes: int) -> Grid:
        """The grid with its first axes only: two for an image that has no third."""
        affine = self.geometry.affines[0] if self.geometry and self.geometry.affines else None
        return Grid(self.shape[:axes], None if self.geometry is None else self.zooms[:axes], affine)


def fit(
    case: str, label: StoredArray, predictions: Sequence[StoredArray], *, rater_channels: bool = False
) -> tuple[NDArray[Any], list[NDArray[Any]], Grid]:
    """Views of labels (region, x, y, z) and of each prediction (class, x, y, z) on one grid, and that grid.

    Several predictions are one class each. With `rater_channels`, labels have an axis of raters in the place of
    regions. Of readings that fit equally, the first counts:

    - NIfTI: no class axis, classes last, classes first. Where shapes leave it open, voxel sizes and affine decide.
    - .npy and .npz: no class axis, classes first, classes last; then the same with the axes of space reversed.
    - The arrays of nnU-Net (.npz, 'probabilities' or 'softmax'), against NIfTI labels: first of all (class, z, y, x);
      of images that nnU-Net turned to right, front and head, these axes turned back, and nothing else; of pictures
      (class, 1, y, x).
    - Pictures are (y, x): beside a file that says where its voxels lie, which is (x, y), their axes are reversed.
    """
    label = whole(label if rater_channels else gray(case, label), predictions[0])
    predictions = [whole(prediction, label) for prediction in predictions]
    alone, last_first = len(predictions) > 1, predictions[0].geometry is not None
    if rater_channels:
        targets = _rater_readings(case, label, last_first=last_first)
    else:
        targets = _label_readings(label, last_first=last_first)
    fits: list[tuple[Reading, list[_Fitted]]] = []
    for target in targets:
        fitting = [_first_fit(prediction, target, alone=alone) for prediction in predictions]
        fitted = [one for one in fitting if one is not None]
        if len(fitted) == len(fitting):
            fits.append((target, fitted))
    if fits:
        target, fitted = min(fits, key=_unlikeliness)
        doubts = tuple(sorted({one.doubt for one in fitted if one.doubt is not None}))
        return target.values, [one.view for one in fitted], replace(target.grid(target.axes), doubts=doubts)
    if rater_channels and _squeeze(label).values.ndim <= 3:
        raise GridError(
            f"{case}: labels must have an axis of raters, as arrays (rater, x, y) or (rater, x, y, z) or images "
            f"(x, y, z, rater), on the grid of the probabilities; labels are {_size(label)}, probabilities "
            f"{_size(predictions[0])}. Save a channel for each rater."
        )
    if not targets:
        raise GridError(
            f"{case}: labels must have 2 or 3 axes, and one of regions at most; got {_size(label)}."
            " Use label maps with one channel."
        )
    wrong = next(prediction for prediction, one in zip(predictions, fitting, strict=True) if one is None)
    raise GridError(f"{case}: {_difference(wrong, targets[0 if rater_channels else -1], alone=alone)}")


def arrange(
    case: str, predictions: Sequence[StoredArray], *, classes: int | None = None, reference: StoredArray | None = None
) -> tuple[list[NDArray[Any]], Grid]:
    """Views (class, x, y, z) of predictions without labels, all on the grid of the first, and that grid.

    Several predictions are one class each. The axis of `classes` is the last of a NIfTI image, then the first; of
    other arrays the first, then the last; the arrays of nnU-Net are (class, z, y, x). Where the number of classes is
    not known, the likelier axis counts; a NIfTI image of up to three axes is then one class. A `reference` that has
    the shape of an array, in order or reversed, says where its voxels lie.
    """
    several = len(predictions) > 1
    if several and classes not in (None, len(predictions)):
        raise ShapeError(
            f"{case}: {_expected(classes)}; there are {len(predictions)} files of one class each."
            " Add the missing files."
        )
    targets = [] if reference is None else _label_readings(gray(case, reference), last_first=True)
    if targets and targets[0].picture:
        predictions = [_flat(prediction) for prediction in predictions]
    if predictions[0].turned and targets:
        view = _turn_back(predictions[0], targets[0])
        if view is None:
            raise GridError(f"{case}: {_difference(predictions[0], targets[0], alone=False)}")
        if classes in (None, len(view)):
            return [view], targets[0].grid(3)
    readings = _readings_of_classes(predictions[0], 1 if several else classes, targets)
    if not readings:
        must = "files of one class each must have the axes of space only" if several else _expected(classes)
        raise ShapeError(f"{case}: {must}; the array is {_size(predictions[0])}. Check the order of axes.")
    pairs = ((reading, target) for reading in readings for target in targets if reading.shape == target.shape)
    first, place = next(pairs, (readings[0], readings[0]))
    others = [_beside(case, number, stored, first, targets) for number, stored in enumerate(predictions[1:], 1)]
    return [first.values, *others], place.grid(first.axes)


def space_of_one_class(stored: StoredArray, *, classes: int | None = None) -> tuple[int, ...] | None:
    """The shape of space, where the array is a single class; None where it is not, or may hold all `classes`."""
    readings = list(_readings(stored, reverse=False))
    volume = stored.geometry is not None and _squeeze(stored).values.ndim == 3
    if not volume and any(len(reading.values) == classes for reading in readings):
        return None
    return next((reading.shape for reading in readings if len(reading.values) == 1), None)


def _readings_of_classes(stored: StoredArray, classes: int | None, targets: Sequence[Reading]) -> list[Reading]:
    """Readings with this number of classes, the most likely first; any number where it is not known."""
    like_nnunet = stored.key in NNUNET_KEYS and not any(target.picture for target in targets)
    readings = list(_readings(stored, reverse=bool(targets), like_nnunet=like_nnunet))
    if classes is not None:
        return [reading for reading in readings if len(reading.values) == classes]
    if stored.geometry is None:  # an array is likelier to have an axis of classes than none
        readings.sort(key=lambda reading: reading.axes == _squeeze(stored).values.ndim)
    return readings


def _beside(case: str, number: int, stored: StoredArray, first: Reading, targets: Sequence[Reading]) -> NDArray[Any]:
    """A further class on the grid of the first."""
    readings = _readings_of_classes(stored, 1, targets)
    for reading in readings:
        view = _onto(reading, first)
        if view is not None:
            return view
    here, there = _describe(first), _describe(readings[0]) if readings else _size(stored)
    raise GridError(
        f"{case}: files of one class each must lie on one grid; class 0 is {here}, class {number} "
        f"{f'{there} as well, but elsewhere' if here == there else there}."
        " Resample them to one grid."
    )


def _expected(classes: int | None) -> str:
    if classes is None:
        return "predictions must have two or three axes of space, and of classes at most one"
    return f"predictions must have {classes} class{'es' if classes > 1 else ''}, as the calibrator has"


def _label_readings(label: StoredArray, *, last_first: bool) -> list[Reading]:
    """Labels of up to three axes have no axis of regions; those of four have one, last where NIfTI is involved."""
    readings = list(_readings(label, reverse=False))
    if _squeeze(label).values.ndim <= 3:
        return readings[:1]
    return readings[::-1] if last_first and label.geometry is None else readings


def _rater_readings(case: str, label: StoredArray, *, last_first: bool) -> list[Reading]:
    """Labels with an axis of raters, first or last; GridError if an array could have it in either place."""
    shape = _squeeze(label).values.shape
    if label.geometry is None and not label.picture and len(shape) > 2 and len(set(shape)) == 1:
        raise GridError(
            f"{case}: labels of several raters must have axes of different lengths, to tell that of the raters; they "
            f"are {_size(label)}. Save NIfTI images (x, y, z, rater)."
        )
    readings = [reading for reading in _readings(label, reverse=False) if reading.axes < len(shape)]
    if label.picture:
        return [reading for reading in readings if reading.classes_first]
    return readings[::-1] if last_first and label.geometry is None else readings


def _readings(
    stored: StoredArray, *, reverse: bool, like_nnunet: bool = False, reversed_first: bool = False
) -> Iterator[Reading]:
    """Every way to read the axes, the most likely first; `reverse`: with the axes of space reversed as well."""
    stored = _squeeze(stored)
    last, first = stored.values.ndim - 1, 0
    ends = (None, last, first) if stored.geometry is not None else (None, first, last)
    ways = [(end, False) for end in ends]
    turned = [(end, True) for end in ends if reverse]
    ways = turned + ways if reversed_first else ways + turned
    if like_nnunet:
        ways.insert(0, (first, True))
    for end, reversed_space in ways:
        values = stored.values[np.newaxis] if end is None else np.moveaxis(stored.values, end, 0)
        if reversed_space:
            values = values.transpose(0, *range(values.ndim - 1, 0, -1))
            if reversed_first and values.ndim == 4 and values.shape[1] == 1:
                values = np.moveaxis(values, 1, 3)  # pictures have their third axis of length one last
        if 3 <= values.ndim <= 4:
            axes = values.ndim - 1
            values = values if axes == 3 else values[..., np.newaxis]
            yield Reading(values, stored.geometry, end == first, axes, stored.picture)


def _squeeze(stored: StoredArray) -> StoredArray:
    """Without axes of length one that only a format asks for: (x, y, z, 1, c), (x, y, z, 1), (batch, c, x, y, z)."""
    values = stored.values
    if stored.geometry is None:
        while values.ndim > 4 and values.shape[0] == 1:
            values = values[0]
    else:
        while values.ndim > 4 and values.shape[3] == 1:
            values = values[:, :, :, 0]
        while values.ndim > 3 and values.shape[-1] == 1:
            values = values[..., 0]
    return stored if values is stored.values else replace(stored, values=values)


def gray(case: str, label: StoredArray) -> StoredArray:
    """Labels with one number a pixel: a picture in color must have it three times."""
    if not label.color or label.values.ndim < 3:
        return label
    if any(np.any(channel != label.values[0]) for channel in label.values[1:]):
        raise GridError(
            f"{case}: labels must be one number a pixel; the picture has colors. Save it in gray, or with a palette."
        )
    return replace(label, values=label.values[0], color=False)


def _flat(stored: StoredArray) -> StoredArray:
    """Without the axis of length one that nnU-Net gives pictures, (class, 1, y, x)."""
    values = stored.values
    return replace(stored, values=values[:, 0]) if values.ndim == 4 and values.shape[1] == 1 else stored


def whole(stored: StoredArray, like: StoredArray) -> StoredArray:
    """A DICOM segmentation on the grid of another file, with the slices that it leaves out; itself where it lies
    elsewhere, or is whole."""
    here, there = stored.geometry, like.geometry
    if stored.empty is None or here is None or there is None or like.values.ndim < 3:
        return stored
    shape, own = like.values.shape[:3], stored.values.shape[:3]
    for onto, affine in product(there.affines, here.affines):
        steps = np.linalg.solve(onto, affine)
        turn = np.rint(steps[:3, :3])
        if not ((np.abs(turn).sum(0) == 1).all() and (np.abs(turn).sum(1) == 1).all()):
            continue
        axes, flipped, first = np.abs(turn).argmax(1), turn.sum(1) < 0, np.rint(steps[:3, 3])
        size = np.array(own)[axes]
        start = (first - np.where(flipped, size - 1, 0)).astype(int)
        exact = np.eye(4)
        exact[:3, :3], exact[:3, 3] = turn, first
        if not _same_affine(onto @ exact, affine) or (start < 0).any() or (start + size > shape).any():
            continue
        flips = tuple(slice(None, None, -1 if flip else 1) for flip in flipped)
        part = stored.values.transpose(*axes, *range(3, stored.values.ndim))[flips]
        values = np.empty((*shape, *part.shape[3:]), part.dtype, order="F")
        values[...] = stored.empty
        values[tuple(slice(at, at + n) for at, n in zip(start, size, strict=True))] = part
        return replace(stored, values=values, geometry=Geometry((onto,), there.zooms[:3], there.bare), empty=None)
    return stored


class _Fitted(NamedTuple):
    """A prediction on the grid of a target, what is doubtful about it, and how many likelier readings do not fit."""

    view: NDArray[Any]
    doubt: str | None = None
    rank: int = 0


def _unlikeliness(fit: tuple[Reading, list[_Fitted]]) -> tuple[bool, int]:
    """Return what a reading of labels and of predictions is compared by: an axis of one channel is the least likely."""
    target, fitted = fit
    return len(target.values) == 1, max(one.rank for one in fitted)


def _first_fit(prediction: StoredArray, target: Reading, *, alone: bool) -> _Fitted | None:
    """The prediction on the target's grid, by the first reading that lies there.

    `alone`: as a single class.
    """
    if prediction.turned and target.geometry is not None:
        view = _turn_back(prediction, target)
        return None if view is None else _Fitted(view)
    for rank, reading in enumerate(_candidates(prediction, target, alone=alone)):
        view = _onto(reading, target)
        if view is not None:
            return _Fitted(view, _doubt(reading, target), rank)
    return None


def _doubt(reading: Reading, target: Reading) -> str | None:
    """What had to be assumed for a reading to lie on the target's grid; None where the headers agree in all they say.

    Headers that contradict themselves in the same way agree.
    """
    here, there = reading.geometry, target.geometry
    if here is None or there is None:
        return None
    fits = np.array(
        [[_turn(reading.values, one, target.shape, onto) is not None for one in here.affines] for onto in there.affines]
    )
    if not fits.any():
        return BARE_HEADER if here.bare != there.bare else None
    return None if fits.any(0).all() and fits.any(1).all() else CONTRADICTING_HEADERS


def _candidates(prediction: StoredArray, target: Reading, *, alone: bool) -> Iterator[Reading]:
    arrays = prediction.geometry is None or target.geometry is None
    like_nnunet = prediction.key in NNUNET_KEYS and target.geometry is not None
    across = (prediction.picture and target.geometry is not None) or (
        target.picture and prediction.geometry is not None
    )
    if target.picture and prediction.geometry is None:
        prediction = _flat(prediction)
    for reading in _readings(prediction, reverse=arrays, like_nnunet=like_nnunet, reversed_first=across):
        if not alone or reading.values.shape[0] == 1:
            yield _with_own_zooms(reading, target) if reading.classes_first else reading


def _with_own_zooms(reading: Reading, target: Reading) -> Reading:
    """Some writers store a voxel size for every axis in order, so that the first is that of the classes.

    Where only that agrees with the target, the affine is made of the wrong axes and is not used.
    """
    zooms = () if reading.geometry is None else reading.geometry.zooms
    if len(zooms) != 4 or target.spacing_mm is None or _same_spacing(zooms[:3], target.spacing_mm):
        return reading
    own = replace(reading, geometry=Geometry((), zooms[1:], bare=True))
    return own if _same_spacing(zooms[1:], target.spacing_mm) else reading


def _onto(reading: Reading, target: Reading) -> NDArray[Any] | None:
    """The reading's values in the axes of the target, or None where they lie elsewhere.

    A file without directions and origin is taken to lie as the other one does, if shape and voxel sizes agree.
    """
    here, there = reading.geometry, target.geometry
    if here is not None and there is not None:
        for onto in there.affines:
            for affine in here.affines:
                view = _turn(reading.values, affine, target.shape, onto)
                if view is not None:
                    return view
        if not (here.bare or there.bare) or not _same_spacing(reading.spacing_mm, target.spacing_mm):
            return None
    return reading.values if reading.shape == target.shape else None


def _turn_back(stored: StoredArray, target: Reading) -> NDArray[Any] | None:
    """nnU-Net's array (class, z, y, x) of an image that it turned to right, front and head, on the image's own grid."""
    if stored.values.ndim != 4 or target.geometry is None or not target.geometry.affines:
        return None
    own = target.geometry.affines[0]
    turned = own @ _inverse(orientation_of(own), target.shape)
    return _turn(stored.values.transpose(0, 3, 2, 1), turned, target.shape, own)


def _turn(
    values: NDArray[Any], affine: NDArray[np.float64], shape: tuple[int, ...], onto: NDArray[np.float64]
) -> NDArray[Any] | None:
    """The values with axes exchanged and flipped so that they lie on the grid (shape, onto); None where none do."""
    turn = np.rint(np.linalg.solve(onto, affine)[:3, :3])  # voxel steps of the values in voxel steps of the grid
    if not ((np.abs(turn).sum(0) == 1).all() and (np.abs(turn).sum(1) == 1).all()):
        return None
    axes = np.abs(turn).argmax(1)
    if tuple(values.shape[1 + axis] for axis in axes) != shape:
        return None
    flipped = turn.sum(1) < 0
    exact = np.eye(4)
    exact[:3, :3] = turn
    exact[:3, 3] = np.where(flipped, np.array(shape) - 1, 0)
    if not _same_affine(onto @ exact, affine):
        return None
    flips = tuple(slice(None, None, -1 if flip else 1) for flip in flipped)
    return values.transpose(0, *(1 + axes))[(slice(None), *flips)]


def _same_affine(one: NDArray[np.float64], other: NDArray[np.float64]) -> bool:
    lengths = tuple(float(x) for x in np.linalg.norm(one[:3, :3], axis=0))
    others = tuple(float(x) for x in np.linalg.norm(other[:3, :3], axis=0))
    tolerance = min(_AFFINE_TOLERANCE_MM, 0.1 * min(lengths))  # the latter for microscopic voxels
    return _same_spacing(lengths, others) and bool((np.abs(one - other) <= tolerance).all())


def _same_spacing(one: tuple[float, ...] | None, other: tuple[float, ...] | None) -> bool:
    return one is None or other is None or bool(np.allclose(one, other, rtol=_SPACING_TOLERANCE, atol=0))


def _difference(prediction: StoredArray, target: Reading, *, alone: bool) -> str:
    """One sentence on what keeps the prediction off the target's grid, and the remedy."""
    remedy = "Resample the probabilities to the label grid."
    readings = list(_candidates(prediction, target, alone=alone))
    if not readings:
        must = (
            "files of one class each must have the axes of space only" if alone else "the axes must be those of space"
        )
        return f"labels are {_describe(target)}, probabilities {_size(prediction)}; {must}, and of classes at most one."
    same_shape = [reading for reading in readings if reading.shape == target.shape]
    reading = min(same_shape or readings, key=lambda each: each.values.shape[0])
    affines = [each.geometry.affines[0] for each in (target, reading) if each.geometry and each.geometry.affines]
    if not same_shape or len(affines) < 2 or not _same_spacing(reading.spacing_mm, target.spacing_mm):
        return f"labels are {_describe(target)}, probabilities {_describe(reading)}. {remedy}"
    one, other = affines
    directions = [affine[:3, :3] / np.linalg.norm(affine[:3, :3], axis=0) for affine in affines]
    angle = float(np.degrees(np.arccos(np.clip((directions[0] * directions[1]).sum(0), -1, 1))).max())
    axes = "" if angle < 0.01 else f"axes differ by up to {angle:.2f}° ({_codes(one)} and {_codes(other)}) and "
    return (
        f"labels and probabilities are both {_describe(target)}, but their {axes}origins are {_point(one)} and "
        f"{_point(other)} mm. {remedy}"
    )


def _describe(reading: Reading) -> str:
    """Size and voxel size; without the voxel size where the format has none."""
    size = _TIMES.join(map(str, reading.shape))
    if reading.geometry is None:
        return size
    spacing = [f"{float(f'{step:.5g}')}" for step in reading.zooms]
    return f"{size} at {spacing[0] if len(set(spacing)) == 1 else _TIMES.join(spacing)} mm"


def _size(stored: StoredArray) -> str:
    return _TIMES.join(map(str, stored.values.shape))


def _point(affine: NDArray[np.float64]) -> str:
    return f"({', '.join(str(float(f'{x:.7g}')) for x in affine[:3, 3])})"


def _codes(affine: NDArray[np.float64]) -> str:
    codes: Any = aff2axcodes
    return "".join(code or "?" for code in codes(affine))
