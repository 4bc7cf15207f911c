"""Fit a calibrator to a folder of predictions and labels, check it on cases it was not fitted to, apply it to others.

The check is a cross-validation over patients: each case is measured with a calibrator that was fitted without that
patient. The calibrator that is kept is fitted to all cases.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from segcal.calibrated import (
    FolderCase,
    activation_of,
    calibrated,
    check_fits,
)
from segcal.cohort import open_cohort
from segcal.errors import ConfigError, SegcalError
from segcal.evaluation import Evaluation
from segcal.files import locked, make_folder
from segcal.intervals import patients_of
from segcal.measure import CaseSums, Options, measure_case, slab_voxels, stamp
from segcal.results import Failure, MapJob, Maps, make_maps, stack_cases
from segcal.scaling import (
    Calibrator,
    EnsembleTemperature,
    LinearCalibrator,
    Sample,
    load_calibrator,
    make_calibrator,
)
from segcal.volumes import CaseFiles, Pairing, PredictionFiles, find_predictions, open_case, open_prediction, places
from segcal.volumes.orientation import orientation_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FOLDS = 5
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
    bins: int = 20,
    folds: int | None = None,
    patients: str | None = None,
    seed: int = 0,
    progress: Progress = lambda done, total, text: None,
) -> Fitted:
    """Fit a calibrator to all cases that both folders have, write it to `out`, and cross-validate it over patients.

    `folds`: 5, or as many as there are patients, if not given; 0 fits without the check. A case that cannot be read
    or makes no sense is a failure with a sentence, and is left out of the fit. So are voxels labelled `ignore`, if not
    given those of the label that nnU-Net's dataset.json names so.
    """
    options, pairing = open_cohort(
        predictions, labels, bins=bins, regions=regions, classes=classes, logits=logits, sigmoid=sigmoid, ignore=ignore
    )
    with open_case(pairing.cases[0]) as first:
        activation = activation_of(first.classes, options)
    blank = make_calibrator(method, activation=activation, **settings or {})  # refuses wrong settings before any work
    if blank.spatial and options.ignore is not None:
        raise ConfigError(
            f"voxels must not be left out, as those of label {options.ignore}, where the calibrator looks at their "
            f"neighbours; fit {method} without dilations."
        )
    groups = _folds([files.name for files in pairing.cases], patients, folds, seed)
    out = Path(out)
    if out.is_dir():
        raise ConfigError(f"--out must be a file, as calibrator.json; {out} is a folder.")
    make_folder(out.parent)
    with locked(out.with_name(f".{out.name}.lock"), out):
        return _fit(blank, options, pairing, groups, out, progress)


def _fit(
    blank: Calibrator, options: Options, pairing: Pairing, groups: list[list[str]], out: Path, progress: Progress
) -> Fitted:
    """Measure all cases, fit without each group and measure it again, fit to all, and write that."""
    steps = _Steps(progress, len(pairing.cases) * (2 if groups else 1) + len(groups) + 1)
    before, failures = _measured(pairing.cases, options, steps)
    if not before:
        raise ConfigError(f"there must be cases to fit a calibrator on; {failures[0].case}: {failures[0].message}")
    cases = {name: FolderCase(files, options) for files in pairing.cases if (name := files.name) in before}
    fits = _Fits(blank, cases)
    after: dict[str, CaseSums] = {}
    for number, group in enumerate(groups):
        steps.next(f"fitting without part {number + 1} of {len(groups)}")
        held_out = [name for name in group if name in cases]
        calibrator = fits.without(held_out)
        for name in held_out:
            steps.next(f"measuring {name}")
            after[name] = measure_case(cases[name].files, options, calibrator=calibrator)
    steps.next("fitting to all cases")
    calibrator = fits.without(())
    calibrator.save(out)
    steps.end()

    def evaluation(sums: dict[str, CaseSums]) -> Evaluation:
        return stack_cases(list(cases), lambda name: (sums[name], {}), options)

    checked = evaluation(after) if after else None
    return Fitted(calibrator, evaluation(before), checked, len(groups), failures, pairing)


class _Steps:
    """Tells the progress of a job of several kinds of steps."""

    def __init__(self, progress: Progress, total: int) -> None:
        self.progress, self.done, self.total = progress, 0, total

    def next(self, text: str) -> None:
        self.progress(self.done, self.total, text)
        self.done += 1

    def end(self) -> None:
        self.progress(self.total, self.total, "done")


class _Fits:
    """Fits to some of the cases; voxels to begin from are drawn once for all of them."""

    def __init__(self, blank: Calibrator, cases: Mapping[str, FolderCase]) -> None:
        self.blank, self.cases = blank, cases
        self.sample: Sample | None = None
        if isinstance(blank, _BEGIN_FROM_A_DRAW) and blank.settings().get("protocol") != "one-epoch":
            self.sample = blank.draw(list(cases.values()))

    def without(self, held_out: Iterable[str]) -> Calibrator:
        """A calibrator fitted to the other cases."""
        names = list(self.cases)
        rest = [i for i, name in enumerate(names) if name not in set(held_out)]
        if not rest:
            raise ConfigError(
                "cross-validation needs readable cases of at least 2 patients; those of the others failed."
            )
        calibrator = make_calibrator(self.blank.method, **self.blank.settings())
        calibrator.inputs = "logits" if self.cases[names[0]].options.logits else "probabilities"
        stream = [self.cases[names[i]] for i in rest]
        if isinstance(calibrator, _BEGIN_FROM_A_DRAW) and self.sample is not None:
            return calibrator.fit(stream, sample=self.sample.select(rest))
        return calibrator.fit(stream)


def _measured(cases: Sequence[CaseFiles], options: Options, steps: _Steps) -> tuple[dict[str, CaseSums], list[Failure]]:
    """Sums of the cases as they are, and those that cannot be measured."""
    sums, failures = {}, []
    for files in cases:
        steps.next(f"measuring {files.name}")
        try:
            sums[files.name] = measure_case(files, options)
        except SegcalError as error:
            failures.append(Failure(files.name, type(error).__name__, str(error)))
    return sums, failures


def _folds(names: Sequence[str], rule: str | None, folds: int | None, seed: int) -> list[list[str]]:
    """Cases that are held out together, those of a patient always; nothing where no check is wanted."""
    if folds == 0:
        return []
    patients = patients_of(names, rule)
    who = sorted(set(patients))
    number = min(FOLDS, len(who)) if folds is None else folds
    if not 2 <= number <= len(who):
        asked = "" if folds is None else f" and {folds} folds"
        raise ConfigError(
            f"cross-validation needs 2 patients at least, and not more folds than patients; got {len(who)} "
            f"patient{'s' * (len(who) != 1)}{asked}. Add cases, or fit without the check: folds 0."
        )
    random.Random(seed).shuffle(who)
    fold_of = {patient: place % number for place, patient in enumerate(who)}
    groups: list[list[str]] = [[] for _ in range(number)]
    for name, patient in zip(names, patients, strict=True):
        groups[fold_of[patient]].append(name)
    return groups


def reliability_before_and_after(before: Evaluation, after: Evaluation, *, patients: str | None = None) -> Figure:
    """Reliability diagrams of every class: as it was above, calibrated below; of more than four, side by side."""
    from segcal.colours import BLUE
    from segcal.diagrams import reliability
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

    Logits become logits, probabilities probabilities. `nifti`: arrays, as the .npz files of nnU-Net, become NIfTI
    images in the place of the label map beside them. Maps that are there already, of the same file and calibrator,
    stay; a case that fails does not stop the others.
    """
    fitted = calibrator if isinstance(calibrator, Calibrator) else load_calibrator(calibrator)
    options = Options(logits=logits, sigmoid=fitted.activation == "sigmoid")
    check_fits(fitted, options)
    source, out = Path(predictions), Path(out)
    root = source if source.is_dir() else source.parent
    if out.resolve() == root.resolve() or (source.is_dir() and out.resolve().is_relative_to(root.resolve())):
        raise ConfigError(f"--out must lie outside of the predictions, which stay as they are; got {out} in {root}.")
    found = find_predictions(source, classes=fitted.classes)
    mark = fitted.fingerprint

    def job(files: PredictionFiles) -> MapJob:
        def make() -> None:
            prediction = open_prediction(files, classes=fitted.classes)
            orientation = orientation_of(prediction.grid.affine)
            most_voxels = None if fitted.spatial else slab_voxels(prediction.classes)
            prediction.rewrite(
                lambda values: calibrated(fitted, values, options, orientation),
                *(out, root),
                nifti=nifti,
                most_voxels=most_voxels,
            )

        key = repr((mark, logits, [stamp(path) for path in files.predictions]))
        return MapJob(files.name, key, [out / place for place in places(files, root, nifti=nifti)], make)

    return make_maps(out, "calibrated.json", [job(files) for files in found], progress)
