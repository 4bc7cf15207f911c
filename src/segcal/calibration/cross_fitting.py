"""Cross-fitting: every candidate is fitted without each fold of patients and measured on that fold.

Each fit and each measurement is kept in a file under a name that follows from all that it depends on, until the
calibrator is written. So an interrupted fit resumes, and the numbers do not depend on which process did what.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

from segcal import __version__
from segcal._io.files import make_folder
from segcal._io.jobs import Pool, key_of
from segcal.calibration.choosing import Candidate
from segcal.calibration.folds import fit_once
from segcal.calibration.steps import FIT_STEPS, Steps, Watched
from segcal.calibrators import Calibrator, LinearCalibrator, LocalTemperature, Sample
from segcal.calibrators.calibrator import Inputs, SeparableError
from segcal.errors import ConfigError, SegcalError
from segcal.evaluation.calibrated import FolderCase
from segcal.evaluation.cohort import case_key
from segcal.evaluation.measure import measure_case
from segcal.evaluation.options import Options
from segcal.evaluation.sums import CaseSums
from segcal.kernels.threads import one_torch_thread, pass_threads
from segcal.volumes import CaseFiles

Cases = Mapping[str, FolderCase]


class HeldOut(NamedTuple):
    """Cases that were held out together, and the calibrator that was fitted without them."""

    cases: tuple[str, ...]
    calibrator: Calibrator


class CrossFit(NamedTuple):
    """A candidate at one strength on cases that it was not fitted to."""

    sums: dict[str, CaseSums]
    held_out: tuple[HeldOut, ...]


@dataclass(frozen=True)
class FitCache:
    """Files of the fits and measurements that are done, in a folder that is removed at the end.

    measured: the folder of sums that `evaluate` wrote of the same cases, if any.
    """

    folder: Path
    measured: Path | None = None

    def __post_init__(self) -> None:
        make_folder(self.folder)

    def fit_path(self, candidate: Candidate, cases: Cases, names: Sequence[str]) -> Path:
        """Return the file of the candidate fitted to some of the cases."""
        keys = {name: case_key(case.files, case.options) for name, case in cases.items()}
        settings, fitted_on = candidate.make().settings(), [keys[name] for name in names]
        return self.folder / f"{key_of(__version__, candidate.method, settings, list(keys.values()), fitted_on)}.json"

    def sums_path(self, files: CaseFiles, options: Options, calibrator: Calibrator | None = None) -> Path:
        """Return the file of the sums of a case."""
        key = case_key(files, options)
        if self.measured is not None and calibrator is None and CaseSums.are_in(self.measured / f"{key}.npz", options):
            return self.measured / f"{key}.npz"
        return self.folder / f"{key_of(key, None if calibrator is None else calibrator.fingerprint)}.npz"

    def measure(self, case: FolderCase, calibrator: Calibrator) -> CaseSums:
        """Return the sums of a calibrated case."""
        path = self.sums_path(case.files, case.options, calibrator)
        if not CaseSums.are_in(path, case.options):
            measurement = measure_case(case.files, case.options, threads=pass_threads(), calibrator=calibrator)
            measurement.sums.save(path, case.files.name, (), doubts=measurement.doubts)
            return measurement.sums
        return CaseSums.load(path)[0]

    def remove(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)


class _FoldJob(NamedTuple):
    """The fit of a candidate without a fold, and the cases to measure with it."""

    candidate: Candidate
    cases: dict[str, FolderCase]
    """To fit to."""
    sample: Sample | None
    path: Path
    held_out: dict[str, FolderCase]
    text: str

    @property
    def steps(self) -> int:
        return FIT_STEPS + len(self.candidate.strengths) * len(self.held_out)


class _Measured(NamedTuple):
    """A calibrator that was fitted without a fold, and the sums of the cases of that fold."""

    calibrator: Calibrator
    sums: dict[str, CaseSums]


def cross_fit(
    candidates: Sequence[Candidate],
    cases: Cases,
    folds: Sequence[Sequence[str]],
    *,
    cache: FitCache,
    workers: int,
    steps: Steps,
    say: Callable[[str], None] = lambda text: None,
) -> dict[str, CrossFit]:
    """Fit every candidate without each fold and measure it on that fold.

    A candidate that cannot be fitted is left out, and `say` is called with the reason. If none can be fitted, an error
    is raised, other than SeparableError if there is one.

    Returns:
        By the name of a candidate at each of its strengths, the sums of every case by the calibrator that has not
        seen it.
    """
    errors: dict[str, SegcalError] = {}
    jobs: list[_FoldJob] = []
    for candidate in candidates:
        try:
            jobs += _fold_jobs(candidate, cases, folds, cache, steps)
        except SegcalError as error:
            errors[candidate.name] = error
    results: dict[int, list[_Measured]] = {}
    done = steps.done
    arguments = [(job, cache, steps if workers == 1 else None) for job in jobs]  # a process cannot report its progress
    with closing(Pool(workers)(_fit_and_measure, arguments)) as ended:
        for i, result in ended:
            job = jobs[i]
            if isinstance(result, SegcalError):
                errors.setdefault(job.candidate.name, result)
            elif isinstance(result, BaseException):
                raise SegcalError(
                    f"{job.text}: the process died; it may need more memory than there is. Use fewer --workers."
                )
            else:
                results[i] = result
            done += job.steps
            steps.done = done
            steps.tell(job.text)
    fits: dict[str, CrossFit] = {}
    for candidate in candidates:
        if candidate.name in errors:
            continue
        folds_and_results = [(job, results[i]) for i, job in enumerate(jobs) if job.candidate is candidate]
        for place, strength in enumerate(candidate.strengths if folds_and_results else ()):
            fits[candidate.named(strength)] = CrossFit(
                {name: sums for _, result in folds_and_results for name, sums in result[place].sums.items()},
                tuple(HeldOut(tuple(job.held_out), result[place].calibrator) for job, result in folds_and_results),
            )
    if errors and not fits:
        raise min(errors.values(), key=lambda error: isinstance(error, SeparableError))
    for name, reason in errors.items():
        say(f"{name} is left out: {reason}")
    return fits


def fit_to_all(candidate: Candidate, cases: Cases, *, cache: FitCache, steps: Steps) -> Calibrator:
    """Fit a candidate to all cases."""
    with steps.fit("fitting to all cases") as tell:
        return fit_once(
            cache.fit_path(candidate, cases, list(cases)),
            lambda: _fit(candidate, list(cases.values()), _draw(candidate, cases, steps), tell),
        )


def _fold_jobs(
    candidate: Candidate, cases: Cases, folds: Sequence[Sequence[str]], cache: FitCache, steps: Steps
) -> list[_FoldJob]:
    """Return a job for each fold. They start from the same sample of voxels, which is drawn once for all of them."""
    names = list(cases)
    jobs = []
    for number, fold in enumerate(folds, start=1):
        rest = [name for name in names if name not in set(fold)]
        if not rest:
            raise ConfigError(
                "cross-validation needs readable cases of at least 2 patients; those of the others failed."
                " Check the failed files."
            )
        jobs.append(
            _FoldJob(
                candidate,
                {name: cases[name] for name in rest},
                None,
                cache.fit_path(candidate, cases, rest),
                {name: cases[name] for name in fold if name in cases},
                f"{candidate.name}, fitting without part {number} of {len(folds)}",
            )
        )
    sample = None if all(job.path.exists() for job in jobs) else _draw(candidate, cases, steps)
    if sample is None:
        return jobs
    return [job._replace(sample=sample.select([names.index(name) for name in job.cases])) for job in jobs]


def _fit_and_measure(job: _FoldJob, cache: FitCache, steps: Steps | None) -> list[_Measured] | SegcalError:
    """Do a job; return an error that concerns its candidate. `steps` reports the progress, where that is possible."""
    steps = steps or Steps(lambda *_: None, 0)
    results = []
    try:
        with one_torch_thread():
            with steps.fit(job.text) as tell:
                fitted = fit_once(job.path, partial(_fit, job.candidate, list(job.cases.values()), job.sample, tell))
            for strength in job.candidate.strengths:
                calibrator, sums = fitted.weakened(strength), {}
                for name, case in job.held_out.items():
                    steps.next(f"measuring {name}")
                    sums[name] = cache.measure(case, calibrator)
                results.append(_Measured(calibrator, sums))
    except SegcalError as error:
        return error
    return results


def _draw(candidate: Candidate, cases: Cases, steps: Steps) -> Sample | None:
    """Draw the voxels that a fit starts from, if its method does so."""
    calibrator = candidate.make()
    if not isinstance(calibrator, LinearCalibrator) or calibrator.settings().get("protocol") == "one-epoch":
        return None
    return calibrator.draw(Watched(list(cases.values()), lambda share, more: steps.tell(f"drawing voxels, {more}")))


def _fit(
    candidate: Candidate, cases: Sequence[FolderCase], sample: Sample | None, tell: Callable[[float, str], None]
) -> Calibrator:
    calibrator = candidate.make()
    inputs: Inputs = "logits" if cases[0].options.logits else "probabilities"
    stream = Watched(cases, tell)
    if isinstance(calibrator, LinearCalibrator) and sample is not None:
        return calibrator.fit(stream, inputs=inputs, sample=sample)
    if isinstance(calibrator, LocalTemperature):
        return calibrator.fit(
            stream, inputs=inputs, progress=lambda share: tell((1 + share) / 2, f"{share:.0%} of training")
        )
    return calibrator.fit(stream, inputs=inputs)
