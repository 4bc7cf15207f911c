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
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from segcal import __version__
from segcal._io.files import locked, make_folder
from segcal._io.jobs import Failure, key_of
from segcal._io.words import counted
from segcal.calibration.folds import fit_once, make_folds
from segcal.calibrators import (
    Calibrator,
    EnsembleTemperature,
    LinearCalibrator,
    LocalTemperature,
    Sample,
    make_calibrator,
)
from segcal.calibrators.calibrator import Inputs
from segcal.calibrators.cost import APPLIED, duration, fit_seconds
from segcal.calibrators.local import SURE
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


def fit_calibrator(
    predictions: str | os.PathLike[str],
    labels: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    members: Sequence[str | os.PathLike[str]] = (),
    mean: Mean = "probabilities",
    method: str = "local-temperature",
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
    method: see `make_calibrator`.
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
    activation = activation_of(_channels(pairing.cases), meant)
    for name, instead in (
        ("activation", "it follows from --sigmoid"),
        ("method", "give --method"),
    ):
        if name in (settings or {}):
            raise ConfigError(f"{name} must not be a setting here; {instead}.")
    blank = make_calibrator(method, activation=activation, **settings or {})  # refuses wrong settings before any work
    if blank.spatial and meant.ignore_index is not None:
        raise ConfigError(
            f"voxels must not be left out, as those of label {meant.ignore_index}, where the calibrator looks at their "
            f"neighbours; fit {method} without dilations."
        )
    groups = make_folds([files.name for files in pairing.cases], patients, folds, check_seed(seed))
    out = Path(out)
    if out.is_dir():
        raise ConfigError(f"--out must be a file, as calibrator.json; {out} is a folder.")
    make_folder(out.parent)
    with locked(out.with_name(f".{out.name}.lock"), out):
        steps = _Steps(progress, len(pairing.cases) * (2 if groups else 1) + FIT_STEPS * (len(groups) + 1))
        parts = _Parts(out.with_name(f".{out.name}.parts"))
        fitted = _fit(blank, meant, pairing, groups, out, parts, steps, say)
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


def _fit(
    blank: Calibrator,
    options: Options,
    pairing: Pairing,
    groups: list[list[str]],
    out: Path,
    parts: _Parts,
    steps: _Steps,
    say: Callable[[str], None],
) -> Fitted:
    """Measure all cases, fit without each group and measure it again, fit to all, and write that."""

    def measured(number: int, files: CaseFiles, sums: CaseSums, seconds: float) -> None:
        if number == min(2, len(pairing.cases)) and not parts.resumed:  # the first one may have waited for compilers
            about = _about_seconds(blank, files, sums, options, seconds, len(pairing.cases), len(groups))
            fits = counted(len(groups) + 1, "fit")
            say(f"this takes roughly {duration(about)}: {fits} to {counted(len(pairing.cases), 'case')}")

    before, doubts, failures = _measured(pairing.cases, options, parts, steps, measured)
    if not before:
        raise ConfigError(f"there must be cases to fit a calibrator on; {failures[0].case}: {failures[0].message}")
    cases = {name: FolderCase(files, options) for files in pairing.cases if (name := files.name) in before}
    fits = _Fits(blank, cases, parts, steps)
    after: dict[str, CaseSums] = {}
    for number, group in enumerate(groups):
        held_out = [name for name in group if name in cases]
        calibrator = fits.without(held_out, f"fitting without part {number + 1} of {len(groups)}")
        for name in held_out:
            steps.next(f"measuring {name}")
            after[name] = parts.measure(cases[name].files, options, calibrator).sums
    calibrator = fits.without((), "fitting to all cases")
    if (picture := picture_beside(out)) != out:
        picture.unlink(missing_ok=True)  # of the calibrator that was here
    calibrator.save(out)
    steps.end()

    notes = gather_notes(doubts)

    def evaluation(sums: dict[str, CaseSums]) -> Evaluation:
        found = stack_cases(list(cases), lambda name: (sums[name], {}), options)
        found.provenance.update(failures=told(failures), notes=as_plain(notes))
        return found

    checked = evaluation(after) if after else None
    return Fitted(calibrator, evaluation(before), checked, len(groups), failures, pairing, notes)


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
    blank: Calibrator, files: CaseFiles, sums: CaseSums, options: Options, case_s: float, cases: int, folds: int
) -> float:
    """What measuring, fits and cross-validation take together, were all cases like this one."""
    with open_case(files) as case:
        classes, shape = case.classes, case.grid.shape
    top = sums.top_label[0] if sums.top_label.size else sums.bins[0].mean(0)
    unsure = float(top[: math.floor(SURE * len(top))].sum() / max(top.sum(), 1))
    pass_s = case_s * cases
    one = fit_seconds(blank, pass_s, classes=classes, shape=shape, unsure=unsure)
    checked = (APPLIED * pass_s + (folds - 1) * one) if folds else 0  # a fit without a part is to fewer cases
    return pass_s + checked + one
