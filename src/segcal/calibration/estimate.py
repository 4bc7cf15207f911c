"""How long a fit and its check take, told before they begin."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from segcal.calibrators import Calibrator
from segcal.calibrators.boxes import SURE
from segcal.calibrators.cost import APPLIED, passes_of, training_seconds
from segcal.evaluation.sums import CaseSums
from segcal.volumes import CaseFiles, open_case


class Blank(NamedTuple):
    """A calibrator to fit, and the names under which it is tried at each strength."""

    calibrator: Calibrator
    strengths: dict[float, str]

    @property
    def name(self) -> str:
        return next(iter(self.strengths.values()))


def about_seconds(
    candidates: Sequence[Blank],
    files: CaseFiles,
    sums: CaseSums,
    case_s: float,
    *,
    cases: int,
    tried: int,
    folds: int,
    checked_again: int = 0,
    workers: int = 1,
) -> float:
    """What fits and cross-validation take together, were all cases like this one.

    case_s: what it takes to read and measure the case.
    cases, tried: how many are fitted to in the end, and in the check.
    checked_again: how many the calibrator that is taken is checked on once more.
    workers: processes that share the checks, with a fold each at a time; the last fit is one process's.
    """
    with open_case(files) as case:
        classes, shape = case.classes, case.grid.shape
    top = sums.top_label[0] if sums.top_label.size else sums.bins[0].mean(0)
    unsure = float(top[: math.floor(SURE * len(top))].sum() / max(top.sum(), 1))
    checks = last = 0.0
    for blank, strengths in candidates:
        training = training_seconds(blank, classes=classes, shape=shape, unsure=unsure)

        def one_fit(number: int, a_case: float = case_s * passes_of(blank), training: float = training) -> float:
            return a_case * number + training

        if folds:  # a fit without a part is to fewer cases
            checks += APPLIED * case_s * tried * len(strengths) + (folds - 1) * one_fit(tried)
        again = APPLIED * case_s * checked_again + (folds - 1) * one_fit(checked_again) if checked_again else 0.0
        last = max(last, one_fit(cases) + again / max(1, min(workers, folds)))
    return checks / max(1, min(workers, folds * len(candidates))) + last
