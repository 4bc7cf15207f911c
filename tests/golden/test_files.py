"""Files that version 0.3.0 wrote can be read and give the same tables."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import pytest
from golden.snapshot import run, write_inputs
from golden.test_snapshot import assert_same_text
from golden.write_files import METHODS, transform
from layouts import write_acdc

from segcal import Evaluation, compare
from segcal.comparison.tables import write_comparison

FILES = Path(__file__).parent / "files-0.3.0"


def read_text(name: str) -> str:
    return (FILES / name).read_text(encoding="utf-8")


def test_evaluations_give_the_same_comparison(tmp_path):
    evaluations = {name: Evaluation.load(FILES / f"{name}.npz") for name in ("evaluation", "other-evaluation")}
    for path in write_comparison(compare(evaluations, patients="none"), tmp_path):
        assert_same_text(path.read_text(encoding="utf-8"), read_text(path.name))


@pytest.mark.parametrize("method", METHODS)
def test_calibrator_gives_the_same_logits(method):
    expected = np.load(FILES / "transformed.npz")[method]
    np.testing.assert_allclose(
        transform(FILES / f"{method}.json", n_classes=len(expected)), expected, rtol=1e-5, atol=1e-6
    )


def test_quality_model_gives_the_same_queue(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_inputs(Path())
    run("quality", "apply", str(FILES / "quality.json"), "maps", "--out", "queue")
    assert_same_text(Path("queue/queue.csv").read_text(encoding="utf-8"), read_text("queue.csv"))


def test_run_gives_the_same_evaluation(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_acdc(Path("acdc"), patients=4, test_patients=2)
    run("predict", str(FILES / "run"), "--data", "acdc/database", "--evaluate", "--out", "predicted")
    rows, expected = read_rows(Path("predicted/cases.csv")), read_rows(FILES / "run-cases.csv")
    assert rows.keys() == expected.keys()
    assert list(rows.values()) == pytest.approx(list(expected.values()), rel=1e-3, abs=1e-4)  # float32 convolutions


def read_rows(path: Path) -> dict[tuple[str, str, str], float]:
    with path.open(newline="", encoding="utf-8") as file:
        return {(row["case"], row["class"], row["metric"]): float(row["value"]) for row in csv.DictReader(file)}
