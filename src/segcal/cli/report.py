"""The command that writes a page: report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from segcal.cli.app import app
from segcal.cli.options import Evaluations, Holm, Patients, Seed, Test
from segcal.cli.orderly import Verb
from segcal.cli.shown import refusing, say, show_failures

if TYPE_CHECKING:
    from segcal._io.jobs import Failure
    from segcal.evaluation.evaluation import Evaluation
    from segcal.report import ReportMap, ReportSection
    from segcal.viewer import ViewedCase

SLICE = ", slice of the largest disagreement"
WORST = 10


@app.command(cls=Verb, epilog="Example: segcal report results --out report.html")
def report(
    evaluations: Evaluations,
    out: Annotated[Path, typer.Option("--out", help="Page to write, for example report.html.")],
    patients: Patients = None,
    test: Test = "t",
    holm: Holm = False,
    title: Annotated[str | None, typer.Option(help="Title of the page.")] = None,
    predictions: Annotated[
        list[Path] | None, typer.Option(help="Folder of maps to show cases from, one per method in the same order.")
    ] = None,
    labels: Annotated[Path | None, typer.Option(help="Folder of label maps of these cases.")] = None,
    images: Annotated[Path | None, typer.Option(help="Folder of images of these cases.")] = None,
    cases: Annotated[
        int | None,
        typer.Option(min=1, help="Number of cases in the viewer with three planes: worst, median and best."),
    ] = None,
    by: Annotated[
        str, typer.Option(help="Metric that orders the cases: dice, expected_dice, ace, ece, mce, brier or nll.")
    ] = "dice",
    worst: Annotated[
        int | None,
        typer.Option(min=1, help=f"Number of cases shown as pictures. Default: {WORST} without --cases, none with it."),
    ] = None,
    groups: Annotated[
        Path | None, typer.Option(metavar="CSV", help="Groups of cases: first column case or patient, then attributes.")
    ] = None,
    lesions: Annotated[
        list[str] | None,
        typer.Option(metavar="[NAME=]DIR", help="Folder of `segcal lesions` to show; can be repeated."),
    ] = None,
    seed: Seed = 0,
) -> None:
    """Write one self-contained HTML page: summary, tables, diagrams, every case, provenance."""
    failures: list[Failure] = []
    with refusing():
        from segcal.errors import SegcalError
        from segcal.evaluation.evaluation import read_evaluations
        from segcal.report import build_report

        found = read_evaluations(evaluations)
        folders = _folders(found, predictions or [], labels, asked=bool(labels or images or cases or worst))
        viewed = _viewed(found, folders, labels, images, cases, by, failures) if cases is not None else []
        pictures = WORST if worst is None and cases is None and folders else worst
        maps = _maps(found, folders, labels, images, pictures, failures) if pictures is not None else []
        if failures and not (viewed or maps):  # as with a wrong folder
            raise SegcalError(failures[0].message)
        build_report(
            found,
            out,
            patients=patients,
            test=test,
            correction="holm" if holm else "none",
            title=title,
            maps=maps,
            cases=viewed,
            sections=_sections(found, groups, lesions or [], patients=patients, seed=seed),
            seed=seed,
        )
    show_failures(failures)
    say(f"report: {out}")
    if failures:
        raise typer.Exit(1)


def _sections(
    found: Mapping[str, Evaluation], groups: Path | None, lesions: Sequence[str], *, patients: str | None, seed: int
) -> list[ReportSection]:
    """What is shown beyond the evaluations themselves."""
    sections = []
    if groups is not None:
        from segcal import compare_groups
        from segcal.report.groups import group_section

        compared = {
            method: compare_groups(part, groups, patients=patients, seed=seed) for method, part in found.items()
        }
        sections.append(group_section(compared))
    if lesions:
        from segcal.evaluation.evaluation import method_names, named_path
        from segcal.lesions.results import read_lesions
        from segcal.report.lesions import lesion_section

        sources = list(map(named_path, lesions))
        if len(found) == len(lesions):
            sources = [(name or method, path) for method, (name, path) in zip(found, sources, strict=True)]
        summaries = {name: read_lesions(path) for name, (_, path) in zip(method_names(sources), sources, strict=True)}
        sections.append(lesion_section(summaries))
    return sections


def _folders(
    found: Mapping[str, Evaluation], predictions: Sequence[Path], labels: Path | None, *, asked: bool
) -> dict[str, Path]:
    """The folder of each method; empty if no case is shown."""
    from segcal.errors import ConfigError

    if len(predictions) != len(found) and (predictions or asked):
        raise ConfigError(
            f"to show cases, --predictions must be given once for each of the {len(found)} evaluations; got "
            f"{len(predictions)}. Repeat --predictions, and add --labels if there are labels."
        )
    return dict(zip(found, predictions, strict=False))


def _viewed(
    found: Mapping[str, Evaluation],
    folders: Mapping[str, Path],
    labels: Path | None,
    images: Path | None,
    number: int,
    by: str,
    failures: list[Failure],
) -> list[ViewedCase]:
    """Read the cases to look at, and add those that cannot be shown to the failures."""
    from segcal.viewer import choose_cases, view_cases

    choices = choose_cases(found, number=number, by=by)
    return list(view_cases(found, folders, labels=labels, images=images, choices=choices, on_failure=failures.append))


def _maps(
    found: Mapping[str, Evaluation],
    folders: Mapping[str, Path],
    labels: Path | None,
    images: Path | None,
    number: int,
    failures: list[Failure],
) -> list[ReportMap]:
    """Draw the worst cases, and add those that cannot be drawn to the failures."""
    from segcal.errors import ConfigError
    from segcal.plots import figure_bytes
    from segcal.plots.maps import worst_case_figures
    from segcal.report import ReportMap

    if labels is None:
        raise ConfigError(
            "--labels must be given for pictures of the worst cases; got none. Without labels use --cases."
        )
    figures = worst_case_figures(found, folders, labels, images=images, number=number, on_failure=failures.append)
    return [
        ReportMap(drawn.case, f"{drawn.class_name}: worst by Dice{'' if drawn.flat else SLICE}", png)
        for drawn in figures
        for png in (figure_bytes(drawn.figure, dpi=150),)
    ]
