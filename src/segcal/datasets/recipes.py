"""Recipes for datasets that the paper does not treat: its plain one, fitted to the size of the images."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from segcal.datasets.dataset import DataCase, Recipe
from segcal.volumes.images import place_of, shape_of
from segcal.volumes.orientation import orientation_of
from segcal.volumes.pairing import is_picture

PLAIN = Recipe(spacing_mm=None, patch=(64, 64, 64), inference_patch=(64, 64, 64))
CT_WINDOW = (-175.0, 250.0)  # soft tissue, as MONAI's examples for abdominal CT have it
LARGEST_PATCH = 128  # the paper's for KiTS
LARGEST_FLAT_PATCH = 512  # of pictures: nnU-Net's usual one
PATCH_STEP = 16  # the network halves its input four times
_MOST_HEADERS = 25


def fitted_recipe(cases: Sequence[DataCase], channels: Sequence[str]) -> Recipe:
    """The plain recipe with patches as large as a usual image, up to 128 voxels a side, of pictures 512 pixels.

    A patch of pictures has a third length of 1, which makes the network one of two axes. CT is windowed. Where voxel
    sizes differ by more than 1 %, images are resampled to the usual one. Some headers stand for all; those that cannot
    be read are passed over.
    """
    recipe = PLAIN
    if all(channel.upper() == "CT" for channel in channels):
        recipe = replace(recipe, intensity="window", window=CT_WINDOW)
    chosen = cases[:: -(-len(cases) // _MOST_HEADERS)] if cases else ()
    headers = [header for case in chosen if (header := _shape_and_spacing(case, len(channels))) is not None]
    if not headers:
        return recipe
    shapes, spacings = (np.array(column, np.float64) for column in zip(*headers, strict=True))
    usual = np.median(spacings, 0)
    if (spacings.max(0) > 1.01 * spacings.min(0)).any():
        x, y, z = (round(float(size), 3) for size in usual)
        recipe = replace(recipe, spacing_mm=(x, y, z))
    sizes = np.median(shapes * spacings / usual, 0)
    flat = all(is_picture(case.images[0]) for case in chosen) and bool((shapes[:, 2] == 1).all())
    most = LARGEST_FLAT_PATCH if flat else LARGEST_PATCH
    x, y, z = (min(most, PATCH_STEP * int(np.ceil(size / PATCH_STEP))) for size in sizes)
    patch = (x, y, 1 if flat else z)
    return replace(recipe, patch=patch, inference_patch=patch, crop_foreground=recipe.crop_foreground and not flat)


def _shape_and_spacing(case: DataCase, channels: int) -> tuple[NDArray[Any], NDArray[Any]] | None:
    """Along the axes right, anterior, superior, to which training turns every image."""
    try:
        place = place_of(case.images[0])
        order = np.argsort(orientation_of(place.affine)[:, 0])
        shape, spacing = np.array(shape_of(case.images[0], channels))[order], np.array(place.spacing_mm)[order]
    except Exception:  # whatever a broken file does; the check names it
        return None
    return (shape, spacing) if (spacing > 0).all() and np.isfinite(spacing).all() else None
