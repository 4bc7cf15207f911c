"""Start and end of every command: streams that accept any text, signals, a closed or full stdout."""

from __future__ import annotations

import os
import signal
import sys
from contextlib import suppress
from io import TextIOWrapper
from typing import Any, TextIO

import typer
from typer.core import TyperCommand, TyperGroup

from segcal._io.ending import ending_in_order, exit_code
from segcal.cli.panels import arranged

_SIGPIPE = int(getattr(signal, "SIGPIPE", 13))  # Windows has none


class Verb(TyperCommand):
    """A command."""

    def get_params(self, ctx: Any) -> list[Any]:
        return arranged(super().get_params(ctx))


class Verbs(TyperGroup):
    """A group of commands; the outermost group opens the streams and handles the end of the command."""

    def get_params(self, ctx: Any) -> list[Any]:
        return arranged(super().get_params(ctx))

    def main(self, *arguments: Any, **named: Any) -> Any:
        open_streams()
        try:
            with ending_in_order():
                return super().main(*arguments, **named)
        except SystemExit as error:
            failed = _write_out(sys.stdout)
            if failed is not None and not error.code:
                raise SystemExit(failed) from None
            raise
        except OSError as error:  # while --help was written
            failed = _write_out(sys.stdout)
            raise SystemExit(_failed(error) if failed is None else failed) from None

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt as error:
            raise typer.Exit(exit_code(error)) from None
        except OSError as error:
            failed = _write_out(sys.stdout)
            raise typer.Exit(_failed(error) if failed is None else failed) from None


def open_streams() -> None:
    """Make streams writable: a closed one discards its text, characters without an encoding become '?'."""
    for number, name in ((1, "stdout"), (2, "stderr")):
        if getattr(sys, name) is None:
            setattr(sys, name, _swallowing(number))
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")


def _swallowing(number: int) -> TextIO:
    """The null device, also under the number of the stream, where workers would find another file otherwise."""
    try:
        os.fstat(number)
    except OSError:
        null = os.open(os.devnull, os.O_WRONLY)
        if null != number:
            os.dup2(null, number)
            os.close(null)
        os.set_inheritable(number, True)
    return open(os.devnull, "w", encoding="utf-8")


def _write_out(stream: TextIO) -> int | None:
    """Write what is left; where that fails let it go, and give the exit code."""
    try:
        stream.flush()
    except OSError as error:
        with suppress(OSError, ValueError):
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, stream.fileno())  # Python would try again at its end
            os.close(null)
        return _failed(error)
    except ValueError:  # closed by the caller
        pass
    return None


def _failed(error: OSError) -> int:
    """The exit code after a stream refused a text: quietly where its reader has gone, else with a sentence."""
    if isinstance(error, BrokenPipeError):
        return 128 + _SIGPIPE
    what = "the output cannot be written" if error.filename is None else error.filename
    with suppress(OSError):
        print(f"{type(error).__name__}: {what}: {error.strerror or error}.", file=sys.stderr)
    return 1
