"""Which calibrator to take: candidates, cross-validated over patients, under a rule that ACE alone cannot game.

No overlap may be lost, neither likelihood nor Brier score may get worse by more than chance allows, and the bins must
stay occupied; among the candidates that hold this the one with the lowest ACE is taken, and none where that is no lower
than chance allows. Chance: the standard error, over patients, of the difference.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from segcal.calibrators import Calibrator, make_calibrator
from segcal.evaluation.columns import Column
from segcal.evaluation.evaluation import Evaluation
from segcal.evaluation.intervals import group_matrix, patients_of
from segcal.evaluation.tables import Cell, Table

AUTO = "auto"
UNCHANGED = "as it is"
HALF = 0.5
MOST_PATIENTS = 40
"""The candidates are tried on those of so many patients; the one that is taken is fitted to all."""
METRICS = ("dice", "ace", "occupied", "nll", "brier")
LEAST_OCCUPIED = 0.98  # of the bins that were occupied before
ROUNDING = 1e-9  # of sums over voxels, relative
MOST_CHANCE = 0.01  # of a score: a larger rise is never chance, however few the patients


class Candidate(NamedTuple):
    """A method with settings, and the strengths at which it is tried."""

    name: str
    method: str
    settings: Mapping[str, Any]
    strengths: tuple[float, ...] = (1.0, HALF)

    def make(self) -> Calibrator:
        """Return a calibrator that is not fitted yet."""
        return make_calibrator(self.method, **self.settings)

    def named(self, strength: float) -> str:
        return self.name if strength == 1 else f"{self.name}, at {strength:.0%}"


CANDIDATES = (
    Candidate("temperature", "temperature", {}, (1.0,)),
    Candidate("local-temperature", "local-temperature", {}),
    Candidate("local-temperature, smoothing", "local-temperature", {"smoothing": True}),
    Candidate("local-temperature, smoothing, ACE weighs 3", "local-temperature", {"smoothing": True, "ace": 3.0}),
)


@dataclass(frozen=True)
class Trial:
    """A candidate on cases it was not fitted to."""

    name: str
    values: Mapping[str, float]
    """Macro averages over the cases, by metric."""
    refused: str = ""
    """Why it may not be taken; empty: it may."""


@dataclass(frozen=True)
class Choice:
    """What was tried, and which of it is taken."""

    trials: tuple[Trial, ...]
    """The first is the predictions as they are."""
    taken: str
    reason: str

    def table(self) -> Table:
        """The trials, with what speaks against each."""
        columns = [Column(metric, "macro") for metric in METRICS]
        rows = [
            (
                Cell(trial.name),
                *(Cell(f"{trial.values[column.metric]:.{column.digits + 1}f}") for column in columns),
                Cell("taken" if trial.name == self.taken else trial.refused),
            )
            for trial in self.trials
        ]
        headings = ("calibrator", *(f"{column.heading} {column.arrow}".strip() for column in columns), "")
        return Table("Candidates, each case calibrated without its patient", headings, tuple(rows))


def choose(before: Evaluation, after: Mapping[str, Evaluation], *, patients: str | None = None) -> Choice:
    """The candidate to take, by its cross-validated numbers.

    before: the cases as they are.
    after: the same cases by each candidate, fitted without their patients.
    patients: which cases belong together, as in `compare`.
    """
    own = _by_patient(before, patients)
    trials = [Trial(UNCHANGED, {metric: _mean(values) for metric, values in own.items()})]
    for name, evaluation in after.items():
        found = _by_patient(evaluation, patients)
        values = {metric: _mean(of_patients) for metric, of_patients in found.items()}
        errors = {metric: _standard_error(found[metric] - own[metric]) for metric in METRICS}
        trials.append(Trial(name, values, _against(trials[0].values, values, errors)))
    allowed = [trial for trial in trials[1:] if not trial.refused]
    if not allowed:
        return Choice(tuple(trials), UNCHANGED, "no candidate lowers the ACE without a cost: nothing is changed")
    best = min(allowed, key=lambda trial: trial.values["ace"])
    fall = 1 - best.values["ace"] / trials[0].values["ace"]
    reason = (
        f"{best.name} is taken: of those that lose no overlap and leave NLL, Brier score and occupied bins no worse, "
        f"it has the lowest ACE, {fall:.1%} below that of the predictions"
    )
    return Choice(tuple(trials), best.name, reason)


def chosen_patients(names: Sequence[str], rule: str | None, most: int = MOST_PATIENTS) -> list[str]:
    """The cases of at most so many patients, evenly from all of them."""
    patients = patients_of(names, rule)
    who = sorted(set(patients))
    kept = {who[math.floor(i * len(who) / most)] for i in range(most)} if len(who) > most else set(who)
    return [name for name, patient in zip(names, patients, strict=True) if patient in kept]


def _by_patient(evaluation: Evaluation, rule: str | None) -> dict[str, torch.Tensor]:
    """The means over the cases of each patient; NaN for one without any."""
    values = evaluation.case_values()
    groups = group_matrix(patients_of(evaluation.cases, rule))
    found = {}
    for metric in METRICS:
        of_case = values[None, metric]
        there = (~of_case.isnan()).double()
        found[metric] = (groups @ of_case.nan_to_num(0.0)) / (groups @ there)
    return found


def _mean(of_patients: torch.Tensor) -> float:
    return of_patients.nanmean().item()


def _standard_error(differences: torch.Tensor) -> float:
    """Of the mean over patients; infinite for a single one."""
    known = differences[~differences.isnan()]
    return float(known.std() / math.sqrt(len(known))) if len(known) > 1 else math.inf


def _against(own: Mapping[str, float], found: Mapping[str, float], errors: Mapping[str, float]) -> str:
    """What speaks against a candidate, by the rule; nothing: it may be taken. `errors` are those of the differences."""
    if found["dice"] < own["dice"] * (1 - ROUNDING):
        return "overlap is lost"
    for metric in ("nll", "brier"):
        if found[metric] - own[metric] > min(errors[metric], MOST_CHANCE * own[metric]):
            return f"{Column(metric, '').name} rises by {found[metric] / own[metric] - 1:.1%}"
    if found["occupied"] < LEAST_OCCUPIED * own["occupied"]:
        return f"only {found['occupied'] / own['occupied']:.0%} of the bins stay occupied"
    if not own["ace"] - found["ace"] > errors["ace"]:
        return "ACE falls by no more than chance"
    return ""
