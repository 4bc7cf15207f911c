"""Dice-optimal decisions against rankseg (pip install rankseg): time, agreement, and the cost of curves of a cohort."""

from __future__ import annotations

import os

import numpy as np
import torch
from rankseg import RankSEG

from measure import alternate, write_rows
from phantom import logits_and_labels
from segcal import Binning, BinStatistics
from segcal.decisions import threshold_curves
from segcal.evaluation.options import Options
from segcal.evaluation.rules import choose_classes
from segcal.evaluation.voxels import measure_voxels
from segcal.quality.deciding import cutting_of, read_rule

OPTIONS = Options()
THREADS = os.cpu_count() or 1


def decode(probabilities: np.ndarray) -> np.ndarray:
    """The labels of rule "dice" of one case (class, voxel) in memory: all sums of `decide`, checks included."""
    sums = measure_voxels(probabilities, None, OPTIONS, threads=THREADS).sums
    cuts = cutting_of(read_rule("dice"), OPTIONS.fine_bins)(sums.bins[0, 1:], sums.bins[1, 1:])
    return choose_classes(probabilities, cuts, OPTIONS.fine_bins, threads=THREADS).decided


def promised(probabilities: np.ndarray, labels: np.ndarray) -> float:
    """Mean expected Dice of the foreground classes."""
    masks = labels == np.arange(1, len(probabilities))[:, None]
    wide = probabilities[1:].astype(np.float64)
    return float((2 * (wide * masks).sum(1) / (masks.sum(1) + wide.sum(1))).mean())


def against_rankseg() -> list[dict[str, object]]:
    logits, _ = logits_and_labels(1, 4, 128)
    tensor = (logits + torch.randn(logits.shape, generator=torch.Generator().manual_seed(0))).softmax(1)
    values = tensor[0].flatten(1).numpy()
    rows: list[dict[str, object]] = []
    for name, screening in (("rankseg RMA", False), ("rankseg RMA, safe_screening", "auto")):
        theirs = RankSEG(metric="dice", output_mode="multiclass", solver="RMA", safe_screening=screening)
        labels, ours = theirs.predict(tensor).flatten().numpy(), decode(values)
        row = {"what": f"decide for Dice / {name}", "data": "1x4x128^3", "must": "<= 0.2"}
        row |= alternate(lambda: decode(values), lambda: theirs.predict(tensor), repetitions=5)  # noqa: B023
        row |= {"same": float((labels == ours).mean())}
        rows.append(row | {"ours_dice": promised(values, ours), "theirs_dice": promised(values, labels)})
    return rows


def curves() -> list[dict[str, object]]:
    """All thresholds of 200 cases and 15 classes, against merely adding up as many numbers."""
    generator = torch.Generator().manual_seed(0)
    count = torch.randint(0, 1000, (200, 15, OPTIONS.fine_bins), generator=generator).double()
    stats = BinStatistics(count, count / 2, count / 3, Binning(OPTIONS.fine_bins))
    times = alternate(lambda: threshold_curves(stats), lambda: count.cumsum(-1), repetitions=5)
    return [
        {"what": "threshold_curves / one cumulative sum", "data": "200 cases x 15 classes", "must": "ours_s <= 2"}
        | times
    ]


if __name__ == "__main__":
    write_rows("decisions_rankseg", against_rankseg())
    write_rows("decisions_curves", curves())
