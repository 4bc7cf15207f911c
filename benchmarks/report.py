"""The report of a large cohort: how long it takes to write, and how large it is."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

import torch

from measure import write_rows
from segcal import Binning, BinStatistics, Evaluation, OverlapCounts, ScoreSums
from segcal.decisions import DecisionSums
from segcal.evaluation.fine import packed
from segcal.report import build_report

BLOCK = 100  # cases that are made at a time


def cohort(cases: int, classes: int, *, sharpness: float, seed: int, filled: float = 1.0) -> Evaluation:
    """Sums as real predictions have them: most voxels background, probabilities too extreme, bins filled by chance."""
    generator = torch.Generator().manual_seed(seed)
    starts = range(0, cases, BLOCK)
    parts = [_part(range(i, min(i + BLOCK, cases)), classes, sharpness, filled, generator) for i in starts]
    return Evaluation.concatenate(parts)


def _part(cases: range, classes: int, sharpness: float, filled: float, generator: torch.Generator) -> Evaluation:
    binning = Binning(1200)
    shape = (len(cases), classes + 1, binning.bins)

    def rand(*shape: int) -> torch.Tensor:
        return torch.rand(shape, generator=generator, dtype=torch.float64)

    center = ((torch.arange(binning.bins) + 0.5) / binning.bins).float().double()  # as probabilities are
    wobble = torch.randn(*shape[:2], 1, generator=generator, dtype=torch.float64) * 0.3
    share = torch.sigmoid(torch.logit(center) / sharpness + wobble)
    count = ((200 * rand(*shape)).floor() + 1) * (rand(*shape) < filled)
    count[..., 0] = 1e6
    share[..., 0] = 1e-4
    label_sum = (count * share).floor()
    # The same in every method, or they would not have been evaluated against the same labels.
    true = 5000 + 100 * (torch.tensor(cases, dtype=torch.float64) % 200)[:, None].repeat(1, classes + 1)
    both = (true * (0.7 + 0.2 * rand(*true.shape))).floor()
    predicted = (true * (0.9 + 0.2 * rand(*true.shape))).floor()
    voxels = count.sum(-1)
    sure = (both + true) / 2 + 100 * rand(*true.shape)
    names = [f"case_{i:05}" for i in cases]
    return Evaluation(
        packed(BinStatistics(count, count * center, label_sum, binning)),
        OverlapCounts(predicted, true, both),
        ScoreSums(0.01 * voxels, 0.05 * voxels, voxels),
        None,
        cases=tuple(names),
        classes=("background", *(f"organ {c}" for c in range(1, classes + 1))),
        has_background=True,
        decisions=DecisionSums(sure, true, torch.full_like(true, 0.0015)),
        provenance={"files": {name: {"bytes": 1 << 20, "changed_ns": i} for i, name in enumerate(names)}},
    )


def measure(cases: int, classes: int) -> dict[str, object]:
    methods = {
        name: cohort(cases, classes, sharpness=sharpness, seed=seed)
        for seed, (name, sharpness) in enumerate({"DSC+CE": 2.0, "DSC+CE+soft ACE": 1.2}.items())
    }
    with tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        path = build_report(methods, Path(folder) / "report.html")
        seconds = time.perf_counter() - start
        size = path.stat().st_size / 1e6
    return {
        "data": f"{cases} cases x {classes} classes x 2 methods",
        "must": "<= 30 s, <= 15 MB",
        "s": seconds,
        "MB": size,
    }


if __name__ == "__main__":
    write_rows("report", [measure(50, 3), measure(200, 15)])
