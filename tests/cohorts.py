"""Small cases for tests that read folders: random labels, probabilities that are mostly right, what came of them."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

SHAPE = (9, 8, 7)


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
