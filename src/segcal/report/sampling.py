"""Which cases of a large cohort the page shows one by one, and the numbers of all of them in few bytes.

A page that holds the diagrams of ten thousand cases opens in no browser. Up to a limit it holds all; beyond, those of
the worst cases and of an even sample of the others. The table of cases has every case, whatever their number.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from segcal.evaluation.evaluation import Evaluation

Array = NDArray[Any]

MOST_DIAGRAMS = 6400  # reliability diagrams of single cases: about 5 MB
MOST_LISTED = 2**18  # numbers of cases that are written as they are; more are rounded to 16 bits
MOST_NAMED = 200  # cases that are named one after the other in a list
WORST_SHARE = 0.5  # of the cases that are shown
NOTHING = -(2**15)  # stands for no number


def shown_cases(evaluations: Mapping[str, Evaluation], names: Sequence[str], wanted: Sequence[str]) -> list[int]:
    """The places of the cases whose diagrams the page holds, in order: all of them, if they are not too many.

    Else those that are wanted, the worst by ACE and by DSC in turn, and others evenly from all.
    """
    classes = len(next(iter(evaluations.values())).classes)
    most = max(1, MOST_DIAGRAMS // max(1, classes * len(evaluations)))
    if len(names) <= most:
        return list(range(len(names)))
    place = {name: i for i, name in enumerate(names)}
    chosen = dict.fromkeys(place[name] for name in wanted if name in place)
    ace, overlap = (_worst(evaluations, place, metric) for metric in ("ace", "dice"))
    ranked = np.stack([np.argsort(-ace, kind="stable"), np.argsort(overlap, kind="stable")], 1).reshape(-1)
    for i in ranked.tolist():
        if len(chosen) >= WORST_SHARE * most:
            break
        chosen[i] = None
    others = [i for i in range(len(names)) if i not in chosen]
    for i in np.linspace(0, len(others) - 1, max(0, most - len(chosen))).round().astype(int).tolist():
        chosen[others[i]] = None
    return sorted(chosen)


def _worst(evaluations: Mapping[str, Evaluation], place: Mapping[str, int], metric: str) -> Array:
    """Of each case the mean over classes by the method that is worst; what has no number is no bad one."""
    low = metric == "dice"
    found = np.full(len(place), np.inf if low else -np.inf)
    for evaluation in evaluations.values():
        values = evaluation.case_values()[None, metric].numpy()
        at = [place[name] for name in evaluation.cases]
        found[at] = np.fmin(found[at], values) if low else np.fmax(found[at], values)
    return found


def short_numbers(table: Array, digits: int) -> dict[str, Any]:
    """(case, label, column) numbers as text: 16 bits each, of a column all in steps of the same size.

    A step is a unit of the last digit, or larger where numbers are; no number is the smallest of 16 bits.
    """
    steps = []
    codes = np.empty(table.shape, "<i2")
    for i in range(table.shape[2]):
        values = table[:, :, i]
        finite = np.abs(values[np.isfinite(values)])
        step = max(10.0**-digits, float(finite.max(initial=0.0)) / (2**15 - 2))
        with np.errstate(invalid="ignore"):
            codes[:, :, i] = np.where(np.isfinite(values), np.rint(values / step), NOTHING)
        steps.append(step)
    return {"shape": list(table.shape), "steps": steps, "codes": base64.b64encode(codes.tobytes()).decode()}
