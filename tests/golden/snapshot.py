"""Snapshot of what the commands print and write, compared with later versions by `test_snapshot.py`.

Run `PYTHONPATH=tests python -m golden.snapshot` to replace the stored snapshot after an intended change, and read the
diff before committing it.
"""

from __future__ import annotations

import csv
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import chdir
from pathlib import Path

import nibabel
import numpy as np
from numpy.typing import NDArray
from PIL import Image
from scipy import ndimage
from typer.main import get_command
from typer.testing import CliRunner

import segcal
from segcal.cli import app

STORED = Path(__file__).parent / "snapshot"
TABLES = ("*/*.csv", "*/raters/*/cases.csv", "bands/bands/*/summary.csv", "comparison/*.md", "comparison/*.tex")
SHAPE = (16, 14, 8)
N_CASES = 10
EVALUATIONS = {
    "classes": ["evaluate", "maps", "labels", "--background"],
    "logits": ["evaluate", "logits", "labels", "--logits", "--bins", "10"],
    "regions": ["evaluate", "maps", "labels", "--regions", "kits"],
    "sigmoid": ["evaluate", "channels", "masks", "--sigmoid", "--class-names", "whole,core"],
    "raters": ["evaluate", "maps", "labels", "labels-b", "labels-c"],
    "groups": ["evaluate", "maps", "labels", "--groups", "groups.csv"],
    "bands": ["evaluate", "maps", "labels", "--bands", "2,5"],
    "pictures": ["evaluate", "picture-maps", "picture-labels"],
    "members": ["evaluate", "maps", "labels", "--member", "other-maps"],
    "ignored": ["evaluate", "maps", "labels-255", "--ignore-index", "255"],
    "sharper": ["evaluate", "other-maps", "labels"],
    "lesions": ["lesions", "maps", "labels", "--min-size", "2", "--seed", "1"],
}


def softmax(logits: NDArray[np.float64]) -> NDArray[np.float32]:
    exponentials = np.exp(logits - logits.max(0))
    return (exponentials / exponentials.sum(0)).astype(np.float32)


def make_case(seed: int, shape: tuple[int, ...]) -> tuple[NDArray[np.float64], list[NDArray[np.uint8]]]:
    """Return logits of shape (class, *shape) and the labels of three raters: smooth blobs of four classes."""
    random = np.random.default_rng(seed)
    logits = np.stack([ndimage.gaussian_filter(random.normal(size=shape), 1.5) for _ in range(4)])
    logits = logits / logits.std() * 2 + np.array([1.0, 0, 0, -0.5]).reshape(4, *[1] * len(shape))
    noise = [random.normal(size=logits.shape) for _ in range(3)]
    return logits * 1.5, [np.argmax(logits + each, axis=0).astype(np.uint8) for each in noise]


def write_inputs(folder: Path) -> None:
    """Write all cohorts that the commands read."""

    def save(name: str, array: NDArray, affine: NDArray | None = None) -> None:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        nibabel.Nifti1Image(array, np.diag([1.0, 1.0, 2.5, 1.0]) if affine is None else affine).to_filename(path)

    patients = [["case", "patient"]]
    groups = [["patient", "site", "sex"]]
    for i in range(N_CASES):
        logits, (labels, second, third) = make_case(i, SHAPE)
        if i == 3:
            labels[labels == 3] = 1  # one case lacks a class
        name = f"case_{i:02d}"
        maps = softmax(logits)
        save(f"maps/{name}.nii.gz", np.moveaxis(maps, 0, -1))
        save(f"other-maps/{name}.nii.gz", np.moveaxis(softmax(1.5 * logits), 0, -1))
        save(f"logits/{name}.nii.gz", np.moveaxis(logits.astype(np.float32), 0, -1))
        save(f"labels/{name}.nii.gz", labels)
        save(f"labels-b/{name}.nii.gz", second)
        save(f"labels-c/{name}.nii.gz", third)
        save(f"labels-255/{name}.nii.gz", np.where(np.indices(SHAPE)[0] < 2, 255, labels).astype(np.uint8))
        save(f"channels/{name}.nii.gz", np.moveaxis(np.stack([1 - maps[0], maps[2] + maps[3]]), 0, -1))
        save(f"masks/{name}.nii.gz", np.moveaxis(np.stack([labels > 0, labels > 1]).astype(np.uint8), 0, -1))
        picture_logits, (picture_labels, *_) = make_case(100 + i, (24, 20))
        for kind in ("picture-maps", "picture-labels"):
            (folder / kind).mkdir(exist_ok=True)
        np.savez(folder / f"picture-maps/{name}.npz", probabilities=softmax(picture_logits))
        Image.fromarray(picture_labels).save(folder / f"picture-labels/{name}.png")
        patients.append([name, f"patient{i // 2}"])
        groups.append([name, "north" if i < 5 else "south", "f" if i % 2 else "m"])
    write_csv(folder / "patients.csv", patients)
    write_csv(folder / "groups.csv", groups)


def write_csv(path: Path, rows: list[list[str]]) -> None:
    with path.open("w", newline="") as file:
        csv.writer(file).writerows(rows)


def run(*arguments: str) -> None:
    result = CliRunner().invoke(app, list(arguments), catch_exceptions=False)
    if result.exit_code:
        raise SystemExit(f"segcal {' '.join(arguments)} failed:\n{result.output}")


def run_commands() -> None:
    """Run every command on the cohorts in the working directory."""
    for name, arguments in EVALUATIONS.items():
        run(*arguments, "--out", f"out/{name}")
    run("calibrate", "fit", "maps", "labels", "--method", "temperature", "--patients", "patients.csv",
        "--folds", "5", "--out", "out/calibrator.json")  # fmt: skip
    run("evaluate", "maps", "labels", "--calibrator", "out/calibrator.json", "--out", "out/calibrated")
    run("compare", "classes=out/classes", "sharper=out/sharper", "calibrated=out/calibrated", "--out", "out/comparison")
    run("quality", "fit", "out/classes", "--out", "out/quality.json")
    run("quality", "apply", "out/quality.json", "maps", "--out", "out/queue")
    run("decide", "maps", "--rule", "argmax", "--out", "out/decided")


def help_texts() -> Iterator[tuple[str, str]]:
    """Yield the name and the help of every command."""

    def walk(command, words):
        yield " ".join(words), CliRunner().invoke(app, [*words[1:], "--help"], env={"COLUMNS": "100"}).output
        for name, child in sorted(getattr(command, "commands", {}).items()):
            yield from walk(child, [*words, name])

    yield from walk(get_command(app), ["segcal"])


def take(folder: Path) -> None:
    """Write the snapshot: the help of every command, the public names, the tables that commands write."""
    for name, text in help_texts():
        path = folder / "help" / f"{name.replace(' ', '-')}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("\n".join(line.rstrip() for line in text.splitlines()) + "\n", encoding="utf-8")
    (folder / "public_names.txt").write_text("\n".join(sorted(segcal.__all__)) + "\n", encoding="utf-8")
    with tempfile.TemporaryDirectory() as work, chdir(work):
        write_inputs(Path())
        run_commands()
        for path in sorted(path for pattern in TABLES for path in Path("out").glob(pattern)):
            target = folder / "tables" / path.relative_to("out")
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, target)
        calibrator = json.loads(Path("out/calibrator.json").read_text(encoding="utf-8"))
        (folder / "temperature.json").write_text(json.dumps(calibrator, indent=1), encoding="utf-8")


if __name__ == "__main__":
    os.environ.pop("SEGCAL_DATA", None)
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else STORED
    shutil.rmtree(target, ignore_errors=True)
    take(target)
