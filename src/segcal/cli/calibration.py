"""The commands for post-hoc calibration: calibrate methods, fit, apply."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from segcal._io.words import counted
from segcal.cli.app import app
from segcal.cli.options import (
    Bins,
    ClassNames,
    Dtype,
    IgnoreIndex,
    Mean,
    Member,
    Patients,
    Regions,
    Sigmoid,
    StrictGrid,
    Workers,
    read_options,
)
from segcal.cli.orderly import Verb, Verbs
from segcal.cli.shown import (
    print_json,
    progress_bar,
    refusing,
    say,
    say_maps,
    show_failures,
    show_notes,
    show_tables,
    show_unpaired,
)

if TYPE_CHECKING:
    from segcal.calibration.fitting import Fitted

calibrate = typer.Typer(cls=Verbs, help="Fit a calibrator after training; apply it to other predictions.")
app.add_typer(calibrate, name="calibrate")

CHOSEN = (
    "The calibrator was chosen by these results, so they are slightly optimistic. Measure it on other labeled cases."
)
Logits = Annotated[bool, typer.Option("--logits", help="The maps are logits. Default: probabilities.")]


@calibrate.command(cls=Verb, epilog="Example: segcal calibrate methods")
def methods() -> None:
    """List the calibration methods."""
    from segcal.calibrators import CALIBRATORS

    for name, kind in CALIBRATORS.items():
        print(f"{name}: {kind.summary}")


@calibrate.command(cls=Verb, epilog="Example: segcal calibrate fit maps labels --out calibrator.json")
def fit(
    predictions: Annotated[Path, typer.Argument(help="Folder of probability maps of held-out cases.")],
    labels: Annotated[Path, typer.Argument(help="Folder of label maps.")],
    out: Annotated[Path, typer.Option("--out", help="Calibrator file to write, for example calibrator.json.")],
    member: Member = None,
    mean: Mean = "probabilities",
    method: Annotated[
        str,
        typer.Option(
            help="auto (the best of several calibrators on held-out cases), or one of `calibrate methods`, for example "
            "temperature."
        ),
    ] = "auto",
    logits: Logits = False,
    sigmoid: Sigmoid = False,
    regions: Regions = None,
    ignore_index: IgnoreIndex = None,
    class_names: ClassNames = None,
    strict_grid: StrictGrid = False,
    setting: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="Sets an option of the method, for example objective=ace or voxels=1000000; can be repeated.",
        ),
    ] = None,
    folds: Annotated[
        int | None,
        typer.Option(min=0, help="Number of folds of the cross-validation over patients. 0: none. Default: 5."),
    ] = None,
    patients: Patients = None,
    bins: Bins = 20,
    report: Annotated[
        Path | None, typer.Option(help="Also writes a report before and after, for example report.html.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Random seed of the folds.")] = 0,
    workers: Workers = 1,
    as_json: Annotated[bool, typer.Option("--json", help="Prints the comparison as JSON instead of tables.")] = False,
) -> None:
    """Fit a calibrator and show its effect on held-out cases: tables, tests and a reliability diagram."""
    with refusing(stopped=f"Finished work is kept next to {out}. Run the same command again to resume."):
        from segcal._io.parsing import parse_setting
        from segcal.calibration.fitting import fit_calibrator

        with progress_bar("steps") as advance:
            fitted = fit_calibrator(
                predictions, labels, out, members=member or (), mean=mean, method=method,
                settings=dict(map(parse_setting, setting or ())),
                options=read_options(logits, sigmoid, ignore_index, class_names, regions, strict_grid),
                bins=bins, folds=folds, patients=patients, seed=seed, workers=workers,
                progress=advance, say=say,
            )  # fmt: skip
    with refusing(stopped=f"The calibrator is {out}."):
        show_unpaired(fitted.pairing)
        show_failures(fitted.failures)
        show_notes(fitted.notes)
        _show(fitted, out, patients=patients, report=report, as_json=as_json)
    if fitted.failures:
        raise typer.Exit(1)


def _show(fitted: Fitted, out: Path, *, patients: str | None, report: Path | None, as_json: bool) -> None:
    from segcal.calibration.effect import reliability_before_and_after, same_decisions
    from segcal.calibration.fitting import picture_beside
    from segcal.comparison.comparison import compare
    from segcal.comparison.tables import LAYOUTS, make_table, notes, to_json
    from segcal.evaluation.tables import ALL_CLASSES
    from segcal.plots import save_figure
    from segcal.report import build_report
    from segcal.volumes.averaging import LEAST

    calibrator = fitted.calibrator
    taken = "logits" if calibrator.inputs == "logits" else f"probabilities (logarithm, clipped at {LEAST:g})"
    say(f"input maps: {taken}")
    if fitted.choice is not None:
        if not as_json:
            show_tables([fitted.choice.table()], [CHOSEN])
        say(fitted.choice.reason)
    if fitted.after is not None:
        evaluations = {"before": fitted.before, "calibrated": fitted.after}
        comparison = compare(evaluations, patients=patients)
        if as_json:
            print_json(to_json(comparison))
        else:
            cases = f"{counted(comparison.cases, 'held-out case')}, {counted(fitted.folds, 'fold')}"
            tables = [
                make_table(comparison, f"{title}, {ALL_CLASSES}, {cases}", columns)
                for title, columns in LAYOUTS.items()
            ]
            show_tables(tables, notes(comparison))
        before, after = (comparison.find(name, metric="dice").value for name in evaluations)
        changed = "no decision changed" if same_decisions(fitted.before, fitted.after) else "decisions changed"
        say(f"DSC {before:.6f} before, {after:.6f} calibrated: {changed}")
        picture = picture_beside(out)
        save_figure(reliability_before_and_after(fitted.before, fitted.after, patients=patients), picture)
        say(f"reliability diagram: {picture}")
        if report is not None:
            title = f"{calibrator.method}, cross-validated"
            build_report(evaluations, report, patients=patients, title=title, comparison=comparison)
            say(f"report: {report}")
    _show_fit(fitted)
    say(f"calibrator: {out}")


def _show_fit(fitted: Fitted) -> None:
    """Summary of the fit to all cases."""
    found = fitted.calibrator.report
    if found is None:
        return
    value = getattr(fitted.calibrator, "temperature", None)
    strength = "" if fitted.calibrator.strength == 1 else f", at {fitted.calibrator.strength:.0%} of its strength,"
    passes = counted(found.passes, "pass", "passes")
    say(
        f"{fitted.calibrator.method}{'' if value is None else f' {value:.4f}'}{strength} from "
        f"{counted(found.cases, 'case')} and {found.voxels:,} voxels in {passes}: {found.objective} "
        f"{found.before:.6f} to {found.after:.6f}"
        + (f", gradient {found.gradient:.1e}" if found.gradient == found.gradient else "")
    )
    if found.sampled is not None:
        worst = max(found.sampling_errors, default=float("nan"))
        say(f"fitted on {found.sampled:,} sampled voxels; sampling adds a standard error of up to {worst:.2g}")
    for note in found.notes:
        say(f"note: {note}")


@calibrate.command(cls=Verb, epilog="Example: segcal calibrate apply calibrator.json maps --out calibrated")
def apply(
    calibrator: Annotated[Path, typer.Argument(help="Calibrator file of `calibrate fit`.")],
    predictions: Annotated[Path, typer.Argument(help="Folder of maps, or one file.")],
    out: Annotated[
        Path, typer.Option("--out", help="Folder for the calibrated maps; an interrupted run resumes there.")
    ],
    member: Member = None,
    mean: Mean = "probabilities",
    logits: Logits = False,
    nifti: Annotated[
        bool, typer.Option("--nifti", help="Writes arrays as NIfTI, with the geometry of the label map beside each.")
    ] = False,
    dtype: Dtype = None,
) -> None:
    """Write calibrated maps in the format, data type and grid of the input maps."""
    with refusing(stopped=f"Finished work is kept in {out}. Run the same command again to resume."):
        from segcal.calibration.applying import apply_calibrator
        from segcal.evaluation.options import ReadOptions

        with progress_bar("cases") as advance:
            options = ReadOptions(logits=logits)
            applied = apply_calibrator(
                calibrator, predictions, out, members=member or (), mean=mean, options=options, nifti=nifti,
                dtype=dtype, progress=advance,
            )  # fmt: skip
    show_failures(applied.failures)
    say_maps(applied, out)
    if applied.failures:
        raise typer.Exit(1)
