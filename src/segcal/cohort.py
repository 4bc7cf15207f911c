"""Evaluate a folder of predictions against a folder of labels: one case at a time, in bounded memory, resumable.

Each case's sums are written to a file of their own as soon as they are there. Started again, cases whose files
and options have not changed are not read again; the results are the same as those of one undisturbed run.
Workers are processes of their own that do without torch.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import asdict, replace
from importlib import import_module
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING

import segcal
from segcal.errors import ConfigError, SegcalError
from segcal.files import WriteError
from segcal.measure import CaseSums, Options, measure_case, stamp, unchanged
from segcal.regions import read_class_names, read_ignored, read_regions
from segcal.results import Failure, Outcome, Spread, crashed, keep_only, open_parts, stack_cases, write_results
from segcal.volumes import CaseFiles, Pairing, pair_cases

if TYPE_CHECKING:
    from segcal.evaluation import Evaluation


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
    workers: int = 1,
    spread: Spread | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Outcome:
    """Evaluate every case that both folders have, and write the results to `out`.

    Writes cases.csv, summary.csv, summary.json, evaluation.npz (with .json) and failures.csv. A case that
    cannot be read or makes no sense is a failure with a sentence; it does not stop the others. A `calibrator` is a
    file of one: predictions are measured as it makes them, and no map is stored. Voxels labelled `ignore` are left out,
    if not given those of the label that nnU-Net's dataset.json names so.
    Cases are measured by so many `workers`, or by what does them elsewhere, as `segcal.adapters.dask.DaskCluster`.
    """
    if workers < 1:
        raise ConfigError(f"workers must be at least 1; got {workers}.")
    out = Path(out)
    options, pairing = open_cohort(
        predictions, labels, bins=bins, regions=regions, classes=classes, background=background, logits=logits,
        sigmoid=sigmoid, ignore=ignore, calibrator=calibrator,
    )  # fmt: skip
    with open_parts(out) as parts:
        done, failures = _run(pairing.cases, options, parts, workers, spread, progress)
        evaluation, strangers = _assemble(pairing.cases, done, options)
        outcome = Outcome(evaluation, sorted(failures + strangers), pairing)
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
) -> tuple[Options, Pairing]:
    """How two folders are to be read, and which of their files belong together: at least one case.

    A label that nnU-Net's dataset.json names "ignore" is left out without being asked for.
    """
    predictions, labels = Path(predictions), Path(labels)
    described = _find_dataset_json(predictions, labels) if classes is None else classes
    names = None if described is None else read_class_names(described)
    for source in (described, regions):
        if ignore is None and source is not None and source.endswith((".json", ".toml")):
            ignore = read_ignored(source)
    options = Options(
        bins=bins,
        background=background,
        logits=logits,
        sigmoid=sigmoid,
        regions=None if regions is None else read_regions(regions),
        class_names=None if names is None else tuple(sorted(names.items())),
        ignore=ignore,
    )
    if calibrator is not None:
        from segcal.calibrated import check_fits
        from segcal.scaling import load_calibrator

        path = os.path.abspath(calibrator)
        fitted = load_calibrator(path)
        check_fits(fitted, options)
        options = replace(options, calibrator=path, calibrator_fingerprint=fitted.fingerprint)
    pairing = pair_cases(predictions, labels)
    if not pairing.cases:
        raise ConfigError(
            f"predictions and labels must share case names; {predictions} has {len(pairing.unpaired_predictions)} "
            f"predictions and {labels} {len(pairing.unpaired_labels)} labels, and none of them match."
        )
    return options, pairing


def _find_dataset_json(predictions: Path, labels: Path) -> str | None:
    """The dataset.json in either folder, or beside the labels."""
    paths = (folder / "dataset.json" for folder in (predictions, labels, labels.parent))
    return next((str(path) for path in paths if path.is_file()), None)


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
    for files, path, failure in results:
        if failure is None:
            done[files.name] = path
        else:
            failures.append(failure)
        progress(len(done) + len(failures), len(cases))
    return done, failures


def _results(
    waiting: list[tuple[CaseFiles, Path]], options: Options, workers: int
) -> Iterator[tuple[CaseFiles, Path, Failure | None]]:
    if workers == 1 or len(waiting) < 2:
        for files, path in waiting:
            yield files, path, _measure_to(files, options, path)
        return
    again = []
    with _pool(min(workers, len(waiting))) as pool:
        futures: dict[Future[Failure | None], tuple[CaseFiles, Path]] = {
            pool.submit(_measure_to, files, options, path): (files, path) for files, path in waiting
        }
        _import_whole("segcal.evaluation")  # brings torch, which takes seconds: the workers read meanwhile

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
) -> Iterator[tuple[CaseFiles, Path, Failure | None]]:
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


def _import_whole(name: str) -> None:
    """Import a module; Ctrl-C waits until it is there, since torch cut short takes the process along with it."""
    if threading.current_thread() is not threading.main_thread():
        import_module(name)
        return
    came: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: came.append(number))
    try:
        import_module(name)
    finally:
        signal.signal(signal.SIGINT, before)
    if came:
        raise KeyboardInterrupt


_threads = os.cpu_count() or 1  # of this process; workers share the cores


@contextmanager
def _pool(workers: int) -> Iterator[ProcessPoolExecutor]:
    threads = max(1, (os.cpu_count() or 1) // workers)
    pool = ProcessPoolExecutor(workers, get_context("spawn"), initializer=_start_worker, initargs=(threads,))
    try:
        yield pool
    finally:
        pool.shutdown(wait=True, cancel_futures=True)  # not left to the end of the process, where Ctrl-C would tear it


def _start_worker(threads: int) -> None:
    global _threads
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    _threads = threads
    os.environ["OMP_NUM_THREADS"] = str(threads)  # of torch, which a calibrator brings


def _measure_to(files: CaseFiles, options: Options, path: Path, *, threads: int | None = None) -> Failure | None:
    sources = (*files.predictions, files.label)
    try:
        with unchanged(sources):
            sums = measure_case(files, options, threads=threads or _threads)
        sums.save(path, files.name, sources)
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
