"""Reliability diagrams, alone or side by side."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import EngFormatter, LogLocator, NullLocator

from segcal.evaluation.diagrams import Reliability
from segcal.plots.colors import BLACK, BLUE, SKY, VERMILION
from segcal.plots.style import (
    LINE_PT,
    TEXT_PT,
    AnyFigure,
    add_title,
    legend_below,
    make_room,
    number,
    plain_axes,
    unit_axis,
)

OVER, UNDER = VERMILION, SKY  # gaps of bins whose confidence is too high, or too low
HATCH_OVER, HATCH_UNDER = "/////", "....."  # told apart in black and white, too


def reliability_diagram(
    where: AnyFigure | tuple[Axes, Axes], diagram: Reliability, *, title: str | None = None, color: str = BLUE
) -> tuple[Axes, Axes]:
    """Draw frequency against confidence, and beneath it the count of each bin on a log axis; both axes.

    The gap of a bin is shaded by whether its confidence is too high or too low, and the bar on its point is the
    diagram's band. On a figure there is a legend, too; a pair of axes leaves it to the caller.
    """
    upper, lower = where if isinstance(where, tuple) else _panels(where)
    _draw_gaps(upper, diagram)
    _draw_points(upper, diagram, color)
    _draw_counts(lower, diagram, color)
    errors = {"ACE": diagram.ace, "ECE": diagram.ece, "MCE": diagram.mce}
    box = {"boxstyle": "square,pad=0.2", "facecolor": "white", "edgecolor": "none", "alpha": 0.8}
    lines = "\n".join(f"{name} {number(value)}" for name, value in errors.items())
    upper.text(0.03, 0.97, lines, transform=upper.transAxes, va="top", fontsize=TEXT_PT, bbox=box, zorder=5)
    if title is not None:
        add_title(upper, title)
    if not isinstance(where, tuple):
        _add_legend(where, diagram.band, color)
    return upper, lower


def reliability_grid(
    figure: AnyFigure, diagrams: Mapping[str, Reliability], *, columns: int = 4, color: str = BLUE
) -> dict[str, tuple[Axes, Axes]]:
    """Draw several reliability diagrams beside and beneath each other, each under its name; their axes by name."""
    make_room(figure)
    columns = min(columns, len(diagrams))
    rows = -(-len(diagrams) // columns)
    grid = figure.add_gridspec(2 * rows, columns, height_ratios=(3, 1) * rows, hspace=0.02)
    made: dict[str, tuple[Axes, Axes]] = {}
    for i, (name, diagram) in enumerate(diagrams.items()):
        row, column = divmod(i, columns)
        upper = figure.add_subplot(grid[2 * row, column])
        lower = figure.add_subplot(grid[2 * row + 1, column], sharex=upper)
        made[name] = reliability_diagram((upper, lower), diagram, title=name, color=color)
        if column:
            upper.set_ylabel("")
            lower.set_ylabel("")
        if i + columns < len(diagrams):
            lower.set_xlabel("")
    bands = dict.fromkeys(diagram.band for diagram in diagrams.values())
    _add_legend(figure, "; ".join(bands), color)
    return made


def _panels(figure: AnyFigure) -> tuple[Axes, Axes]:
    make_room(figure)
    grid = figure.add_gridspec(2, 1, height_ratios=(3.2, 1), hspace=0.02)
    upper = figure.add_subplot(grid[0])
    return upper, figure.add_subplot(grid[1], sharex=upper)


def _draw_gaps(ax: Axes, diagram: Reliability) -> None:
    edges, confidence, frequency = (x.numpy() for x in (diagram.edges, diagram.confidence, diagram.frequency))
    left, width = edges[:-1], np.diff(edges)
    for kind, color, hatch, which in (
        ("too high", OVER, HATCH_OVER, confidence > frequency),
        ("too low", UNDER, HATCH_UNDER, confidence < frequency),
    ):
        ax.bar(
            left[which],
            (confidence - frequency)[which],
            width[which],
            frequency[which],
            align="edge",
            color=f"{color}59",
            edgecolor=color,
            linewidth=0.4,
            hatch=hatch,
            label=kind,
        )
    ax.plot([0, 1], [0, 1], color=BLACK, linewidth=LINE_PT, linestyle=(0, (4, 3)))


def _draw_points(ax: Axes, diagram: Reliability, color: str) -> None:
    confidence, frequency, low, high = (
        x.numpy() for x in (diagram.confidence, diagram.frequency, diagram.low, diagram.high)
    )
    ax.vlines(confidence, low, high, color=color, linewidth=1.0, zorder=3)
    ax.plot(
        confidence,
        frequency,
        linestyle="none",
        marker="o",
        markersize=3,
        color=color,
        markeredgecolor="white",
        markeredgewidth=0.3,
        clip_on=False,
        zorder=4,
    )
    plain_axes(ax, y="frequency")
    unit_axis(ax.xaxis)
    unit_axis(ax.yaxis)
    ax.tick_params(axis="x", labelbottom=False, length=0)
    ax.set(xlim=(0, 1), ylim=(0, 1.02))


def _draw_counts(ax: Axes, diagram: Reliability, color: str) -> None:
    count, edges = diagram.count.numpy(), diagram.edges.numpy()
    seen = count > 0
    ax.set_yscale("log")
    ax.bar(edges[:-1][seen], count[seen], np.diff(edges)[seen], align="edge", color=color, alpha=0.55, linewidth=0)
    plain_axes(ax, x="confidence", y="count")
    unit_axis(ax.xaxis)
    ax.set_ylim(0.7, 2 * max(count.max(initial=0), 5))
    ax.yaxis.set_major_locator(LogLocator(numticks=4))
    ax.yaxis.set_minor_locator(NullLocator())
    ax.yaxis.set_major_formatter(EngFormatter(sep=""))  # 10k, not a small exponent


def _add_legend(figure: AnyFigure, band: str, color: str) -> None:
    handles = [
        Patch(facecolor=f"{OVER}59", edgecolor=OVER, hatch=HATCH_OVER, linewidth=0.4),
        Patch(facecolor=f"{UNDER}59", edgecolor=UNDER, hatch=HATCH_UNDER, linewidth=0.4),
        Line2D([], [], color=BLACK, linewidth=LINE_PT, linestyle=(0, (4, 3))),
        Line2D([], [], color=color, linewidth=1.0, marker="o", markersize=3),
    ]
    legend_below(figure, handles, ["too high", "too low", "perfect", "frequency"], heading=f"Bars: {band}")
