"""Dataset reliability histograms: how the frequency of each bin is spread over cases."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap, PowerNorm
from matplotlib.image import AxesImage
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.patheffects import withStroke

from segcal.evaluation.diagrams import ReliabilityHistogram
from segcal.plots.colors import BLACK, BLUE, GRAY, method_colors
from segcal.plots.style import (
    LINE_PT,
    TITLE_PT,
    AnyFigure,
    add_color_bar,
    add_title,
    legend_below,
    literal,
    make_room,
    plain_axes,
    unit_axis,
    wrap,
)

# White where there is nothing at all.
SHADES = ListedColormap([(1.0, 1.0, 1.0, 1.0), *matplotlib.colormaps["magma_r"](np.linspace(0, 1, 256))[1:]])
NO_CASE = "#E4E4E4"  # bins that no case occupies
GAMMA = 0.35
TICKS = (0, 0.01, 0.1, 0.3, 1)  # of the color bar


def reliability_histogram(
    ax: Axes,
    histogram: ReliabilityHistogram,
    *,
    color: str = BLUE,
) -> AxesImage:
    """Draw how the frequency of each bin is spread over cases, with the mean of each bin and the diagonal.

    Shades are gamma-corrected so that few cases show, and run from 0 to 1 in every histogram, so that several can
    be compared. Bins that no case occupies are gray.
    """
    share = histogram.share.numpy().T  # levels upwards
    nowhere = np.broadcast_to((histogram.cases == 0).numpy(), share.shape)
    ax.set_facecolor(NO_CASE)
    image = ax.imshow(
        np.ma.array(share, mask=nowhere),
        cmap=SHADES,
        norm=PowerNorm(GAMMA, vmin=0, vmax=1),
        origin="lower",
        extent=(0, 1, 0, 1),
        interpolation="nearest",
        aspect="equal",
    )
    ax.plot([0, 1], [0, 1], color=BLACK, linewidth=LINE_PT, linestyle=(0, (4, 3)))
    ax.plot(
        histogram.confidence.numpy(),
        histogram.frequency.numpy(),
        color=color,
        linewidth=1.1,
        marker="o",
        markersize=2.2,
        path_effects=[withStroke(linewidth=2.2, foreground="white")],
    )
    plain_axes(ax, x="confidence", y="frequency")
    unit_axis(ax.xaxis)
    unit_axis(ax.yaxis)
    ax.set(xlim=(0, 1), ylim=(0, 1))
    return image


def histogram_grid(
    figure: AnyFigure,
    histograms: Mapping[str, Mapping[str, ReliabilityHistogram]],
    *,
    colors: Mapping[str, str] | None = None,
) -> dict[tuple[str, str], Axes]:
    """Draw a row for each class or dataset and a column for each method; the axes by (row, column).

    `histograms[row][column]`; a row may lack columns. `colors` are those of the methods, if not given their own.
    """
    make_room(figure, fixed_aspect=True)
    columns = list(dict.fromkeys(column for row in histograms.values() for column in row))
    colors = colors or method_colors(columns)
    grid = figure.add_gridspec(len(histograms), len(columns))
    made: dict[tuple[str, str], Axes] = {}
    for i, (name, row) in enumerate(histograms.items()):
        for j, column in enumerate(columns):
            if column not in row:
                continue
            ax = made[name, column] = figure.add_subplot(grid[i, j])
            top = not any((above, column) in made for above in list(histograms)[:i])
            reliability_histogram(ax, row[column], color=colors[column])
            if top:
                add_title(ax, column)
            if i + 1 < len(histograms):
                ax.tick_params(labelbottom=False)
                ax.set_xlabel("")
            if column != next(iter(row)):
                ax.tick_params(labelleft=False)
                ax.set_ylabel("")
            elif name:
                _name_row(ax, name, rows=len(histograms))
    for (_, column), ax in made.items():
        if column == columns[-1]:
            add_color_bar(ax, ax.images[0], label="share of cases", ticks=TICKS)
            break
    _add_legend(figure)
    return made


def _name_row(ax: Axes, name: str, *, rows: int) -> None:
    """The row's name left of its axis label, upright and broken to the row's height."""
    figure = ax.get_figure(root=True)
    height_in = 0.8 * float(figure.get_size_inches()[1]) / rows if figure is not None else 1.0
    place: Any = {"xycoords": ax.yaxis.label, "textcoords": "offset points", "ha": "right", "va": "center"}
    literal(ax.annotate(wrap(name, width_in=height_in), (0, 0.5), (-3, 0), fontsize=TITLE_PT, rotation=90, **place))


def _add_legend(figure: AnyFigure) -> None:
    handles = [
        Line2D([], [], color=GRAY, linewidth=1.1, marker="o", markersize=2.2),
        Line2D([], [], color=BLACK, linewidth=LINE_PT, linestyle=(0, (4, 3))),
        Patch(facecolor=NO_CASE, edgecolor=GRAY, linewidth=0.3),
    ]
    legend_below(figure, handles, ["mean over cases", "perfect", "no case"])
