"""Measure one case: read it slab by slab, through a calibrator if there is one, and add up its sums."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from segcal.errors import GridError, ShapeError
from segcal.evaluation.doubts import HARD_DECISIONS, MEANINGS, Watch
from segcal.evaluation.options import Options, slab_voxels
from segcal.evaluation.sums import CaseSums
from segcal.evaluation.voxels import Slab, measure_voxels, sums_of_case
from segcal.volumes import Case, CaseFiles, Prediction, PredictionFiles, open_case, open_prediction

if TYPE_CHECKING:
    from segcal.calibrators import Calibrator

Array = NDArray[Any]


class Measured(NamedTuple):
    """The sums of a case, and what is doubtful about it (see `segcal.evaluation.doubts`)."""

    sums: CaseSums
    doubts: tuple[str, ...]


def measure_case(
    files: CaseFiles, options: Options, *, threads: int | None = None, calibrator: Calibrator | None = None
) -> Measured:
    """The sums of one case, read slab by slab, through the calibrator given or that of the options."""
    if calibrator is None and options.calibrator is not None:
        from segcal.evaluation.calibrated import loaded

        calibrator = loaded(options.calibrator, options.calibrator_fingerprint)
    with open_case(files) as case:
        doubts = case.grid.doubts
        if options.strict_grid and doubts:
            raise GridError(f"{files.name}: the grid must be certain, as --strict-grid asks; {MEANINGS[doubts[0]]}")
        watch = Watch(logits=options.logits, overlapping=options.sigmoid)
        case.watch = watch.see
        slabs = (
            measure_voxels(values, labels, options, ranked=ranked, threads=threads)
            for values, labels, ranked in _slabs(case, options, calibrator)
        )
        shape = case.shape if calibrator is not None and calibrator.spatial else case.stored_shape
        sums = sums_of_case(slabs, shape, voxel_ml=case.grid.voxel_ml)
    if sums is None or not sums.scores[2].any():
        ignored = (
            "" if options.ignore_index is None else f" whose label is not {options.ignore_index}, which is ignored"
        )
        raise ShapeError(f"the volume must have voxels{ignored}; it has none.")
    return Measured(sums, (*doubts, HARD_DECISIONS) if watch.hard else doubts)


def measure_prediction(files: PredictionFiles, options: Options, *, classes: int | None, threads: int) -> Measured:
    """The sums of one case without labels: those that need labels are 0.

    classes: how many channels it must have; None: any number.
    """
    prediction = open_prediction(files, classes=classes)
    watch = Watch(logits=options.logits, overlapping=options.sigmoid)
    shape: list[int] = []

    def slabs() -> Iterator[Slab]:
        for values, ranked in _values(prediction, options):
            shape[:] = [sum(shape[:1]) + values.shape[1], *values.shape[2:]]
            flat = values.reshape(len(values), -1)
            before = flat if ranked is None else ranked.reshape(len(values), -1)
            watch.see(before)
            yield measure_voxels(flat, None, options, ranked=before, threads=threads)

    sums = sums_of_case(slabs(), shape, voxel_ml=prediction.grid.voxel_ml)
    if sums is None:
        raise ShapeError("the volume must have voxels; it has none.")
    return Measured(sums, (HARD_DECISIONS,) if watch.hard else ())


def _values(prediction: Prediction, options: Options) -> Iterator[tuple[Array, Array | None]]:
    """Values (class, ...), calibrated if they are to be, and what decisions are taken on, if it is something else."""
    if options.calibrator is None:
        yield from ((values, None) for values in prediction.slabs(slab_voxels(prediction.classes)))
        return
    from segcal.evaluation.calibrated import calibrated, loaded
    from segcal.volumes.orientation import orientation_of

    calibrator = loaded(options.calibrator, options.calibrator_fingerprint)
    orientation = orientation_of(prediction.grid.affine)
    for values in [prediction.read()] if calibrator.spatial else prediction.slabs(slab_voxels(prediction.classes)):
        made = calibrated(calibrator, np.ascontiguousarray(values), options, orientation)
        yield made, values if calibrator.keeps_decisions else None


def _slabs(case: Case, options: Options, calibrator: Calibrator | None) -> Iterator[tuple[Array, Array, Array | None]]:
    """Values, labels, and what decisions are taken on where that is something else than the values."""
    if calibrator is not None:
        from segcal.evaluation.calibrated import calibrated_slabs

        yield from calibrated_slabs(case, options, calibrator)
        return
    for values, labels in case.slabs(slab_voxels(case.classes)):
        yield values, labels, None
