"""Every number of every method in draws of patients, and methods that swap patients: in blocks, to bound memory."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from segcal.evaluation.intervals import permutation_p, weighted_mean
from segcal.evaluation.micro import Key, MicroSums, Sums, drawn


class Drawn(NamedTuple):
    """Of each method, by the names of numbers, one value for each draw."""

    values: dict[str, dict[Key, Tensor]]
    distances: dict[str, dict[Key, Tensor]]
    """How far the gaps of a draw are from those of all cases, for the errors among the micro averages."""


def bootstrap(
    methods: Mapping[str, Sequence[MicroSums]], by_case: Mapping[str, Mapping[Key, Tensor]], blocks: Iterable[Tensor]
) -> Drawn:
    """Every macro and micro average in each draw of cases; blocks are weights, (draw, case)."""
    rows = {method: torch.stack(list(values.values()), 1) for method, values in by_case.items()}
    values: dict[str, list[dict[Key, Tensor]]] = defaultdict(list)
    distances: dict[str, list[dict[Key, Tensor]]] = defaultdict(list)
    for weights in blocks:
        for method, seeds in methods.items():
            macro = weighted_mean(rows[method], weights).unbind(1)
            sums = [drawn(weights, one.of_cases) for one in seeds]
            micro = mean_of_seeds([one.values(each) for one, each in zip(seeds, sums, strict=True)])
            values[method].append(dict(zip(by_case[method], macro, strict=True)) | micro)
            distances[method].append(
                mean_of_seeds([one.distances(each) for one, each in zip(seeds, sums, strict=True)])
            )
    return Drawn(
        {method: _joined(parts) for method, parts in values.items()},
        {method: _joined(parts) for method, parts in distances.items()},
    )


def permutation_tests(
    methods: Mapping[str, Sequence[MicroSums]], tossed: Callable[[], Iterable[Tensor]]
) -> dict[str, dict[Key, float]]:
    """For each method but the first, p of each micro average: how often both, swapped patient by patient, differ as
    much as they do. Tosses are blocks of zeros and ones, (way to swap, case).
    """
    baseline, *others = methods
    return {method: _permutation_test(methods[method], methods[baseline], tossed()) for method in others}


def _permutation_test(
    seeds: Sequence[MicroSums], baseline: Sequence[MicroSums], tossed: Iterable[Tensor]
) -> dict[Key, float]:
    pairs = [(seeds[i % len(seeds)], baseline[i % len(baseline)]) for i in range(math.lcm(len(seeds), len(baseline)))]
    apart = [_Apart(one.of_cases, other.of_cases) for one, other in pairs]
    shifts = [
        mean_of_seeds([_shift(*pair, each.swapped(some)) for pair, each in zip(pairs, apart, strict=True)])
        for some in tossed
    ]
    return {key: permutation_p(values) for key, values in _joined(shifts).items()}


class _Apart:
    """By how much the sums of each case differ between two methods; those that differ nowhere are left out."""

    def __init__(self, one: Sums, other: Sums) -> None:
        rows = torch.cat([(b - a).flatten(1) for a, b in zip(one, other, strict=True)], 1)
        self._columns = rows.any(0).nonzero()[:, 0]
        self._rows = rows[:, self._columns]
        self._shapes = [sums.shape[1:] for sums in one]

    def swapped(self, tossed: Tensor) -> Sums:
        """What is added to the sums of one, and taken from those of the other, by each way to swap."""
        whole = tossed.new_zeros(len(tossed), sum(shape.numel() for shape in self._shapes))
        whole[:, self._columns] = tossed @ self._rows
        parts = torch.split(whole, [shape.numel() for shape in self._shapes], 1)
        return tuple(part.reshape(-1, *shape) for part, shape in zip(parts, self._shapes, strict=True))


def _shift(one: MicroSums, other: MicroSums, swapped: Sums) -> dict[Key, Tensor]:
    """The difference of one from the other, for each way to swap; what is swapped is added to one's sums."""
    first = one.values(tuple(map(torch.add, one.total, swapped)))
    second = one.values(tuple(map(torch.sub, other.total, swapped)))
    return {key: values - second[key] for key, values in first.items()}


def mean_of_seeds(seeds: Sequence[dict[Key, Tensor]]) -> dict[Key, Tensor]:
    """Of what all seeds have, the mean over those with a value; one seed as it is."""
    first, *others = seeds
    if not others:
        return first
    keys = [key for key in first if all(key in seed for seed in others)]
    return {key: torch.stack([seed[key] for seed in seeds]).nanmean(0) for key in keys}


def _joined(parts: Sequence[dict[Key, Tensor]]) -> dict[Key, Tensor]:
    return {key: torch.cat([part[key] for part in parts]) for key in parts[0]}
