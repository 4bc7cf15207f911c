"""Dice and volume of new cases with intervals, from cases that are known, and how well that works."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from segcal.errors import check_seed
from segcal.evaluation.agreement import dice_agreement
from segcal.evaluation.decisions import risk_coverage
from segcal.evaluation.evaluation import Evaluation
from segcal.quality.conformal import Conformal, fewest_patients
from segcal.quality.summaries import NAMES, Summaries, summaries_of
from segcal.scores import dice

Array = NDArray[Any]

USED = [NAMES.index(name) for name in ("expected Dice", "uncertain share")]
"""Summaries in the regressions: few, for patients are few."""
LEAST_ERROR = 0.02  # scale of errors of Dice where the expected one is nearly 1
MOST_FOLDS = 20


ARRAYS = ("features", "dice", "expected", "true", "volume", "uncertain", "patients")


@dataclass(frozen=True, eq=False)
class Reference:
    """What is kept of the labeled cases, without their names: (case, class, ...) arrays, and (case) patients.

    features: summaries of probabilities. dice: NaN where a class is absent. expected: expected Dice.
    true, volume, uncertain: voxels of the class, expected ones, and uncertain ones.
    """

    features: Array
    dice: Array
    expected: Array
    true: Array
    volume: Array
    uncertain: Array
    patients: Array

    def without(self, cases: Array) -> Reference:
        """The others."""
        return Reference(*(getattr(self, name)[~cases] for name in ARRAYS))


class Promises(NamedTuple):
    """(case, class, 3): a prediction and the ends of its interval; NaN where too few patients have the class."""

    dice: Array
    volume: Array
    """In voxels."""


class Trial(NamedTuple):
    """How good the promises for a class are on patients that they were not learned from."""

    class_name: str
    cases: int
    coverage: float
    width: float
    error: float
    """Mean absolute, of predicted Dice."""
    constant_error: float
    """That of the median of all other patients."""
    spread: float
    """Standard deviation of the error over patients."""
    rank_correlation: float
    area: float
    """Under the risk-coverage curve: mean of 1 - Dice over the cases that are kept, over all shares kept."""
    volume_coverage: float
    volume_width: float
    """Relative to the mean volume."""


def reference_of(evaluation: Evaluation, patients: Array) -> Reference:
    """What is kept of evaluated cases."""
    found = summaries_of(evaluation)
    true = evaluation.overlap.true.numpy()
    return Reference(
        found.features, dice(evaluation.overlap).numpy(), found.expected, true, found.volume, found.uncertain, patients
    )


def promise(reference: Reference, new: Summaries | Reference, level: float) -> Promises:
    """Dice and volumes of new cases, by regressions of the known ones' errors."""
    known_scales, scales = (_scales(some.expected, some.uncertain) for some in (reference, new))
    anywhere = np.ones(reference.dice.shape, bool)
    present = ~np.isnan(reference.dice)
    score = (reference.dice - reference.expected) / known_scales[0]
    size = (reference.true - reference.volume) / known_scales[1]
    dices = _intervals(reference, score, present, new.features, level) * scales[0][..., None]
    volumes = _intervals(reference, size, anywhere, new.features, level) * scales[1][..., None]
    return Promises(
        np.clip(dices + new.expected[..., None], 0, 1), np.clip(volumes + new.volume[..., None], 0, math.inf)
    )


def _intervals(reference: Reference, errors: Array, used: Array, features: Array, level: float) -> Array:
    """(case, class, 3): the error to be expected of each new case, and its interval; NaN where patients are too few."""
    found = np.full((*features.shape[:2], 3), np.nan)
    for c in range(features.shape[1]):
        rows, patients = used[:, c], reference.patients[used[:, c]]
        if len(np.unique(patients)) >= fewest_patients(level):
            model = Conformal(reference.features[rows, c][:, USED], errors[rows, c], patients)
            found[:, c] = [model.predict(case[c, USED], level) for case in features]
    return found


def _scales(expected: Array, uncertain: Array) -> tuple[Array, Array]:
    """In which units errors of Dice and of volumes are comparable between cases."""
    return np.maximum(1 - expected, LEAST_ERROR), np.maximum(uncertain, 1.0)


def try_promises(reference: Reference, classes: Sequence[str], level: float, seed: int) -> tuple[Trial, ...]:
    """The promises for the patients of each part, learned from the others."""
    names = np.unique(reference.patients)
    order = np.random.default_rng(check_seed(seed)).permutation(len(names))
    part = np.empty(len(names), np.int64)
    part[order] = np.arange(len(names)) % min(len(names), MOST_FOLDS)
    part_of = part[np.searchsorted(names, reference.patients)]
    shape = (*reference.dice.shape, 3)
    found, constant = Promises(np.full(shape, np.nan), np.full(shape, np.nan)), np.full(reference.dice.shape, np.nan)
    for k in range(part.max() + 1):
        held = part_of == k
        rest = reference.without(held)
        promises = promise(rest, reference.without(~held), level)
        found.dice[held], found.volume[held] = promises
        known = ~np.isnan(rest.dice).all(0)
        constant[np.ix_(held, known)] = np.nanmedian(rest.dice[:, known], 0)
    return tuple(_trial(name, reference, found, constant, c) for c, name in enumerate(classes))


def _trial(name: str, reference: Reference, found: Promises, constant: Array, c: int) -> Trial:
    truth, (value, low, high) = reference.dice[:, c], found.dice[:, c].T
    scored = ~np.isnan(truth) & ~np.isnan(value)
    true, (_, volume_low, volume_high) = reference.true[:, c], found.volume[:, c].T
    sized = ~np.isnan(volume_low)

    def mean(values: Array, where: Array = scored) -> float:
        return float(values[where].mean()) if where.any() else math.nan

    agreed = dice_agreement(value[scored], truth[scored])
    return Trial(
        name,
        int(scored.sum()),
        mean((low <= truth) & (truth <= high)),
        mean(high - low),
        agreed.mean_absolute_error,
        mean(np.abs(constant[:, c] - truth)),
        _spread((value - truth)[scored], reference.patients[scored]),
        agreed.rank_correlation,
        risk_coverage(value[scored], truth[scored]).area,
        mean((volume_low <= true) & (true <= volume_high), sized),
        mean(volume_high - volume_low, sized) / max(mean(true, sized), 1.0),
    )


def _spread(errors: Array, patients: Array) -> float:
    """Of the means of each patient's cases; NaN of fewer than two patients."""
    names, where = np.unique(patients, return_inverse=True)
    means = np.bincount(where, errors) / np.bincount(where) if len(names) else np.zeros(0)
    return float(means.std(ddof=1)) if len(names) > 1 else math.nan
