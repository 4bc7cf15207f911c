"""What was found of lesions, as an object, as files and as tables."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from segcal._io.files import replacing, write_csv, write_whole
from segcal._io.jobs import Failure
from segcal._io.parsing import parse_json
from segcal._io.words import counted
from segcal.errors import FileError, SegcalError
from segcal.evaluation.tables import Cell, Table
from segcal.lesions.case import Lesion
from segcal.lesions.components import Rules
from segcal.volumes import Pairing

if TYPE_CHECKING:
    from segcal.evaluation.diagrams import Reliability
    from segcal.lesions.numbers import Froc, Number

FORMAT = "segcal lesions 2"
RESULTS = ("lesions.csv", "summary.csv", "summary.json", "froc.csv", "failures.csv")
COLUMNS = tuple(name.removesuffix("_name") for name in Lesion._fields)
HEADINGS = {
    "sensitivity": "Sensitivity",
    "precision": "Precision",
    "f1": "F1",
    "false_positives_per_case": "FP per case",
    "froc": "FROC mean",
    "ace": "ACE",
    "ece": "ECE",
}


@dataclass(frozen=True, eq=False)
class LesionSummary:
    """The numbers of a cohort: what tables, figures and the report show.

    numbers: every number, with its interval, by class.
    curves: FROC of each class.
    diagrams: reliability of each class.
    """

    rules: Rules
    classes: tuple[str, ...]
    cases: int
    patients: int
    bins: int
    level: float
    numbers: tuple[Number, ...]
    curves: dict[str, Froc]
    diagrams: dict[str, Reliability]

    def find(self, class_name: str, metric: str) -> Number:
        """The number of a class; LookupError where there is none."""
        for number in self.numbers:
            if (number.class_name, number.metric) == (class_name, metric):
                return number
        raise LookupError(f"there is no {metric} of {class_name}.")


@dataclass(frozen=True, eq=False)
class LesionOutcome:
    """What `segcal.evaluate_lesions` found.

    lesions: every predicted and every true lesion.
    summary: their numbers; None where no case could be measured.
    failures: the cases that could not, (case, kind, message) each.
    pairing: which files belong together, and which have no partner.
    """

    lesions: list[Lesion]
    summary: LesionSummary | None
    failures: list[Failure]
    pairing: Pairing


def lesion_table(summary: LesionSummary) -> Table:
    """A row for each class."""
    rows = []
    for name in summary.classes:
        lesions = [Cell(str(summary.find(name, metric).number)) for metric in ("sensitivity", "precision")]
        rows.append((Cell(name), *lesions, *(_cell(summary.find(name, metric)) for metric in HEADINGS)))
    patients = "" if summary.patients == summary.cases else f" of {counted(summary.patients, 'patient')}"
    title = f"Lesions in {counted(summary.cases, 'case')}{patients}, {counted(summary.bins, 'bin')}"
    return Table(title, ("class", "true", "predicted", *HEADINGS.values()), tuple(rows))


def froc_table(summary: LesionSummary) -> Table:
    """Sensitivity at each rate of false positives, a row for each class."""
    from segcal.lesions.numbers import RATES, rate_name

    names = [rate_name(rate) for rate in RATES]
    rows = [
        (Cell(name), *(_cell(summary.find(name, metric)) for metric in (*names, "froc"))) for name in summary.classes
    ]
    headings = tuple(name.removeprefix("sensitivity_at_") for name in names)
    return Table("Sensitivity at false positives per case", ("class", *headings, "mean"), tuple(rows))


def _cell(number: Number) -> Cell:
    if math.isnan(number.value):
        return Cell("-")
    interval = "" if math.isnan(number.low) else f"[{number.low:.2f}, {number.high:.2f}]"
    return Cell(f"{number.value:.3f}", interval)


def lesion_notes(summary: LesionSummary) -> list[str]:
    """What a reader must know to read the tables."""
    from segcal.evaluation.intervals import FEWEST_PATIENTS

    rules = summary.rules
    match = "share a voxel" if rules.overlap == 0 else f"have an intersection over union of at least {rules.overlap:g}"
    found = [
        f"A predicted lesion: voxels with a probability of at least {rules.threshold:g} that are connected "
        f"({rules.connectivity} neighbors); its confidence is the {'largest' if rules.confidence == 'max' else 'mean'} "
        f"probability in it. It is real, and the true lesion found, where the two {match}.",
        "FROC mean: sensitivity at 1/8, 1/4, 1/2, 1, 2, 4 and 8 false positives per case, averaged. ACE and ECE: of "
        "the confidence against the share of predicted lesions that are real.",
    ]
    if summary.patients < FEWEST_PATIENTS:
        found.append(f"No intervals: there are {summary.patients} patients, and {FEWEST_PATIENTS} are needed.")
    else:
        found.append(f"Square brackets: {summary.level:.0%} bootstrap interval over patients.")
    return found


def write_lesions(outcome: LesionOutcome, out: Path, about: Mapping[str, Any]) -> None:
    """Write lesions.csv, summary.csv, froc.csv and summary.json, in the place of those that are there.

    Where no case could be measured, failures.csv alone.
    """
    with replacing(out, RESULTS) as new:
        write_csv(new / "failures.csv", Failure._fields, outcome.failures)
        summary = outcome.summary
        if summary is None:
            return
        write_csv(new / "lesions.csv", COLUMNS, (_plain(lesion) for lesion in outcome.lesions))
        fields = ("class", "metric", "value", "low", "high", "number")
        write_csv(new / "summary.csv", fields, (_plain(number) for number in summary.numbers))
        write_csv(
            new / "froc.csv",
            ("class", "confidence", "false_positives_per_case", "sensitivity"),
            ((name, *row) for name, curve in summary.curves.items() for row in zip(*curve, strict=True)),
        )
        content = {"format": FORMAT, **about, "failed": len(outcome.failures)} | _content(summary)
        write_whole(new / "summary.json", json.dumps(content, indent=2, ensure_ascii=False).encode())


def _plain(row: Sequence[Any]) -> list[Any]:
    """Empty cells for what has no value."""
    return ["" if cell is None or (isinstance(cell, float) and math.isnan(cell)) else cell for cell in row]


def _content(summary: LesionSummary) -> dict[str, Any]:
    """The summary as JSON has it: null for what has no value."""

    def listed(values: Any) -> list[float | None]:
        return [None if math.isnan(x) else x for x in values.tolist()]

    return {
        "rules": asdict(summary.rules),
        **{name: getattr(summary, name) for name in ("classes", "cases", "patients", "bins", "level")},
        "summary": [
            {
                key.removesuffix("_name"): None if isinstance(x, float) and math.isnan(x) else x
                for key, x in number._asdict().items()
            }
            for number in summary.numbers
        ],
        "froc": {
            name: {key: listed(x) for key, x in curve._asdict().items()} for name, curve in summary.curves.items()
        },
        "reliability": {
            name: {key: listed(getattr(diagram, key)) for key in _DIAGRAM} | {"band": diagram.band}
            for name, diagram in summary.diagrams.items()
        },
    }


_DIAGRAM = ("edges", "count", "confidence", "frequency", "low", "high")


def read_lesions(folder: str | os.PathLike[str]) -> LesionSummary:
    """The summary that `evaluate_lesions` wrote to a folder; FileError where it is not there."""
    import numpy as np
    import torch

    from segcal.evaluation.diagrams import Reliability
    from segcal.lesions.numbers import Froc, Number

    path = Path(folder) / "summary.json"
    if not path.is_file():
        raise FileError(f"--lesions must be a folder that `segcal lesions` wrote; {path} does not exist. Run it.")

    def value(x: float | None) -> float:
        return math.nan if x is None else float(x)

    try:
        content = parse_json(path.read_text(encoding="utf-8"))
        if content["format"] != FORMAT:
            raise ValueError(f"its format is {content['format']!r}")
        numbers = tuple(
            Number(
                str(row["class"]),
                str(row["metric"]),
                value(row["value"]),
                value(row["low"]),
                value(row["high"]),
                int(row["number"]),
            )
            for row in content["summary"]
        )
        errors = {(row.class_name, row.metric): row.value for row in numbers}
        diagrams = {}
        for name, rows in content["reliability"].items():
            parts: dict[str, Any] = {
                key: torch.tensor([value(x) for x in rows[key]], dtype=torch.float64) for key in _DIAGRAM
            }
            gaps = (parts["confidence"] - parts["frequency"]).abs()
            largest = gaps[~gaps.isnan()].max().item() if bool((~gaps.isnan()).any()) else math.nan
            diagrams[name] = Reliability(
                **parts, band=str(rows["band"]), ace=errors[name, "ace"], ece=errors[name, "ece"], mce=largest
            )
        return LesionSummary(
            Rules(**content["rules"]),
            tuple(map(str, content["classes"])),
            int(content["cases"]),
            int(content["patients"]),
            int(content["bins"]),
            float(content["level"]),
            numbers,
            {
                name: Froc(*(np.array([value(x) for x in rows[key]]) for key in Froc._fields))
                for name, rows in content["froc"].items()
            },
            diagrams,
        )
    except (ValueError, LookupError, TypeError, AttributeError, SegcalError) as error:
        raise FileError(
            f"{path} must be the summary of `segcal lesions`; {str(error).rstrip('.')}. Run it again."
        ) from error
