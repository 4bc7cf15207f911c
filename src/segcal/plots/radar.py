"""Radar plots: several methods over several metrics, scaled so that outward is better on every axis."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any, cast

import numpy as np
import torch
from matplotlib.lines import Line2D
from matplotlib.projections.polar import PolarAxes
from numpy.typing import NDArray

from segcal.errors import ConfigError, one_of
from segcal.evaluation.columns import RADAR
from segcal.evaluation.diagrams import normalize
from segcal.evaluation.evaluation import Evaluation
from segcal.plots.colors import GRAY, method_colors
from segcal.plots.style import LINE_PT, MARKERS, TEXT_PT, AnyFigure, add_title, legend_below, literal, make_room, number

AXES = {column.axis: column for column in RADAR}
HINT = "Rim: best method of each axis (its value is shown). Outward is better."


def radar_values(evaluations: Mapping[str, Evaluation], *, cases: str = "all") -> dict[str, dict[str, float]]:
    """The means over classes (without the background) that a radar plot shows, by method and axis.

    `cases` is "all" or "complete"; NaN where there are none.
    """
    one_of("cases", cases, ("all", "complete"))
    values = {}
    for method, evaluation in evaluations.items():
        means = evaluation.means(cases=cases)
        values[method] = {axis: means.get((place.average, place.metric), math.nan) for axis, place in AXES.items()}
    return values


def radar(
    ax: PolarAxes,
    values: Mapping[str, Mapping[str, float]],
    *,
    higher_is_better: Collection[str] = ("DSC",),
    title: str | None = None,
    colors: Mapping[str, str] | None = None,
) -> list[Line2D]:
    """Draw `values[method][axis]`, outward always better, on polar axes; the line of each method.

    The rim is the best method of each axis, whose value stands beside the axis' name. A method without a value
    on an axis has a break there.
    """
    axes = list(next(iter(values.values()), {}))
    if not axes or any(list(row) != axes for row in values.values()):
        raise ConfigError(
            f"every method must have the same axes; got { ({m: list(row) for m, row in values.items()}) }."
        )
    table = torch.tensor([[row[axis] for axis in axes] for row in values.values()], dtype=torch.float64)
    better = torch.tensor([axis in higher_is_better for axis in axes])
    scaled = normalize(table, higher_is_better=better).numpy()
    colors = colors or method_colors(values)
    angles = np.linspace(0, 2 * np.pi, len(axes), endpoint=False)
    _prepare(ax, angles)
    lines = []
    for i, (method, row) in enumerate(zip(values, scaled, strict=True)):
        closed, round_trip = np.append(row, row[0]), np.append(angles, angles[0])
        style: Any = {"color": colors[method], "marker": MARKERS[i % len(MARKERS)], "markersize": 3}
        lines += ax.plot(round_trip, closed, linewidth=1.1, clip_on=False, zorder=3, **style)
        if np.isfinite(row).all():
            ax.fill(angles, row, color=colors[method], alpha=0.05, linewidth=0)
    best = [max(table[:, j][scaled[:, j] == 1].tolist(), default=math.nan) for j in range(len(axes))]
    for angle, axis, up, value in zip(angles, axes, better, best, strict=True):
        _name_axis(ax, angle, f"{axis} {'↑' if up else '↓'}\n{number(value)}")
    if title is not None:
        add_title(ax, title, pad_pt=28)  # above the first axis' name
    return lines


def radar_pair(figure: AnyFigure, evaluations: Mapping[str, Evaluation]) -> list[PolarAxes]:
    """Draw a radar plot of all cases and, if not all of them have every class, one of the complete cases; the axes."""
    shown = {"all": {name: each.foreground() for name, each in evaluations.items()}}
    complete = {name: each.complete() for name, each in shown["all"].items()}
    if any(complete[name].cases != each.cases for name, each in shown["all"].items()):
        shown["complete"] = complete
    panels = {
        f"{which} cases (n = {_number_of_cases(parts)})": radar_values(evaluations, cases=which)
        for which, parts in shown.items()
    }
    return radar_figure(figure, panels)


def radar_figure(
    figure: AnyFigure,
    panels: Mapping[str, Mapping[str, Mapping[str, float]]],
    *,
    colors: Mapping[str, str] | None = None,
) -> list[PolarAxes]:
    """Draw `panels[title][method][axis]` beside each other, over one legend; the axes. All have the same methods."""
    make_room(figure)
    made = []
    for i, (title, values) in enumerate(panels.items()):
        ax = cast(PolarAxes, figure.add_subplot(1, len(panels), i + 1, projection="polar"))
        lines = radar(ax, values, title=title, colors=colors)
        made.append(ax)
    legend_below(figure, lines, list(values), heading=HINT)
    return made


def _number_of_cases(parts: Mapping[str, Evaluation]) -> str:
    numbers = {len(part.cases) for part in parts.values()}
    return f"{min(numbers)}" if len(numbers) == 1 else f"{min(numbers)} to {max(numbers)}"


def _prepare(ax: PolarAxes, angles: NDArray[np.float64]) -> None:
    ax.set_theta_offset(np.pi / 2)
    ax.set_theta_direction(-1)
    ax.set_ylim(0, 1)
    ax.set_rlabel_position(float(np.degrees(angles[1] / 2)) if len(angles) > 1 else 20.0)
    ax.set_yticks([0.25, 0.5, 0.75, 1], labels=["", "0.5", "", ""], fontsize=TEXT_PT, color=GRAY)
    ax.grid(color="#CFCFCF", linewidth=LINE_PT)
    ax.spines["polar"].set(color=GRAY, linewidth=LINE_PT)
    ax.set_xticks(angles, labels=[])


def _name_axis(ax: PolarAxes, angle: float, name: str) -> None:
    """Text outside the rim, on the side where it does not cover it."""
    right, up = np.sin(angle), np.cos(angle)
    across = "center" if abs(right) < 0.2 else "left" if right > 0 else "right"
    along = "bottom" if up > 0.5 else "top" if up < -0.5 else "center"
    literal(ax.text(angle, 1.07, name, ha=across, va=along, fontsize=TEXT_PT, linespacing=1.1))
