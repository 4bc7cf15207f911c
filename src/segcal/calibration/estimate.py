"""The candidates of a fit."""

from __future__ import annotations

from typing import NamedTuple

from segcal.calibrators import Calibrator


class Blank(NamedTuple):
    """A calibrator to fit, and the names under which it is tried at each strength."""

    calibrator: Calibrator
    strengths: dict[float, str]

    @property
    def name(self) -> str:
        return next(iter(self.strengths.values()))
