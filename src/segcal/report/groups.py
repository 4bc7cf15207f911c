"""The section on groups of cases: a table and a forest plot for each attribute."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from segcal.evaluation.group_tables import group_notes, group_table
from segcal.evaluation.groups import GroupComparison
from segcal.plots.groups import forest_figure
from segcal.plots.style import default_settings
from segcal.report.page import ReportSection
from segcal.report.sections import as_report_figure


def group_section(comparisons: Mapping[str, GroupComparison]) -> ReportSection:
    """Of each method, by name, its numbers in each group and how far the groups lie apart."""
    tables, figures, notes = [], [], []
    for method, comparison in comparisons.items():
        of = f"{method}: " if len(comparisons) > 1 else ""
        table = group_table(comparison)
        tables.append(replace(table, title=of + table.title))
        with default_settings():
            for attribute in comparison.attributes:
                caption = f"{of}{attribute}, mean over classes. Hollow: fewer than 5 patients, without an interval."
                figure = forest_figure(comparison, attribute)
                figures.append(as_report_figure(f"groups-{attribute}-{method}", caption, figure))
        notes += [of + note for note in comparison.notes]
    shared = group_notes(replace(next(iter(comparisons.values())), notes=())) if comparisons else []
    return ReportSection(
        "groups",
        "Groups",
        "The same numbers for groups of cases, and how far the groups lie apart: a mean over all cases may hide a "
        "group that fares worse.",
        tuple(tables),
        tuple(figures),
        (*shared, *notes),
    )
