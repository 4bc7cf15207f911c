"""Verbs that measure and show: evaluate, compare, report."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from segcal._io.words import counted
from segcal.cli.app import app
from segcal.cli.orderly import Verb
from segcal.cli.shown import (
    print_json,
    progress_bar,
    refusing,
    say,
    show_failures,
    show_notes,
    show_tables,
    show_unpaired,
)

if TYPE_CHECKING:
    from segcal.adapters.dask import DaskCluster
    from segcal.comparison.comparison import Comparison
    from segcal.evaluation.evaluation import Evaluation
    from segcal.evaluation.options import ReadOptions
    from segcal.evaluation.outcome import Outcome

COMPARISON = ("comparison.csv", "comparison.md", "comparison.tex")
SLICE = ", slice of the largest disagreement"
MOST_LEFT_OUT = 3  # cases that a screen names one by one

Evaluations = Annotated[
    list[str],
    typer.Argument(metavar="BASELINE [OTHER...]", help="Folders of evaluate (or their .npz), or NAME=FOLDER."),
]
Patients = Annotated[
    str | None,
    typer.Option(help="Which cases are one patient's: 'none', a .csv (case, patient), or an expression's group."),
]
Test = Annotated[Literal["t", "wilcoxon"], typer.Option(help="Test that the stars show.")]
Holm = Annotated[bool, typer.Option("--holm", help="Correct for several methods and classes.")]


Regions = Annotated[
    str | None,
    typer.Option(
        help="Unions of classes: brats, kits, a .toml file or nnU-Net's dataset.json. A .toml file with values alone, "
        "as values = [0, 1, 2, 4], tells the label value of each channel."
    ),
]
Sigmoid = Annotated[bool, typer.Option("--sigmoid", help="Classes overlap: a probability by itself each.")]
IgnoreIndex = Annotated[int | None, typer.Option(help="Leave out voxels with this label, as 255.")]
ClassNames = Annotated[
    str | None,
    typer.Option(
        help="Names: a,b,c, one for every label from 0 on, so that the background comes first (of a single channel: "
        "background,a); a dataset.json or a .toml file. With --regions, names are those of the regions."
    ),
]
StrictGrid = Annotated[
    bool, typer.Option("--strict-grid", help="Refuse cases whose headers leave open where the voxels lie.")
]
Dask = Annotated[
    str | None, typer.Option(metavar="ADDRESS", help="Spread the cases over this Dask cluster, as tcp://HOST:8786.")
]


def read_options(
    logits: bool, sigmoid: bool, ignore_index: int | None, class_names: str | None, regions: str | None, strict: bool
) -> ReadOptions:
    """The options that verbs share, as one object."""
    from segcal.evaluation.options import ReadOptions

    return ReadOptions(
        logits=logits,
        sigmoid=sigmoid,
        ignore_index=ignore_index,
        class_names=class_names,
        regions=regions,
        strict_grid=strict,
    )


def dask_cluster(address: str | None, *, gpus: bool = False) -> DaskCluster | None:
    """The cluster at an address, if one is given; with `gpus`, each job takes one, where workers declare them."""
    if address is None:
        return None
    from segcal.adapters.dask import DaskCluster

    return DaskCluster(address, gpus=gpus)


@app.command(cls=Verb)
def evaluate(
    predictions: Annotated[Path, typer.Argument(help="Folder of predicted probability maps (or one file).")],
    labels: Annotated[Path, typer.Argument(help="Folder of label maps (or one file).")],
    out: Annotated[Path, typer.Option("--out", help="Folder for the results; started again, it goes on there.")],
    regions: Regions = None,
    bins: Annotated[int, typer.Option(min=1, help="Bins of the calibration errors.")] = 20,
    background: Annotated[bool, typer.Option("--background", help="Report the background class, too.")] = False,
    workers: Annotated[int, typer.Option(min=1, help="Processes, each with one case at a time.")] = 1,
    dask: Dask = None,
    calibrator: Annotated[
        Path | None, typer.Option(help="Measure what this calibrator (.json) makes of the maps; store none.")
    ] = None,
    logits: Annotated[bool, typer.Option("--logits", help="The maps hold logits.")] = False,
    sigmoid: Sigmoid = False,
    ignore_index: IgnoreIndex = None,
    class_names: ClassNames = None,
    strict_grid: StrictGrid = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print summary.json instead of a table.")] = False,
) -> None:
    """Measure calibration and overlap of every case: ECE, ACE, MCE, Brier, NLL and Dice, macro and micro."""
    import segcal

    kept = f"What is done is kept in {out}: the same command goes on from there."
    with refusing(stopped=kept), progress_bar("cases") as advance:
        outcome = segcal.evaluate(
            predictions,
            labels,
            out,
            options=read_options(logits, sigmoid, ignore_index, class_names, regions, strict_grid),
            bins=bins,
            background=background,
            calibrator=calibrator,
            workers=workers,
            executor=dask_cluster(dask),
            progress=advance,
        )
    show_outcome(outcome, out, background=background, as_json=as_json)


def show_outcome(outcome: Outcome, out: Path, *, background: bool = False, as_json: bool = False) -> None:
    """Print what an evaluation found and what failed; exit code 1 where something did."""
    show_unpaired(outcome.pairing)
    show_failures(outcome.failures)
    show_notes(outcome.notes)
    if outcome.measured is not None:
        if as_json:
            print_json((out / "summary.json").read_text(encoding="utf-8"))
        else:
            _show_summary(outcome.measured if background else outcome.measured.foreground())
    number = len(outcome.measured.cases) if outcome.measured is not None else 0
    say(f"{counted(number, 'case')} evaluated, {len(outcome.failures)} failed; results are in {out}")
    if outcome.failures:
        raise typer.Exit(1)


def _show_summary(evaluation: Evaluation) -> None:
    """The summary, how far decisions kept what they promised, and how much of the ACE chance alone would show."""
    from segcal.comparison.comparison import floors
    from segcal.comparison.tables import FLOOR_NOTE, SCORE_NOTE
    from segcal.evaluation.agreement import agreement_lines
    from segcal.evaluation.tables import ALL_CLASSES, summary_table

    several = len(evaluation.classes) > 1
    labels = (*evaluation.classes, None) if several else evaluation.classes
    found = floors(evaluation)
    by_label = ", ".join(f"{label or ALL_CLASSES} {found['macro', label, 'ace']:.4f}" for label in labels)
    notes = [f"Floor of the macro-ACE: {by_label}.", FLOOR_NOTE]
    kept = agreement_lines(evaluation)
    show_tables([summary_table(evaluation)], [*kept, SCORE_NOTE, *notes] if several else [*kept, *notes])


@app.command(cls=Verb)
def compare(
    evaluations: Evaluations,
    out: Annotated[Path, typer.Option("--out", help="Folder for comparison.csv, .md and .tex, and for figures.")],
    patients: Patients = None,
    test: Test = "t",
    holm: Holm = False,
    bins: Annotated[int | None, typer.Option(min=1, help="Bins of the calibration errors.")] = None,
    background: Annotated[bool, typer.Option("--background", help="Compare the background class, too.")] = False,
    level: Annotated[float, typer.Option(help="Of the confidence intervals.")] = 0.95,
    resamples: Annotated[int, typer.Option(min=1, help="Draws of the bootstrap.")] = 2000,
    seed: Annotated[int, typer.Option(min=0, help="Of the bootstrap and of the floor.")] = 0,
    figures: Annotated[str, typer.Option(help="Formats of figures, as png,svg,pdf; empty: none.")] = "",
    full: Annotated[bool, typer.Option("--full", help="Print all tables, as the files have them.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print every number as JSON instead of tables.")] = False,
) -> None:
    """Compare methods on the same cases: means, changes, intervals over patients, paired tests, the floor of chance."""
    import segcal
    from segcal._io.files import make_folder, replacing
    from segcal.comparison.tables import to_json, write_comparison
    from segcal.evaluation.evaluation import read_evaluations
    from segcal.evaluation.remarks import remarks

    with refusing():
        found = read_evaluations(evaluations)
        make_folder(out)
        comparison = segcal.compare(
            found,
            patients=patients,
            test=test,
            correction="holm" if holm else "none",
            bins=bins,
            background=background,
            level=level,
            resamples=resamples,
            seed=seed,
        )
        told = remarks(found)
        with replacing(out, COMPARISON) as new:
            written = write_comparison(comparison, new, remarks=told)
            if figures:
                from segcal.plots import write_figures

                written += write_figures(found, new, formats=tuple(figures.split(",")), patients=patients)
    if as_json:
        print_json(to_json(comparison))
    else:
        _show_comparison(comparison, told, full=full)
    say(f"wrote {', '.join(path.name for path in written)} in {out}")


def _show_comparison(comparison: Comparison, remarks: list[str], *, full: bool) -> None:
    """What fits a screen, or all tables."""
    from dataclasses import replace

    from segcal.comparison.tables import comparison_tables, main_tables, notes

    if full:
        show_tables(comparison_tables(comparison), [*notes(comparison), *remarks])
        return
    few = dict(list(comparison.unmatched.items())[:MOST_LEFT_OUT])
    more = len(comparison.unmatched) - len(few)
    show_tables(main_tables(comparison), [*notes(replace(comparison, unmatched=few)), *remarks])
    if more:
        say(f"{counted(more, 'more case')} left out, which comparison.md names.")
    say("These are of all classes; comparison.md has every table, and --full prints them.")


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
    seed: Annotated[int, typer.Option(min=0, help="Of the bootstrap and of the floor.")] = 0,
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
