"""What lesions tell: sensitivity, precision, false positives, FROC and reliability, with intervals over patients.

A predicted lesion is real where a true one matches it; a true one is found where a predicted one matches it. So two
predictions in one lesion are both real and find one, and one prediction over two lesions is real once and finds both.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from segcal.binning import Binning
from segcal.evaluation.diagrams import Reliability, reliability
from segcal.evaluation.intervals import (
    FEWEST_PATIENTS,
    error_interval,
    expanded,
    quantile_interval,
    resample_blocks,
    wilson,
)
from segcal.lesions.case import Lesion
from segcal.metrics import ace, ece
from segcal.statistics import BinStatistics

Array = NDArray[Any]

RATES = (0.125, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0)
"""False positives per case at which the sensitivity is read off, as in LUNA16."""
MOST_CUTS = 1000  # of the confidence, in draws
DRAWS_TOGETHER = 200


class Number(NamedTuple):
    """One number of a summary, with its interval; NaN where there is none.

    number: of what it is a mean or a share: true lesions, predicted ones, or cases.
    """

    class_name: str
    metric: str
    value: float
    low: float
    high: float
    number: int


class Froc(NamedTuple):
    """Sensitivity against false positives per case; one row for each cut of the confidence, from the highest."""

    cuts: Array
    false_positives: Array
    sensitivity: Array


@dataclass(frozen=True, eq=False)
class ClassLesions:
    """The lesions of a class; cases are numbered."""

    class_name: str
    cases: int
    confidence: Array
    """Of predicted lesions."""
    real: Array
    of_case: Array
    score: Array
    """Of true lesions: the largest confidence of those that match, minus infinity where none does."""
    true_of_case: Array

    @property
    def found(self) -> Array:
        return self.score > -np.inf

    @property
    def cuts(self) -> Array:
        """Every confidence, from the highest."""
        return np.unique(self.confidence)[::-1]

    def counts(self) -> Tensor:
        """(case, 4): predicted, real, true and found lesions."""
        columns = [
            np.bincount(cases, weights, minlength=self.cases)
            for cases, weights in (
                (self.of_case, None),
                (self.of_case, self.real.astype(float)),
                (self.true_of_case, None),
                (self.true_of_case, self.found.astype(float)),
            )
        ]
        return torch.from_numpy(np.stack(columns, 1).astype(np.float64))

    def statistics(self, bins: int) -> BinStatistics:
        """Predicted lesions in bins of their confidence: how many, and how many are real."""
        place = np.minimum((self.confidence * bins).astype(np.int64), bins - 1)
        sums = []
        for weights in (np.ones(len(place)), self.confidence, self.real.astype(np.float64)):
            added = np.zeros((self.cases, 1, bins))
            np.add.at(added[:, 0], (self.of_case, place), weights)
            sums.append(torch.from_numpy(added))
        return BinStatistics(sums[0], sums[1], sums[2], Binning(bins))

    def at_cuts(self, cuts: Array) -> tuple[Tensor, Tensor]:
        """(case, cut): true lesions found and false positives by predictions of at least each cut, which fall."""
        found = np.zeros((self.cases, len(cuts) + 1))
        false = np.zeros((self.cases, len(cuts) + 1))
        rising = -cuts
        np.add.at(found, (self.true_of_case, np.searchsorted(rising, -self.score)), 1)
        wrong = ~self.real
        np.add.at(false, (self.of_case[wrong], np.searchsorted(rising, -self.confidence[wrong])), 1)
        return tuple(torch.from_numpy(each.cumsum(1)[:, :-1].copy()) for each in (found, false))  # type: ignore[return-value]


def bins_for(lesions: int) -> int:
    """Bins of so many predicted lesions: a few dozen fill only a few.

    >>> bins_for(40), bins_for(400), bins_for(4000)
    (5, 10, 20)
    """
    return 5 if lesions < 100 else 10 if lesions < 1000 else 20


def lesions_of_class(lesions: Sequence[Lesion], cases: Sequence[str], class_name: str) -> ClassLesions:
    """Return the lesions of a class, with the cases numbered in their order."""
    own = [lesion for lesion in lesions if lesion.class_name == class_name]
    predicted = np.array([lesion.kind == "predicted" for lesion in own], bool)
    place = {name: i for i, name in enumerate(cases)}
    of_case = np.array([place[lesion.case] for lesion in own], np.int64)
    confidence = np.array([-np.inf if lesion.confidence is None else lesion.confidence for lesion in own])
    matched = np.array([lesion.matched for lesion in own], bool)
    return ClassLesions(
        class_name,
        len(cases),
        confidence[predicted],
        matched[predicted],
        of_case[predicted],
        confidence[~predicted],
        of_case[~predicted],
    )


def froc(lesions: ClassLesions) -> Froc:
    """The curve of all cuts; without a prediction, nothing."""
    cuts = lesions.cuts
    found, false = lesions.at_cuts(cuts)
    true = max(len(lesions.score), 1)
    sensitivity = found.sum(0).numpy() / true if len(lesions.score) else np.full(len(cuts), np.nan)
    return Froc(cuts, false.sum(0).numpy() / lesions.cases, sensitivity)


def summarize(
    lesions: ClassLesions,
    patients: Sequence[str],
    *,
    bins: int,
    level: float = 0.95,
    resamples: int = 2000,
    seed: int = 0,
) -> list[Number]:
    """Every number of a class, with bootstrap intervals over patients; below 5 patients there are none."""
    enough = len(set(patients)) >= FEWEST_PATIENTS
    wide = expanded(level, len(set(patients)))
    once = torch.ones(1, lesions.cases, dtype=torch.float64)
    cuts = lesions.cuts
    number, real, true, found = (int(x) for x in lesions.counts().sum(0))
    of_what = {"sensitivity": true, "precision": number, "f1": number + true, "false_positives_per_case": lesions.cases}
    of_what |= {"ace": number, "ece": number}
    rows = []
    draws: dict[str, Tensor] = {}
    if enough:
        few = cuts if len(cuts) <= MOST_CUTS else cuts[np.linspace(0, len(cuts) - 1, MOST_CUTS).round().astype(int)]
        parts = [_shares(lesions, few)(some) for some in _small(resample_blocks(patients, number=resamples, seed=seed))]
        draws = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    for name, (value,) in {name: x.tolist() for name, x in _shares(lesions, cuts)(once).items()}.items():
        low, high = math.nan, math.nan
        if enough and not math.isnan(value):
            low, high = (end.item() for end in quantile_interval(draws[name][:, None], level=wide))
            if name in ("sensitivity", "precision"):  # where all are found, every draw is alike
                hits, of = (found, true) if name == "sensitivity" else (real, number)
                sure = wilson(torch.tensor(float(hits)), torch.tensor(float(of)), level=level)
                low, high = min(low, sure[0].item()), max(high, sure[1].item())
        rows.append(Number(lesions.class_name, name, value, low, high, of_what.get(name, true)))
    stats = lesions.statistics(bins)
    for name, metric in (("ace", ace), ("ece", ece)):
        value = float(metric(stats.pool("case")))
        low, high = math.nan, math.nan
        if enough and number:
            low, high = _error_interval(stats, metric, value, patients, wide, resamples, seed)
        rows.append(Number(lesions.class_name, name, value, low, high, number))
    return rows


def _small(blocks: Iterator[Tensor]) -> Iterator[Tensor]:
    for block in blocks:
        yield from torch.split(block, DRAWS_TOGETHER)


def rate_name(rate: float) -> str:
    """What the sensitivity at a rate is called.

    >>> rate_name(0.125), rate_name(2)
    ('sensitivity_at_1/8', 'sensitivity_at_2')
    """
    return f"sensitivity_at_{f'1/{round(1 / rate)}' if rate < 1 else f'{rate:g}'}"


def _shares(lesions: ClassLesions, cuts: Array) -> Callable[[Tensor], dict[str, Tensor]]:
    """What gives every number but the errors, (draw,), of weights (draw, case)."""
    counts = lesions.counts()
    found, false = lesions.at_cuts(cuts)

    def of(weights: Tensor) -> dict[str, Tensor]:
        predicted, real, true, seen = (weights @ counts).unbind(1)
        sensitivity, precision = _divide(seen, true), _divide(real, predicted)
        cases = weights.sum(1)
        product, both = sensitivity * precision, sensitivity.nan_to_num(0.0) + precision.nan_to_num(0.0)
        values = {
            "sensitivity": sensitivity,
            "precision": precision,
            "f1": torch.where(predicted + true == 0, torch.nan, 2 * product.nan_to_num(0.0) / both.clamp(min=1e-300)),
            "false_positives_per_case": _divide(predicted - real, cases),
        }
        hits, misses = weights @ found, weights @ false
        at_rates = []
        for rate in RATES:  # the lowest cut that keeps to the rate
            last = (misses <= rate * cases[:, None]).sum(1)
            kept = torch.cat([hits.new_zeros(len(hits), 1), hits], 1).gather(1, last[:, None])[:, 0]
            at_rates.append(_divide(kept, true))
            values[rate_name(rate)] = at_rates[-1]
        return values | {"froc": torch.stack(at_rates).mean(0)}

    return of


def _divide(one: Tensor, other: Tensor) -> Tensor:
    return torch.where(other > 0, one / other.clamp(min=1), torch.nan)


def _error_interval(
    stats: BinStatistics,
    metric: Callable[[BinStatistics], Tensor],
    value: float,
    patients: Sequence[str],
    level: float,
    resamples: int,
    seed: int,
) -> tuple[float, float]:
    """As that of the micro averages of voxels: see `error_interval`."""
    gaps = stats.pool("case").signed_gap.nan_to_num(0.0)
    drawn, apart = [], []
    for weights in resample_blocks(patients, number=resamples, seed=seed):
        sums = [(weights @ part[:, 0])[:, None] for part in (stats.count, stats.confidence_sum, stats.label_sum)]
        some = BinStatistics(sums[0], sums[1], sums[2], stats.binning)
        drawn.append(metric(some)[:, 0])
        apart.append(metric(replace(some, confidence_sum=some.confidence_sum - some.count * gaps))[:, 0])
    return error_interval(value, torch.cat(drawn), torch.cat(apart), level=level)


def lesion_reliability(
    lesions: ClassLesions, patients: Sequence[str], *, bins: int, level: float = 0.95, seed: int = 0
) -> Reliability:
    """How often predicted lesions are real, for each confidence."""
    found = reliability(lesions.statistics(bins), patients=patients, level=level, seed=seed)
    return replace(found, band=found.band.replace("voxels", "lesions"))
