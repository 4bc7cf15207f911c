"""What an installed segcal must do at least: run by the Python that has it, `python tests/smoke.py [train]`.

Without the extra only what `pip install segcal` brings is used. Run by `make wheel` in an empty environment.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import nibabel
import numpy as np
import torch

import segcal


def run(*arguments: object, code: int = 0) -> str:
    """What a command says; its exit code must be this one."""
    command = [sys.executable, "-m", "segcal", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    said = done.stdout + done.stderr
    assert done.returncode == code, f"{' '.join(command)} ended with {done.returncode}:\n{said}"
    assert "Traceback" not in said, said
    return said


def make_cases(folder: Path) -> None:
    random = np.random.default_rng(0)
    for i in range(4):
        labels = (random.random((12, 12, 8)) < 0.3).astype(np.uint8)
        foreground = np.clip(0.2 + 0.5 * labels + random.normal(0, 0.1, labels.shape), 0.01, 0.99)
        maps = np.stack([1 - foreground, foreground], -1).astype(np.float32)
        for name, array in (("maps", maps), ("labels", labels)):
            (folder / name).mkdir(exist_ok=True)
            nibabel.Nifti1Image(array, np.eye(4)).to_filename(folder / name / f"case_{i}.nii.gz")


def base(folder: Path) -> None:
    logits = torch.randn(1, 3, 8, 8, requires_grad=True)
    loss = segcal.SegmentationLoss(binning=segcal.Binning(20, kernel="triangular"))
    loss(logits, torch.randint(0, 3, (1, 8, 8))).backward()
    assert logits.grad is not None
    make_cases(folder)
    maps, labels = folder / "maps", folder / "labels"
    run("evaluate", maps, labels, "--out", folder / "before", "--workers", 2)
    run("calibrate", "fit", maps, labels, "--method", "temperature", "--out", folder / "calibrator.json")
    run("evaluate", maps, labels, "--calibrator", folder / "calibrator.json", "--out", folder / "after")
    run("calibrate", "apply", folder / "calibrator.json", maps, "--out", folder / "calibrated")
    run("compare", folder / "before", folder / "after", "--out", folder / "comparison", "--figures", "png")
    run("report", folder / "before", folder / "after", "--out", folder / "report.html")
    assert (folder / "report.html").read_text(encoding="utf-8").rstrip().endswith("</html>")


def train(folder: Path) -> None:
    assert "hippocampus" in run("study", "list")
    small = ["--set", "training.epochs=1", "--set", "training.validate_every=1"]
    run("study", "plan", "phantom", *small)
    run("demo", "--out", folder / "demo", "--epochs", 1)
    assert (folder / "demo" / "report.html").is_file()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        base(Path(folder))
        if sys.argv[1:] == ["train"]:
            train(Path(folder))
        else:
            assert "pip install 'segcal[train]'" in run("study", "list", code=2)
    print(f"segcal {segcal.__version__} works: {segcal.__file__}")
