"""The application that verbs are added to."""

from __future__ import annotations

from typing import Annotated

import typer

from segcal.cli.orderly import Verbs

app = typer.Typer(
    cls=Verbs,
    context_settings={"help_option_names": ["-h", "--help"]},
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Makes the probabilities of medical image segmentation networks mean what they say.",
)


@app.callback(invoke_without_command=True)
def main(version: Annotated[bool, typer.Option("--version", help="Print the version and stop.")] = False) -> None:
    if version:
        from segcal import __version__

        print(__version__)
        raise typer.Exit
