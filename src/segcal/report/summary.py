"""The top of the report: a row for each method, and at most three sentences for a reader who decides with it.

The sentences tell which method is closer to what is observed than the baseline, beyond chance; what else it changed;
and how far its probabilities can be taken at their word. All that they leave out is in `reading`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

from segcal._io.words import counted, joined
from segcal.comparison.comparison import Comparison
from segcal.comparison.cost import cost_of
from segcal.comparison.entry import Entry
from segcal.evaluation.intervals import FEWEST_PATIENTS
from segcal.report.reading import Calibration, MethodDiagrams, calibration_of, p_text

MOST_SENTENCES = 3
BASELINE = "baseline"
WORDS = {
    "none": ("no value", ""),
    "unknown": ("unknown", f"fewer than {FEWEST_PATIENTS} patients"),
    "uneven": ("uneven", "right on average, not case by case"),
    "good": ("well calibrated", ""),
}


class Row(NamedTuple):
    """What the table says of a method."""

    method: str
    dice: Entry
    ace: Entry
    nll: Entry
    compared: str
    """The ACE beside that of the baseline: "better", "better, at a cost", "worse", "no clear difference", ..."""
    verdict: str
    """In a word: "well calibrated", "overconfident", ..."""
    about: str
    """What the word is about: a class, or why there is no other word."""


class Summary(NamedTuple):
    """The table and the sentences."""

    rows: list[Row]
    sentences: list[str]


def summarize(comparison: Comparison, diagrams: Mapping[str, MethodDiagrams]) -> Summary:
    """The top of the report."""
    found = {method: calibration_of(method, comparison, diagrams[method]) for method in comparison.methods}
    rows = [_row(method, comparison, calibration) for method, calibration in found.items()]
    sentences = _of_several(comparison, found) if len(found) > 1 else _of_one(comparison, found)
    if comparison.complete < comparison.cases:
        sentences.append(_missing(comparison))
    return Summary(rows, sentences[:MOST_SENTENCES])


def _row(method: str, comparison: Comparison, calibration: Calibration) -> Row:
    dice, ace, nll = (comparison.find(method, metric=metric) for metric in ("dice", "ace", "nll"))
    return Row(method, dice, ace, nll, _compared(method, comparison), *_verdict(calibration))


def _verdict(calibration: Calibration) -> tuple[str, str]:
    if calibration.kind != "off":
        return WORDS[calibration.kind]
    name, verdict = next(iter(calibration.off.items()))
    word, _, about = f"{verdict.verb.removeprefix('is ')} {name}".partition(" ")
    others = len(calibration.off) - 1
    return word, about + (f"; {counted(others, 'other class', 'other classes')} off, too" if others else "")


def _compared(method: str, comparison: Comparison) -> str:
    baseline = comparison.methods[0]
    if method == baseline:
        return BASELINE
    ace, base = (comparison.find(name, metric="ace") for name in (method, baseline))
    if math.isnan(ace.value - base.value):
        return "no value"
    if math.isnan(ace.p):
        return "not tested"
    if not ace.stars:
        return "no clear difference"
    if ace.value > base.value:
        return "worse"
    return "better, at a cost" if cost_of(method, comparison) or _lost(method, comparison) else "better"


def _lost(method: str, comparison: Comparison) -> bool:
    """Whether overlap is lower than that of the baseline, beyond chance."""
    dice = comparison.find(method, metric="dice")
    return bool(dice.stars) and dice.value < comparison.find(comparison.methods[0], metric="dice").value


def _of_one(comparison: Comparison, found: Mapping[str, Calibration]) -> list[str]:
    ((method, calibration),) = found.items()
    entry = comparison.find(method, metric="ace")
    if calibration.kind == "none":
        return [_state(method, calibration)]
    chance = f"; a perfectly calibrated model would show at least {_points(entry.floor)} by chance"
    return [
        _state(method, calibration),
        f"Over all ranges of probability it is off by {_points(entry.value)} percentage points on average"
        f"{'' if math.isnan(entry.floor) else chance}.",
    ]


def _state(method: str, calibration: Calibration, *, still: bool = False) -> str:
    """Whether probabilities can be taken at their word."""
    start = "Still, " if still else ""
    match calibration.kind:
        case "none":
            return f"{method} has no calibration error: no class has a value."
        case "unknown":
            return f"Whether {method} is calibrated cannot be tested with fewer than {FEWEST_PATIENTS} patients."
        case "off":
            name, verdict = next(iter(calibration.off.items()))
            return f"{start}{method} {verdict.verb} {name}: {verdict.where}."
        case "uneven":
            return (
                f"{start}{method} is right on average over patients, but not case by case: the probabilities of "
                "single cases can be off."
            )
    return (
        f"{method} is well calibrated: no range of probabilities of a class is off by a percentage point beyond chance."
    )


def _of_several(comparison: Comparison, found: Mapping[str, Calibration]) -> list[str]:
    baseline, *others = comparison.methods
    aces = {method: comparison.find(method, metric="ace") for method in comparison.methods}
    base = aces[baseline]
    if math.isnan(base.value):
        return ["The methods cannot be compared: no case has a calibration error by every one of them."]
    better = sorted(
        (method for method in others if aces[method].stars and aces[method].value < base.value),
        key=lambda method: aces[method].value,
    )
    if better:
        best, *rest = better
        also = f"; those of {joined(rest)} are closer, too" if rest else ""
        return [
            f"The probabilities of {best} are closer to what is observed than those of {baseline}: "
            f"{_off(aces[best], base, 'they are')}, more than chance explains ({p_text(aces[best])}){also}.",
            *_overlap(best, comparison),
            _state(best, found[best], still=True),
        ]
    first = [_none_better(baseline, aces)] if len(others) > 1 else _of_two(others[0], comparison)
    return [*first, *([_state(baseline, found[baseline])] if found[baseline].kind != "unknown" else [])]


def _few(entry: Entry) -> bool:
    return math.isnan(entry.p)


def _none_better(baseline: str, aces: Mapping[str, Entry]) -> str:
    others = [entry for method, entry in aces.items() if method != baseline]
    if all(map(_few, others)):
        return (
            f"Whether any method is better calibrated than {baseline} cannot be told from fewer than {FEWEST_PATIENTS} "
            "patients."
        )
    worse = [entry.method for entry in others if entry.stars]
    told = f"; {joined(worse)} {'is' if len(worse) == 1 else 'are'} worse" if worse else ""
    return f"No method is shown to be better calibrated than {baseline}{told}."


def _of_two(method: str, comparison: Comparison) -> list[str]:
    """The method is not better than the baseline beyond chance."""
    baseline = comparison.methods[0]
    ace, base = (comparison.find(name, metric="ace") for name in (method, baseline))
    if math.isnan(ace.value):
        return [
            f"{method} cannot be compared with {baseline}: it has no calibration error, since no class has a value."
        ]
    if _few(ace):
        first = (
            f"Whether {method} is better calibrated than {baseline} cannot be told from fewer than {FEWEST_PATIENTS} "
            f"patients: {_off(ace, base)}."
        )
    elif ace.stars:
        first = (
            f"The probabilities of {method} are further from what is observed than those of {baseline}: "
            f"{_off(ace, base, 'they are')}, more than chance explains ({p_text(ace)})."
        )
    else:
        first = (
            f"{method} is not shown to be better or worse calibrated than {baseline}: {_off(ace, base)}, which may be "
            f"chance ({p_text(ace)})."
        )
    return [first, *_overlap(method, comparison)]


def _off(entry: Entry, base: Entry, who: str = "it is") -> str:
    return f"on average {who} off by {_points(entry.value)} percentage points against {_points(base.value)}"


def _overlap(method: str, comparison: Comparison) -> list[str]:
    """What became of the segmentations, and what a lower ACE cost."""
    dice, base = (comparison.find(name, metric="dice") for name in (method, comparison.methods[0]))
    cost = cost_of(method, comparison)
    price = f"{cost.price}: {cost.doubt}" if cost else ""
    if math.isnan(dice.value - base.value):
        return [f"But {price}."] if price else []
    values = f"{dice.value:.3f} against {base.value:.3f}"
    numbers = f"DSC {values}"
    if math.isnan(dice.p):
        told = f"Its segmentations have a DSC of {values}, not tested"
    elif not dice.stars:
        told = f"The overlap of its segmentations with the labels does not differ beyond chance ({numbers})"
    else:
        word = "more" if dice.value > base.value else "less"
        told = f"Its segmentations overlap {word} with the labels ({numbers}, {p_text(dice)})"
    if not price:
        return [f"{told}."]
    return [f"{told}{' and' if _lost(method, comparison) else ', but'} {price}."]


def _missing(comparison: Comparison) -> str:
    lacking = comparison.cases - comparison.complete
    return (
        f"{lacking} of {counted(comparison.cases, 'case')} {'lacks' if lacking == 1 else 'lack'} at least one class: a "
        "probability that a case gives to a class it lacks can only be too high."
    )


def _points(value: float) -> str:
    """In percentage points.

    >>> _points(0.1004)
    '10.0'
    """
    return f"{100 * value:.1f}"
