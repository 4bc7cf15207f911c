"""Methods compared on the same cases: means, intervals, tests against the first, and what chance alone would show."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from segcal.errors import ConfigError, one_of
from segcal.evaluation import MICRO, Evaluation
from segcal.intervals import (
    calibrated_draws,
    group_matrix,
    holm,
    patients_of,
    quantile_interval,
    resample_weights,
    signed_rank_test,
    t_test,
    weighted_mean,
)
from segcal.metrics import ace, ece, mce, micro
from segcal.statistics import BinStatistics

Key = tuple[str, str, str]  # average, label, metric
ERRORS = {"ace": ace, "ece": ece, "mce": mce}
HIGHER_IS_BETTER = frozenset({"dice"})
TWO_SIDED = frozenset({"signed_gap"})  # neither high nor low is better


class Entry(NamedTuple):
    """One number of one method, and how it compares with the baseline's."""

    method: str
    cases: str
    """"all", or "complete": those with every class present."""
    average: str
    """"macro", "micro paper" or "micro pooled"."""
    label: str
    """A class, "mean" of all, or "top label"."""
    metric: str
    value: float
    std: float
    """Over cases; NaN for micro averages, which are one number."""
    number: int
    """Cases that have a value."""
    low: float
    high: float
    """Bootstrap interval over patients."""
    floor: float
    """What a perfectly calibrated model would show by chance, voxels taken as independent; NaN but for errors."""
    change: float
    """Relative to the baseline: -0.12 is 12 % lower. NaN for the baseline itself, as all that follows."""
    difference_low: float
    difference_high: float
    """Bootstrap interval over patients of the difference from the baseline."""
    p_t: float
    p_wilcoxon: float
    """Paired tests over patients; macro only."""
    p_bootstrap: float
    """Twice the share of draws in which the difference has the other sign (at least 1 / draws)."""
    p: float
    """Of the test that was chosen (of the bootstrap for micro averages), corrected if that was asked for."""
    stars: str
    """* p < 0.05, ** p < 0.01."""


@dataclass(frozen=True)
class Comparison:
    """All entries; the first method is the baseline."""

    methods: tuple[str, ...]
    classes: tuple[str, ...]
    entries: tuple[Entry, ...]
    cases: int
    complete: int
    patients: int
    bins: int
    test: str
    correction: str
    level: float
    unmatched: dict[str, tuple[str, ...]]
    """Cases that were left out, and the methods that lack them."""

    def find(
        self, method: str, *, cases: str = "all", average: str = "macro", label: str = "mean", metric: str = "dice"
    ) -> Entry:
        """The one entry with these names."""
        return self._index[method, cases, average, label, metric]

    @cached_property
    def _index(self) -> dict[tuple[str, ...], Entry]:
        return {entry[:5]: entry for entry in self.entries}

    @property
    def case_sets(self) -> tuple[str, ...]:
        """ "all", and "complete" where some cases, but not all of them, lack a class."""
        return ("all", "complete") if 0 < self.complete < self.cases else ("all",)


@contextmanager
def one_thread() -> Iterator[None]:
    """Torch on one thread: these tensors are small, and on busy cores threads wait for each other six times as long."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@one_thread()
def compare(
    evaluations: Mapping[str, Evaluation],
    *,
    patients: str | None = None,
    test: Literal["t", "wilcoxon"] = "t",
    correction: Literal["none", "holm"] = "none",
    bins: int | None = None,
    background: bool = False,
    level: float = 0.95,
    resamples: int = 2000,
    draws: int = 100,
    seed: int = 0,
) -> Comparison:
    """Every metric of every method and class, with intervals, tests against the first method, and the floor.

    Cases are matched by name; one that a method lacks is left out for all and reported. `patients` says which cases
    belong together (see `patients_of`): patients are what the bootstrap draws and what tests count. Holm's
    correction is over the methods and classes of a metric (the mean over classes: over the methods).
    """
    one_of("test", test, ("t", "wilcoxon"))
    one_of("correction", correction, ("none", "holm"))
    if not 0 < level < 1:
        raise ConfigError(f"level must lie between 0 and 1, as 0.95; got {level}.")
    for word, number in (("resamples", resamples), ("draws", draws)):
        if number < 1:
            raise ConfigError(f"{word} must be at least 1; got {number}.")
    matched, unmatched = match_cases(evaluations, bins=bins, background=background)
    first = next(iter(matched.values()))
    complete = first.complete().cases
    entries: list[Entry] = []
    for which, names in (("all", first.cases), ("complete", complete)):
        if not names or (which == "complete" and names == first.cases):
            continue
        rows = [first.cases.index(name) for name in names]
        groups = patients_of(names, patients)
        weights = resample_weights(groups, number=resamples, seed=seed)
        parts = {method: _measure(part.select(cases=rows), weights, draws, seed) for method, part in matched.items()}
        entries += _entries(which, parts, group_matrix(groups), level)
    return Comparison(
        methods=tuple(matched),
        classes=first.classes,
        entries=tuple(_starred(entries, test, correction)),
        cases=len(first.cases),
        complete=len(complete),
        patients=len(set(patients_of(first.cases, patients))),
        bins=first.bins,
        test=test,
        correction=correction,
        level=level,
        unmatched=unmatched,
    )


def match_cases(
    evaluations: Mapping[str, Evaluation], *, bins: int | None = None, background: bool = False
) -> tuple[dict[str, Evaluation], dict[str, tuple[str, ...]]]:
    """The evaluations cut to the cases that all have, in one order; and which methods lack the others."""
    if not evaluations:
        raise ConfigError("there must be at least one evaluation; got none.")
    parts = {name: part if background else part.foreground() for name, part in evaluations.items()}
    if bins is not None:
        parts = {name: replace(part, bins=bins) for name, part in parts.items()}
    baseline, first = next(iter(parts.items()))
    everywhere = set(first.cases).intersection(*(part.cases for part in parts.values()))
    for name, part in parts.items():
        if set(part.classes) != set(first.classes):
            raise ConfigError(
                f"evaluations must have the same classes; {baseline} has {', '.join(first.classes)}, "
                f"{name} has {', '.join(part.classes)}."
            )
        if part.bins != first.bins:
            raise ConfigError(
                f"evaluations must have the same bins; {baseline} has {first.bins}, {name} {part.bins}. Give bins."
            )
    unmatched = {
        case: tuple(name for name, part in parts.items() if case not in part.cases)
        for case in sorted({case for part in parts.values() for case in part.cases} - everywhere)
    }
    if not everywhere:
        raise ConfigError(f"evaluations must share cases; {', '.join(parts)} have none in common.")
    order = [case for case in first.cases if case in everywhere]
    matched = {name: _in_order(part, order, first.classes) for name, part in parts.items()}
    _check_labels(matched)
    return matched, unmatched


def _in_order(part: Evaluation, cases: Sequence[str], classes: Sequence[str]) -> Evaluation:
    row = {name: i for i, name in enumerate(part.cases)}
    return part.select(cases=[row[name] for name in cases], classes=[part.classes.index(name) for name in classes])


def _check_labels(matched: Mapping[str, Evaluation]) -> None:
    """The same case must have the same labels everywhere, or the difference is not the methods'."""
    (baseline, first), *others = matched.items()
    for name, part in others:
        differ = (part.overlap.true != first.overlap.true).nonzero()
        if len(differ):
            case, column = differ[0].tolist()
            came, expected = (int(p.overlap.true[case, column]) for p in (part, first))
            raise ConfigError(
                f"methods must be evaluated against the same labels; case {first.cases[case]!r} has {expected} voxels "
                f"of {first.classes[column]} in {baseline} and {came} in {name}."
            )


@dataclass(frozen=True, eq=False)
class _Measured:
    """Of one method: its value, its value in each bootstrap draw, and in each case where it is a mean of cases."""

    value: dict[Key, float]
    drawn: dict[Key, Tensor]
    by_case: dict[Key, Tensor]
    floor: dict[Key, float]
    cases: int


def _measure(part: Evaluation, weights: Tensor, draws: int, seed: int) -> _Measured:
    by_case: dict[Key, Tensor] = {("macro", *key): values for key, values in part.case_values().items()}
    drawn = weighted_mean(torch.stack(list(by_case.values()), 1), weights)
    return _Measured(
        value={key: values.nanmean().item() for key, values in by_case.items()}
        | {key: values.item() for key, values in part.micro_values().items()},
        drawn=dict(zip(by_case, drawn.unbind(1), strict=True)) | part.micro_values(weights),
        by_case=by_case,
        floor=_floor(part.binned, part.classes, draws, seed),
        cases=len(part.cases),
    )


def _floor(stats: BinStatistics, classes: Sequence[str], draws: int, seed: int) -> dict[Key, float]:
    """Mean of each calibration error over draws of labels that fit the confidences."""
    found: dict[Key, list[Tensor]] = defaultdict(list)
    for drawn in calibrated_draws(stats, number=draws, seed=seed):
        averages = {"macro": drawn} | {f"micro {reading}": micro(drawn, reading=reading) for reading in MICRO}
        for average, some in averages.items():
            for metric, error in ERRORS.items():
                values = error(some)
                columns = torch.cat([values.nanmean(0), values.nanmean(1).nanmean()[None]])
                for name, value in zip((*classes, "mean"), columns, strict=True):
                    found[average, name, metric].append(value)
    return {key: torch.stack(values).nanmean().item() for key, values in found.items()}


def _entries(which: str, parts: Mapping[str, _Measured], groups: Tensor, level: float) -> Iterable[Entry]:
    baseline = next(iter(parts.values()))
    for method, part in parts.items():
        keys = [key for key in part.value if key in baseline.value]
        low, high = quantile_interval(torch.stack([part.drawn[key] for key in keys], 1), level=level)
        shift = torch.stack([part.drawn[key] - baseline.drawn[key] for key in keys], 1)
        shift_low, shift_high = quantile_interval(shift, level=level)
        for i, key in enumerate(keys):
            average, label, metric = key
            values, base = part.by_case.get(key), baseline.value[key]
            known = None if values is None else values[~values.isnan()]
            entry = Entry(
                method, which, average, label, metric,
                value=part.value[key],
                std=math.nan if known is None or len(known) < 2 else known.std().item(),
                number=part.cases if known is None else len(known),
                low=low[i].item(), high=high[i].item(),
                floor=part.floor.get(key, math.nan),
                change=math.nan, difference_low=math.nan, difference_high=math.nan,
                p_t=math.nan, p_wilcoxon=math.nan, p_bootstrap=math.nan, p=math.nan, stars="",
            )  # fmt: skip
            if part is not baseline:
                pairs = None if values is None else weighted_mean(values - baseline.by_case[key], groups)
                entry = entry._replace(
                    change=(entry.value - base) / abs(base) if base else math.nan,
                    difference_low=shift_low[i].item(),
                    difference_high=shift_high[i].item(),
                    p_t=math.nan if pairs is None else t_test(pairs),
                    p_wilcoxon=math.nan if pairs is None else signed_rank_test(pairs),
                    p_bootstrap=_bootstrap_p(shift[:, i]),
                )
            yield entry


def _bootstrap_p(differences: Tensor) -> float:
    known = differences[~differences.isnan()]
    if not len(known):
        return math.nan
    other_sign = min((known <= 0).double().mean().item(), (known >= 0).double().mean().item())
    return min(1.0, max(2 * other_sign, 1 / len(known)))


def _starred(entries: Sequence[Entry], test: str, correction: str) -> list[Entry]:
    """The entries with the p that counts, and its stars."""
    families: dict[tuple[object, ...], list[int]] = defaultdict(list)
    for i, entry in enumerate(entries):
        families[entry.cases, entry.average, entry.metric, entry.label == "mean"].append(i)
    starred = list(entries)
    for members in families.values():
        p_values = [_chosen_p(entries[i], test) for i in members]
        for i, p in zip(members, holm(p_values) if correction == "holm" else p_values, strict=True):
            starred[i] = entries[i]._replace(p=p, stars="**" if p < 0.01 else "*" if p < 0.05 else "")
    return starred


def _chosen_p(entry: Entry, test: str) -> float:
    if entry.average != "macro":
        return entry.p_bootstrap
    return entry.p_t if test == "t" else entry.p_wilcoxon
