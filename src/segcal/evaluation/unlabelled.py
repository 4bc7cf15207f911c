"""One case without labels: its values, read slab by slab, through a calibrator if there is one; and its sums."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from numpy.typing import NDArray

from segcal._io.jobs import unchanged
from segcal.errors import ShapeError
from segcal.evaluation.doubts import HARD_DECISIONS, Watch
from segcal.evaluation.measure import Measured, calibrator_of
from segcal.evaluation.options import Options, slab_voxels
from segcal.evaluation.voxels import measure_voxels, sums_of_case
from segcal.volumes import Prediction, PredictionFiles, open_prediction

if TYPE_CHECKING:
    from segcal.calibrators import Calibrator

Array = NDArray[Any]


def open_maps(files: PredictionFiles, options: Options) -> Prediction:
    """The prediction of these files; of arrays, what is known of the channels helps to find their axis."""
    fitted = calibrator_of(options)
    if fitted is not None and fitted.classes is not None:
        return open_prediction(files, classes=fitted.classes)
    regions = options.regions
    told = None if regions is None else regions.members if options.sigmoid else regions.values
    known = told or options.values or options.class_names
    if known:
        try:
            return open_prediction(files, classes=len(known))
        except ShapeError:
            pass  # a single channel, or one without the background; else whoever measures it says what is wrong
    return open_prediction(files)


def measure_prediction(files: PredictionFiles, options: Options, *, threads: int) -> Measured:
    """The sums of one case without labels: those that need labels are 0."""
    prediction = open_maps(files, options)
    watch = Watch(logits=options.logits, overlapping=options.sigmoid)
    with prediction.held():
        values = Values(prediction, options)
        slabs = (
            measure_voxels(slab, None, options, ranked=ranked, threads=threads) for slab, ranked in values.slabs(watch)
        )
        sums = sums_of_case(slabs, values.shape, voxel_ml=prediction.grid.voxel_ml)
    if sums is None:
        raise ShapeError("the volume must have voxels; it has none. Check the file.")
    return Measured(sums, (HARD_DECISIONS,) if watch.hard else ())


def measure_to(files: PredictionFiles, options: Options, threads: int, name: str, path: Path) -> None:
    """Write the sums of one case to a file of their own."""
    with unchanged(files.all):
        measured = measure_prediction(files, options, threads=threads)
    measured.sums.save(path, name, files.predictions, doubts=measured.doubts)


class Values:
    """The values of a prediction, through a calibrator if there is one, as often as they are asked for.

    A calibrator that looks at neighbors makes them all at once, and they are kept.
    """

    def __init__(self, prediction: Prediction, options: Options) -> None:
        self.prediction, self.options = prediction, options
        self.calibrator = calibrator_of(options)
        self._whole: tuple[Array, Array | None] | None = None

    def slabs(self, watch: Watch | None = None) -> Iterator[tuple[Array, Array | None]]:
        """(class, voxel) values, and what decisions are taken on where that is something else."""
        if self._whole is not None:
            yield self._whole
            return
        for values in self._stored():
            if watch is not None:
                watch.see(values)
            if self.calibrator is None:
                yield values, None
                continue
            new = self._through(self.calibrator, values)
            if self.calibrator.spatial:
                self._whole = new
            yield new

    @property
    def shape(self) -> tuple[int, ...]:
        """The lengths of the axes in the order in which slabs go through them, the last one fastest."""
        at_once = self.calibrator is not None and self.calibrator.spatial
        return self.prediction.shape if at_once else self.prediction.stored_shape

    def _stored(self) -> Iterator[Array]:
        if self.calibrator is not None and self.calibrator.spatial:
            whole = self.prediction.read()
            yield whole.reshape(len(whole), -1)
            return
        yield from self.prediction.slabs(slab_voxels(self.prediction.classes))

    def _through(self, calibrator: Calibrator, values: Array) -> tuple[Array, Array | None]:
        from segcal.evaluation.calibrated import through
        from segcal.volumes.orientation import orientation_of

        orientation = orientation_of(self.prediction.grid.affine)
        return through(calibrator, values, self.options, self.prediction.shape, orientation)

    def on_grid(self, rows: Array) -> Array:
        """(channel, voxel) rows of what `slabs` gave, as (channel, x, y, z)."""
        return rows.reshape(-1, *self.prediction.shape) if self._whole else self.prediction.on_grid(rows)
