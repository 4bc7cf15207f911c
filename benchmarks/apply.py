"""Time of `quality apply` against `evaluate` on the same maps, in turns: python benchmarks/apply.py."""

from __future__ import annotations

import shutil
import statistics
import tempfile
import time
from pathlib import Path

import nibabel
import numpy as np

import segcal
from measure import write_rows

CASES, CLASSES, SHAPE, ROUNDS = 10, 4, (128, 128, 64), 5


def make_case(folder: Path, i: int) -> None:
    """Blurred balls, mostly background."""
    draw = np.random.default_rng(i)
    grid = np.stack(np.meshgrid(*map(np.arange, SHAPE), indexing="ij"))
    logits = [np.zeros(SHAPE)]
    for _ in range(CLASSES - 1):
        center = np.array(SHAPE) * draw.uniform(0.3, 0.7, 3)
        logits.append(draw.uniform(8, 14) - np.sqrt(((grid - center.reshape(3, 1, 1, 1)) ** 2).sum(0)))
    powers = np.exp(np.stack(logits, -1).clip(-8, 8))
    probabilities = (powers / powers.sum(-1, keepdims=True)).astype(np.float32)
    labels = (draw.random((*SHAPE, 1)) > probabilities.cumsum(-1)[..., :-1]).sum(-1).astype(np.uint8)
    for name, values in (("maps", probabilities), ("labels", labels)):
        (folder / name).mkdir(exist_ok=True)
        nibabel.save(nibabel.Nifti1Image(values, np.eye(4)), folder / name / f"case_{i}.nii.gz")


def timed(function, out: Path) -> float:
    shutil.rmtree(out, ignore_errors=True)
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for i in range(CASES):
            make_case(folder, i)
        results, queue = folder / "results", folder / "queue"
        quality = segcal.fit_quality(segcal.evaluate(folder / "maps", folder / "labels", results).evaluation)
        rows = []
        for _ in range(ROUNDS):
            evaluated = timed(lambda: segcal.evaluate(folder / "maps", folder / "labels", results), results)
            applied = timed(lambda: segcal.apply_quality(quality, folder / "maps", queue), queue)
            rows.append((evaluated, applied, applied / evaluated))
    ratio = statistics.median(row[2] for row in rows)
    write_rows("apply", [dict(zip(("evaluate_s", "apply_s", "ratio"), row, strict=True)) for row in rows])
    print(f"quality apply / evaluate, {CASES} cases of {CLASSES} x {'x'.join(map(str, SHAPE))}: {ratio:.2f}")


if __name__ == "__main__":
    main()
