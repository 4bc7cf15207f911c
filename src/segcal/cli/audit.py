"""The command for the whole chain: audit."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from segcal._io.words import counted
from segcal.cli.app import app
from segcal.cli.options import ClassNames, IgnoreIndex, Patients, Regions, Sigmoid, StrictGrid, Workers, read_options
from segcal.cli.orderly import Verb
from segcal.cli.shown import (
    print_json,
    refusing,
    say,
    show_failures,
    show_notes,
    show_tables,
    show_unpaired,
    step_bars,
)

if TYPE_CHECKING:
    from segcal.audit import Audit


@app.command(cls=Verb, epilog="Example: segcal audit maps labels --out audit")
def audit(
    predictions: Annotated[
        Path, typer.Argument(help="Folder of probability maps of held-out cases, or an nnU-Net model folder.")
    ],
    out: Annotated[Path, typer.Option("--out", help="Folder for all results; an interrupted audit resumes there.")],
    labels: Annotated[
        Path | None, typer.Argument(help="Folder of label maps. Default for a model folder: the labels of its dataset.")
    ] = None,
    images: Annotated[Path | None, typer.Option(help="Folder of images for the case viewer.")] = None,
    patients: Patients = None,
    logits: Annotated[bool, typer.Option("--logits", help="The maps are logits.")] = False,
    sigmoid: Sigmoid = False,
    regions: Regions = None,
    ignore_index: IgnoreIndex = None,
    class_names: ClassNames = None,
    strict_grid: StrictGrid = False,
    cases: Annotated[
        int,
        typer.Option(min=0, help="Number of cases to show: worst, median and best by Dice. 0: none."),
    ] = 6,
    workers: Workers = 1,
    as_json: Annotated[bool, typer.Option("--json", help="Prints results and file names as JSON.")] = False,
) -> None:
    """Evaluate, calibrate, fit a quality model and report in one command; NEXT.md lists the next commands."""
    with refusing(stopped=f"Finished work is kept in {out}. Run the same command again to resume."):
        import segcal

        with step_bars() as advance:
            found = segcal.audit_predictions(
                predictions,
                labels,
                out,
                images=images,
                options=read_options(logits, sigmoid, ignore_index, class_names, regions, strict_grid),
                patients=patients,
                workers=workers,
                cases=cases,
                progress=advance,
                say=say,
            )
    show_unpaired(found.outcome.pairing)
    show_failures(found.outcome.failures)
    show_notes(found.outcome.notes)
    _print_json(found) if as_json else _show(found)
    cases, failed = len(found.outcome.evaluation.cases), len(found.outcome.failures)
    say(f"{counted(cases, 'case')} audited, {failed} failed; report: {found.report}")
    say(f"next commands: {found.advice}")
    if found.outcome.failures or found.failed:
        raise typer.Exit(1)


def _show(found: Audit) -> None:
    """Tables before and after calibration, the calibrator, and the steps that were skipped or failed."""
    from segcal.comparison.tables import main_tables, notes

    sentences = [f"Calibrator: {found.chosen}."] if found.chosen else []
    sentences += [f"Skipped: {step}; {why}" for step, why in found.skipped.items()]
    sentences += [f"Failed: {step}; {why}" for step, why in found.failed.items()]
    show_tables(main_tables(found.comparison), [*notes(found.comparison), *sentences])


def _print_json(found: Audit) -> None:
    import json

    from segcal.comparison.tables import to_json

    files = {
        "report": found.report,
        "next": found.advice,
        "calibrator": found.calibrator,
        "quality": found.quality,
        "before": found.out / "before",
        "calibrated": None if found.calibrated is None else found.out / "calibrated",
    }
    content = {
        "cases": len(found.outcome.evaluation.cases),
        "failures": [failure._asdict() for failure in found.outcome.failures],
        "files": {name: None if path is None else str(path) for name, path in files.items()},
        "chosen": found.chosen or None,
        "skipped": dict(found.skipped),
        "failed": dict(found.failed),
        "comparison": json.loads(to_json(found.comparison)),
    }
    print_json(json.dumps(content, indent=2, ensure_ascii=False))
