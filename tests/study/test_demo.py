"""The main job in one command, on the phantom, with trainings of one epoch."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from contextlib import chdir
from functools import partial

import pytest
import torch
from layouts import write_decathlon
from typer.testing import CliRunner

import segcal.study.demo
from segcal import Evaluation, __version__
from segcal.cli import app
from segcal.datasets import make_phantom

METHODS = ["dice-ce", "dice-ce + temperature", "hard-ace", "soft-ace"]


@pytest.fixture(scope="module", autouse=True)
def few_cases():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(segcal.study.demo, "make_phantom", partial(make_phantom, cases=10))
        yield


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    out = tmp_path_factory.mktemp("demo") / "out"
    with chdir(out.parent):  # a relative folder, as the default is
        done = CliRunner().invoke(app, ["demo", "--out", out.name, "--epochs", "1"])
    assert done.exit_code == 0, done.output
    return out, done


def run(out, method, file):
    """A file of the run of this method."""
    (folder,) = out.glob(f"runs/demo-{method}-seed0-*")
    return folder / file


def test_every_method_is_compared_on_the_test_cases(demo):
    out, done = demo
    rows = list(csv.DictReader((out / "comparison.csv").read_text().splitlines()))
    assert list(dict.fromkeys(row["method"] for row in rows)) == METHODS
    assert all(method in done.stdout for method in METHODS)
    tested = {line.split()[1] for line in run(out, "dice-ce", "split.txt").read_text().splitlines() if "test" in line}
    assert len(tested) == 6  # of ten
    assert set(Evaluation.load(run(out, "hard-ace", "test/evaluation.npz")).cases) == tested


def test_a_temperature_leaves_dice_as_it_is_and_lowers_the_likelihood_loss_it_was_fitted_on(demo):
    out, _ = demo
    plain, scaled = (
        Evaluation.load(run(out, "dice-ce", f"{folder}/evaluation.npz"))
        for folder in ("test", "calibrated/temperature/test")
    )
    assert torch.equal(plain.overlap.predicted, scaled.overlap.predicted)
    fitted = json.loads(run(out, "dice-ce", "calibrated/temperature/calibrator.json").read_text())["fit"]
    assert fitted["after"] <= fitted["before"]


def test_the_report_is_there_and_tells_of_every_method(demo):
    page = (demo[0] / "report.html").read_text(encoding="utf-8")
    assert all(method in page for method in METHODS)


def test_started_again_it_trains_nothing_and_finds_the_same(demo):
    out, _ = demo
    before = (out / "comparison.csv").read_text()
    stamps = {path: path.stat().st_mtime_ns for path in out.glob("runs/*/*.pt")}
    done = CliRunner().invoke(app, ["demo", "--out", str(out), "--epochs", "1", "--json"])
    assert done.exit_code == 0
    assert json.loads(done.stdout)["methods"] == METHODS
    assert (out / "comparison.csv").read_text() == before
    assert {path: path.stat().st_mtime_ns for path in out.glob("runs/*/*.pt")} == stamps


def test_it_takes_a_decathlon_task_of_the_users(tmp_path):
    root = write_decathlon(tmp_path / "data")
    done = CliRunner().invoke(app, ["demo", "--out", str(tmp_path / "out"), "--dataset", str(root), "--epochs", "1"])
    assert done.exit_code == 0, done.output
    assert (tmp_path / "out/report.html").exists()
    assert not (tmp_path / "out/data").exists()


def test_a_folder_that_is_no_task_is_refused(tmp_path):
    done = CliRunner().invoke(app, ["demo", "--out", str(tmp_path / "out"), "--dataset", str(tmp_path)])
    assert done.exit_code == 2
    assert "FileError" in done.stderr


def test_the_version_is_printed():
    done = subprocess.run([sys.executable, "-m", "segcal", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == __version__


def test_a_wrong_option_is_misuse():
    assert CliRunner().invoke(app, ["demo", "--epochs", "0"]).exit_code == 2
