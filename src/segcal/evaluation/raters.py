"""What several raters of the same cases tell, case by case and as a table: errors against their mean and against each,
how far they agree, and what they reach among themselves. Definitions are in docs/reference/numbers.md.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from segcal.evaluation.facets import facet_files, votes_place
from segcal.evaluation.intervals import patients_of, quantile_interval, resample_weights, weighted_mean
from segcal.evaluation.rated import Votes
from segcal.evaluation.sums import CaseSums
from segcal.evaluation.tables import ALL_CLASSES, Cell, Table
from segcal.evaluation.voting import (
    CURVAS_BINS,
    ERRORS,
    curvas_numbers,
    deviation,
    floor_errors,
    floor_sums,
    nested_distance,
    numbers_of_votes,
)
from segcal.metrics import ece
from segcal.statistics import BinStatistics

if TYPE_CHECKING:
    from segcal.evaluation.evaluation import Evaluation
    from segcal.evaluation.outcome import Outcome

Array = NDArray[Any]
PREFIX = "raters/"
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
        "dice_staple": "DSC to STAPLE",
        "ged": "GED",
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


def numbers_of_raters(outcome: Outcome, *, curvas: bool = False) -> tuple[list[RaterNumber], list[RaterRow]]:
    """Of every case and class all that its raters tell, while the sums of cases are at hand; then of all cases pooled.

    curvas: Whether the scores of the CURVAS challenge are among it.
    """
    facets = {name.removeprefix(PREFIX): own for name, own in outcome.facets.items() if name.startswith(PREFIX)}
    tops = {
        rater: (own.cases, ece(own.top_label.rebin(CURVAS_BINS))[:, 0])
        for rater, own in facets.items()
        if curvas and own.top_label is not None
    }

    def votes(case: str) -> Votes:
        return Votes.load(votes_place(outcome.parts[case]))

    def bins_of(case: str, rater: str) -> Array:
        return CaseSums.load(facet_files(outcome.parts[case])[f"{PREFIX}{rater}"])[0].bins

    def of_top(case: str, raters: Sequence[str]) -> Array:
        return np.array([float(tops[rater][1][tops[rater][0].index(case)]) for rater in raters if rater in tops])

    rows = rater_numbers(outcome.evaluation, facets, votes, bins_of, of_top if curvas else None)
    return rows, _pooled(outcome.evaluation, votes)


def _pooled(evaluation: Evaluation, votes: Callable[[str], Votes]) -> list[RaterRow]:
    """Errors of all cases together, against the mean of the raters, and the floor that the raters reach."""
    total: BinStatistics | None = None
    for case in evaluation.cases:
        own = floor_sums(votes(case), evaluation.bins).pool("case")
        total = own if total is None else total + own
    if total is None:
        return []
    floors, sums = floor_errors(total), evaluation.statistics.pool("case").rebin(evaluation.bins)
    return [
        RaterRow(label, name, float(values[c]), math.nan, math.nan, len(evaluation.cases))
        for metric, error in ERRORS.items()
        for name, values in ((f"{metric}_pooled", error(sums)[0]), (f"{metric}_floor_pooled", floors[metric]))
        for c, label in enumerate(evaluation.classes)
    ]


def rater_numbers(
    evaluation: Evaluation,
    facets: Mapping[str, Evaluation],
    votes: Callable[[str], Votes],
    bins_of: Callable[[str, str], Array],
    ece_of: Callable[[str, Sequence[str]], Array] | None = None,
) -> list[RaterNumber]:
    """Of every case and class all that its raters tell, case by case.

    evaluation: Of the cases against the mean of their raters.
    facets: Against each rater, by name; a rater may miss cases.
    votes: Of a case by name.
    bins_of: (3, class, fine bin) sums of a case against a rater, by their names.
    ece_of: Of a case and its raters, the errors of the most probable class for the scores of CURVAS, if asked for.
    """
    errors = {rater: (own.cases, own.case_metrics()) for rater, own in facets.items()}
    places = {rater: {case: i for i, case in enumerate(cases)} for rater, (cases, _) in errors.items()}
    own = evaluation.case_metrics()
    decisions = evaluation.decisions
    rows: list[RaterNumber] = []
    for i, case in enumerate(evaluation.cases):
        drawn = votes(case)
        unit = 1.0
        if decisions is not None and not bool(decisions.voxel_ml[i, 0].isnan()):
            unit = decisions.voxel_ml[i, 0].item()
        found = numbers_of_votes(drawn, bins=evaluation.bins, unit=unit)
        found["ged_thresholds"] = nested_distance(drawn, [bins_of(case, rater) for rater in drawn.raters])
        if ece_of is not None:
            found |= curvas_numbers(drawn, ece_of(case, drawn.raters), unit=1000 * unit if unit != 1.0 else unit)
        for metric in ERRORS:
            each = np.array([errors[rater][1][metric][places[rater][case]].numpy() for rater in drawn.raters])
            found |= {
                metric: own[metric][i].numpy(),
                f"{metric}_each": each.mean(0),
                f"{metric}_spread": deviation(each),
            }
        rows += [
            RaterNumber(case, label, metric, float(values[c]))
            for c, label in enumerate(evaluation.classes)
            for metric, values in found.items()
        ]
    return rows


def summarize_raters(rows: Sequence[RaterNumber], *, patients: str | None = None, seed: int = 0) -> list[RaterRow]:
    """Means over cases of each class and metric, and over classes (label ""), with intervals over patients."""
    cases = list(dict.fromkeys(row.case for row in rows))
    labels = list(dict.fromkeys(row.label for row in rows))
    metrics = list(dict.fromkeys(row.metric for row in rows))
    place = {name: i for names in (cases,) for i, name in enumerate(names)}
    values = torch.full((len(cases), len(labels), len(metrics)), math.nan, dtype=torch.float64)
    for row in rows:
        values[place[row.case], labels.index(row.label), metrics.index(row.metric)] = row.value
    several = torch.cat([values, values.nanmean(1, keepdim=True)], 1) if len(labels) > 1 else values
    names = [*labels, ""] if len(labels) > 1 else labels
    weights = resample_weights(patients_of(cases, patients), seed=seed)
    flat = several.flatten(1)
    low, high = quantile_interval(weighted_mean(flat, weights))
    found = zip(flat.nanmean(0).tolist(), low.tolist(), high.tolist(), (~flat.isnan()).sum(0).tolist(), strict=True)
    keys = [(name, metric) for name in names for metric in metrics]
    return [RaterRow(*key, *numbers) for key, numbers in zip(keys, found, strict=True)]


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
        "other raters against each rater. GED: generalized energy distance, 0 is best.",
        "All numbers, with intervals over patients: raters_summary.csv; of each case: raters.csv; results against "
        "each rater: raters/NAME.",
    ]


def _cell(row: RaterRow | None) -> Cell:
    if row is None or math.isnan(row.value):
        return Cell("-")
    return Cell(f"{row.value:.4f}", "" if math.isnan(row.low) else f"[{row.low:.3f}, {row.high:.3f}]")
