"""Fit a calibrator to a folder of predictions and labels, check it on cases it was not fitted to, apply it to others.

The check is a cross-validation over patients: each case is measured with a calibrator that was fitted without that
patient. The calibrator that is kept is fitted to all cases.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from segcal._io.files import WriteError, locked, make_folder
from segcal._io.jobs import PARTS, Failure, failure_of
from segcal.calibration.ahead import Ahead
from segcal.calibration.choosing import AUTO, UNCHANGED, Choice, choose
from segcal.calibration.estimate import Blank
from segcal.calibration.parts import Fits, HeldOut, Parts, check_fold, told_of
from segcal.calibration.planning import Plan, plan_fit
from segcal.calibration.steps import Progress, Steps
from segcal.calibrators import Calibrator, Temperature
from segcal.calibrators.calibrator import SeparableError
from segcal.errors import ConfigError, SegcalError, check_integer
from segcal.evaluation.calibrated import FolderCase
from segcal.evaluation.cohort import open_cohort
from segcal.evaluation.evaluation import Evaluation
from segcal.evaluation.options import Options, ReadOptions
from segcal.evaluation.outcome import Note, as_plain, gather_notes, told
from segcal.evaluation.results import stack_cases
from segcal.evaluation.sums import CaseSums
from segcal.kernels.threads import one_torch_thread
from segcal.volumes import CaseFiles, Pairing
from segcal.volumes.averaging import Mean


class Fitted(NamedTuple):
    """A calibrator, and the cases as they were and as calibrators fitted without them make them."""

    calibrator: Calibrator
    before: Evaluation
    after: Evaluation | None
    """None: without cross-validation."""
    folds: int
    failures: list[Failure]
    pairing: Pairing
    notes: tuple[Note, ...] = ()
    choice: Choice | None = None
    """What the method "auto" tried; the evaluations then are of the cases that it was tried on."""
    held_out: tuple[HeldOut, ...] = ()
    """What calibrated the cases of `after`."""


def fit_calibrator(
    predictions: str | os.PathLike[str],
    labels: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    members: Sequence[str | os.PathLike[str]] = (),
    mean: Mean = "probabilities",
    method: str = AUTO,
    settings: dict[str, Any] | None = None,
    options: ReadOptions | None = None,
    bins: int = 20,
    folds: int | None = None,
    patients: str | None = None,
    seed: int = 0,
    check_all: bool = False,
    measured: str | os.PathLike[str] | None = None,
    workers: int = 1,
    progress: Progress = lambda done, total, text: None,
    say: Callable[[str], None] = lambda text: None,
) -> Fitted:
    """Fit a calibrator to all cases that both folders have, write it to `out`, and cross-validate it over patients.

    A case that cannot be read or makes no sense is a failure with a sentence, and is left out of the fit. Interrupted
    and called again, it resumes. Neither that nor the number of workers or cores changes what is found.
    Raises ConfigError for options that cannot be used, SegcalError where no fit is best.

    predictions: folder of probability maps or logits that the network made of cases it was not trained on.
    labels: folder of label maps with the same names.
    out: file of the calibrator, as calibrator.json.
    members: further folders of maps of the same cases: the calibrator is fitted to the mean of all.
    mean: of the members' probabilities, or of their logits.
    method: see `make_calibrator`; "auto" tries several on held-out cases, and takes the one with the lowest ACE of
        those that lose no overlap and leave NLL, Brier score and occupied bins no worse, or none.
    settings: of the method, by name.
    options: how to read the predictions: logits, overlapping classes, names, regions, the label to ignore.
    bins: of the errors in the check.
    folds: of the cross-validation; 5, or as many as there are patients, if not given. 0 fits without the check.
    patients: which cases belong together, as in `compare`.
    seed: of the folds.
    check_all: "auto" tries on some of the patients where there are very many; check what it takes on all of them.
    measured: a folder that `evaluate` wrote of the same cases, read alike: what is there is not measured again.
    workers: processes that measure cases and try calibrators on folds, each with one at a time.
    progress: is called with steps done, all steps and a text.
    say: is told which candidates are not tried.

    >>> import tempfile
    >>> import nibabel, numpy as np
    >>> labels = np.arange(64, dtype=np.uint8).reshape(4, 4, 4) % 2
    >>> there = np.where(labels == 1, 0.99, 0.01)
    >>> there[0] = 1 - there[0]  # one voxel in four is wrong
    >>> arrays = {"predictions": np.stack([1 - there, there], -1).astype(np.float32), "labels": labels}
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     for name, array in arrays.items():
    ...         Path(folder, name).mkdir()
    ...         nibabel.save(nibabel.Nifti1Image(array, np.eye(4)), f"{folder}/{name}/case_0.nii.gz")
    ...     paths = f"{folder}/predictions", f"{folder}/labels", f"{folder}/calibrator.json"
    ...     fitted = fit_calibrator(*paths, method="temperature", folds=0)
    >>> round(fitted.calibrator.temperature, 2)  # which makes 0.75 of 0.99
    4.18
    """
    check_integer("workers", workers)
    meant, pairing = open_cohort(predictions, labels, options or ReadOptions(), members=members, mean=mean, bins=bins)
    plan = plan_fit(
        meant, pairing, method=method, settings=settings, folds=folds, patients=patients, seed=seed,
        check_all=check_all, say=say,
    )  # fmt: skip
    out = Path(out)
    if out.is_dir():
        raise ConfigError(f"--out must be a file, as calibrator.json; {out} is a folder. Give a file name.")
    make_folder(out.parent)
    with locked(out.with_name(f".{out.name}.lock"), out):
        parts = Parts(out.with_name(f".{out.name}.parts"), None if measured is None else Path(measured) / PARTS)
        steps = Steps(progress, plan.steps)
        with one_torch_thread():
            fitted = _fit(plan, patients, out, parts, Ahead(workers, parts, steps), steps)
        parts.remove()
        return fitted


def _fit(
    plan: Plan,
    patients: str | None,
    out: Path,
    parts: Parts,
    ahead: Ahead,
    steps: Steps,
) -> Fitted:
    """Measure all cases, fit without each group and measure it again, fit to all what is taken, and write that."""
    candidates, options, pairing, groups, everyone = plan
    crashed = ahead.measure(pairing.cases, options)
    usable = [files for files in pairing.cases if files.name not in crashed]
    before, doubts, failures = _measured(usable, options, parts, steps)
    failures += crashed.values()
    if not before:
        raise ConfigError(f"there must be cases to fit a calibrator on; {failures[0].case}: {failures[0].message}")
    cases = {name: FolderCase(files, options) for files in pairing.cases if (name := files.name) in before}
    notes = gather_notes(doubts)

    def evaluation(sums: Mapping[str, CaseSums]) -> Evaluation:
        found = stack_cases([name for name in cases if name in sums], lambda name: (sums[name], {}), options)
        found.provenance.update(failures=told(failures), notes=as_plain(notes))
        return found

    tried = [name for name in cases if any(name in group for group in groups)] if groups else list(cases)
    shown = evaluation({name: before[name] for name in tried})
    some = {name: cases[name] for name in tried}
    ahead.check(candidates, some, groups)
    after, held_out = _tried(candidates, some, groups, parts, steps, say)
    results = {name: evaluation(sums) for name, sums in after.items()}
    choice = choose(shown, results, patients=patients) if len(candidates) > 1 else None
    taken = candidates[0].name if choice is None else choice.taken
    if everyone:
        shown = evaluation(before)
    if taken == UNCHANGED:
        calibrator: Calibrator = Temperature(1.0, activation=candidates[0].calibrator.activation)
        results[taken] = shown
    else:
        blank, strength = _candidate(candidates, taken)
        if everyone:
            chosen = Blank(blank, {strength: taken})
            ahead.check([chosen], cases, everyone)
            sums, held_out[taken] = _checked(chosen, cases, everyone, parts, steps)[taken]
            results[taken] = evaluation(sums)
        calibrator = Fits(blank, cases, parts, steps).without((), "fitting to all cases").weakened(strength)
    if (picture := picture_beside(out)) != out:
        picture.unlink(missing_ok=True)  # of the calibrator that was here
    calibrator.save(out)
    steps.end()
    used = tuple(held_out.get(taken, ()))
    return Fitted(calibrator, shown, results.get(taken), len(groups), failures, pairing, notes, choice, used)


def _candidate(candidates: Sequence[Blank], name: str) -> tuple[Calibrator, float]:
    """The candidate of this name, and its strength."""
    return next((each.calibrator, at) for each in candidates for at, called in each.strengths.items() if called == name)


def _tried(
    candidates: Sequence[Blank],
    cases: Mapping[str, FolderCase],
    groups: list[list[str]],
    parts: Parts,
    steps: Steps,
    say: Callable[[str], None],
) -> tuple[dict[str, dict[str, CaseSums]], dict[str, list[HeldOut]]]:
    """What each candidate makes of the cases, and what it was fitted without; one that cannot be fitted is left out."""
    after: dict[str, dict[str, CaseSums]] = {}
    held_out: dict[str, list[HeldOut]] = {}
    errors: dict[str, SegcalError] = {}
    for each in candidates if groups else ():
        try:
            checked = _checked(each, cases, groups, parts, steps)
        except SegcalError as error:
            errors[each.name] = error
        else:
            after |= {name: check.sums for name, check in checked.items()}
            held_out |= {name: check.held_out for name, check in checked.items()}
    if errors and not after:
        raise min(errors.values(), key=lambda error: isinstance(error, SeparableError))  # another error tells more
    for name, reason in errors.items():
        say(f"{name} is left out: {reason}")
    return after, held_out


class _Check(NamedTuple):
    """Sums of cases by calibrators that were fitted without them, and which those are."""

    sums: dict[str, CaseSums]
    held_out: list[HeldOut]


def _checked(
    candidate: Blank, cases: Mapping[str, FolderCase], groups: list[list[str]], parts: Parts, steps: Steps
) -> dict[str, _Check]:
    """Each case by a calibrator fitted without its group, by the names of the candidate's strengths."""
    fits = Fits(candidate.calibrator, cases, parts, steps)
    after = {name: _Check({}, []) for name in candidate.strengths.values()}
    for number, group in enumerate(groups):
        for called, held_out, sums in check_fold(candidate, fits, group, told_of(candidate, number, len(groups))):
            after[called].held_out.append(held_out)
            after[called].sums.update(sums)
    return after


def picture_beside(out: Path) -> Path:
    """Where the diagram of a calibrator is drawn."""
    return out.with_suffix(".png")


def _measured(
    cases: Sequence[CaseFiles],
    options: Options,
    parts: Parts,
    steps: Steps,
) -> tuple[dict[str, CaseSums], dict[str, tuple[str, ...]], list[Failure]]:
    """Sums of the cases as they are, what is doubtful about them, and those that cannot be measured."""
    sums, doubts, failures = {}, {}, []
    for files in cases:
        steps.next(f"measuring {files.name}")
        try:
            measured = parts.measure(files, options)
        except WriteError:
            raise
        except Exception as error:  # no case may end the others
            failures.append(failure_of(files.name, error))
        else:
            sums[files.name], doubts[files.name] = measured.sums, measured.doubts
    return sums, doubts, failures
