"""The runs of a study done: each trained, calibrated and evaluated, by one process or by many that share a folder.

A calibrator is fitted to the validation cases and measured on test cases. On validation cases, where methods are
chosen, each case is measured with one fitted without its patient: to those it was fitted to it would look too good.

A run is claimed before it is touched (`claims`), and every step of it can be taken up again, so that a process may
end at any time. What is done is in `done.json` of the run's folder, what failed in `failed.json`: it is tried again by
the next process that starts.
"""

from __future__ import annotations

import csv
import hashlib
import json
import math
import shutil
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from segcal._io.files import make_folder, write_whole, writing
from segcal._io.jobs import keep_only
from segcal._io.parsing import parse_json
from segcal._io.words import listed
from segcal.calibration.folds import FOLDS, patient_folds
from segcal.calibrators import Calibrator, load_calibrator
from segcal.errors import SegcalError
from segcal.evaluation.outcome import Outcome
from segcal.study.claims import Claim, ClaimLost, Claims
from segcal.study.plan import Fitting, Plan, PlannedRun
from segcal.training import train
from segcal.training.runs import Run, evaluate_run, load_run

RUNS, CLAIMS, PREPARED = "runs", "claims", "prepared"
DONE, FAILED = "done.json", "failed.json"
CALIBRATOR = "calibrator.json"
CROSS_FITTED = "cross-fitted over patients"
SIDES: tuple[Literal["validation", "test"], ...] = ("validation", "test")
POLL_S = 2.0
TRAINING = 0.9  # of the whole, roughly


class RunState(NamedTuple):
    """How a run stands."""

    name: str
    status: Literal["done", "running", "failed", "waiting"]
    stage: str = ""
    share: float = 0.0
    """Done of the whole run, roughly."""
    begun: float = 0.0
    """The share that was done when it was taken up."""
    seconds: float = math.nan
    """Since then; of a run that is done, all of its time."""
    where: str = ""
    """Host and process that has it."""
    message: str = ""


@dataclass(frozen=True)
class Workshop:
    """A study's folder: its runs and who works on them."""

    plan: Plan
    out: Path

    @property
    def runs(self) -> Path:
        return self.out / RUNS

    @property
    def claims(self) -> Claims:
        return Claims(self.out / CLAIMS)

    def is_done(self, run: PlannedRun) -> bool:
        """Whether everything that the plan asks of a run is there."""
        return bool(self._facts(run))

    def _facts(self, run: PlannedRun) -> dict[str, Any]:
        """What is known of a run that is done; empty while it is not."""
        facts = _read(self.runs / run.name / DONE)
        return facts if {fitting.folder for fitting in run.fittings} <= set(_fittings(facts)) else {}

    def failure(self, run: PlannedRun) -> dict[str, Any]:
        """What failed last time; empty if nothing did."""
        return _read(self.runs / run.name / FAILED)

    def states(self) -> list[RunState]:
        """How each run stands now, whoever works on it."""
        claims = self.claims
        return [self._state(run, claims) for run in self.plan.runs.values()]

    def _state(self, run: PlannedRun, claims: Claims) -> RunState:
        if facts := self._facts(run):
            return RunState(run.name, "done", share=1.0, seconds=float(facts.get("seconds", math.nan)))
        holder = claims.holder(run.name)
        if holder is not None:
            note = holder.note
            share, begun, seconds = (float(note.get(key, 0.0)) for key in ("share", "begun", "seconds"))
            where = f"{holder.host}, process {holder.pid}"
            return RunState(run.name, "running", str(note.get("stage", "")), share, begun, seconds, where)
        failed = self.failure(run)
        if failed:
            return RunState(run.name, "failed", message=f"{failed.get('kind')}: {failed.get('message')}")
        return RunState(run.name, "waiting")

    def work(
        self,
        *,
        only: Iterable[str] | None = None,
        say: Callable[[str], None] = lambda text: None,
        again: bool = True,
    ) -> None:
        """Take up runs until all are done or have failed; those that others have are waited for.

        A run that failed before is tried again, once, unless `again` is False.
        """
        names = list(self.plan.runs) if only is None else list(only)
        known = {name: self.failure(self.plan.runs[name]) if again else {} for name in names}
        claims = self.claims
        while True:
            open_runs = [
                run
                for name in names
                if not self.is_done(run := self.plan.runs[name])
                and (not (failed := self.failure(run)) or failed == known[name])
            ]
            if not open_runs:
                return
            for run in open_runs:
                if (claim := claims.take(run.name)) is not None:
                    with claim:
                        known[run.name] = {}
                        self._attempt(run, claim, say)
                    break
            else:
                time.sleep(POLL_S)

    def _attempt(self, run: PlannedRun, claim: Claim, say: Callable[[str], None]) -> None:
        folder = self.runs / run.name
        start = time.monotonic()
        if self.is_done(run):  # by another process, since we looked
            return
        folder.mkdir(parents=True, exist_ok=True)
        (folder / FAILED).unlink(missing_ok=True)
        shares: list[float] = []

        def tell(stage: str, done: int, total: int, part: int = 0) -> None:
            claim.check()
            within = done / total if total else 0.0
            later = TRAINING + (1 - TRAINING) * (part - 1 + within) / (1 + len(run.fittings))
            shares.append(round(TRAINING * within if part == 0 else later, 4))
            since = round(time.monotonic() - start, 1)
            claim.tell(stage=stage, share=shares[-1], begun=shares[0], seconds=since)

        try:
            facts = execute(run, folder, self.out / PREPARED, tell)
        except ClaimLost as error:
            say(f"{run.name}: {error}")
        except Exception as error:  # whatever it is, other runs go on
            facts = {"kind": type(error).__name__, "message": str(error) or repr(error), "time": _now()}
            write_whole(folder / "failed.log", traceback.format_exc().encode())
            write_whole(folder / FAILED, json.dumps(facts, indent=2).encode())
            say(f"{run.name} failed: {facts['kind']}: {facts['message']}")
        else:
            facts["time"] = _now()
            write_whole(folder / DONE, json.dumps(facts, indent=2).encode())
            say(f"{run.name} is done")


def execute(run: PlannedRun, folder: Path, prepared: Path, tell: Callable[..., None]) -> dict[str, Any]:
    """Train, evaluate on validation and test cases, fit each calibrator and evaluate again; facts about the run.

    What is there already is not done again.
    """
    trained = train(
        run.config, folder, prepared=prepared, progress=lambda done, total, text: tell("training", done, total)
    )
    start = time.monotonic()
    loaded = load_run(folder, root=run.config.data.root)
    for i, fitting in enumerate((None, *run.fittings), start=1):
        target, fits = folder, None
        if fitting is not None:
            target = folder / fitting.folder
            tell(f"fitting {fitting.method}", 0, 1, i)
            fits = _fitted(loaded, fitting, target)
        for j, side in enumerate(SIDES):

            def advance(done: int, total: int, side: str = side, i: int = i, j: int = j) -> None:
                tell(f"evaluating {side} cases", j * total + done, 2 * total, i)

            if fits is not None and side == "validation" and not fits.without:
                shutil.rmtree(target / side, ignore_errors=True)  # nothing there can be compared with other methods
                continue
            calibrator = None if fits is None else fits.without if side == "validation" else fits.to_all
            _need_all(evaluate_run(loaded, target / side, side=side, calibrator=calibrator, progress=advance))
    return {
        "config": run.config.hash,
        "weights": loaded.fingerprint,
        "fittings": sorted({*_fittings(_read(folder / DONE)), *(fitting.folder for fitting in run.fittings)}),
        "validation": CROSS_FITTED,
        "best_epoch": trained.best_epoch,
        "epochs": trained.epochs,
        "seconds": round(_trained_s(folder) + time.monotonic() - start, 1),
    }


def _trained_s(folder: Path) -> float:
    """Seconds of all epochs, whichever process did them."""
    with (folder / "log.csv").open(encoding="utf-8", newline="") as file:
        return sum(float(row["seconds"]) for row in csv.DictReader(file))


def _need_all(outcome: Outcome) -> None:
    """SegcalError unless every case was evaluated."""
    if outcome.measured is None or outcome.failures:
        told = [f"{failure.case}: {failure.message.rstrip('.')}" for failure in outcome.failures]
        raise SegcalError(f"every case must be evaluated; {len(told)} failed: {listed(told, 3, joint='; ')}.")


def _fittings(facts: dict[str, Any]) -> list[str]:
    """The calibrators whose results are there; none where validation cases were measured in another way."""
    return list(facts.get("fittings", ())) if facts.get("validation") == CROSS_FITTED else []


class _Fits(NamedTuple):
    """A calibrator fitted to all validation cases, and for each case one without its patient (none: too few)."""

    to_all: Calibrator
    without: dict[str, Calibrator]


def _fitted(run: Run, fitting: Fitting, folder: Path) -> _Fits:
    """The calibrators of this run, fitted to its validation cases unless that was done for these weights before."""
    cases = run.cases("validation")
    names, patients = [case.name for case in cases], [case.patient for case in cases]
    number = min(FOLDS, len(set(patients)))
    groups = patient_folds(names, patients, number, seed=0) if number > 1 else []
    parts = folder / "folds"
    paths = {parts / f"{_fold_key(run, names, group)}.json": group for group in groups}
    whole, mark = folder / CALIBRATOR, folder / "weights.txt"
    there = [*paths, whole] if _read_text(mark) == run.fingerprint else list(paths)
    fits = {path: calibrator for path in there if (calibrator := _loaded(path)) is not None}
    make_folder(parts)
    if missing := [path for path in (*paths, whole) if path not in fits]:
        with spooled(run, folder) as spool:
            for path in missing:
                rest = [i for i, name in enumerate(names) if name not in paths.get(path, ())]
                fits[path] = fitting.make().fit(spool.only(rest))
                fits[path].save(path)
        write_whole(mark, run.fingerprint.encode())
    keep_only(parts, paths)
    return _Fits(fits[whole], {name: fits[path] for path, group in paths.items() for name in group})


def _fold_key(run: Run, names: list[str], held_out: list[str]) -> str:
    """Names a fit: other weights, or other cases, give another key."""
    return hashlib.sha256(json.dumps([run.fingerprint, names, held_out]).encode()).hexdigest()[:16]


def _loaded(path: Path) -> Calibrator | None:
    with suppress(OSError, SegcalError):
        return load_calibrator(path)
    return None


def _read_text(path: Path) -> str | None:
    with suppress(OSError, ValueError):
        return path.read_text(encoding="utf-8")
    return None


@contextmanager
def spooled(run: Run, folder: Path) -> Iterator[Spool]:
    """Logits and labels of the validation cases, kept on disk while they are gone through as often as one likes."""
    for left in folder.glob(".logits-*"):  # by a process that was killed: the claim on the run is ours
        shutil.rmtree(left, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=".logits-", dir=folder) as temporary:
        place = Path(temporary)
        count = 0
        for logits, labels in run.logits_and_labels("validation"):
            with writing(place):
                np.save(place / f"{count}.logits.npy", logits.numpy())
                np.save(place / f"{count}.labels.npy", labels.numpy())
            count += 1
        yield Spool(place, range(count))


class Spool:
    """Cases on disk, by their numbers."""

    def __init__(self, folder: Path, numbers: Sequence[int]) -> None:
        self.folder, self.numbers = folder, numbers

    def only(self, numbers: Sequence[int]) -> Spool:
        """Some of the cases."""
        return Spool(self.folder, numbers)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for i in self.numbers:
            logits, labels = (
                torch.from_numpy(np.load(self.folder / f"{i}.{name}.npy", mmap_mode="c"))
                for name in ("logits", "labels")
            )
            yield logits, labels


def _read(path: Path) -> dict[str, Any]:
    with suppress(OSError, ValueError, TypeError):
        return dict(parse_json(path.read_text(encoding="utf-8")))
    return {}


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
