"""Fit a calibrator to a folder of predictions and labels, check it on cases it was not fitted to, apply it to others.

The check is a cross-validation over patients: each case is measured with a calibrator that was fitted without that
patient. The calibrator that is kept is fitted to all cases.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from segcal import __version__
from segcal._io.files import locked, make_folder
from segcal._io.jobs import PARTS, Failure, key_of
from segcal._io.words import counted
from segcal.calibration.choosing import AUTO, CANDIDATES, UNCHANGED, Choice, choose, chosen_patients
from segcal.calibration.estimate import Blank, about_seconds
from segcal.calibration.folds import fit_once, make_folds
from segcal.calibration.steps import FIT_STEPS, Progress, Steps, Watched
from segcal.calibrators import (
    Calibrator,
    EnsembleTemperature,
    LinearCalibrator,
    LocalTemperature,
    Sample,
    Temperature,
    make_calibrator,
)
from segcal.calibrators.calibrator import Activation, Inputs
from segcal.calibrators.cost import duration
from segcal.errors import ConfigError, SegcalError, check_seed
from segcal.evaluation.calibrated import FolderCase, activation_of
from segcal.evaluation.cohort import case_key, open_cohort
from segcal.evaluation.evaluation import Evaluation
from segcal.evaluation.measure import Measured, measure_case
from segcal.evaluation.options import Options, ReadOptions
from segcal.evaluation.outcome import Note, as_plain, gather_notes, told
from segcal.evaluation.results import stack_cases
from segcal.evaluation.sums import CaseSums
from segcal.volumes import CaseFiles, Pairing, count_channels
from segcal.volumes.averaging import Mean

MOST_AT_ONCE = 1 << 27  # values of a case, half a gigabyte: no larger one is held at once unless asked for
_BEGIN_FROM_A_DRAW = (LinearCalibrator, EnsembleTemperature)


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


class HeldOut(NamedTuple):
    """Cases that were held out together, and the calibrator that was fitted without them."""

    cases: tuple[str, ...]
    calibrator: Calibrator


class Plan(NamedTuple):
    """What a fit will do, as far as names and headers tell."""

    candidates: list[Blank]
    options: Options
    pairing: Pairing
    groups: list[list[str]]
    """Cases that are held out together while candidates are tried."""
    everyone: list[list[str]]
    """The same where the one that is taken is then checked on all cases; none where it has been."""

    @property
    def tried(self) -> int:
        return sum(map(len, self.groups))

    @property
    def steps(self) -> int:
        """Of the progress."""
        each = self.tried * sum(len(each.strengths) for each in self.candidates) + sum(map(len, self.everyone))
        fits = 1 + len(self.groups) * len(self.candidates) + len(self.everyone)
        return len(self.pairing.cases) + each + FIT_STEPS * fits

    def about_seconds(self, files: CaseFiles, sums: CaseSums, case_s: float) -> float:
        """What fits and check take, were all cases like this one, which takes `case_s` to read and measure."""
        return about_seconds(
            self.candidates, files, sums, case_s, cases=len(self.pairing.cases), tried=self.tried,
            folds=len(self.groups), checked_again=sum(map(len, self.everyone)),
        )  # fmt: skip


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
    progress: Progress = lambda done, total, text: None,
    say: Callable[[str], None] = lambda text: None,
) -> Fitted:
    """Fit a calibrator to all cases that both folders have, write it to `out`, and cross-validate it over patients.

    A case that cannot be read or makes no sense is a failure with a sentence, and is left out of the fit. Interrupted
    and called again, it goes on where it was. Raises ConfigError for options that cannot be used, SegcalError where no
    fit is best.

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
    progress: is called with steps done, all steps and a text.
    say: is told about how long it all takes.

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
    plan = plan_fit(
        predictions, labels, members=members, mean=mean, method=method, settings=settings, options=options, bins=bins,
        folds=folds, patients=patients, seed=seed, check_all=check_all, say=say,
    )  # fmt: skip
    out = Path(out)
    if out.is_dir():
        raise ConfigError(f"--out must be a file, as calibrator.json; {out} is a folder.")
    make_folder(out.parent)
    with locked(out.with_name(f".{out.name}.lock"), out):
        parts = _Parts(out.with_name(f".{out.name}.parts"), None if measured is None else Path(measured) / PARTS)
        fitted = _fit(plan, patients, out, parts, Steps(progress, plan.steps), say)
        parts.remove()
        return fitted


def plan_fit(
    predictions: str | os.PathLike[str],
    labels: str | os.PathLike[str],
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
    say: Callable[[str], None] = lambda text: None,
) -> Plan:
    """What `fit_calibrator` will do with the same arguments; it refuses what that refuses, before any work."""
    meant, pairing = open_cohort(predictions, labels, options or ReadOptions(), members=members, mean=mean, bins=bins)
    channels = _channels(pairing.cases)
    for name, instead in (
        ("activation", "it follows from --sigmoid"),
        ("method", "give --method"),
    ):
        if name in (settings or {}):
            raise ConfigError(f"{name} must not be a setting here; {instead}.")
    candidates = _candidates(method, settings or {}, activation_of(channels, meant), meant, folds)
    if method == AUTO and (large := _large_cases(pairing.cases, channels, meant)):
        candidates = [each for each in candidates if not each.calibrator.spatial]
        say(f"{counted(large, 'case')} of more than {MOST_AT_ONCE:,} values: what needs whole cases is not tried")
    names = [files.name for files in pairing.cases]
    tried = chosen_patients(names, patients) if method == AUTO else names
    groups = make_folds(tried, patients, folds, check_seed(seed))
    everyone = make_folds(names, patients, folds, seed) if check_all and len(tried) < len(names) else []
    return Plan(candidates, meant, pairing, groups, everyone)


def _channels(cases: Sequence[CaseFiles]) -> int:
    """Of the predictions of the first case that can be read; what is wrong with the first, where none can."""
    wrong: list[SegcalError] = []
    for files in cases:
        try:
            return count_channels(files)
        except SegcalError as error:
            wrong.append(error)
    raise wrong[0]


def _large_cases(cases: Sequence[CaseFiles], channels: int, options: Options) -> int:
    """How many of them are too large to hold at once, a few times over."""
    number = 0
    for files in cases:
        with suppress(SegcalError):  # it is told of when it is measured
            number += FolderCase(files, options).voxels(channels) * channels > MOST_AT_ONCE
    return number


def _candidates(
    method: str, settings: dict[str, Any], activation: Activation, options: Options, folds: int | None
) -> list[Blank]:
    """What is to be fitted; wrong settings are refused before any work."""
    if method != AUTO:
        blank = make_calibrator(method, activation=activation, **settings)
        if blank.spatial and options.ignore_index is not None:
            raise ConfigError(
                f"voxels must not be left out, as those of label {options.ignore_index}, where the calibrator looks at "
                f"their neighbours; fit {method} without dilations and smoothing."
            )
        return [Blank(blank, {1.0: method})]
    if settings:
        raise ConfigError(f"the method 'auto' must go without settings; got {', '.join(settings)}. Name a method.")
    if folds == 0:
        raise ConfigError("the method 'auto' needs the check to choose by; leave folds out, or name a method.")
    found = []
    for each in CANDIDATES:
        blank = make_calibrator(each.method, activation=activation, **each.settings)
        if not (blank.spatial and options.ignore_index is not None):
            found.append(Blank(blank, {strength: each.named(strength) for strength in each.strengths}))
    return found


def _fit(
    plan: Plan, patients: str | None, out: Path, parts: _Parts, steps: Steps, say: Callable[[str], None]
) -> Fitted:
    """Measure all cases, fit without each group and measure it again, fit to all what is taken, and write that."""
    candidates, options, pairing, groups, everyone = plan

    def measured(number: int, files: CaseFiles, sums: CaseSums, seconds: float) -> None:
        if number == min(2, len(pairing.cases)) and not parts.resumed:  # the first one may have waited for compilers
            about = seconds * len(pairing.cases) + plan.about_seconds(files, sums, seconds)
            fits = counted(len(groups) * len(candidates) + len(everyone) + 1, "fit")
            say(f"this takes roughly {duration(about)}: {fits} to {counted(len(pairing.cases), 'case')}")

    before, doubts, failures = _measured(pairing.cases, options, parts, steps, measured)
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
    after, held_out = _tried(candidates, {name: cases[name] for name in tried}, groups, options, parts, steps)
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
            sums, held_out[taken] = _checked(chosen, cases, everyone, options, parts, steps)[taken]
            results[taken] = evaluation(sums)
        calibrator = _Fits(blank, cases, parts, steps).without((), "fitting to all cases").weakened(strength)
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
    options: Options,
    parts: _Parts,
    steps: Steps,
) -> tuple[dict[str, dict[str, CaseSums]], dict[str, list[HeldOut]]]:
    """What each candidate makes of the cases, and what it was fitted without; one that cannot be fitted is left out."""
    after: dict[str, dict[str, CaseSums]] = {}
    held_out: dict[str, list[HeldOut]] = {}
    wrong: list[SegcalError] = []
    for each in candidates if groups else ():
        try:
            checked = _checked(each, cases, groups, options, parts, steps)
        except SegcalError as error:
            wrong.append(error)
        else:
            after |= {name: check.sums for name, check in checked.items()}
            held_out |= {name: check.held_out for name, check in checked.items()}
    if wrong and not after:
        raise wrong[0]
    return after, held_out


class _Check(NamedTuple):
    """Sums of cases by calibrators that were fitted without them, and which those are."""

    sums: dict[str, CaseSums]
    held_out: list[HeldOut]


def _checked(
    candidate: Blank,
    cases: Mapping[str, FolderCase],
    groups: list[list[str]],
    options: Options,
    parts: _Parts,
    steps: Steps,
) -> dict[str, _Check]:
    """Each case by a calibrator fitted without its group, by the names of the candidate's strengths."""
    fits = _Fits(candidate.calibrator, cases, parts, steps)
    after = {name: _Check({}, []) for name in candidate.strengths.values()}
    for number, group in enumerate(groups):
        held_out = [name for name in group if name in cases]
        text = f"{candidate.name}, fitting without part {number + 1} of {len(groups)}"
        fitted = fits.without(held_out, text)
        for strength, called in candidate.strengths.items():
            calibrator = fitted.weakened(strength)
            after[called].held_out.append(HeldOut(tuple(held_out), calibrator))
            for name in held_out:
                steps.next(f"measuring {name}")
                after[called].sums[name] = parts.measure(cases[name].files, options, calibrator).sums
    return after


def picture_beside(out: Path) -> Path:
    """Where the diagram of a calibrator is drawn."""
    return out.with_suffix(".png")


class _Parts:
    """What an interrupted fit has done, named by keys, in a folder beside the calibrator; it goes at the end."""

    def __init__(self, folder: Path, measured: Path | None = None) -> None:
        self.folder, self.measured = folder, measured
        self.resumed = folder.exists() or measured is not None
        make_folder(folder)

    def measure(self, files: CaseFiles, options: Options, calibrator: Calibrator | None = None) -> Measured:
        """The sums of a case, and what is doubtful about it."""
        mark = None if calibrator is None else calibrator.fingerprint
        key = case_key(files, options)
        path = self.folder / f"{key_of(key, mark)}.npz"
        if self.measured is not None and calibrator is None and CaseSums.are_in(self.measured / f"{key}.npz", options):
            path = self.measured / f"{key}.npz"
        if not CaseSums.are_in(path, options):
            sums, doubts = measure_case(files, options, calibrator=calibrator)
            sums.save(path, files.name, (), doubts=doubts)
            return Measured(sums, doubts)
        return Measured(CaseSums.load(path)[0], tuple(CaseSums.doubts_in(path)))

    def remove(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)


class _Fits:
    """Fits to some of the cases; voxels to begin from are drawn once for all of them."""

    def __init__(self, blank: Calibrator, cases: Mapping[str, FolderCase], parts: _Parts, steps: Steps) -> None:
        self.blank, self.cases, self.parts, self.steps = blank, cases, parts, steps
        self.keys = {name: case_key(case.files, case.options) for name, case in cases.items()}

    @cached_property
    def sample(self) -> Sample | None:
        if not isinstance(self.blank, _BEGIN_FROM_A_DRAW) or self.blank.settings().get("protocol") == "one-epoch":
            return None
        tell = self.steps.tell
        return self.blank.draw(Watched(list(self.cases.values()), lambda share, more: tell(f"drawing voxels, {more}")))

    def without(self, held_out: Iterable[str], text: str) -> Calibrator:
        """A calibrator fitted to the other cases."""
        names = list(self.cases)
        rest = [i for i, name in enumerate(names) if name not in set(held_out)]
        if not rest:
            raise ConfigError(
                "cross-validation needs readable cases of at least 2 patients; those of the others failed."
            )
        fitted_on = [self.keys[names[i]] for i in rest]
        key = key_of(__version__, self.blank.method, self.blank.settings(), list(self.keys.values()), fitted_on)
        with self.steps.fit(text) as tell:
            return fit_once(self.parts.folder / f"{key}.json", lambda: self._fit(rest, tell))

    def _fit(self, places: Sequence[int], tell: Callable[[float, str], None]) -> Calibrator:
        """A new calibrator fitted to the cases at these places."""
        cases = list(self.cases.values())
        calibrator = make_calibrator(self.blank.method, **self.blank.settings())
        inputs: Inputs = "logits" if cases[0].options.logits else "probabilities"
        stream = Watched([cases[i] for i in places], tell)
        if isinstance(calibrator, _BEGIN_FROM_A_DRAW) and self.sample is not None:
            return calibrator.fit(stream, inputs=inputs, sample=self.sample.select(places))
        if isinstance(calibrator, LocalTemperature):
            return calibrator.fit(
                stream, inputs=inputs, progress=lambda share: tell((1 + share) / 2, f"{share:.0%} of training")
            )
        return calibrator.fit(stream, inputs=inputs)


def _measured(
    cases: Sequence[CaseFiles],
    options: Options,
    parts: _Parts,
    steps: Steps,
    tell: Callable[[int, CaseFiles, CaseSums, float], None],
) -> tuple[dict[str, CaseSums], dict[str, tuple[str, ...]], list[Failure]]:
    """Sums of the cases as they are, what is doubtful about them, and those that cannot be measured.

    Of each that can, `tell` hears the time it took.
    """
    sums, doubts, failures = {}, {}, []
    for files in cases:
        steps.next(f"measuring {files.name}")
        start = time.perf_counter()
        try:
            sums[files.name], doubts[files.name] = parts.measure(files, options)
        except SegcalError as error:
            failures.append(Failure(files.name, type(error).__name__, str(error)))
        else:
            tell(len(sums), files, sums[files.name], time.perf_counter() - start)
    return sums, doubts, failures
