"""Which method to take, by a rule given before looking: the best calibrated of those that keep what must be kept.

A rule bounds metrics by numbers or by the baseline's: "dsc >= baseline - 0.005 and macro-mce <= baseline". Methods are
judged by their means over seeds, for to pick the luckiest seed would be to pick noise.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from statistics import fmean
from typing import NamedTuple

from segcal.errors import ConfigError

METRICS = {  # what a rule may name, and where a summary has the number: average and metric
    "dsc": ("macro", "dice"),
    "macro-ace": ("macro", "ace"),
    "micro-ace": ("micro pooled", "ace"),
    "macro-ece": ("macro", "ece"),
    "micro-ece": ("micro pooled", "ece"),
    "macro-mce": ("macro", "mce"),
    "micro-mce": ("micro pooled", "mce"),
}
ALIASES = {"dice": "dsc", "ace": "macro-ace", "ece": "macro-ece", "mce": "macro-mce"}
HIGHER_IS_BETTER = frozenset({"dsc"})
ROUNDING = 1e-12  # numbers this close are equal: 0.9 - 0.005 is not quite 0.895 in floating point

_EXAMPLE = "such as 'dsc >= baseline - 0.005' or 'dsc >= 0.85 and macro-mce <= baseline'"
_BOUNDS = "0.85, baseline, baseline - 0.005 or 0.99 * baseline"
_NUMBER = r"(?:\d+\.?\d*|\.\d+)(?:e[+-]?\d+)?"
_CONDITION = re.compile(r"([^<>=]*?)\s*(>=|<=|>|<)\s*([^<>=]*)")
_BOUND = re.compile(
    rf"(?P<alone>{_NUMBER})"
    rf"|(?:(?P<before>{_NUMBER})\s*\*\s*)?baseline(?:\s*\*\s*(?P<after>{_NUMBER}))?"
    rf"(?:\s*(?P<sign>[+-])\s*(?P<offset>{_NUMBER}))?"
)


class Candidate(NamedTuple):
    """One run on validation cases."""

    method: str
    seed: int
    values: Mapping[str, float]
    """By the names of METRICS."""


class Condition(NamedTuple):
    """A metric, a comparison, and the bound `share` x baseline + `offset`."""

    metric: str
    comparison: str
    share: float
    offset: float

    def bound(self, baseline_values: Mapping[str, float]) -> float:
        """The number that the metric is compared with."""
        if not self.share:
            return self.offset
        return self.share * _read(baseline_values, self.metric, "the baseline") + self.offset

    def holds(self, value: float, baseline_values: Mapping[str, float]) -> bool:
        """Whether the value is within the bound, never if either is NaN."""
        bound = self.bound(baseline_values)
        if math.isclose(value, bound, rel_tol=0, abs_tol=ROUNDING):
            return "=" in self.comparison
        return value > bound if ">" in self.comparison else value < bound


@dataclass(frozen=True)
class Rule:
    """Conditions that must all hold."""

    conditions: tuple[Condition, ...]
    text: str
    """As it was given."""

    def allows(self, values: Mapping[str, float], baseline_values: Mapping[str, float]) -> bool:
        """Whether all conditions hold; a NaN among the values they read never does."""
        return all(each.holds(_read(values, each.metric, "a method"), baseline_values) for each in self.conditions)

    def budget(self, metric: str, baseline_values: Mapping[str, float]) -> float | None:
        """The least value of a metric within the rule, for plots; None where there is none, NaN where it is unknown."""
        name = metric_name(metric)
        lower = [each for each in self.conditions if each.metric == name and ">" in each.comparison]
        bounds = [each.bound(baseline_values) for each in lower]
        return math.nan if any(map(math.isnan, bounds)) else max(bounds, default=None)


class Choice(NamedTuple):
    """The method chosen, and its run to use."""

    method: str
    seed: int
    values: Mapping[str, float]
    """Means over the method's seeds."""
    run_values: Mapping[str, float]
    allowed: tuple[str, ...]
    """Methods within the rule."""
    refused: tuple[str, ...]


def metric_name(name: str) -> str:
    """The metric that a name means.

    >>> metric_name("Dice"), metric_name("ACE"), metric_name("micro_ece")
    ('dsc', 'macro-ace', 'micro-ece')
    """
    plain = name.strip().lower().replace("_", "-").replace(" ", "-")
    if (found := ALIASES.get(plain, plain)) not in METRICS:
        hint = _nearest(plain, [*METRICS, *ALIASES])
        raise ConfigError(f"a metric must be one of {', '.join(METRICS)}; got {name!r}.{hint}")
    return found


def parse_rule(text: str) -> Rule:
    """The rule that a text spells: conditions joined by "and", each a metric, >=, <=, > or <, and a bound.

    >>> parse_rule("dsc >= baseline - 0.005").budget("dsc", {"dsc": 0.9})
    0.895
    """
    plain = text.strip().lower().replace("≥", ">=").replace("≤", "<=").replace("−", "-")  # noqa: RUF001
    if not plain:
        raise ConfigError(f"a rule must have a condition, {_EXAMPLE}; got {text!r}. 'dsc >= 0' allows every method.")
    if "%" in plain:
        raise ConfigError(
            f"a rule must have no %, which could mean points or a share of the baseline; got {text!r}. "
            "For half a point write 'baseline - 0.005', for half a percent less '0.995 * baseline'."
        )
    if re.search(r"\bor\b", plain):
        raise ConfigError(f"conditions of a rule must be joined by 'and'; got {text!r}. Try one rule after the other.")
    return Rule(tuple(_condition(part.strip(), text) for part in re.split(r"\band\b", plain)), text.strip())


def choose(candidates: Sequence[Candidate], rule: Rule, *, baseline: str, by: str = "macro-ace") -> Choice | None:
    """The method best by a metric among those whose means over seeds the rule allows; None if it allows none.

    Ties go to the earlier method. Its run is the best by the same metric among those that obey the rule themselves,
    or among all where none does. A method whose mean of a metric that counts is NaN is never allowed.
    """
    by = metric_name(by)
    runs: dict[str, list[Candidate]] = {}
    for each in candidates:
        runs.setdefault(each.method, []).append(each)
    _check(runs, baseline, {by, *(condition.metric for condition in rule.conditions)})
    means = {method: _means(own) for method, own in runs.items()}
    at_baseline = means[baseline]
    allowed = tuple(m for m, mean in means.items() if rule.allows(mean, at_baseline) and not math.isnan(mean[by]))
    if not allowed:
        return None
    sign = -1 if by in HIGHER_IS_BETTER else 1
    method = min(allowed, key=lambda m: sign * means[m][by])
    obedient = [run for run in runs[method] if rule.allows(run.values, at_baseline)]
    run = min(obedient or runs[method], key=lambda run: sign * run.values[by])
    refused = tuple(m for m in means if m not in allowed)
    return Choice(method, run.seed, means[method], run.values, allowed, refused)


def _condition(part: str, text: str) -> Condition:
    """One condition; `text` is the whole rule, for messages."""
    if not (parts := _CONDITION.fullmatch(part)) or not parts[1]:
        raise ConfigError(
            f"a condition must be a metric, one of >=, <=, >, <, and a bound, {_EXAMPLE}; got {part!r} in {text!r}."
        )
    metric, comparison = metric_name(parts[1]), parts[2]
    if not (bound := _BOUND.fullmatch(parts[3].strip())):
        raise ConfigError(f"a bound must be like {_BOUNDS}; got {parts[3]!r} in {text!r}.")
    share = 0.0 if bound["alone"] else float(bound["before"] or 1) * float(bound["after"] or 1)
    offset = float(bound["alone"] or bound["offset"] or 0)
    if offset > 1:
        raise ConfigError(f"numbers in a bound must lie in [0, 1], as metrics do; got {offset:g} in {text!r}.")
    return Condition(metric, comparison, share, -offset if bound["sign"] == "-" else offset)


def _check(runs: Mapping[str, Sequence[Candidate]], baseline: str, read: Iterable[str]) -> None:
    """Refuse candidates that cannot be judged."""
    if not runs:
        raise ConfigError("there must be at least one run to choose from; got none.")
    if baseline not in runs:
        names = ", ".join(map(repr, runs))
        raise ConfigError(f"the baseline must be a method ({names}); got {baseline!r}.{_nearest(baseline, runs)}")
    for method, own in runs.items():
        seeds = [run.seed for run in own]
        if twice := {seed for seed in seeds if seeds.count(seed) > 1}:
            raise ConfigError(f"each run of a method must have its own seed; {method!r} has {min(twice)} twice.")
        for run in own:
            for metric in sorted(read):
                _read(run.values, metric, f"{method!r}, seed {run.seed},")


def _means(own: Sequence[Candidate]) -> dict[str, float]:
    """Means over runs of the metrics that all of them have."""
    shared = [metric for metric in own[0].values if all(metric in run.values for run in own)]
    return {metric: fmean(run.values[metric] for run in own) for metric in shared}


def _read(values: Mapping[str, float], metric: str, whose: str) -> float:
    if metric not in values:
        raise ConfigError(f"{whose} must have a value of {metric}; it has {', '.join(values) or 'none'}.")
    return values[metric]


def _nearest(name: str, known: Iterable[str]) -> str:
    near = get_close_matches(name, list(known), 1)
    return f" Did you mean {near[0]!r}?" if near else ""
