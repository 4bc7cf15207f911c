"""Isotonic curves: by hand, and by laws."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy.special import xlogy
from truths import drawn

from segcal.calibrators import Isotonic


def transformed(calibrator, p):
    return calibrator.transform(torch.logit(torch.tensor([p], dtype=torch.float64)))[0].sigmoid().tolist()


def fitted(calibrator, p, labels):
    return calibrator.fit([(torch.logit(torch.tensor([p], dtype=torch.float64)), torch.tensor([labels]))])


def test_neighbors_in_the_wrong_order_are_joined():
    curve = fitted(Isotonic(activation="sigmoid"), [0.1, 0.2, 0.2, 0.6, 0.7, 0.8, 0.9, 0.9], [0, 1, 0, 0, 1, 0, 1, 1])
    found = transformed(curve, [0.1, 0.2, 0.6, 0.7, 0.8, 0.9])
    assert found == pytest.approx([0.5 / 2, 1 / 3, 1 / 3, 1 / 2, 1 / 2, 2.5 / 3])
    assert transformed(curve, [0.01, 0.99]) == pytest.approx([0.5 / 2, 2.5 / 3])  # beyond the ends it stays level
    between = 1 / (1 + math.exp(-(math.log(0.6 / 0.4) + math.log(0.7 / 0.3)) / 2))
    assert transformed(curve, [between]) == pytest.approx([(1 / 3 + 1 / 2) / 2])


def test_half_a_voxel_does_not_turn_the_curve_down():
    p, labels = [0.05, *np.linspace(0.3, 0.5, 10)], [0, 1, *[0] * 9]
    assert transformed(fitted(Isotonic(activation="sigmoid"), p, labels), p) == pytest.approx([0.1] * 11)
    mirrored = fitted(Isotonic(activation="sigmoid"), [1 - x for x in p], [1 - y for y in labels])
    assert transformed(mirrored, [1 - x for x in p]) == pytest.approx([0.9] * 11)


@pytest.mark.parametrize("activation", ["softmax", "sigmoid"])
def test_curves_rise_in_the_log_odds_of_each_class(activation):
    logits, labels = drawn(activation, voxels=2000)
    curve = Isotonic(activation=activation).fit([(3 * logits, labels)])
    for x, y in curve.knots:
        assert (x.diff() > 0).all()
        assert (y.diff() >= 0).all()
        assert ((y > 0) & (y < 1)).all()


@pytest.mark.parametrize("activation", ["softmax", "sigmoid"])
def test_reports_hold_the_loss_of_each_class_against_the_rest(activation):
    logits, labels = drawn(activation, voxels=3000)
    done = Isotonic(activation=activation).fit([(2 * logits, labels)])
    truth = labels.numpy() if activation == "sigmoid" else np.eye(3)[:, labels]
    before = ((2 * logits).sigmoid() if activation == "sigmoid" else (2 * logits).softmax(0)).numpy()
    after = done._apply(2 * logits)
    after = (
        after.sigmoid() if activation == "sigmoid" else after.exp()
    ).numpy()  # before they are divided by their sum

    def loss(p):
        return -(xlogy(truth, p) + xlogy(1 - truth, 1 - p)).mean()

    assert done.report.before == pytest.approx(loss(before), rel=1e-9)
    assert done.report.after == pytest.approx(loss(after), rel=1e-3)  # voxels of a step share its middle
    assert done.report.after < done.report.before
    assert (done.report.cases, done.report.voxels, done.report.passes) == (1, 3000, 1)
