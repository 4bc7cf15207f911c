"""Figures of lesions: FROC curves, and how often predicted lesions are real for each confidence."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import NullLocator

from segcal.errors import one_of
from segcal.lesions.numbers import RATES, Froc, rate_name
from segcal.lesions.results import LesionSummary
from segcal.plots.colors import BLUE, GRAY, GREEN, ORANGE, PURPLE, VERMILION
from segcal.plots.reliability import reliability_diagram, reliability_grid
from segcal.plots.saving import FORMATS, save_figure
from segcal.plots.style import (
    COLUMN_IN,
    LINE_PT,
    MARKERS,
    PAGE_IN,
    default_settings,
    legend_below,
    make_room,
    new_figure,
    plain_axes,
    unit_axis,
)

COLORS = (BLUE, VERMILION, GREEN, PURPLE, ORANGE)
LEAST_RATE = RATES[0] / 2  # where the axis begins, which is a logarithm
MOST_COLUMNS = 4


def froc_curves(
    ax: Axes, curves: Mapping[str, Froc], *, marked: Mapping[str, Mapping[float, tuple[float, ...]]]
) -> None:
    """Draw sensitivity against false positives per case, a line for each name; marked rates have intervals.

    The curve is a step: a cut of the confidence either keeps to a rate or does not.
    """
    for i, (name, curve) in enumerate(curves.items()):
        color = COLORS[i % len(COLORS)]
        beyond = max([2 * RATES[-1], *curve.false_positives[-1:]])  # nothing more is found there
        x = np.concatenate([[0.0], curve.false_positives, [beyond]])
        y = np.concatenate([[0.0], curve.sensitivity, curve.sensitivity[-1:] if len(curve.sensitivity) else [0.0]])
        last = np.append(x[1:] != x[:-1], True)  # of cuts with the same false positives, the one that finds most
        ax.step(x[last].clip(LEAST_RATE / 2), y[last], where="post", color=color, linewidth=1.2)
        rates = marked[name]
        value, low, high = np.array(list(rates.values())).T
        ax.vlines(list(rates), low, high, color=color, linewidth=1.0, zorder=3)
        ax.plot(
            list(rates), value, color=color, marker=MARKERS[i % len(MARKERS)], markersize=3.5, linestyle="none",
            markeredgecolor="white", markeredgewidth=0.3, zorder=4,
        )  # fmt: skip
    plain_axes(ax, x="false positives per case", y="sensitivity")
    ax.set_xscale("log")
    ax.set_xticks(RATES, labels=[rate_name(rate).removeprefix("sensitivity_at_") for rate in RATES])
    ax.xaxis.set_minor_locator(NullLocator())
    unit_axis(ax.yaxis)
    ax.grid(axis="y", color=GRAY, alpha=0.25, linewidth=LINE_PT)
    ax.set(xlim=(LEAST_RATE, 1.5 * RATES[-1]), ylim=(0, 1.02))


def froc_figure(summary: LesionSummary) -> Figure:
    """The FROC curves of all classes."""
    figure = new_figure(COLUMN_IN, 3.1)
    make_room(figure)
    ax = figure.add_subplot()
    marked = {}
    for name in summary.classes:
        numbers = {rate: summary.find(name, rate_name(rate)) for rate in RATES}
        marked[name] = {rate: (number.value, number.low, number.high) for rate, number in numbers.items()}
    froc_curves(ax, summary.curves, marked=marked)
    handles = [
        Line2D([], [], color=COLORS[i % len(COLORS)], linewidth=1.2, marker=MARKERS[i % len(MARKERS)], markersize=3.5)
        for i in range(len(summary.classes))
    ]
    means = {name: summary.find(name, "froc").value for name in summary.classes}
    names = [f"{name}, mean {mean:.3f}" for name, mean in means.items()]
    heading = f"Bars: {summary.level:.0%} bootstrap over {summary.patients} patients"
    few = all(np.isnan(number.low) for number in summary.numbers)
    legend_below(figure, handles, names, heading="" if few else heading)
    return figure


def lesion_reliability_figure(summary: LesionSummary) -> Figure:
    """Reliability diagrams of lesions, one for each class; counts are lesions."""
    if len(summary.diagrams) == 1:
        figure = new_figure(COLUMN_IN, 4.3)
        for name, diagram in summary.diagrams.items():
            upper, lower = reliability_diagram(figure, diagram, title=name)
            _name_axes(upper, lower)
        return figure
    columns = min(MOST_COLUMNS, len(summary.diagrams))
    figure = new_figure(PAGE_IN, 0.45 + -(-len(summary.diagrams) // columns) * 2.6 * 4 / (columns + 1))
    made = reliability_grid(figure, summary.diagrams, columns=columns)
    _name_axes(*next(iter(made.values())))
    return figure


def _name_axes(upper: Axes, lower: Axes) -> None:
    upper.set_ylabel("share that is real")
    lower.set_ylabel("lesions")


def write_lesion_figures(
    summary: LesionSummary, out: str | os.PathLike[str], *, formats: Iterable[str] = ("png",)
) -> list[Path]:
    """Write froc and lesion-reliability in these formats; the paths."""
    written = []
    for kind in formats:
        one_of("the format of a figure", kind, FORMATS)
        with default_settings():
            figures = {"froc": froc_figure(summary), "lesion-reliability": lesion_reliability_figure(summary)}
            written += [save_figure(figure, Path(out) / f"{name}.{kind}") for name, figure in figures.items()]
    return written
