"""Probabilities of medical image segmentation that mean what they say.

The public names, loaded on first use, so that `import segcal` costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

__version__ = "0.2.0"

_HOME = {
    "Binning": "binning",
    "BinStatistics": "statistics",
    "bin_statistics": "collect",
    "ece": "metrics",
    "ace": "metrics",
    "mce": "metrics",
    "signed_gap": "metrics",
    "overconfidence": "metrics",
    "underconfidence": "metrics",
    "micro": "metrics",
    "equal_mass": "metrics",
    "OverlapCounts": "overlap",
    "ScoreSums": "overlap",
    "dice": "overlap",
    "brier": "overlap",
    "nll": "overlap",
    "Evaluation": "evaluation",
    "evaluate": "cohort",
    "compare": "comparison",
    "Comparison": "comparison",
    "build_report": "report",
    "write_figures": "plots",
    "Regions": "regions",
    "ACELoss": "losses",
    "SegmentationLoss": "losses",
    "LossTerms": "losses",
    "Calibrator": "scaling",
    "make_calibrator": "scaling",
    "load_calibrator": "scaling",
    "fit_calibrator": "calibration",
    "apply_calibrator": "calibration",
    "SegcalError": "errors",
    "ConfigError": "errors",
    "ShapeError": "errors",
    "LabelError": "errors",
    "RangeError": "errors",
    "FileError": "errors",
    "GridError": "errors",
}
__all__ = ["__version__", *_HOME]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'segcal' has no attribute {name!r}")
    return getattr(import_module(f"segcal.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
