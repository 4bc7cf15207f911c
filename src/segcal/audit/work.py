"""The steps of an audit, one after the other; a step that is done already, of the same files and options, stays.

What a step was made of is a key in audit.json. Work inside a step resumes by itself: each function
that is called here keeps what it has done.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from segcal import __version__
from segcal._io.files import HeldError, Ledger, csv_text, write_whole
from segcal._io.jobs import key_of
from segcal._io.words import counted
from segcal.audit.advice import write_advice
from segcal.audit.nnunet import Sources
from segcal.audit.result import Audit
from segcal.audit.viewing import CALIBRATED, keep_folds, view
from segcal.calibration.choosing import METRICS, UNCHANGED, Choice
from segcal.calibration.fitting import Fitted, fit_calibrator
from segcal.calibrators import load_calibrator
from segcal.calibrators.calibrator import SeparableError
from segcal.comparison.comparison import compare
from segcal.errors import SegcalError
from segcal.evaluation.cohort import case_key, evaluate
from segcal.evaluation.doubts import HARD_DECISIONS
from segcal.evaluation.evaluation import Evaluation
from segcal.evaluation.intervals import FEWEST_PATIENTS
from segcal.evaluation.options import Options
from segcal.evaluation.outcome import Outcome
from segcal.evaluation.results import write_results
from segcal.quality.fitting import TooFewPatientsError, fit_quality, load_quality
from segcal.report import build_report
from segcal.volumes import Pairing

BINS = 20
EVALUATE, CALIBRATE, QUALITY, REPORT = "evaluate", "calibrate", "quality", "report"
TAKEN, REASON = "calibrator taken", "why this calibrator"  # in the ledger, with the keys
Progress = Callable[[str, int, int, str], None]
"""Is called with the name of a step, how much of it is done, of how much, and a text."""


@dataclass(eq=False)
class Work:
    """An audit under way."""

    sources: Sources
    options: Options
    pairing: Pairing
    out: Path
    patients: str | None
    who: tuple[str, ...]
    """The patient of each case."""
    workers: int
    cases: int
    """How many the report shows."""
    progress: Progress
    say: Callable[[str], None]
    skipped: dict[str, str] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.ledger = Ledger(self.out / "audit.json")
        self.before, self.calibrated = self.out / "before", self.out / CALIBRATED
        self.calibrator, self.quality = self.out / "calibrator.json", self.out / "quality.json"
        self.report, self.candidates = self.out / "report.html", self.out / "candidates.csv"
        self.keys = {files.name: case_key(files, self.options) for files in self.pairing.cases}
        self.cohort = key_of(__version__, self.who, list(self.keys.values()))

    def done(self) -> Audit:
        """All steps, in turn."""
        outcome = self._evaluate()
        before = outcome.evaluation  # SegcalError where there is none
        after = self._calibrate(outcome)
        learned = self._learn(before if after is None else after)
        shown = {"predictions": before} if after is None else {"before": before, CALIBRATED: after}
        audit = Audit(
            out=self.out,
            sources=self.sources,
            outcome=outcome,
            calibrated=after,
            comparison=compare(shown, patients=self.patients),
            chosen=(self.ledger.get(REASON) or "") if after is not None else "",
            calibrator=None if after is None else self.calibrator,
            quality=self.quality if learned else None,
            report=self.report,
            advice=self.out / "NEXT.md",
            skipped=self.skipped,
            failed=self.failed,
        )
        self._report(audit, shown)
        write_advice(audit)
        return audit

    def _evaluate(self) -> Outcome:
        """Evaluate the predictions as they are."""
        outcome = evaluate(
            self.sources.predictions, self.sources.labels, self.before, options=self.sources.options, bins=BINS,
            workers=self.workers, progress=self._progress_of(EVALUATE),
        )  # fmt: skip
        self._end(EVALUATE)
        return outcome

    def _progress_of(self, step: str) -> Callable[..., None]:
        """Return the progress of a step, as functions call it: done, total, and a text, if any."""

        def tell(done: int, total: int, text: str = "") -> None:
            self.progress(step, done, total, text)

        return tell

    def _end(self, step: str) -> None:
        """Report that a step is done, or was already."""
        self.progress(step, 1, 1, "done")

    def _calibrate(self, outcome: Outcome) -> Evaluation | None:
        """The cases through calibrators that were fitted without them; None where none is to be had, or none helps."""
        why = self._few() or _hard(outcome)
        failure = ""
        if not why and not self._is_calibrated():
            try:
                fitted = fit_calibrator(
                    self.sources.predictions, self.sources.labels, self.calibrator, options=self.sources.options,
                    bins=BINS, patients=self.patients, check_all=True, measured=self.before,
                    workers=self.workers, progress=self._progress_of(CALIBRATE), say=self.say,
                )  # fmt: skip
            except HeldError:
                raise
            except SeparableError as error:
                why = f"no calibrator could be fitted: {error}"
            except SegcalError as error:  # the cases could be measured, so this is not expected
                failure = str(error)
            else:
                self._keep(fitted)
        self._end(CALIBRATE)
        if not why and not failure and self.ledger.get(TAKEN) == UNCHANGED:
            why = f"{self.ledger.get(REASON)}."
        if not why and not failure:
            return Evaluation.load(self.calibrated / "evaluation.npz")
        self.calibrator.unlink(missing_ok=True)
        shutil.rmtree(self.calibrated, ignore_errors=True)
        if failure:
            self._fail(CALIBRATE, failure)
        else:
            self._skip(CALIBRATE, why)
        return None

    def _few(self) -> str:
        """What is said of too few patients; nothing where there are enough."""
        number = len(set(self.who))
        if number >= FEWEST_PATIENTS:
            return ""
        are = "is" if number == 1 else "are"
        return f"to fit and check a calibrator takes at least {FEWEST_PATIENTS} patients; there {are} {number}."

    def _is_calibrated(self) -> bool:
        """Whether the step is done, of these files and options, and its results are still there."""
        if self.ledger.get(CALIBRATE) != self.cohort:
            return False
        if self.ledger.get(TAKEN) == UNCHANGED:
            return True
        try:
            kept = Evaluation.load(self.calibrated / "evaluation.npz")
            told = kept.provenance["options"]["calibrator_fingerprint"]
            return bool(load_calibrator(self.calibrator).fingerprint == told)
        except (SegcalError, OSError, LookupError, TypeError):
            return False

    def _keep(self, fitted: Fitted) -> None:
        """Write what the check found as `evaluate` would, and what it was found with."""
        choice, after = fitted.choice, fitted.after
        assert choice is not None
        assert after is not None
        write_whole(self.candidates, _candidates(choice).encode())
        if choice.taken != UNCHANGED:
            after.provenance["options"] |= {  # what new cases go through, which promises on them are learned for
                "calibrator": os.path.abspath(self.calibrator),
                "calibrator_fingerprint": fitted.calibrator.fingerprint,
            }
            places = {"predictions": self.sources.predictions, "labels": self.sources.labels}
            after.provenance["folders"] = {what: os.path.abspath(path) for what, path in places.items()}
            after.provenance["cross-validation"] = "each case went through a calibrator fitted without its patient"
            keep_folds(self.calibrated, fitted.held_out)
            write_results(Outcome(after, fitted.failures, fitted.pairing, fitted.notes), self.options, self.calibrated)
        self.ledger.set(TAKEN, choice.taken)
        self.ledger.set(REASON, choice.reason)
        self.ledger.set(CALIBRATE, self.cohort)

    def _learn(self, evaluation: Evaluation) -> bool:
        """Learn what can be promised of new cases; whether that could be done."""
        key = key_of(self.cohort, evaluation.provenance["options"].get("calibrator_fingerprint"))
        try:
            if self.ledger.get(QUALITY) != key or not self._is_learned():
                fit_quality(evaluation, self.quality, patients=self.patients)
                self.ledger.set(QUALITY, key)
        except SegcalError as error:
            self.quality.unlink(missing_ok=True)
            if isinstance(error, TooFewPatientsError):
                self._skip(QUALITY, str(error))
            else:
                self._fail(QUALITY, str(error))
            return False
        finally:
            self._end(QUALITY)
        return True

    def _is_learned(self) -> bool:
        """Whether there is a file that can be read."""
        with suppress(SegcalError):
            load_quality(self.quality)
            return True
        return False

    def _report(self, audit: Audit, shown: dict[str, Evaluation]) -> None:
        """Write the page, unless it is there."""
        images = self.sources.images
        key = key_of(self.cohort, self.ledger.get(QUALITY), list(shown), self.cases, str(images))
        if self.ledger.get(REPORT) != key or not self.report.exists():
            files = {each.name: each for each in self.pairing.cases}
            viewed = list(view(
                shown, files, self.calibrated, images=images, number=self.cases, say=self.say,
                progress=self._progress_of(REPORT),
            ))  # fmt: skip
            title = f"Audit of {self.sources.predictions.absolute().name}"
            build_report(
                shown, self.report, patients=self.patients, title=title, comparison=audit.comparison, cases=viewed
            )
            self.ledger.set(REPORT, key)
        self._end(REPORT)

    def _skip(self, step: str, why: str) -> None:
        self.skipped[step] = why
        self.say(f"{step} is left out: {why}")

    def _fail(self, step: str, why: str) -> None:
        self.failed[step] = why
        self.say(f"{step} failed: {why}")


def _hard(outcome: Outcome) -> str:
    """What is said of predictions that are decisions, every one of them."""
    hard = {case for note in outcome.notes if note.kind == HARD_DECISIONS for case in note.cases}
    if not hard.issuperset(outcome.evaluation.cases):
        return ""
    return f"the maps of {counted(len(hard), 'case')} hold only zeros and ones, which no calibrator can improve."


def _candidates(choice: Choice) -> str:
    """The calibrators that were tried, as CSV."""
    rows = [
        (
            trial.name,
            *(trial.values[metric] for metric in METRICS),
            "taken" if trial.name == choice.taken else trial.refused,
        )
        for trial in choice.trials
    ]
    return csv_text(("calibrator", *METRICS, "remark"), rows)
