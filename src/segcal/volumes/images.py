"""The images that cases were segmented from: how they are found, and read on the grid of the labels."""

from __future__ import annotations

import glob
from pathlib import Path
from typing import Any, NamedTuple

from numpy.typing import NDArray

from segcal.errors import ConfigError, FileError, GridError
from segcal.volumes.arrays import StoredArray, read_array, stem_of
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


class Channel(NamedTuple):
    """A channel of an image, as it is stored: its values are `stored * slope + inter`."""

    stored: NDArray[Any]
    slope: float
    inter: float


def read_channel(case: str, path: Path, channel: int, *, like: StoredArray) -> Channel:
    """A channel of an image on the grid of another array, turned as that is."""
    try:
        image = read_array(path)
    except FileError as error:
        raise FileError(f"{case}: {error}") from error
    try:
        _, (view,), _ = fit(case, like, [image])
    except GridError as error:
        raise GridError(f"{case}: the image {path.name} must lie on the grid of the labels. Resample it.") from error
    if not 0 <= channel < len(view):
        raise ConfigError(f"{case}: image_channel must lie in 0..{len(view) - 1}; got {channel}.")
    return Channel(view[channel], image.slope, image.inter)
