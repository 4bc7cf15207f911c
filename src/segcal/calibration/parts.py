"""The pieces of a fit, each kept in a file under the name of all that it depends on, until the calibrator is there.

Whoever asks for a piece gets the one that is kept, or makes it. So an interrupted fit resumes, and pieces
that other processes have made are found (see `ahead`).
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from segcal import __version__
from segcal._io.files import make_folder
from segcal._io.jobs import key_of
from segcal.calibration.estimate import Blank
from segcal.calibration.folds import fit_once
from segcal.calibration.steps import Steps, Watched
from segcal.calibrators import (
    Calibrator,
    EnsembleTemperature,
    LinearCalibrator,
    LocalTemperature,
    Sample,
    make_calibrator,
)
from segcal.calibrators.calibrator import Inputs
from segcal.errors import ConfigError
from segcal.evaluation.calibrated import FolderCase
from segcal.evaluation.cohort import case_key
from segcal.evaluation.measure import Measured, measure_case
from segcal.evaluation.options import Options
from segcal.evaluation.sums import CaseSums
from segcal.kernels.threads import pass_threads
from segcal.volumes import CaseFiles

_BEGIN_FROM_A_DRAW = (LinearCalibrator, EnsembleTemperature)


class HeldOut(NamedTuple):
    """Cases that were held out together, and the calibrator that was fitted without them."""

    cases: tuple[str, ...]
    calibrator: Calibrator


class Parts:
    """What an interrupted fit has done, named by keys, in a folder beside the calibrator; it goes at the end."""

    def __init__(self, folder: Path, measured: Path | None = None) -> None:
        self.folder, self.measured = folder, measured
        make_folder(folder)

    def measure(self, files: CaseFiles, options: Options, calibrator: Calibrator | None = None) -> Measured:
        """The sums of a case, and what is doubtful about it."""
        path = self.place(files, options, calibrator)
        if not CaseSums.are_in(path, options):
            measured = measure_case(files, options, threads=pass_threads(), calibrator=calibrator)
            measured.sums.save(path, files.name, (), doubts=measured.doubts)
            return measured
        return Measured(CaseSums.load(path)[0], tuple(CaseSums.doubts_in(path)))

    def has(self, files: CaseFiles, options: Options) -> bool:
        """Whether the sums of a case as it is are there."""
        return CaseSums.are_in(self.place(files, options), options)

    def place(self, files: CaseFiles, options: Options, calibrator: Calibrator | None = None) -> Path:
        """Where the sums of a case are, or will be."""
        key = case_key(files, options)
        if self.measured is not None and calibrator is None and CaseSums.are_in(self.measured / f"{key}.npz", options):
            return self.measured / f"{key}.npz"
        return self.folder / f"{key_of(key, None if calibrator is None else calibrator.fingerprint)}.npz"

    def remove(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)


class Fits:
    """Fits to some of the cases; voxels to begin from are drawn once for all of them."""

    def __init__(self, blank: Calibrator, cases: Mapping[str, FolderCase], parts: Parts, steps: Steps) -> None:
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
                " Check the failed files."
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


def check_fold(
    candidate: Blank, fits: Fits, group: Sequence[str], text: str
) -> Iterator[tuple[str, HeldOut, dict[str, CaseSums]]]:
    """Cases of a group through the calibrator fitted without them, for each of the candidate's strengths by its name.

    Cases that could not be measured are left out.
    """
    held_out = tuple(name for name in group if name in fits.cases)
    fitted = fits.without(held_out, text)
    for strength, called in candidate.strengths.items():
        calibrator, sums = fitted.weakened(strength), {}
        for name in held_out:
            fits.steps.next(f"measuring {name}")
            case = fits.cases[name]
            sums[name] = fits.parts.measure(case.files, case.options, calibrator).sums
        yield called, HeldOut(held_out, calibrator), sums


def told_of(candidate: Blank, number: int, groups: int) -> str:
    """What is said of the fit without a group."""
    return f"{candidate.name}, fitting without part {number + 1} of {groups}"
