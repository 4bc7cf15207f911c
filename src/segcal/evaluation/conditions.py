"""Conditions on the metrics of an evaluation, such as "dice >= 0.85, macro-ace <= 0.10"."""

from __future__ import annotations

import math
import re
from difflib import get_close_matches
from typing import NamedTuple

from segcal.errors import ConfigError

METRICS = {  # what a condition may name, and where `Evaluation.means` has the number: average and metric
    "dsc": ("macro", "dice"),
    "macro-ace": ("macro", "ace"),
    "micro-ace": ("micro pooled", "ace"),
    "macro-ece": ("macro", "ece"),
    "micro-ece": ("micro pooled", "ece"),
    "macro-mce": ("macro", "mce"),
    "micro-mce": ("micro pooled", "mce"),
}
ALIASES = {"dice": "dsc", "ace": "macro-ace", "ece": "macro-ece", "mce": "macro-mce"}
ROUNDING = 1e-12  # numbers this close are equal: a mean of 0.8 and 0.9 is not quite 0.85 in floating point

_EXAMPLE = "such as 'dice >= 0.85' or 'dice >= 0.85, macro-ace <= 0.10'"
_CONDITION = re.compile(r"([^<>=]*?)\s*(>=|<=|>|<)\s*([^<>=]*)")
_NUMBER = re.compile(r"(?:\d+\.?\d*|\.\d+)(?:e[+-]?\d+)?")


class Condition(NamedTuple):
    """A metric, by its name in METRICS, a comparison (>=, <=, > or <) and a bound."""

    metric: str
    comparison: str
    bound: float

    def holds(self, value: float) -> bool:
        """Return whether a value of the metric is within the bound; NaN never is."""
        if math.isclose(value, self.bound, rel_tol=0, abs_tol=ROUNDING):
            return "=" in self.comparison
        return value > self.bound if ">" in self.comparison else value < self.bound


def metric_name(name: str) -> str:
    """Return the key of METRICS that a name stands for.

    >>> metric_name("Dice"), metric_name("ACE"), metric_name("micro_ece")
    ('dsc', 'macro-ace', 'micro-ece')
    """
    plain = name.strip().lower().replace("_", "-").replace(" ", "-")
    metric = ALIASES.get(plain, plain)
    if metric not in METRICS:
        close = get_close_matches(plain, [*METRICS, *ALIASES], 1)
        hint = f" Did you mean {close[0]!r}?" if close else ""
        raise ConfigError(f"a metric must be one of {', '.join(METRICS)}; got {name!r}.{hint}")
    return metric


def parse_conditions(text: str) -> tuple[Condition, ...]:
    """Parse conditions that are separated by commas.

    >>> parse_conditions("dice >= 0.85, ace < 0.1")
    (Condition(metric='dsc', comparison='>=', bound=0.85), Condition(metric='macro-ace', comparison='<', bound=0.1))
    """
    plain = text.lower().replace("≥", ">=").replace("≤", "<=")
    return tuple(_condition(part.strip(), text) for part in plain.split(","))


def _condition(part: str, text: str) -> Condition:
    """Parse one condition; `text` holds all of them, for messages."""
    if not (parts := _CONDITION.fullmatch(part)) or not parts[1]:
        raise ConfigError(
            f"a condition must be a metric, one of >=, <=, >, <, and a number, {_EXAMPLE}; got {part!r} in {text!r}."
        )
    if not _NUMBER.fullmatch(parts[3]) or (bound := float(parts[3])) > 1:
        raise ConfigError(
            f"the bound of a metric must be a number from 0 to 1, {_EXAMPLE}; got {parts[3]!r} in {text!r}."
        )
    return Condition(metric_name(parts[1]), parts[2], bound)
