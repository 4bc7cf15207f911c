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
from segcal.metrics import ERRORS, micro
from segcal.statistics import BinStatistics

Key = tuple[str, str, str]  # average, label, metric
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
    seeds: int
    """Evaluations of the method. Of several, the other fields are of means over them."""
    seed_std: float
    """Over seeds, of the value that each has by itself; NaN for one."""
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

    def __repr__(self) -> str:
        """One line, rather than pages of entries."""
        classes = ", ".join(self.classes)
        return f"Comparison({', '.join(self.methods)}; {self.cases} cases; {classes}; {self.bins} bins)"

    def _repr_html_(self) -> str:
        """Its tables over classes, and what must be known to read them, in a notebook."""
        from html import escape

        from segcal.tables import comparison_tables, notes, to_html

        tables = [table for table in comparison_tables(self) if table.names == 1 or len(self.classes) == 1]
        return "".join(map(to_html, tables)) + "".join(f"<p>{escape(note)}</p>" for note in notes(self))

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
    evaluations: Mapping[str, Evaluation | Sequence[Evaluation]],
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

    Of a method trained with several seeds, give the evaluation of each: its value of a case is the mean over those
    seeds that have one, and means, tests and intervals are of these; a micro average is the mean of the seeds' own.

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
    parts, unmatched = _match(_flat(evaluations), bins=bins, background=background)
    methods: dict[str, list[Evaluation]] = defaultdict(list)
    for method, _, part in parts:
        methods[method].append(part)
    first = parts[0].evaluation
    complete = first.complete().cases
    entries: list[Entry] = []
    for which, names in (("all", first.cases), ("complete", complete)):
        if not names or (which == "complete" and names == first.cases):
            continue
        rows = [first.cases.index(name) for name in names]
        groups = patients_of(names, patients)
        weights = resample_weights(groups, number=resamples, seed=seed)
        measured = {
            method: _measure([part.select(cases=rows) for part in seeds], weights, draws, seed)
            for method, seeds in methods.items()
        }
        entries += _entries(which, measured, group_matrix(groups), level)
    return Comparison(
        methods=tuple(methods),
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
    matched, unmatched = _match(_flat(evaluations), bins=bins, background=background)
    return {part.method: part.evaluation for part in matched}, unmatched


class _Part(NamedTuple):
    method: str
    told: str
    """The method, and which of its seeds where it has several."""
    evaluation: Evaluation


def _flat(evaluations: Mapping[str, Evaluation | Sequence[Evaluation]]) -> list[_Part]:
    """One evaluation after the other, those of a method together."""
    parts = []
    for method, given in evaluations.items():
        seeds = [given] if isinstance(given, Evaluation) else list(given)
        if not seeds:
            raise ConfigError(f"every method must have at least one evaluation; {method} has none.")
        for i, seed in enumerate(seeds, 1):
            parts.append(_Part(method, method if len(seeds) == 1 else f"{method} (seed {i} of {len(seeds)})", seed))
    return parts


def _match(
    parts: Sequence[_Part], *, bins: int | None, background: bool
) -> tuple[list[_Part], dict[str, tuple[str, ...]]]:
    """The parts cut to the cases that all have, in one order; and which methods lack the others."""
    if not parts:
        raise ConfigError("there must be at least one evaluation; got none.")
    if not background:
        parts = [part._replace(evaluation=part.evaluation.foreground()) for part in parts]
    if bins is not None:
        parts = [part._replace(evaluation=replace(part.evaluation, bins=bins)) for part in parts]
    _, baseline, first = parts[0]
    everywhere = set(first.cases).intersection(*(part.evaluation.cases for part in parts))
    for _, name, part in parts:
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
        case: tuple(dict.fromkeys(part.method for part in parts if case not in part.evaluation.cases))
        for case in sorted({case for part in parts for case in part.evaluation.cases} - everywhere)
    }
    if not everywhere:
        raise ConfigError(
            f"evaluations must share cases; {', '.join(part.told for part in parts)} have none in common."
        )
    order = [case for case in first.cases if case in everywhere]
    matched = [part._replace(evaluation=_in_order(part.evaluation, order, first.classes)) for part in parts]
    _check_labels(matched)
    return matched, unmatched


def _in_order(part: Evaluation, cases: Sequence[str], classes: Sequence[str]) -> Evaluation:
    row = {name: i for i, name in enumerate(part.cases)}
    return part.select(cases=[row[name] for name in cases], classes=[part.classes.index(name) for name in classes])


def _check_labels(matched: Sequence[_Part]) -> None:
    """The same case must have the same labels everywhere, or the difference is not the methods'."""
    (_, baseline, first), *others = matched
    for _, name, part in others:
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
    """Of one method: its value, its value in each bootstrap draw, and in each case where it is a mean of cases.

    All are means over the method's seeds.
    """

    value: dict[Key, float]
    drawn: dict[Key, Tensor]
    by_case: dict[Key, Tensor]
    floor: dict[Key, float]
    cases: int
    seeds: int
    seed_std: dict[Key, float]


def _measure(seeds: Sequence[Evaluation], weights: Tensor, draws: int, seed: int) -> _Measured:
    first = seeds[0]
    macros: list[dict[Key, Tensor]] = [
        {("macro", *key): values for key, values in part.case_values().items()} for part in seeds
    ]
    micros = [{key: values[0] for key, values in part.micro_values().items()} for part in seeds]
    by_case, micro_value = _mean_of_seeds(macros), _mean_of_seeds(micros)
    drawn = weighted_mean(torch.stack(list(by_case.values()), 1), weights)
    floors = [_floor(part.binned, part.classes, draws, seed) for part in seeds]
    return _Measured(
        value={key: values.nanmean().item() for key, values in by_case.items()}
        | {key: value.item() for key, value in micro_value.items()},
        drawn=dict(zip(by_case, drawn.unbind(1), strict=True))
        | _mean_of_seeds([part.micro_values(weights) for part in seeds]),
        by_case=by_case,
        floor={key: value.item() for key, value in _mean_of_seeds(floors).items()},
        cases=len(first.cases),
        seeds=len(seeds),
        seed_std={key: _std(torch.stack([part[key].nanmean() for part in macros])) for key in by_case}
        | {key: _std(torch.stack([part[key] for part in micros])) for key in micro_value},
    )


def _mean_of_seeds(seeds: Sequence[dict[Key, Tensor]]) -> dict[Key, Tensor]:
    """Of what all seeds have, the mean over those with a value; one seed as it is."""
    first, *others = seeds
    if not others:
        return first
    keys = [key for key in first if all(key in seed for seed in others)]
    return {key: torch.stack([seed[key] for seed in seeds]).nanmean(0) for key in keys}


def _std(values: Tensor) -> float:
    """Of those that are known; NaN for fewer than two."""
    known = values[~values.isnan()]
    return math.nan if len(known) < 2 else known.std().item()


def _floor(stats: BinStatistics, classes: Sequence[str], draws: int, seed: int) -> dict[Key, Tensor]:
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
    return {key: torch.stack(values).nanmean() for key, values in found.items()}


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
            entry = Entry(
                method, which, average, label, metric,
                value=part.value[key],
                std=math.nan if values is None else _std(values),
                number=part.cases if values is None else int((~values.isnan()).sum()),
                seeds=part.seeds, seed_std=part.seed_std[key],
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
