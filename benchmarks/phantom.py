"""Logits and labels of the kind the benchmarks need: most voxels background, blurred and noisy boundaries."""

from __future__ import annotations

import torch
from torch import Tensor


def logits_and_labels(cases: int, classes: int, size: int = 96) -> tuple[Tensor, Tensor]:
    """Float32 logits (case, class, size, size, size) and int64 labels (case, 1, size, size, size) of a few balls."""
    generator = torch.Generator().manual_seed(0)
    axis = torch.linspace(-1, 1, size)
    grid = torch.stack(torch.meshgrid(axis, axis, axis, indexing="ij"))
    labels = torch.zeros(cases, 1, size, size, size, dtype=torch.int64)
    logits = torch.randn(cases, classes, size, size, size, generator=generator)
    logits[:, 0] += 8  # a trained network is sure of most background: one bin holds most voxels
    for case in range(cases):
        for c in range(1, classes):
            center = torch.rand(3, generator=generator) * 1.2 - 0.6
            depth = 0.22 - (grid - center.view(3, 1, 1, 1)).norm(dim=0)
            labels[case, 0][depth > 0] = c
            logits[case, c] += 8 + 60 * (depth - 0.05).clamp(-0.3, 0.2)
    return logits, labels
