"""What the page draws: diagrams and cases as plain lists, rounded, with None where there is no number.

Lists, not objects, and only bins that hold anything: 200 cases of 15 classes by two methods stay a few megabytes.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from segcal.comparison.comparison import Comparison
from segcal.evaluation.columns import HIGHER_IS_BETTER, RADAR, Column
from segcal.evaluation.diagrams import Reliability, normalize, reliabilities, reliability_histogram
from segcal.evaluation.evaluation import Evaluation
from segcal.evaluation.intervals import wilson
from segcal.report.reading import MethodDiagrams
from segcal.statistics import BinStatistics
from segcal.viewer.embedding import packed

DIGITS = 4
CASE_COLUMNS = tuple(
    Column(metric, "macro") for metric in ("dice", "ace", "occupied", "nll", "brier", "ece", "mce", "signed_gap")
)
"""What the case table shows of each case."""


def method_diagrams(
    evaluations: Mapping[str, Evaluation], patients: Sequence[str], *, level: float, seed: int
) -> dict[str, MethodDiagrams]:
    """Of each method the reliability of all classes together and of each; bands are from a bootstrap over patients."""
    several = [
        stats.select(classes=columns)
        for stats in (evaluation.binned for evaluation in evaluations.values())
        for columns in (range(stats.classes), *([i] for i in range(stats.classes)))
    ]
    found = iter(reliabilities(several, patients=patients, level=level, seed=seed))
    return {
        method: MethodDiagrams(next(found), {name: next(found) for name in evaluation.classes})
        for method, evaluation in evaluations.items()
    }


def chart_data(
    comparison: Comparison, matched: Mapping[str, Evaluation], diagrams: Mapping[str, MethodDiagrams]
) -> dict[str, Any]:
    """The figures of all cases. Those of a method start with all classes together and go on with each."""
    return {
        "methods": comparison.methods,
        "classes": comparison.classes,
        "bins": comparison.bins,
        "reliability": [
            [_reliability(diagram) for diagram in (of.pooled, *of.classes.values())] for of in diagrams.values()
        ],
        "histograms": [_histograms(evaluation.binned) for evaluation in matched.values()],
        "radar": [_radar(comparison, which) for which in comparison.case_sets] if len(matched) > 1 else [],
    }


def _reliability(diagram: Reliability) -> dict[str, Any]:
    columns = (diagram.count, diagram.confidence, diagram.frequency, diagram.low, diagram.high)
    return {
        "rows": _occupied_rows(columns),
        "errors": [rounded(value) for value in (diagram.ace, diagram.ece, diagram.mce)],
        "band": diagram.band,
    }


def _occupied_rows(columns: Sequence[Tensor]) -> list[list[float]]:
    """(bin, count, confidence, frequency, low, high) of each bin that holds anything."""
    rows = zip(*(column.tolist() for column in columns), strict=True)
    return [[i, rounded(row[0]), *map(rounded, row[1:])] for i, row in enumerate(rows) if not math.isnan(row[2])]


def _histograms(stats: BinStatistics) -> list[dict[str, Any]]:
    columns = [range(stats.classes), *([i] for i in range(stats.classes))]
    return [_histogram(stats.select(classes=some)) for some in columns]


def _histogram(stats: BinStatistics) -> dict[str, Any]:
    histogram = reliability_histogram(stats)
    filled = histogram.share.nonzero().tolist()
    means = zip(histogram.cases.tolist(), histogram.confidence.tolist(), histogram.frequency.tolist(), strict=True)
    return {
        "cells": [[i, level, rounded(histogram.share[i, level].item())] for i, level in filled],
        "means": [[i, *map(rounded, row)] for i, row in enumerate(means) if row[0]],
    }


def _radar(comparison: Comparison, which: str) -> dict[str, Any]:
    values = torch.tensor(
        [
            [comparison.find(method, cases=which, average=axis.average, metric=axis.metric).value for axis in RADAR]
            for method in comparison.methods
        ],
        dtype=torch.float64,
    )
    higher = torch.tensor([axis.metric in HIGHER_IS_BETTER for axis in RADAR])
    return {
        "cases": which,
        "number": comparison.cases if which == "all" else comparison.complete,
        "axes": [axis.heading for axis in RADAR],
        "values": [[rounded(x) for x in row] for row in values.tolist()],
        "normalized": [[rounded(x) for x in row] for row in normalize(values, higher_is_better=higher).tolist()],
    }


def case_data(
    evaluations: Mapping[str, Evaluation], patients: Mapping[str, str], shown: Sequence[int], *, level: float
) -> dict[str, Any]:
    """Every case that a method has, also those that others lack: its metrics; of those shown its bins class by class.

    `patients` names the patient of each case, in the order of the page; `shown` are places there.
    """
    names = list(patients)
    missing: dict[str, list[int]] = {}
    for evaluation in evaluations.values():
        absent = (evaluation.overlap.true == 0).tolist()
        for name, row in zip(evaluation.cases, absent, strict=True):
            missing[name] = [i for i, gone in enumerate(row) if gone]
    some = [names[i] for i in shown]
    values = [_case_values(names, part) for part in evaluations.values()]
    return {
        "names": names,
        "patients": None if all(name == patient for name, patient in patients.items()) else list(patients.values()),
        "columns": [column.name for column in CASE_COLUMNS],
        "digits": [column.digits for column in CASE_COLUMNS],
        "missing": [missing[name] for name in names],
        "values": packed(json.dumps(values, separators=(",", ":")).encode()),
        "shown": None if len(shown) == len(names) else list(shown),
        "rows": [_case_rows(some, part, level) for part in evaluations.values()],
    }


def _case_values(names: Sequence[str], evaluation: Evaluation) -> list[Any]:
    """For each case its metrics, of all classes first, then of each class; None for a case that this method lacks."""
    values = evaluation.case_values()
    table = [
        [values[label, column.metric].tolist() for column in CASE_COLUMNS] for label in (None, *evaluation.classes)
    ]
    place = {name: i for i, name in enumerate(evaluation.cases)}
    return [
        [[rounded(column[place[name]]) for column in of_label] for of_label in table] if name in place else None
        for name in names
    ]


def _case_rows(names: Sequence[str], evaluation: Evaluation, level: float) -> list[Any]:
    """For each case and class, the rows of its reliability diagram; a single case has but Wilson's band.

    None for a case that this method lacks.
    """
    place = {name: i for i, name in enumerate(evaluation.cases)}
    stats = evaluation.binned.select(cases=[place[name] for name in names if name in place])
    columns = (stats.count, stats.mean_confidence, stats.frequency, *wilson(stats.label_sum, stats.count, level=level))
    found = iter(zip(*columns, strict=True))
    return [
        [_occupied_rows(of_class) for of_class in zip(*next(found), strict=True)] if name in place else None
        for name in names
    ]


def rounded(value: float) -> Any:
    """To `DIGITS` places; a whole number without a point; None for NaN, which JSON does not know."""
    if math.isnan(value):
        return None
    short = round(value, DIGITS)
    return int(short) if short == int(short) else short
