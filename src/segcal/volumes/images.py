"""The images that cases were segmented from: how they are found, where they lie, how labels and they fit together."""

from __future__ import annotations

import glob
import math
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from segcal.errors import FileError, GridError
from segcal.volumes.arrays import NIFTI, StoredArray, read_array, read_nifti_start, stem_of
from segcal.volumes.grids import fit

IMAGE_NAMES = ("{case}", "{case}_0000", "{case}_flair", "{case}_image", "{case}/imaging", "{case}/image")


def find_image(images: Path, case: str) -> Path:
    """The image of a case in a folder or below it: a file of its name, or its first channel, or in its own folder."""
    for pattern in IMAGE_NAMES:
        wanted = pattern.format(case=glob.escape(case))
        for path in sorted(images.glob(f"**/{wanted}.*")):
            if stem_of(path) == Path(pattern.format(case=case)).name:
                return path
    known = ", ".join(pattern.format(case=case) for pattern in IMAGE_NAMES)
    raise FileError(f"{images} must have an image of {case}; none goes by one of {known}. Check the name of the file.")


class Place(NamedTuple):
    """Where the voxels of an image lie: to right, front and head as nibabel has it; pictures lie as they are stored."""

    affine: NDArray[Any]
    spacing_mm: tuple[float, ...]
    """As the header has it, which is right where an affine was never set (ACDC)."""
    voxel_ml: float
    """NaN where the format does not say."""


def place_of(path: Path) -> Place:
    """Where an image lies, from its header alone."""
    if path.name.lower().endswith(NIFTI):
        header, _, _ = read_nifti_start(path)
        zooms = tuple(map(float, header.get_zooms()))
        voxel_ml = math.prod(zooms[:3]) / 1000 if len(zooms) >= 3 else math.nan
        return Place(header.get_best_affine(), (*zooms[:3], 1.0)[:3], voxel_ml)
    stored = read_array(path, peek=True)
    if stored.geometry is None:
        return Place(np.eye(4), (1.0, 1.0, 1.0), math.nan)
    zooms, affines = stored.geometry.zooms, stored.geometry.affines
    voxel_ml = math.prod(zooms) / 1000 if stored.values.ndim > 2 else math.nan
    return Place(affines[0] if affines else np.eye(4), zooms, voxel_ml)


def shape_of(path: Path, channels: int) -> tuple[int, ...]:
    """Of the space that an image of so many channels fills, from its header alone; a third axis of 1 for pictures."""
    return (*one_channel(read_array(path, peek=True), channels).values.shape, 1)[:3]


def one_channel(stored: StoredArray, channels: int) -> StoredArray:
    """An array of the space that an image fills; channels of a picture are its colors, or pages of their number."""
    several = stored.picture and stored.values.ndim == 3 and (stored.color or len(stored.values) == channels)
    return replace(stored, values=stored.values[0], color=False) if several else stored


class Channel(NamedTuple):
    """A channel of an image, as it is stored: its values are `stored * slope + inter`."""

    stored: NDArray[Any]
    slope: float
    inter: float


def read_channel(case: str, path: Path, *, like: StoredArray) -> Channel:
    """Return the first channel of an image on the grid of another array, turned as that is."""
    try:
        image = read_array(path)
    except FileError as error:
        raise FileError(f"{case}: {error}") from error
    try:
        _, (view,), _ = fit(case, like, [image])
    except GridError as error:
        raise GridError(f"{case}: the image {path.name} must lie on the grid of the labels. Resample it.") from error
    return Channel(view[0], image.slope, image.inter)
