"""The section on lesions: tables and figures of what `segcal lesions` found, one for each folder."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from segcal.lesions.results import LesionSummary, froc_table, lesion_notes, lesion_table
from segcal.plots.lesions import froc_figure, lesion_reliability_figure
from segcal.plots.style import default_settings
from segcal.report.page import ReportSection
from segcal.report.sections import as_report_figure


def lesion_section(summaries: Mapping[str, LesionSummary]) -> ReportSection:
    """Of each method, by name, how many lesions are found, at how many false ones, and what its confidence is worth."""
    tables, figures, notes = [], [], []
    for method, summary in summaries.items():
        of = f"{method}: " if len(summaries) > 1 else ""
        for table in (lesion_table(summary), froc_table(summary)):
            tables.append(replace(table, title=of + table.title))
        with default_settings():
            for name, caption, figure in (
                ("froc", "FROC: sensitivity against false positives per case", froc_figure(summary)),
                ("lesions", "Reliability: how often lesions are real", lesion_reliability_figure(summary)),
            ):
                figures.append(as_report_figure(f"{name}-{method}", of + caption, figure))
        notes += [of + note for note in lesion_notes(summary)]
    return ReportSection(
        "lesions",
        "Lesions",
        "Connected components of what is predicted, matched with those of the labels: how many are found, how many are "
        "false, and how often a lesion is real for each confidence it was given.",
        tuple(tables),
        tuple(figures),
        tuple(dict.fromkeys(notes)),
    )
