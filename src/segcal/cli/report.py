"""The verb that makes a page: report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from segcal.cli.app import app
from segcal.cli.options import Evaluations, Holm, Patients, Seed, Test
from segcal.cli.orderly import Verb
from segcal.cli.shown import refusing, say

if TYPE_CHECKING:
    from segcal.evaluation.evaluation import Evaluation
    from segcal.report import ReportMap
    from segcal.viewer import ViewedCase

SLICE = ", slice of the largest disagreement"
WORST = 10


@app.command(cls=Verb)
def report(
    evaluations: Evaluations,
    out: Annotated[Path, typer.Option("--out", help="The page to write, as report.html.")],
    patients: Patients = None,
    test: Test = "t",
    holm: Holm = False,
    title: Annotated[str | None, typer.Option(help="Of the page.")] = None,
    predictions: Annotated[
        list[Path] | None, typer.Option(help="To show cases: each method's folder of predictions, in the same order.")
    ] = None,
    labels: Annotated[Path | None, typer.Option(help="Folder of label maps, for the same.")] = None,
    images: Annotated[Path | None, typer.Option(help="Folder of images, to show the cases upon.")] = None,
    cases: Annotated[
        int | None,
        typer.Option(min=1, help="How many cases to look at in three planes: the worst, around the median, the best."),
    ] = None,
    by: Annotated[
        str, typer.Option(help="What orders them: dice, expected_dice, ace, ece, mce, brier or nll.")
    ] = "dice",
    worst: Annotated[
        int | None,
        typer.Option(min=1, help=f"How many cases to show pictures of; {WORST} without --cases, and none with it."),
    ] = None,
    seed: Seed = 0,
) -> None:
    """Write one HTML page that needs nothing else: reading, tables, diagrams, every case, where it all came from."""
    with refusing():
        from segcal.evaluation.evaluation import read_evaluations
        from segcal.report import build_report

        found = read_evaluations(evaluations)
        folders = _folders(found, predictions or [], labels, asked=bool(labels or images or cases or worst))
        viewed = _viewed(found, folders, labels, images, cases, by) if cases is not None else []
        pictures = WORST if worst is None and cases is None and folders else worst
        build_report(
            found,
            out,
            patients=patients,
            test=test,
            correction="holm" if holm else "none",
            title=title,
            maps=_maps(found, folders, labels, images, pictures) if pictures is not None else [],
            cases=viewed,
            seed=seed,
        )
    say(f"the report is {out}")


def _folders(
    found: Mapping[str, Evaluation], predictions: Sequence[Path], labels: Path | None, *, asked: bool
) -> dict[str, Path]:
    """The folder of each method; none where no case is to be shown."""
    from segcal.errors import ConfigError

    if len(predictions) != len(found) and (predictions or asked):
        raise ConfigError(
            f"cases to show need one --predictions for each of {len(found)} evaluations, and --labels where there are "
            f"any; got {len(predictions)} and {'a' if labels else 'no'} folder of labels."
        )
    return dict(zip(found, predictions, strict=False))


def _viewed(
    found: Mapping[str, Evaluation],
    folders: Mapping[str, Path],
    labels: Path | None,
    images: Path | None,
    number: int,
    by: str,
) -> list[ViewedCase]:
    from segcal.viewer import choose_cases, view_cases

    choices = choose_cases(found, number=number, by=by)
    return list(view_cases(found, folders, labels=labels, images=images, choices=choices))


def _maps(
    found: Mapping[str, Evaluation], folders: Mapping[str, Path], labels: Path | None, images: Path | None, number: int
) -> list[ReportMap]:
    from segcal.errors import ConfigError
    from segcal.plots import figure_bytes
    from segcal.plots.maps import worst_case_figures
    from segcal.report import ReportMap

    if labels is None:
        raise ConfigError(
            "pictures of the worst cases need --labels; got no folder. Cases without labels need --cases."
        )
    return [
        ReportMap(drawn.case, f"{drawn.class_name}: worst by Dice{'' if drawn.flat else SLICE}", png)
        for drawn in worst_case_figures(found, folders, labels, images=images, number=number)
        for png in (figure_bytes(drawn.figure, dpi=150),)
    ]
