"""A study from start to report: its runs done here, by a pool of processes, or by an executor elsewhere."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import closing
from pathlib import Path

import torch

from segcal._io.files import make_folder
from segcal._io.jobs import Executor, Pool
from segcal.errors import FileError
from segcal.study.figures import write_figures
from segcal.study.page import build_page
from segcal.study.plan import PlannedRun, Study, make_plan, read_study
from segcal.study.summary import Results, collect, write_tables
from segcal.study.work import POLL_S, RunResult, Workshop, do_run, do_run_apart, record_failure

STUDY, REPORT = "study.toml", "report.html"


def open_study(study: Study, out: str | os.PathLike[str], *, data: Iterable[str] = ()) -> Workshop:
    """The study's folder with its plan; its file is written there whole, as workers read it.

    Some of its data may be missing, but not all.
    """
    out = Path(out)
    make_folder(out)
    shop = _planned(study, out, data)
    shop.plan.file.save(out / STUDY)
    return shop


def load_study(folder: str | os.PathLike[str]) -> Workshop:
    """A study that `open_study` has put in this folder, as it is there."""
    folder = Path(folder)
    if not (folder / STUDY).is_file():
        raise FileError(f"{folder} must be the folder of a study; it has no {STUDY}. Start it with `segcal study run`.")
    return _planned(read_study(folder / STUDY), folder, ())


def _planned(study: Study, out: Path, data: Iterable[str]) -> Workshop:
    plan = make_plan(study, out, data=tuple(data))
    if len(plan.missing) == len(plan.study.config.datasets):
        raise FileError(f"the study must find its data; {' '.join(plan.missing.values())}")
    return Workshop(plan, out)


def run_study(
    study: Study,
    out: str | os.PathLike[str],
    *,
    data: Iterable[str] = (),
    jobs: int = 1,
    executor: Executor | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> Results:
    """Do all runs of a study that are not done, then compare, draw and report; repeated, it resumes.

    With several `jobs`, so many processes share the runs (and the cores, or the GPUs). An `executor` does them
    elsewhere, as `segcal.adapters.dask.DaskCluster`. What failed or is missing is in the results' remarks.
    """
    shop = open_study(study, out, data=data)
    do_runs(shop, jobs=jobs, executor=executor, say=say)
    return report_study(shop)


def do_runs(
    shop: Workshop,
    *,
    only: Iterable[str] | None = None,
    jobs: int = 1,
    executor: Executor | None = None,
    wait: bool = True,
    say: Callable[[str], None] = lambda text: None,
) -> None:
    """Do all runs that are not done, or `only` these; each that fails is told, and stops no other.

    Runs that other processes work on are waited for, and taken over if these end early; unless `wait` is False. Before
    an ensemble come its members, which are always waited for.
    """
    runs = shop.plan.runs
    asked = [run for run in (runs if only is None else only) if runs[run].opened is not None]
    ensembles = [run for run in map(runs.__getitem__, asked) if run.members and not shop.is_done(run)]
    needed = (member.name for run in ensembles for member in run.members)
    first = [runs[name] for name in dict.fromkeys((*asked, *needed)) if not runs[name].members]
    _do_all(shop, [run for run in first if not shop.is_done(run)], jobs, executor, wait or bool(ensembles), say)
    for run in ensembles:
        if fault := shop.member_fault(run):
            say(record_failure(run, shop.runs / run.name, "SegcalError", fault).message)
    _do_all(shop, [run for run in ensembles if not shop.member_fault(run)], jobs, executor, wait, say)


def _do_all(
    shop: Workshop,
    waiting: list[PlannedRun],
    jobs: int,
    executor: Executor | None,
    wait: bool,
    say: Callable[[str], None],
) -> None:
    """Do these runs, in any order."""
    told: set[str] = set()
    while waiting:
        left = []
        with closing(_given(shop, waiting, jobs, executor)) as results:
            for i, came in results:
                result = came if isinstance(came, RunResult) else _crashed(shop, waiting[i], came)
                if result.status == "left":
                    left.append(waiting[i])
                if result.message not in told:
                    say(result.message)
                told.add(result.message)
        if not wait:
            return
        while left and all(shop.is_held(run) for run in left):
            time.sleep(POLL_S)
        waiting = left


def _given(
    shop: Workshop, runs: Sequence[PlannedRun], jobs: int, executor: Executor | None
) -> Generator[tuple[int, RunResult | BaseException], None, None]:
    """The runs given to an executor: their places and results, as they come."""
    asked = [(run.without_data(), shop.out.absolute()) for run in runs]
    if executor is not None:
        return executor(do_run_apart, asked)
    return Pool(jobs, environments=_gpus())(do_run, asked)


def _gpus() -> list[dict[str, str]]:
    """The variables that give a process one of the GPUs, for each of them."""
    given = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(torch.cuda.device_count()))))
    return [{"CUDA_VISIBLE_DEVICES": name} for name in given.split(",") if name]


def _crashed(shop: Workshop, run: PlannedRun, error: BaseException) -> RunResult:
    """The failure of a run that took its process along, again and again."""
    why = f"the processes that did this run died; it may need more memory than there is ({type(error).__name__})."
    return record_failure(run, shop.runs / run.name, "CrashError", why)


def report_study(shop: Workshop) -> Results:
    """Compare what is there, and write tables, figures and the page, in the place of those of the last time."""
    results = collect(shop)
    (shop.out / REPORT).unlink(missing_ok=True)  # of the tables and figures that are replaced now
    write_tables(results, shop.out / "results")
    build_page(results, write_figures(results, shop, shop.out), shop.out / REPORT)
    return results
