"""What every verb shows: errors as one sentence with an exit code, and progress with a rate and a time left."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from rich.console import Console


def stderr() -> Console:
    """Progress and remarks go here; results go to stdout."""
    from rich.console import Console

    return Console(stderr=True)


def say(text: str) -> None:
    """One line to stderr, as it is."""
    stderr().print(text, markup=False, highlight=False, soft_wrap=True)


@contextmanager
def refusing(*, stopped: str = "") -> Iterator[None]:
    """Errors of ours end the command with their sentence and exit code 2; Ctrl-C with 130 and what is kept."""
    from segcal.errors import SegcalError

    try:
        yield
    except SegcalError as error:
        say(f"{type(error).__name__}: {error}")
        raise typer.Exit(2) from None
    except KeyboardInterrupt:
        say(f"Stopped. {stopped}".strip())
        raise typer.Exit(130) from None


@contextmanager
def progress_bar(unit: str) -> Iterator[Callable[[int, int], None]]:
    """A bar on stderr; call what it gives with what is done and the total."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn(unit), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[rate]}"))
    with Progress(*columns, TimeRemainingColumn(), console=stderr()) as bar:
        task = bar.add_task(unit, rate="", total=None)

        def advance(done: int, total: int) -> None:
            speed = bar.tasks[0].speed
            bar.update(task, completed=done, total=total, rate=f"{speed:.2f} {unit}/s" if speed else "")

        yield advance
