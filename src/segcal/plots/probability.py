"""Probability maps of a slice: the image, the probabilities over it, and where prediction and labels agree.

A slice is an array whose first axis runs to the right and whose second runs up.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import ListedColormap, Normalize
from matplotlib.lines import Line2D
from matplotlib.patheffects import withStroke
from numpy.typing import NDArray

from segcal.errors import ShapeError
from segcal.plots.style import TITLE_PT, AnyFigure, add_color_bar, add_title, legend_below, make_room, wrap

Array = NDArray[Any]

TRUE_POSITIVE, FALSE_NEGATIVE, FALSE_POSITIVE = "#4DA6FF", "#FF3B30", "#FFE119"  # the paper's blue, red and yellow
LABELS = "#FFFFFF"
# Perceptually uniform; without viridis' yellow, which is the color of false positives.
SHADES = ListedColormap(matplotlib.colormaps["viridis"](np.linspace(0, 0.8, 256)), name="segcal probability")
OPAQUE_FROM = 0.2  # smaller probabilities fade, so that they do not veil the image
OPACITY = 0.7
CONTOUR_LEVEL = 0.65  # of a 0/1 map: just inside each region, so that neighbors do not hide each other


def probability_map(
    ax: Axes,
    image: Array | None,
    probability: Array,
    labels: Array,
    prediction: Array | None = None,
    *,
    spacing_mm: tuple[float, float] = (1.0, 1.0),
    title: str | None = None,
) -> None:
    """Draw probabilities over the image, with contours of true positives, false negatives and false positives.

    The prediction is where the probability is at least 0.5, if not given. Without an image the ground is black.
    """
    predicted, true = (probability >= 0.5 if prediction is None else prediction > 0), labels > 0
    for name, array in {"image": image, "labels": labels, "prediction": prediction}.items():
        if array is not None and array.shape != probability.shape:
            raise ShapeError(
                f"{name} must have the probabilities' shape {probability.shape}; got {array.shape}."
                " Use arrays on one grid."
            )
    _draw_image(ax, image, probability.shape, spacing_mm)
    opacity = OPACITY * np.clip(probability / OPAQUE_FROM, 0, 1)
    ax.imshow(probability.T, alpha=opacity.T, cmap=SHADES, vmin=0, vmax=1, **_placed(probability.shape, spacing_mm))
    _outline(ax, predicted & true, TRUE_POSITIVE, spacing_mm)
    _outline(ax, ~predicted & true, FALSE_NEGATIVE, spacing_mm)
    _outline(ax, predicted & ~true, FALSE_POSITIVE, spacing_mm)
    if title is not None:
        add_title(ax, title)


def probability_row(
    figure: AnyFigure,
    image: Array | None,
    probabilities: Mapping[str, Array],
    labels: Array,
    predictions: Mapping[str, Array] | None = None,
    *,
    spacing_mm: tuple[float, float] = (1.0, 1.0),
    title: str = "labels",
) -> list[Axes]:
    """Draw the image with its labels, then the probability map of each method, with one color bar; the axes."""
    make_room(figure, fixed_aspect=True)
    axes = [figure.add_subplot(1, len(probabilities) + 1, i + 1) for i in range(len(probabilities) + 1)]
    _draw_image(axes[0], image, labels.shape, spacing_mm)
    _outline(axes[0], labels > 0, LABELS, spacing_mm)
    add_title(axes[0], title)
    for ax, (method, probability) in zip(axes[1:], probabilities.items(), strict=True):
        prediction = None if predictions is None else predictions[method]
        probability_map(ax, image, probability, labels, prediction, spacing_mm=spacing_mm, title=method)
    add_color_bar(axes[-1], ScalarMappable(Normalize(0, 1), SHADES), label="probability", ticks=(0, 0.5, 1))
    names = {"labels": LABELS, "true positive": TRUE_POSITIVE, "false negative": FALSE_NEGATIVE}
    names["false positive"] = FALSE_POSITIVE
    handles = [Line2D([], [], color=line, linewidth=1.5, path_effects=[_halo(2.5)]) for line in names.values()]
    legend_below(figure, handles, list(names))
    return axes


def row_height_in(
    shape: tuple[int, ...], titles: Sequence[str], *, spacing_mm: tuple[float, float], width_in: float
) -> float:
    """The height in inches that a row of maps of this shape needs: panels, their titles and a legend."""
    height_over_width = shape[1] * spacing_mm[1] / (shape[0] * spacing_mm[0])
    panel_in = (width_in - 0.6) / len(titles)
    lines = max(
        wrap(title, width_in=0.8 * width_in / len(titles)).count("\n") + 1 for title in titles
    )  # as `width_in_of`
    return float(np.clip(panel_in * height_over_width, 0.6, 8.0)) + 0.5 + lines * 1.3 * TITLE_PT / 72


def _draw_image(ax: Axes, image: Array | None, shape: tuple[int, ...], spacing_mm: tuple[float, float]) -> None:
    values = np.zeros(shape) if image is None else image.astype(np.float64)
    known = values[np.isfinite(values)]
    low, high = np.percentile(known, (0.5, 99.5)) if known.size else (0.0, 1.0)  # a few bright voxels set no scale
    ax.imshow(values.T, cmap="gray", vmin=low, vmax=max(high, low + 1e-12), **_placed(shape, spacing_mm))
    ax.set_facecolor("black")
    ax.set(xticks=[], yticks=[])
    for spine in ax.spines.values():
        spine.set_visible(False)


def _placed(shape: tuple[int, ...], spacing_mm: tuple[float, float]) -> dict[str, Any]:
    extent = (0, shape[0] * spacing_mm[0], 0, shape[1] * spacing_mm[1])
    return {"extent": extent, "origin": "lower", "interpolation": "nearest", "aspect": "equal"}


def _outline(ax: Axes, region: Array, color: str, spacing_mm: tuple[float, float]) -> None:
    if not region.any():
        return
    framed = np.pad(region, 1).astype(np.float64)  # closes what touches the border
    x, y = ((np.arange(length) - 0.5) * step for length, step in zip(framed.shape, spacing_mm, strict=True))
    lines = ax.contour(x, y, framed.T, levels=[CONTOUR_LEVEL], colors=[color], linewidths=0.7)
    lines.set_path_effects([_halo()])
    ax.set(xlim=(0, region.shape[0] * spacing_mm[0]), ylim=(0, region.shape[1] * spacing_mm[1]))


def _halo(width_pt: float = 1.3) -> withStroke:
    """A dark rim, so that a line shows on every ground."""
    return withStroke(linewidth=width_pt, foreground="#000000B0")
