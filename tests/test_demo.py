from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch
from typer.testing import CliRunner

from segcal import __version__
from segcal.cli import app
from segcal.demo import METHODS, run_demo

FAST = ["demo", "--steps", "2", "--repeats", "1"]


@pytest.fixture
def runner() -> CliRunner:
    return CliRunner()


def test_the_demo_measures_every_method():
    results = run_demo(steps=2, repeats=1)
    assert [result.method for result in results] == list(METHODS)
    assert all(0 <= number <= 1 for result in results for number in result[1:])


def test_the_demo_repeats_itself_and_another_seed_does_not():
    first, again, other = (run_demo(steps=1, repeats=1, seed=seed) for seed in (0, 0, 1))
    assert first == again
    assert first != other


def test_the_demo_tells_what_it_does():
    told: list[str] = []
    run_demo(steps=1, repeats=2, progress=told.append)
    assert told == [f"{method}: network {number} of 2" for method in METHODS for number in (1, 2)]


def test_the_calibration_term_lowers_the_calibration_error():
    baseline, *with_ace = run_demo(steps=60, repeats=1)
    assert all(result.ace < baseline.ace for result in with_ace)


def test_json_goes_to_stdout_alone(runner):
    result = runner.invoke(app, [*FAST, "--json"])
    assert result.exit_code == 0
    rows = json.loads(result.stdout)
    assert [row["method"] for row in rows] == list(METHODS)
    assert all(set(row) == {"method", "dice", "ace", "ece", "mce"} for row in rows)


def test_a_table_names_every_method(runner):
    result = runner.invoke(app, FAST)
    assert result.exit_code == 0
    assert all(method in result.stdout for method in METHODS)


def test_the_demo_is_the_public_function(runner):
    rows = json.loads(runner.invoke(app, [*FAST, "--seed", "3", "--json"]).stdout)
    expected = run_demo(steps=2, repeats=1, seed=3)
    torch.testing.assert_close([row["ace"] for row in rows], [result.ace for result in expected])


@pytest.mark.parametrize("arguments", [["demo", "--steps", "0"], ["demo", "--colour"], ["dance"]])
def test_misuse_ends_with_two(runner, arguments):
    assert runner.invoke(app, arguments).exit_code == 2


def test_the_version_is_printed(runner):
    assert runner.invoke(app, ["--version"]).stdout.strip() == __version__


def test_python_m_segcal_is_segcal():
    done = subprocess.run(
        [sys.executable, "-m", "segcal", "--help"], capture_output=True, text=True, timeout=60, check=True
    )
    assert "demo" in done.stdout
    assert "Usage: segcal" in done.stdout
