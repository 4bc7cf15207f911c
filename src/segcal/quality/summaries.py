"""What the probabilities of a case say of its quality: a few numbers for each case and class, without labels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from numpy.typing import NDArray

from segcal.decisions import best_threshold, expected_dice, uncertain_voxels
from segcal.errors import ConfigError
from segcal.evaluation.evaluation import Evaluation

Array = NDArray[Any]

NAMES = (
    "expected Dice",
    "expected precision",
    "expected sensitivity",
    "log volume",
    "log of decided to expected volume",
    "uncertain share",
    "share of the largest piece",
    "expected Dice of the best threshold",
)


@dataclass(frozen=True, eq=False)
class Summaries:
    """Of each case and class, float64 arrays (case, class, ...).

    features: (case, class, `NAMES`), always finite.
    expected: expected Dice of the decision.
    decided, volume, uncertain: voxels decided, expected, and uncertain (probability between 0.1 and 0.9).
    largest: share of the decision in its largest piece; NaN where nothing is decided or it is not known.
    voxel_ml: (case), the volume of a voxel; NaN where it is not known.
    """

    features: Array
    expected: Array
    decided: Array
    volume: Array
    uncertain: Array
    largest: Array
    voxel_ml: Array


def summaries_of(evaluation: Evaluation) -> Summaries:
    """Those of an evaluation's cases and classes; label sums are not looked at.

    ConfigError if it has no sums of decisions.
    """
    sums = evaluation.decisions
    if sums is None:
        raise ConfigError(
            "the evaluation must hold the sums of decisions; it has none. Run `segcal evaluate` again, or collect the "
            "cases with EvaluationAccumulator."
        )
    stats = evaluation.statistics
    expected = expected_dice(stats, evaluation.overlap, sums).nan_to_num(0.0)
    decided, volume, uncertain = evaluation.overlap.predicted, stats.confidence_sum.sum(2), uncertain_voxels(stats)
    largest = torch.where(decided > 0, sums.largest / decided.clamp(min=1), torch.nan)
    voxel_ml = sums.voxel_ml[:, 0]
    size = torch.where(sums.voxel_ml.isnan(), 1.0, sums.voxel_ml)  # without a size, volumes are in voxels
    features = torch.stack(
        [
            expected,
            sums.confidence / decided.clamp(min=1),
            sums.confidence / volume.clamp(min=1e-9),
            (volume.clamp(min=1) * size).log(),
            (decided.clamp(min=1) / volume.clamp(min=1)).log(),
            uncertain / torch.maximum(decided, volume).clamp(min=1),
            largest.nan_to_num(1.0),
            best_threshold(stats).expected_dice,
        ],
        -1,
    )
    return Summaries(*(x.numpy() for x in (features, expected, decided, volume, uncertain, largest, voxel_ml)))
