"""Fit a calibrator to a folder of predictions and labels, check it on cases it was not fitted to, apply it to others.

The check is a cross-validation over patients: each case is measured with a calibrator that was fitted without that
patient. The calibrator that is kept is fitted to all cases.
"""

from __future__ import annotations

import math
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from segcal import __version__
from segcal._io.files import locked, make_folder
from segcal._io.jobs import Failure, key_of
from segcal._io.words import counted
from segcal.calibration.choosing import AUTO, CANDIDATES, UNCHANGED, Choice, choose, chosen_patients
from segcal.calibration.folds import fit_once, make_folds
from segcal.calibrators import (
    Calibrator,
    EnsembleTemperature,
    LinearCalibrator,
    LocalTemperature,
    Sample,
    Temperature,
    make_calibrator,
)
from segcal.calibrators.boxes import SURE
from segcal.calibrators.calibrator import Activation, Inputs
from segcal.calibrators.cost import APPLIED, duration, fit_seconds
from segcal.errors import ConfigError, SegcalError, check_seed
from segcal.evaluation.calibrated import (
    FolderCase,
    activation_of,
)
from segcal.evaluation.cohort import case_key, open_cohort
from segcal.evaluation.evaluation import Evaluation
from segcal.evaluation.measure import Measured, measure_case
from segcal.evaluation.options import Options, ReadOptions
from segcal.evaluation.outcome import Note, as_plain, gather_notes, told
from segcal.evaluation.results import stack_cases
from segcal.evaluation.sums import CaseSums
from segcal.volumes import (
    CaseFiles,
    Pairing,
    count_channels,
    open_case,
)
from segcal.volumes.averaging import Mean

FIT_STEPS = 10  # of the progress
MOST_AT_ONCE = 1 << 27  # values of a case, half a gigabyte: no larger one is held at once unless asked for
HALF_WAY = 3  # passes after which a fit that takes as many as it needs is about half-way
_BEGIN_FROM_A_DRAW = (LinearCalibrator, EnsembleTemperature)
Progress = Callable[[int, int, str], None]


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
    reading = options or ReadOptions()
    meant, pairing = open_cohort(predictions, labels, reading, members=members, mean=mean, bins=bins)
    channels = _channels(pairing.cases)
    activation = activation_of(channels, meant)
    for name, instead in (
        ("activation", "it follows from --sigmoid"),
        ("method", "give --method"),
    ):
        if name in (settings or {}):
            raise ConfigError(f"{name} must not be a setting here; {instead}.")
    candidates = _candidates(method, settings or {}, activation, meant, folds)
    if method == AUTO and (large := _large_cases(pairing.cases, channels, meant)):
        candidates = [each for each in candidates if not each.calibrator.spatial]
        say(f"{counted(large, 'case')} of more than {MOST_AT_ONCE:,} values: what needs whole cases is not tried")
    names = [files.name for files in pairing.cases]
    tried = chosen_patients(names, patients) if method == AUTO else names
    groups = make_folds(tried, patients, folds, check_seed(seed))
    out = Path(out)
    if out.is_dir():
        raise ConfigError(f"--out must be a file, as calibrator.json; {out} is a folder.")
    make_folder(out.parent)
    with locked(out.with_name(f".{out.name}.lock"), out):
        often = sum(len(each.strengths) for each in candidates) if groups else 0
        fits = 1 + len(groups) * len(candidates)
        steps = _Steps(progress, len(pairing.cases) + len(tried) * often + FIT_STEPS * fits)
        parts = _Parts(out.with_name(f".{out.name}.parts"))
        fitted = _fit(candidates, meant, pairing, groups, patients, out, parts, steps, say)
        parts.remove()
        return fitted


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
) -> list[_Blank]:
    """What is to be fitted; wrong settings are refused before any work."""
    if method != AUTO:
        blank = make_calibrator(method, activation=activation, **settings)
        if blank.spatial and options.ignore_index is not None:
            raise ConfigError(
                f"voxels must not be left out, as those of label {options.ignore_index}, where the calibrator looks at "
                f"their neighbours; fit {method} without dilations and smoothing."
            )
        return [_Blank(blank, {1.0: method})]
    if settings:
        raise ConfigError(f"the method 'auto' must go without settings; got {', '.join(settings)}. Name a method.")
    if folds == 0:
        raise ConfigError("the method 'auto' needs the check to choose by; leave folds out, or name a method.")
    found = []
    for each in CANDIDATES:
        blank = make_calibrator(each.method, activation=activation, **each.settings)
        if not (blank.spatial and options.ignore_index is not None):
            found.append(_Blank(blank, {strength: each.named(strength) for strength in each.strengths}))
    return found


class _Blank(NamedTuple):
    """A calibrator to fit, and the names under which it is tried at each strength."""

    calibrator: Calibrator
    strengths: dict[float, str]


def _fit(
    candidates: list[_Blank],
    options: Options,
    pairing: Pairing,
    groups: list[list[str]],
    patients: str | None,
    out: Path,
    parts: _Parts,
    steps: _Steps,
    say: Callable[[str], None],
) -> Fitted:
    """Measure all cases, fit without each group and measure it again, fit to all what is taken, and write that."""

    def measured(number: int, files: CaseFiles, sums: CaseSums, seconds: float) -> None:
        if number == min(2, len(pairing.cases)) and not parts.resumed:  # the first one may have waited for compilers
            tried = sum(map(len, groups))
            about = _about_seconds(candidates, files, sums, options, seconds, len(pairing.cases), tried, len(groups))
            fits = counted(len(groups) * len(candidates) + 1, "fit")
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
    after: dict[str, Evaluation] = {}
    wrong: list[SegcalError] = []
    for each in candidates if groups else ():
        try:
            checked = _checked(each, {name: cases[name] for name in tried}, groups, options, parts, steps)
        except SegcalError as error:
            wrong.append(error)
        else:
            after |= {name: evaluation(sums) for name, sums in checked.items()}
    if wrong and not after:
        raise wrong[0]
    shown = evaluation({name: before[name] for name in tried})
    choice = choose(shown, after, patients=patients) if len(candidates) > 1 else None
    taken = next(iter(candidates[0].strengths.values())) if choice is None else choice.taken
    if taken == UNCHANGED:
        calibrator: Calibrator = Temperature(1.0, activation=candidates[0].calibrator.activation)
        after[taken] = shown
    else:
        place, strength = _place(candidates, taken)
        fits = _Fits(candidates[place].calibrator, cases, parts, steps)
        calibrator = fits.without((), "fitting to all cases").weakened(strength)
    if (picture := picture_beside(out)) != out:
        picture.unlink(missing_ok=True)  # of the calibrator that was here
    calibrator.save(out)
    steps.end()
    return Fitted(calibrator, shown, after.get(taken), len(groups), failures, pairing, notes, choice)


def _place(candidates: Sequence[_Blank], name: str) -> tuple[int, float]:
    """Where the candidate of this name stands, and its strength."""
    return next((i, at) for i, each in enumerate(candidates) for at, called in each.strengths.items() if called == name)


def _checked(
    candidate: _Blank,
    cases: Mapping[str, FolderCase],
    groups: list[list[str]],
    options: Options,
    parts: _Parts,
    steps: _Steps,
) -> dict[str, dict[str, CaseSums]]:
    """Sums of each case by calibrators fitted without its group, by the names of the candidate's strengths."""
    fits = _Fits(candidate.calibrator, cases, parts, steps)
    after: dict[str, dict[str, CaseSums]] = {name: {} for name in candidate.strengths.values()}
    for number, group in enumerate(groups):
        held_out = [name for name in group if name in cases]
        text = f"{candidate.strengths[1.0]}, fitting without part {number + 1} of {len(groups)}"
        calibrator = fits.without(held_out, text)
        for strength, called in candidate.strengths.items():
            for name in held_out:
                steps.next(f"measuring {name}")
                after[called][name] = parts.measure(cases[name].files, options, calibrator.weakened(strength)).sums
    return after


def picture_beside(out: Path) -> Path:
    """Where the diagram of a calibrator is drawn."""
    return out.with_suffix(".png")


class _Parts:
    """What an interrupted fit has done, named by keys, in a folder beside the calibrator; it goes at the end."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.resumed = folder, folder.exists()
        make_folder(folder)

    def measure(self, files: CaseFiles, options: Options, calibrator: Calibrator | None = None) -> Measured:
        """The sums of a case, and what is doubtful about it."""
        mark = None if calibrator is None else calibrator.fingerprint
        path = self.folder / f"{key_of(case_key(files, options), mark)}.npz"
        if not CaseSums.are_in(path, options):
            sums, doubts = measure_case(files, options, calibrator=calibrator)
            sums.save(path, files.name, (), doubts=doubts)
            return Measured(sums, doubts)
        return Measured(CaseSums.load(path)[0], tuple(CaseSums.doubts_in(path)))

    def remove(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)


class _Steps:
    """Tells the progress of a job of several kinds of steps."""

    def __init__(self, progress: Progress, total: int) -> None:
        self.progress, self.done, self.total = progress, 0, total

    def tell(self, text: str) -> None:
        self.progress(self.done, self.total, text)

    def next(self, text: str) -> None:
        self.progress(self.done, self.total, text)
        self.done += 1

    @contextmanager
    def fit(self, text: str) -> Iterator[Callable[[float, str], None]]:
        """The steps of a fit; what comes tells which share of it is done, and a word more."""

        def tell(share: float, more: str) -> None:
            self.progress(self.done + int(share * FIT_STEPS), self.total, f"{text}, {more}")

        self.progress(self.done, self.total, text)
        yield tell
        self.done += FIT_STEPS

    def end(self) -> None:
        self.progress(self.total, self.total, "done")


class _Watched:
    """Cases to fit on that tell how often they have been gone through."""

    def __init__(self, cases: Sequence[FolderCase], tell: Callable[[float, str], None]) -> None:
        self.cases, self.tell, self.passes = cases, tell, 0

    def __len__(self) -> int:
        return len(self.cases)

    def __iter__(self) -> Iterator[FolderCase]:
        self.passes += 1
        for i, case in enumerate(self.cases):
            done = self.passes - 1 + i / len(self.cases)
            self.tell(done / (done + HALF_WAY), f"pass {self.passes}, case {i + 1} of {len(self.cases)}")
            yield case


class _Fits:
    """Fits to some of the cases; voxels to begin from are drawn once for all of them."""

    def __init__(self, blank: Calibrator, cases: Mapping[str, FolderCase], parts: _Parts, steps: _Steps) -> None:
        self.blank, self.cases, self.parts, self.steps = blank, cases, parts, steps
        self.keys = {name: case_key(case.files, case.options) for name, case in cases.items()}

    @cached_property
    def sample(self) -> Sample | None:
        if not isinstance(self.blank, _BEGIN_FROM_A_DRAW) or self.blank.settings().get("protocol") == "one-epoch":
            return None
        tell = self.steps.tell
        return self.blank.draw(_Watched(list(self.cases.values()), lambda share, more: tell(f"drawing voxels, {more}")))

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
        stream = _Watched([cases[i] for i in places], tell)
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
    steps: _Steps,
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


def _about_seconds(
    candidates: Sequence[_Blank],
    files: CaseFiles,
    sums: CaseSums,
    options: Options,
    case_s: float,
    cases: int,
    tried: int,
    folds: int,
) -> float:
    """What measuring, fits and cross-validation take together, were all cases like this one."""
    with open_case(files) as case:
        classes, shape = case.classes, case.grid.shape
    top = sums.top_label[0] if sums.top_label.size else sums.bins[0].mean(0)
    unsure = float(top[: math.floor(SURE * len(top))].sum() / max(top.sum(), 1))
    checks = last = 0.0
    for blank, strengths in candidates:

        def one_fit(number: int, blank: Calibrator = blank) -> float:
            return fit_seconds(blank, case_s * number, classes=classes, shape=shape, unsure=unsure)

        if folds:  # a fit without a part is to fewer cases
            checks += APPLIED * case_s * tried * len(strengths) + (folds - 1) * one_fit(tried)
        last = max(last, one_fit(cases))
    return case_s * cases + checks + last
