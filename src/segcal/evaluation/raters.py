"""What several raters of the same cases tell, case by case and as a table: errors against their mean and against each,
how far they agree, and what they reach among themselves. Definitions are in docs/reference/numbers.md.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from segcal.evaluation.facets import votes_place
from segcal.evaluation.intervals import (
    FEWEST_PATIENTS,
    expanded,
    patients_of,
    quantile_interval,
    resample_weights,
    weighted_mean,
)
from segcal.evaluation.rated import Votes
from segcal.evaluation.tables import ALL_CLASSES, Cell, Table
from segcal.evaluation.voting import ERRORS, deviation, floor_errors, floor_sums, numbers_of_votes
from segcal.statistics import BinStatistics

if TYPE_CHECKING:
    from segcal.evaluation.evaluation import Evaluation
    from segcal.evaluation.outcome import Outcome

Array = NDArray[Any]
PREFIX = "raters/"
LEVEL = 0.95  # of intervals
SHOWN = {
    "calibration": {
        "ace": "ACE to mean",
        "ace_each": "ACE to each",
        "ace_spread": "spread",
        "ace_floor": "rater floor",
    },
    "overlap": {
        "dice_each": "DSC to each",
        "dice_between": "DSC between raters",
        "dice_majority": "DSC to majority",
    },
}
"""Tables by what they are about: metrics, and their titles."""


class RaterNumber(NamedTuple):
    """One number of one case and class."""

    case: str
    label: str
    metric: str
    value: float


class RaterRow(NamedTuple):
    """A mean over cases, with its 95 % interval over patients; NaN where there are too few patients."""

    label: str
    metric: str
    value: float
    low: float
    high: float
    number: int


def numbers_of_raters(outcome: Outcome) -> tuple[list[RaterNumber], list[RaterRow]]:
    """Return the numbers of every case and class, and those of all cases pooled; votes are read from the parts."""
    evaluation = outcome.evaluation
    facets = {name.removeprefix(PREFIX): own for name, own in outcome.facets.items() if name.startswith(PREFIX)}
    raters = {rater: _rater_errors(own) for rater, own in facets.items()}
    own = evaluation.case_metrics()
    rows: list[RaterNumber] = []
    floors: BinStatistics | None = None
    for i, case in enumerate(evaluation.cases):
        votes = Votes.load(votes_place(outcome.parts[case]))
        floor = floor_sums(votes, evaluation.bins)
        floors = floor.pool("case") if floors is None else floors + floor.pool("case")
        found = numbers_of_votes(votes)
        found |= {f"{metric}_floor": values for metric, values in floor_errors(floor).items()}
        for metric in ERRORS:
            errors = np.array([raters[name][case][metric] for name in votes.raters])
            found[metric] = own[metric][i].numpy()
            found |= {f"{metric}_each": errors.mean(0), f"{metric}_spread": deviation(errors)}
        rows += [
            RaterNumber(case, label, metric, float(values[c]))
            for c, label in enumerate(evaluation.classes)
            for metric, values in found.items()
        ]
    return rows, [] if floors is None else _pooled(evaluation, floors)


def _rater_errors(evaluation: Evaluation) -> dict[str, dict[str, Array]]:
    """Return the errors (class) against one rater, by case and metric."""
    metrics = evaluation.case_metrics()
    return {case: {name: metrics[name][i].numpy() for name in ERRORS} for i, case in enumerate(evaluation.cases)}


def _pooled(evaluation: Evaluation, floors: BinStatistics) -> list[RaterRow]:
    """Errors of all cases together, against the mean of the raters, and the floor that the raters reach."""
    reached, sums = floor_errors(floors), evaluation.statistics.pool("case").rebin(evaluation.bins)
    return [
        RaterRow(label, name, float(values[c]), math.nan, math.nan, len(evaluation.cases))
        for metric, error in ERRORS.items()
        for name, values in ((f"{metric}_pooled", error(sums)[0]), (f"{metric}_floor_pooled", reached[metric]))
        for c, label in enumerate(evaluation.classes)
    ]


def summarize_raters(rows: Sequence[RaterNumber], *, patients: str | None = None, seed: int = 0) -> list[RaterRow]:
    """Means over cases of each class and metric, and over classes (label ""), with intervals over patients."""
    cases, labels, metrics = (list(dict.fromkeys(column)) for column in list(zip(*rows, strict=True))[:3])
    numbers = {row[:3]: row.value for row in rows}
    values = torch.tensor(
        [[[numbers[case, label, metric] for metric in metrics] for label in labels] for case in cases],
        dtype=torch.float64,
    )
    several = torch.cat([values, values.nanmean(1, keepdim=True)], 1) if len(labels) > 1 else values
    names = [*labels, ""] if len(labels) > 1 else labels
    who = patients_of(cases, patients)
    draws, found = weighted_mean(several.flatten(1), resample_weights(who, seed=seed)), []
    low, high = quantile_interval(draws, level=expanded(LEVEL, len(set(who))))
    for i, (name, metric) in enumerate((name, metric) for name in names for metric in metrics):
        column = several.flatten(1)[:, i]
        known = ~column.isnan()
        enough = len({patient for patient, has in zip(who, known.tolist(), strict=True) if has}) >= FEWEST_PATIENTS
        ends = (low[i].item(), high[i].item()) if enough else (math.nan, math.nan)
        found.append(RaterRow(name, metric, column.nanmean().item(), *ends, int(known.sum())))
    return found


def told(rows: Sequence[RaterRow]) -> list[dict[str, Any]]:
    """The rows of the table as JSON has them, without NaN."""
    metrics = {"raters", *(metric for columns in SHOWN.values() for metric in columns)}
    shown = [row._asdict() for row in rows if row.metric in metrics]
    return [{k: None if isinstance(v, float) and math.isnan(v) else v for k, v in row.items()} for row in shown]


def raters_of(evaluation: Evaluation) -> list[RaterRow]:
    """What the provenance of an evaluation says of its raters; nothing where there was one label map of each case."""
    rows = []
    for row in evaluation.provenance.get("raters", []):
        with suppress(KeyError, TypeError, ValueError):  # whoever wrote it
            numbers = (math.nan if row[name] is None else float(row[name]) for name in ("value", "low", "high"))
            value, low, high = numbers
            rows.append(RaterRow(str(row["label"]), str(row["metric"]), value, low, high, int(row["number"])))
    return rows


def read_rater_rows(results: Path) -> list[RaterRow]:
    """What raters_summary.csv in a folder of results holds; nothing where there is none."""
    path = results / "raters_summary.csv"
    if not path.is_file():
        return []
    with path.open(newline="", encoding="utf-8") as file:
        return [
            RaterRow(
                row["class"],
                row["metric"],
                float(row["value"]),
                float(row["low"]),
                float(row["high"]),
                int(row["number"]),
            )
            for row in csv.DictReader(file)
        ]


def rater_tables(rows: Sequence[RaterRow]) -> list[Table]:
    """Means over cases of the most telling numbers, a row for each class."""
    if not rows:
        return []
    found = {(row.label, row.metric): row for row in rows}
    labels = list(dict.fromkeys(row.label for row in rows))
    number = max((row.value for row in rows if row.metric == "raters"), default=math.nan)

    def row(label: str, metrics: Iterable[str]) -> tuple[Cell, ...]:
        return Cell(label or ALL_CLASSES), *(_cell(found.get((label, metric))) for metric in metrics)

    return [
        Table(
            f"{number:.3g} raters for each case, on average: {about}",
            ("class", *columns.values()),
            tuple(row(label, columns) for label in labels),
        )
        for about, columns in SHOWN.items()
    ]


def rater_sentences() -> list[str]:
    """What the columns of the table are."""
    return [
        "ACE to mean: calibration against the mean of the raters, as in the table above. ACE to each: mean of the "
        "errors against each rater; spread: their standard deviation. Rater floor: the same error of the mean of the "
        "other raters against each rater.",
        "All numbers, with intervals over patients: raters_summary.csv; of each case: raters.csv; results against "
        "each rater: raters/NAME.",
    ]


def _cell(row: RaterRow | None) -> Cell:
    if row is None or math.isnan(row.value):
        return Cell("-")
    return Cell(f"{row.value:.4f}", "" if math.isnan(row.low) else f"[{row.low:.3f}, {row.high:.3f}]")
