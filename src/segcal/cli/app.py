"""The application that verbs are added to."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from segcal.cli.orderly import Verbs

JOURNEY = (  # as in ARCHITECTURE.md
    "evaluate", "compare", "report", "calibrate", "decide", "quality", "review", "audit", "datasets", "train",
    "predict", "study", "demo", "doctor", "export-bundle",
)  # fmt: skip


class Application(Verbs):
    """All verbs, in the order in which a user meets them."""

    def list_commands(self, ctx: Any) -> list[str]:
        names = super().list_commands(ctx)
        return sorted(names, key=lambda name: JOURNEY.index(name) if name in JOURNEY else len(JOURNEY))


app = typer.Typer(
    cls=Application,
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
