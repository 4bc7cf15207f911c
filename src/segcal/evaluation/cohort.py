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
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing, contextmanager
from dataclasses import asdict, replace
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING

import segcal
from segcal._io.ending import import_whole, start_worker
from segcal._io.files import WriteError, stay_outside
from segcal.errors import ConfigError, SegcalError
from segcal.evaluation.measure import CaseSums, Options, measure_case, stamp, unchanged
from segcal.evaluation.naming import check_names, read_naming
from segcal.evaluation.results import (
    Failure,
    Outcome,
    Spread,
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
    """Evaluate every case that both folders have, write the results to `out`, and return them.

    Writes cases.csv, summary.csv, summary.json, evaluation.npz (with .json) and failures.csv, in the place of those
    that are there; where no case could be measured, failures.csv alone. Cases that were measured before, with the same
    options, are not read again. A case that cannot be read or makes no sense is a failure with a sentence; it does not
    stop the others. Raises ConfigError for options that cannot be used, and where no case is in both folders.

    predictions: folder of probability maps or logits, one case a file (or one file for each class of it).
    labels: folder of label maps with the same names.
    out: folder for the results.
    bins: bins of the errors that are reported.
    regions: unions of classes to evaluate: "brats", "kits", a .toml file, or nnU-Net's dataset.json.
    classes: names of the classes, separated by commas, or a dataset.json that has them.
    background: whether the tables have the background, too.
    logits: whether the predictions are logits.
    sigmoid: whether classes overlap, each with a probability of its own.
    ignore: label of voxels to leave out; if not given, that which nnU-Net's dataset.json names so.
    calibrator: file of a calibrator. Predictions are measured as it makes them; no map is stored.
    strict_grid: makes failures of cases whose headers leave open where their voxels lie; otherwise a note tells them.
    workers: processes that measure cases.
    spread: does the work elsewhere, as `segcal.adapters.dask.DaskCluster`.
    progress: is called with the number of cases done and of all.

    >>> import tempfile
    >>> import nibabel, numpy as np
    >>> arrays = {"predictions": np.full((4, 4, 4, 2), 0.5, np.float32), "labels": np.zeros((4, 4, 4), np.uint8)}
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     for name, array in arrays.items():
    ...         Path(folder, name).mkdir()
    ...         nibabel.save(nibabel.Nifti1Image(array, np.eye(4)), f"{folder}/{name}/case_0.nii.gz")
    ...     outcome = evaluate(f"{folder}/predictions", f"{folder}/labels", f"{folder}/out")
    >>> outcome.evaluation.cases, outcome.failures
    (('case_0',), [])
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
    results = _results(waiting, options, workers) if spread is None else _spread(waiting, options, spread)
    with closing(results):
        for files, path, failure in results:
            if failure is None:
                done[files.name] = path
            else:
                failures.append(failure)
            progress(len(done) + len(failures), len(cases))
    return done, failures


def _results(
    waiting: list[tuple[CaseFiles, Path]], options: Options, workers: int
) -> Generator[tuple[CaseFiles, Path, Failure | None], None, None]:
    if workers == 1 or len(waiting) < 2:
        for files, path in waiting:
            yield files, path, _measure_to(files, options, path)
        return
    again = []
    with _pool(min(workers, len(waiting))) as pool:
        futures: dict[Future[Failure | None], tuple[CaseFiles, Path]] = {
            pool.submit(_measure_to, files, options, path): (files, path) for files, path in waiting
        }
        import_whole("segcal.evaluation.evaluation")  # brings torch, which takes seconds: the workers read meanwhile

        for future in as_completed(futures):
            try:
                yield *futures[future], future.result()
            except BrokenProcessPool:
                again.append(futures[future])
    for files, path in again:  # a worker died: each case left gets a process of its own, to find the culprit
        with _pool(1) as pool:
            try:
                yield files, path, pool.submit(_measure_to, files, options, path).result()
            except BrokenProcessPool:
                yield files, path, crashed(files.name)


def _spread(
    waiting: list[tuple[CaseFiles, Path]], options: Options, spread: Spread
) -> Generator[tuple[CaseFiles, Path, Failure | None], None, None]:
    """Elsewhere, where another folder may be the current one."""

    def whole(files: CaseFiles) -> CaseFiles:
        predictions = tuple(path.absolute() for path in files.predictions)
        return replace(files, predictions=predictions, label=files.label.absolute())

    jobs = [(whole(files), options, path.absolute()) for files, path in waiting]
    for i, came in spread(_measure_alone, jobs):
        yield *waiting[i], crashed(waiting[i][0].name) if isinstance(came, BaseException) else came


def _measure_alone(files: CaseFiles, options: Options, path: Path) -> Failure | None:
    """On one thread: a worker elsewhere may do several at a time."""
    return _measure_to(files, options, path, threads=1)


_threads = os.cpu_count() or 1  # of this process; workers share the cores


@contextmanager
def _pool(workers: int) -> Iterator[ProcessPoolExecutor]:
    threads = max(1, (os.cpu_count() or 1) // workers)
    pool = ProcessPoolExecutor(workers, get_context("spawn"), initializer=_start_worker, initargs=(threads,))
    try:
        yield pool
    except BaseException:
        for worker in list((pool._processes or {}).values()):  # files are written whole: nothing is torn
            worker.terminate()
        raise
    finally:
        pool.shutdown(wait=True, cancel_futures=True)  # not left to the end of the process, where Ctrl-C would tear it


def _start_worker(threads: int) -> None:
    global _threads
    start_worker()
    _threads = threads
    os.environ["OMP_NUM_THREADS"] = str(threads)  # of torch, which a calibrator brings


def _measure_to(files: CaseFiles, options: Options, path: Path, *, threads: int | None = None) -> Failure | None:
    sources = (*files.predictions, files.label)
    try:
        with unchanged(sources):
            sums, doubts = measure_case(files, options, threads=threads or _threads)
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
