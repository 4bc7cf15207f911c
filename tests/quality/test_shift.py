"""Cases and cohorts unlike the reference: how often usual ones are taken for that, and unusual ones are seen."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats as scipy_stats

from segcal.quality.shift import CASE_LEVEL, COHORT_LEVEL, moved_summaries, p_values, too_many_unlike


def summaries(number: int, draw: np.random.Generator, *, moved: float = 0.0) -> np.ndarray:
    """(case, 2 classes, 4): skewed, and depending on each other."""
    base = draw.normal(size=(number, 2, 4)) @ np.triu(np.ones((4, 4)))
    return np.exp(base / 3) + moved


def test_usual_cases_are_seldom_called_unlike():
    alarms = []
    for seed in range(60):
        draw = np.random.default_rng(seed)
        found = p_values(summaries(60, draw), np.ones(60), summaries(10, draw))
        alarms += (found <= CASE_LEVEL).tolist()
    assert np.mean(alarms) <= CASE_LEVEL + 3 * np.sqrt(CASE_LEVEL / len(alarms)) + 0.005


def test_p_values_of_usual_cases_are_spread_evenly():
    draw = np.random.default_rng(0)
    found = np.concatenate([p_values(summaries(99, draw), np.ones(99), summaries(1, draw)) for _ in range(300)])
    assert scipy_stats.kstest(found, "uniform").pvalue > 0.001


def test_a_case_that_lies_apart_is_seen():
    draw = np.random.default_rng(1)
    assert (p_values(summaries(60, draw), np.ones(60), summaries(5, draw) + 20.0) <= CASE_LEVEL).all()


@pytest.mark.parametrize("number", [10, 40])
def test_usual_cohorts_are_seldom_called_shifted(number):
    draw = np.random.default_rng(number)
    alarms = [bool(moved_summaries(summaries(60, draw), summaries(number, draw))) for _ in range(200)]
    assert np.mean(alarms) <= 3 * COHORT_LEVEL


def test_a_shifted_cohort_is_seen_and_named():
    draw = np.random.default_rng(2)
    reference, new = summaries(60, draw), summaries(30, draw)
    new[:, 1, 2] += 3 * reference[:, 1, 2].std()
    first = moved_summaries(reference, new)[0]
    assert (first.class_index, first.summary, first.higher) == (1, 2, True)


def test_features_that_never_change_say_nothing():
    assert moved_summaries(np.ones((20, 1, 2)), np.ones((5, 1, 2))) == []
    assert p_values(np.ones((20, 1, 2)), np.ones(20), np.ones((1, 1, 2)))[0] == 1.0


def test_more_unlike_cases_than_chance_shows():
    assert not too_many_unlike(0, 10, 0.05)
    assert not too_many_unlike(2, 10, 0.05)  # 2 of 10 happen in 9 % of usual cohorts, 3 in 1.2 %, 4 in 0.1 %
    assert too_many_unlike(4, 10, 0.05)
