"""The figures that follow from saved evaluations, in one call."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from matplotlib.figure import Figure

from segcal._io.files import file_stems
from segcal.errors import ConfigError, one_of
from segcal.evaluation.decisions import Agreement, agreements_of
from segcal.evaluation.diagrams import Reliability, ReliabilityHistogram, reliability, reliability_histogram
from segcal.evaluation.evaluation import Evaluation
from segcal.evaluation.intervals import patients_of
from segcal.plots.colors import method_colors
from segcal.plots.decisions import (
    Draw,
    decision_grid,
    dice_over_thresholds,
    dice_promises,
    risk_and_coverage,
    volume_differences,
)
from segcal.plots.histograms import histogram_grid
from segcal.plots.radar import radar_pair
from segcal.plots.reliability import reliability_diagram, reliability_grid
from segcal.plots.saving import FORMATS, save_figure
from segcal.plots.style import COLUMN_IN, PAGE_IN, default_settings, new_figure

MOST_COLUMNS = 4  # of small diagrams beside each other
ALL, MEAN = "all classes, pooled", "average of classes"
DECISIONS: dict[str, Draw] = {
    "dice": dice_promises,
    "risk": risk_and_coverage,
    "thresholds": dice_over_thresholds,
    "volumes": volume_differences,
}
"""Figures of decisions, by the end of their files' names."""


def write_figures(
    evaluations: Mapping[str, Evaluation],
    out: str | os.PathLike[str],
    *,
    formats: Iterable[str] = ("png",),
    patients: str | None = None,
) -> list[Path]:
    """Draw the standard figures of these methods, without the background, and write them to `out`; the paths.

    For each method reliability diagrams of the cohort; for all of them dataset reliability histograms, averaged over
    classes and for each class, and radar plots of all and of complete cases; of those with sums of decisions, what
    these promised and what came of them. ConfigError for an unknown format, and for evaluations that have not the same
    classes.

    evaluations: by the name of the method.
    out: folder for the files; it is made if it is not there.
    formats: kinds of files, such as "png", "pdf" and "svg".
    patients: which cases belong together, for the bands of diagrams, as in `compare`.

    >>> import tempfile, torch
    >>> from segcal import EvaluationAccumulator
    >>> accumulator = EvaluationAccumulator()
    >>> accumulator.update(torch.full((2, 2, 8), 0.5), torch.tensor([[0, 1] * 4] * 2), ["one", "two"])
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     names = [path.name for path in write_figures({"baseline": accumulator.compute()}, folder)]
    >>> sorted(name for name in names if not name.startswith("decisions"))
    ['histograms.png', 'radar.png', 'reliability-baseline.png']
    """
    formats = tuple(formats)
    for kind in formats:
        one_of("the format of a figure", kind, FORMATS)
    shown = {method: evaluation.foreground() for method, evaluation in evaluations.items()}
    classes = {evaluation.classes for evaluation in shown.values()}
    if len(classes) != 1:
        raise ConfigError(f"evaluations to draw must be at least one and have the same classes; got {sorted(classes)}.")
    out = Path(out)
    out.mkdir(parents=True, exist_ok=True)
    written = []
    with default_settings():
        for name, figure in _figures(shown, patients):
            written += [save_figure(figure, out / f"{name}.{kind}") for kind in formats]
    return written


def _figures(shown: Mapping[str, Evaluation], patients: str | None) -> Iterable[tuple[str, Figure]]:
    """Names of files and figures, one at a time."""
    colors = method_colors(shown)
    for method, stem in file_stems(shown).items():
        yield f"reliability-{stem}", reliability_figure(shown[method], patients=patients, color=colors[method])
    averaged = {"": {method: reliability_histogram(each.binned) for method, each in shown.items()}}
    yield "histograms", histogram_figure(averaged, colors=colors)
    names = next(iter(shown.values())).classes
    if len(names) > 1:
        by_class = {
            name: {method: reliability_histogram(each.select(classes=[i]).binned) for method, each in shown.items()}
            for i, name in enumerate(names)
        }
        yield "histograms-classes", histogram_figure(by_class, colors=colors)
    figure = new_figure(PAGE_IN, 3.9)
    if len(radar_pair(figure, shown)) == 1:
        figure.set_size_inches(COLUMN_IN, 3.6)
    yield "radar", figure
    agreements = agreements_of(shown)
    for name, draw in DECISIONS.items() if agreements else ():
        yield f"decisions-{name}", decision_figure(agreements, draw, colors=colors)


def reliability_figure(evaluation: Evaluation, *, patients: str | None = None, color: str) -> Figure:
    """Reliability diagrams of a cohort: of all classes together and of each."""
    who = patients_of(evaluation.cases, patients)
    stats = evaluation.binned
    diagrams: dict[str, Reliability] = {
        name: reliability(stats.select(classes=[i]), patients=who) for i, name in enumerate(evaluation.classes)
    }
    if len(diagrams) == 1:
        figure = new_figure(COLUMN_IN, 4.3)
        for name, diagram in diagrams.items():
            reliability_diagram(figure, diagram, title=name, color=color)
        return figure
    diagrams = {ALL: reliability(stats, patients=who)} | diagrams
    columns = min(MOST_COLUMNS, len(diagrams))
    figure = new_figure(PAGE_IN, 0.45 + -(-len(diagrams) // columns) * 2.6 * 4 / (columns + 1))
    reliability_grid(figure, diagrams, columns=columns, color=color)
    return figure


def histogram_figure(
    histograms: Mapping[str, Mapping[str, ReliabilityHistogram]], *, colors: Mapping[str, str]
) -> Figure:
    """Dataset reliability histograms, a row for each class and a column for each method."""
    columns = max(len(row) for row in histograms.values())
    width = COLUMN_IN if columns == 1 else PAGE_IN
    side = min((width - 1.6) / columns, 2.6)  # beside it the color bar and the rows' names
    figure = new_figure(width, 0.9 + len(histograms) * (side + 0.08))
    histogram_grid(figure, histograms, colors=colors)
    return figure


def decision_figure(agreements: Mapping[str, Agreement], draw: Draw, *, colors: Mapping[str, str]) -> Figure:
    """One of the figures of decisions: of the mean of all classes, which has no volumes, and of each class."""
    labels = {label: label or MEAN for label in sorted(next(iter(agreements.values())).labels, key=bool)}
    if draw is volume_differences:
        labels.pop(None, None)
    columns = min(MOST_COLUMNS, len(labels))
    width = COLUMN_IN if columns == 1 else PAGE_IN
    rows = -(-len(labels) // columns)
    figure = new_figure(width, 0.75 + rows * min(width / columns, 2.6))
    decision_grid(figure, agreements, draw, labels=labels, colors=colors, columns=columns)
    return figure
