"""Figures for print, drawn from numbers that were computed elsewhere.

Each function draws on the axes or the figure that it is given and returns; nothing is shown, no global setting is
changed and pyplot is never touched. A method has one color everywhere (`method_colors`), all colors can be told
apart by color-blind readers, text is 7 points or larger at print size, and names are shown as they are spelt.

Reading order: `style` (colors, sizes, text), `reliability`, `histograms`, `radar`, `probability`, `curves`, `pareto`,
`decisions` (the figures), `saving` (files), `standard` (the set of figures that follows from saved evaluations).
"""

from segcal.plots.colors import method_colors
from segcal.plots.curves import SensitivityPoint, memberships, sensitivity, sensitivity_figure
from segcal.plots.decisions import dice_over_thresholds, dice_promises, risk_and_coverage, volume_differences
from segcal.plots.histograms import histogram_grid, reliability_histogram
from segcal.plots.pareto import TradeOff, pareto, pareto_figure
from segcal.plots.probability import probability_map, probability_row
from segcal.plots.radar import radar, radar_pair, radar_values
from segcal.plots.reliability import reliability_diagram, reliability_grid
from segcal.plots.saving import figure_bytes, save_figure
from segcal.plots.standard import write_figures
from segcal.plots.style import COLUMN_IN, PAGE_IN, new_figure

__all__ = [
    "COLUMN_IN",
    "PAGE_IN",
    "SensitivityPoint",
    "TradeOff",
    "dice_over_thresholds",
    "dice_promises",
    "figure_bytes",
    "histogram_grid",
    "memberships",
    "method_colors",
    "new_figure",
    "pareto",
    "pareto_figure",
    "probability_map",
    "probability_row",
    "radar",
    "radar_pair",
    "radar_values",
    "reliability_diagram",
    "reliability_grid",
    "reliability_histogram",
    "risk_and_coverage",
    "save_figure",
    "sensitivity",
    "sensitivity_figure",
    "volume_differences",
    "write_figures",
]
