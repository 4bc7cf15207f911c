"""Arguments that a command cannot use end in one sentence, without a traceback and before a file is replaced."""

from __future__ import annotations

import os
import shutil
import stat
from pathlib import Path
from typing import Any

import pytest
import studies
import tiny
from cohorts import write_cohort
from typer.testing import CliRunner

from segcal.cli import app

TINY = " ".join(f"--set {change.replace(' ', '')}" for change in tiny.changes())
TO_FOLDER = (  # commands with a folder as --out
    "evaluate P L",
    "lesions P L",
    "decide P --rule argmax",
    "calibrate apply calibrator.json P",
    "quality apply quality.json P",
    "compare evaluation",
    "audit P L",
    f"train --dataset acdc --data-root DATASET {TINY}",
    "study run two.toml",
)
TO_FILE = (  # commands with a file as --out
    "calibrate fit P L --method temperature --folds 0",
    "quality fit evaluation",
    "report evaluation",
    "datasets split acdc DATASET",
    "datasets groups acdc DATASET",
)


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    """What the commands read."""
    folder = write_cohort(tmp_path_factory.mktemp("data"), 12)
    studies.write_study(folder)
    for command in (
        "evaluate P L --out evaluation",
        "calibrate fit P L --method temperature --folds 0 --out calibrator.json",
        "quality fit evaluation --out quality.json",
    ):
        done = run(command, folder)
        assert done.exit_code == 0, done.output
    return folder


def run(command: str, folder: Path, *more: Any) -> Any:
    """Run a command in the folder; options of the command are parted by spaces."""
    words = [*command.replace("DATASET", "data/database").split(), *map(str, more)]
    before = Path.cwd()
    os.chdir(folder)
    try:
        return CliRunner().invoke(app, words)
    finally:
        os.chdir(before)


def refused(done: Any, *codes: int) -> str:
    """The sentence with which a command refused its arguments."""
    assert isinstance(done.exception, SystemExit), done.exc_info
    assert done.exit_code in codes, done.output
    return " ".join(done.output.split())


@pytest.mark.parametrize("place", ["loop", "loop/new"])
@pytest.mark.parametrize("command", TO_FOLDER)
def test_a_folder_for_results_that_is_a_circle_of_links_is_refused(command, place, data, tmp_path):
    (tmp_path / "loop").symlink_to("loop")
    assert "cannot be written" in refused(run(command, data, "--out", tmp_path / place), 1)


@pytest.mark.parametrize("command", TO_FILE)
def test_a_file_for_results_below_a_circle_of_links_is_refused(command, data, tmp_path):
    (tmp_path / "loop").symlink_to("loop")
    assert "cannot be written" in refused(run(command, data, "--out", tmp_path / "loop" / "new"), 1)


@pytest.mark.parametrize("out", ["", ".", "evaluation"])
@pytest.mark.parametrize("command", TO_FILE)
def test_a_folder_in_the_place_of_a_file_is_refused(command, out, data):
    assert "is a folder. Give" in refused(run(command, data, "--out", out), 2)


@pytest.mark.parametrize("decisions", ["", ".", "evaluation"])
def test_a_folder_in_the_place_of_the_file_of_decisions_is_refused(decisions, data):
    command = "review evaluation --no-browser"
    assert "--decisions must be a file" in refused(run(command, data, "--decisions", decisions), 2)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="Windows has no pipes with a name")
@pytest.mark.parametrize("command", TO_FILE)
def test_a_device_or_pipe_is_not_replaced_by_a_file(command, data, tmp_path):
    os.mkfifo(tmp_path / "pipe")
    assert "it is a device or a pipe" in refused(run(command, data, "--out", tmp_path / "pipe"), 2)
    assert stat.S_ISFIFO((tmp_path / "pipe").stat().st_mode)


@pytest.mark.parametrize("command", ["evaluate loop L", "lesions P loop", "decide loop --rule argmax", "audit P loop"])
def test_an_input_that_is_a_circle_of_links_is_refused(command, data, tmp_path):
    loop = tmp_path / "loop"
    loop.symlink_to("loop")
    refused(run(command.replace("loop", str(loop)), data, "--out", tmp_path / "out"), 2)


@pytest.mark.parametrize(
    ("command", "sentence"),
    [
        ("lesions P L --bins 99999999999999999999", "bins must be a whole number from 1 to 100000"),
        ("lesions P L --patients a*{99999999999}", "patients must be 'none', a .csv file or a regular expression"),
        ("compare evaluation --resamples 99999999999999999999", "resamples must be a whole number from 1 to 1000000"),
        ("compare evaluation --patients (a*{99999999999})", "patients must be 'none'"),
        ("quality fit evaluation --risk fnr=1e-320", "the level of a risk must be at least 1e-06 and below 1"),
        ("quality fit evaluation --risk dice-loss=1e-320", "the level of a risk must be at least 1e-06 and below 1"),
    ],
)
def test_a_number_that_no_method_can_use_is_refused(command, sentence, data, tmp_path):
    assert sentence in refused(run(command, data, "--out", tmp_path / "out"), 2)


@pytest.mark.skipif(os.name == "nt", reason="names are text there")
@pytest.mark.parametrize("command", ["evaluate P L", "lesions P L", "quality apply quality.json P", "audit P L"])
def test_a_folder_whose_name_is_not_text_is_refused_before_the_work(command, data, tmp_path):
    folder = tmp_path / os.fsdecode(b"\xff")
    shutil.copytree(data, folder)
    assert "must be a path of valid UTF-8 text" in refused(run(command, folder, "--out", tmp_path / "out"), 2)
    assert not list(tmp_path.glob("out/**/*.npz"))
