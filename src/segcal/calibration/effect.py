"""What a calibrator did to a cohort: decisions that changed, and reliability before and after."""

from __future__ import annotations

import torch
from matplotlib.figure import Figure

from segcal.evaluation.diagrams import reliability
from segcal.evaluation.evaluation import Evaluation
from segcal.evaluation.intervals import patients_of
from segcal.plots.colors import BLUE
from segcal.plots.reliability import reliability_grid
from segcal.plots.style import PAGE_IN, default_settings, new_figure


def same_decisions(before: Evaluation, after: Evaluation) -> bool:
    """Whether the counts of all cases tell of no voxel that was decided otherwise.

    Even a calibrator that keeps the most probable class may decide otherwise about a region that is a sum of classes,
    which is predicted where the sum is at least 1/2.
    """
    pairs = ((before.overlap.predicted, after.overlap.predicted), (before.overlap.both, after.overlap.both))
    return all(torch.equal(old, new) for old, new in pairs)


def reliability_before_and_after(before: Evaluation, after: Evaluation, *, patients: str | None = None) -> Figure:
    """Reliability diagrams of every class: as it was above, calibrated below; of more than four, side by side."""
    who = patients_of(before.cases, patients)
    shown = {"before": before.foreground(), "calibrated": after.foreground()}
    names = shown["before"].classes
    order = [(when, i) for when in shown for i in range(len(names))]
    if len(names) > 4:
        order.sort(key=lambda pair: pair[1])
    diagrams = {
        f"{names[i]}, {when}": reliability(shown[when].binned.select(classes=[i]), patients=who) for when, i in order
    }
    columns = min(len(names), 4)
    with default_settings():
        rows = -(-len(diagrams) // columns)
        figure = new_figure(PAGE_IN, 0.45 + rows * 2.6 * 4 / (columns + 1))
        reliability_grid(figure, diagrams, columns=columns, color=BLUE)
    return figure
