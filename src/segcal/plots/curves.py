"""Curves: which bins a probability belongs to, and how results depend on the number of bins and on the weight."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator, NullLocator

from segcal.binning import Binning
from segcal.errors import ConfigError, one_of
from segcal.plots.colors import BLACK, BLUE, GREEN, ORANGE, PURPLE, SKY, VERMILION, method_colors
from segcal.plots.style import MARKERS, AnyFigure, legend, legend_below, make_room, plain_axes, unit_axis

BIN_COLORS = (BLUE, VERMILION, GREEN, PURPLE, ORANGE, SKY, BLACK)
DASHES: dict[str, Any] = {"hard": "-", "triangular": "--", "gaussian": ":", "bspline": "-."}
KERNEL_NAMES = {
    "hard": "hard",
    "triangular": "soft (triangular)",
    "gaussian": "soft (Gaussian)",
    "bspline": "soft (B-spline)",
}
STEPS = 2000  # points of a curve, besides the edges of bins


def memberships(ax: Axes, binnings: Sequence[Binning]) -> dict[tuple[int, int], Line2D]:
    """Draw the weight of every probability in each bin, each bin in its color; lines by (binning, bin).

    Hard bins are solid, the paper's soft ones dashed.
    """
    made = {}
    for i, binning in enumerate(binnings):
        # Just before an edge and on it: the walls of a hard bin stand upright.
        edges = binning.edges[1:-1]
        x = torch.cat([torch.linspace(0, 1, STEPS + 1, dtype=torch.float64), edges, edges - 1e-9]).sort().values
        weights = binning.memberships(x).numpy()
        for k in range(binning.bins):
            seen = weights[:, k] > 0
            near = seen | np.append(seen[1:], False) | np.append(False, seen[:-1])  # the foot of the curve, too
            style: Any = {"color": BIN_COLORS[k % len(BIN_COLORS)], "linestyle": DASHES[binning.kernel]}
            (made[i, k],) = ax.plot(x.numpy()[near], weights[near, k], linewidth=1.2, clip_on=False, **style)
    plain_axes(ax, x="probability", y="membership")
    unit_axis(ax.xaxis)
    unit_axis(ax.yaxis)
    ax.set(xlim=(0, 1), ylim=(0, 1.05))
    kernels = list(dict.fromkeys(binning.kernel for binning in binnings))
    handles = [Line2D([], [], color=BLACK, linewidth=1.2, linestyle=DASHES[kernel]) for kernel in kernels]
    names = [KERNEL_NAMES[kernel] for kernel in kernels]
    where: Any = {"loc": "lower center", "bbox_to_anchor": (0.5, 1.0), "ncols": len(kernels), "handlelength": 2.6}
    legend(ax, handles, names, **where)
    return made


class SensitivityPoint(NamedTuple):
    """Results of one method at one setting (a number of bins, or a weight); spreads are optional."""

    method: str
    setting: float
    dice: float
    ace: float
    dice_spread: float = math.nan
    ace_spread: float = math.nan


def sensitivity(
    axes: tuple[Axes, Axes],
    points: Iterable[SensitivityPoint],
    *,
    against: Literal["bins", "lambda"],
    colors: Mapping[str, str] | None = None,
) -> dict[tuple[str, str], Line2D]:
    """Draw DSC and macro ACE against the number of bins or the loss weight, on a log axis; lines by (method, metric).

    Spreads, where given, are bands of one spread to either side.
    """
    one_of("against", against, ("bins", "lambda"))
    points = sorted(points, key=lambda point: point.setting)
    if any(point.setting <= 0 for point in points):
        raise ConfigError(f"settings on a log axis must be positive; got {points[0].setting}.")
    methods = list(dict.fromkeys(point.method for point in points))
    colors = colors or method_colors(methods)
    settings = sorted({point.setting for point in points})
    made = {}
    for ax, metric, name in zip(axes, ("dice", "ace"), ("DSC ↑", "macro ACE ↓"), strict=True):
        ax.set_xscale("log")
        for method in methods:
            own = [point for point in points if point.method == method]
            x, y, spread = (
                np.array([getattr(point, field) for point in own]) for field in ("setting", metric, f"{metric}_spread")
            )
            marker = MARKERS[list(colors).index(method) % len(MARKERS)]
            (line,) = ax.plot(x, y, color=colors[method], marker=marker, markersize=3, linewidth=1.1)
            made[method, metric] = line
            if np.isfinite(spread).any():
                ax.fill_between(x, y - spread, y + spread, color=colors[method], alpha=0.15, linewidth=0)
        plain_axes(ax, x="bins" if against == "bins" else "weight λ", y=name)
        ax.set_xticks(settings, labels=[f"{setting:g}" for setting in settings])
        ax.xaxis.set_minor_locator(NullLocator())
        ax.yaxis.set_major_locator(MaxNLocator(5))
    return made


def sensitivity_figure(
    figure: AnyFigure,
    *,
    bins: Iterable[SensitivityPoint],
    weights: Iterable[SensitivityPoint],
    colors: Mapping[str, str] | None = None,
) -> list[Axes]:
    """Draw the whole study: DSC above macro ACE, against bins on the left and the weight on the right; the axes.

    Without points against one of the two, there is only the other.
    """
    make_room(figure)
    given: dict[Literal["bins", "lambda"], list[SensitivityPoint]] = {"bins": list(bins), "lambda": list(weights)}
    shown = {against: points for against, points in given.items() if points}
    if not shown:
        raise ConfigError("there must be points against bins or weights; got none.")
    methods = list(dict.fromkeys(point.method for points in shown.values() for point in points))
    colors = colors or method_colors(methods)
    grid = figure.add_gridspec(2, len(shown))
    axes: list[Axes] = []
    for column, (against, points) in enumerate(shown.items()):
        upper, lower = (figure.add_subplot(grid[i, column], sharey=axes[i] if column else None) for i in range(2))
        sensitivity((upper, lower), points, against=against, colors=colors)
        upper.set_xlabel("")
        upper.tick_params(labelbottom=False)
        for ax in (upper, lower) if column else ():
            ax.set_ylabel("")
            ax.tick_params(labelleft=False)
        axes += [upper, lower]
    markers = {method: MARKERS[i % len(MARKERS)] for i, method in enumerate(colors)}
    handles = [Line2D([], [], color=colors[m], marker=markers[m], markersize=3) for m in methods]
    legend_below(figure, handles, methods)
    return axes
