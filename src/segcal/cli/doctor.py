"""The command that checks an installation: doctor."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer

from segcal.cli.app import app
from segcal.cli.orderly import Verb
from segcal.cli.shown import print_json, refusing, say, show_tables

if TYPE_CHECKING:
    from segcal.doctor import BackendCheck, Diagnosis


@app.command(cls=Verb, epilog="Example: segcal doctor --json > doctor.json")
def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Prints everything as JSON, for a bug report.")] = False,
) -> None:
    """Check this installation: versions, devices, every backend against the reference; recommend a setting.

    Exit code 1: a backend disagrees.
    """
    with refusing():
        from segcal.doctor import diagnose

        found = diagnose(progress=say)
        if as_json:
            print_json(json.dumps(found.to_dict(), indent=2, ensure_ascii=False))
        else:
            _show(found)
        if not found.agrees:
            raise typer.Exit(1)


def _show(found: Diagnosis) -> None:
    from rich.table import Table

    table = Table(title="Backends against the reference (plain torch on the CPU)", title_justify="left")
    for heading in ("device", "backend", "agrees", "values within", "gradients within"):
        table.add_column(heading, justify="right" if "within" in heading else "left")
    for heading in ("bin_statistics", "SegmentationLoss"):
        table.add_column(f"{heading}, ms", justify="right")
    for check in found.checks:
        table.add_row(*_row(check, picked=found.picked[check.device] == check.backend))
    shown = [f"{name} {text}" for name, text in found.versions.items()]
    shown += [f"{name}={text}" for name, text in found.variables.items()]
    sentences = [", ".join(shown)]
    sentences += [f"{device.name}: {device.about}" for device in found.devices]
    show_tables([], sentences)
    complaints = [f"{check.backend} on {check.device}: {text}" for check in found.checks for text in check.complaints]
    missing = [f"{backend} was not checked: {why}." for backend, why in found.unavailable.items()]
    show_tables([table], ["* default backend of the device", *missing, *complaints, found.advice])


def _row(check: BackendCheck, *, picked: bool) -> list[str]:
    differences = [f"{check.value_difference:.1e}", f"{check.gradient_difference:.1e}"]
    times = [check.milliseconds.get(name) for name in ("bin_statistics", "SegmentationLoss")]
    shown = ["-" if taken is None else f"{taken:.1f}" for taken in times]
    return [check.device, check.backend + "*" * picked, "yes" if check.agrees else "NO", *differences, *shown]
