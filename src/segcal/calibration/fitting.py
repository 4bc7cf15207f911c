"""Fit a calibrator to a folder of predictions and labels, check it on cases it was not fitted to, apply it to others.

The check is a cross-validation over patients: each case is measured with a calibrator that was fitted without that
patient. The calibrator that is kept is fitted to all cases.
"""

from __future__ import annotations

import math
import os
import random
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from segcal._io.files import locked, make_folder, stay_outside
from segcal._io.words import counted
from segcal.calibrators import (
    Calibrator,
    EnsembleTemperature,
    LinearCalibrator,
    LocalTemperature,
    Sample,
    load_calibrator,
    make_calibrator,
)
from segcal.calibrators.calibrator import Inputs
from segcal.calibrators.cost import APPLIED, duration, fit_seconds
from segcal.calibrators.local import SURE
from segcal.errors import ConfigError, SegcalError, check_seed
from segcal.evaluation.calibrated import (
    FolderCase,
    activation_of,
    calibrated,
    check_fits,
)
from segcal.evaluation.cohort import open_cohort
from segcal.evaluation.doubts import Watch
from segcal.evaluation.evaluation import Evaluation
from segcal.evaluation.intervals import patients_of
from segcal.evaluation.measure import CaseSums, Options, measure_case, slab_voxels, stamp
from segcal.evaluation.naming import copy_description
from segcal.evaluation.results import Failure, MapJob, Maps, Note, as_plain, gather_notes, make_maps, stack_cases, told
from segcal.volumes import (
    CaseFiles,
    Pairing,
    PredictionFiles,
    count_channels,
    find_predictions,
    open_case,
    open_prediction,
    places,
)
from segcal.volumes.orientation import orientation_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from numpy.typing import NDArray

FOLDS = 5
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
    method: str = "local-temperature",
    settings: dict[str, Any] | None = None,
    logits: bool = False,
    sigmoid: bool = False,
    regions: str | None = None,
    classes: str | None = None,
    ignore: int | None = None,
    strict_grid: bool = False,
    bins: int = 20,
    folds: int | None = None,
    patients: str | None = None,
    seed: int = 0,
    progress: Progress = lambda done, total, text: None,
    say: Callable[[str], None] = lambda text: None,
) -> Fitted:
    """Fit a calibrator to all cases that both folders have, write it to `out`, and cross-validate it over patients.

    A case that cannot be read or makes no sense is a failure with a sentence, and is left out of the fit. Raises
    ConfigError for options that cannot be used, SegcalError where no fit is best.

    predictions: folder of probability maps or logits that the network made of cases it was not trained on.
    labels: folder of label maps with the same names.
    out: file of the calibrator, as calibrator.json.
    method: see `make_calibrator`.
    settings: of the method, by name.
    logits: whether the predictions are logits.
    sigmoid: whether classes overlap, each with a probability of its own.
    regions, classes: as in `evaluate`, for the check.
    ignore: label of voxels to leave out; if not given, that which nnU-Net's dataset.json names so.
    strict_grid: leaves out cases whose headers leave open where their voxels lie; otherwise a note tells them.
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
    options, pairing = open_cohort(
        predictions, labels, bins=bins, regions=regions, classes=classes, logits=logits, sigmoid=sigmoid,
        ignore=ignore, strict_grid=strict_grid,
    )  # fmt: skip
    activation = activation_of(_channels(pairing.cases), options)
    for name, instead in (
        ("activation", "it follows from --sigmoid"),
        ("method", "give --method"),
    ):
        if name in (settings or {}):
            raise ConfigError(f"{name} must not be a setting here; {instead}.")
    blank = make_calibrator(method, activation=activation, **settings or {})  # refuses wrong settings before any work
    if blank.spatial and options.ignore is not None:
        raise ConfigError(
            f"voxels must not be left out, as those of label {options.ignore}, where the calibrator looks at their "
            f"neighbours; fit {method} without dilations."
        )
    groups = _folds([files.name for files in pairing.cases], patients, folds, check_seed(seed))
    out = Path(out)
    if out.is_dir():
        raise ConfigError(f"--out must be a file, as calibrator.json; {out} is a folder.")
    make_folder(out.parent)
    with locked(out.with_name(f".{out.name}.lock"), out):
        steps = _Steps(progress, len(pairing.cases) * (2 if groups else 1) + FIT_STEPS * (len(groups) + 1))
        return _fit(blank, options, pairing, groups, out, steps, say)


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
    steps: _Steps,
    say: Callable[[str], None],
) -> Fitted:
    """Measure all cases, fit without each group and measure it again, fit to all, and write that."""

    def measured(number: int, files: CaseFiles, sums: CaseSums, seconds: float) -> None:
        if number == min(2, len(pairing.cases)):  # the first one may have waited for compilers
            about = _about_seconds(blank, files, sums, options, seconds, len(pairing.cases), len(groups))
            fits = counted(len(groups) + 1, "fit")
            say(f"this takes roughly {duration(about)}: {fits} to {counted(len(pairing.cases), 'case')}")

    before, doubts, failures = _measured(pairing.cases, options, steps, measured)
    if not before:
        raise ConfigError(f"there must be cases to fit a calibrator on; {failures[0].case}: {failures[0].message}")
    cases = {name: FolderCase(files, options) for files in pairing.cases if (name := files.name) in before}
    fits = _Fits(blank, cases, steps)
    after: dict[str, CaseSums] = {}
    for number, group in enumerate(groups):
        held_out = [name for name in group if name in cases]
        calibrator = fits.without(held_out, f"fitting without part {number + 1} of {len(groups)}")
        for name in held_out:
            steps.next(f"measuring {name}")
            after[name] = measure_case(cases[name].files, options, calibrator=calibrator).sums
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

    def __init__(self, blank: Calibrator, cases: Mapping[str, FolderCase], steps: _Steps) -> None:
        self.blank, self.cases, self.steps = blank, cases, steps
        self.sample: Sample | None = None
        if isinstance(blank, _BEGIN_FROM_A_DRAW) and blank.settings().get("protocol") != "one-epoch":
            watched = _Watched(list(cases.values()), lambda share, more: steps.tell(f"drawing voxels, {more}"))
            self.sample = blank.draw(watched)

    def without(self, held_out: Iterable[str], text: str) -> Calibrator:
        """A calibrator fitted to the other cases."""
        names = list(self.cases)
        rest = [i for i, name in enumerate(names) if name not in set(held_out)]
        if not rest:
            raise ConfigError(
                "cross-validation needs readable cases of at least 2 patients; those of the others failed."
            )
        calibrator = make_calibrator(self.blank.method, **self.blank.settings())
        inputs: Inputs = "logits" if self.cases[names[0]].options.logits else "probabilities"
        with self.steps.fit(text) as tell:
            stream = _Watched([self.cases[names[i]] for i in rest], tell)
            if isinstance(calibrator, _BEGIN_FROM_A_DRAW) and self.sample is not None:
                return calibrator.fit(stream, inputs=inputs, sample=self.sample.select(rest))
            if isinstance(calibrator, LocalTemperature):
                return calibrator.fit(
                    stream,
                    inputs=inputs,
                    progress=lambda share: tell((1 + share) / 2, f"{share:.0%} of training"),
                )
            return calibrator.fit(stream, inputs=inputs)


def _measured(
    cases: Sequence[CaseFiles],
    options: Options,
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
            sums[files.name], doubts[files.name] = measure_case(files, options)
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


def _folds(names: Sequence[str], rule: str | None, folds: int | None, seed: int) -> list[list[str]]:
    """Cases that are held out together, those of a patient always; nothing where no check is wanted."""
    if folds == 0:
        return []
    patients = patients_of(names, rule)
    who = set(patients)
    number = min(FOLDS, len(who)) if folds is None else folds
    if not 2 <= number <= len(who):
        asked = "" if folds is None else f" and {counted(folds, 'fold')}"
        raise ConfigError(
            f"cross-validation needs 2 patients at least, and not more folds than patients; got "
            f"{counted(len(who), 'patient')}{asked}. Add cases, or fit without the check: folds 0."
        )
    return patient_folds(names, patients, number, seed)


def patient_folds(names: Sequence[str], patients: Sequence[str], number: int, seed: int) -> list[list[str]]:
    """The cases in so many parts, those of a patient in one; alike for the same names."""
    who = sorted(set(patients))
    random.Random(seed).shuffle(who)
    fold_of = {patient: place % number for place, patient in enumerate(who)}
    groups: list[list[str]] = [[] for _ in range(number)]
    for name, patient in zip(names, patients, strict=True):
        groups[fold_of[patient]].append(name)
    return groups


def same_decisions(before: Evaluation, after: Evaluation) -> bool:
    """Whether the counts of all cases tell of no voxel that was decided otherwise.

    Even a calibrator that keeps the most probable class may decide otherwise about a region that is a sum of classes,
    which is predicted where the sum is at least 1/2.
    """
    pairs = ((before.overlap.predicted, after.overlap.predicted), (before.overlap.both, after.overlap.both))
    return all(torch.equal(old, new) for old, new in pairs)


def reliability_before_and_after(before: Evaluation, after: Evaluation, *, patients: str | None = None) -> Figure:
    """Reliability diagrams of every class: as it was above, calibrated below; of more than four, side by side."""
    from segcal.evaluation.diagrams import reliability
    from segcal.plots.colors import BLUE
    from segcal.plots.reliability import reliability_grid
    from segcal.plots.style import PAGE_IN, default_settings, new_figure

    who = patients_of(before.cases, patients)
    shown = {"before": before.foreground(), "calibrated": after.foreground()}
    names = shown["before"].classes
    order = [(when, i) for when in shown for i in range(len(names))]
    if len(names) > 4:
        order.sort(key=lambda pair: pair[1])
    diagrams = {
        f"{names[i]}, {when}": reliability(shown[when].binned.select(classes=[i]), patients=who) for when, i in order
    }
    columns = min(len(names), 4)
    with default_settings():
        rows = -(-len(diagrams) // columns)
        figure = new_figure(PAGE_IN, 0.45 + rows * 2.6 * 4 / (columns + 1))
        reliability_grid(figure, diagrams, columns=columns, colour=BLUE)
    return figure


def apply_calibrator(
    calibrator: str | os.PathLike[str] | Calibrator,
    predictions: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    logits: bool = False,
    nifti: bool = False,
    progress: Progress = lambda done, total, text: None,
) -> Maps:
    """Write calibrated maps of all predictions in a folder, in their own format and on their own grid.

    Logits become logits, probabilities probabilities. Maps that are there already, of the same file and calibrator,
    stay; a case that fails does not stop the others. Files beside the predictions that name classes are copied.
    ConfigError where the calibrator does not fit the predictions.

    calibrator: one that was fitted, or its file.
    predictions: folder of probability maps or logits, or one file.
    out: folder for the calibrated maps, outside of the predictions.
    logits: whether the predictions are logits.
    nifti: makes NIfTI images of arrays, as the .npz files of nnU-Net, in the place of the label map beside them.
    progress: is called with steps done, all steps and a text.

    >>> import tempfile
    >>> import nibabel, numpy as np
    >>> from segcal.calibrators import Temperature
    >>> probabilities = np.tile(np.array([0.1, 0.9], np.float32), (2, 2, 2, 1))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     Path(folder, "predictions").mkdir()
    ...     nibabel.save(nibabel.Nifti1Image(probabilities, np.eye(4)), f"{folder}/predictions/case_0.nii.gz")
    ...     maps = apply_calibrator(Temperature(2.0), f"{folder}/predictions", f"{folder}/calibrated")
    ...     calibrated_map = nibabel.load(f"{folder}/calibrated/case_0.nii.gz").get_fdata()
    >>> calibrated_map[0, 0, 0].round(2).tolist()
    [0.25, 0.75]
    """
    fitted = calibrator if isinstance(calibrator, Calibrator) else load_calibrator(calibrator)
    options = Options(logits=logits, sigmoid=fitted.activation == "sigmoid")
    check_fits(fitted, options)
    source, out = Path(predictions), Path(out)
    root = source if source.is_dir() else source.parent
    stay_outside(out, source, "predictions")
    found = find_predictions(source, classes=fitted.classes)
    mark = fitted.fingerprint

    def job(files: PredictionFiles) -> MapJob:
        def make() -> None:
            prediction = open_prediction(files, classes=fitted.classes)
            orientation = orientation_of(prediction.grid.affine)
            most_voxels = None if fitted.spatial else slab_voxels(prediction.classes)
            watch = Watch(logits=logits, overlapping=options.sigmoid)

            def change(values: NDArray[Any]) -> NDArray[Any]:
                watch.see(values.reshape(len(values), -1))
                return calibrated(fitted, values, options, orientation)

            prediction.rewrite(change, out, root, nifti=nifti, most_voxels=most_voxels)

        key = repr((mark, logits, [stamp(path) for path in files.predictions]))
        return MapJob(files.name, key, [out / place for place in places(files, root, nifti=nifti)], make)

    jobs = [job(files) for files in found]
    return make_maps(out, "calibrated.json", jobs, progress, begin=lambda: copy_description(root, out))
