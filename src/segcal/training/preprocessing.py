"""Images made ready for a network, and its output brought back: turned, cropped, resampled, normalized.

The way there: turn the axes to right, anterior, superior; cut to the foreground of the image; resample to the voxel
size asked for; normalize intensities. The way back undoes the same steps, so that probabilities lie on the grid of the
original image. Prepared images are kept on disk and mapped into memory, so that cutting a patch reads the patch alone.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from segcal._io.files import make_folder, write_whole
from segcal._io.jobs import key_of, stamp
from segcal._io.parsing import parse_json
from segcal.datasets import DataCase, Dataset
from segcal.datasets.check import off_grid
from segcal.errors import FileError, GridError, LabelError
from segcal.training.config import DataConfig
from segcal.volumes.arrays import StoredArray, read_array
from segcal.volumes.cases import whole_numbers
from segcal.volumes.grids import fit, gray
from segcal.volumes.images import one_channel, place_of
from segcal.volumes.orientation import AS_IT_IS, orientation_of, turned, way_back

Array = NDArray[Any]

PREPARATION = 2  # raised when prepared files of before no longer fit
MOST_FOREGROUND = 20_000  # voxels remembered of each class, to draw patches around
OUTSIDE = 12.0  # logit of the background where the image was cut away; its probability is 1 to five digits


@dataclass(frozen=True)
class OriginalGrid:
    """What it takes to go back."""

    shape: tuple[int, int, int]
    """Of the original image."""
    orientation: tuple[tuple[float, float], ...]
    """nibabel's, from the original axes to right, anterior, superior."""
    box: tuple[tuple[int, int], ...]
    """What was cut out, along the turned axes."""


@dataclass(frozen=True, eq=False)
class PreparedCase:
    """One case as a network sees it."""

    image: Array
    """(channel, x, y, z), float32."""
    labels: Array | None
    """(x, y, z), indices of classes, uint8; of several raters (rater, x, y, z)."""
    foreground: Array
    """Positions of labeled voxels, (voxel, 3); about as many of each class."""
    geometry: OriginalGrid

    @property
    def first_labels(self) -> Array | None:
        """(x, y, z), of the first rater."""
        return self.labels if self.labels is None or self.labels.ndim == 3 else self.labels[0]


class Volume(NamedTuple):
    """A case's channels, the affine of the first file and the size of its voxels, and one channel, for its grid."""

    values: Array
    affine: Array
    spacing_mm: Array
    """As the header has it, which is right where an affine was never set (ACDC)."""
    first: StoredArray


def read_image(case: DataCase, channels: int = 1) -> Volume:
    """All channels of a case on the grid of the first file, (channel, x, y, z) float32; pictures (channel, y, x, 1).

    Pages of a picture are channels where there are as many; otherwise they are slices.
    """
    stored = [_stored(case, path) for path in case.images]
    if not stored:
        raise FileError(f"{case.name} must have an image; it has no file. Check the dataset.")
    axes = stored[0].values.ndim
    if axes < 3 and not stored[0].picture:
        raise GridError(
            f"{case.name}: the image must have three axes; {case.images[0].name} has {axes}. Store a single slice with "
            f"a third axis of length 1."
        )
    first = one_channel(stored[0], channels)
    parts = [_onto(case, first, path, one) for path, one in zip(case.images, stored, strict=True)]
    meant = (part * one.slope + one.inter if one.scaled else part for one, part in zip(stored, parts, strict=True))
    image = np.concatenate([np.asarray(part, np.float32) for part in meant])
    if not np.isfinite(image).all():
        raise FileError(f"{case.name}: the image must hold finite numbers; it has NaN or infinity. Correct the image.")
    place = place_of(case.images[0])
    spacing = np.array(place.spacing_mm, np.float64)
    if not (np.isfinite(spacing) & (spacing > 0)).all():
        raise FileError(
            f"{case.name}: voxel sizes must be above zero; the header has {spacing.tolist()} mm. Correct the header."
        )
    return Volume(image, place.affine, spacing, first)


def read_labels(case: DataCase, dataset: Dataset, *, first: StoredArray | None = None) -> Array:
    """Class indices of a case on the grid of its image, uint8; `first` is that image where it has been read."""
    if case.label is None:
        raise FileError(f"{case.name} must have labels; it has none. Check the dataset.")
    stored = gray(case.name, _stored(case, case.label))
    first = first or one_channel(_stored(case, case.images[0]), len(dataset.channels))
    view = _onto(case, first, case.label, stored)
    if len(view) != 1:
        raise LabelError(
            f"{case.name}: labels must be one map; {case.label.name} holds {len(view)}."
            " Use label maps with one channel."
        )
    values = whole_numbers(case.name, view, stored).reshape(view.shape[1:])
    known = {value: index for index, value in enumerate(dataset.values)}
    if dataset.regions is not None:
        known |= {alias: known[meaning] for alias, meaning in dataset.regions.aliases if alias not in known}
    labels = np.full(values.shape, 255, np.uint8)
    for value, index in known.items():
        labels[values == value] = index
    if (labels == 255).any():
        strange = np.unique(values[labels == 255])[:5].tolist()
        raise LabelError(
            f"{case.name}: labels must be among {sorted(known)}; {case.label.name} holds {strange}."
            " Correct the labels or the dataset definition."
        )
    return labels


def prepare_case(case: DataCase, dataset: Dataset, config: DataConfig, *, labels: bool = True) -> PreparedCase:
    """Read and prepare one case."""
    image, affine, spacing, first = read_image(case, len(dataset.channels))
    if len(image) != len(dataset.channels):
        raise GridError(
            f"{case.name}: the image must have {len(dataset.channels)} channels; it has {len(image)}."
            " Add the missing channels."
        )
    original = image.shape[1:]
    turn = orientation_of(affine) if np.isfinite(affine).all() else np.full((3, 2), np.nan)
    if not np.isfinite(turn).all():
        raise FileError(
            f"{case.name}: the header must say which way each axis runs; its affine is singular. Correct the header."
        )
    image = turned(image, turn)
    truth = None
    if labels:
        raters = [replace(case, label=label) for label in (case.label, *case.more_labels)]
        truth = turned(np.stack([read_labels(each, dataset, first=first) for each in raters]), turn)
    box = _foreground_box(image, config) if config.crop_foreground else tuple((0, n) for n in image.shape[1:])
    cut = tuple(slice(*ends) for ends in box)
    size = _new_size([stop - start for start, stop in box], spacing[np.argsort(turn[:, 0])], config)
    image = resample(torch.from_numpy(np.ascontiguousarray(image[:, *cut])), size).numpy()
    if truth is not None:
        truth = resample(torch.from_numpy(np.ascontiguousarray(truth[:, *cut])), size, nearest=True).numpy()
        truth = truth if len(truth) > 1 else truth[0]
    x, y, z = original
    orientation = tuple((float(axis), float(way)) for axis, way in turn)
    return PreparedCase(
        _normalized(image, config), truth, _foreground_voxels(truth), OriginalGrid((x, y, z), orientation, box)
    )


def restore(logits: Tensor, geometry: OriginalGrid) -> Tensor:
    """(class, x, y, z) logits of a prepared image on the grid of the original one; in their place where they are only
    turned, since of a large image there may be no room for both.

    Where the image was cut away there is background.
    """
    size = [stop - start for start, stop in geometry.box]
    logits = resample(logits, size)
    turn = np.array(geometry.orientation)
    turned_shape = [geometry.shape[int(axis)] for axis in np.argsort(turn[:, 0])]
    if turned_shape != size:
        whole = logits.new_zeros(len(logits), *turned_shape)
        whole[0] = OUTSIDE
        whole[:, *(slice(*ends) for ends in geometry.box)] = logits
        logits = whole
    values = logits.numpy()
    result = values.reshape(len(values), *geometry.shape)
    if not np.array_equal(turn, AS_IT_IS):
        back = way_back(turn)
        for before, after in zip(values, result, strict=True):
            after[...] = turned(before[None].copy(), back)[0]
    return torch.from_numpy(result)


def resample(values: Tensor, size: Any, *, nearest: bool = False) -> Tensor:
    """(channel, x, y, z) on a grid of another size that fills the same space."""
    if list(values.shape[1:]) == list(size):
        return values
    if nearest:
        return F.interpolate(values[None].float(), size=list(size), mode="nearest-exact")[0].to(values.dtype)
    return F.interpolate(values[None], size=list(size), mode="trilinear", align_corners=False)[0]


class PreparedStore:
    """Prepared cases on disk, made when first asked for, and made anew when their files or settings change."""

    def __init__(self, folder: Path, dataset: Dataset, config: DataConfig) -> None:
        self.folder, self.dataset, self.config = folder, dataset, config

    def get(self, case: DataCase) -> PreparedCase:
        """A case, mapped into memory."""
        stem = self.folder / self._key(case)
        if not stem.with_suffix(".json").exists():
            self._make(case, stem)
        try:
            return _stored_case(stem)
        except (ValueError, LookupError, TypeError, OSError, EOFError):  # spoilt since
            self._make(case, stem)
            return _stored_case(stem)

    def size(self, cases: Iterable[DataCase]) -> int:
        """Bytes that these cases take on disk, those that are there."""
        paths = (self.folder / f"{self._key(case)}.{part}.npy" for case in cases for part in PARTS)
        return sum(path.stat().st_size for path in paths if path.exists())

    def _make(self, case: DataCase, stem: Path) -> None:
        make_folder(self.folder)
        prepared = prepare_case(case, self.dataset, self.config)
        for part in PARTS:
            content = io.BytesIO()
            np.save(content, getattr(prepared, part), allow_pickle=False)
            write_whole(stem.with_name(f"{stem.name}.{part}.npy"), content.getbuffer())
        # Last: where it stands, the others stand whole.
        write_whole(stem.with_suffix(".json"), json.dumps(asdict(prepared.geometry)).encode())

    def _key(self, case: DataCase) -> str:
        settings = self.config.model_dump(mode="json", include={"spacing_mm", "intensity", "window", "crop_foreground"})
        files = [stamp(path) for path in case.files]
        return key_of(PREPARATION, case.name, files, settings, self.dataset.values)


PARTS = ("image", "labels", "foreground")


def _stored_case(stem: Path) -> PreparedCase:
    content = parse_json(stem.with_suffix(".json").read_text(encoding="utf-8"))
    image, labels, foreground = (np.load(f"{stem}.{part}.npy", mmap_mode="r") for part in PARTS)
    return PreparedCase(image, labels, foreground, geometry_from(content))


def geometry_from(content: dict[str, Any]) -> OriginalGrid:
    """From the JSON of `asdict`."""
    x, y, z = content["shape"]
    orientation, box = (tuple(map(tuple, content[name])) for name in ("orientation", "box"))
    return OriginalGrid((x, y, z), orientation, box)


def _stored(case: DataCase, path: Path) -> StoredArray:
    try:
        return read_array(path)
    except FileError as error:
        raise FileError(f"{case.name}: {error}") from error


def _onto(case: DataCase, first: StoredArray, path: Path, stored: StoredArray) -> Array:
    """A file's values as (channel, x, y, z) on the grid of the case's first image, turned where it is stored so."""
    try:
        return fit(case.name, first, [stored])[1][0]
    except GridError:
        raise GridError(f"{case.name}: {off_grid(path, stored, case.images[0], first)}") from None


def _foreground_box(image: Array, config: DataConfig) -> tuple[tuple[int, int], ...]:
    """Where any channel is not empty: above the window's lower end for CT, not zero otherwise."""
    threshold = config.window[0] if config.intensity == "window" and config.window else None
    inside = (image != 0).any(0) if threshold is None else (image > threshold).any(0)
    if not inside.any():
        return tuple((0, n) for n in image.shape[1:])
    along = [np.flatnonzero(np.any(inside, axis=others)) for others in ((1, 2), (0, 2), (0, 1))]
    return tuple((int(found[0]), int(found[-1]) + 1) for found in along)


def _new_size(shape: list[int], spacing: Array, config: DataConfig) -> list[int]:
    wanted = config.spacing_mm
    if wanted is None or wanted == "keep":
        return shape
    return [max(1, round(n * old / new)) for n, old, new in zip(shape, spacing, wanted, strict=True)]


def _normalized(image: Array, config: DataConfig) -> Array:
    if config.intensity == "window":
        low, high = config.window or (0.0, 1.0)
        return ((np.clip(image, low, high) - low) / (high - low)).astype(np.float32)
    result = np.zeros_like(image)
    for channel, into in zip(image, result, strict=True):
        inside = channel != 0
        if inside.any():
            values = channel[inside].astype(np.float64)
            into[inside] = (values - values.mean()) / (values.std() or 1.0)
    return result


def _foreground_voxels(labels: Array | None) -> Array:
    if labels is None:
        return np.zeros((0, 3), np.int32)
    found = []
    for index in range(1, int(labels.max()) + 1):
        voxels = np.argwhere(labels == index)[:, -3:]  # of all raters, where there are several
        found.append(voxels[:: max(1, len(voxels) // MOST_FOREGROUND)])
    return np.concatenate(found).astype(np.int32) if found else np.zeros((0, 3), np.int32)
