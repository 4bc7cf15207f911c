"""The section on bands around the boundaries of classes: a table, and diagrams of each band."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from segcal.evaluation.band_tables import NOTE, band_rows, band_table
from segcal.evaluation.evaluation import Evaluation
from segcal.plots.bands import band_figure
from segcal.plots.style import default_settings
from segcal.report.page import ReportSection
from segcal.report.sections import as_report_figure


def band_section(methods: Mapping[str, Mapping[str, Evaluation]], *, patients: str | None = None) -> ReportSection:
    """Of each method, by name, the bands that `read_bands` found."""
    tables, figures = [], []
    for method, facets in methods.items():
        of = f"{method}: " if len(methods) > 1 else ""
        table = band_table(band_rows(facets))
        tables.append(replace(table, title=of + table.title))
        with default_settings():
            figure = band_figure(facets, patients=patients)
            caption = f"{of}Reliability by distance to the true boundary, both sides together"
            figures.append(as_report_figure(f"bands-{method}", caption, figure))
    return ReportSection(
        "bands",
        "Boundary bands",
        "The same numbers for voxels near the boundary of a class and far from it. Most voxels are far background, "
        "which is easy: near the boundary calibration matters, and there it can be seen.",
        tuple(tables),
        tuple(figures),
        (NOTE,),
    )
