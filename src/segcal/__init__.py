"""Calibration of medical image segmentation: measure it, train for it, and calibrate after training.

Public names are loaded on first use, so `import segcal` is fast. Type checkers read the imports below.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from segcal._io.lazy import attach

__version__ = "0.3.0"

if TYPE_CHECKING:
    from segcal.audit.auditing import audit_predictions
    from segcal.audit.result import Audit
    from segcal.binning import Binning
    from segcal.calibration.applying import apply_calibrator
    from segcal.calibration.fitting import fit_calibrator
    from segcal.calibrators import Calibrator, load_calibrator, make_calibrator
    from segcal.collect import bin_statistics
    from segcal.comparison.comparison import Comparison, compare
    from segcal.decisions import DecisionSums, best_threshold, expected_dice, threshold_curves
    from segcal.errors import ConfigError, FileError, GridError, LabelError, RangeError, SegcalError, ShapeError
    from segcal.evaluation.accumulator import EvaluationAccumulator
    from segcal.evaluation.cohort import evaluate
    from segcal.evaluation.evaluation import Evaluation
    from segcal.evaluation.groups import compare_groups
    from segcal.evaluation.options import ReadOptions
    from segcal.evaluation.outcome import Outcome
    from segcal.lesions.cohort import evaluate_lesions
    from segcal.losses import ACELoss, LossTerms, SegmentationLoss
    from segcal.metrics import ace, ece, equal_mass, mce, micro, occupied, overconfidence, signed_gap, underconfidence
    from segcal.plots import write_figures
    from segcal.quality.applying import apply_quality
    from segcal.quality.deciding import decide
    from segcal.quality.fitting import Quality, fit_quality, load_quality
    from segcal.quality.queue import Queue
    from segcal.report import build_report
    from segcal.review import ReviewDecision, read_decisions
    from segcal.review.serving import serve_review
    from segcal.scores import OverlapCounts, ScoreSums, brier, dice, nll
    from segcal.statistics import BinStatistics
    from segcal.volumes.regions import Regions

_HOME = {
    "Binning": "binning",
    "BinStatistics": "statistics",
    "DecisionSums": "decisions",
    "threshold_curves": "decisions",
    "best_threshold": "decisions",
    "expected_dice": "decisions",
    "bin_statistics": "collect",
    "ece": "metrics",
    "ace": "metrics",
    "mce": "metrics",
    "occupied": "metrics",
    "signed_gap": "metrics",
    "overconfidence": "metrics",
    "underconfidence": "metrics",
    "micro": "metrics",
    "equal_mass": "metrics",
    "OverlapCounts": "scores",
    "ScoreSums": "scores",
    "dice": "scores",
    "brier": "scores",
    "nll": "scores",
    "ACELoss": "losses",
    "SegmentationLoss": "losses",
    "LossTerms": "losses",
    "Calibrator": "calibrators",
    "make_calibrator": "calibrators",
    "load_calibrator": "calibrators",
    "Regions": "volumes.regions",
    "Evaluation": "evaluation.evaluation",
    "EvaluationAccumulator": "evaluation.accumulator",
    "ReadOptions": "evaluation.options",
    "Outcome": "evaluation.outcome",
    "evaluate": "evaluation.cohort",
    "compare_groups": "evaluation.groups",
    "evaluate_lesions": "lesions.cohort",
    "Comparison": "comparison.comparison",
    "compare": "comparison.comparison",
    "write_figures": "plots",
    "build_report": "report",
    "Quality": "quality.fitting",
    "fit_quality": "quality.fitting",
    "load_quality": "quality.fitting",
    "apply_quality": "quality.applying",
    "Queue": "quality.queue",
    "decide": "quality.deciding",
    "ReviewDecision": "review",
    "read_decisions": "review",
    "serve_review": "review.serving",
    "fit_calibrator": "calibration.fitting",
    "apply_calibrator": "calibration.applying",
    "Audit": "audit.result",
    "audit_predictions": "audit.auditing",
    "SegcalError": "errors",
    "ConfigError": "errors",
    "ShapeError": "errors",
    "LabelError": "errors",
    "RangeError": "errors",
    "FileError": "errors",
    "GridError": "errors",
}
__all__ = [
    "ACELoss",
    "Audit",
    "BinStatistics",
    "Binning",
    "Calibrator",
    "Comparison",
    "ConfigError",
    "DecisionSums",
    "Evaluation",
    "EvaluationAccumulator",
    "FileError",
    "GridError",
    "LabelError",
    "LossTerms",
    "Outcome",
    "OverlapCounts",
    "Quality",
    "Queue",
    "RangeError",
    "ReadOptions",
    "Regions",
    "ReviewDecision",
    "ScoreSums",
    "SegcalError",
    "SegmentationLoss",
    "ShapeError",
    "__version__",
    "ace",
    "apply_calibrator",
    "apply_quality",
    "audit_predictions",
    "best_threshold",
    "bin_statistics",
    "brier",
    "build_report",
    "compare",
    "compare_groups",
    "decide",
    "dice",
    "ece",
    "equal_mass",
    "evaluate",
    "evaluate_lesions",
    "expected_dice",
    "fit_calibrator",
    "fit_quality",
    "load_calibrator",
    "load_quality",
    "make_calibrator",
    "mce",
    "micro",
    "nll",
    "occupied",
    "overconfidence",
    "read_decisions",
    "serve_review",
    "signed_gap",
    "threshold_curves",
    "underconfidence",
    "write_figures",
]

if not TYPE_CHECKING:
    __getattr__, __dir__ = attach(__name__, _HOME)
