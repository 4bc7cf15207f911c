"""Cases without labels in the order in which they are to be looked at: what is promised of each, and its flags."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from segcal._io.jobs import Failure
from segcal.evaluation.evaluation import Evaluation
from segcal.evaluation.intervals import patients_of
from segcal.evaluation.outcome import Note
from segcal.quality.conformal import patient_weights
from segcal.quality.fitting import Quality
from segcal.quality.promises import Promises
from segcal.quality.shift import Moved, case_level, moved_summaries, p_values, too_many_unlike
from segcal.quality.summaries import NAMES, Summaries, summaries_of

Array = NDArray[Any]

EMPTY, TINY, FRAGMENTED, UNLIKE = "empty", "tiny", "fragmented", "unlike the reference"
_VOLUME, _LARGEST = NAMES.index("log volume"), NAMES.index("share of the largest piece")
NO_GUARANTEE = "These cases differ from those that were learned from: no interval and no threshold is guaranteed."


class Row(NamedTuple):
    """One case and class of the queue; volumes are NaN where the size of a voxel is not known."""

    rank: int
    """Of the case: 1 is to be looked at first."""
    case: str
    class_name: str
    predicted_dice: float
    dice_low: float
    dice_high: float
    expected_dice: float
    """As the probabilities have it, before what was learned from labeled patients."""
    volume_ml: float
    expected_volume_ml: float
    volume_low_ml: float
    volume_high_ml: float
    uncertain_volume_ml: float
    voxels: int
    flags: str
    """Separated by semicolons."""
    like_reference_p: float
    """Share of usual cases that look at least as unusual."""


class CohortDice(NamedTuple):
    """The mean Dice of all cases that is to be expected, and its interval."""

    class_name: str | None
    """None: the mean over classes."""
    value: float
    low: float
    high: float


@dataclass(frozen=True, eq=False)
class Queue:
    """Cases without labels, those that are probably worst first.

    rows: for each case and class.
    cohort: the mean Dice to be expected, of all classes and of each.
    shifted: sentences on how the cases differ from those that were learned from; none: they do not, as far as is seen.
    level: of the intervals.
    failures: cases that could not be read, (case, kind, message) each.
    notes: what was noticed, (kind, message, cases) each.
    provenance: where the predictions lie and how they were read, as JSON has it.

    >>> Queue(rows=(), cohort=(CohortDice(None, 0.87, 0.85, 0.89),), shifted=(), level=0.9).cohort[0].value
    0.87
    """

    rows: tuple[Row, ...]
    cohort: tuple[CohortDice, ...]
    shifted: tuple[str, ...]
    level: float
    failures: tuple[Failure, ...] = ()
    notes: tuple[Note, ...] = ()
    provenance: Mapping[str, Any] = field(default_factory=dict)


def make_queue(quality: Quality, evaluation: Evaluation, *, patients: str | None = None) -> Queue:
    """The queue of cases that are measured already; labels are not looked at. Classes must be those of the quality."""
    summaries = summaries_of(evaluation)
    promises = quality.promise(summaries)
    reference = quality.reference
    likeness = p_values(reference.features, patient_weights(reference.patients), summaries.features)
    flags = _flags(quality, summaries, likeness)
    dices = promises.dice[..., 0]
    worst = np.argsort(_mean(np.where(np.isnan(dices), summaries.expected, dices)), kind="stable")
    rows = tuple(
        _row(rank, i, c, evaluation, summaries, promises, flags, likeness)
        for rank, i in enumerate(worst.tolist(), start=1)
        for c in range(len(evaluation.classes))
    )
    names = patients_of(evaluation.cases, patients)
    return Queue(
        rows, _cohort(quality, dices, names), _shifted(quality, summaries, likeness, names, evaluation), quality.level
    )


def _row(
    rank: int,
    i: int,
    c: int,
    evaluation: Evaluation,
    summaries: Summaries,
    promises: Promises,
    flags: list[list[list[str]]],
    likeness: Array,
) -> Row:
    ml = float(summaries.voxel_ml[i])
    predicted, dice_low, dice_high = promises.dice[i, c].tolist()
    _, low, high = promises.volume[i, c].tolist()
    return Row(
        rank,
        evaluation.cases[i],
        evaluation.classes[c],
        predicted,
        dice_low,
        dice_high,
        float(summaries.expected[i, c]),
        float(summaries.decided[i, c]) * ml,
        float(summaries.volume[i, c]) * ml,
        low * ml,
        high * ml,
        float(summaries.uncertain[i, c]) * ml,
        int(summaries.decided[i, c]),
        "; ".join(flags[i][c]),
        float(likeness[i]),
    )


def _flags(quality: Quality, summaries: Summaries, likeness: Array) -> list[list[list[str]]]:
    """By case and class. Tiny: less than half of the smallest known; fragmented: more than every known one."""
    known = quality.reference.features
    tiny = summaries.features[..., _VOLUME] < known[..., _VOLUME].min(0) + np.log(0.5)
    broken = summaries.largest < known[..., _LARGEST].min(0) - 0.05  # false where it is not known
    empty = summaries.decided == 0
    level = _usual(quality)
    found = []
    for i in range(len(likeness)):
        whole = [UNLIKE] if likeness[i] <= level else []
        found.append([
            [name for name, where in ((EMPTY, empty), (TINY, tiny & ~empty), (FRAGMENTED, broken)) if where[i, c]]
            + whole
            for c in range(empty.shape[1])
        ])  # fmt: skip
    return found


def _usual(quality: Quality) -> float:
    """Share of usual cases that are called unlike the reference."""
    return case_level(len(np.unique(quality.reference.patients)))


def _mean(values: Array) -> Array:
    """Over classes, without NaN; NaN where there is nothing else."""
    known = ~np.isnan(values)
    total: Array = np.where(known, values, 0).sum(1)
    return np.where(known.any(1), total / np.maximum(known.sum(1), 1), np.nan)


def _cohort(quality: Quality, dices: Array, patients: tuple[str, ...]) -> tuple[CohortDice, ...]:
    """Means over cases. Their error has two parts: chance in these patients, and in those that were learned from."""
    number, known = len(set(patients)), len(np.unique(quality.reference.patients))
    factor = stats.t.ppf((1 + quality.level) / 2, known - 1) * np.sqrt(1 / number + 1 / known)
    halves = np.array([trial.spread for trial in quality.trials]) * factor
    values = np.array([column[~np.isnan(column)].mean() if (~np.isnan(column)).any() else np.nan for column in dices.T])
    whole = (None, float(_mean(values[None])[0]), float(_mean(halves[None])[0]))
    each = [whole, *zip(quality.classes, values.tolist(), halves.tolist(), strict=True)]
    return tuple(CohortDice(name, value, max(0.0, value - half), min(1.0, value + half)) for name, value, half in each)


def _shifted(
    quality: Quality, summaries: Summaries, likeness: Array, patients: tuple[str, ...], evaluation: Evaluation
) -> tuple[str, ...]:
    """Sentences on how the cohort differs from the reference."""
    told = []
    usual = _usual(quality)
    unlike = likeness <= usual
    if too_many_unlike(int(unlike.sum()), len(unlike), usual):
        told.append(
            f"{unlike.sum()} of {len(unlike)} cases are unlike the reference, where {usual:.0%} would be usual."
        )
    reference = quality.reference
    moved = moved_summaries(
        _of_patients(reference.features, reference.patients), _of_patients(summaries.features, np.array(patients))
    )
    told += [_sentence(one, evaluation.classes) for one in moved[:3]]
    return tuple(told)


def _sentence(moved: Moved, classes: tuple[str, ...]) -> str:
    way = "higher" if moved.higher else "lower"
    return f"{classes[moved.class_index]}: {NAMES[moved.summary]} is {way} than in the reference (p = {moved.p:.1g})."


def _of_patients(features: Array, patients: Array) -> Array:
    names = np.unique(patients)
    return np.stack([features[patients == name].mean(0) for name in names])
