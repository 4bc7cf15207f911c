"""Reliability diagrams of bands around the boundaries of classes, both sides together."""

from __future__ import annotations

from collections.abc import Mapping

from matplotlib.figure import Figure

from segcal.evaluation.band_tables import bands_of, side_of, spelled
from segcal.evaluation.diagrams import reliability
from segcal.evaluation.evaluation import Evaluation
from segcal.evaluation.intervals import patients_of
from segcal.plots.colors import BLUE
from segcal.plots.reliability import reliability_grid
from segcal.plots.style import PAGE_IN, new_figure

LARGEST_IN = 2.4  # width of a diagram


def band_figure(facets: Mapping[str, Evaluation], *, patients: str | None = None, color: str = BLUE) -> Figure:
    """A row for each class but the background and a column for each band, both sides together."""
    both = {name: part.foreground() for name, part in bands_of(facets).items() if side_of(name)[1] == "both"}
    first = next(iter(both.values()))
    who = patients_of(first.cases, patients)
    diagrams = {
        f"{label}, {spelled(side_of(name)[0])}": reliability(part.select(classes=[c]).binned, patients=who)
        for c, label in enumerate(first.classes)
        for name, part in both.items()
    }
    columns = len(both)
    width = min(PAGE_IN, LARGEST_IN * columns)
    figure = new_figure(width, 0.6 + len(first.classes) * 1.35 * width / columns)
    reliability_grid(figure, diagrams, columns=columns, color=color)
    return figure
