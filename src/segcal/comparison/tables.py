"""A comparison as tables, the paper's table 1 and what an ACE cost beside it, and every number as CSV."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from segcal._io.files import csv_text, write_whole
from segcal._io.words import counted
from segcal.comparison.cost import costs
from segcal.comparison.entry import Entry
from segcal.evaluation.columns import HIGHER_IS_BETTER, IN_POINTS, TWO_SIDED, Column, Label
from segcal.evaluation.intervals import FEWEST_PATIENTS
from segcal.evaluation.tables import ALL_CLASSES, Cell, Table, latex_document, markdown_document
from segcal.metrics import ERRORS

if TYPE_CHECKING:
    from segcal.comparison.comparison import Comparison


SCORE_NOTE = (
    "All classes: the mean over classes without the background. Brier score and NLL of all classes are those of the "
    "whole distribution, the background included (multi-label: the mean over classes). For a single class they are "
    "those of the class against the rest."
)
OCCUPIED_NOTE = (
    "Occupied bins: the mean share of the bins of a case that hold voxels. The ACE is the mean gap over these bins; if "
    "they are few, it means little."
)
FLOOR_NOTE = (
    "Floor: the error that perfectly calibrated probabilities would show by chance on the same predictions (labels "
    "drawn from the confidence of each bin, voxel by voxel). It ignores the correlation of neighboring voxels, so the "
    "real floor is higher. The paper's micro average has no floor: its gaps are not due to chance alone."
)


def _columns(metric: str) -> tuple[Column, ...]:
    return tuple(Column(metric, average) for average in ("macro", "micro pooled", "micro paper"))


def _macro(*metrics: str) -> tuple[Column, ...]:
    return tuple(Column(metric, "macro") for metric in metrics)


LAYOUTS = {
    "Dice, calibration and likelihood": _macro("dice", "ace", "occupied", "nll", "brier"),
    "Average calibration error": _columns("ace"),
    "Expected calibration error": _columns("ece"),
    "Maximum calibration error": _columns("mce"),
}
MAIN = ("Dice, calibration and likelihood", "Average calibration error")


def comparison_tables(comparison: Comparison) -> list[Table]:
    """All classes together, then every class; of all cases, then of complete ones."""
    tables = []
    for which in comparison.case_sets:
        number = comparison.cases if which == "all" else comparison.complete
        cases = f"all {counted(number, 'case')}" if which == "all" else f"the {counted(number, 'complete case')}"
        for title, columns in LAYOUTS.items():
            if len(comparison.classes) > 1:
                tables.append(make_table(comparison, f"{title}, {ALL_CLASSES}, {cases}", columns, which=which))
            tables.append(make_table(comparison, f"{title}, {cases}", columns, labels=comparison.classes, which=which))
    return tables


def main_tables(comparison: Comparison) -> list[Table]:
    """What fits a screen: overlap, ACE and what it cost, then ACE in all averages; both of all classes."""
    cases = f"all {counted(comparison.cases, 'case')}"
    over = "" if len(comparison.classes) == 1 else f"{ALL_CLASSES}, "
    return [make_table(comparison, f"{title}, {over}{cases}", LAYOUTS[title]) for title in MAIN]


def make_table(
    comparison: Comparison,
    title: str,
    columns: Sequence[Column],
    *,
    labels: Sequence[Label] = (None,),
    which: str = "all",
    floor: bool = True,
) -> Table:
    """One row for each class and method. Errors have a second column, their floor, unless that is not wanted."""
    grouped = tuple(labels) != (None,)
    headings = ["class", "method"] if grouped else ["method"]
    for column in columns:
        headings += [f"{column.heading} {column.arrow}".strip(), *(["floor"] if floor and _has_floor(column) else [])]
    rows = []
    for label in labels:
        found = {
            column: [
                comparison.find(method, cases=which, average=column.average, label=label, metric=column.metric)
                for method in comparison.methods
            ]
            for column in columns
        }
        best = {column: best_value(entries, column) for column, entries in found.items()}
        for i, method in enumerate(comparison.methods):
            row = [Cell((label or ALL_CLASSES) if i == 0 else ""), Cell(method)] if grouped else [Cell(method)]
            for column in columns:
                row += _cells(found[column][i], column, best[column], floor=floor)
            rows.append(tuple(row))
    return Table(title, tuple(headings), tuple(rows), names=2 if grouped else 1)


def _has_floor(column: Column) -> bool:
    return column.metric in ERRORS and column.average != "micro paper"


def best_value(entries: Sequence[Entry], column: Column) -> float | None:
    """The best value as it is printed, so that what looks equal is marked alike."""
    known = [round(entry.value, column.digits) for entry in entries if not math.isnan(entry.value)]
    if len(entries) < 2 or not known or column.metric in TWO_SIDED:
        return None
    return max(known) if column.metric in HIGHER_IS_BETTER else min(known)


def _cells(entry: Entry, column: Column, best: float | None, *, floor: bool) -> list[Cell]:
    digits = column.digits
    value = "-" if math.isnan(entry.value) else f"{entry.value:.{digits}f}"
    seeds = "" if math.isnan(entry.seed_std) else f"seeds ± {entry.seed_std:.{digits}f}"
    is_best = best is not None and round(entry.value, digits) == best
    cells = [Cell(value, _spread(entry, digits), seeds, entry.stars, is_best, change_text(entry))]
    if floor and _has_floor(column):
        cells.append(Cell("-" if math.isnan(entry.floor) else f"{entry.floor:.{digits}f}"))
    return cells


def _spread(entry: Entry, digits: int) -> str:
    """The deviation over cases of a macro average, the interval of a micro one."""
    if math.isnan(entry.value) or (entry.average == "macro" and math.isnan(entry.std)):
        return ""
    if entry.average == "macro":
        return f"± {entry.std:.{digits}f}"
    return "[n/a]" if math.isnan(entry.low) else f"[{entry.low:.{digits}f}, {entry.high:.{digits}f}]"


def change_text(entry: Entry) -> str:
    """The change against the baseline, and that it was not tested where it was not; empty for the baseline."""
    if math.isnan(entry.change):
        return ""
    change = f"{100 * entry.change:+.2f} points" if entry.metric in IN_POINTS else f"{100 * entry.change:+.1f} %"
    return change + (", n/a" if math.isnan(entry.p) else "")


def notes(comparison: Comparison) -> list[str]:
    """What a reader must know to read the tables, what a lower ACE cost, and which cases were left out."""
    return [*explanations(comparison), *costs(comparison).values(), *left_out(comparison)]


def left_out(comparison: Comparison) -> list[str]:
    """A sentence for each case that a method lacks."""
    return [
        f"Left out: {case}, which {', '.join(methods)} {'lacks' if len(methods) == 1 else 'lack'}."
        for case, methods in comparison.unmatched.items()
    ]


def explanations(comparison: Comparison) -> list[str]:
    """How to read the tables: first of these cases, then what all comparisons of the kind share."""
    baseline, *others = comparison.methods
    patients = "" if comparison.patients == comparison.cases else f" of {counted(comparison.patients, 'patient')}"
    bins = counted(comparison.bins, "bin")
    found = [
        f"{counted(comparison.cases, 'case')}{patients}, {bins}. Macro: mean ± standard deviation over cases. "
        f"Micro: over the pooled voxels, with the {comparison.level:.0%} bootstrap interval over patients. In the "
        "paper's micro average the confidence of a bin is a mean over cases, in the pooled one a mean over voxels."
    ]
    seeds = {entry.method: entry.seeds for entry in comparison.entries}
    if max(seeds.values()) > 1:
        each = ", ".join(f"{number} of {name}" for name, number in seeds.items())
        told = f"{seeds[baseline]} seeds" if len(set(seeds.values())) == 1 else f"seeds ({each})"
        found.append(
            f"Values are means over {told}. The first ± is over cases (mean over seeds of each case), the one in "
            "brackets over seeds. Tests and intervals use the means over seeds; the intervals are over patients, not "
            "over trainings."
        )
    if others:
        name = "paired t-test" if comparison.test == "t" else "Wilcoxon signed-rank test"
        correction = ", Holm-corrected" if comparison.correction == "holm" else ""
        found.append(
            f"* p < 0.05, ** p < 0.01 against {baseline}: {name} over patients for macro, permutation of patients for "
            f"micro averages{correction}; n/a: not tested, fewer than {FEWEST_PATIENTS} patients. Changes of DSC are "
            "in points, others in percent of the baseline. Bold: best."
        )
    return [*found, SCORE_NOTE, OCCUPIED_NOTE, FLOOR_NOTE]


ENTRY_COLUMNS = tuple("class" if name == "label" else name for name in Entry._fields)


def to_csv(comparison: Comparison) -> str:
    """Every entry, one a line."""
    return csv_text(ENTRY_COLUMNS, comparison.entries)


def to_json(comparison: Comparison) -> str:
    """The comparison with every entry as an object; NaN is null."""
    content = asdict(comparison)
    content["entries"] = [
        {name: None if isinstance(x, float) and math.isnan(x) else x for name, x in entry._asdict().items()}
        for entry in comparison.entries
    ]
    return json.dumps(content, indent=2, ensure_ascii=False)


def write_comparison(comparison: Comparison, out: str | os.PathLike[str], *, remarks: Iterable[str] = ()) -> list[Path]:
    """Write comparison.csv (every number), comparison.md and comparison.tex (the tables, their notes, the remarks)."""
    out = Path(out)
    out.mkdir(parents=True, exist_ok=True)
    tables, sentences = comparison_tables(comparison), [*notes(comparison), *remarks]
    files = {
        "comparison.csv": to_csv(comparison),
        "comparison.md": markdown_document(tables, sentences),
        "comparison.tex": latex_document(tables, sentences),
    }
    for name, content in files.items():
        write_whole(out / name, content.encode())
    return [out / name for name in files]
