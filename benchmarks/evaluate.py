"""Evaluation against MONAI's metrics and against merely reading the files; memory over many and over huge cases."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path

import nibabel
import numpy as np
import torch
from monai.metrics import CalibrationErrorMetric, DiceMetric

from measure import HIGH_WATER, alternate, write_rows
from phantom import logits_and_labels
from segcal.evaluation.options import Options
from segcal.evaluation.voxels import measure_voxels
from segcal.volumes.steps import in_steps


def against_monai() -> list[dict[str, object]]:
    """ECE, ACE, MCE, Brier and Dice of one case in memory."""
    logits, labels = logits_and_labels(1, 16, 128)
    probabilities = logits.softmax(1)
    one_hot = torch.nn.functional.one_hot(labels[:, 0], 16).movedim(-1, 1).contiguous()
    values, truth = probabilities[0].flatten(1).numpy(), labels.flatten().numpy()

    def ours():
        return measure_voxels(values, truth, Options()).sums

    def theirs():
        for reduction in ("expected", "average", "maximum"):
            metric = CalibrationErrorMetric(num_bins=20, calibration_reduction=reduction)
            metric(probabilities, one_hot)
            metric.aggregate()
        predicted = torch.nn.functional.one_hot(probabilities.argmax(1), 16).movedim(-1, 1)
        dice = DiceMetric()
        dice(predicted, one_hot)
        dice.aggregate()

    row = {"what": "all sums of a case / 3 CalibrationErrorMetric + DiceMetric", "data": "1x16x128^3", "must": "<= 0.1"}
    return [row | alternate(ours, theirs, repetitions=5)]


def write_cases(folder: Path, number: int, size: int, *, steps: int | None = None) -> None:
    """`number` cases of 4 x size^3 probabilities as .nii.gz; a few different ones, linked under many names.

    They are float32, or integers of so many steps.
    """
    (folder / "predictions").mkdir(parents=True)
    (folder / "labels").mkdir()
    originals = []
    for i in range(4):
        logits, labels = logits_and_labels(1, 4, size)
        noise = torch.randn(logits.shape, generator=torch.Generator().manual_seed(i)) * 0.5
        probabilities = (logits + noise).softmax(1)[0].movedim(0, -1).numpy()
        pair = []
        for kind, array in (("predictions", probabilities), ("labels", labels[0, 0].to(torch.uint8).numpy())):
            path = folder / f"{kind}-{i}.nii.gz"
            if kind == "predictions" and steps is not None:
                array = np.moveaxis(in_steps(np.moveaxis(array, -1, 0), steps), 0, -1)
            image = nibabel.Nifti1Image(array, np.eye(4))
            image.header.set_slope_inter(1 / steps if steps and kind == "predictions" else 1, 0)
            content = image.to_bytes()
            path.write_bytes(gzip.compress(content, compresslevel=1))
            pair.append(path)
        originals.append(pair)
    for i in range(number):
        for kind, path in zip(("predictions", "labels"), originals[i % 4], strict=True):
            (folder / kind / f"case_{i:03}.nii.gz").hardlink_to(path)


def command(folder: Path, out: str, *options: str) -> None:
    arguments = ["evaluate", str(folder / "predictions"), str(folder / "labels"), "--out", str(folder / out), *options]
    subprocess.run([sys.executable, "-m", "segcal", *arguments], check=True, capture_output=True)


READ = """
import sys, nibabel
from pathlib import Path
for path in sorted((Path(sys.argv[1]) / "predictions").iterdir()):
    nibabel.load(path).get_fdata(dtype="float32")
"""


def against_reading(folder: Path) -> list[dict[str, object]]:
    rows = []
    for kind, steps in (("float32", None), ("uint8", 255)):
        write_cases(folder / kind, 20, 128, steps=steps)
        runs = iter(range(1000))
        times = alternate(
            partial(lambda folder, runs: command(folder, f"out-{next(runs)}", "--workers", "2"), folder / kind, runs),
            partial(subprocess.run, [sys.executable, "-c", READ, str(folder / kind)], check=True),
            repetitions=3,
        )
        row = {
            "what": "segcal evaluate, 2 workers / nibabel only reading",
            "data": f"20 x 4x128^3 .nii.gz, {kind}",
            "must": "<= 1" if steps is None else "",
        }
        rows.append(row | times)
    return rows


PEAK = (
    HIGH_WATER
    + """
import json, sys
from segcal.evaluation.cohort import evaluate
if __name__ == "__main__":
    outcome = evaluate(sys.argv[1] + "/predictions", sys.argv[1] + "/labels", sys.argv[2])
    peak = high_water()  # before the sums of all cases are unpacked to be checked
    count = outcome.evaluation.statistics.count.sum(-1).max().item()
    print(json.dumps({"peak": peak, "count": count, "failures": [f.message for f in outcome.failures]}))
"""
)


def peak(folder: Path, out: str) -> dict[str, float]:
    done = subprocess.run([sys.executable, "-c", PEAK, str(folder), str(folder / out)], check=True, capture_output=True)
    return json.loads(done.stdout)


def memory(folder: Path) -> list[dict[str, object]]:
    rows: list[dict[str, object]] = []
    peaks = {}
    for number in (20, 200):
        write_cases(folder / str(number), number, 128)
        peaks[number] = peak(folder / str(number), "out")["peak"]
        rows.append(
            {"what": f"{number} cases, peak", "data": "4x128^3 .nii.gz", "must": "", "GiB": peaks[number] / 2**30}
        )
    rows.append({"what": "200 cases / 20 cases", "data": "", "must": "<= 1.05", "GiB": peaks[200] / peaks[20]})
    huge = folder / "huge"
    (huge / "predictions").mkdir(parents=True)
    (huge / "labels").mkdir()
    shape = (512, 512, 400)
    labels = np.zeros(shape, dtype=np.uint8)
    labels[100:200, 100:200, 100:200] = 1
    nibabel.save(nibabel.Nifti1Image(labels, np.eye(4)), huge / "labels" / "a.nii.gz")
    for suffix in (".nii", ".nii.gz"):
        probabilities = np.empty((*shape, 4), dtype=np.float32, order="F")
        probabilities[...] = (0.97, 0.01, 0.01, 0.01)
        path = huge / "predictions" / f"a{suffix}"
        if suffix == ".nii":
            nibabel.save(nibabel.Nifti1Image(probabilities, np.eye(4)), path)
        else:
            with gzip.open(path, "wb", compresslevel=1) as file:
                file.write((huge / "predictions" / "a.nii").read_bytes())
            (huge / "predictions" / "a.nii").unlink()
        del probabilities
        found = peak(huge, f"out{suffix}")
        assert found["count"] == 512 * 512 * 400, found
        rows.append(
            {
                "what": f"peak memory, one case {suffix}",
                "data": "4x512x512x400",
                "must": "<= 4",
                "GiB": found["peak"] / 2**30,
            }
        )
    return rows


if __name__ == "__main__":
    write_rows("evaluate_case", against_monai())
    with tempfile.TemporaryDirectory() as folder:
        write_rows("evaluate_reading", against_reading(Path(folder) / "reading"))
        write_rows("evaluate_memory", memory(Path(folder) / "memory"))
