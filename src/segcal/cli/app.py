"""The application and its start page."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from segcal.cli.orderly import Verbs

START = """\
segcal measures and improves the calibration of segmentation networks.

Measure, calibrate and report in one command:
  segcal audit MAPS LABELS --out audit

Measure calibration, Dice and likelihood:
  segcal evaluate MAPS LABELS --out results

Calibrate after training:
  segcal calibrate fit MAPS LABELS --out calibrator.json

All commands: segcal --help. One command: segcal COMMAND --help."""
JOURNEY = (  # as in ARCHITECTURE.md
    "evaluate", "lesions", "compare", "report", "calibrate", "decide", "quality", "review", "audit", "datasets",
    "train", "predict", "study", "demo", "doctor",
)  # fmt: skip


class Application(Verbs):
    """All commands, in the order in which a user meets them."""

    def list_commands(self, ctx: Any) -> list[str]:
        names = super().list_commands(ctx)
        return sorted(names, key=lambda name: JOURNEY.index(name) if name in JOURNEY else len(JOURNEY))


app = typer.Typer(
    cls=Application,
    context_settings={"help_option_names": ["-h", "--help"]},
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Measures and improves the calibration of medical image segmentation networks.",
    epilog="Example: segcal audit maps labels --out audit",
)


@app.callback(invoke_without_command=True)
def main(
    context: typer.Context, version: Annotated[bool, typer.Option("--version", help="Prints the version.")] = False
) -> None:
    if version:
        from segcal import __version__

        print(__version__)
        raise typer.Exit
    if context.invoked_subcommand is None:
        print(START)
