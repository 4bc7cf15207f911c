"""What a fit will do: which calibrators it tries, on which cases."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from segcal._io.words import counted
from segcal.calibration.choosing import AUTO, CANDIDATES, Candidate, chosen_patients
from segcal.calibration.folds import make_folds
from segcal.calibration.steps import FIT_STEPS
from segcal.calibrators.calibrator import Activation
from segcal.errors import ConfigError, SegcalError, check_seed
from segcal.evaluation.calibrated import FolderCase, activation_of
from segcal.evaluation.options import Options
from segcal.volumes import CaseFiles, Pairing, count_channels

MOST_AT_ONCE = 1 << 27  # values of a case, half a gigabyte: no larger one is held at once unless asked for


class Plan(NamedTuple):
    """What a fit will do, as far as names and headers tell."""

    candidates: list[Candidate]
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


def plan_fit(
    options: Options,
    pairing: Pairing,
    *,
    method: str = AUTO,
    settings: dict[str, Any] | None = None,
    folds: int | None = None,
    patients: str | None = None,
    seed: int = 0,
    check_all: bool = False,
    say: Callable[[str], None] = lambda text: None,
) -> Plan:
    """What `fit_calibrator` will do with these cases; it refuses what that refuses, before any work."""
    channels = _channels(pairing.cases)
    for name, instead in (
        ("activation", "it follows from --sigmoid"),
        ("method", "give --method"),
    ):
        if name in (settings or {}):
            raise ConfigError(f"{name} must not be a setting here; {instead}.")
    candidates = _candidates(method, settings or {}, activation_of(channels, options), options, folds)
    if method == AUTO and (large := _large_cases(pairing.cases, channels, options)):
        candidates = [each for each in candidates if not each.make().spatial]
        say(f"{counted(large, 'case')} of more than {MOST_AT_ONCE:,} values: what needs whole cases is not tried")
    names = [files.name for files in pairing.cases]
    tried = chosen_patients(names, patients) if method == AUTO else names
    groups = make_folds(tried, patients, folds, check_seed(seed))
    everyone = make_folds(names, patients, folds, seed) if check_all and len(tried) < len(names) else []
    return Plan(candidates, options, pairing, groups, everyone)


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
) -> list[Candidate]:
    """What is to be fitted; wrong settings are refused before any work."""
    if method != AUTO:
        candidate = Candidate(method, method, {"activation": activation, **settings}, (1.0,))
        if candidate.make().spatial and options.ignore_index is not None:
            raise ConfigError(
                f"voxels must not be left out, as those of label {options.ignore_index}, where the calibrator looks at "
                f"their neighbors; fit {method} without dilations and smoothing."
            )
        return [candidate]
    if settings:
        raise ConfigError(f"the method 'auto' must go without settings; got {', '.join(settings)}. Name a method.")
    if folds == 0:
        raise ConfigError("the method 'auto' needs the check to choose by; leave folds out, or name a method.")
    candidates = [each._replace(settings={"activation": activation, **each.settings}) for each in CANDIDATES]
    return [each for each in candidates if options.ignore_index is None or not each.make().spatial]
