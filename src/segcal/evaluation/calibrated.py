"""Predictions on disk as the logits that calibrators take, and through a calibrator back to what they were."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from segcal.calibrators import Calibrator, load_calibrator
from segcal.calibrators.calibrator import Activation, keep_decisions
from segcal.errors import ConfigError, FileError, ShapeError
from segcal.evaluation.options import Options, slab_voxels
from segcal.evaluation.voxels import counted_voxels, places_of, region_labels, replace_aliases
from segcal.volumes import Case, CaseFiles, open_case
from segcal.volumes.arrays import read_array
from segcal.volumes.averaging import LEAST, not_probabilities
from segcal.volumes.cases import PROBABILITY_KEYS
from segcal.volumes.orientation import AS_IT_IS, orientation_of, turned, way_back

Array = NDArray[Any]


@lru_cache(maxsize=2)
def loaded(path: str, fingerprint: str | None) -> Calibrator:
    """The calibrator of a file, read once in a process; it must be the one of the fingerprint."""
    calibrator = load_calibrator(path)
    if fingerprint != calibrator.fingerprint:
        raise FileError(f"{path} must stay the same while it is used; it has changed since. Run the command again.")
    return calibrator


def activation_of(classes: int, options: Options) -> Activation:
    """A single channel is a foreground by itself."""
    return "sigmoid" if options.sigmoid or classes == 1 else "softmax"


def check_fits(calibrator: Calibrator, options: Options) -> None:
    """Refuse a calibrator that was fitted for other predictions than these options speak of."""
    if options.sigmoid and calibrator.activation != "sigmoid":
        raise ConfigError("the calibrator is for exclusive classes, these predictions overlap; fit one with --sigmoid.")
    if not options.sigmoid and calibrator.activation == "sigmoid" and calibrator.classes != 1:
        raise ConfigError("the calibrator is for classes that overlap; add --sigmoid, or fit one without it.")
    exclusive = calibrator.activation == "softmax"
    if not options.logits and calibrator.inputs == "logits" and exclusive and not calibrator.any_shift:
        raise ConfigError(
            f"the {calibrator.method} calibrator was fitted on logits, which probabilities do not tell in full; give "
            f"logits (--logits), or fit it on probabilities."
        )


def as_logits(values: Array, options: Options) -> Tensor:
    """(class, ...) logits of logits or probabilities; probabilities are clipped and taken by their logarithm."""
    if options.logits:
        return torch.from_numpy(values)
    with np.errstate(invalid="ignore"):
        inside = (values >= -1e-3) & (values <= 1 + 1e-3)
    if not inside.all():
        raise not_probabilities(values)
    overlapping = activation_of(len(values), options) == "sigmoid"
    clipped = torch.from_numpy(np.clip(values, LEAST, 1 - LEAST if overlapping else 1))
    return torch.logit(clipped) if overlapping else clipped.log()


def as_stored(logits: Tensor, options: Options) -> Array:
    """What `as_logits` took: logits, or probabilities in which the largest logit has the largest one, too."""
    if options.logits:
        return logits.numpy()
    if activation_of(len(logits), options) == "sigmoid":
        return logits.sigmoid().numpy()
    return keep_decisions(logits, logits.softmax(0)).numpy()


def calibrated_slabs(
    case: Case, options: Options, calibrator: Calibrator
) -> Iterator[tuple[Array, Array, Array | None]]:
    """Calibrated values, labels, and the values before where the calibrator changes no decision.

    Values are what they were in the file, logits or probabilities. Those of spatial calibrators come at once.
    """
    orientation = orientation_of(case.grid.affine)
    for values, labels in [_whole(case)] if calibrator.spatial else case.slabs(slab_voxels(case.classes)):
        new, ranked = through(calibrator, values, options, case.shape, orientation)
        yield new, labels, ranked


def through(
    calibrator: Calibrator, values: Array, options: Options, shape: Sequence[int], orientation: Array
) -> tuple[Array, Array | None]:
    """Calibrated (class, voxel) values, and those before where the calibrator changes no decision.

    A spatial calibrator needs them all, along the axes of a grid of this shape and orientation.
    """
    logits = as_logits(values, options)
    if calibrator.spatial:
        logits = logits.reshape(-1, *shape)
    result = transform_volume(calibrator, logits, orientation).flatten(1)
    return as_stored(result, options), values if calibrator.keeps_decisions else None


def calibrated(calibrator: Calibrator, values: Array, options: Options, orientation: Array) -> Array:
    """Calibrated values (class, x, y, z) of logits or probabilities."""
    return as_stored(transform_volume(calibrator, as_logits(values, options), orientation), options)


def _whole(case: Case) -> tuple[Array, Array]:
    """Values and labels of all voxels, along the axes of the grid."""
    return case.voxels((slice(None),) * 3)


@dataclass(frozen=True, eq=False)
class FolderCase:
    """A case on disk, as a fit reads it: slab by slab, or whole; without voxels of the ignored label."""

    files: CaseFiles
    options: Options

    def slabs(self) -> Iterator[tuple[Tensor, Tensor]]:
        with open_case(self.files, ignored=self.options.ignore_index) as case:
            for values, labels in case.slabs(slab_voxels(case.classes)):
                yield self._counted(values, labels, counted_voxels(labels, self.options))

    def voxels(self, classes: int) -> int:
        """Of a prediction of so many classes, ignored ones included; headers tell."""
        stored = (read_array(path, keys=PROBABILITY_KEYS, peek=True) for path in self.files.predictions)
        return sum(array.values.size for array in stored) // classes

    def volume(self) -> tuple[Tensor, Tensor]:
        """Logits (class, x, y, z) and labels, with the axes turned to right, front and head.

        Where voxels are left out, no box remains: logits are (class, voxel) then.
        """
        with open_case(self.files, ignored=self.options.ignore_index) as case:
            values, labels = _whole(case)
            shape, orientation = case.shape, orientation_of(case.grid.affine)
        counted = counted_voxels(labels, self.options)
        logits, truth = self._counted(values, labels, counted)
        if not isinstance(counted, slice):
            return logits, truth
        turned = turn(truth.reshape(-1, *shape), orientation)
        return turn(logits.reshape(-1, *shape), orientation), turned if truth.ndim == 2 else turned[0]

    def _counted(self, values: Array, labels: Array, counted: Array | slice) -> tuple[Tensor, Tensor]:
        """Logits and labels of the voxels that count."""
        values, labels = values[:, counted], places_of(labels[..., counted], len(values), self.options)
        return as_logits(values, self.options), self._labels(values, labels)

    def _labels(self, values: Array, labels: Array) -> Tensor:
        """Class indices (voxel), or zeros and ones (class, voxel) where classes overlap."""
        regions = self.options.regions
        if activation_of(len(values), self.options) == "sigmoid":
            if regions is not None and len(regions.members) != len(values):
                raise ConfigError(
                    f"predictions of regions must have a channel for each of {len(regions.members)}; they have "
                    f"{len(values)}."
                )
            return torch.from_numpy(region_labels(labels, values, self.options))
        if labels.ndim != 1:
            raise ShapeError(
                f"labels must be one map of classes to fit a calibrator of exclusive classes; got {len(labels)} "
                f"channels. Use the label maps of the classes."
            )
        if regions is not None and regions.values is not None:
            options = replace(self.options, values=regions.values)
            labels = places_of(replace_aliases(labels, regions), len(values), options)
        return torch.from_numpy(labels)


def turn(values: Tensor, orientation: Array) -> Tensor:
    """(class, x, y, z) with the axes nearest to right, front and head."""
    if np.array_equal(orientation, AS_IT_IS):
        return values
    return torch.from_numpy(np.ascontiguousarray(turned(values.numpy(), orientation)))


def turn_back(values: Tensor, orientation: Array) -> Tensor:
    """What `turn` took."""
    return turn(values, way_back(orientation))


def transform_volume(calibrator: Calibrator, logits: Tensor, orientation: Array) -> Tensor:
    """Calibrated logits of a whole case (class, x, y, z), seen by those that look at neighbors as in the fit."""
    if not calibrator.spatial:
        return calibrator.transform(logits)
    return turn_back(calibrator.transform(turn(logits, orientation)), orientation)
