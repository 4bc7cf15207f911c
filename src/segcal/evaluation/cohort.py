"""Evaluate a folder of predictions against a folder of labels: one case at a time, in bounded memory, resumable.

Each case's sums are written to a file of their own as soon as they are there. Started again, cases whose files
and options have not changed are not read again; the results are the same as those of one undisturbed run.
Workers are processes of their own that do without torch.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

import segcal
from segcal._io.ending import import_whole
from segcal._io.files import WriteError, stay_outside
from segcal._io.pool import LocalPool, Spread, own_threads
from segcal.errors import ConfigError, SegcalError
from segcal.evaluation.measure import CaseSums, Options, measure_case, stamp, unchanged
from segcal.evaluation.naming import check_names, read_naming
from segcal.evaluation.results import (
    Failure,
    Outcome,
    crashed,
    gather_notes,
    keep_only,
    open_parts,
    outcome_of,
    stack_cases,
    write_results,
)
from segcal.volumes import CaseFiles, Pairing, pair_cases
from segcal.volumes.mismatch import why_nothing_pairs

if TYPE_CHECKING:
    from segcal.evaluation.evaluation import Evaluation


def evaluate(
    predictions: str | os.PathLike[str],
    labels: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    bins: int = 20,
    regions: str | None = None,
    classes: str | None = None,
    background: bool = False,
    logits: bool = False,
    sigmoid: bool = False,
    ignore: int | None = None,
    calibrator: str | os.PathLike[str] | None = None,
    strict_grid: bool = False,
    workers: int = 1,
    spread: Spread | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Outcome:
    """Evaluate every case that both folders have, and write the results to `out`.

    Writes cases.csv, summary.csv, summary.json, evaluation.npz (with .json) and failures.csv, in the place of those
    that are there; where no case could be measured, failures.csv alone. A case that cannot be read or makes no sense
    is a failure with a sentence; it does not stop the others. A `calibrator` is a file of one: predictions are
    measured as it makes them, and no map is stored. Voxels labelled `ignore` are left out, if not given those of the
    label that nnU-Net's dataset.json names so.
    `strict_grid` makes failures of cases whose headers leave open where their voxels lie; otherwise a note tells them.
    Cases are measured by so many `workers`, or by what does them elsewhere, as `segcal.adapters.dask.DaskCluster`.
    """
    if workers < 1:
        raise ConfigError(f"workers must be at least 1; got {workers}.")
    out = Path(out)
    for source, what in ((predictions, "predictions"), (labels, "labels")):
        stay_outside(out, Path(source), what)
    options, pairing = open_cohort(
        predictions, labels, bins=bins, regions=regions, classes=classes, background=background, logits=logits,
        sigmoid=sigmoid, ignore=ignore, calibrator=calibrator, strict_grid=strict_grid,
    )  # fmt: skip
    with open_parts(out) as parts:
        done, failures = _run(pairing.cases, options, parts, workers, spread, progress)
        evaluation, strangers = _assemble(pairing.cases, done, options)
        measured = () if evaluation is None else evaluation.cases
        notes = gather_notes({name: CaseSums.doubts_in(done[name]) for name in measured})
        outcome = outcome_of(evaluation, failures + strangers, pairing, notes)
        write_results(outcome, options, out)
        keep_only(parts, done.values())
    return outcome


def open_cohort(
    predictions: str | os.PathLike[str],
    labels: str | os.PathLike[str],
    *,
    bins: int = 20,
    regions: str | None = None,
    classes: str | None = None,
    background: bool = False,
    logits: bool = False,
    sigmoid: bool = False,
    ignore: int | None = None,
    calibrator: str | os.PathLike[str] | None = None,
    strict_grid: bool = False,
) -> tuple[Options, Pairing]:
    """How two folders are to be read, and which of their files belong together: at least one case.

    A label that nnU-Net's dataset.json names "ignore" is left out without being asked for.
    """
    predictions, labels = Path(predictions), Path(labels)
    naming = read_naming(predictions, labels, classes, regions, sigmoid=sigmoid)
    options = naming.into(
        Options(
            bins=bins, background=background, logits=logits, sigmoid=sigmoid, ignore=ignore, strict_grid=strict_grid
        )
    )
    if calibrator is not None:
        from segcal.calibrators import load_calibrator
        from segcal.evaluation.calibrated import check_fits

        path = os.path.abspath(calibrator)
        fitted = load_calibrator(path)
        check_fits(fitted, options)
        options = replace(options, calibrator=path, calibrator_fingerprint=fitted.fingerprint)
    pairing = pair_cases(predictions, labels)
    if not pairing.cases:
        raise ConfigError(why_nothing_pairs(predictions, labels, pairing))
    check_names(naming, pairing.cases, options)
    return options, pairing


def _run(
    cases: Sequence[CaseFiles],
    options: Options,
    parts: Path,
    workers: int,
    spread: Spread | None,
    progress: Callable[[int, int], None],
) -> tuple[dict[str, Path], list[Failure]]:
    """Evaluate what is not there yet; the file of each case that worked, and the failures."""
    done: dict[str, Path] = {}
    failures: list[Failure] = []
    waiting: list[tuple[CaseFiles, Path]] = []
    for files in cases:
        path = parts / f"{_key(files, options)}.npz"
        if CaseSums.are_in(path, options):
            done[files.name] = path
        else:
            waiting.append((files, path))
    with closing(_results(waiting, options, workers, spread)) as results:
        for files, path, failure in results:
            if failure is None:
                done[files.name] = path
            else:
                failures.append(failure)
            progress(len(done) + len(failures), len(cases))
    return done, failures


def _results(
    waiting: list[tuple[CaseFiles, Path]], options: Options, workers: int, spread: Spread | None
) -> Generator[tuple[CaseFiles, Path, Failure | None], None, None]:
    """Each case with its failure, if it failed; `spread` does them where another folder may be the current one."""

    def whole(files: CaseFiles) -> CaseFiles:
        predictions = tuple(path.absolute() for path in files.predictions)
        return replace(files, predictions=predictions, label=files.label.absolute())

    if spread is None:  # the evaluation brings torch, which takes seconds: the workers read meanwhile
        pool = LocalPool(workers, meanwhile=lambda: import_whole("segcal.evaluation.evaluation"))
        results = pool(_measure_to, [(files, options, path) for files, path in waiting])
    else:
        jobs = [(whole(files), options, path.absolute()) for files, path in waiting]
        results = spread(_measure_alone, jobs)
    with closing(results):
        for i, came in results:
            yield *waiting[i], crashed(waiting[i][0].name) if isinstance(came, BaseException) else came


def _measure_alone(files: CaseFiles, options: Options, path: Path) -> Failure | None:
    """On one thread: a worker elsewhere may do several at a time."""
    return _measure_to(files, options, path, threads=1)


def _measure_to(files: CaseFiles, options: Options, path: Path, *, threads: int | None = None) -> Failure | None:
    sources = (*files.predictions, files.label)
    try:
        with unchanged(sources):
            sums, doubts = measure_case(files, options, threads=threads or own_threads())
        sums.save(path, files.name, sources, doubts=doubts)
    except WriteError:  # it would be the same for every case
        raise
    except SegcalError as error:
        return Failure(files.name, type(error).__name__, str(error))
    except (OSError, MemoryError) as error:
        return Failure(files.name, type(error).__name__, f"reading or measuring this case failed: {error}.")
    return None


def _key(files: CaseFiles, options: Options) -> str:
    """Names the result of a case: another file, or other options, give another key."""
    stamps = [stamp(path) for path in (*files.predictions, files.label)]
    meant = asdict(replace(options, calibrator=None))  # by its fingerprint, wherever it lies
    content = json.dumps([segcal.__version__, files.name, stamps, meant], sort_keys=True)
    return hashlib.sha256(content.encode()).hexdigest()[:32]


def _assemble(
    cases: Sequence[CaseFiles], done: dict[str, Path], options: Options
) -> tuple[Evaluation | None, list[Failure]]:
    """All cases that worked as one evaluation; those with another number of classes than most are failures."""
    numbers = {files.name: CaseSums.classes_in(done[files.name]) for files in cases if files.name in done}
    if not numbers:
        return None, []
    often = Counter(numbers.values())
    usual = min(often, key=lambda n: (-often[n], n))
    strangers = [
        Failure(name, "ShapeError", f"has {number} classes where most cases have {usual}.")
        for name, number in numbers.items()
        if number != usual
    ]
    names = [name for name, number in numbers.items() if number == usual]
    return stack_cases(names, lambda name: CaseSums.load(done[name]), options), strangers
