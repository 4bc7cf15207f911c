"""A study from start to report, in one process or with workers beside it."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch

from segcal._io.files import make_folder
from segcal.errors import FileError
from segcal.study.figures import write_figures
from segcal.study.page import build_page
from segcal.study.plan import Study, make_plan
from segcal.study.summary import Results, collect, write_tables
from segcal.study.work import Workshop

STUDY, LOGS, REPORT = "study.toml", "logs", "report.html"
POLL_S = 1.0


def open_study(study: Study, out: str | os.PathLike[str], *, data: Iterable[str] = ()) -> Workshop:
    """The study's folder with its plan; its file is written there whole, as workers read it.

    Some of its data may be missing, but not all.
    """
    out = Path(out)
    make_folder(out)
    plan = make_plan(study, out, data=tuple(data))
    if len(plan.missing) == len(plan.study.config.datasets):
        raise FileError(f"the study must find its data; {' '.join(plan.missing.values())}")
    plan.file.save(out / STUDY)
    return Workshop(plan, out)


def run_study(
    study: Study,
    out: str | os.PathLike[str],
    *,
    data: Iterable[str] = (),
    jobs: int = 1,
    rule: str | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> Results:
    """Do all runs of a study that are not done, then compare, draw and report; started again, it goes on.

    With several `jobs`, so many processes share the runs (and the cores, or the GPUs). What failed or is missing is
    in the results' remarks.
    """
    shop = open_study(study, out, data=data)
    do_runs(shop, jobs=jobs, say=say)
    return report_study(shop, rule=rule)


def do_runs(shop: Workshop, *, jobs: int = 1, say: Callable[[str], None] = lambda text: None) -> None:
    """All runs that are not done; those that other processes have are waited for."""
    there = [name for name, run in shop.plan.runs.items() if run.opened is not None]
    if jobs > 1:
        with _workers(shop, jobs) as workers:
            while any(worker.poll() is None for worker in workers):
                time.sleep(POLL_S)
        if any(worker.returncode not in (0, 1) for worker in workers):  # 1: a run failed
            say(f"a worker ended early; see {shop.out / LOGS}. What it left is done here.")
    shop.work(only=there, say=say, again=jobs == 1)  # workers have tried again what failed before


@contextmanager
def _workers(shop: Workshop, number: int) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Processes that work on this folder; they end with us, whose end closes their stdin."""
    logs = shop.out / LOGS
    logs.mkdir(exist_ok=True)
    given = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(torch.cuda.device_count()))))
    gpus = [name for name in given.split(",") if name]
    threads = max(1, (os.cpu_count() or 1) // number)
    command = [sys.executable, "-m", "segcal", "study", os.fspath(shop.out), "--worker", "--end-with-stdin"]
    started: list[subprocess.Popen[bytes]] = []
    with ExitStack() as stack:
        try:
            for i in range(number):
                settings = {"OMP_NUM_THREADS": str(threads)} | (
                    {"CUDA_VISIBLE_DEVICES": gpus[i % len(gpus)]} if gpus else {}
                )
                log = stack.enter_context((logs / f"worker-{i}.txt").open("ab"))
                started.append(
                    subprocess.Popen(command, stdin=subprocess.PIPE, stdout=log, stderr=log, env=os.environ | settings)
                )
            yield started
        finally:
            for worker in started:
                worker.terminate()
            for worker in started:
                worker.communicate()


def report_study(shop: Workshop, *, rule: str | None = None) -> Results:
    """Compare what is there, and write tables, figures and the page, in the place of those of the last time."""
    results = collect(shop, rule=rule)
    (shop.out / REPORT).unlink(missing_ok=True)  # of the tables and figures that are replaced now
    write_tables(results, shop, shop.out / "results")
    build_page(results, shop, write_figures(results, shop, shop.out), shop.out / REPORT)
    return results
