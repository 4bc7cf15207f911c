"""Small cases for tests that read folders: random labels, probabilities that are mostly right, what came of them."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import nibabel
import numpy as np
from numpy.typing import NDArray
from typer.testing import CliRunner

from segcal.cli import app

SHAPE = (9, 8, 7)
STRAIGHT = np.diag([1.0, 1.0, 2.5, 1.0])


def make_case(seed: int, classes: int = 3) -> tuple[NDArray[Any], NDArray[Any]]:
    """Probabilities (x, y, z, class) and labels (x, y, z)."""
    generator = np.random.default_rng(seed)
    labels = generator.integers(0, classes, SHAPE).astype(np.uint8)
    logits = generator.normal(size=(*SHAPE, classes)) + 2 * np.eye(classes)[labels]
    exponentials = np.exp(logits)
    return (exponentials / exponentials.sum(-1, keepdims=True)).astype(np.float32), labels


def values(folder: Path, out: str = "out") -> dict[tuple[str, str, str], float]:
    """What cases.csv holds, by case, class (none: all of them) and metric."""
    with (folder / out / "cases.csv").open() as file:
        return {(r["case"], r["class"], r["metric"]): float(r["value"]) for r in csv.DictReader(file)}


def save(path: Path, array: NDArray[Any], affine: NDArray[Any] = STRAIGHT) -> None:
    """Write a NIfTI file, and the folder that it lies in."""
    path.parent.mkdir(exist_ok=True)
    nibabel.save(nibabel.Nifti1Image(array, affine), path)


def write_cohort(folder: Path, cases: int, affine: NDArray[Any] = STRAIGHT) -> Path:
    """Predictions P and labels L of so many cases of three classes."""
    for i in range(cases):
        for name, array in zip("PL", make_case(i), strict=True):
            save(folder / name / f"case_{i}.nii.gz", array, affine)
    return folder


def run(folder: Path, *options: str, out: str = "out") -> Any:
    """The command that evaluates such a folder."""
    arguments = ["evaluate", str(folder / "P"), str(folder / "L"), "--out", str(folder / out), *options]
    return CliRunner().invoke(app, arguments)
