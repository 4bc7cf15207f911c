"""One case as a browser shows it: image, labels and probabilities as bytes on one grid, cropped to what is seen.

Everything is read through `segcal.volumes`, with its checks, and turned to right, front and head where an affine says
where these are. A byte of a probability is a 255th. Bytes are for the eye: numbers come from the evaluation's sums.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from nibabel import Nifti1Image
from nibabel.orientations import inv_ornt_aff
from numpy.typing import NDArray

from segcal.errors import ConfigError, FileError, GridError, ShapeError
from segcal.evaluation.options import Options, slab_voxels
from segcal.evaluation.results import class_names
from segcal.evaluation.unlabelled import open_maps
from segcal.evaluation.voxels import places_of, region_labels, region_values
from segcal.volumes import Case, CaseFiles, Grid, Prediction, PredictionFiles, open_case
from segcal.volumes.arrays import StoredArray, read_array
from segcal.volumes.averaging import not_probabilities, sigmoid, softmax
from segcal.volumes.cases import LABEL_KEYS, PROBABILITY_KEYS, boxes
from segcal.volumes.images import read_channel
from segcal.volumes.orientation import orientation_of, turned

Array = NDArray[Any]
Files = CaseFiles | PredictionFiles

FULL = 255  # the byte that means a probability of 1
SEEN = 13  # bytes of a probability of 0.05 and more are worth a place in the box
MARGIN_MM = 10.0  # around what there is to see
WINDOW = (0.5, 99.5)  # percentiles of the image's values, those at its minimum left out, that become black and white

_inverse: Any = inv_ornt_aff  # nibabel has no types
_nifti: Any = Nifti1Image


@dataclass(frozen=True, eq=False)
class CaseVolumes:
    """A case for the browser; arrays of bytes whose last three axes are x, y, z.

    case, classes, methods: their names.
    probabilities: (method, class, x, y, z), 255ths.
    labels: (class, x, y, z), zeros and ones; None where there are none.
    image: (x, y, z), intensities in a window that leaves out extremes; None where there is none.
    spacing_mm: of the voxels.
    affine: where they lie, in mm; where the files do not say, a picture as it is stored.
    oriented: whether the axes run to the patient's right, front and head.
    """

    case: str
    classes: tuple[str, ...]
    methods: tuple[str, ...]
    probabilities: Array
    labels: Array | None
    image: Array | None
    spacing_mm: tuple[float, ...]
    affine: Array
    oriented: bool

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the box."""
        return self.probabilities.shape[2:]

    def nifti(self, kind: str, method: int | None = None, index: int | None = None) -> bytes:
        """One volume as a NIfTI file: an "image", a "label" (of a class) or a "probability" (of both)."""
        array = {"image": self.image, "label": self.labels, "probability": self.probabilities}.get(kind)
        if array is None:
            raise ConfigError(
                f"{self.case}: the volume must be an image, a label or a probability that is there; got {kind!r}."
            )
        if kind == "probability":
            array = array[method]
        written: bytes = _nifti(array if kind == "image" else array[index], self.affine).to_bytes()
        return written

    def facts(self) -> dict[str, Any]:
        """What a page must know besides the bytes, as JSON has it."""
        return {
            "case": self.case,
            "classes": list(self.classes),
            "methods": list(self.methods),
            "shape": list(self.shape),
            "oriented": self.oriented,
            "hasImage": self.image is not None,
            "hasLabels": self.labels is not None,
        }

    def cropped(self, *, margin_mm: float = MARGIN_MM) -> CaseVolumes:
        """Cut to a box around labels and probabilities of at least 0.05, and a margin; whole where there are none."""
        there: Array = np.any(self.probabilities >= SEEN, axis=(0, 1))
        if self.labels is not None:
            there |= self.labels.any(0)
        if not there.any():
            return self
        box, moved = [], np.eye(4)
        for axis, step in enumerate(self.spacing_mm):
            places = np.flatnonzero(there.any(tuple(i for i in range(3) if i != axis)))
            margin = math.ceil(margin_mm / step)
            box.append(slice(max(0, int(places[0]) - margin), int(places[-1]) + 1 + margin))
            moved[axis, 3] = box[-1].start
        cut = tuple(box)
        return replace(
            self,
            probabilities=self.probabilities[:, :, *cut],
            labels=None if self.labels is None else self.labels[:, *cut],
            image=None if self.image is None else self.image[cut],
            affine=self.affine @ moved,
        )


def case_volumes(
    case: str,
    files: Mapping[str, Files],
    *,
    options: Options | Mapping[str, Options] | None = None,
    classes: Sequence[str] | None = None,
    image: Path | None = None,
) -> CaseVolumes:
    """The volumes of a case, whole; `cropped` cuts them.

    `files` are those of each method, with labels (`CaseFiles`) or without. `options` say how to read them, as for an
    evaluation, alike or by method; a calibrator among them is applied. `classes` are those to show, by name; if not
    given, all but the background. GridError where methods or image do not lie on one grid.
    """
    if not files:
        raise ConfigError("there must be predictions of at least one method; got none.")
    grid, labels, rows, names = None, None, [], tuple(classes or ())
    for method, own in files.items():
        told = options[method] if isinstance(options, Mapping) else options or Options()
        found = _read(own, told)
        names = names or found.shown
        missing = [name for name in names if name not in found.classes]
        if missing:
            raise ConfigError(
                f"{case}: classes must be those of {method}, which are {', '.join(found.classes)}; got {missing[0]!r}."
            )
        places = [found.classes.index(name) for name in names]
        if grid is not None and found.probabilities.shape[1:] != rows[0].shape[1:]:
            raise GridError(
                f"{case}: methods must lie on one grid; {method} has {found.grid.shape}, others {grid.shape}."
                " Resample the maps to one grid."
            )
        grid = grid or found.grid
        rows.append(found.probabilities[places])
        labels = labels if labels is not None or found.labels is None else found.labels[places]
    assert grid is not None
    shown = None if image is None else _image(case, image, next(iter(files.values())))
    return _placed(case, names, tuple(files), np.stack(rows), labels, shown, grid)


@dataclass(frozen=True, eq=False)
class _Found:
    """All classes of one prediction, on its grid: (class, x, y, z) bytes."""

    classes: tuple[str, ...]
    exclusive: bool
    probabilities: Array
    labels: Array | None
    grid: Grid

    @property
    def shown(self) -> tuple[str, ...]:
        return self.classes[1:] if self.exclusive else self.classes


def _read(files: Files, options: Options) -> _Found:
    if isinstance(files, CaseFiles):
        with open_case(files, ignored=options.ignore_index) as case:
            return _read_case(case, options)
    return _read_prediction(open_maps(files, options), options)


def _read_case(case: Case, options: Options) -> _Found:
    """A part at a time, unless a calibrator looks at neighbors."""
    most = math.prod(case.shape) if _is_spatial(options) else slab_voxels(case.classes)
    parts = []
    for box in boxes(case.shape, most):
        values, labels = case.voxels(box)
        parts.append((box, _of_voxels(_calibrated(values, options, case), labels, options)))
    exclusive, first, _ = parts[0][1]
    whole = np.empty((2, len(first), *case.shape), np.uint8)
    for box, (_, *rows) in parts:
        whole[:, :, *box] = np.array(rows).reshape(whole[:, :, *box].shape)
    return _Found(class_names(len(first), options), exclusive, whole[0], whole[1], case.grid)


def _read_prediction(prediction: Prediction, options: Options) -> _Found:
    values = prediction.read()
    flat = _calibrated(values.reshape(len(values), -1), options, prediction)
    exclusive, shown, _ = _of_voxels(flat, None, options)
    names = class_names(len(shown), options)
    return _Found(names, exclusive, shown.reshape(-1, *prediction.shape), None, prediction.grid)


def _is_spatial(options: Options) -> bool:
    if options.calibrator is None:
        return False
    from segcal.evaluation.calibrated import loaded

    return loaded(options.calibrator, options.calibrator_fingerprint).spatial


def _calibrated(values: Array, options: Options, source: Case | Prediction) -> Array:
    if options.calibrator is None:
        return values
    from segcal.evaluation.calibrated import loaded, through

    calibrator = loaded(options.calibrator, options.calibrator_fingerprint)
    return through(calibrator, values, options, source.shape, orientation_of(source.grid.affine))[0]


def _of_voxels(values: Array, labels: Array | None, options: Options) -> tuple[bool, Array, Array | None]:
    """Whether the first class is a background; probabilities as bytes and 0/1 labels, (class, voxel) both."""
    if labels is not None and options.ignore_index is not None and labels.ndim == 1:
        labels = np.where(labels == options.ignore_index, (options.values or (0,))[0], labels)
    labels = None if labels is None else places_of(labels, len(values), options)
    overlapping = options.sigmoid or len(values) == 1
    if options.logits:
        values = sigmoid(values) if overlapping else softmax(values)
    elif not (values.min() >= 0 and values.max() <= 1):
        raise not_probabilities(values)
    exclusive = not overlapping and options.regions is None
    if not exclusive:
        values = region_values(values, options)
        truth = None if labels is None else region_labels(labels, values, options)
    elif labels is not None and labels.ndim != 1:
        raise ShapeError(
            f"labels must be one map of exclusive classes; got {len(labels)} channels. Use label maps with one channel."
        )
    else:
        truth = None if labels is None else (labels == np.arange(len(values))[:, None]).astype(np.uint8)
    return exclusive, _bytes(values), truth


def _bytes(values: Array) -> Array:
    """Halves are rounded up, as by JavaScript, so that p >= t in bytes is p >= t."""
    found: Array = np.floor(values * np.float64(FULL) + 0.5).astype(np.uint8)
    return found


def _image(case: str, path: Path, files: Files) -> Array:
    """The image's values on the grid of the labels, or of the prediction where there are none."""
    try:
        like = _grid_of(files)
    except FileError as error:
        raise FileError(f"{case}: {error}") from error
    image = read_channel(case, path, like=like)
    return _windowed(image.stored * image.slope + image.inter)


def _grid_of(files: Files) -> StoredArray:
    """An array that lies where the volumes do; of a prediction, one class of it."""
    if isinstance(files, CaseFiles):
        return read_array(files.label, keys=LABEL_KEYS, peek=True)
    if files.reference is not None:
        return read_array(files.reference)
    stored = read_array(files.predictions[0], keys=PROBABILITY_KEYS, peek=True)
    if len(files.predictions) == 1 and stored.geometry is not None and stored.values.ndim > 3:
        return replace(stored, values=stored.values[..., 0])
    if len(files.predictions) == 1 and stored.geometry is None and stored.values.ndim > 2:
        return replace(stored, values=stored.values[0])
    return stored


def _windowed(values: Array) -> Array:
    """Bytes from black to white between percentiles of what is not at the minimum, as ground outside of a body is."""
    finite = np.nan_to_num(values.astype(np.float32), nan=0.0, posinf=0.0, neginf=0.0)
    body = finite[finite > finite.min()]
    low, high = np.percentile(body, WINDOW) if body.size else (0.0, 1.0)
    scaled = (finite - low) / max(float(high - low), 1e-30)
    window: Array = np.rint(np.clip(scaled, 0, 1) * FULL).astype(np.uint8)
    return window


def _placed(
    case: str,
    classes: tuple[str, ...],
    methods: tuple[str, ...],
    probabilities: Array,
    labels: Array | None,
    image: Array | None,
    grid: Grid,
) -> CaseVolumes:
    """All turned to right, front and head; without an affine a picture has its rows from the top."""
    spacing = (*(grid.spacing_mm or ()), 1.0, 1.0, 1.0)[:3]
    oriented = grid.affine is not None
    if grid.affine is not None:
        orientation = orientation_of(grid.affine)
        shape = probabilities.shape[2:]
        affine: Array = grid.affine @ _inverse(orientation, shape)

        def turn(array: Array) -> Array:
            return turned(array, orientation)

        spacing = tuple(float(spacing[int(axis)]) for axis in np.argsort(orientation[:, 0]))
    else:
        flat = probabilities.shape[-1] == 1

        def turn(array: Array) -> Array:
            return array.swapaxes(1, 2)[:, :, ::-1] if flat else array

        spacing = (spacing[1], spacing[0], spacing[2]) if flat else spacing
        affine = np.diag([*spacing, 1.0])
    rows = probabilities.reshape(-1, *probabilities.shape[2:])
    seen = turn(rows)
    return CaseVolumes(
        case,
        classes,
        methods,
        seen.reshape(len(methods), len(classes), *seen.shape[1:]),
        None if labels is None else turn(labels),
        None if image is None else turn(image[None])[0],
        spacing,
        affine,
        oriented,
    )
