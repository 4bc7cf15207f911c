"""Write files in the formats of this version, which `test_files.py` reads with later versions.

Run `PYTHONPATH=tests python -m golden.write_files tests/golden/files-VERSION` once per version whose files must stay
readable.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from contextlib import chdir
from pathlib import Path

import numpy as np
import torch
from golden.snapshot import make_case, run, write_inputs
from layouts import write_acdc
from tiny import changes

from segcal import load_calibrator

METHODS = ("temperature", "class-temperature", "vector", "dirichlet", "platt", "beta", "isotonic", "local-temperature")


def write_files(folder: Path) -> None:
    write_inputs(Path())
    for name, maps in (("evaluation", "maps"), ("other-evaluation", "other-maps")):
        run("evaluate", maps, "labels", "--out", name)
        arrays = dict(np.load(f"{name}/evaluation.npz"))
        arrays["header"] = np.array(str(arrays["header"]).replace(str(Path.cwd()), "/data"))
        np.savez(folder / f"{name}.npz", **arrays)
        shutil.copyfile(f"{name}/summary.csv", folder / f"{name}-summary.csv")
    run("compare", "evaluation", "other-evaluation", "--patients", "none", "--out", "comparison")
    for suffix in ("csv", "md", "tex"):
        shutil.copyfile(f"comparison/comparison.{suffix}", folder / f"comparison.{suffix}")
    transformed = {}
    for method in METHODS:
        maps, kind = ("channels", "masks") if method in ("platt", "beta", "isotonic") else ("maps", "labels")
        options = ["--sigmoid"] if kind == "masks" else []
        path = folder / f"{method}.json"
        run("calibrate", "fit", maps, kind, *options, "--method", method, "--folds", "0", "--out", str(path))
        transformed[method] = transform(path, n_classes=2 if kind == "masks" else 4)
    np.savez_compressed(folder / "transformed.npz", **transformed)
    run("quality", "fit", "evaluation", "--out", str(folder / "quality.json"))
    run("quality", "apply", str(folder / "quality.json"), "maps", "--out", "queue")
    shutil.copyfile("queue/queue.csv", folder / "queue.csv")
    write_run(folder / "run")
    run("predict", str(folder / "run"), "--data", "acdc/database", "--evaluate", "--out", "predicted")
    shutil.copyfile("predicted/cases.csv", folder / "run-cases.csv")


def write_run(folder: Path) -> None:
    """Train a tiny network for two epochs."""
    write_acdc(Path("acdc"), patients=4, test_patients=2)
    options = [word for change in changes(epochs=2) for word in ("--set", change)]
    run("train", "--dataset", "acdc", "--data-root", "acdc/database", "--method", "soft-ace", *options,
        "--out", str(folder))  # fmt: skip
    config = folder / "config.toml"
    config.write_text(config.read_text(encoding="utf-8").replace(str(Path.cwd()), "/data"), encoding="utf-8")
    shutil.rmtree(folder / "tensorboard")


def transform(path: Path, *, n_classes: int) -> np.ndarray:
    """Return the calibrated logits of one case."""
    logits, _ = make_case(50, (8, 7, 4))
    volume = torch.from_numpy(logits[:n_classes].astype(np.float32))
    return load_calibrator(path).transform(volume).double().numpy()


if __name__ == "__main__":
    target = Path(sys.argv[1]).resolve()
    target.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as work, chdir(work):
        write_files(target)
