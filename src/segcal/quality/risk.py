"""Thresholds with a guarantee on the mean risk of new patients: conformal risk control, and learn then test.

The false-negative rate grows with a threshold, the false-discovery rate falls (taken as its largest at any higher one,
where it does not). Of such risks the last threshold is taken at which (sum over patients + 1) / (patients + 1) stays
within the level: then the expected risk of a new patient does (Angelopoulos, Bates, Fisch, Lei and Schuster: Conformal
risk control, 2022). An adaptive rule has no common threshold: each case gets the one at which its own probabilities
promise a risk of at most lambda, and lambda is what is learned. Cases with doubtful borders then get lower thresholds
than certain ones, and risks spread less.

No threshold bounds 1 - Dice, so that there is nothing safe to fall back to. Thresholds are tested instead, from 1/2
downwards until one fails; of those that pass the best is taken (Angelopoulos, Bates, Candes, Jordan and Lei: Learn then
test, 2021), by a test that bets against a mean above the level (Waudby-Smith and Ramdas, 2024).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, cast, get_args

import numpy as np
import torch
from numpy.typing import NDArray

from segcal.binning import Binning
from segcal.decisions import ThresholdCurves, best_threshold, threshold_curves
from segcal.errors import ConfigError, ShapeError, is_number, one_of
from segcal.statistics import BinStatistics

Array = NDArray[Any]
Risk = Literal["fnr", "fdr", "dice-loss"]

STEPS = 1000  # of lambda
LEAST_LEVEL = 1e-6  # a smaller one would need more than a million patients
CONFIDENCE = 0.9  # that the risk of `dice-loss` is within its level
TESTED = tuple(round(0.5 - 0.05 * i, 2) for i in range(10))  # thresholds for `dice-loss`, in this order


class Learned(NamedTuple):
    """What was learned for a class: lambda of an adaptive rule, or the bin of one threshold; from how many patients."""

    parameter: float
    patients: int
    risk: float
    """Mean over these patients."""


@dataclass(frozen=True)
class Guarantee:
    """A rule that keeps a risk within a level, on average over new patients.

    risk: "fnr" (false-negative rate), "fdr" (false-discovery rate) or "dice-loss" (1 - Dice).
    level: the most it may be.
    adaptive: each case has a threshold of its own, from its probabilities; else one for all.
    learned: of each class.
    """

    risk: Risk
    level: float
    adaptive: bool
    learned: tuple[Learned, ...]

    def bins(self, count: Array, confidence: Array) -> Array:
        """The place of each class's threshold among the edges of bins, given a case's (class, bin) sums."""
        if len(count) != len(self.learned):
            raise ShapeError(
                f"the case must have the {len(self.learned)} classes that thresholds were learned for; it has "
                f"{len(count)}. Use maps of the same network."
            )
        parameters = np.array([each.parameter for each in self.learned])
        if not self.adaptive:
            return parameters.astype(np.int64)
        counts, sums = (torch.from_numpy(np.asarray(x, np.float64))[None] for x in (count, confidence))
        stats = BinStatistics(counts, sums, torch.zeros_like(counts), Binning(count.shape[1]))
        if self.risk == "dice-loss":
            return np.asarray(best_threshold(stats).bin[0])
        curves = threshold_curves(stats)
        each = (_adapted(curves, c, self.risk, parameters[c : c + 1]) for c in range(len(parameters)))
        return np.array([places[0, 0] for places in each])


def learn_thresholds(
    stats: BinStatistics, patients: Array, classes: tuple[str, ...], *, risk: str, level: float, adaptive: bool = True
) -> Guarantee:
    """Learn a rule from labeled cases; ConfigError, with the number of patients needed, where they are too few.

    Cases without the class have no false-negative rate and no Dice, and do not count for these.
    """
    one_of("risk", risk, get_args(Risk))
    kind = cast(Risk, risk)
    if not is_number(level) or not LEAST_LEVEL <= level < 1:
        raise ConfigError(f"the level of a risk must be at least {LEAST_LEVEL:g} and below 1; got {level!r}.")
    curves = threshold_curves(stats)
    learn = _test if kind == "dice-loss" else _control
    own = best_threshold(stats).bin.numpy() if kind == "dice-loss" and adaptive else None
    learned = []
    for c, name in enumerate(classes):
        try:
            learned.append(learn(curves, c, patients, kind, level, adaptive, own))
        except ConfigError as error:
            raise ConfigError(f"{name}: {error}") from None
    return Guarantee(kind, level, adaptive, tuple(learned))


def _control(
    curves: ThresholdCurves, c: int, patients: Array, risk: Risk, level: float, adaptive: bool, own: Array | None
) -> Learned:
    """Conformal risk control; columns of the losses go from safe to unsafe."""
    losses = _losses(curves, c, risk)
    if adaptive:
        grid = np.linspace(0, 1, STEPS + 1)
        places = _adapted(curves, c, risk, grid)
        losses = np.take_along_axis(losses, places, 1)
    elif risk == "fdr":
        losses = losses[:, ::-1]
    by_patient = _by_patient(np.maximum.accumulate(losses, 1), patients)
    number = len(by_patient)
    bound = (by_patient.sum(0) + 1) / (number + 1)
    kept = np.flatnonzero(bound <= level)
    if not len(kept):
        raise ConfigError(
            f"a {NAMES[risk]} of at most {level:g} needs at least {math.ceil(1 / level - 1e-9) - 1} patients with it; "
            f"got {number}. Give more, or allow a higher level."
        )
    last = int(kept[-1])
    parameter = grid[last] if adaptive else losses.shape[1] - 1 - last if risk == "fdr" else last
    return Learned(float(parameter), number, float(by_patient[:, last].mean()))


def _adapted(curves: ThresholdCurves, c: int, risk: Risk, most: Array) -> Array:
    """Bins (case, lambda) with the least safe threshold at which the expected risk of a case is at most lambda.

    Where a case has no probability at all, or nothing is decided, nothing is lost by deciding nothing.
    """
    promised = curves.expected_sensitivity if risk == "fnr" else curves.expected_precision
    kept, least = np.nan_to_num(promised[:, c].numpy(), nan=1.0), 1 - most - 1e-12
    if risk == "fnr":  # falls from edge to edge
        return np.stack([np.searchsorted(-row, -least, side="right") - 1 for row in kept])
    return np.stack([np.searchsorted(row, least) for row in np.maximum.accumulate(kept, 1)])


def _losses(curves: ThresholdCurves, c: int, risk: Risk) -> Array:
    """(case, edge); NaN where a case has no such risk."""
    if risk == "fnr":
        return np.asarray(1 - curves.sensitivity[:, c])
    if risk == "fdr":
        return np.asarray(1 - curves.precision[:, c].nan_to_num(1.0))
    return np.asarray(1 - curves.dice[:, c])


def _by_patient(losses: Array, patients: Array) -> Array:
    """Means over the cases of each patient that has one, (patient, ...)."""
    known = ~np.isnan(losses).any(1)
    names = np.unique(patients[known])
    if not len(names):
        raise ConfigError("there must be patients with this class; there are none. Leave the class out.")
    return np.stack([losses[known & (patients == name)].mean(0) for name in names])


def _test(
    curves: ThresholdCurves, c: int, patients: Array, risk: Risk, level: float, adaptive: bool, own: Array | None
) -> Learned:
    """Learn then test, in a fixed order."""
    losses = _losses(curves, c, risk)
    bins = losses.shape[1] - 1
    places = [np.full(len(losses), round(t * bins)) for t in TESTED] if own is None else [own[:, c]]
    passed: list[Learned] = []
    first: Array | None = None
    for place in places:
        by_patient = _by_patient(np.take_along_axis(losses, place[:, None], 1), patients)[:, 0]
        first = by_patient if first is None else first
        if bet_against(by_patient, level) > 1 - CONFIDENCE:
            break
        parameter = float(place[0]) if own is None else 0.0  # of an own threshold there is nothing to learn
        passed.append(Learned(parameter, len(by_patient), float(by_patient.mean())))
    if not passed:
        assert first is not None
        raise ConfigError(f"{_why_not(first, level)} Give more patients, or allow a higher level.")
    return min(passed, key=lambda each: each.risk)


def _why_not(losses: Array, level: float) -> str:
    mean = losses.mean()
    told = f"1 - Dice must be shown to be at most {level:g} on average; it is {mean:.3f} over {len(losses)} patients"
    growth = float(np.mean(np.log1p(-(losses - level) / (1 - level) * 0.99))) if mean < level else 0.0
    if growth <= 0:
        return f"{told}."
    return f"{told}, of whom about {math.ceil(math.log(1 / (1 - CONFIDENCE)) / growth)} would be needed."


def bet_against(losses: Array, level: float) -> float:
    """p-value of a mean loss above the level; losses lie in [0, 1] and come from independent patients."""
    number = len(losses)
    seen = np.cumsum(losses)
    means = (0.5 + np.concatenate([[0.0], seen[:-1]])) / np.arange(1, number + 1)
    spread = (0.25 + np.concatenate([[0.0], np.cumsum((losses - means) ** 2)[:-1]])) / np.arange(1, number + 1)
    most = 0.99 / (1 - level)
    bets = np.minimum(most, np.sqrt(2 * math.log(1 / (1 - CONFIDENCE)) / (number * spread)))
    wealth = np.cumsum(np.log1p(-bets * (losses - level)))
    return float(min(1.0, np.exp(-max(0.0, wealth.max()))))


NAMES: dict[Risk, str] = {"fnr": "false-negative rate", "fdr": "false-discovery rate", "dice-loss": "1 - Dice"}
