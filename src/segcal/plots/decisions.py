"""What decisions promised and what came of them: Dice, risk and coverage, thresholds, volumes, methods overlaid."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from segcal.evaluation.columns import Label
from segcal.evaluation.decisions import Agreement, ClassAgreement
from segcal.plots.colors import BLACK, GRAY
from segcal.plots.style import (
    LINE_PT,
    MARKERS,
    AnyFigure,
    add_title,
    legend_below,
    make_room,
    plain_axes,
    unit_axis,
)

Draw = Callable[[Axes, Mapping[str, ClassAgreement], Mapping[str, str]], None]
ROUND = (1, 2, 2.5, 5, 10)  # steps of ticks
DASHED, DOTTED = (0, (4, 2)), (0, (1, 2))


def dice_promises(ax: Axes, found: Mapping[str, ClassAgreement], colors: Mapping[str, str]) -> None:
    """Draw actual against expected Dice, a point for each case of each method; on the dashed line they agree."""
    lowest = 0.8
    for i, (method, each) in enumerate(found.items()):
        known = ~np.isnan(each.actual)
        lowest = min([lowest, *each.expected[known], *each.actual[known]])
        _points(ax, each.expected, each.actual, colors[method], i)
    start = max(0.0, lowest - 0.03)
    ax.plot([0, 1], [0, 1], color=BLACK, linewidth=LINE_PT, linestyle=DASHED, zorder=1)
    plain_axes(ax, x="expected DSC", y="actual DSC")
    ax.set(xlim=(start, 1.01), ylim=(start, 1.01), aspect="equal")
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_major_locator(MaxNLocator(5, steps=ROUND))


def risk_and_coverage(ax: Axes, found: Mapping[str, ClassAgreement], colors: Mapping[str, str]) -> None:
    """Draw the mean of 1 - Dice of the cases taken, by expected Dice, by actual Dice (dashed), at random (dotted)."""
    for method, each in found.items():
        risk, color = each.risk, colors[method]
        ax.plot(risk.coverage, risk.risk, color=color, linewidth=1.2)
        ax.plot(risk.coverage, risk.ideal, color=color, linewidth=0.8, linestyle=DASHED)
        ax.plot([0, 1], [risk.random_area] * 2, color=color, linewidth=0.8, linestyle=DOTTED)
    plain_axes(ax, x="share of cases taken", y="mean of 1 \N{MINUS SIGN} DSC")
    unit_axis(ax.xaxis)
    ax.set_xlim(0, 1.01)
    ax.set_ylim(bottom=0)
    ax.yaxis.set_major_locator(MaxNLocator(5, steps=ROUND))


def dice_over_thresholds(ax: Axes, found: Mapping[str, ClassAgreement], colors: Mapping[str, str]) -> None:
    """Draw mean Dice at each threshold, against the labels and as promised (dashed), with the largest of each."""
    for method, each in found.items():
        curves, color = each.thresholds, colors[method]
        ax.plot(curves.thresholds, curves.dice, color=color, linewidth=1.2)
        ax.plot(curves.thresholds, curves.expected_dice, color=color, linewidth=0.8, linestyle=DASHED)
        mark: Any = {"color": color, "marker": "o", "markersize": 4, "linestyle": "none", "zorder": 4}
        ax.plot([curves.promised.threshold], [curves.promised.expected_dice], **mark, markerfacecolor="white")
        ax.plot([curves.best.threshold], [curves.best.dice], **mark)
    plain_axes(ax, x="threshold", y="mean DSC")
    unit_axis(ax.xaxis)
    unit_axis(ax.yaxis)
    ax.set(xlim=(0, 1), ylim=(0, 1.02))


def volume_differences(ax: Axes, found: Mapping[str, ClassAgreement], colors: Mapping[str, str]) -> None:
    """Draw Bland and Altman's plot of decided volumes: difference from the true one against the mean of both.

    Lines are the mean difference and, dashed, the 95 % limits of agreement.
    """
    ax.axhline(0, color=GRAY, linewidth=LINE_PT)
    for i, (method, each) in enumerate(found.items()):
        volume = each.decided_volume
        if volume is None:
            continue
        _points(ax, volume.mean, volume.difference, colors[method], i)
        for value, style in ((volume.bias, "-"), (volume.low, DASHED), (volume.high, DASHED)):
            ax.axhline(value, color=colors[method], linewidth=0.9, linestyle=style)
    plain_axes(ax, x="mean of decided and true", y="decided less true")
    ax.set_xlim(left=0)
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_major_locator(MaxNLocator(5, steps=ROUND))


KEYS: dict[Draw, tuple[tuple[str, Any], ...]] = {
    dice_promises: (("expected = actual", DASHED),),
    risk_and_coverage: (("by expected DSC", "-"), ("ideal order", DASHED), ("random order", DOTTED)),
    dice_over_thresholds: (("against the labels", "-"), ("expected", DASHED)),
    volume_differences: (("mean difference", "-"), ("95 % limits of agreement", DASHED)),
}
"""What the lines of each figure mean, for its legend."""


def decision_grid(
    figure: AnyFigure,
    agreements: Mapping[str, Agreement],
    draw: Draw,
    *,
    labels: Mapping[Label, str],
    colors: Mapping[str, str],
    columns: int = 4,
) -> dict[Label, Axes]:
    """Draw one of these figures for several classes, beside and beneath each other; their axes.

    labels: the classes (None: their mean), and what each panel is called.
    """
    make_room(figure)
    columns = min(columns, len(labels))
    rows = -(-len(labels) // columns)
    grid = figure.add_gridspec(rows, columns)
    made: dict[Label, Axes] = {}
    for i, (label, title) in enumerate(labels.items()):
        ax = figure.add_subplot(grid[divmod(i, columns)])
        draw(ax, {method: each.labels[label] for method, each in agreements.items()}, colors)
        add_title(ax, title)
        if i % columns:
            ax.set_ylabel("")
        if i + columns < len(labels):
            ax.set_xlabel("")
        made[label] = ax
    _add_legend(figure, agreements, draw, colors)
    return made


def _add_legend(figure: AnyFigure, agreements: Mapping[str, Agreement], draw: Draw, colors: Mapping[str, str]) -> None:
    points = draw in (dice_promises, volume_differences)
    handles = [
        Line2D([], [], color=colors[method], linewidth=1.2, **_marker(i) if points else {})
        for i, method in enumerate(agreements)
    ]
    handles += [Line2D([], [], color=BLACK, linewidth=0.9, linestyle=style) for _, style in KEYS[draw]]
    unit = next(iter(agreements.values())).unit if draw is volume_differences else ""
    heading = f"Volumes in {unit}" if unit else ""
    legend_below(figure, handles, [*agreements, *(name for name, _ in KEYS[draw])], heading=heading)


def _marker(i: int) -> dict[str, Any]:
    return {"marker": MARKERS[i % len(MARKERS)], "markersize": 3, "linestyle": "none"}


def _points(ax: Axes, x: Any, y: Any, color: str, i: int) -> None:
    edge: Any = {"markeredgecolor": "white", "markeredgewidth": 0.3, "alpha": 0.8, "zorder": 3, "clip_on": False}
    ax.plot(x, y, color=color, **_marker(i), **edge)
