"""The whole chain in one call."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from segcal._io.files import locked, make_folder, stay_outside
from segcal.audit.nnunet import find_sources
from segcal.audit.result import Audit
from segcal.audit.work import BINS, Progress, Work
from segcal.errors import ConfigError, check_integer
from segcal.evaluation.cohort import open_cohort
from segcal.evaluation.intervals import patients_of
from segcal.evaluation.options import ReadOptions

CASES = 6


def audit_predictions(
    predictions: str | os.PathLike[str],
    labels: str | os.PathLike[str] | None,
    out: str | os.PathLike[str],
    *,
    images: str | os.PathLike[str] | None = None,
    options: ReadOptions | None = None,
    patients: str | None = None,
    workers: int = 1,
    cases: int = CASES,
    progress: Progress = lambda step, done, total, text: None,
    say: Callable[[str], None] = lambda text: None,
) -> Audit:
    """Evaluate predictions, find the calibrator that helps most, learn what can be promised, and write a report.

    Writes report.html, calibrator.json, quality.json, NEXT.md, candidates.csv with all calibrators that were tried, and
    two folders as `evaluate` writes them: before, the predictions as they are, and calibrated, each case through a
    calibrator that was fitted without its patient. A step that cannot be done with what is there is left out, and
    said. An interrupted call resumes when repeated; finished steps are repeated only if files or options have changed.
    Raises what `evaluate` raises, and SegcalError where not a single case can be measured.

    predictions: folder of probability maps that a network made of cases it was not trained on, or a model folder of
        nnU-Net with the maps of its cross-validation.
    labels: folder of label maps; None: those of the model folder's dataset.
    out: folder for the results, outside of the others.
    images: folder of images, to show cases upon.
    options: how to read the predictions: logits, overlapping classes, names, regions, the label to ignore.
    patients: which cases are one patient's, as `compare` takes it.
    workers: processes that measure cases.
    cases: how many the report shows in three planes: the worst, around the median, and the best by Dice.
    progress: is called with the name of a step, how much of it is done, of how much, and a text.
    say: is told what is left out.

    >>> audit_predictions("nowhere", None, "audit")
    Traceback (most recent call last):
    segcal.errors.ConfigError: predictions must be a folder of maps or a model folder of nnU-Net; nowhere is not there.
    """
    check_integer("workers", workers)
    check_integer("cases", cases, least=0)
    truth, pictures = (None if path is None else Path(path) for path in (labels, images))
    sources, out = find_sources(Path(predictions), truth, pictures, options or ReadOptions()), Path(out)
    for source, what in ((sources.predictions, "predictions"), (sources.labels, "labels")):
        stay_outside(out, source, what)
    if sources.images is not None and not sources.images.is_dir():
        raise ConfigError(f"images must be a folder; {sources.images} is none. Check the path.")
    meant, pairing = open_cohort(sources.predictions, sources.labels, sources.options, bins=BINS)
    who = patients_of([files.name for files in pairing.cases], patients)
    for sentence in sources.found:
        say(sentence)
    make_folder(out)
    with locked(out / ".lock", out):
        return Work(sources, meant, pairing, out, patients, who, workers, cases, progress, say).done()
