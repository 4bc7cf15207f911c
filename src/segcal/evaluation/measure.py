"""Measure one case: read it slab by slab, through a calibrator if there is one, and add up its sums."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from segcal.errors import ConfigError, GridError
from segcal.evaluation.bands import measure_bands
from segcal.evaluation.doubts import HARD_DECISIONS, MEANINGS, Watch
from segcal.evaluation.options import Options, slab_voxels
from segcal.evaluation.rated import RaterSums, Votes
from segcal.evaluation.sums import CaseSums
from segcal.evaluation.voxels import Slab, check_voxels, measure_voxels, sums_of_case
from segcal.volumes import Case, CaseFiles, open_case

if TYPE_CHECKING:
    from segcal.calibrators import Calibrator

Array = NDArray[Any]
COPIED_VOXELS = 1 << 20
"""Read at a time from maps in integers, and from files that are mapped: what is in hand of them is a copy."""


class Measured(NamedTuple):
    """The sums of a case, and what is doubtful about it (see `segcal.evaluation.doubts`).

    facets: further sums of the same case by the names of their results, as "raters/anna".
    votes: how its raters voted; None where there are none.
    """

    sums: CaseSums
    doubts: tuple[str, ...]
    facets: Mapping[str, CaseSums] = MappingProxyType({})
    votes: Votes | None = None


def measure_case(
    files: CaseFiles, options: Options, *, threads: int | None = None, calibrator: Calibrator | None = None
) -> Measured:
    """The sums of one case, read slab by slab, through the calibrator given or that of the options."""
    calibrator = calibrator or calibrator_of(options)
    with open_case(files, ignored=options.ignore_index) as case:
        doubts = case.grid.doubts
        if options.strict_grid and doubts:
            raise GridError(f"{files.name}: the grid must be certain, as --strict-grid asks; {MEANINGS[doubts[0]]}")
        if options.bands and case.grid.spacing_mm is None:
            raise ConfigError(f"{files.name}: bands need files with a voxel size. Use NIfTI files.")
        stored_logits = files.averaging.logits if files.members else options.logits
        watch = Watch(logits=stored_logits, overlapping=options.sigmoid)
        case.watch = watch.see
        raters = RaterSums(case.raters, options, threads=threads) if case.raters else None
        spatial = calibrator is not None and calibrator.spatial
        decided: list[Array] = []  # bands need the decisions on the whole case

        def measured() -> Iterator[Slab]:
            for values, labels, ranked in _slabs(case, options, calibrator):
                if raters is not None:
                    yield raters.slab(values, labels, ranked)
                    continue
                slab = measure_voxels(values, labels, options, ranked=ranked, threads=threads)
                if options.bands:
                    decided.append(slab.decided)
                yield slab

        shape = case.shape if spatial else case.stored_shape
        sums = sums_of_case(measured(), shape, voxel_ml=case.grid.voxel_ml)
        bands: dict[str, CaseSums] = {}
        if sums is not None and options.bands:
            again = ((values, labels) for values, labels, _ in _slabs(case, options, calibrator))
            classes = np.concatenate(decided, -1)
            bands = measure_bands(case, again, classes, options, sums, spatial=spatial, threads=threads)
    sums = check_voxels(sums, options)
    doubts = (*doubts, HARD_DECISIONS) if watch.hard else doubts
    if raters is None:
        return Measured(sums, doubts, bands)
    mean, each, votes = raters.of_case(sums)
    return Measured(mean, doubts, {f"raters/{rater}": own for rater, own in each.items()}, votes)


def calibrator_of(options: Options) -> Calibrator | None:
    """The calibrator of the options, if they have one; torch, which it brings, takes seconds."""
    if options.calibrator is None:
        return None
    from segcal.evaluation.calibrated import loaded

    return loaded(options.calibrator, options.calibrator_fingerprint)


def open_slabs(case: Case, options: Options) -> tuple[Iterator[tuple[Array, Array, Array | None]], bool]:
    """What is measured of a case, slab by slab; and whether it comes along the axes of the grid, in place of as stored.

    Values (class, voxel) are as the calibrator of the options makes them; then labels, and what decisions are taken on.
    """
    calibrator = calibrator_of(options)
    return _slabs(case, options, calibrator), calibrator is not None and calibrator.spatial


def _slabs(case: Case, options: Options, calibrator: Calibrator | None) -> Iterator[tuple[Array, Array, Array | None]]:
    """Values, labels, and what decisions are taken on where that is something else than the values."""
    if calibrator is not None:
        from segcal.evaluation.calibrated import calibrated_slabs

        yield from calibrated_slabs(case, options, calibrator)
        return
    most = slab_voxels(case.classes)
    for values, labels in case.slabs(most if case.plain else min(most, COPIED_VOXELS)):
        yield values, labels, None
