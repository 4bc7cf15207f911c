"""Verbs that learn: demo."""

from __future__ import annotations

import json
import sys
from typing import Annotated

import typer

from segcal.cli import app


@app.command()
def demo(
    steps: Annotated[int, typer.Option(min=1, help="Training steps of each network.")] = 200,
    repeats: Annotated[int, typer.Option(min=1, help="Networks of each method; the table shows their means.")] = 3,
    seed: Annotated[int, typer.Option(help="Seed of images and networks.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Train a small network with and without the calibration term and compare, on images made on the spot."""
    from rich.console import Console
    from rich.table import Table

    from segcal.demo import run_demo

    with Console(stderr=True).status("training") as status:
        results = run_demo(steps=steps, repeats=repeats, seed=seed, progress=status.update)
    if as_json:
        json.dump([result._asdict() for result in results], sys.stdout, indent=2)
        print()
        return
    table = Table(title="Held-out images, foreground, means over images and networks")
    for column in ("method", "Dice", "ACE", "ECE", "MCE"):
        table.add_column(column, justify="left" if column == "method" else "right")
    for method, *numbers in results:
        table.add_row(method, *(f"{number:.4f}" for number in numbers))
    Console().print(table)
