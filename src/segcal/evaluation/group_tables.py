"""What groups of cases show, as tables and files."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from segcal._io.files import write_csv
from segcal.evaluation.columns import Column
from segcal.evaluation.groups import GroupComparison, GroupGap, GroupRow
from segcal.evaluation.tables import Cell, Table

FILES = ("group_summary.csv", "group_gaps.csv")
SHOWN = tuple(Column(metric, "macro") for metric in ("dice", "ace", "ece", "nll", "brier"))
GAP_NOTE = (
    "Largest gap: between the two groups that lie furthest apart, with the interval of their difference. * p < 0.05, "
    "** p < 0.01: how often groups permuted at random lie as far apart, Holm-corrected for all attributes and metrics."
)


def write_groups(comparison: GroupComparison, out: Path) -> None:
    """Write group_summary.csv and group_gaps.csv."""
    for name, kind, rows in (
        (FILES[0], GroupRow, comparison.rows),
        (FILES[1], GroupGap, comparison.gaps),
    ):
        header = tuple("class" if field == "label" else field for field in kind._fields)
        plain = ([_plain(cell) for cell in row] for row in rows)
        write_csv(out / name, header, plain)


def _plain(cell: object) -> object:
    return "" if cell is None or (isinstance(cell, float) and math.isnan(cell)) else cell


def group_table(comparison: GroupComparison, *, columns: Sequence[Column] = SHOWN) -> Table:
    """A row for each group, and one for the largest gap of each attribute; of all classes."""
    rows = []
    for attribute in comparison.attributes:
        for i, group in enumerate(comparison.groups(attribute)):
            found = [comparison.find(attribute, group, average=c.average, metric=c.metric) for c in columns]
            sizes = Cell(str(found[0].cases)), Cell(str(found[0].patients))
            values = map(_cell, found, columns)
            rows.append((Cell(attribute if i == 0 else ""), Cell(group), *sizes, *values))
        gaps = [
            gap
            for column in columns
            for gap in comparison.gaps
            if (gap.attribute, gap.average, gap.label, gap.metric) == (attribute, column.average, None, column.metric)
        ]
        if gaps:
            by_metric = {gap.metric: gap for gap in gaps}
            cells = [_gap_cell(by_metric.get(column.metric), column) for column in columns]
            rows.append((Cell(""), Cell("largest gap"), Cell(""), Cell(""), *cells))
    headings = tuple(f"{column.heading} {column.arrow}".strip() for column in columns)
    return Table("Groups, all classes", ("attribute", "group", "cases", "patients", *headings), tuple(rows), names=2)


def _cell(row: GroupRow, column: Column) -> Cell:
    if math.isnan(row.value):
        return Cell("-")
    digits = column.digits
    return Cell(
        f"{row.value:.{digits}f}", "" if math.isnan(row.low) else f"[{row.low:.{digits}f}, {row.high:.{digits}f}]"
    )


def _gap_cell(gap: GroupGap | None, column: Column) -> Cell:
    if gap is None:
        return Cell("-")
    digits = column.digits
    return Cell(
        f"{gap.gap:.{digits}f}",
        "" if math.isnan(gap.low) else f"[{gap.low:.{digits}f}, {gap.high:.{digits}f}]",
        stars=gap.stars,
    )


def group_notes(comparison: GroupComparison) -> list[str]:
    """What a reader must know, and what was noticed of the groups."""
    bracket = f"Square brackets: {comparison.level:.0%} bootstrap interval over patients."
    return [bracket, *([GAP_NOTE] if comparison.gaps else []), *comparison.notes]
