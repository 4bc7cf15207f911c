"""Evaluations made from a few numbers, so that tests can work out by hand what must come of them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from segcal import Binning, BinStatistics, Evaluation, OverlapCounts, ScoreSums

FINE = 20


def evaluation_of(
    gaps: Tensor,
    dices: Tensor,
    *,
    cases: Sequence[str] | None = None,
    classes: Sequence[str] = ("liver", "tumour"),
    voxels: float = 1000.0,
    absent: Sequence[tuple[int, int]] = (),
) -> Evaluation:
    """One bin each, at confidence 0.525, with the signed gap given: so ACE = ECE = MCE = |gap|. (case, class) both.

    Dice follows from 100 predicted, 100 true voxels; a class in `absent` has no true voxel and no Dice.
    """
    number, width = gaps.shape
    count, confidence, label = (torch.zeros(number, width, FINE, dtype=torch.float64) for _ in range(3))
    count[..., 10] = voxels
    confidence[..., 10] = 0.525 * voxels
    label[..., 10] = (0.525 - gaps.double()) * voxels
    hundred = torch.full((number, width), 100.0, dtype=torch.float64)
    true, both = hundred.clone(), 100 * dices.double()
    for case, column in absent:
        true[case, column] = both[case, column] = 0
    ones = torch.ones(number, width, dtype=torch.float64)
    return Evaluation(
        BinStatistics(count, confidence, label, Binning(FINE)),
        OverlapCounts(hundred, true, both),
        ScoreSums(0.1 * voxels * ones, 0.2 * voxels * ones, voxels * ones),
        None,
        cases=tuple(cases) if cases is not None else tuple(f"case {i}" for i in range(number)),
        classes=tuple(classes[:width]),
        bins=FINE,
        joint=ScoreSums(*(number * voxels * ones[:, :1] for number in (0.1, 0.2, 1.0))),
    )
