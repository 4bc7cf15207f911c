"""Groups of cases, as of a site or a scanner: every metric of each, and how far the groups lie apart.

A file names for each case (or patient) its value of some attributes. Patients are what is drawn, within each group, and
what tests permute between groups. If a patient has cases of several groups, as the frames of a heart, tests permute
the groups of these cases within that patient, and all other patients between groups.
"""

from __future__ import annotations

import csv
import math
import os
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from segcal._io.files import reject_pipe
from segcal._io.words import counted, listed
from segcal.errors import ConfigError, FileError, check_integer, check_seed, distinct
from segcal.evaluation.columns import Label, scope_of
from segcal.evaluation.evaluation import Evaluation
from segcal.evaluation.intervals import (
    FEWEST_PATIENTS,
    TOGETHER,
    error_interval,
    expanded,
    holm,
    patient_places,
    patients_of,
    permutation_p,
    quantile_interval,
    resample_blocks,
    weighted_mean,
)
from segcal.evaluation.micro import Key, MicroSums, drawn
from segcal.kernels.threads import one_torch_thread

MOST_GROUPS = 20  # of one attribute: more are rather numbers, which must be put into groups first
IDENTITIES = ("case", "patient")


@dataclass(frozen=True)
class Groups:
    """Of each attribute the value of each case; cases without a value are left out. Notes say what was noticed."""

    attributes: dict[str, dict[str, str]]
    notes: tuple[str, ...] = ()


class GroupRow(NamedTuple):
    """One number of a group of cases; `low` and `high` are NaN where fewer than 5 patients have a value."""

    attribute: str
    group: str
    cases: int
    patients: int
    average: str
    scope: str
    label: Label
    metric: str
    value: float
    std: float
    low: float
    high: float


class GroupGap(NamedTuple):
    """The largest difference between two groups of an attribute, those with fewer than 5 patients left out.

    lowest, highest: the groups, by the metric's value.
    gap: highest less lowest; `low` and `high` are the interval of the difference between these two.
    p: share of permutations of the groups whose largest gap between the same groups is as large; p_holm corrects for
        all attributes and metrics (and classes).
    """

    attribute: str
    average: str
    scope: str
    label: Label
    metric: str
    lowest: str
    highest: str
    gap: float
    low: float
    high: float
    p: float
    p_holm: float
    stars: str


@dataclass(frozen=True, eq=False)
class GroupComparison:
    """What `compare_groups` returns.

    rows: every number of every group.
    gaps: of every attribute and number, the largest gap.
    notes: what is to be known of the groups, in sentences.
    """

    rows: tuple[GroupRow, ...]
    gaps: tuple[GroupGap, ...]
    notes: tuple[str, ...]
    level: float

    @property
    def attributes(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(row.attribute for row in self.rows))

    def groups(self, attribute: str) -> tuple[str, ...]:
        """Of an attribute, by name."""
        return tuple(dict.fromkeys(row.group for row in self.rows if row.attribute == attribute))

    def find(
        self, attribute: str, group: str, *, average: str = "macro", label: Label = None, metric: str = "dice"
    ) -> GroupRow:
        """One number of a group; LookupError where there is none."""
        return self._rows[attribute, group, average, label, metric]

    def gap(self, attribute: str, *, average: str = "macro", label: Label = None, metric: str = "dice") -> GroupGap:
        """The largest gap; LookupError where fewer than two groups can be compared."""
        return self._gaps[attribute, average, label, metric]

    @cached_property
    def _rows(self) -> dict[tuple[Label, ...], GroupRow]:
        return {(row.attribute, row.group, row.average, row.label, row.metric): row for row in self.rows}

    @cached_property
    def _gaps(self) -> dict[tuple[Label, ...], GroupGap]:
        return {(gap.attribute, gap.average, gap.label, gap.metric): gap for gap in self.gaps}


def read_groups(path: str | os.PathLike[str], cases: Sequence[str], *, patients: str | None = None) -> Groups:
    """The groups of these cases in a .csv file, whose first column is case or patient.

    Further columns are attributes. FileError where it cannot be read, ConfigError where it makes no sense, or names
    none of the cases.
    """
    path = Path(path)
    header, rows = _read(path)
    known = _by_identity(path, header, rows)
    who = dict(zip(cases, patients_of(cases, patients), strict=True))
    identity = {case: case if header[0] == "case" else who[case] for case in cases}
    missing = [case for case in cases if identity[case] not in known]
    if len(missing) == len(cases):
        raise ConfigError(
            f"{path} must name a {header[0]} of the evaluation, as {identity[cases[0]]!r}; it has "
            f"{listed([repr(name) for name in known], 3)}."
        )
    notes = []
    if missing:
        notes.append(f"{path.name} does not name {counted(len(missing), 'case')}, in no group: {listed(missing)}.")
    unknown = sorted(set(known) - set(identity.values()))
    if unknown:
        noun = counted(len(unknown), header[0])
        notes.append(f"{path.name} names {noun} that the evaluation does not have: {listed(unknown)}.")
    attributes: dict[str, dict[str, str]] = {}
    for i, name in enumerate(header[1:]):
        values = {case: known[key][i] for case, key in identity.items() if key in known}
        empty = [case for case, value in values.items() if not value]
        if empty:
            notes.append(f"{counted(len(empty), 'case')} without a value of {name}, in no group: {listed(empty)}.")
        attributes[name] = {case: value for case, value in values.items() if value}
        number = len(set(attributes[name].values()))
        if number > MOST_GROUPS:
            raise ConfigError(
                f"{path}: an attribute must have at most {MOST_GROUPS} groups; {name} has {number}. Put numbers into "
                f"groups first, as 'below 60'."
            )
    return Groups(attributes, tuple(notes))


def _read(path: Path) -> tuple[list[str], list[list[str]]]:
    reject_pipe(path)
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            lines = [[cell.strip() for cell in line] for line in csv.reader(file)]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise FileError(f"{path} must be a CSV file; it cannot be read: {error}. Check the path.") from error
    lines = [line for line in lines if any(line)]
    if not lines or lines[0][0] not in IDENTITIES or len(lines[0]) < 2:
        came = ", ".join(lines[0]) if lines else "nothing"
        raise ConfigError(
            f"{path} must begin with the names of its columns, the first case or patient, the others attributes; got "
            f"{came}."
        )
    distinct(f"{path}: names of columns", lines[0])
    for number, line in enumerate(lines[1:], 2):
        if len(line) != len(lines[0]) or not line[0]:
            raise ConfigError(
                f"{path} must have a {lines[0][0]} and {counted(len(lines[0]) - 1, 'value')} in every row; row "
                f"{number} is {','.join(line)!r}. Complete it."
            )
    return lines[0], lines[1:]


def _by_identity(path: Path, header: Sequence[str], rows: Sequence[Sequence[str]]) -> dict[str, tuple[str, ...]]:
    known: dict[str, tuple[str, ...]] = {}
    for name, *values in rows:
        if known.setdefault(name, tuple(values)) != tuple(values):
            raise ConfigError(f"{path} must name each {header[0]} once; {name!r} came with other values, too.")
    return known


@one_torch_thread()
def compare_groups(
    evaluation: Evaluation,
    groups: str | os.PathLike[str] | Groups,
    *,
    patients: str | None = None,
    background: bool = False,
    level: float = 0.95,
    resamples: int = 2000,
    permutations: int = 10_000,  # so that Holm's correction over 50 tests leaves ** within reach
    seed: int = 0,
) -> GroupComparison:
    """Every metric of every group of cases with intervals over patients, and the largest gap of each attribute.

    A group in which fewer than 5 patients have a value has no interval and is left out of the gap and of its test.
    Gaps are tested by permuting groups: between the patients whose cases are all in one group, and within each other
    patient. Raises what `read_groups` raises, and ConfigError where options cannot be used.

    evaluation: of all cases.
    groups: a .csv file whose first column is case or patient and whose other columns are attributes; or what
        `read_groups` made of it.
    patients: which cases belong together, as in `compare`.
    background: whether the background counts as a class.
    level: of the intervals.
    resamples, permutations: draws of the bootstrap and of the test.
    seed: of all random numbers.

    >>> import tempfile
    >>> from segcal import EvaluationAccumulator
    >>> accumulator = EvaluationAccumulator()
    >>> accumulator.update(torch.full((2, 2, 8), 0.5), torch.tensor([[0, 1] * 4, [0] * 8]), ["one", "two"])
    >>> path = Path(tempfile.mkdtemp()) / "groups.csv"
    >>> _ = path.write_text("case,site\\none,north\\ntwo,south\\n")
    >>> found = compare_groups(accumulator.compute(), path)
    >>> [(group, found.find("site", group, metric="ace").value) for group in found.groups("site")]
    [('north', 0.0), ('south', 0.5)]
    """
    if not 0 < level < 1:
        raise ConfigError(f"level must lie between 0 and 1, as 0.95; got {level}.")
    for word, number in (("resamples", resamples), ("permutations", permutations)):
        check_integer(word, number)
    check_seed(seed)
    told = groups if isinstance(groups, Groups) else read_groups(groups, evaluation.cases, patients=patients)
    whole = evaluation if background else evaluation.foreground()
    who = patients_of(whole.cases, patients)
    notes, rows, gaps = list(told.notes), [], []
    for attribute, values in told.attributes.items():
        if not set(values) & set(whole.cases):
            continue
        cut = _Attribute(attribute, whole, values, who)
        draws = cut.draws(resamples, seed)
        rows += list(cut.rows(draws, level))
        few = [f"{name} ({number})" for name, number in cut.patients.items() if number < FEWEST_PATIENTS]
        if few:
            notes.append(
                f"{attribute}: no intervals, and no gaps, of groups with fewer than {FEWEST_PATIENTS} patients: "
                f"{', '.join(few)}."
            )
        if len(cut.tested) < 2:
            notes.append(f"{attribute}: no gap, for fewer than two groups have {FEWEST_PATIENTS} patients.")
            continue
        gaps += list(cut.gaps(draws, level, permutations, seed))
    return GroupComparison(tuple(rows), tuple(_corrected(gaps)), tuple(notes), level)


class _Drawn(NamedTuple):
    """Of a group, by the names of numbers, one value for each draw; and how far errors' gaps lie from the group's."""

    values: dict[Key, Tensor]
    distances: dict[Key, Tensor]


class _Attribute:
    """One attribute: the cases that have a value, and their groups."""

    def __init__(self, name: str, evaluation: Evaluation, values: Mapping[str, str], patients: Sequence[str]) -> None:
        self.name = name
        places = [i for i, case in enumerate(evaluation.cases) if case in values]
        self.evaluation = evaluation.select(cases=places)
        self.of_case = [values[case] for case in self.evaluation.cases]
        self.who = [patients[i] for i in places]
        self.names = sorted(set(self.of_case))
        self.members = {name: [i for i, own in enumerate(self.of_case) if own == name] for name in self.names}
        self.patients = {name: len({self.who[i] for i in rows}) for name, rows in self.members.items()}
        self.tested = [name for name in self.names if self.patients[name] >= FEWEST_PATIENTS]
        pairs = set(zip(self.who, self.of_case, strict=True))
        self.within = len(pairs) > len(set(self.who))  # some patient has several values
        self.by_case: dict[Key, Tensor] = {
            ("macro", *key): column for key, column in self.evaluation.case_values(background=True).items()
        }
        self.stacked = torch.stack(list(self.by_case.values()), 1)
        self.sums = MicroSums(self.evaluation)

    def numbers(self, weights: Tensor, keys: Collection[Key] | None = None) -> dict[Key, Tensor]:
        """Every macro and micro average in each draw, or at least those of `keys`; weights are (draw, case)."""
        columns = [i for i, key in enumerate(self.by_case) if keys is None or key in keys]
        means = weighted_mean(self.stacked[:, columns], weights).unbind(1)
        macro = dict(zip((list(self.by_case)[i] for i in columns), means, strict=True))
        if keys is not None and len(macro) == len(keys):
            return macro
        return macro | self.sums.values(drawn(weights, self.sums.of_cases))

    def indicator(self, name: str) -> Tensor:
        """(1, case): one for the cases of a group."""
        return torch.tensor([[float(own == name) for own in self.of_case]], dtype=torch.float64)

    def draws(self, resamples: int, seed: int) -> dict[str, _Drawn]:
        """Of each group with enough patients; a patient in several groups is drawn equally often in each of them."""
        found = {}
        for i, name in enumerate(self.tested):
            rows = self.members[name]
            part = MicroSums(self.evaluation.select(cases=rows))
            values, distances = defaultdict(list), defaultdict(list)
            population = range(len(self.who)) if self.within else rows
            columns = [population.index(row) for row in rows]
            who = [self.who[row] for row in population]
            for block in resample_blocks(who, number=resamples, seed=seed if self.within else seed + i):
                weights = block[:, columns]
                sums = drawn(weights, part.of_cases)
                macro = dict(zip(self.by_case, weighted_mean(self.stacked[rows], weights).unbind(1), strict=True))
                for key, each in (macro | part.values(sums)).items():
                    values[key].append(each)
                for key, each in part.distances(sums).items():
                    distances[key].append(each)
            found[name] = _Drawn(_joined(values), _joined(distances))
        return found

    def rows(self, draws: Mapping[str, _Drawn], level: float) -> Iterator[GroupRow]:
        for name in self.names:
            wide = expanded(level, self.patients[name])
            for key, value in self.numbers(self.indicator(name)).items():
                low, high, spread = math.nan, math.nan, math.nan
                if key in self.by_case:
                    own = self.by_case[key][self.members[name]]
                    own = own[~own.isnan()]
                    spread = own.std().item() if len(own) > 1 else math.nan
                if name in draws and self._enough(name, key):
                    low, high = _interval(draws[name], key, value.item(), wide)
                yield GroupRow(
                    self.name, name, len(self.members[name]), self.patients[name], key[0], scope_of(*key[1:]),
                    *key[1:], value.item(), spread, low, high,
                )  # fmt: skip

    def _enough(self, name: str, key: Key) -> bool:
        """Whether enough patients of a group have a value."""
        values = self.by_case.get(key)
        if values is None:
            return True
        return len({self.who[i] for i in self.members[name] if not values[i].isnan()}) >= FEWEST_PATIENTS

    def gaps(self, draws: Mapping[str, _Drawn], level: float, permutations: int, seed: int) -> Iterator[GroupGap]:
        seen = {name: self.numbers(self.indicator(name)) for name in self.tested}
        comparable: dict[Key, dict[str, float]] = {}
        samples: dict[tuple[tuple[str, ...], tuple[int, ...]], list[Key]] = defaultdict(list)
        for key in seen[self.tested[0]]:
            values = {name: seen[name][key].item() for name in self.tested if self._enough(name, key)}
            known = {name: value for name, value in values.items() if not math.isnan(value)}
            if len(known) >= 2:
                comparable[key] = known
                samples[tuple(known), self._cases_with_value(known, key)].append(key)
        p_values: dict[Key, float] = {}
        for (names, cases), keys in samples.items():
            p_values |= self._p_values(names, cases, keys, permutations, seed)
        for key, known in comparable.items():
            lowest, *_, highest = sorted(known, key=lambda name: known[name])
            gap = known[highest] - known[lowest]
            shift = draws[highest].values[key] - draws[lowest].values[key]
            wide = expanded(level, min(self.patients[lowest], self.patients[highest]))
            ends = quantile_interval(shift[:, None], level=wide)
            bias = shift.nanmean().item() - gap
            yield GroupGap(
                self.name, key[0], scope_of(*key[1:]), *key[1:], lowest, highest, gap,
                ends[0].item() - bias, ends[1].item() - bias, p_values[key], math.nan, "",
            )  # fmt: skip

    def _cases_with_value(self, names: Collection[str], key: Key) -> tuple[int, ...]:
        """The cases of these groups; for a macro average, those that have a value."""
        values = self.by_case.get(key)
        cases = (i for i, group in enumerate(self.of_case) if group in names)
        return tuple(i for i in cases if values is None or not values[i].isnan())

    def _p_values(
        self, names: Sequence[str], cases: Sequence[int], keys: Sequence[Key], permutations: int, seed: int
    ) -> dict[Key, float]:
        """Test the largest gap between these groups by permuting the groups of these cases."""
        spans: dict[Key, list[Tensor]] = defaultdict(list)
        for block in self._permuted(names, cases, permutations, seed):
            of_groups = [self.numbers(weights, keys) for weights in block]
            for key in keys:
                spans[key].append(_span(torch.stack([values[key] for values in of_groups])))
        return {key: permutation_p(torch.cat(parts)) for key, parts in spans.items()}

    def _permuted(self, names: Sequence[str], cases: Sequence[int], number: int, seed: int) -> Iterator[Tensor]:
        """Blocks of (group, permutation, case): which of these cases are in a group; the first is as observed.

        Patients whose cases are all in one group are permuted with each other. The cases of any other patient are
        permuted within that patient.
        """
        generator = np.random.default_rng(seed)
        code = np.array([names.index(self.of_case[i]) for i in cases])
        places = patient_places([self.who[i] for i in cases]).numpy()
        low, high = np.full(len(code), len(names)), np.full(len(code), -1)
        np.minimum.at(low, places, code)
        np.maximum.at(high, places, code)
        varies = (low != high)[places]
        units = np.where(varies, len(code) + np.arange(len(code)), places)  # a patient or a case
        _, firsts, unit_of_case = np.unique(units, return_index=True, return_inverse=True)
        strata = np.where(varies, 1 + places, 0)[firsts]
        still = np.argsort(strata, kind="stable")
        size = max(1, TOGETHER // (len(self.of_case) * len(names)))
        for done in range(0, number, size):
            some = min(size, number - done)
            order = np.argsort(strata + generator.random((some, len(strata))), axis=1)
            permuted = np.empty((some, len(strata)), np.int64)
            permuted[:, still] = code[firsts][order]
            groups = permuted[:, unit_of_case]
            if done == 0:
                groups[0] = code
            block = np.zeros((len(names), some, len(self.of_case)))
            block[:, :, list(cases)] = groups == np.arange(len(names))[:, None, None]
            yield torch.from_numpy(block)


def _span(values: Tensor) -> Tensor:
    """Of (group, way) values, the largest less the smallest; NaN where fewer than two are known."""
    known = (~values.isnan()).sum(0)
    high, low = (torch.where(values.isnan(), end, values) for end in (-torch.inf, torch.inf))
    return torch.where(known > 1, high.amax(0) - low.amin(0), torch.nan)


def _joined(parts: Mapping[Key, list[Tensor]]) -> dict[Key, Tensor]:
    return {key: torch.cat(values) for key, values in parts.items()}


def _interval(draw: _Drawn, key: Key, value: float, level: float) -> tuple[float, float]:
    if key in draw.distances:
        return error_interval(value, draw.values[key], draw.distances[key], level=level)
    low, high = quantile_interval(draw.values[key][:, None], level=level)
    return low.item(), high.item()


def _corrected(gaps: Sequence[GroupGap]) -> list[GroupGap]:
    """With Holm's correction over all attributes and metrics; of all classes, and of single ones, by themselves."""
    families: dict[tuple[str, bool], list[int]] = defaultdict(list)
    for i, gap in enumerate(gaps):
        families[gap.average, gap.label is None].append(i)
    found = list(gaps)
    for members in families.values():
        for i, p in zip(members, holm([gaps[i].p for i in members]), strict=True):
            found[i] = gaps[i]._replace(p_holm=p, stars="**" if p < 0.01 else "*" if p < 0.05 else "")
    return found
