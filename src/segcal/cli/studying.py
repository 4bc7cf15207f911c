"""The verb that repeats experiments: study."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from segcal._io import ending
from segcal._io.words import counted
from segcal.cli.app import app
from segcal.cli.orderly import Verb
from segcal.cli.shown import refusing, say, show_tables, stderr

if TYPE_CHECKING:
    from rich.table import Table

    from segcal.study import Results, Workshop
    from segcal.study.overview import Overview

SHOWN_RUNS = 30  # more do not fit a screen; then only those that run or failed


@app.command(cls=Verb)
def study(
    source: Annotated[
        str | None,
        typer.Argument(metavar="STUDY", help="A study's .toml file or folder, or the name of one that --list shows."),
    ] = None,
    out: Annotated[Path | None, typer.Option("--out", help="Folder for everything; started again, it goes on.")] = None,
    data: Annotated[
        list[str] | None,
        typer.Option(metavar="[NAME=]FOLDER", help="Where data lie: a folder that holds them, or that of one dataset."),
    ] = None,
    change: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="KEY=VALUE", help="A setting of all runs, as training.epochs=5; may be repeated."
        ),
    ] = None,
    jobs: Annotated[int, typer.Option(min=1, help="Processes that share the runs, and the cores or GPUs.")] = 1,
    choose: Annotated[
        str | None, typer.Option(metavar="RULE", help="Choose on validation cases, as 'dsc >= baseline - 0.005'.")
    ] = None,
    list_studies: Annotated[bool, typer.Option("--list", help="List the studies that come with segcal.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would run, its cost, what is missing.")] = False,
    status: Annotated[bool, typer.Option("--status", help="Show how far it is, whoever works on it.")] = False,
    results: Annotated[bool, typer.Option("--results", help="Run nothing; report what is there.")] = False,
    worker: Annotated[bool, typer.Option("--worker", help="Take runs from the folder until none is left.")] = False,
    end_with_stdin: Annotated[bool, typer.Option("--end-with-stdin", hidden=True)] = False,
    only: Annotated[
        list[str] | None, typer.Option(metavar="RUN", help="With --worker: only this run; may be repeated.")
    ] = None,
    slurm: Annotated[bool, typer.Option("--slurm", help="Print a script for sbatch: one job for each run.")] = False,
    tflops: Annotated[
        float | None, typer.Option(min=0.001, help="What your GPU keeps up, for the estimate of hours.")
    ] = None,
) -> None:
    """Run datasets x methods x seeds: train, calibrate, evaluate, compare, and report; or go on with it.

    Exit code 1: a run failed, or data are missing.
    """
    kept = f"What is done is kept in {out or source}: the same command goes on from there."
    with refusing(stopped=kept):
        from segcal.errors import ConfigError
        from segcal.study import open_study, read_study
        from segcal.study.running import STUDY

        if list_studies:
            _list()
            return
        modes = [name for name, given in (
            ("--dry-run", dry_run), ("--status", status), ("--results", results), ("--worker", worker),
            ("--slurm", slurm),
        ) if given]  # fmt: skip
        if len(modes) > 1:
            raise ConfigError(f"one of --dry-run, --status, --results, --worker, --slurm must do; got {modes}.")
        if only and not worker:
            raise ConfigError("--only must come with --worker.")
        if source is not None and (Path(source) / STUDY).is_file():  # the folder of a study
            source, out = os.fspath(Path(source) / STUDY), out or Path(source)
        if source is None or (out is None and not dry_run):
            raise ConfigError("STUDY and --out must be given, as in: segcal study phantom --out folder.")
        found = read_study(source, changes=change or ())
        if dry_run:
            _show_plan(found, out, data or (), tflops)
            return
        assert out is not None
        shop = open_study(found, out, data=data or ())
        for name, what in shop.plan.missing.items():
            say(f"{name}: {what}")
        if status:
            _show(shop)
        elif slurm:
            _print_script(shop, tflops)
        elif worker:
            if end_with_stdin:
                ending.end_with_stdin()
            _work(shop, only)
        else:
            _run(shop, jobs=0 if results else jobs, rule=choose)


def _list() -> None:
    from segcal.study import shipped_studies

    for name, found in shipped_studies().items():
        print(f"{name}: {found.config.title}\n  {' '.join(found.config.about.split())}")


def _run(shop: Workshop, *, jobs: int, rule: str | None) -> None:
    """Do the runs (none for 0 jobs), then report."""
    from segcal.study import do_runs, report_study
    from segcal.study.choose import parse_rule

    if rule is not None:
        parse_rule(rule)  # refused now rather than after hours
    if jobs:
        with watching(shop) as tell:
            do_runs(shop, jobs=jobs, say=tell)
    found = report_study(shop, rule=rule)
    _show_results(shop, found)
    if found.remarks:
        raise typer.Exit(1)


def _show_results(shop: Workshop, found: Results) -> None:
    from segcal.study.summary import choice_sentences, study_notes, study_tables

    show_tables(study_tables(found)[:2], (*choice_sentences(found.chosen), *study_notes(found)))
    for state in shop.states():
        if state.status == "failed":
            say(f"{state.name} failed: {state.message}")
    if found.datasets:
        say(f"the tables are in {shop.out / 'results'}, the report is {shop.out / 'report.html'}")


def _work(shop: Workshop, only: list[str] | None) -> None:
    from segcal.errors import one_of

    names = [name for name, run in shop.plan.runs.items() if run.opened is not None]
    for name in only or ():
        one_of("--only", name, tuple(names))
    shop.work(only=only or names, say=say)
    if any(shop.failure(shop.plan.runs[name]) for name in only or names):
        raise typer.Exit(1)


def _show(shop: Workshop) -> None:
    from segcal.study.overview import overview

    show_tables([_table(overview(shop))], ())


def _show_plan(found: Any, out: Path | None, data: Any, tflops: float | None) -> None:
    import tempfile

    from rich.table import Table

    from segcal.study import make_plan
    from segcal.study.estimate import GPU_TFLOPS, describe_plan, total

    tflops = tflops or GPU_TFLOPS
    with tempfile.TemporaryDirectory() as temporary:  # the phantom must be somewhere to be counted
        plan = make_plan(found, out or temporary, data=data)
        rows = describe_plan(plan, tflops)
    table = Table(title=found.config.title, title_justify="left")
    for heading in ("run", "dataset", "for", "seed", "epochs", "steps", "GPU hours"):
        table.add_column(heading, justify="left" if heading in ("run", "dataset", "for") else "right", overflow="fold")
    for row in rows:
        table.add_row(
            row.run, row.dataset, ", ".join(row.methods), str(row.seed), f"{row.epochs}", _known(row.steps, "d"),
            _known(row.hours, ".1f"),
        )  # fmt: skip
    whole = total(rows)
    unknown = f", {whole.unknown} of them of unknown cost" if whole.unknown else ""
    sentence = (
        f"{counted(whole.runs, 'run')}{unknown}: about {whole.hours:.1f} GPU hours at {tflops:g} TFLOP/s kept up. This "
        "is arithmetic, not a measurement; say with --tflops what your GPU does."
    )
    show_tables([table], [sentence, *(f"{name}: {what}" for name, what in plan.missing.items())])
    if plan.missing:
        raise typer.Exit(1)


def _known(value: float, form: str) -> str:
    return "-" if value != value else format(value, form)


def _print_script(shop: Workshop, tflops: float | None) -> None:
    from segcal.study.estimate import GPU_TFLOPS, estimate
    from segcal.study.running import LOGS, STUDY
    from segcal.study.slurm import slurm_script

    there = [run for run in shop.plan.runs.values() if run.opened is not None and not shop.is_done(run)]
    hours = [estimate(run).hours(tflops or GPU_TFLOPS) for run in there]
    known = [each for each in hours if each == each]
    (shop.out / LOGS).mkdir(exist_ok=True)
    script = slurm_script(
        shop.plan, os.fspath(shop.out / STUDY), shop.out, data=(), open_runs=[run.name for run in there],
        hours=max(known, default=None),
    )  # fmt: skip
    print(script)


def _table(found: Overview) -> Table:
    from rich.markup import escape
    from rich.table import Table

    from segcal.calibrators.cost import duration

    table = Table(title=found.line, title_justify="left")
    for heading in ("run", "status", "stage", "done", "time", "where"):
        table.add_column(heading, justify="right" if heading in ("done", "time") else "left", overflow="fold")
    few = len(found.states) <= SHOWN_RUNS
    styles = {"done": "green", "running": "bold", "failed": "red", "waiting": "dim"}
    for state in found.states:
        if few or state.status in ("running", "failed"):
            table.add_row(
                state.name,
                f"[{styles[state.status]}]{state.status}[/]",
                escape(state.stage or state.message),
                f"{state.share:.0%}" if state.status != "waiting" else "",
                duration(state.seconds) if state.seconds == state.seconds else "",
                state.where,
            )
    return table


@contextmanager
def watching(shop: Workshop) -> Iterator[Callable[[str], None]]:
    """A live overview on a terminal, elsewhere a line whenever a run begins or ends; what says a line beside it."""
    from rich.live import Live

    from segcal.study.overview import overview

    stop = threading.Event()
    console = stderr()
    if console.is_terminal:
        with Live(console=console, get_renderable=lambda: _table(overview(shop)), refresh_per_second=1):
            yield lambda text: console.print(text, markup=False, highlight=False, soft_wrap=True)
        return

    def tell() -> None:
        last: tuple[str, ...] = ()
        while True:
            found = overview(shop)
            statuses = tuple(state.status for state in found.states)
            if statuses != last:
                say(found.line)
                last = statuses
            if stop.wait(2):
                return

    thread = threading.Thread(target=tell, daemon=True)
    thread.start()
    try:
        yield say
    finally:
        stop.set()
        thread.join()
