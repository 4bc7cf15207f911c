"""Intervals: against full conformal prediction done the slow way, and by how often they hold."""

from __future__ import annotations

import math

import numpy as np
import pytest

from segcal.quality import conformal
from segcal.quality.conformal import Conformal, fewest_patients


def slow_interval(features, truth, new, level, grid):
    """Full conformal prediction value by value: refit, compare residuals, keep what conforms."""
    rows = np.vstack([features, new])
    centered = (rows - rows.mean(0)) / rows.std(0)
    design = np.column_stack([np.ones(len(rows)), centered])
    penalty = np.diag([0.0, *[conformal.PENALTY * len(rows)] * features.shape[1]])
    kept = []
    for y in grid:
        values = np.append(truth, y)
        coefficients = np.linalg.solve(design.T @ design + penalty, design.T @ values)
        residuals = np.abs(values - design @ coefficients)
        if (residuals >= residuals[-1] - 1e-12).mean() > 1 - level:
            kept.append(y)
    return min(kept), max(kept)


@pytest.mark.parametrize("seed", range(4))
def test_intervals_are_those_of_refitting_for_every_value(seed):
    draw = np.random.default_rng(seed)
    features, truth = draw.normal(size=(25, 2)), draw.normal(size=25)
    new = draw.normal(size=2)
    grid = np.linspace(-8, 8, 16001)
    low, high = slow_interval(features, truth, new, 0.8, grid)
    found = Conformal(features, truth, np.arange(25)).predict(new, 0.8)
    assert found.low == pytest.approx(low, abs=2e-3)
    assert found.high == pytest.approx(high, abs=2e-3)


def test_the_prediction_is_ridge_regression_on_the_known_cases():
    sklearn = pytest.importorskip("sklearn.linear_model")
    draw = np.random.default_rng(0)
    features, truth, new = draw.normal(size=(30, 2)), draw.normal(size=30), draw.normal(size=2)
    centered = (features - features.mean(0)) / features.std(0)
    ridge = sklearn.Ridge(alpha=conformal.PENALTY * 30).fit(centered, truth)
    expected = ridge.predict(((new - features.mean(0)) / features.std(0))[None])[0]
    assert Conformal(features, truth, np.arange(30)).predict(new, 0.9).value == pytest.approx(expected)


@pytest.mark.parametrize("level", [0.8, 0.9])
def test_intervals_hold_as_often_as_promised_also_for_skewed_errors(level):
    held = []
    for seed in range(600):
        draw = np.random.default_rng(seed)
        features = draw.normal(size=(31, 2))
        truth = features[:, 0] + draw.exponential(size=31) * np.exp(features[:, 1])
        found = Conformal(features[:-1], truth[:-1], np.arange(30)).predict(features[-1], level)
        held.append(found.low <= truth[-1] <= found.high)
    assert level - 0.035 < np.mean(held) < level + 0.06  # 1 / 31 more at most, and three standard errors


def test_patients_with_several_cases_count_once():
    """Cases of a patient are alike: taken for patients, intervals would hold too seldom."""
    held = {True: [], False: []}
    for seed in range(400):
        draw = np.random.default_rng(seed)
        patients = np.repeat(np.arange(16), [20] + [1] * 15)
        effects = draw.normal(size=17)
        truth = np.append(effects[patients], effects[16])
        features = np.zeros((len(truth), 1))
        for grouped in held:
            who = patients if grouped else np.arange(len(patients))
            found = Conformal(features[:-1], truth[:-1], who).predict(features[-1], 0.8)
            held[grouped].append(found.low <= truth[-1] <= found.high)
    assert np.mean(held[True]) > 0.76
    assert np.mean(held[False]) < 0.72


def test_too_few_patients_promise_nothing():
    for number in (3, 8, 9, 10):
        found = Conformal(np.zeros((number, 1)), np.arange(number) / 1.0, np.arange(number)).predict(np.zeros(1), 0.9)
        assert math.isinf(found.high) == (number < fewest_patients(0.9))


def test_truth_that_never_changes_gives_a_point():
    found = Conformal(np.zeros((12, 2)), np.full(12, 0.5), np.arange(12)).predict(np.zeros(2), 0.9)
    assert (found.value, found.low, found.high) == pytest.approx((0.5, 0.5, 0.5))
