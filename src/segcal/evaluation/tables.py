"""Tables: on the terminal, in Markdown, in LaTeX, in a notebook; and that of one evaluation."""

from __future__ import annotations

import html
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from segcal._io.words import counted
from segcal.errors import ALL_CLASSES as ALL_CLASSES
from segcal.evaluation.columns import Column

if TYPE_CHECKING:
    from rich.table import Table as RichTable

    from segcal.evaluation.evaluation import Evaluation, Row


class Cell(NamedTuple):
    """A name, or a number in its parts, each to be shown in its own way."""

    value: str
    spread: str = ""
    """± over cases, or [interval]."""
    seeds: str = ""
    """± over seeds."""
    stars: str = ""
    best: bool = False
    """No other in its column is better."""
    change: str = ""
    """From the baseline."""

    @property
    def text(self) -> str:
        """Value, spread and seeds in a line."""
        return " ".join(filter(None, (self.value, self.spread, f"({self.seeds})" if self.seeds else "")))


@dataclass(frozen=True)
class Table:
    """Headings and rows. A row begins with the method; of several classes, with the class (once) and the method."""

    title: str
    headings: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    names: int = 1
    """Columns at the left that hold names. Where there are several, the first is that of a group of rows."""

    def opens_group(self, row: int) -> bool:
        """Whether a new group (class) begins at this row."""
        return self.names > 1 and bool(self.rows[row][0].text)


SUMMARY = ("dice", "ace", "occupied", "nll", "brier", "ece", "mce")  # what an ACE may have cost is beside it


def summary_table(evaluation: Evaluation, *, background: bool = False) -> Table:
    """One evaluation: macro mean and deviation of each class, and both micro averages; also over complete cases."""
    if not background:
        evaluation = evaluation.foreground()
    complete = len(evaluation.complete().cases)
    found = {(row.cases, row.average, row.label, row.metric): row for row in evaluation.summary(background=background)}
    labels = (*evaluation.classes, None) if len(evaluation.classes) > 1 else evaluation.classes
    rows = []
    for which in ("all", "complete") if 0 < complete < len(evaluation.cases) else ("all",):
        for average in ("macro", "micro pooled", "micro paper"):
            group = average if which == "all" else f"{average}, complete cases"
            for i, name in enumerate(labels):
                numbers = [found.get((which, average, name, metric)) for metric in SUMMARY]
                shown = ALL_CLASSES if name is None else name
                rows.append((Cell(group if i == 0 else ""), Cell(shown), *map(_summary_cell, numbers)))
    return Table(
        f"{counted(len(evaluation.cases), 'case')}, {complete} complete, {counted(evaluation.bins, 'bin')}",
        ("average", "class", *(Column(metric, "").name for metric in SUMMARY)),
        tuple(rows),
        names=2,
    )


def _summary_cell(row: Row | None) -> Cell:
    if row is None or math.isnan(row.value):
        return Cell("" if row is None else "-")
    return Cell(f"{row.value:.4f}", "" if math.isnan(row.std) else f"± {row.std:.4f}")


def band_table(bands: Mapping[str, Evaluation], *, background: bool = False) -> Table:
    """Return the numbers of bands around predicted boundaries, a row for each class and band.

    bands: By name, the nearest first.
    """
    from segcal.metrics import ace, ece, mce

    rows = []
    parts = {name: part if background else part.foreground() for name, part in bands.items()}
    for c, label in enumerate(next(iter(parts.values())).classes):
        for i, (name, part) in enumerate(parts.items()):
            pooled = part.select(classes=[c]).binned.pool("case")
            voxels = pooled.count.sum()
            shares = [pooled.confidence_sum.sum() / voxels, pooled.label_sum.sum() / voxels]
            numbers = [
                *shares,
                *(error(pooled) for error in (ace, ece, mce)),
                part.case_metrics()["ace"][:, c].nanmean(),
            ]
            cells = (Cell("-" if math.isnan(x) else f"{x:.4f}") for x in map(float, numbers))
            rows.append((Cell(label if i == 0 else ""), Cell(name), Cell(f"{int(voxels):,}"), *cells))
    headings = ("class", "distance", "voxels", "confidence", "frequency", "ACE", "ECE", "MCE", "Macro-ACE")
    return Table("Bands around the predicted boundary", headings, tuple(rows), names=2)


def to_markdown(table: Table) -> str:
    def cell(cell: Cell) -> str:
        text = re.sub(r"([\\`*_{}\[\]<>|#])", r"\\\1", " ".join(cell.text.split()))
        marked = (f"**{text}**" if cell.best else text) + cell.stars.replace("*", r"\*")
        return f"{marked} ({cell.change})" if cell.change else marked

    def line(cells: Iterable[str]) -> str:
        return "| " + " | ".join(cells) + " |"

    rule = ["---"] * table.names + ["---:"] * (len(table.headings) - table.names)
    return "\n".join([f"### {table.title}", "", line(table.headings), line(rule)] + [
        line(map(cell, row)) for row in table.rows
    ])  # fmt: skip


_LATEX = {
    "\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}",
    "±": r"$\pm$", "λ": r"$\lambda$", "↑": r"$\uparrow$", "↓": r"$\downarrow$",
} | {mark: rf"\{mark}" for mark in "&%$#_{}"}  # fmt: skip


def to_latex(table: Table) -> str:
    """A booktabs table; needs \\usepackage{booktabs}."""

    def escape(text: str) -> str:
        return "".join(_LATEX.get(character, character) for character in " ".join(text.split()))

    def cell(cell: Cell) -> str:
        text = escape(cell.text) + (f"$^{{{cell.stars}}}$" if cell.stars else "")
        marked = rf"\textbf{{{text}}}" if cell.best else text
        return f"{marked} ({escape(cell.change)})" if cell.change else marked

    def line(cells: Iterable[str]) -> str:
        return "  " + " & ".join(cells) + r" \\"

    body: list[str] = []
    for i, row in enumerate(table.rows):
        if i and table.opens_group(i):
            body.append(r"  \midrule")
        body.append(line(map(cell, row)))
    return "\n".join([
        r"\begin{table}", r"  \centering", rf"  \caption{{{escape(table.title)}}}",
        rf"  \begin{{tabular}}{{{'l' * len(table.headings)}}}", r"  \toprule",
        line(rf"\textbf{{{escape(heading)}}}" for heading in table.headings), r"  \midrule",
        *body, r"  \bottomrule", r"  \end{tabular}", r"\end{table}",
    ])  # fmt: skip


def to_html(table: Table) -> str:
    """For a notebook; the best in bold."""

    def cell(cell: Cell, tag: str) -> str:
        text = html.escape(cell.text + cell.stars)
        change = f"<br><small>{html.escape(cell.change)}</small>" if cell.change else ""
        return f"<{tag}>{f'<b>{text}</b>' if cell.best else text}{change}</{tag}>"

    head = "".join(f"<th>{html.escape(heading)}</th>" for heading in table.headings)
    rows = ("".join(cell(each, "th" if i < table.names else "td") for i, each in enumerate(row)) for row in table.rows)
    body = "".join(f"<tr>{row}</tr>" for row in rows)
    title = html.escape(table.title)
    return f"<table><caption>{title}</caption><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def to_terminal(table: Table, *, narrow: bool = False) -> RichTable:
    """For rich's console; the best in bold. A narrow one has no room around the lines."""
    from rich.table import Table as Rich
    from rich.text import Text

    shown = Rich(title=table.title, title_justify="left", padding=(0, 0 if narrow else 1))
    for i, heading in enumerate(table.headings):
        right = i >= table.names
        style = "dim" if heading == "floor" else ""
        shown.add_column(heading, justify="right" if right else "left", style=style, overflow="fold")
    for i, row in enumerate(table.rows):
        cells = []
        for cell in row:
            text = Text(cell.text + cell.stars, style="bold" if cell.best else "")
            cells.append(text.append(f"\n{cell.change}", style="dim not bold") if cell.change else text)
        shown.add_row(*cells, end_section=i + 1 < len(table.rows) and table.opens_group(i + 1))
    return shown


def markdown_document(tables: Iterable[Table], sentences: Iterable[str]) -> str:
    """The tables, and below them the sentences as a list."""
    listed = "".join(f"- {' '.join(sentence.split())}\n" for sentence in sentences)
    return "\n\n".join(map(to_markdown, tables)) + "\n\n" + listed.replace("*", r"\*")


def latex_document(tables: Iterable[Table], sentences: Iterable[str]) -> str:
    """The sentences as comments, then the tables."""
    comments = "".join(f"% {' '.join(sentence.split())}\n" for sentence in sentences)
    return comments + "\n" + "\n\n".join(map(to_latex, tables)) + "\n"
