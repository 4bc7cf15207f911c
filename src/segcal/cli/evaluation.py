"""The command that measures: evaluate."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from segcal._io.words import counted
from segcal.cli.app import app
from segcal.cli.options import (
    Bins,
    ClassNames,
    Dask,
    IgnoreIndex,
    Mean,
    Member,
    Patients,
    Regions,
    Sigmoid,
    StrictGrid,
    dask_cluster,
    numbers_of,
    read_options,
)
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
    from segcal.evaluation.evaluation import Evaluation
    from segcal.evaluation.outcome import Outcome


@app.command(cls=Verb, epilog="Example: segcal evaluate maps labels --out results --workers 2")
def evaluate(
    predictions: Annotated[Path, typer.Argument(help="Folder of probability maps, or one file.")],
    labels: Annotated[
        list[Path], typer.Argument(help="Folder of label maps, or one file; one folder per rater if there are several.")
    ],
    out: Annotated[Path, typer.Option("--out", help="Folder for the results; an interrupted run resumes there.")],
    member: Member = None,
    mean: Mean = "probabilities",
    regions: Regions = None,
    bins: Bins = 20,
    background: Annotated[bool, typer.Option("--background", help="Reports the background class, too.")] = False,
    workers: Annotated[int, typer.Option(min=1, help="Number of processes.")] = 1,
    dask: Dask = None,
    calibrator: Annotated[
        Path | None, typer.Option(help="Measures the calibrated maps, for example calibrator.json; stores no map.")
    ] = None,
    groups: Annotated[
        Path | None,
        typer.Option(metavar="CSV", help="Also reports groups of cases: a column case or patient, then attributes."),
    ] = None,
    patients: Patients = None,
    bands: Annotated[
        str | None,
        typer.Option(metavar="MM,MM", help="Also reports bands by distance to the predicted boundary, such as 2,5."),
    ] = None,
    logits: Annotated[bool, typer.Option("--logits", help="The maps are logits.")] = False,
    sigmoid: Sigmoid = False,
    ignore_index: IgnoreIndex = None,
    class_names: ClassNames = None,
    strict_grid: StrictGrid = False,
    raters_from: Annotated[
        str,
        typer.Option(help="Where labels of several raters are: folders, files (case_rater1.nii.gz) or channels."),
    ] = "folders",
    as_json: Annotated[bool, typer.Option("--json", help="Prints summary.json instead of a table.")] = False,
) -> None:
    """Measure calibration and overlap of every case: ECE, ACE, MCE, Brier score, NLL and Dice."""
    import segcal

    kept = f"Finished work is kept in {out}. Run the same command again to resume."
    with refusing(stopped=kept), progress_bar("cases") as advance:
        outcome = segcal.evaluate(
            predictions,
            labels,
            out,
            raters_from=raters_from,  # type: ignore[arg-type]  # checked there
            members=member or (),
            mean=mean,
            options=read_options(logits, sigmoid, ignore_index, class_names, regions, strict_grid),
            bins=bins,
            background=background,
            calibrator=calibrator,
            groups=groups,
            patients=patients,
            bands=() if bands is None else numbers_of("--bands", bands),
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
            from segcal.kernels.threads import one_torch_thread

            with one_torch_thread():
                _show_summary(outcome.measured if background else outcome.measured.foreground(), background=background)
                _show_raters(out)
            if limits := outcome.measured.provenance["options"]["bands"]:
                from segcal.evaluation.bands import NOTE, band_names
                from segcal.evaluation.tables import band_table

                bands = {name: outcome.facets[f"bands/{name}"] for name in band_names(limits)}
                show_tables([band_table(bands, background=background)], [NOTE])
            if outcome.groups is not None:
                from segcal.evaluation.group_tables import group_notes, group_table

                show_tables([group_table(outcome.groups)], group_notes(outcome.groups))
    number = len(outcome.measured.cases) if outcome.measured is not None else 0
    say(f"{counted(number, 'case')} evaluated, {len(outcome.failures)} failed; results: {out}")
    if outcome.failures:
        raise typer.Exit(1)


def _show_raters(out: Path) -> None:
    """What several raters tell, if there are some."""
    from segcal.evaluation.raters import rater_sentences, rater_tables, read_rater_rows

    rows = read_rater_rows(out)
    if rows:
        show_tables(rater_tables(rows), rater_sentences())


def _show_summary(evaluation: Evaluation, *, background: bool) -> None:
    """The summary, whether bins are empty, how far decisions kept what they promised, and the ACE of chance alone."""
    from segcal.comparison.comparison import floors
    from segcal.comparison.tables import FLOOR_NOTE, OCCUPIED_NOTE, SCORE_NOTE
    from segcal.evaluation.agreement import agreement_lines
    from segcal.evaluation.remarks import empty_bins
    from segcal.evaluation.tables import ALL_CLASSES, summary_table

    several = len(evaluation.classes) > 1
    labels = (*evaluation.classes, None) if several else evaluation.classes
    found = floors(evaluation)
    by_label = ", ".join(f"{label or ALL_CLASSES} {found['macro', label, 'ace']:.4f}" for label in labels)
    notes = [OCCUPIED_NOTE, f"Floor of the macro-ACE: {by_label}.", FLOOR_NOTE]
    told = [*(f"Note: {note.message}" for note in empty_bins(evaluation)), *agreement_lines(evaluation)]
    told += [SCORE_NOTE, *notes] if several else notes
    show_tables([summary_table(evaluation, background=background)], told)
