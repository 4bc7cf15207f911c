"""Common output of all commands: one-line errors with an exit code, and progress with rate and remaining time."""

from __future__ import annotations

import errno
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol

import typer

from segcal._io.words import counted, listed

if TYPE_CHECKING:
    from pathlib import Path

    from rich.console import Console
    from rich.table import Table as RichTable

    from segcal._io.jobs import Failure, Maps
    from segcal.evaluation.outcome import Note
    from segcal.evaluation.tables import Table
    from segcal.volumes import Pairing


NARROW = 100  # columns of a terminal; below, tables need every one
EXTRAS = {
    "train": ("monai", "pydantic", "tensorboard", "tomli_w"),
    "dask": ("dask", "distributed"),
    "review": ("starlette", "uvicorn"),
}


def stderr() -> Console:
    """Console for progress and messages; results go to stdout."""
    return _console(stderr=True)


def stdout() -> Console:
    """Console for tables; lines do not wrap in files."""
    return _console() if sys.stdout.isatty() else _console(width=200)


def _console(**options: Any) -> Console:
    from rich.console import Console

    class Plain(Console):
        def on_broken_pipe(self) -> None:
            raise  # the BrokenPipeError, which `orderly` knows

    return Plain(**options)


def show_tables(tables: Iterable[Table | RichTable], sentences: Iterable[str]) -> None:
    """Print tables, then sentences, to stdout."""
    from segcal.evaluation.tables import Table, to_terminal

    console = stdout()
    for table in tables:
        console.print(to_terminal(table, narrow=console.width < NARROW) if isinstance(table, Table) else table)
    for sentence in sentences:
        console.print(sentence, markup=False, highlight=False, soft_wrap=True)


def print_json(text: str) -> None:
    """Print JSON to stdout; escape characters that stdout cannot encode."""
    try:
        text.encode(sys.stdout.encoding or "utf-8")
    except UnicodeEncodeError:
        text = json.dumps(json.loads(text), indent=2)
    print(text)


def show_failures(failures: Sequence[Failure]) -> None:
    """Print the first failures, one line each."""
    for failure in failures[:10]:
        say(f"{failure.case}: {failure.kind}: {failure.message}")


def show_unpaired(pairing: Pairing) -> None:
    """Print unpaired files, one line for predictions and one for labels."""
    for noun, partner, names in (
        ("prediction", "labels", pairing.unpaired_predictions),
        ("label map", "a prediction", pairing.unpaired_labels),
    ):
        if names:
            say(f"{counted(len(names), noun)} without {partner}: {listed(names)}")
    if pairing.unpaired_predictions and pairing.unpaired_labels:
        from segcal.volumes.mismatch import name_difference

        if told := name_difference(pairing.unpaired_predictions, pairing.unpaired_labels):
            say(told)


def show_notes(notes: Sequence[Note]) -> None:
    """Print notes on cases, one line each."""
    for note in notes:
        say(f"note: {note.message} {counted(len(note.cases), 'case')}: {listed(note.cases)}")


def say_maps(maps: Maps, out: Path) -> None:
    """Print the number of maps and of failed cases."""
    say(f"{counted(len(maps.paths), 'map')}: {out}; {counted(len(maps.failures), 'case')} failed")


def say(text: str) -> None:
    """Print one line to stderr."""
    stderr().print(text, markup=False, highlight=False, soft_wrap=True)


@contextmanager
def refusing(*, stopped: str = "") -> Iterator[None]:
    """Turn errors into a message: exit code 2 for segcal's, 1 for the system's, 128 + number for a signal.

    `orderly` handles a closed or full stdout.
    """
    from segcal._io.ending import exit_code
    from segcal.errors import SegcalError

    try:
        yield
    except OSError as error:
        if isinstance(error, BrokenPipeError) or (error.errno == errno.ENOSPC and error.filename is None):
            raise
        say(f"{type(error).__name__}: {_sentence(error)}")
        raise typer.Exit(1) from None
    except MemoryError as error:
        say(f"MemoryError: more memory is needed; {error}.")
        raise typer.Exit(1) from None
    except SegcalError as error:
        say(f"{type(error).__name__}: {error}")
        raise typer.Exit(2) from None
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        extra = next((name for name, packages in EXTRAS.items() if package in packages), None)
        if extra is None:
            raise
        say(f"{package} must be installed for this command. Type: pip install 'segcal[{extra}]'")
        raise typer.Exit(2) from None
    except KeyboardInterrupt as error:
        say(f"Stopped. {stopped}".strip())
        raise typer.Exit(exit_code(error)) from None


def _sentence(error: OSError) -> str:
    """The message with the file first."""
    from segcal._io.files import WriteError

    if isinstance(error, WriteError) or error.filename is None or error.strerror is None:
        return str(error)
    return f"{error.filename}: {error.strerror}."


class Advance(Protocol):
    """Reports progress: done, total, and a text."""

    def __call__(self, done: int, total: int, text: str = "") -> None: ...


@contextmanager
def progress_bar(unit: str) -> Iterator[Advance]:
    """A progress bar on stderr with rate and remaining time."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn(unit), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[rate]}"))
    text_column = TextColumn("{task.fields[text]}")
    with Progress(*columns, TimeRemainingColumn(), text_column, console=stderr()) as bar:
        task = bar.add_task(unit, rate="", text="", total=None)

        def advance(done: int, total: int, text: str = "") -> None:
            speed = bar.tasks[0].speed
            bar.update(task, completed=done, total=total, rate=f"{speed:.2f} {unit}/s" if speed else "", text=text)

        yield advance


@contextmanager
def step_bars() -> Iterator[Callable[[str, int, int, str], None]]:
    """A progress bar on stderr for each step of a command, with the remaining time of the step."""
    from rich.progress import BarColumn, Progress, TaskID, TaskProgressColumn, TextColumn, TimeRemainingColumn

    text_column = TextColumn("{task.fields[text]}", markup=False)
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn(), text_column)
    with Progress(*columns, console=stderr()) as bar:
        tasks: dict[str, TaskID] = {}

        def advance(step: str, done: int, total: int, text: str) -> None:
            if step not in tasks:
                tasks[step] = bar.add_task(step, text="", total=None)
            bar.update(tasks[step], completed=done, total=total, text=text or f"{done} of {total}")

        yield advance
