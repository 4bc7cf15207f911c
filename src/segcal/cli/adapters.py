"""The command that exports a run: export-bundle."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from segcal.cli.app import app
from segcal.cli.options import Calibrator
from segcal.cli.orderly import Verb
from segcal.cli.shown import refusing, say


@app.command(cls=Verb, epilog="Example: segcal export-bundle runs/soft-ace --out bundle")
def export_bundle(
    run: Annotated[Path, typer.Argument(help="Folder of a run of `segcal train`.")],
    out: Annotated[Path, typer.Option("--out", help="Folder of the bundle, new or empty.")],
    calibrator: Calibrator = None,
    checkpoint: Annotated[str, typer.Option(help="Checkpoint in the run folder: best.pt or last.pt.")] = "best.pt",
    authors: Annotated[str, typer.Option(help="Authors of the network, for the metadata.")] = "not stated",
    copyright: Annotated[
        str, typer.Option(help="Copyright and license of the weights, for the metadata.")
    ] = "not stated",
) -> None:
    """Export a trained run as a MONAI bundle, which predicts without segcal."""
    with refusing():
        from segcal.adapters import monai_bundle
        from segcal.calibrators import load_calibrator
        from segcal.training.runs import load_run

        found = load_run(run, checkpoint=checkpoint, with_data=False)
        fitted = None if calibrator is None else load_calibrator(calibrator)
        made = monai_bundle.export_bundle(found, out, calibrator=fitted, authors=authors, copyright=copyright)
    say(f"bundle: {made}; {made / 'docs' / 'README.md'} has the command that runs it")
