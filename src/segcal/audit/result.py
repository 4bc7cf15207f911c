"""What comes of an audit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from segcal.audit.nnunet import Sources
from segcal.comparison.comparison import Comparison
from segcal.evaluation.evaluation import Evaluation
from segcal.evaluation.outcome import Outcome


@dataclass(frozen=True, eq=False)
class Audit:
    """What `segcal.audit_predictions` found, and the files that it wrote.

    out: the folder of all of them.
    sources: where predictions, labels and images are, and how they were read.
    outcome: the predictions as they are, as `segcal.evaluate` gives it.
    calibrated: the same cases, each through a calibrator that was fitted without its patient; None: without calibrator.
    comparison: of the two; of the one, where there is no other.
    chosen: in a sentence, which calibrator was taken and why; empty where none was looked for.
    calibrator, quality: the files that new cases need; None where a step was left out.
    report: the page.
    advice: NEXT.md, with the commands that use the rest.
    skipped: why, of each step that was left out: "calibrate", "quality".
    failed: the error of each of these steps that failed.

    >>> import tempfile, numpy as np
    >>> from segcal import audit_predictions
    >>> folder = Path(tempfile.mkdtemp())
    >>> (folder / "maps").mkdir(), (folder / "labels").mkdir()
    (None, None)
    >>> np.save(folder / "maps" / "case_1.npy", np.full((2, 4, 4, 4), 0.5, np.float32))  # class, x, y, z
    >>> np.save(folder / "labels" / "case_1.npy", np.zeros((4, 4, 4), np.uint8))
    >>> found = audit_predictions(folder / "maps", folder / "labels", folder / "audit")
    >>> found.skipped["calibrate"]
    'to fit and check a calibrator takes at least 5 patients; there is 1.'
    >>> found.report.name, found.calibrator
    ('report.html', None)
    """

    out: Path
    sources: Sources
    outcome: Outcome
    calibrated: Evaluation | None
    comparison: Comparison
    chosen: str
    calibrator: Path | None
    quality: Path | None
    report: Path
    advice: Path
    skipped: Mapping[str, str]
    failed: Mapping[str, str]
