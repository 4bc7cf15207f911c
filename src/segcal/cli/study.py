"""The commands for studies: study run, plan, status, report, list; demo."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from segcal._io import ending
from segcal._io.words import counted, duration
from segcal.cli.app import app
from segcal.cli.options import Numbers, dask_cluster
from segcal.cli.orderly import Verb, Verbs
from segcal.cli.shown import print_json, refusing, say, show_tables, stderr

if TYPE_CHECKING:
    from rich.table import Table

    from segcal.study import Plan, Results, Workshop
    from segcal.study.overview import Overview

SHOWN_RUNS = 30  # more do not fit a screen; then only those that run or failed

study = typer.Typer(
    cls=Verbs,
    no_args_is_help=True,
    help="Run datasets x methods x seeds: train, calibrate, evaluate, compare, report.",
)
app.add_typer(study, name="study")

Source = Annotated[
    str,
    typer.Argument(metavar="STUDY", help="A study: a .toml file, a study folder, or a name that `study list` shows."),
]
Folder = Annotated[Path, typer.Argument(metavar="DIR", help="Folder of a study: the --out of `study run`.")]
Data = Annotated[
    list[str] | None,
    typer.Option(metavar="[NAME=]FOLDER", help="Folder of all datasets, or NAME=FOLDER for one; can be repeated."),
]
Change = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Changes a setting of all runs, for example training.epochs=5; can be repeated.",
    ),
]


@study.command(cls=Verb, epilog="Example: segcal study run hippocampus --data data --out study --jobs 2")
def run(
    source: Source,
    out: Annotated[
        Path | None, typer.Option("--out", help="Folder for all results; an interrupted study resumes there.")
    ] = None,
    jobs: Annotated[
        int | None, typer.Option(min=1, help="Number of processes, which share cores or GPUs. Default: 1.")
    ] = None,
    dask: Annotated[
        str | None, typer.Option(metavar="ADDRESS", help="Runs on this Dask cluster, for example tcp://HOST:8786.")
    ] = None,
    data: Data = None,
    change: Change = None,
    only: Annotated[
        list[str] | None, typer.Option(metavar="RUN", help="Does only this run, without a report; can be repeated.")
    ] = None,
    end_with_stdin: Annotated[bool, typer.Option("--end-with-stdin", hidden=True)] = False,
) -> None:
    """Do all unfinished runs, then compare and report. Run the same command again to resume.

    Exit code 1: a run failed or data are missing.
    """
    with refusing(stopped=f"Finished work is kept in {out or source}. Run the same command again to resume."):
        if end_with_stdin:
            ending.end_with_stdin()
        from segcal.errors import ConfigError, one_of
        from segcal.study import do_runs, report_study

        if jobs is not None and dask is not None:
            raise ConfigError(
                "--jobs and --dask must not be given together; got both. Use --jobs here or --dask on a cluster."
            )
        shop = _open(source, out, data or (), change or ())
        names = [name for name, each in shop.plan.runs.items() if each.opened is not None]
        for name in only or ():
            one_of("--only", name, tuple(names))
        _say_missing(shop.plan)
        with watching(shop) as tell:
            cluster = dask_cluster(dask, gpus=True)
            do_runs(shop, only=only or names, jobs=jobs or 1, executor=cluster, wait=not only, say=tell)
        if only:
            done = all(shop.is_done(shop.plan.runs[name]) for name in only)
        else:
            done = _show_results(shop, report_study(shop))
    if not done:
        raise typer.Exit(1)


@study.command(cls=Verb, epilog="Example: segcal study plan paper --data data")
def plan(
    source: Source,
    data: Data = None,
    change: Change = None,
    names: Annotated[
        bool,
        typer.Option("--names", help="Prints only the names of the runs that train, one per line, for job scripts."),
    ] = False,
) -> None:
    """Show each run, its epochs and steps, and missing data; run nothing.

    Exit code 1: data are missing.
    """
    with refusing():
        missing = _show_plan(source, data or (), change or (), names=names).missing
    if missing:
        raise typer.Exit(1)


@study.command(cls=Verb, epilog="Example: segcal study status study")
def status(folder: Folder) -> None:
    """Show the progress of a study."""
    with refusing():
        from segcal.study import load_study
        from segcal.study.overview import overview

        shop = load_study(folder)
        _say_missing(shop.plan)
        show_tables([_table(overview(shop))], ())


@study.command(cls=Verb, epilog="Example: segcal study report study")
def report(folder: Folder) -> None:
    """Compare the finished runs and write tables, figures and the page; run nothing.

    Exit code 1: a run is not finished or data are missing.
    """
    with refusing():
        from segcal.study import load_study, report_study

        shop = load_study(folder)
        done = _show_results(shop, report_study(shop))
    if not done:
        raise typer.Exit(1)


@study.command("list", cls=Verb, epilog="Example: segcal study list")
def list_studies() -> None:
    """List the included studies."""
    with refusing():
        from segcal.study import shipped_studies

        for name, found in shipped_studies().items():
            print(f"{name}: {found.config.title}\n  {' '.join(found.config.about.split())}")


@app.command(cls=Verb, epilog="Example: segcal demo --out segcal-demo")
def demo(
    out: Annotated[
        Path, typer.Option("--out", help="Folder for all results; an interrupted demo resumes there.")
    ] = Path("segcal-demo"),
    dataset: Annotated[
        Path | None,
        typer.Option(help="Folder of a Decathlon task to use instead of the phantom, for example Task04_Hippocampus."),
    ] = None,
    epochs: Annotated[int | None, typer.Option(min=1, help="Number of epochs of each training.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Random seed of the phantom and the networks.")] = 0,
    as_json: Numbers = False,
) -> None:
    """Train with Dice + CE, hard ACE and soft ACE, fit a temperature, compare on test cases, write the report."""

    with refusing(stopped=f"Finished work is kept in {out}. Run the same command again to resume."):
        from segcal.comparison.tables import LAYOUTS, make_table, notes, to_json
        from segcal.evaluation.tables import ALL_CLASSES
        from segcal.study import demo as job
        from segcal.study import do_runs

        shop = job.open_demo(out, dataset=dataset, epochs=epochs, seed=seed)
        with watching(shop) as tell:
            do_runs(shop, say=tell)
        result = job.report_demo(shop)
    if as_json:
        print_json(to_json(result.comparison))
    else:
        title, columns = next(iter(LAYOUTS.items()))
        cases = counted(result.comparison.cases, "case")
        table = make_table(result.comparison, f"{title}, {ALL_CLASSES}, {cases}", columns)
        show_tables([table], notes(result.comparison))
    say(f"temperature {result.temperature:.3f}; tables and runs: {out}; report: {result.report}")


def _open(source: str, out: Path | None, data: Sequence[str], changes: Sequence[str]) -> Workshop:
    """The study in its folder. One that is there already, and is not to change, is not written again."""
    from segcal.errors import ConfigError
    from segcal.study import load_study, open_study, read_study
    from segcal.study.running import STUDY

    if (Path(source) / STUDY).is_file():
        if out is None and not data and not changes:
            return load_study(source)
        source, out = os.fspath(Path(source) / STUDY), out or Path(source)
    if out is None:
        raise ConfigError(f"--out must be given; got none. Type for example: segcal study run {source} --out folder.")
    return open_study(read_study(source, changes=changes), out, data=data)


def _say_missing(found: Plan) -> None:
    for name, what in found.missing.items():
        say(f"{name}: {what}")


def _show_results(shop: Workshop, found: Results) -> bool:
    """Print the main tables and what they say; whether nothing is missing."""
    show_tables(found.tables[:2], found.notes)
    for state in found.failures:
        say(f"{state.name} failed: {state.message}")
    if found.datasets:
        say(f"tables: {shop.out / 'results'}; report: {shop.out / 'report.html'}")
    return not found.remarks


def _show_plan(source: str, data: Sequence[str], changes: Sequence[str], *, names: bool) -> Plan:
    import tempfile

    from segcal.study import make_plan, read_study
    from segcal.study.running import STUDY

    path = Path(source) / STUDY
    study = read_study(path if path.is_file() else source, changes=changes)
    with tempfile.TemporaryDirectory() as temporary:  # the phantom must be somewhere to be counted
        plan = make_plan(study, temporary, data=data)
        if names:
            _say_missing(plan)
            for name, each in plan.runs.items():
                if each.opened is not None and not each.members:
                    print(name)
        else:
            notes = [f"{name}: {what}" for name, what in plan.missing.items()]
            show_tables([_plan_table(plan)], [f"{counted(len(plan.runs), 'run')}.", *notes])
    return plan


def _plan_table(plan: Plan) -> Table:
    from rich.table import Table

    from segcal.study.plan import describe_plan

    table = Table(title=plan.study.config.title, title_justify="left")
    for heading in ("run", "dataset", "for", "seed", "epochs", "steps"):
        table.add_column(heading, justify="left" if heading in ("run", "dataset", "for") else "right", overflow="fold")
    for row in describe_plan(plan):
        steps = "-" if row.steps is None else str(row.steps)
        table.add_row(row.run, row.dataset, ", ".join(row.methods), str(row.seed), str(row.epochs), steps)
    return table


def _table(found: Overview) -> Table:
    from rich.markup import escape
    from rich.table import Table

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
                f"{state.share:.0%}" if state.share or state.status == "running" else "",
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
