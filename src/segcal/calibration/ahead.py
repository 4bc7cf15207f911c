"""Pieces of a fit made side by side by worker processes, ahead of the one that asks for them in order.

A piece is a file under the name of all that it depends on (see `parts`), and every process computes it alike: so what
a fit finds does not depend on who made which piece, nor on whether any was made ahead. What goes wrong with a piece is
not told here: it is not there then, and whoever asks for it meets the same fault at its place.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path

from segcal._io.jobs import Failure, Job, Pool, crashed, do_jobs, threads_of
from segcal.calibration.estimate import Blank
from segcal.calibration.parts import Fits, Parts, check_fold, told_of
from segcal.calibration.steps import FIT_STEPS, Steps
from segcal.errors import SegcalError
from segcal.evaluation.calibrated import FolderCase
from segcal.evaluation.cohort import measure_files
from segcal.evaluation.options import Options
from segcal.kernels.threads import one_torch_thread
from segcal.volumes import CaseFiles


class Ahead:
    """Makes pieces by so many processes; with one, nothing is made ahead."""

    def __init__(self, workers: int, parts: Parts, steps: Steps) -> None:
        self.pool, self.parts, self.steps = Pool(workers), parts, steps
        self.workers = workers

    def measure(self, cases: Sequence[CaseFiles], options: Options) -> dict[str, Failure]:
        """Measure cases whose sums are not there; those that took their process along."""
        left = [] if self.workers == 1 else [files for files in cases if not self.parts.has(files, options)]
        if not left:
            return {}
        threads = threads_of(self.workers)
        jobs = [
            Job(files.name, measure_files, (files, options, threads, files.name, self.parts.place(files, options)))
            for files in left
        ]
        died: dict[str, Failure] = {}
        self.steps.others(len(cases) - len(left), "measuring")
        with closing(do_jobs(jobs, self.pool)) as ended:
            for job, failure in ended:
                if failure == crashed(job.name):
                    died[job.name] = failure
                self.steps.others(1, f"measured {job.name}")
        return died

    def check(self, candidates: Sequence[Blank], cases: Mapping[str, FolderCase], groups: list[list[str]]) -> None:
        """Fit each candidate without each group, and measure the group with it."""
        folds = [(each, number) for each in candidates for number in range(len(groups))] if self.workers > 1 else []
        held = tuple(cases.items())
        jobs = [(self.parts.folder, each, held, groups, number) for each, number in folds]
        with closing(self.pool(_check, jobs)) as ended:
            for i, came in ended:
                each, number = folds[i]
                text = told_of(each, number, len(groups))
                if isinstance(came, BaseException):
                    raise SegcalError(
                        f"{text}: the process died; it may need more memory than there is. Use fewer --workers."
                    )
                self.steps.others(FIT_STEPS + len(each.strengths) * len(groups[number]), text)


def _check(
    folder: Path, candidate: Blank, cases: tuple[tuple[str, FolderCase], ...], groups: list[list[str]], number: int
) -> None:
    with one_torch_thread():
        try:
            for _ in check_fold(candidate, _fits(folder, candidate, cases), groups[number], ""):
                pass
        except SegcalError:
            pass


_kept: tuple[tuple[Path, str, tuple[str, ...]], Fits] | None = None  # of this process: the voxels drawn last


def _fits(folder: Path, candidate: Blank, cases: tuple[tuple[str, FolderCase], ...]) -> Fits:
    """Those of the last job, if they are of the same candidate and cases: voxels to begin from are drawn once."""
    global _kept
    what = folder, candidate.name, tuple(name for name, _ in cases)
    if _kept is None or _kept[0] != what:
        _kept = what, Fits(candidate.calibrator, dict(cases), Parts(folder), Steps(lambda *told: None, 0))
    return _kept[1]
