"""Sections that a page may have besides: their figures, drawn on paper, as the page shows them."""

from __future__ import annotations

from matplotlib.figure import Figure

from segcal.plots import figure_bytes
from segcal.report.page import ReportFigure

PIXELS_PER_INCH = 120  # larger than print, so that text of 7 points can be read on a screen


def as_report_figure(name: str, caption: str, figure: Figure) -> ReportFigure:
    """The figure as SVG."""
    width, height = (round(float(size) * PIXELS_PER_INCH) for size in figure.get_size_inches())
    return ReportFigure(name, caption, figure_bytes(figure, "svg"), width, height)
