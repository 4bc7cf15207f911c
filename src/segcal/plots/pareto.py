"""What calibration costs: DSC against macro ACE, and the methods that no other beats in both."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from statistics import fmean
from typing import Any, NamedTuple

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from segcal.errors import ConfigError
from segcal.evaluation.diagrams import pareto_front
from segcal.plots.colors import GRAY, method_colors
from segcal.plots.style import LINE_PT, MARKERS, AnyFigure, add_title, legend_below, make_room, plain_axes, width_in_of

FRONT = "front"
COLUMNS = 2  # of panels, at most
SIZES = {"D": 5.0, "P": 7.0, "X": 7.0, "*": 8.5}  # points, so that all look equally large; 6 for others
HINT = "Large: mean of a method's runs. Small: each run."


class TradeOff(NamedTuple):
    """DSC and macro ACE of one run."""

    method: str
    dice: float
    ace: float


def pareto(
    ax: Axes,
    runs: Iterable[TradeOff],
    *,
    colors: Mapping[str, str] | None = None,
    title: str | None = None,
) -> dict[str, Artist]:
    """Draw DSC against macro ACE, better to the right and below; the artists by the name a legend gives them.

    Runs are dots, means over a method's runs are large. Means that no other beats are ringed and joined by a step
    line: no mean lies beyond it. What has no value is not drawn, and a method with such a run has no mean.
    """
    runs = list(runs)
    methods = list(dict.fromkeys(run.method for run in runs))
    colors = colors or method_colors(methods)
    if lost := [method for method in methods if method not in colors]:
        raise ConfigError(f"colors must have one for each method; {', '.join(map(repr, lost))} has none.")
    if FRONT in methods:
        raise ConfigError(f"no method may be called {FRONT!r}, which means something else here; rename it.")
    markers = _markers(colors)
    made: dict[str, Artist] = {}
    means = []
    for method in methods:
        own = [run for run in runs if run.method == method]
        means.append((fmean(run.dice for run in own), fmean(run.ace for run in own)))
        style: Any = {"color": colors[method], "linestyle": "none", "markeredgecolor": "white", "markeredgewidth": 0.4}
        dots: Any = {"marker": "o", "markersize": 3, "alpha": 0.45}
        ax.plot([run.dice for run in own], [run.ace for run in own], zorder=2, **style | dots)
        mean: Any = {"marker": markers[method], "markersize": SIZES.get(markers[method], 6.0)}
        (made[method],) = ax.plot(*means[-1], zorder=4, **style | mean)
    if front := [means[i] for i in pareto_front(means)]:
        ring: Any = {"marker": "o", "markersize": 10, "markerfacecolor": "none", "markeredgewidth": LINE_PT}
        line: Any = {"color": GRAY, "linewidth": 0.9, "drawstyle": "steps-pre", "zorder": 3}
        (made[FRONT],) = ax.plot(*zip(*front, strict=True), **line | ring)
    plain_axes(ax, x="DSC ↑", y="macro ACE ↓")
    ax.margins(0.1)
    across = max(1, min(5, int(width_in_of(ax) / 0.55)))  # numbers of several digits stand clear of each other
    ax.xaxis.set_major_locator(MaxNLocator(across, steps=[1, 2, 5, 10]))
    ax.yaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 2.5, 5, 10]))
    ax.ticklabel_format(useOffset=False, style="plain")
    if title is not None:
        add_title(ax, title)
    return made


def pareto_figure(
    figure: AnyFigure,
    panels: Mapping[str, Iterable[TradeOff]],
    *,
    colors: Mapping[str, str] | None = None,
) -> dict[str, Axes]:
    """Draw a panel for each name, two beside each other, over one legend; their axes by name."""
    make_room(figure)
    shown = {name: list(runs) for name, runs in panels.items()}
    if not shown:
        raise ConfigError("panels must hold the runs of at least one; got none.")
    runs = [run for each in shown.values() for run in each]
    methods = list(dict.fromkeys(run.method for run in runs))
    colors = colors or method_colors(methods)
    columns = min(COLUMNS, len(shown))
    rows = -(-len(shown) // columns)
    axes: dict[str, Axes] = {}
    made: dict[str, Artist] = {}
    for i, (name, own) in enumerate(shown.items()):
        ax = axes[name] = figure.add_subplot(rows, columns, i + 1)
        made |= pareto(ax, own, colors=colors, title=name or None)
        if i % columns:
            ax.set_ylabel("")
        if i + columns < len(shown):
            ax.set_xlabel("")
    names = [name for name in (*methods, FRONT) if name in made]
    several = any(sum(run.method == method for run in own) > 1 for own in shown.values() for method in methods)
    if names:
        legend_below(figure, [made[name] for name in names], names, heading=HINT if several else "")
    return axes


def _markers(colors: Mapping[str, str]) -> dict[str, str]:
    """The marker of each method as in other figures, but where a method of the same color has it: then the next."""
    made: dict[str, str] = {}
    for i, (method, color) in enumerate(colors.items()):
        taken = {marker for other, marker in made.items() if colors[other] == color}
        turned = [MARKERS[(i + k) % len(MARKERS)] for k in range(len(MARKERS))]
        made[method] = next((marker for marker in turned if marker not in taken), turned[0])
    return made
