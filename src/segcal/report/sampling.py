"""Which cases of a large cohort the page shows one by one.

A page that holds the diagrams of ten thousand cases opens in no browser. Up to a limit it holds all; beyond, those of
the worst cases and of an even sample of the others. The table of cases has every case, whatever their number.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from segcal.evaluation.evaluation import Evaluation

Array = NDArray[Any]

MOST_DIAGRAMS = 6400  # reliability diagrams of single cases: about 5 MB
MOST_NAMED = 200  # cases that are named one after the other in a list
WORST_SHARE = 0.5  # of the cases that are shown


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
