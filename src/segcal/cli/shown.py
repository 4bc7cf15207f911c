"""What every verb shows: errors as one sentence with an exit code, and progress with a rate and a time left."""

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
    """Progress and remarks go here; results go to stdout."""
    return _console(stderr=True)


def stdout() -> Console:
    """Where tables go; in a file, lines need not wrap."""
    return _console() if sys.stdout.isatty() else _console(width=200)


def _console(**options: Any) -> Console:
    from rich.console import Console

    class Plain(Console):
        def on_broken_pipe(self) -> None:
            raise  # the BrokenPipeError, which `orderly` knows

    return Plain(**options)


def show_tables(tables: Iterable[Table | RichTable], sentences: Iterable[str]) -> None:
    """Tables, and below them sentences as they are, on stdout."""
    from segcal.evaluation.tables import Table, to_terminal

    console = stdout()
    for table in tables:
        console.print(to_terminal(table, narrow=console.width < NARROW) if isinstance(table, Table) else table)
    for sentence in sentences:
        console.print(sentence, markup=False, highlight=False, soft_wrap=True)


def print_json(text: str) -> None:
    """JSON to stdout, with escapes where the terminal or file has no code for a sign."""
    try:
        text.encode(sys.stdout.encoding or "utf-8")
    except UnicodeEncodeError:
        text = json.dumps(json.loads(text), indent=2)
    print(text)


def show_failures(failures: Sequence[Failure]) -> None:
    """The first of them, a line each."""
    for failure in failures[:10]:
        say(f"{failure.case}: {failure.kind}: {failure.message}")


def show_unpaired(pairing: Pairing) -> None:
    """Files that found no partner, a line for each side."""
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
    """What is to be known of some cases, a line each."""
    for note in notes:
        say(f"note: {note.message} {counted(len(note.cases), 'case')}: {listed(note.cases)}")


def say_maps(maps: Maps, out: Path) -> None:
    """How many maps there are, and how many cases failed."""
    is_there = "map is" if len(maps.paths) == 1 else "maps are"
    say(f"{len(maps.paths)} {is_there} in {out}, {counted(len(maps.failures), 'case')} failed")


def say(text: str) -> None:
    """One line to stderr, as it is."""
    stderr().print(text, markup=False, highlight=False, soft_wrap=True)


@contextmanager
def refusing(*, stopped: str = "") -> Iterator[None]:
    """Errors end the command with a sentence: ours with exit code 2, the system's with 1, a signal with 128 + number.

    A stdout that takes no more is left to `orderly`.
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
        say(f"MemoryError: there must be more memory for this; {error}.")
        raise typer.Exit(1) from None
    except SegcalError as error:
        say(f"{type(error).__name__}: {error}")
        raise typer.Exit(2) from None
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        extra = next((name for name, packages in EXTRAS.items() if package in packages), None)
        if extra is None:
            raise
        say(f"{package} must be installed for this command: pip install 'segcal[{extra}]' brings all that it needs.")
        raise typer.Exit(2) from None
    except KeyboardInterrupt as error:
        say(f"Stopped. {stopped}".strip())
        raise typer.Exit(exit_code(error)) from None


def _sentence(error: OSError) -> str:
    """With the file first; Python says [Errno 2] No such file or directory: 'file'."""
    from segcal._io.files import WriteError

    if isinstance(error, WriteError) or error.filename is None or error.strerror is None:
        return str(error)
    return f"{error.filename}: {error.strerror}."


class Advance(Protocol):
    """Tells a bar what is done, of how much, and a word on it."""

    def __call__(self, done: int, total: int, text: str = "") -> None: ...


@contextmanager
def progress_bar(unit: str) -> Iterator[Advance]:
    """A bar on stderr, with a rate and the time left."""
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
def overall_bar() -> Iterator[Callable[[float, float | None, str], None]]:
    """A bar on stderr for work of several kinds, in the seconds that all of it may take, with the time left."""
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    columns = (BarColumn(), TaskProgressColumn(), TimeRemainingColumn(), TextColumn("{task.description}", markup=False))
    with Progress(*columns, console=stderr()) as bar:
        task = bar.add_task("", total=None)

        def advance(done: float, total: float | None, text: str) -> None:
            bar.update(task, completed=done, total=total, description=text)

        yield advance
