"""One case from files to lesions: read slab by slab, through a calibrator if there is one; a class at a time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from segcal.errors import ConfigError, RangeError
from segcal.evaluation.deciding import foreground_names
from segcal.evaluation.measure import open_slabs
from segcal.evaluation.options import Options
from segcal.evaluation.rules import probabilities_of
from segcal.evaluation.voxels import counted_voxels, places_of, region_labels
from segcal.kernels.spec import SUM_TOLERANCE
from segcal.lesions.components import Matched, Rules, match_components
from segcal.volumes import CaseFiles, Grid, open_case
from segcal.volumes.averaging import not_probabilities

Array = NDArray[Any]
_NEAR = 1e-3  # beyond [0, 1] by rounding


class Lesion(NamedTuple):
    """One component, predicted or true: a row of lesions.csv. None: it has no value, or is not known.

    kind: "predicted" or "true".
    confidence: of a predicted one; of a true one, the largest of those that match it, and None where it is missed.
    matched: whether a predicted one is real, or a true one is found.
    partners: how many of the other kind match it.
    x, y, z: the center in voxels, counted from 0 along the axes of the label map.
    x_mm, y_mm, z_mm: the center as the label map's affine has it.
    """

    case: str
    class_name: str
    kind: str
    voxels: int
    volume_mm3: float | None
    confidence: float | None
    matched: bool
    partners: int
    x: float
    y: float
    z: float
    x_mm: float | None
    y_mm: float | None
    z_mm: float | None


class CaseLesions(NamedTuple):
    """The lesions of a case, the classes that were looked at, and the volume of a voxel (NaN: not known)."""

    lesions: list[Lesion]
    classes: tuple[str, ...]
    voxel_mm3: float


def find_lesions(files: CaseFiles, options: Options, rules: Rules, wanted: Sequence[str] = ()) -> CaseLesions:
    """The predicted and true lesions of a case, of the wanted classes or of all but the background."""
    with open_case(files, ignored=options.ignore_index) as case:
        names = foreground_names(case.classes, options)
        chosen = chosen_classes(names, wanted)
        voxel_mm3 = 1000 * case.grid.voxel_ml
        least = rules.least_voxels(voxel_mm3)
        sure: list[list[tuple[Array, Array]]] = [[] for _ in chosen]  # which voxels reach the threshold, and by what
        truth: list[list[Array]] = [[] for _ in chosen]
        slabs, spatial = open_slabs(case, options)
        start = 0
        for values, labels, _ in slabs:
            probabilities = checked(probabilities_of(values, options), exclusive=_exclusive(case.classes, options))
            counted = counted_voxels(labels, options)
            voxels = places_of(labels if isinstance(counted, slice) else labels[counted], case.classes, options)
            there = region_labels(voxels, probabilities, options)
            first = len(probabilities) - len(names)
            for c, name in enumerate(chosen):
                row = first + names.index(name)
                truth[c].append(_spread(there[row], counted, probabilities.shape[1]))
                reaches = probabilities[row] >= rules.threshold
                if not isinstance(counted, slice):
                    reaches &= counted
                where = np.flatnonzero(reaches)
                sure[c].append((where + start, probabilities[row][where]))
            start += probabilities.shape[1]
        lesions: list[Lesion] = []
        for c, name in enumerate(chosen):
            where, found = (np.concatenate(parts) for parts in zip(*sure[c], strict=True))
            volume = np.zeros((1, start), found.dtype)
            volume[0, where] = found
            rows = volume, np.concatenate(truth[c])[None]
            grids = [row.reshape(1, *case.shape) if spatial else case.on_grid(row) for row in rows]
            matched = match_components(grids[0][0], grids[1][0], rules, least_voxels=least)
            lesions += _rows(files.name, name, matched, voxel_mm3, case.grid)
    return CaseLesions(lesions, chosen, voxel_mm3)


def chosen_classes(names: Sequence[str], wanted: Sequence[str]) -> tuple[str, ...]:
    """The wanted classes, which must be among the names; all, where none is named."""
    for name in wanted:
        if name not in names:
            raise ConfigError(f"--class must be one of {', '.join(names)}; got {name!r}.")
    return tuple(wanted) or tuple(names)


def _exclusive(channels: int, options: Options) -> bool:
    """Whether probabilities of classes sum to 1; those of regions are checked where they are added up."""
    return channels > 1 and not options.sigmoid and options.regions is None


def checked(probabilities: Array, *, exclusive: bool) -> Array:
    """The same; RangeError where they are none, or do not sum to 1 though classes exclude each other."""
    with np.errstate(invalid="ignore"):
        inside = (probabilities >= -_NEAR) & (probabilities <= 1 + _NEAR)
    if not inside.all():
        raise not_probabilities(probabilities)
    if exclusive:
        total = probabilities.sum(0)
        off = np.abs(total - 1)
        if (off > SUM_TOLERANCE).any():
            raise RangeError(
                f"the probabilities of a voxel must sum to 1; one has {total[off.argmax()]:.4g}. "
                f"For logits use --logits, for classes that overlap --sigmoid."
            )
    return probabilities


def _spread(labels: Array, counted: Array | slice, voxels: int) -> Array:
    """Labels of the voxels that count at their places among all; 0 elsewhere."""
    if isinstance(counted, slice):
        return labels.astype(np.uint8)
    whole = np.zeros(voxels, np.uint8)
    whole[counted] = labels
    return whole


def _rows(case: str, name: str, matched: Matched, voxel_mm3: float, grid: Grid) -> list[Lesion]:
    """The predicted lesions of a class, then the true ones."""
    places, real_places = matched.pairs
    partners = np.bincount(places, minlength=len(matched.confidence))
    finders = np.bincount(real_places, minlength=len(matched.true.voxels))
    best = np.full(len(finders), -1.0)
    np.maximum.at(best, real_places, matched.confidence[places])
    rows = []
    for kind, components, confidences, numbers in (
        ("predicted", matched.predicted, matched.confidence, partners),
        ("true", matched.true, best, finders),
    ):
        for voxels, center, confidence, number in zip(*components, confidences, numbers, strict=True):
            rows.append(
                Lesion(
                    case, name, kind, int(voxels),
                    None if math.isnan(voxel_mm3) else float(voxels * voxel_mm3),
                    None if confidence < 0 else float(confidence),
                    bool(number), int(number), *map(float, center), *_in_mm(center, grid),
                )
            )  # fmt: skip
    return rows


def _in_mm(center: Array, grid: Grid) -> list[float | None]:
    if grid.affine is None:
        return [None, None, None]
    return [float(x) for x in grid.affine[:3, :3] @ center + grid.affine[:3, 3]]
