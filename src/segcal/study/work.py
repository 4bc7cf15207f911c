"""The runs of a study: each trained, calibrated and evaluated by one process, which holds the lock of its folder.

A calibrator is fitted to the validation cases and measured on test cases. Each validation case is measured with one
that was fitted without its patient: on cases that it was fitted to, a calibrator looks too good.

A run's folder has its configuration's hash in its name, and whoever works there holds its lock: nothing else keeps two
processes from the same work. Every step can be resumed, so that a process may end at any time. `progress.json` tells
how far a run is, `done.json` that it is done, `failed.json` why it failed: it is tried again by the next command.
"""

from __future__ import annotations

import csv
import hashlib
import json
import math
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache, partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from segcal._io.ending import REQUESTS
from segcal._io.files import HeldError, is_locked, locked, make_folder, write_whole, writing
from segcal._io.jobs import keep_only, wanted
from segcal._io.parsing import parse_json
from segcal._io.words import listed
from segcal.calibration.folds import FOLDS, fit_once, patient_folds
from segcal.calibrators import Calibrator
from segcal.errors import SegcalError
from segcal.evaluation.outcome import Outcome
from segcal.study.plan import Fitting, Plan, PlannedRun
from segcal.training import train
from segcal.training.ensemble import load_ensemble
from segcal.training.loop import LOCK
from segcal.training.runs import Predictor, evaluate_run, load_run

RUNS, LOGS, PREPARED = "runs", "logs", "prepared"
DONE, FAILED, PROGRESS = "done.json", "failed.json", "progress.json"
CALIBRATOR = "calibrator.json"
CROSS_FITTED = "cross-fitted over patients"
SIDES: tuple[Literal["validation", "test"], ...] = ("validation", "test")
POLL_S = 1.0
PATIENCE_S = 3.0  # for a lock: its holder may be about to end, or may only look who holds it
STOPPED = tuple(128 + number for number in (signal.SIGINT, *REQUESTS))  # exit codes of a process asked to end
TRAINING = 0.9  # of the whole, roughly


class RunState(NamedTuple):
    """How a run stands."""

    name: str
    status: Literal["done", "running", "failed", "waiting"]
    stage: str = ""
    share: float = 0.0
    """Done of the whole run, roughly."""
    begun: float = 0.0
    """The share that was done when it was resumed."""
    seconds: float = math.nan
    """Since then; of a run that is done, all of its time."""
    where: str = ""
    """Host and process that work on it, or did last."""
    message: str = ""


class RunResult(NamedTuple):
    """What became of a run, and a sentence on it; "left": undone, for another process works on it or it was stopped."""

    status: Literal["done", "failed", "left"]
    message: str


@dataclass(frozen=True)
class Workshop:
    """A study's plan and its folder."""

    plan: Plan
    out: Path

    @property
    def runs(self) -> Path:
        return self.out / RUNS

    def is_done(self, run: PlannedRun) -> bool:
        """Whether everything that the plan asks of a run is there."""
        return bool(_facts(run, self.runs / run.name))

    def member_fault(self, run: PlannedRun) -> str:
        """Why an ensemble cannot be done yet; empty where all its members are done."""
        return next((_undone(member, self.runs) for member in run.members if not self.is_done(member)), "")

    def is_held(self, run: PlannedRun) -> bool:
        """Whether a process works on a run."""
        return is_locked(self.runs / run.name / LOCK)

    def states(self) -> list[RunState]:
        """How each run stands now, whoever works on it."""
        return [self._state(run) for run in self.plan.runs.values()]

    def _state(self, run: PlannedRun) -> RunState:
        folder = self.runs / run.name
        if facts := _facts(run, folder):
            return RunState(run.name, "done", share=1.0, seconds=float(facts.get("seconds", math.nan)))
        told = _read(folder / PROGRESS)
        where = f"{told['host']}, process {told['pid']}" if told else ""
        share, begun, seconds = (float(told.get(key, 0.0)) for key in ("share", "begun", "seconds"))
        if self.is_held(run):
            return RunState(run.name, "running", str(told.get("stage", "")), share, begun, seconds, where)
        if failed := _read(folder / FAILED):
            return RunState(run.name, "failed", message=f"{failed.get('kind')}: {failed.get('message')}")
        last = f"stopped, last seen {told['time']}" if told else ""
        return RunState(run.name, "waiting", share=share, where=where, message=last)


def do_run(run: PlannedRun, out: Path) -> RunResult:
    """Do a run in this process, or what is left of it; if another process holds its lock, that is the result."""
    folder = out / RUNS / run.name
    make_folder(folder)
    try:
        held = _lock(folder)
    except HeldError:
        told = _read(folder / PROGRESS)
        by = f"{told['host']}, process {told['pid']}, is at it" if told else "another process is at it"
        return RunResult("left", f"{run.name} is left alone: {by}")
    with held:
        return _attempt(run, folder, out / PREPARED)


def _lock(folder: Path) -> ExitStack:
    """The lock of a run, held; HeldError if another process keeps it for longer than a moment."""
    deadline, held = time.monotonic() + PATIENCE_S, ExitStack()
    while True:
        try:
            held.enter_context(locked(folder / LOCK, folder))
            return held
        except HeldError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)


def _attempt(run: PlannedRun, folder: Path, prepared: Path) -> RunResult:
    if _facts(run, folder):  # by another process, since we looked
        return RunResult("done", f"{run.name} is done")
    for name in (FAILED, PROGRESS):
        (folder / name).unlink(missing_ok=True)
    try:
        training = 0.0 if run.members else TRAINING
        facts = execute(run, folder, prepared, _Progress(folder, len(run.fittings), training).tell)
    except Exception as error:  # whatever it is, other runs go on
        write_whole(folder / "failed.log", traceback.format_exc().encode())
        result = record_failure(run, folder, type(error).__name__, str(error) or repr(error))
    else:
        write_whole(folder / DONE, json.dumps({**facts, "time": _now()}, indent=2).encode())
        result = RunResult("done", f"{run.name} is done")
    (folder / PROGRESS).unlink(missing_ok=True)
    return result


def record_failure(run: PlannedRun, folder: Path, kind: str, message: str) -> RunResult:
    """Write down in a run's folder why it failed."""
    make_folder(folder)
    write_whole(folder / FAILED, json.dumps({"kind": kind, "message": message, "time": _now()}, indent=2).encode())
    return RunResult("failed", f"{run.name} failed: {kind}: {message}")


def do_run_apart(run: PlannedRun, out: Path) -> RunResult:
    """Do a run in a process of its own, which ends when this one does, or when nobody waits for the run any more.

    For workers that are threads of a process, or may not start processes by multiprocessing, as those of Dask.
    """
    folder, log = out / RUNS / run.name, out / LOGS / f"{run.name}.txt"
    make_folder(log.parent)
    (folder / FAILED).unlink(missing_ok=True)  # of the last time
    command = [sys.executable, "-m", "segcal", "study", "run", os.fspath(out), "--only", run.name, "--end-with-stdin"]
    with (
        log.open("ab") as said,
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=said, stderr=said) as process,
    ):
        while process.poll() is None and wanted.get()():
            time.sleep(POLL_S)
    if process.returncode == 0:
        return RunResult("done", f"{run.name} is done")
    if failed := _read(folder / FAILED):
        return RunResult("failed", f"{run.name} failed: {failed.get('kind')}: {failed.get('message')}")
    if process.returncode in STOPPED or is_locked(folder / LOCK):
        return RunResult("left", f"{run.name} was stopped, or another process is at it; see {log}")
    return record_failure(run, folder, "CrashError", f"its process ended with code {process.returncode}; see {log}.")


class _Progress:
    """Tells others how far a run is: a file in its folder, written at most once a second."""

    def __init__(self, folder: Path, fittings: int, training: float) -> None:
        self.path, self.fittings, self.training = folder / PROGRESS, fittings, training
        self.start, self.written = time.monotonic(), -math.inf
        self.begun: float | None = None
        self.stage = ""

    def tell(self, stage: str, done: int, total: int, part: int = 0) -> None:
        """So much of a stage is done; part 0 is the training, and each evaluation counts as one more."""
        now = time.monotonic()
        within = done / total if total else 0.0
        later = self.training + (1 - self.training) * (part - 1 + within) / (1 + self.fittings)
        share = round(self.training * within if part == 0 else later, 4)
        self.begun = share if self.begun is None else self.begun
        if stage == self.stage and now - self.written < 1:
            return
        self.stage, self.written = stage, now
        content = {
            "host": socket.gethostname(), "pid": os.getpid(), "stage": stage, "share": share, "begun": self.begun,
            "seconds": round(now - self.start, 1), "time": _now(),
        }  # fmt: skip
        write_whole(self.path, json.dumps(content, indent=2).encode())


def execute(run: PlannedRun, folder: Path, prepared: Path, tell: Callable[..., None]) -> dict[str, Any]:
    """Train, evaluate on validation and test cases, fit each calibrator and evaluate again; facts about the run.

    What is there already is not done again. An ensemble trains nothing; its members must be done.
    """
    facts: dict[str, Any] = {}
    if run.members:
        if undone := [member for member in run.members if not _facts(member, folder.parent / member.name)]:
            raise SegcalError(_undone(undone[0], folder.parent))
        facts["members"] = _weights(run, folder.parent)
    else:
        trained = train(
            run.config, folder, prepared=prepared, held=True,
            progress=lambda done, total, text: tell("training", done, total),
        )  # fmt: skip
        facts |= {"best_epoch": trained.best_epoch, "epochs": trained.epochs}
    start = time.monotonic()
    loaded = load_planned(run, folder.parent)
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
        "config": run.hash,
        "weights": loaded.fingerprint,
        "fittings": sorted({*_fittings(_read(folder / DONE)), *(fitting.folder for fitting in run.fittings)}),
        "validation": CROSS_FITTED,
        **facts,
        "seconds": round((0 if run.members else _trained_s(folder)) + time.monotonic() - start, 1),
    }


def load_planned(run: PlannedRun, runs: Path) -> Predictor:
    """What a run of the plan predicts with, from the folder of all runs."""
    if run.members:
        return load_ensemble([runs / member.name for member in run.members], root=run.config.data.root)
    return load_run(runs / run.name, root=run.config.data.root)


def _undone(member: PlannedRun, runs: Path) -> str:
    """The sentence on a member that keeps its ensemble waiting."""
    failed = _read(runs / member.name / FAILED)
    why = f"it failed: {failed.get('kind')}: {failed.get('message')}" if failed else "it is not"
    return f"every member of an ensemble must be done; {member.name}: {why}"


def _weights(run: PlannedRun, runs: Path) -> dict[str, Any]:
    """By name, the weights of an ensemble's members that are done."""
    return {member.name: _read(runs / member.name / DONE).get("weights") for member in run.members}


def _trained_s(folder: Path) -> float:
    """Seconds of all epochs, whichever process did them."""
    with (folder / "log.csv").open(encoding="utf-8", newline="") as file:
        return sum(float(row["seconds"]) for row in csv.DictReader(file))


def _need_all(outcome: Outcome) -> None:
    """SegcalError unless every case was evaluated."""
    if outcome.measured is None or outcome.failures:
        told = [f"{failure.case}: {failure.message.rstrip('.')}" for failure in outcome.failures]
        raise SegcalError(
            f"every case must be evaluated; {len(told)} failed: {listed(told, 3, joint='; ')}. Check these files."
        )


def _facts(run: PlannedRun, folder: Path) -> dict[str, Any]:
    """What is known of a run that is done; empty while it is not."""
    facts = _read(folder / DONE)
    if run.members and facts.get("members") != _weights(run, folder.parent):
        return {}  # a member was trained again
    return facts if {fitting.folder for fitting in run.fittings} <= set(_fittings(facts)) else {}


def _fittings(facts: dict[str, Any]) -> list[str]:
    """The calibrators whose results are there; none where validation cases were measured in another way."""
    return list(facts.get("fittings", ())) if facts.get("validation") == CROSS_FITTED else []


class _Fits(NamedTuple):
    """A calibrator fitted to all validation cases, and for each case one without its patient (none: too few)."""

    to_all: Calibrator
    without: dict[str, Calibrator]


def _fitted(run: Predictor, fitting: Fitting, folder: Path) -> _Fits:
    """The calibrators of this run, fitted to its validation cases unless that was done for these weights before."""
    cases = run.cases("validation")
    names, patients = [case.name for case in cases], [case.patient for case in cases]
    number = min(FOLDS, len(set(patients)))
    groups = patient_folds(names, patients, number, seed=0) if number > 1 else []
    parts = folder / "folds"
    paths = {parts / f"{_fold_key(run, names, group)}.json": group for group in groups}
    whole, mark = folder / CALIBRATOR, folder / "weights.txt"
    make_folder(parts)
    with ExitStack() as stack:
        spool = cache(lambda: stack.enter_context(spooled(run, folder)))

        def fit(path: Path) -> Calibrator:
            rest = [i for i, name in enumerate(names) if name not in paths.get(path, ())]
            return fitting.make().fit(spool().only(rest))

        if _read_text(mark) != run.fingerprint:
            whole.unlink(missing_ok=True)  # it was fitted to what other weights say
        fits = {path: fit_once(path, partial(fit, path)) for path in (*paths, whole)}
    write_whole(mark, run.fingerprint.encode())
    keep_only(parts, paths)
    return _Fits(fits[whole], {name: fits[path] for path, group in paths.items() for name in group})


def _fold_key(run: Predictor, names: list[str], held_out: list[str]) -> str:
    """Names a fit: other weights, or other cases, give another key."""
    return hashlib.sha256(json.dumps([run.fingerprint, names, held_out]).encode()).hexdigest()[:16]


def _read_text(path: Path) -> str | None:
    with suppress(OSError, ValueError):
        return path.read_text(encoding="utf-8")
    return None


@contextmanager
def spooled(run: Predictor, folder: Path) -> Iterator[Spool]:
    """Logits and labels of the validation cases, kept on disk while they are gone through as often as one likes."""
    for left in folder.glob(".logits-*"):  # by a process that was killed: the lock of the run is ours
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
