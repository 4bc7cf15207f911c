"""Voxels by their distance to the boundary of a class, and the sums of each band. All in numpy, as the workers are.

The distance of a voxel is that from its center to the nearest center of a voxel on the other side, in mm: for a voxel
of the class, the nearest that is not of it; for another voxel, the nearest of the class. Voxels with the ignored label
are on neither side. Every voxel that counts is in one band of each class, so that the sums of the bands add up to those
of the case.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
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
SIDES = ("inside", "outside")


def check_bands(limits: Sequence[float]) -> tuple[float, ...]:
    """Limits of bands in mm, which must be positive and rise; ConfigError otherwise.

    >>> check_bands([2, 5])
    (2.0, 5.0)
    """
    found = tuple(float(limit) for limit in limits if is_number(limit))
    if len(found) != len(limits) or not found or found[0] <= 0 or any(b <= a for a, b in pairwise(found)):
        raise ConfigError(f"bands must be positive distances in mm that rise, as 2,5; got {list(limits)}.")
    return found


def distance_names(limits: Sequence[float]) -> list[str]:
    """What bands are called, without a side.

    >>> distance_names((2.0, 5.0))
    ['0-2mm', '2-5mm', 'beyond-5mm']
    """
    edges = (0, *limits)
    return [*(f"{low:g}-{high:g}mm" for low, high in pairwise(edges)), f"beyond-{edges[-1]:g}mm"]


def band_codes(of_class: Array, other: Array, spacing_mm: Sequence[float], limits: Sequence[float]) -> Array:
    """The band of every voxel of a volume, int8: 0 is inside and nearest, then those farther; then those outside.

    A band holds distances above its lower limit up to its upper one, which belongs to it. Without a boundary, all
    voxels are in the farthest band of their side.

    of_class, other: which voxels are of the class, and which are not; those on neither side are taken as outside.
    """
    number = len(limits) + 1
    codes = np.where(of_class, number - 1, 2 * number - 1).astype(np.int8)
    box = _near_both(of_class, other, spacing_mm, limits[-1])
    if box is None:
        return codes
    from scipy import ndimage

    own, rest, inner = of_class[box], other[box], codes[box]
    for side, here, there in ((0, own, rest), (1, ~own, own)):
        if there.any():
            distance = ndimage.distance_transform_edt(~there, sampling=spacing_mm)
            inner[here] = side * number + np.searchsorted(limits, distance[here])  # a limit belongs to the band below
    return codes


def _near_both(of_class: Array, other: Array, spacing_mm: Sequence[float], limit: float) -> tuple[slice, ...] | None:
    """A box with all voxels within the limit of the other side, and what they are near to; None: there are none.

    Whoever is that near lies in the box of each side, widened by the limit.
    """
    bounds = []
    for axis, step in enumerate(spacing_mm):
        wide = math.ceil(limit / step) + 1
        others = tuple(i for i in range(of_class.ndim) if i != axis)
        low, high = 0, of_class.shape[axis]
        for side in (of_class, other):
            where = np.flatnonzero(side.any(others))
            if not len(where):
                return None
            low, high = max(low, int(where[0]) - wide), min(high, int(where[-1]) + 1 + wide)
        if low >= high:
            return None
        bounds.append(slice(low, high))
    return tuple(bounds)


class BandSums:
    """Adds up a case slab by slab in bands of each class."""

    def __init__(self, case: Case, options: Options, *, spatial: bool, threads: int | None) -> None:
        if case.raters:
            raise ConfigError("--bands must be used with one rater; several labeled a case. Give one folder of labels.")
        if case.grid.spacing_mm is None:
            raise ConfigError(
                f"{case.name}: bands need files that tell the size of a voxel, as NIfTI; this one does not."
            )
        self._options, self._threads, self._start = options, threads, 0
        self._codes = self._code(case, spatial)
        classes, bands, bins = len(self._codes), 2 * len(options.bands) + 2, options.fine_bins
        self._bins = np.zeros((bands, 3, classes, bins))
        self._overlap = np.zeros((bands, 3, classes))
        self._scores = np.zeros((bands, 3, classes))
        self._decided = np.zeros((bands, classes))

    def _code(self, case: Case, spatial: bool) -> Array:
        """The band of each voxel for each class, (class, voxel), in the order of slabs."""
        labels = case.label_map()
        flat = labels.reshape(*labels.shape[:-3], -1)
        counted = counted_voxels(flat, self._options)
        known = np.ones(flat.shape[-1], bool) if isinstance(counted, slice) else counted
        truth = np.zeros((self._number(case), flat.shape[-1]), np.uint8)
        truth[:, known] = self._truth(flat[..., known], case.classes)
        spacing = (*(case.grid.spacing_mm or ()), 1.0, 1.0)[:3]
        codes = np.empty((len(truth), *case.shape), np.int8)
        for c, row in reversed(list(enumerate(truth))):
            own = row.reshape(case.shape) == 1
            if c == 0 and len(truth) == 2 and np.array_equal(row[known], 1 - truth[1, known]):
                bands = len(self._options.bands) + 1
                codes[0] = (codes[1] + bands) % (2 * bands)  # one boundary, seen from the other side
                continue
            codes[c] = band_codes(own, known.reshape(case.shape) & ~own, spacing, self._options.bands)
        return codes.reshape(len(codes), -1) if spatial else case.in_slab_order(codes)

    def _number(self, case: Case) -> int:
        """Of the classes that are measured."""
        regions = self._options.regions
        return case.classes if regions is None else len(regions.members)

    def _truth(self, labels: Array, channels: int) -> Array:
        """0/1 labels of each class, (class, voxel)."""
        number = channels if self._options.regions is None else len(self._options.regions.members)
        like = np.empty((number, 0), np.float32)  # as many rows as there are classes
        return region_labels(places_of(labels, channels, self._options), like, self._options)

    def add(self, values: Array, labels: Array, decided: Array) -> None:
        """Add a slab of (class, voxel) values, with its labels and what was decided of it."""
        counted = counted_voxels(labels, self._options)
        stop = self._start + values.shape[1]
        codes, self._start = self._codes[:, self._start : stop][:, counted], stop
        probabilities = probabilities_of(values[:, counted], self._options)
        truth = self._truth(labels[..., counted], len(values))
        chosen = decided[..., counted]
        for c, (row, true, code) in enumerate(zip(probabilities, truth, codes, strict=True)):
            predicted = chosen[c].astype(bool) if chosen.ndim == 2 else chosen == c
            for band in np.unique(code).tolist():
                here = code == band
                bins, scores = measure_class(
                    row[here], true[here], fine_bins=self._options.fine_bins, threads=self._threads
                )
                self._bins[band, :, c] += bins
                self._scores[band, :, c] += scores
                yes, there = predicted[here], true[here] == 1
                self._overlap[band, :, c] += yes.sum(), there.sum(), (yes & there).sum()
                self._decided[band, c] += row[here][yes].sum(dtype=np.float64)

    def of_case(self, total: CaseSums) -> dict[str, CaseSums]:
        """The sums of each band, inside, outside and of both sides, by the names of their results.

        total: The sums of the whole case.
        """
        names = distance_names(self._options.bands)
        both: dict[str, CaseSums] = {}
        sided: dict[str, CaseSums] = {}
        for i, name in enumerate(names):
            sides = [self._band(i + side * len(names), total) for side in (0, 1)]
            both[f"{KIND}/{name}"] = replace(sides[0] + sides[1], labels=total.labels)
            sided |= {f"{KIND}/{word}-{name}": sums for word, sums in zip(SIDES, sides, strict=True)}
        return both | sided

    def _band(self, band: int, total: CaseSums) -> CaseSums:
        """Of one band. The whole distribution and top labels have none: a voxel's band depends on the class."""
        return CaseSums(
            bins=self._bins[band],
            top_label=np.zeros_like(total.top_label),
            overlap=self._overlap[band],
            scores=self._scores[band],
            joint=np.zeros_like(total.joint),
            labels=total.labels,  # which tells whether the case is complete
            decided=np.array([self._decided[band], np.full(len(self._codes), np.nan)]),
            voxel_ml=total.voxel_ml,
        )
