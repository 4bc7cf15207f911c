"""Which cases are held out together in a cross-validation over patients, and fits that are kept."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from segcal._io.words import counted
from segcal.calibrators import Calibrator, load_calibrator
from segcal.errors import ConfigError, SegcalError, check_integer
from segcal.evaluation.intervals import patients_of

FOLDS = 5


def make_folds(names: Sequence[str], rule: str | None, folds: int | None, seed: int) -> list[list[str]]:
    """Cases that are held out together, those of a patient always; nothing where no check is wanted."""
    if folds is not None and check_integer("folds", folds, least=0) == 0:
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


def fit_once(path: Path, fit: Callable[[], Calibrator]) -> Calibrator:
    """The calibrator in this file; where there is none that can be read, `fit` makes it, and it is kept there."""
    with suppress(SegcalError, OSError):
        return load_calibrator(path)
    calibrator = fit()
    calibrator.save(path)
    return calibrator
