"""A study as one HTML file that needs nothing else: what it found in words, tables and figures, and what was run.

Whatever comes from outside (titles, names of datasets, methods, classes and cases) is escaped by Jinja.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from segcal._io.files import write_whole
from segcal._io.words import counted, duration
from segcal.evaluation.columns import Column
from segcal.evaluation.intervals import FEWEST_PATIENTS
from segcal.evaluation.tables import Cell, Table
from segcal.report.rendering import base64_text, render_page
from segcal.study.figures import Drawn, StudyFigure, study_colors
from segcal.study.summary import CHANGES, MEAN, Results

PX_PER_IN = 140  # of a figure as it is shown, where there is room
TOO_FEW = f"not tested, n/a: fewer than {FEWEST_PATIENTS} patients"
FEW_ROWS = 20  # more rows are folded
KEY = {  # what the summary tells of a method: name, unit, decimals
    Column("ace", "macro"): ("macro-ACE", "%", 1),
    Column("ace", "micro pooled"): ("micro-ACE", "%", 1),
    Column("dice", "macro"): ("DSC", "points", 2),
}


class KeyResult(NamedTuple):
    """Changes of a method against the baseline, mean over the datasets that have it."""

    method: str
    datasets: int
    changes: dict[Column, float]
    tested: dict[Column, str]
    """Whether those of `KEY` are significant, in words."""


class ShownTable(NamedTuple):
    """A table whose rows are in groups; a row has the name of its method and its numbers."""

    title: str
    names: tuple[str, ...]
    headings: tuple[str, ...]
    groups: list[tuple[str, list[tuple[str, tuple[Cell, ...]]]]]

    @property
    def rows(self) -> int:
        return sum(len(rows) for _, rows in self.groups)


class ShownFigure(NamedTuple):
    """A figure as it is embedded, with its size in CSS pixels."""

    name: str
    caption: str
    svg: str
    width: int
    height: int


def build_page(results: Results, drawn: Drawn, out: Path) -> Path:
    """Write one self-contained HTML file on a study; where it is."""
    colors = study_colors(results)
    config = results.plan.study.config
    tables, keys = [shown_table(table) for table in results.tables], key_results(results)
    page = render_page(
        "study.html.j2",
        colors=colors,
        title=config.title,
        about=[" ".join(text.split()) for text in config.about.split("\n\n") if text.strip()],
        baseline=config.baseline,
        places={method: i for i, method in enumerate(colors)},
        datasets=results.datasets,
        seeds=len(config.seeds),
        lead=lead_sentence(results, keys),
        keys=keys,
        key_columns=KEY,
        tables=[table for table in tables if table.names[0] != "class"],
        class_tables=[table for table in tables if table.names[0] == "class"],
        figures=_by_kind(drawn.figures),
        runs=[_run(row) for row in results.rows],
        few_rows=FEW_ROWS,
        settings=_settings(results),
        versions=_versions(results),
        notes=[*results.notes, *drawn.remarks],
        failures=results.failures,
    )
    out.parent.mkdir(parents=True, exist_ok=True)
    write_whole(out, page.encode(errors="replace"))  # names may hold what is no text
    return out


def key_results(results: Results) -> list[KeyResult]:
    """What each method but the baseline changes, those of a sweep left out."""
    if not results.datasets:
        return []
    changes = results.changes
    rows = changes[MEAN] if MEAN in changes else next(iter(changes.values()))
    return [
        KeyResult(
            method,
            number,
            dict(zip(CHANGES, values, strict=True)),
            {column: _tested(results, method, column) for column in KEY},
        )
        for method, values in rows.items()
        if (number := sum(method in found.main_methods for found in results.datasets))
    ]


def lead_sentence(results: Results, keys: Sequence[KeyResult]) -> str:
    """The method that lowers macro-ACE the most, of those on the most datasets, what else it changes, and the tests."""
    baseline = results.plan.study.config.baseline
    most = max((key.datasets for key in keys), default=0)
    column, *others = KEY
    known = [key for key in keys if key.datasets == most and not math.isnan(key.changes[column])]
    if not known:
        return ""
    best = min(known, key=lambda key: key.changes[column])
    over = f", averaged over {most} datasets" if most > 1 else ""
    if best.changes[column] >= 0:
        return f"No method lowers the macro-ACE of {baseline} on test cases{over}."
    by = f"{-best.changes[column]:.1f} % against {baseline}{over} ({best.tested[column]})"
    rest = " and ".join(f"{_told(best.changes[each], *KEY[each])} ({best.tested[each]})" for each in others)
    return f"{best.method} lowers macro-ACE {'the most: by' if len(known) > 1 else 'by'} {by}; it {rest}."


def _tested(results: Results, method: str, column: Column) -> str:
    """Whether a change is significant, as the tables' stars say; of several datasets, on how many."""
    entries = [
        found.comparison.find(method, average=column.average, metric=column.metric)
        for found in results.datasets
        if method in found.methods
    ]
    tested = [entry for entry in entries if not math.isnan(entry.p)]
    if not tested:
        return TOO_FEW
    if len(entries) == 1:
        p = "p < 0.001" if entries[0].p < 0.001 else f"p = {entries[0].p:.3f}"
        return f"{'significant' if entries[0].stars else 'not significant'}, {p}"
    untested = len(entries) - len(tested)
    told = f"significant on {sum(bool(entry.stars) for entry in tested)} of {counted(len(entries), 'dataset')}"
    return told + (f"; on {untested} {TOO_FEW}" if untested else "")


def _told(value: float, name: str, unit: str, digits: int) -> str:
    """A change in words."""
    if math.isnan(value):
        return f"has no {name} to compare"
    if not round(value, digits):
        return f"leaves {name} as it is"
    return f"{'raises' if value > 0 else 'lowers'} {name} by {abs(value):.{digits}f} {unit}"


def shown_table(table: Table) -> ShownTable:
    """The rows of a table in its groups."""
    groups: list[tuple[str, list[tuple[str, tuple[Cell, ...]]]]] = []
    for i, row in enumerate(table.rows):
        if i == 0 or table.opens_group(i):
            groups.append((row[0].text if table.names > 1 else "", []))
        groups[-1][1].append((row[table.names - 1].text, row[table.names :]))
    return ShownTable(table.title, table.headings[: table.names], table.headings[table.names :], groups)


def _by_kind(figures: Sequence[StudyFigure]) -> dict[str, list[ShownFigure]]:
    found: dict[str, list[ShownFigure]] = {}
    for figure in figures:
        width, height = (round(inches * PX_PER_IN) for inches in figure.size_in)
        shown = ShownFigure(figure.name, figure.caption, base64_text(figure.svg), width, height)
        found.setdefault(figure.kind, []).append(shown)
    return found


def _run(row: dict[str, Any]) -> dict[str, Any]:
    """A run's row with its time in words."""
    return row | {"time": "" if math.isnan(row["seconds"]) else duration(row["seconds"])}


def _settings(results: Results) -> dict[str, str]:
    """By dataset, the resolved settings of its baseline's first run."""
    plan = results.plan
    first = {arm.dataset: arm.run for arm in reversed(plan.arms) if arm.method == plan.study.config.baseline}
    return {name: plan.runs[first[name]].config.to_toml() for name in plan.study.config.datasets if name in first}


def _versions(results: Results) -> dict[str, str]:
    """Of what evaluated; several, where runs were not done with the same."""
    found: dict[str, dict[str, None]] = {}
    for dataset in results.datasets:
        for evaluation in (each for seeds in dataset.test.values() for each in seeds):
            for name, version in evaluation.provenance.get("versions", {}).items():
                found.setdefault(name, {})[str(version)] = None
    return {name: ", ".join(versions) for name, versions in found.items()}
