"""The verb that makes a page: report."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from segcal.cli.app import app
from segcal.cli.options import Evaluations, Holm, Patients, Seed, Test
from segcal.cli.orderly import Verb
from segcal.cli.shown import refusing, say

SLICE = ", slice of the largest disagreement"


@app.command(cls=Verb)
def report(
    evaluations: Evaluations,
    out: Annotated[Path, typer.Option("--out", help="The page to write, as report.html.")],
    patients: Patients = None,
    test: Test = "t",
    holm: Holm = False,
    title: Annotated[str | None, typer.Option(help="Of the page.")] = None,
    predictions: Annotated[
        list[Path] | None, typer.Option(help="For maps of the worst cases: each method's folder, in the same order.")
    ] = None,
    labels: Annotated[Path | None, typer.Option(help="Folder of label maps, for the same.")] = None,
    images: Annotated[Path | None, typer.Option(help="Folder of images, to show the maps upon.")] = None,
    worst: Annotated[int, typer.Option(min=1, help="How many cases to show maps of.")] = 10,
    seed: Seed = 0,
) -> None:
    """Write one HTML page that needs nothing else: reading, tables, diagrams, every case, where it all came from."""
    with refusing():
        from segcal.errors import ConfigError
        from segcal.evaluation.evaluation import read_evaluations
        from segcal.report import ReportMap, build_report

        found = read_evaluations(evaluations)
        maps = []
        if predictions or labels or images:
            if not (predictions and labels and len(predictions) == len(found)):
                raise ConfigError(
                    f"maps need --labels and one --predictions for each of {len(found)} evaluations; got "
                    f"{len(predictions or [])} and {'a' if labels else 'no'} folder of labels."
                )
            from segcal.plots import figure_bytes
            from segcal.plots.maps import worst_case_figures

            folders = dict(zip(found, predictions, strict=True))
            maps = [
                ReportMap(drawn.case, f"{drawn.class_name}: worst by Dice{'' if drawn.flat else SLICE}", png)
                for drawn in worst_case_figures(found, folders, labels, images=images, number=worst)
                for png in (figure_bytes(drawn.figure, dpi=150),)
            ]
        build_report(
            found,
            out,
            patients=patients,
            test=test,
            correction="holm" if holm else "none",
            title=title,
            maps=maps,
            seed=seed,
        )
    say(f"the report is {out}")
