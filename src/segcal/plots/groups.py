"""Forest plots of groups of cases: the value of each group with its interval, a panel for each metric."""

from __future__ import annotations

import math
from collections.abc import Sequence

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from segcal.evaluation.columns import Column
from segcal.evaluation.groups import GroupComparison
from segcal.plots.colors import BLUE, GRAY
from segcal.plots.style import LINE_PT, PAGE_IN, TEXT_PT, add_title, literal, make_room, new_figure, plain_axes, wrap

COLUMNS = (Column("dice", "macro"), Column("ace", "macro"), Column("nll", "macro"))
ROW_IN = 0.24


def forest_figure(
    comparison: GroupComparison, attribute: str, *, columns: Sequence[Column] = COLUMNS, color: str = BLUE
) -> Figure:
    """Of one attribute, the value of each group, all classes, with its interval; dashed: the mean over all cases."""
    groups = comparison.groups(attribute)
    figure = new_figure(PAGE_IN, 0.75 + ROW_IN * max(2, len(groups)))
    make_room(figure)
    axes = figure.subplots(1, len(columns), sharey=True, squeeze=False)[0]
    for ax, column in zip(axes, columns, strict=True):
        rows = [comparison.find(attribute, group, average=column.average, metric=column.metric) for group in groups]
        known = [row for row in rows if not math.isnan(row.value)]
        cases = sum(row.cases for row in known)
        if cases:
            mean = sum(row.value * row.cases for row in known) / cases
            ax.axvline(mean, color=GRAY, linewidth=LINE_PT, linestyle=(0, (4, 3)))
        for i, row in enumerate(rows):
            ax.hlines(i, row.low, row.high, color=color, linewidth=1.2)
            hollow = "white" if math.isnan(row.low) else color
            ax.plot([row.value], [i], marker="s", markersize=4, color=color, markerfacecolor=hollow, linestyle="none")
        plain_axes(ax, x=column.axis)
        ax.xaxis.set_major_locator(MaxNLocator(4))
        ax.margins(x=0.12)
        ax.set_ylim(len(groups) - 0.4, -0.6)
        found = [g for g in comparison.gaps if (g.attribute, g.metric, g.average, g.label) == (
            attribute, column.metric, column.average, None)]  # fmt: skip
        add_title(ax, f"gap {found[0].gap:.{column.digits}f}{found[0].stars}, p {_p(found[0].p_holm)}" if found else "")
    sizes = {row.group: (row.cases, row.patients) for row in comparison.rows if row.attribute == attribute}
    names = [_name(group, *sizes[group]) for group in groups]
    axes[0].set_yticks(range(len(groups)), labels=[wrap(name, width_in=1.6, size_pt=TEXT_PT) for name in names])
    for text in axes[0].get_yticklabels():
        literal(text)
    return figure


def _p(value: float) -> str:
    return "n/a" if math.isnan(value) else f"= {value:.3f}" if value >= 0.001 else "< 0.001"


def _name(group: str, cases: int, patients: int) -> str:
    return f"{group} ({cases})" if cases == patients else f"{group} ({cases}, {patients} patients)"
