"""Commands whose stdout is closed, full, or has no code for a sign end in order; and what --help shows."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import nibabel
import numpy as np
import pytest
import tiny
from typer.testing import CliRunner

from segcal.cli import app
from segcal.datasets import make_phantom, make_split, open_dataset, write_split
from segcal.training.config import read_config

NAME = "Größe ≤ λ"  # the first word is in cp1252, the others are not


def evaluated(folder: Path, seed: int) -> Path:
    """An evaluation of three cases with a class of a foreign name."""
    random = np.random.default_rng(seed)
    for i in range(3):
        labels = np.random.default_rng(i).integers(0, 2, (8, 8, 4)).astype(np.uint8)
        first = random.uniform(0.1, 0.9, (8, 8, 4)).astype(np.float32)
        for name, array in {"maps": np.stack([first, 1 - first], -1), "labels": labels}.items():
            (folder / name).mkdir(parents=True, exist_ok=True)
            nibabel.save(nibabel.Nifti1Image(array, np.eye(4)), folder / name / f"case_{i}.nii.gz")
    words = [
        "evaluate",
        folder / "maps",
        folder / "labels",
        "--out",
        folder / "out",
        "--class-names",
        f"background,{NAME}",
    ]
    assert CliRunner().invoke(app, list(map(str, words))).exit_code == 0
    return folder


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("streams")
    evaluated(folder / "one", 1)
    evaluated(folder / "two", 2)
    make_phantom(folder, cases=10)
    run = tiny.untrained_run(folder)
    dataset = open_dataset("decathlon", read_config(run / "config.toml").data.root)
    write_split(make_split(dataset), run / "split.txt")
    return folder


def commands(data: Path) -> dict[str, list[object]]:
    """Each that prints tables, JSON or lists."""
    one, two = data / "one", data / "two"
    maps = (one / "maps", one / "labels", "--class-names", f"background,{NAME}")
    fit = ("calibrate", "fit", *maps, "--method", "temperature", "--out", data / "c.json", "--patients", "none")
    compared = (
        "compare",
        one / "out",
        two / "out",
        "--patients",
        "none",
        "--resamples",
        50,
        "--out",
        data / "compared",
    )
    return {
        "evaluate": ["evaluate", *maps, "--out", one / "out"],
        "evaluate --json": ["evaluate", *maps, "--out", one / "out", "--json"],
        "predict --evaluate": ["predict", data / "run", "--evaluate", "--split", "all", "--out", data / "measured"],
        "compare": [*compared],
        "compare --json": [*compared, "--json"],
        "fit": [*fit, "--folds", 3],
        "methods": ["calibrate", "methods"],
        "datasets": ["datasets"],
        "check": ["datasets", "check", "phantom", data],
        "check --json": ["datasets", "check", "phantom", data, "--json"],
        "study list": ["study", "list"],
        "study plan": ["study", "plan", "phantom", "--data", data],
        "help": ["evaluate", "--help"],
        "help of all": ["--help"],
        "version": ["--version"],
    }


NAMES = list(commands(Path()))


def run(words: list[object], *, stdout: int = subprocess.PIPE, **settings: str) -> subprocess.CompletedProcess[bytes]:
    command = [sys.executable, "-m", "segcal", *map(str, words)]
    return subprocess.run(
        command, stdout=stdout, stderr=subprocess.PIPE, env=os.environ | settings, timeout=120, check=False
    )


@pytest.mark.parametrize("name", NAMES)
def test_signs_without_a_code_are_replaced_and_boxes_are_ascii(name, data, monkeypatch, capfdbinary):
    """In one process, but with streams as Python opens them where the encoding is ASCII."""
    with open(os.dup(1), "w", encoding="ascii", errors="strict") as narrow:
        monkeypatch.setattr(sys, "stdout", narrow)
        with pytest.raises(SystemExit) as ended:
            app(list(map(str, commands(data)[name])))
        assert not ended.value.code
    printed = capfdbinary.readouterr().out.decode("ascii")
    assert printed.strip()
    if name.endswith("--json"):
        assert json.loads(printed)
    if name == "compare --json":
        assert NAME in {entry["label"] for entry in json.loads(printed)["entries"]}


@pytest.mark.parametrize("encoding", ["cp1252", "ascii"])
def test_tables_print_in_the_encodings_of_windows(encoding, data):
    done = run(commands(data)["evaluate"], PYTHONIOENCODING=encoding)
    assert done.returncode == 0, done.stderr
    assert ("Größe ? ?" if encoding == "cp1252" else "Gr??e ? ?") in done.stdout.decode(encoding)
    assert b"Traceback" not in done.stderr


@pytest.mark.parametrize("name", NAMES)
def test_a_full_stdout_is_a_sentence(name, data, monkeypatch, capfd):
    with open("/dev/full", "w", encoding="utf-8") as full:
        monkeypatch.setattr(sys, "stdout", full)
        with pytest.raises(SystemExit) as ended:
            app(list(map(str, commands(data)[name])))
    assert ended.value.code == 1
    said = " ".join(capfd.readouterr().err.split())
    assert said.count("OSError: the output cannot be written: No space left on device.") == 1
    assert "Traceback" not in said


@pytest.mark.parametrize("name", ["evaluate", "study list", "help", "help of all"])
def test_a_full_stdout_is_a_sentence_to_a_process(name, data):
    with open("/dev/full", "wb") as full:
        done = run(commands(data)[name], stdout=full.fileno())
    assert done.returncode == 1
    assert done.stderr.decode().count("No space left on device") == 1
    assert b"Traceback" not in done.stderr
    assert b"Exception ignored" not in done.stderr


@pytest.mark.parametrize("name", ["evaluate", "evaluate --json", "study list"])
def test_a_stdout_whose_reader_is_gone_ends_quietly(name, data):
    reading, writing = os.pipe()
    os.close(reading)
    try:
        done = run(commands(data)[name], stdout=writing)
    finally:
        os.close(writing)
    assert done.returncode == 141
    assert not re.search(rb"Traceback|Error|Exception", done.stderr)


@pytest.mark.parametrize("closed", [">&-", ">&- 2>&-"])
def test_a_stdout_that_is_closed_swallows_everything(closed, data, tmp_path):
    words = ["evaluate", data / "one" / "maps", data / "one" / "labels", "--out", tmp_path / "out", "--workers", 2]
    command = " ".join(f"'{word}'" for word in [sys.executable, "-m", "segcal", *words])
    done = subprocess.run(f"{command} {closed}", shell=True, stderr=subprocess.PIPE, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert b"Traceback" not in done.stderr
    assert (tmp_path / "out" / "cases.csv").is_file()


def test_methods_are_described_without_docstrings():
    done = subprocess.run(
        [sys.executable, "-OO", "-m", "segcal", "calibrate", "methods"], capture_output=True, text=True, check=True
    )
    lines = done.stdout.splitlines()
    assert len(lines) == 8
    assert all(len(line.partition(": ")[2]) > 20 for line in lines)


VERBS = ["", "evaluate", "compare", "report", "datasets", "datasets check", "train", "predict", "demo",
         "calibrate", "calibrate fit", "calibrate apply", "decide", "audit", "study", "study run", "study plan",
         "study status", "study report", "doctor"]  # fmt: skip


@pytest.mark.parametrize("verb", VERBS)
def test_help_comes_with_one_letter_and_shows_no_value_of_flags(verb):
    short, long = (
        CliRunner().invoke(app, [*verb.split(), option], env={"COLUMNS": "80"}, terminal_width=80)
        for option in ("-h", "--help")
    )
    assert short.exit_code == long.exit_code == 0
    assert short.stdout == long.stdout
    assert not re.search("bool", long.stdout, re.IGNORECASE)
    assert max(map(len, long.stdout.splitlines())) <= 80


@pytest.mark.parametrize(
    "words",
    [
        ["compare", "one/out", "two/out", "--out", "compared", "--patients", "none"],
        ["report", "one/out", "--out", "report.html", "--patients", "none"],
        ["calibrate", "fit", "one/maps", "one/labels", "--method", "temperature", "--out", "c.json"],
        ["datasets", "split", "phantom", ".", "--out", "split.txt"],
        ["demo"],
    ],
    ids=lambda words: words[0],
)
def test_a_seed_below_zero_is_refused_in_a_sentence(words, data, monkeypatch):
    monkeypatch.chdir(data)
    done = CliRunner().invoke(app, [*words, "--seed", "-1"])
    assert done.exit_code == 2, done.output
    assert "Invalid value for '--seed'" in " ".join(done.stderr.replace("│", " ").split())
