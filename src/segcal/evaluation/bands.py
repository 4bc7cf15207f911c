"""Voxels grouped by their distance to the predicted boundary of a class, and the sums of each group. All in numpy.

The predicted boundary is that of the decision: the most probable class, or a probability of at least 0.5 for regions
and overlapping classes. So the band of a voxel depends on the prediction alone, and exact probabilities are calibrated
in every band; bands around the true boundary would select voxels by their labels. Every voxel that counts is in one
band of each class: the sums of the bands add up to those of the case.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from segcal.errors import ConfigError, is_number
from segcal.evaluation.options import Options
from segcal.evaluation.rules import probabilities_of
from segcal.evaluation.sums import CaseSums
from segcal.evaluation.voxels import counted_voxels, measure_class, places_of, region_labels
from segcal.volumes import Case

Array = NDArray[Any]
KIND = "bands"
NOTE = (
    "Distance: from the center of a voxel to the nearest center of a voxel on the other side of the class's predicted "
    "boundary. Errors are those of pooled bins. A class that is not predicted in a case has no boundary: all of its "
    "voxels are in the last band."
)


def check_bands(limits: Sequence[float]) -> tuple[float, ...]:
    """Return the limits of bands in mm; ConfigError unless they are positive and rise.

    >>> check_bands([2, 5])
    (2.0, 5.0)
    """
    checked = tuple(float(limit) for limit in limits if is_number(limit))
    if len(checked) != len(limits) or not checked or checked[0] <= 0 or any(b <= a for a, b in pairwise(checked)):
        raise ConfigError(f"bands must be positive distances in mm that rise, as 2,5; got {list(limits)}.")
    return checked


def band_names(limits: Sequence[float]) -> list[str]:
    """Return the names of the bands, from the nearest on.

    >>> band_names((2.0, 5.0))
    ['0-2mm', '2-5mm', 'beyond-5mm']
    """
    return [*(f"{low:g}-{high:g}mm" for low, high in pairwise((0, *limits))), f"beyond-{limits[-1]:g}mm"]


def band_codes(inside: Array, outside: Array, spacing_mm: Sequence[float], limits: Sequence[float]) -> Array:
    """Return the band of every voxel of a volume, int8; 0 is the nearest to the boundary.

    The distance of a voxel is that from its center to the nearest center of a voxel on the other side. A limit belongs
    to the band below it. All voxels are in the last band if a side is empty, as are voxels on neither side.
    """
    from scipy import ndimage

    codes = np.full(inside.shape, len(limits), np.int8)
    boxes = [ndimage.find_objects(side.view(np.uint8)) for side in (inside, outside)]
    if not all(boxes):
        return codes
    box = []  # holds every voxel within the largest limit of the other side
    for one, other, step in zip(boxes[0][0], boxes[1][0], spacing_mm, strict=True):
        margin = math.ceil(limits[-1] / step) + 1
        box.append(slice(max(0, one.start - margin, other.start - margin), min(one.stop, other.stop) + margin))
    own, rest = inside[tuple(box)], outside[tuple(box)]
    for here, there in ((own, rest), (rest, own)):
        if here.any() and there.any():
            distance = ndimage.distance_transform_edt(~there, sampling=spacing_mm)
            codes[tuple(box)][here] = np.searchsorted(limits, distance[here])
    return codes


def measure_bands(
    case: Case,
    slabs: Iterable[tuple[Array, Array]],
    decided: Array,
    options: Options,
    total: CaseSums,
    *,
    spatial: bool,
    threads: int | None,
) -> dict[str, CaseSums]:
    """Return the sums of each band of a case, by the names of their results.

    slabs: Values (class, voxel) and labels of the case, from the first voxel to the last.
    decided: Their decisions, the class (voxel), or yes or no (class, voxel).
    total: The sums of the whole case.
    spatial: Whether slabs follow the axes of the grid. Otherwise they follow the order of the file.
    """
    classes = total.bins.shape[1]
    labels = case.label_map()
    counted = np.zeros(case.shape, bool)
    counted.reshape(-1)[counted_voxels(labels.reshape(*labels.shape[:-3], -1), options)] = True
    chosen = decided if decided.ndim == 2 else decided == np.arange(classes)[:, None]
    on_grid = chosen.reshape(classes, *case.shape) if spatial else case.on_grid(chosen)
    spacing = (*(case.grid.spacing_mm or ()), 1.0, 1.0)[:3]
    codes = np.stack([band_codes(own & counted, counted & ~own, spacing, options.bands) for own in on_grid])
    codes = codes.reshape(classes, -1) if spatial else case.in_slab_order(codes)
    names = band_names(options.bands)
    bins = np.zeros((len(names), *total.bins.shape))
    overlap, scores = np.zeros((2, len(names), 3, classes))
    confidence = np.zeros((len(names), classes))
    start = 0
    for values, labels in slabs:
        part = slice(start, start := start + values.shape[1])
        keep = counted_voxels(labels, options)
        probabilities = probabilities_of(values[:, keep], options)
        truth = region_labels(places_of(labels[..., keep], len(values), options), probabilities, options)
        for c, (p, y, yes, code) in enumerate(
            zip(probabilities, truth, chosen[:, part][:, keep], codes[:, part][:, keep], strict=True)
        ):
            for band in np.unique(code).tolist():
                here = code == band
                found = measure_class(p[here], y[here], fine_bins=options.fine_bins, threads=threads)
                bins[band, :, c] += found[0]
                scores[band, :, c] += found[1]
                overlap[band, :, c] += yes[here].sum(), y[here].sum(), y[here & yes].sum()
                confidence[band, c] += p[here & yes].sum(dtype=np.float64)
    return {
        f"{KIND}/{name}": CaseSums(
            bins=bins[i],
            top_label=np.zeros_like(total.top_label),  # a voxel has a band for each class, so none for all of them
            overlap=overlap[i],
            scores=scores[i],
            joint=np.zeros_like(total.joint),
            labels=total.labels,
            decided=np.array([confidence[i], np.full(classes, np.nan)]),
            voxel_ml=total.voxel_ml,
        )
        for i, name in enumerate(names)
    }
