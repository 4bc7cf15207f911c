"""Figures of decisions show the numbers that they are given."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from segcal.decisions import DecisionSums
from segcal.evaluation.decisions import agreement_of
from segcal.plots import (
    dice_over_thresholds,
    dice_promises,
    new_figure,
    risk_and_coverage,
    volume_differences,
)

COLORS = {"a": "#0072B2", "b": "#E69F00"}


@pytest.fixture
def found(make_evaluation):
    """Liver of two methods; every decided voxel as sure as 0.8, or 0.9; no liver in the first case."""

    def of(sureness, seed):
        evaluation = make_evaluation(seed=seed, cases=6, absent=[(0, 1)])
        known = torch.full_like(evaluation.overlap.true, torch.nan)
        sums = DecisionSums(sureness * evaluation.overlap.predicted, known, known)
        return agreement_of(replace(evaluation, decisions=sums).foreground()).labels["liver"]

    return {"a": of(0.8, 0), "b": of(0.9, 1)}


def lines(draw, found):
    ax = new_figure().add_subplot()
    draw(ax, found, COLORS)
    return [line for line in ax.get_lines() if line.get_color() in COLORS.values()]


def points(line):
    return np.array(line.get_xdata()), np.array(line.get_ydata())


def test_each_case_is_a_point_of_expected_and_actual_dice(found):
    for line, each in zip(lines(dice_promises, found), found.values(), strict=True):
        x, y = points(line)
        np.testing.assert_array_equal(x, each.expected)
        np.testing.assert_array_equal(y, each.actual)  # NaN, which is not drawn, where there is no liver
        assert np.isnan(y).sum() == 1


def test_risk_is_drawn_beside_the_ideal_and_a_random_order(found):
    drawn = lines(risk_and_coverage, found)
    assert len(drawn) == 6
    np.testing.assert_array_equal(points(drawn[0])[1], found["a"].risk.risk)
    np.testing.assert_array_equal(points(drawn[4])[1], found["b"].risk.ideal)
    assert points(drawn[5])[1].tolist() == [found["b"].risk.random_area] * 2


def test_the_best_threshold_is_marked_on_both_curves(found):
    true, promised, ring, dot = lines(dice_over_thresholds, found)[:4]
    np.testing.assert_array_equal(points(true)[1], found["a"].thresholds.dice)
    np.testing.assert_array_equal(points(promised)[1], found["a"].thresholds.expected_dice)
    best = found["a"].thresholds.best
    assert (dot.get_xdata()[0], dot.get_ydata()[0]) == (best.threshold, best.dice)
    assert ring.get_ydata()[0] == found["a"].thresholds.promised.expected_dice


def test_volumes_have_their_bias_and_limits(found):
    dots, bias, low, high = lines(volume_differences, found)[:4]
    volume = found["a"].decided_volume
    np.testing.assert_array_equal(points(dots)[1], volume.difference)
    assert [line.get_ydata()[0] for line in (bias, low, high)] == [volume.bias, volume.low, volume.high]
