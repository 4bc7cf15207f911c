"""Methods compared on the same cases: means, intervals, tests against the first, and what chance alone would show."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from segcal._io.words import counted
from segcal.comparison.drawing import Drawn, bootstrap, mean_of_seeds, permutation_tests
from segcal.comparison.entry import Entry
from segcal.comparison.matching import flat, match
from segcal.errors import ConfigError, check_integer, check_seed, one_of
from segcal.evaluation.columns import IN_POINTS, Label, scope_of
from segcal.evaluation.evaluation import Evaluation
from segcal.evaluation.fine import blocks
from segcal.evaluation.intervals import (
    FEWEST_PATIENTS,
    MOST_RESAMPLES,
    error_interval,
    expanded,
    holm,
    patient_places,
    patients_of,
    quantile_interval,
    resample_blocks,
    signed_rank_test,
    swap_blocks,
    t_test,
    with_drawn_labels,
)
from segcal.evaluation.micro import Key, MicroSums
from segcal.kernels.threads import one_torch_thread
from segcal.metrics import ERRORS

SWAPS_PER_RESAMPLE = 5  # so that Holm's correction over 60 tests leaves ** within reach
FEWEST_DRAWS = 10  # of labels, of however many cases
MOST_DRAWN = 10**7  # bins to draw labels for in all draws together; 1,000 cases of 5 classes have as many in 100
DRAWN_TOGETHER = 16_000  # bins at a time: many copies of them are made


@dataclass(frozen=True)
class Comparison:
    """What `compare` returns: all entries; the first method is the baseline.

    methods, classes: their names.
    entries: one for each method, set of cases, average, class and metric; `find` gives one of them.
    cases, complete, patients: how many there are, of all methods alike; complete cases have every class.
    bins: of the errors.
    test, correction, level: as `compare` was asked.

    >>> nothing = Comparison((), (), (), 0, 0, 0, bins=20, test="t", correction="none", level=0.95, unmatched={})
    >>> nothing.case_sets
    ('all',)
    """

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
        self, method: str, *, cases: str = "all", average: str = "macro", label: Label = None, metric: str = "dice"
    ) -> Entry:
        """The one entry with these names; without a label, of all classes. ConfigError says which there are."""
        asked = {"method": method, "cases": cases, "average": average, "label": label, "metric": metric}
        if tuple(asked.values()) not in self._index:
            for i, (field, value) in enumerate(asked.items()):
                one_of(field, value, tuple(dict.fromkeys(key[i] for key in self._index)))
            raise ConfigError(
                f"there is no entry with all of these names: {asked}. Check the method, class and metric."
            )
        return self._index[tuple(asked.values())]

    @cached_property
    def _index(self) -> dict[tuple[Label, ...], Entry]:
        return {(e.method, e.cases, e.average, e.label, e.metric): e for e in self.entries}

    def __repr__(self) -> str:
        """One line, rather than pages of entries."""
        classes = ", ".join(self.classes)
        sizes = counted(self.cases, "case"), classes, counted(self.bins, "bin")
        return f"Comparison({'; '.join((', '.join(self.methods), *sizes))})"

    def _repr_html_(self) -> str:
        """Its tables over classes, and what must be known to read them, in a notebook."""
        from html import escape

        from segcal.comparison.tables import comparison_tables, notes
        from segcal.evaluation.tables import to_html

        tables = [table for table in comparison_tables(self) if table.names == 1 or len(self.classes) == 1]
        return "".join(map(to_html, tables)) + "".join(f"<p>{escape(note)}</p>" for note in notes(self))

    @property
    def case_sets(self) -> tuple[str, ...]:
        """ "all", and "complete" where some cases, but not all of them, lack a class."""
        return ("all", "complete") if 0 < self.complete < self.cases else ("all",)


@one_torch_thread()
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

    Cases are matched by name; one that a method lacks is left out for all and reported, and a mean over cases is over
    those in which every method has a value: a value, its change and its p are about the same cases. Patients are what
    the bootstrap draws, what is swapped in permutation tests of micro averages and what tests count. Below 5 patients
    there are neither tests nor intervals. ConfigError where options cannot be used, or evaluations do not fit together.

    evaluations: by the name of the method, the baseline first; for several seeds, a list of evaluations.
    patients: which cases belong together: "none", a .csv file with columns case and patient, or a regular expression
        whose first group is the patient. If not given, every case is a patient of its own, but for ACDC's frames.
    test: of macro averages: "t", a paired t-test, or "wilcoxon".
    correction: "none", or "holm" over the methods and classes of a metric (of all classes: over the methods).
    bins: of the errors; those of the evaluations if not given.
    background: whether the background counts as a class.
    level: of the intervals.
    resamples: draws of the bootstrap; permutation tests take five times as many.
    draws: of labels, for the floor; of more than 1,000 cases fewer, but no fewer than 10.
    seed: of all random numbers.

    >>> from segcal import EvaluationAccumulator
    >>> def measured(sure):
    ...     there, accumulator = torch.full((2, 4), sure), EvaluationAccumulator()
    ...     labels = torch.tensor([[0, 0, 1, 1], [0, 1, 1, 1]])
    ...     accumulator.update(torch.stack([1 - there, there], dim=1), labels, ["one", "two"])
    ...     return accumulator.compute()
    >>> comparison = compare({"baseline": measured(0.9), "calibrated": measured(0.7)}, resamples=10, draws=1)
    >>> round(comparison.find("calibrated", metric="ace").value, 3)  # of 0.5 and 0.75
    0.125
    """
    one_of("test", test, ("t", "wilcoxon"))
    one_of("correction", correction, ("none", "holm"))
    if not 0 < level < 1:
        raise ConfigError(f"level must lie between 0 and 1, as 0.95; got {level}.")
    for word, number in (("resamples", resamples), ("draws", draws)):
        check_integer(word, number, most=MOST_RESAMPLES)
    parts, unmatched = match(flat(evaluations), bins=bins, background=background)
    methods: dict[str, list[Evaluation]] = defaultdict(list)
    for method, _, part in parts:
        methods[method].append(part)
    first = parts[0].evaluation
    complete = first.complete().cases
    entries: list[Entry] = []
    for which, names in (("all", first.cases), ("complete", complete)):
        if not names or (which == "complete" and names == first.cases):
            continue
        place = {name: i for i, name in enumerate(first.cases)}
        rows = [place[name] for name in names]
        groups = patients_of(names, patients)
        chosen = {method: [part.select(cases=rows) for part in seeds] for method, seeds in methods.items()}
        measured = {method: _measure(seeds, draws, seed) for method, seeds in chosen.items()}
        of_first, *of_others = (part.keys for part in measured.values())
        keys = [key for key in of_first if all(key in other for other in of_others)]
        by_case = _shared(measured, keys)
        draw, p_micro = None, {}
        if len(set(groups)) >= FEWEST_PATIENTS:
            draw = bootstrap(
                {method: part.sums for method, part in measured.items()},
                by_case,
                resample_blocks(groups, number=resamples, seed=seed),
            )
            tossed = partial(swap_blocks, groups, number=SWAPS_PER_RESAMPLE * resamples, seed=seed)
            p_micro = permutation_tests({method: part.sums for method, part in measured.items()}, tossed)
        entries += _entries(which, measured, keys, by_case, draw, p_micro, patient_places(groups), level)
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


@one_torch_thread()
def floors(evaluation: Evaluation, *, draws: int = 20, seed: int = 0) -> dict[Key, float]:
    """The floor of each calibration error by (average, label, metric), as `compare` has it, from a few draws."""
    found = _floor(evaluation, draws, seed)
    return {key: value.item() for key, value in found.items()}


@dataclass(frozen=True, eq=False)
class _Measured:
    """Of one method, means over its seeds: each case's values and micro averages."""

    by_case: dict[Key, Tensor]
    micro: dict[Key, Tensor]
    sums: list[MicroSums]
    """Of each seed, what micro averages add up."""
    floor: dict[Key, Tensor]
    cases: int
    each_seed: list[dict[Key, Tensor]]
    """The values of each seed by itself."""

    @cached_property
    def keys(self) -> dict[Key, None]:
        return dict.fromkeys((*self.by_case, *self.micro))


def _measure(seeds: Sequence[Evaluation], draws: int, seed: int) -> _Measured:
    """Of all classes that `match` left, the background among them if it was asked for."""
    macros: list[dict[Key, Tensor]] = [
        {("macro", *key): values for key, values in part.case_values(background=True).items()} for part in seeds
    ]
    sums = [MicroSums(part) for part in seeds]
    micros = [one.values(one.total) for one in sums]
    return _Measured(
        by_case=mean_of_seeds(macros),
        micro=mean_of_seeds(micros),
        sums=sums,
        floor=mean_of_seeds([_floor(part, draws, seed) for part in seeds]),
        cases=len(seeds[0].cases),
        each_seed=[macro | one for macro, one in zip(macros, micros, strict=True)],
    )


def _std(values: Tensor) -> float:
    """Of those that are known; NaN for fewer than two."""
    known = values[~values.isnan()]
    return math.nan if len(known) < 2 else known.std().item()


def _floor(evaluation: Evaluation, draws: int, seed: int) -> dict[Key, Tensor]:
    """Mean of each calibration error over draws of labels that fit the confidences."""
    stats, classes, raters = evaluation.binned, evaluation.classes, evaluation.raters
    found: dict[Key, list[Tensor]] = defaultdict(list)
    pooled, generator = stats.pool("case"), np.random.default_rng(check_seed(seed))
    # A mean over many cases needs fewer draws.
    number = min(draws, max(FEWEST_DRAWS, MOST_DRAWN // max(1, stats.count.numel())))
    for _ in range(number):
        of_cases: dict[str, list[Tensor]] = {metric: [] for metric in ERRORS}
        labels = torch.zeros_like(pooled.label_sum)
        for block in blocks(stats, DRAWN_TOGETHER):
            drawn = with_drawn_labels(block, generator, raters=raters)
            labels += drawn.label_sum.sum(0, keepdim=True)
            for metric, error in ERRORS.items():
                of_cases[metric].append(error(drawn))
        of_all = replace(pooled, label_sum=labels)
        for metric, error in ERRORS.items():
            for average, values in (("macro", torch.cat(of_cases[metric])), ("micro pooled", error(of_all))):
                columns = torch.cat([values.nanmean(0), values.nanmean(1).nanmean()[None]])
                for name, value in zip((*classes, None), columns, strict=True):
                    found[average, name, metric].append(value)
    return {key: torch.stack(values).nanmean() for key, values in found.items()}


def _entries(
    which: str,
    parts: Mapping[str, _Measured],
    keys: Sequence[Key],
    by_case: Mapping[str, Mapping[Key, Tensor]],
    draw: Drawn | None,
    p_micro: Mapping[str, Mapping[Key, float]],
    places: Tensor,
    level: float,
) -> Iterable[Entry]:
    """Without draws, for want of patients, there are no intervals."""
    baseline = next(iter(parts))
    for method, part in parts.items():
        for key in keys:
            values = by_case[method].get(key)
            value, base = (_value(parts[name], by_case[name], key) for name in (method, baseline))
            patients = _patients(by_case[method], key, places)
            enough, wide = draw is not None and patients >= FEWEST_PATIENTS, expanded(level, patients)
            low, high = math.nan, math.nan
            if enough and draw is not None:
                low, high = _interval(draw, method, key, value, wide)
            entry = Entry(
                method, which, key[0], scope_of(*key[1:]), *key[1:],
                value=value,
                std=math.nan if values is None else _std(values),
                number=part.cases if values is None else int((~values.isnan()).sum()),
                seeds=len(part.each_seed), seed_std=_seed_std(part, values, key),
                low=low, high=high,
                floor=part.floor[key].item() if key in part.floor else math.nan,
                change=math.nan, difference_low=math.nan, difference_high=math.nan,
                p_t=math.nan, p_wilcoxon=math.nan, p_permutation=math.nan, p=math.nan, stars="",
            )  # fmt: skip
            if method != baseline:
                shift = draw.values[method][key] - draw.values[baseline][key] if enough and draw is not None else None
                ends = (math.nan, math.nan) if shift is None else _difference_interval(shift, value - base, wide)
                pairs = None if values is None else values - by_case[baseline][key]
                entry = entry._replace(
                    change=_change(value, base, key[2]),
                    difference_low=ends[0],
                    difference_high=ends[1],
                    p_t=math.nan if pairs is None else t_test(pairs, places),
                    p_wilcoxon=math.nan if pairs is None else signed_rank_test(pairs, places),
                    p_permutation=p_micro.get(method, {}).get(key, math.nan),
                )
            yield entry


def _shared(parts: Mapping[str, _Measured], keys: Sequence[Key]) -> dict[str, dict[Key, Tensor]]:
    """The values of cases, NaN for all where one method has none: means of all are over the same cases."""
    found: dict[str, dict[Key, Tensor]] = {method: {} for method in parts}
    for key in keys:
        if key in next(iter(parts.values())).by_case:
            known = torch.stack([~part.by_case[key].isnan() for part in parts.values()]).all(0)
            for method, part in parts.items():
                found[method][key] = torch.where(known, part.by_case[key], torch.nan)
    return found


def _value(part: _Measured, by_case: Mapping[Key, Tensor], key: Key) -> float:
    return by_case[key].nanmean().item() if key in by_case else part.micro[key].item()


def _patients(by_case: Mapping[Key, Tensor], key: Key, places: Tensor) -> int:
    """How many tell of a number: those with a value; of micro averages all, but for Dice those with the class."""
    values = by_case.get(("macro", *key[1:]) if key[2] == "dice" else key)
    return len(set((places if values is None else places[~values.isnan()]).tolist()))


def _seed_std(part: _Measured, values: Tensor | None, key: Key) -> float:
    """Over seeds, of the value that each has by itself."""
    known = slice(None) if values is None else ~values.isnan()
    return _std(torch.stack([seed[key][known].nanmean() for seed in part.each_seed]))


def _interval(draw: Drawn, method: str, key: Key, value: float, level: float) -> tuple[float, float]:
    drawn = draw.values[method][key]
    if key in draw.distances[method]:
        return error_interval(value, drawn, draw.distances[method][key], level=level)
    low, high = quantile_interval(drawn[:, None], level=level)
    return low.item(), high.item()


def _difference_interval(shift: Tensor, observed: float, level: float) -> tuple[float, float]:
    """Of the draws, less their bias, so that it holds what was observed."""
    low, high = quantile_interval(shift[:, None], level=level)
    bias = shift.nanmean().item() - observed
    return low.item() - bias, high.item() - bias


def _change(value: float, base: float, metric: str) -> float:
    if metric in IN_POINTS:
        return value - base
    return (value - base) / abs(base) if base else math.nan


def _starred(entries: Sequence[Entry], test: str, correction: str) -> list[Entry]:
    """The entries with the p that counts, and its stars."""
    families: dict[tuple[object, ...], list[int]] = defaultdict(list)
    for i, entry in enumerate(entries):
        families[entry.cases, entry.average, entry.metric, entry.label is None].append(i)
    starred = list(entries)
    for members in families.values():
        p_values = [_chosen_p(entries[i], test) for i in members]
        for i, p in zip(members, holm(p_values) if correction == "holm" else p_values, strict=True):
            starred[i] = entries[i]._replace(p=p, stars="**" if p < 0.01 else "*" if p < 0.05 else "")
    return starred


def _chosen_p(entry: Entry, test: str) -> float:
    if entry.average != "macro":
        return entry.p_permutation
    return entry.p_t if test == "t" else entry.p_wilcoxon
