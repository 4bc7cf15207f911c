"""Figures as files: whole, and the same bytes each time."""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from segcal._io.files import write_whole
from segcal.errors import one_of

FORMATS = ("png", "svg", "pdf")
DPI = 300
# Text stays text: it can be searched and edited. Names inside an SVG do not change from one run to the next.
_SETTINGS: Any = {"svg.fonttype": "none", "svg.hashsalt": "segcal", "pdf.fonttype": 42, "savefig.bbox": None}
_NO_DATE: dict[str, dict[str, Any]] = {
    "png": {"Software": None},
    "svg": {"Date": None, "Creator": None},
    "pdf": {"CreationDate": None, "Creator": None, "Producer": None},
}


def figure_bytes(figure: Figure, kind: str = "png", *, dpi: int = DPI) -> bytes:
    """The figure as a PNG, SVG or PDF file, without the date."""
    one_of("the format of a figure", kind, FORMATS)
    content = io.BytesIO()
    with matplotlib.rc_context(_SETTINGS):
        figure.savefig(content, format=kind, dpi=dpi, metadata=_NO_DATE[kind], facecolor="white")
    return content.getvalue()


def save_figure(figure: Figure, path: str | os.PathLike[str], *, dpi: int = DPI) -> Path:
    """Write the figure as its file name says: .png, .svg or .pdf."""
    path = Path(path)
    write_whole(path, figure_bytes(figure, path.suffix.lower().removeprefix("."), dpi=dpi))
    return path
