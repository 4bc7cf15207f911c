"""Colors, sizes and text that all figures share."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import matplotlib
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colorbar import Colorbar
from matplotlib.figure import Figure, SubFigure
from matplotlib.font_manager import FontProperties
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.legend import Legend
from matplotlib.text import Text
from matplotlib.textpath import text_to_path

from segcal.errors import ConfigError

AnyFigure = Figure | SubFigure

COLUMN_IN, PAGE_IN = 3.5, 7.16  # widths of one and of both columns of a journal page
TEXT_PT, TITLE_PT = 7.0, 8.0
LINE_PT = 0.6  # axes, ticks, diagonals

SCREEN_DPI = 150
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")


class NotebookFigure(Figure):
    """A figure that a notebook shows, though pyplot does not know it."""

    def _repr_png_(self) -> bytes:
        content = io.BytesIO()
        self.savefig(content, format="png", dpi=SCREEN_DPI)
        return content.getvalue()


def new_figure(width_in: float = COLUMN_IN, height_in: float = COLUMN_IN) -> Figure:
    """An empty figure that makes room for its labels, unknown to pyplot."""
    return NotebookFigure(figsize=(width_in, height_in), layout="constrained", facecolor="white")


@contextmanager
def default_settings() -> Iterator[None]:
    """Matplotlib as it comes, whatever the user's settings, which are back afterwards."""
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        yield


def make_room(figure: AnyFigure, *, fixed_aspect: bool = False) -> None:
    """Let a figure that has no layout yet fit its labels in; panels of fixed aspect also move together."""
    if isinstance(figure, Figure):
        engine = figure.get_layout_engine()
        if engine is None or (fixed_aspect and isinstance(engine, ConstrainedLayoutEngine)):
            figure.set_layout_engine("compressed" if fixed_aspect else "constrained")


def width_in_of(place: Axes | AnyFigure) -> float:
    """Width in inches of a figure, or that axes may take for a title: most of their column of the grid."""
    if not isinstance(place, Axes):
        return float(place.bbox.width / place.dpi)
    figure = place.get_figure(root=False)
    whole = COLUMN_IN if figure is None else width_in_of(figure)
    cell = place.get_subplotspec()
    if cell is None:
        return whole * float(place.get_position().width)
    return 0.8 * whole / cell.get_topmost_subplotspec().get_gridspec().ncols


def plain_axes(ax: Axes, *, x: str = "", y: str = "") -> None:
    """Thin lines, small ticks and the names of both axes."""
    ax.tick_params(which="both", labelsize=TEXT_PT, width=LINE_PT, length=2.5, pad=2)
    ax.tick_params(which="minor", length=1.5)
    for spine in ax.spines.values():
        spine.set_linewidth(LINE_PT)
    ax.set_xlabel(x, fontsize=TEXT_PT, labelpad=2)
    ax.set_ylabel(y, fontsize=TEXT_PT, labelpad=2)


def add_color_bar(ax: Axes, of: ScalarMappable, *, label: str, ticks: Sequence[float]) -> Colorbar:
    """A color bar to the right of the axes and of their height."""
    figure = ax.get_figure(root=False)
    if figure is None:
        raise ConfigError("axes must belong to a figure to have a color bar; they belong to none.")
    bar = figure.colorbar(of, cax=ax.inset_axes((1.05, 0, 0.06, 1)))
    bar.set_ticks(list(ticks), labels=[f"{tick:g}" for tick in ticks])
    bar.ax.tick_params(which="both", labelsize=TEXT_PT, width=LINE_PT, length=2.5, pad=2)
    bar.set_label(label, fontsize=TEXT_PT, labelpad=2)
    bar.outline.set_linewidth(LINE_PT)
    return bar


def unit_axis(axis: Any) -> None:
    """An axis of probabilities: 0 to 1 with short labels."""
    axis.set_ticks([0, 0.25, 0.5, 0.75, 1], labels=["0", "0.25", "0.5", "0.75", "1"])


def literal(text: Text) -> Text:
    """Show the text as it is spelt: a dollar sign starts no formula."""
    text.set_parse_math(False)
    return text


def add_title(ax: Axes, title: str, *, pad_pt: float = 4) -> None:
    """A title above the axes, broken into lines that fit their column."""
    literal(ax.set_title(wrap(title, width_in=width_in_of(ax)), fontsize=TITLE_PT, pad=pad_pt))


def legend(
    parent: Axes | AnyFigure, handles: Sequence[Artist], names: Sequence[str], *, heading: str = "", **where: Any
) -> Legend:
    """A legend without a frame, its names spelt as they are and broken where they are too long for its columns."""
    # Matplotlib drops names that begin with an underscore, so they are put in afterwards.
    made = parent.legend(handles, ["name"] * len(names), frameon=False, fontsize=TEXT_PT, **where)
    width_in = width_in_of(parent)
    column_in = width_in / min(len(names), where.get("ncols", 1)) - 0.45  # less the handle and the space between
    for text, name in zip(made.get_texts(), names, strict=True):
        literal(text).set_text(wrap(name, width_in=column_in, size_pt=TEXT_PT))
    if heading:
        made.set_title(wrap(heading, width_in=0.95 * width_in, size_pt=TEXT_PT), prop=FontProperties(size=TEXT_PT))
        literal(made.get_title())
    return made


def legend_below(figure: AnyFigure, handles: Sequence[Artist], names: Sequence[str], *, heading: str = "") -> Legend:
    """A legend under the figure, in as many columns as the longest name leaves room for."""
    widest = max((width_of(name, TEXT_PT) for name in names), default=0.0) + 0.5
    columns = max(1, min(len(names), int(width_in_of(figure) / widest)))
    place = {"loc": "outside lower center", "ncols": columns, "handlelength": 1.8, "columnspacing": 1.2}
    return legend(figure, handles, names, heading=heading, **place)


def wrap(text: str, *, width_in: float, size_pt: float = TITLE_PT) -> str:
    """The text in lines of at most this width, broken at spaces or after _ - / where there are any, else anywhere.

    >>> wrap("one two three", width_in=0.5), wrap("patient_007", width_in=0.6)
    ('one two\\nthree', 'patient_\\n007')
    """
    lines = []
    for given in text.splitlines():
        lines.append("")
        for piece in re.findall(r"\s+|[^\s_/-]*[_/-]+|[^\s_/-]+", given):
            if width_of(lines[-1] + piece, size_pt) <= width_in:
                lines[-1] += piece
                continue
            lines.append("")
            for letter in piece.lstrip():
                if width_of(lines[-1] + letter, size_pt) > width_in:
                    lines.append("")
                lines[-1] += letter
    return "\n".join(line.strip() for line in lines if line.strip())


def width_of(text: str, size_pt: float) -> float:
    """Width in inches of a line of text."""
    font = FontProperties(size=size_pt)
    width, _, _ = text_to_path.get_text_width_height_descent(text, font, ismath=False)
    return float(width) / 72


def number(value: float) -> str:
    """Three decimals, four below 0.01; a word for what has no value.

    >>> number(0.1234), number(0.0047), number(float("nan"))
    ('0.123', '0.0047', 'none')
    """
    return "none" if math.isnan(value) else f"{value:.4f}" if 0 < value < 0.01 else f"{value:.3f}"
