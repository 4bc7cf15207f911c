"""The numbers behind the figures: what a reliability diagram, a dataset histogram, a radar plot and a front show.

Figures on paper (`plots`) and on a page (`report`) are drawn from these, so that both show the same.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from segcal.errors import ShapeError, check_integer
from segcal.evaluation.intervals import (
    FEWEST_PATIENTS,
    expanded,
    patient_places,
    quantile_interval,
    resample_blocks,
    wilson,
)
from segcal.metrics import ace, ece, mce, micro
from segcal.statistics import BinStatistics


@dataclass(frozen=True, eq=False)
class Reliability:
    """One row per bin; NaN where a bin is empty."""

    edges: Tensor
    count: Tensor
    confidence: Tensor
    frequency: Tensor
    low: Tensor
    high: Tensor
    """Ends of the confidence band of the frequency; NaN where fewer than 5 patients fill a bin."""
    band: str
    """How the band was made, for the caption."""
    ace: float
    ece: float
    mce: float
    over_patients: bool = True
    """Whether the band is over patients; else it takes voxels as independent, and is too narrow."""


def reliability(
    stats: BinStatistics,
    *,
    patients: Sequence[str] | None = None,
    level: float = 0.95,
    resamples: int = 1000,
    seed: int = 0,
) -> Reliability:
    """What a reliability diagram shows of these cases and classes, all pooled.

    Given the patient of each case, and at least 5 patients, the band is a bootstrap over patients, and a bin that fewer
    fill has none; else it is Wilson's interval, as if voxels were independent, which is too narrow. No band is narrower
    than that: where all voxels are of the class, every draw is alike. Errors are those of the pooled bins.
    """
    return reliabilities([stats], patients=patients, level=level, resamples=resamples, seed=seed)[0]


def reliabilities(
    several: Sequence[BinStatistics],
    *,
    patients: Sequence[str] | None = None,
    level: float = 0.95,
    resamples: int = 1000,
    seed: int = 0,
) -> list[Reliability]:
    """The same of several statistics of the same cases, as of single classes; patients are drawn once for all."""
    together = [stats.pool("class") for stats in several]
    for stats in several:
        if patients is not None and len(patients) != stats.cases:
            raise ShapeError(
                f"patients must name one patient per case ({stats.cases}); got {len(patients)}."
                " Pass one patient per case."
            )
    if patients is None or len(set(patients)) < FEWEST_PATIENTS:
        return [_diagram(stats, level) for stats in together]
    drawn: list[list[Tensor]] = [[] for _ in together]
    for weights in resample_blocks(patients, number=resamples, seed=seed):
        for found, stats in zip(drawn, together, strict=True):
            found.append(micro(stats, reading="pooled", weights=weights).frequency[:, 0])
    return [
        _over_patients(_diagram(stats, level), stats, torch.cat(found), patients, level)
        for stats, found in zip(together, drawn, strict=True)
    ]


def _diagram(together: BinStatistics, level: float) -> Reliability:
    """With Wilson's band."""
    pooled = together.pool("case")
    low, high = (end[0, 0] for end in wilson(pooled.label_sum, pooled.count, level=level))
    occupied = pooled.occupied[0, 0]
    count, confidence, frequency = (values[0, 0] for values in (pooled.count, pooled.mean_confidence, pooled.frequency))
    return Reliability(
        edges=together.binning.edges,
        count=count,
        confidence=confidence,
        frequency=frequency,
        low=torch.where(occupied, low, torch.nan),
        high=torch.where(occupied, high, torch.nan),
        band=f"{level:.0%}, Wilson, voxels taken as independent",
        over_patients=False,
        ace=ace(pooled).item(),
        ece=ece(pooled).item(),
        mce=mce(pooled).item(),
    )


def _over_patients(
    diagram: Reliability, together: BinStatistics, drawn: Tensor, patients: Sequence[str], level: float
) -> Reliability:
    """With the band of draws of patients, (draw, bin), where it is the wider one."""
    number = len(set(patients))
    ends = quantile_interval(drawn, level=expanded(level, number))
    of_patients = together.count.new_zeros(number, together.binning.bins)
    of_patients.index_add_(0, patient_places(patients), together.count[:, 0])
    few = (of_patients > 0).sum(0) < FEWEST_PATIENTS
    return replace(
        diagram,
        low=torch.where(few, torch.nan, diagram.low.minimum(ends[0])),
        high=torch.where(few, torch.nan, diagram.high.maximum(ends[1])),
        band=f"{level:.0%}, bootstrap over {number} patients; none where fewer than 5 fill a bin",
        over_patients=True,
    )


@dataclass(frozen=True, eq=False)
class ReliabilityHistogram:
    """How the observed frequency of each bin is spread over cases, the paper's dataset reliability histogram."""

    share: Tensor
    """(bin, level): share of the cases that occupy a bin whose frequency lies at a level; sums to 1 over levels."""
    confidence: Tensor
    """Mean over cases of the bin's confidence; NaN where no case occupies it."""
    frequency: Tensor
    """Mean over cases of the bin's frequency; NaN where no case occupies it."""
    cases: Tensor
    """Cases (times classes, if averaged) that occupy the bin."""


def reliability_histogram(stats: BinStatistics, *, levels: int | None = None) -> ReliabilityHistogram:
    """The histogram over cases of each bin's frequency, averaged over classes that have any.

    Levels divide [0, 1] evenly, as many as there are bins if not given; the last one is closed.
    """
    levels = stats.binning.bins if levels is None else check_integer("levels", levels)
    occupied = stats.occupied
    level = (stats.frequency.nan_to_num(0.0) * levels).long().clamp(max=levels - 1)
    number = occupied.sum(0).double()  # class, bin
    at_level = number.new_zeros(*number.shape, levels)  # how many cases
    at_level.scatter_add_(2, level.movedim(0, 2), occupied.double().movedim(0, 2))
    per_class = at_level / number.clamp(min=1)[..., None]
    classes = (number > 0).sum(0).clamp(min=1)
    return ReliabilityHistogram(
        share=per_class.sum(0) / classes[:, None],
        confidence=_mean_over_cases(stats.mean_confidence),
        frequency=_mean_over_cases(stats.frequency),
        cases=number.sum(0),
    )


def _mean_over_cases(values: Tensor) -> Tensor:
    """Mean over cases, then over the classes that have any."""
    return values.nanmean(0).nanmean(0)


def normalize(values: Tensor, *, higher_is_better: Tensor) -> Tensor:
    """Values of (method, axis) on a scale where the best method of each axis has 1 and worse ones less.

    Scores are divided by the best; errors divide the best. An error of 0 where it is the best has 1, and others 0.
    """
    best = torch.where(higher_is_better, _nan_max(values), -_nan_max(-values))
    ratio = torch.where(higher_is_better, values / best, best / values)
    return torch.where(values == best, 1.0, ratio)


def _nan_max(values: Tensor) -> Tensor:
    largest = torch.where(values.isnan(), -torch.inf, values).amax(0)
    return torch.where(largest == -torch.inf, torch.nan, largest)


def pareto_front(points: Sequence[tuple[float, float]]) -> list[int]:
    """Which (dice, ace) no other beats, by rising dice: none has both as good or better, and one of them better.

    Equal points are on the front together; one with a NaN never is.

    >>> pareto_front([(0.9, 0.2), (0.8, 0.1), (0.8, 0.2)])
    [1, 0]
    """
    valued = [i for i, point in enumerate(points) if not any(map(math.isnan, point))]
    front: list[int] = []
    for i in sorted(valued, key=lambda i: (-points[i][0], points[i][1])):
        lowest = points[front[-1]] if front else (math.nan, math.inf)
        if points[i][1] < lowest[1] or tuple(points[i]) == tuple(lowest):
            front.append(i)
    return sorted(front, key=lambda i: (points[i][0], i))
