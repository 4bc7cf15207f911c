"""The numbers behind the threshold slider: what each threshold gives in one case, from the sums of the evaluation."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

from segcal.decisions import threshold_curves
from segcal.errors import ConfigError
from segcal.evaluation.evaluation import Evaluation

STEPS = 100  # of the slider, whose ends decide everything or next to nothing and are left out
DIGITS = 4


def case_curves(evaluation: Evaluation, case: str) -> list[dict[str, Any]]:
    """Of each class of the evaluation: thresholds, and Dice, expected Dice and decided volume at each, as JSON has it.

    Thresholds are the edges of fine bins nearest to 0.01, 0.02 and so on to 0.99, so that the numbers are exact. `dice`
    is None where the labels have not the class, `volume_ml` where the size of a voxel is not known; `voxels` are always
    there.

    >>> import torch
    >>> from segcal import EvaluationAccumulator
    >>> found = EvaluationAccumulator()
    >>> found.update(torch.tensor([[[0.1, 0.4], [0.9, 0.6]]]), torch.tensor([[1, 0]]), ["one"])
    >>> (curves,) = case_curves(found.compute().foreground(), "one")
    >>> at = curves["threshold"].index(0.5)
    >>> curves["dice"][at], curves["expected"][at], curves["voxels"][at]  # 2 * 1 / (2 + 1), 2 * 1.5 / (2 + 1.5)
    (0.6667, 0.8571, 2)
    """
    if case not in evaluation.cases:
        raise ConfigError(f"the case must be one of the evaluation's {len(evaluation.cases)}; got {case!r}.")
    one = evaluation.select(cases=[evaluation.cases.index(case)])
    bins = one.statistics.binning.bins
    edges = sorted({min(max(round(k * bins / STEPS), 1), bins - 1) for k in range(1, STEPS)})
    curves = threshold_curves(one.statistics)
    found = []
    for c in range(len(one.classes)):
        voxels = curves.volume[0, c, edges]
        voxel_ml = math.nan if one.decisions is None else one.decisions.voxel_ml[0, c].item()
        dice = curves.dice[0, c, edges]
        found.append(
            {
                "threshold": [round(edge / bins, DIGITS) for edge in edges],
                "dice": None if bool(dice.isnan().all()) else _rounded(dice),
                "expected": _rounded(curves.expected_dice[0, c, edges]),
                "volume_ml": None
                if math.isnan(voxel_ml)
                else [float(f"{v:.5g}") for v in (voxels * voxel_ml).tolist()],
                "voxels": [int(number) for number in voxels.tolist()],
            }
        )
    return found


def _rounded(values: Tensor) -> list[float | None]:
    return [None if math.isnan(value) else round(value, DIGITS) for value in values.tolist()]
