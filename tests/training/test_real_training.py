"""Training on real cine MRI: the whole way from a download to a report, CPU-sized."""

from __future__ import annotations

import csv
import os
from pathlib import Path

import pytest
from typer.testing import CliRunner

from segcal import Evaluation
from segcal.cli import app

DATA = Path(os.environ.get("SEGCAL_DATA", "nowhere")) / "ACDC"

pytestmark = pytest.mark.skipif(not DATA.is_dir(), reason="set SEGCAL_DATA to a folder that holds ACDC")

SMALL = [
    "data.spacing_mm=[2.0, 2.0, 10.0]",
    "data.patch=[64, 64, 8]",
    "training.epochs=3",
    "training.validate_every=3",
    "training.patches_per_case=2",
]


def invoke(*arguments):
    done = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert done.exit_code == 0, done.output
    return done


def test_a_real_download_has_no_false_problem():
    done = invoke("datasets", "check", "acdc", DATA)
    assert "0 problems" in done.stderr
    assert "testing/ has no labeled patients here" in done.stdout


@pytest.mark.long
def test_acdc_trains_evaluates_and_reports(tmp_path):
    patients = [path.name for path in sorted((DATA / "database" / "training").glob("patient*"))[:10]]
    sides = ["train"] * 5 + ["validation"] * 2 + ["test"] * 3
    split = tmp_path / "split.txt"
    split.write_text("".join(f"{side} {patient}\n" for side, patient in zip(sides, patients, strict=True)))
    changes = [part for change in (*SMALL, f"data.split='{split}'") for part in ("--set", change)]
    for method in ("dice-ce", "soft-ace"):
        run = tmp_path / "runs" / method
        invoke(
            "train", "--dataset", "acdc", "--data-root", DATA, "--preset", "small", "--method", method, *changes,
            "--out", run,
        )  # fmt: skip
        invoke("predict", run, "--evaluate", "--out", tmp_path / method)
        evaluation = Evaluation.load(tmp_path / method / "evaluation.npz")
        assert len(evaluation.cases) == 6  # two frames of each of three patients
        assert evaluation.classes == ("background", "right ventricle", "myocardium", "left ventricle")
        losses = [float(row["loss"]) for row in csv.DictReader((run / "log.csv").read_text().splitlines())]
        assert losses[-1] < 0.8 * losses[0]  # it has begun to learn
    invoke("report", tmp_path / "dice-ce", tmp_path / "soft-ace", "--out", tmp_path / "report.html")
    assert "6 cases of 3 patients" in (tmp_path / "report.html").read_text(encoding="utf-8")
