"""The command for lesions: lesions."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from segcal._io.words import counted
from segcal.cli.app import app
from segcal.cli.options import (
    ClassNames,
    Dask,
    IgnoreIndex,
    Patients,
    Regions,
    Seed,
    Sigmoid,
    StrictGrid,
    dask_cluster,
    read_options,
)
from segcal.cli.orderly import Verb
from segcal.cli.shown import print_json, progress_bar, refusing, say, show_failures, show_tables, show_unpaired

if TYPE_CHECKING:
    from segcal.lesions.results import LesionOutcome


@app.command(cls=Verb, epilog="Example: segcal lesions maps labels --out lesions --threshold 0.3")
def lesions(
    predictions: Annotated[Path, typer.Argument(metavar="MAPS", help="Folder of probability maps, or one file.")],
    labels: Annotated[Path, typer.Argument(help="Folder of label maps, or one file.")],
    out: Annotated[Path, typer.Option("--out", help="Folder for the results; an interrupted run resumes there.")],
    threshold: Annotated[float, typer.Option(help="Lowest probability of a voxel of a predicted lesion.")] = 0.5,
    confidence: Annotated[
        Literal["max", "mean"], typer.Option(help="Confidence of a lesion: its largest or its mean probability.")
    ] = "max",
    overlap: Annotated[
        float, typer.Option(help="Lowest intersection over union of a match; 0 means one shared voxel.")
    ] = 0.0,
    connectivity: Annotated[int, typer.Option(help="Connected neighbors of a voxel: 6, 18 or 26.")] = 26,
    min_size: Annotated[str, typer.Option(help="Ignores smaller lesions, for example 5 (voxels) or 10mm3.")] = "0",
    class_name: Annotated[
        list[str] | None, typer.Option("--class", help="Measures this class; can be repeated. Default: all.")
    ] = None,
    bins: Annotated[
        int | None,
        typer.Option(min=1, help="Number of confidence bins. Default: 5, 10 or 20, by the lesions."),
    ] = None,
    figures: Annotated[str, typer.Option(help="Formats of the figures, for example png,svg; empty: none.")] = "png",
    patients: Patients = None,
    calibrator: Annotated[
        Path | None, typer.Option(help="Measures the calibrated maps, for example calibrator.json; stores no map.")
    ] = None,
    regions: Regions = None,
    logits: Annotated[bool, typer.Option("--logits", help="The maps are logits.")] = False,
    sigmoid: Sigmoid = False,
    ignore_index: IgnoreIndex = None,
    class_names: ClassNames = None,
    strict_grid: StrictGrid = False,
    workers: Annotated[int, typer.Option(min=1, help="Number of processes.")] = 1,
    dask: Dask = None,
    seed: Seed = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Prints summary.json instead of tables.")] = False,
) -> None:
    """Match predicted lesions with true ones: sensitivity, false positives, FROC, reliability per lesion."""
    with refusing(stopped=f"Finished work is kept in {out}. Run the same command again to resume."):
        import segcal
        from segcal.lesions.components import Rules

        rules = Rules(threshold, confidence, overlap, connectivity, min_size)
        kinds = tuple(filter(None, figures.split(",")))
        with progress_bar("cases") as advance:
            outcome = segcal.evaluate_lesions(
                predictions,
                labels,
                out,
                rules=rules,
                classes=class_name or (),
                bins=bins,
                options=read_options(logits, sigmoid, ignore_index, class_names, regions, strict_grid),
                calibrator=calibrator,
                patients=patients,
                seed=seed,
                workers=workers,
                executor=dask_cluster(dask),
                progress=advance,
            )
        if kinds and outcome.summary is not None:
            from segcal.plots.lesions import write_lesion_figures

            write_lesion_figures(outcome.summary, out, formats=kinds)
    _show(outcome, out, as_json=as_json)


def _show(outcome: LesionOutcome, out: Path, *, as_json: bool) -> None:
    """Tables, and what failed; exit code 1 where something did."""
    show_unpaired(outcome.pairing)
    show_failures(outcome.failures)
    summary = outcome.summary
    if summary is not None:
        from segcal.lesions.results import froc_table, lesion_notes, lesion_table

        if as_json:
            print_json((out / "summary.json").read_text(encoding="utf-8"))
        else:
            show_tables([lesion_table(summary), froc_table(summary)], lesion_notes(summary))
    number = 0 if summary is None else summary.cases
    say(f"{counted(number, 'case')} measured, {len(outcome.failures)} failed; results: {out}")
    if outcome.failures:
        raise typer.Exit(1)
