"""Fit a calibrator to a folder of predictions and labels, check it on cases it was not fitted to, apply it to others.

The check is a cross-validation over patients: each case is measured with a calibrator that was fitted without that
patient. The calibrator that is kept is fitted to all cases.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

from segcal._io.files import locked, make_folder
from segcal._io.jobs import PARTS, Failure, Job, Pool, do_jobs, threads_of
from segcal.calibration.choosing import AUTO, UNCHANGED, Candidate, Choice, choose
from segcal.calibration.cross_fitting import FitCache, HeldOut, cross_fit, fit_to_all
from segcal.calibration.planning import Plan, plan_fit
from segcal.calibration.steps import Progress, Steps
from segcal.calibrators import Calibrator, Temperature
from segcal.errors import ConfigError, check_integer
from segcal.evaluation.calibrated import FolderCase
from segcal.evaluation.cohort import find_strangers, measure_files, open_cohort
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
        cache = FitCache(out.with_name(f".{out.name}.parts"), None if measured is None else Path(measured) / PARTS)
        with one_torch_thread():
            fitted = _fit(plan, patients, out, cache, workers, Steps(progress, plan.steps), say)
        cache.remove()
        return fitted


def _fit(
    plan: Plan,
    patients: str | None,
    out: Path,
    cache: FitCache,
    workers: int,
    steps: Steps,
    say: Callable[[str], None],
) -> Fitted:
    """Measure all cases, fit without each group and measure it again, fit to all what is taken, and write that."""
    candidates, options, pairing, groups, everyone = plan
    before, doubts, failures = _measure_cases(pairing.cases, options, cache, workers, steps)
    strangers = find_strangers({name: sums.bins.shape[1] for name, sums in before.items()})
    failures += strangers.values()
    before = {name: sums for name, sums in before.items() if name not in strangers}
    doubts = {name: doubt for name, doubt in doubts.items() if name not in strangers}
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
    crossed = cross_fit(candidates, some, groups, cache=cache, workers=workers, steps=steps, say=say)
    results = {name: evaluation(fit.sums) for name, fit in crossed.items()}
    choice = choose(shown, results, patients=patients) if len(candidates) > 1 else None
    taken = candidates[0].name if choice is None else choice.taken
    if everyone:
        shown = evaluation(before)
    if taken == UNCHANGED:
        calibrator: Calibrator = Temperature(1.0, activation=candidates[0].make().activation)
        results[taken] = shown
    else:
        candidate, strength = _candidate(candidates, taken)
        if everyone:
            chosen = candidate._replace(strengths=(strength,))
            crossed |= cross_fit([chosen], cases, everyone, cache=cache, workers=workers, steps=steps)
            results[taken] = evaluation(crossed[taken].sums)
        calibrator = fit_to_all(candidate, cases, cache=cache, steps=steps).weakened(strength)
    if (picture := picture_beside(out)) != out:
        picture.unlink(missing_ok=True)  # of the calibrator that was here
    calibrator.save(out)
    steps.end()
    used = crossed[taken].held_out if taken in crossed else ()
    return Fitted(calibrator, shown, results.get(taken), len(groups), failures, pairing, notes, choice, used)


def _candidate(candidates: Sequence[Candidate], name: str) -> tuple[Candidate, float]:
    """The candidate of this name, and its strength."""
    return next((each, strength) for each in candidates for strength in each.strengths if each.named(strength) == name)


def picture_beside(out: Path) -> Path:
    """Where the diagram of a calibrator is drawn."""
    return out.with_suffix(".png")


def _measure_cases(
    cases: Sequence[CaseFiles], options: Options, cache: FitCache, workers: int, steps: Steps
) -> tuple[dict[str, CaseSums], dict[str, tuple[str, ...]], list[Failure]]:
    """Sums of the cases as they are, what is doubtful about them, and those that cannot be measured."""
    pool, paths = Pool(workers), {files.name: cache.sums_path(files, options) for files in cases}
    jobs = [
        Job(files.name, measure_files, (files, options, threads_of(workers), files.name, paths[files.name]))
        for files in cases
        if not CaseSums.are_in(paths[files.name], options)
    ]
    steps.advance(len(cases) - len(jobs), "measuring")
    failures: dict[str, Failure] = {}
    with closing(do_jobs(jobs, pool)) as ended:
        for job, failure in ended:
            steps.advance(1, f"measured {job.name}")
            if failure is not None:
                failures[job.name] = failure
    measured = {name: path for name, path in paths.items() if name not in failures}
    sums = {name: CaseSums.load(path)[0] for name, path in measured.items()}
    doubts = {name: tuple(CaseSums.doubts_in(path)) for name, path in measured.items()}
    return sums, doubts, [failures[name] for name in paths if name in failures]
