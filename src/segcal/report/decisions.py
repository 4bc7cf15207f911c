"""What the page draws of decisions: promises and truth of every case, curves, and a small table, as plain lists."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from segcal.comparison.comparison import Comparison
from segcal.evaluation.columns import Label
from segcal.evaluation.decisions import CURVES, Agreement, ClassAgreement, VolumeAgreement, agreements_of
from segcal.evaluation.evaluation import Evaluation
from segcal.report.content import rounded
from segcal.report.rendering import number

Array = np.ndarray[Any, Any]

POINTS = 51  # of a curve: the page is no more than 10 % larger for them
VOLUME_DIGITS = 3  # significant ones
NO_BREAK = "\N{NO-BREAK SPACE}"
ROWS = (
    "Cases with the class",
    "Expected DSC, mean",
    "Actual DSC, mean",
    "Bias: expected less actual DSC",
    "Mean absolute error",
    "Error of the best constant guess",
    "Rank correlation",
    "Area under risk and coverage",
    "Best threshold",
    "Best expected threshold",
    "Volume bias, decided",
    "Volume bias, expected",
)


def decision_data(
    comparison: Comparison, matched: Mapping[str, Evaluation], names: Sequence[str], shown: Sequence[int]
) -> dict[str, Any]:
    """Of each method, records of all classes and of each class; None for a method without sums of decisions.

    `names` are the page's cases, which points refer to; a point is drawn of those at the places `shown`.
    """
    found = agreements_of(matched)
    labels: list[Label] = [None if len(comparison.classes) > 1 else comparison.classes[0], *comparison.classes]
    known, places = next(iter(found.values()), None), {name: i for i, name in enumerate(names)}
    drawn = set(shown)
    rows = np.array([i for i, case in enumerate(known.cases) if places[case] in drawn] if known else [], dtype=int)
    return {
        "rows": ROWS,
        "unit": known.unit if known else "",
        "cases": [places[known.cases[i]] for i in rows] if known else [],
        "methods": [_records(found.get(method), labels, rows) for method in comparison.methods],
    }


def _records(agreement: Agreement | None, labels: Sequence[Label], rows: Array) -> list[dict[str, Any]] | None:
    if agreement is None:
        return None
    return [_record(agreement.labels[label], agreement.unit, rows) for label in labels]


def _record(found: ClassAgreement, unit: str, rows: Array) -> dict[str, Any]:
    """Points are those of some cases; all else is of all."""
    curves, volume = found.thresholds, found.decided_volume
    return {
        "expected": _rounded(np.where(np.isnan(found.actual), np.nan, found.expected)[rows]),
        "actual": _rounded(found.actual[rows]),
        "risk": [_thinned(x) for x in (found.risk.coverage, found.risk.risk, found.risk.ideal)],
        "chance": rounded(found.risk.random_area),
        "thresholds": _thinned(curves.thresholds),
        "curves": [_thinned(getattr(curves, name)) for name in CURVES],
        "best": [rounded(curves.best.threshold), rounded(curves.best.dice)],
        "promised": [rounded(curves.promised.threshold), rounded(curves.promised.expected_dice)],
        "volumes": volume
        and {
            "mean": _shortened(volume.mean[rows]),
            "difference": _shortened(volume.difference[rows]),
            "limits": _shortened(np.array([volume.low, volume.bias, volume.high])),
        },
        "table": _table(found, unit),
    }


def _table(found: ClassAgreement, unit: str) -> list[tuple[str, str]]:
    """A number and a remark for each of `ROWS`."""
    dice, risk, curves = found.dice, found.risk, found.thresholds
    best, promised = curves.best, curves.promised
    return [
        (str(dice.cases), ""),
        (number(dice.expected), ""),
        (number(dice.actual), ""),
        (_signed(dice.bias, 3), ""),
        (number(dice.mean_absolute_error), ""),
        (number(dice.constant_guess), ""),
        (_signed(dice.rank_correlation, 2), ""),
        (number(risk.area), f"ideal {number(risk.ideal_area)}, random {number(risk.random_area)}"),
        (number(best.threshold, 2), f"DSC {number(best.dice)}, decision {number(curves.decision_dice)}"),
        (number(promised.threshold, 2), f"DSC {number(promised.dice)}, expected {number(promised.expected_dice)}"),
        _volume(found.decided_volume, unit),
        _volume(found.expected_volume, unit),
    ]


def _volume(volume: VolumeAgreement | None, unit: str) -> tuple[str, str]:
    if volume is None or math.isnan(volume.bias):
        return "-", ""
    limits = "" if math.isnan(volume.low) else f"[{_amount(volume.low)},{NO_BREAK}{_amount(volume.high)}]"
    return f"{_amount(volume.bias)}{NO_BREAK}{unit}", limits


def _amount(value: float) -> str:
    """With three significant digits and no power of ten.

    >>> _amount(1234.5), _amount(0.01234), _amount(12.0)
    ('1,230', '0.0123', '12')
    """
    short = float(f"{value:.{VOLUME_DIGITS}g}")
    digits = max(0, VOLUME_DIGITS - 1 - math.floor(math.log10(abs(short)))) if short else 0
    text = f"{short:,.{digits}f}"
    return _minus(text.rstrip("0").rstrip(".") if "." in text else text)


def _signed(value: float, digits: int) -> str:
    """Without a sign where it is rounded to 0."""
    return _minus(number(round(value, digits) + 0.0, digits))


def _minus(text: str) -> str:
    return text if text == "-" else text.replace("-", "\N{MINUS SIGN}")


def _thinned(values: Array) -> list[Any]:
    """At most `POINTS` of a curve, its ends among them."""
    last = max(len(values) - 1, 0)
    places = np.unique(np.linspace(0, last, POINTS).round().astype(int))
    return _rounded(values[places[: len(values)]])


def _rounded(values: Array) -> list[Any]:
    return [rounded(x) for x in values.tolist()]


def _shortened(values: Array) -> list[float | None]:
    """To five significant digits: a volume may be a thousandth of a milliliter, or a liter."""
    return [None if math.isnan(x) else float(f"{x:.5g}") for x in values.tolist()]
