"""Evaluations with known gaps: voxels at the centers of bins, and how often a class is there in each."""

from __future__ import annotations

import torch

from segcal import Binning, BinStatistics, Evaluation, OverlapCounts, ScoreSums

BINS = 20
CENTERS = [(k + 0.5) / BINS for k in range(BINS)]
OVER = [c - 0.2 if c > 0.5 else c for c in CENTERS]
UNDER = [c + 0.15 if c < 0.5 else c for c in CENTERS]
EXTREME = [c + 0.1 if c < 0.5 else c - 0.1 for c in CENTERS]
CAUTIOUS = [max(0.0, c - 0.1) if c < 0.5 else min(1.0, c + 0.1) for c in CENTERS]


def make(*frequencies, cases=6, names=None, classes=None, absent=(), dice=0.8, wobble=0.0, nll=0.2, provenance=None):
    """1,000 voxels at the center of each of 20 bins; a list of frequencies for each class, the same in every case.

    `absent` are (case, class) pairs; `wobble` is added to the frequencies of odd cases and taken from even ones.
    """
    binning = Binning(1200)
    count = torch.zeros(cases, len(frequencies), 1200, dtype=torch.float64)
    labels = torch.zeros_like(count)
    for k in range(BINS):
        count[..., 60 * k + 30] = 1000
        for c, of_class in enumerate(frequencies):
            labels[:, c, 60 * k + 30] = 1000 * of_class[k]
            labels[::2, c, 60 * k + 30] -= 1000 * wobble
            labels[1::2, c, 60 * k + 30] += 1000 * wobble
    labels = labels.clamp(min=0).minimum(count)
    confidence = count * ((torch.arange(1200, dtype=torch.float64)) / 1200)
    true = torch.full((cases, len(frequencies)), 100.0, dtype=torch.float64)
    for case, c in absent:
        true[case, c] = 0
        labels[case, c] = 0
    voxels = count.sum(-1)
    return Evaluation(
        BinStatistics(count, confidence, labels, binning),
        OverlapCounts(torch.full_like(true, 100.0), true, (dice * true).round()),
        ScoreSums(0.1 * voxels, nll * voxels, voxels),
        None,
        cases=tuple(names or [f"case_{i}" for i in range(cases)]),
        classes=tuple(classes or ["liver", "tumour", "cyst"][: len(frequencies)]),
        provenance=provenance or {},
        joint=ScoreSums(0.1 * voxels[:, :1], nll * voxels[:, :1], voxels[:, :1]),
    )
