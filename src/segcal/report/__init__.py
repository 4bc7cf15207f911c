"""One HTML file that shows an evaluation, or compares several: no network, no server, nothing to install.

`content` turns evaluations into the numbers that the page draws, `reading` puts them in plain words, and `page`
writes both into `templates`. Numbers are computed here, once; the page's JavaScript only draws them.
"""

from segcal.report.page import ReportFigure, ReportMap, ReportSection, build_report
from segcal.report.reading import reading

__all__ = ["ReportFigure", "ReportMap", "ReportSection", "build_report", "reading"]
