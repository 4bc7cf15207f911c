"""Isotonic curves and histograms: by hand, and by laws."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy.special import xlogy
from truths import drawn

from segcal.calibrators import HistogramBinning, Isotonic


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


def test_histogram_shares_are_those_of_the_bins():
    histogram = HistogramBinning(activation="sigmoid", bins=4)
    fitted(histogram, [0.1, 0.2, 0.24, 0.3, 0.4, 0.8, 0.9], [0, 1, 0, 0, 0, 1, 1])
    assert transformed(histogram, [0.0001, 0.24, 0.26, 0.5, 0.74, 0.76, 0.999]) == pytest.approx(
        [1 / 3, 1 / 3, 0.5 / 3, 0.5, 0.74, 2.5 / 3, 2.5 / 3]
    )


def test_one_bin_gives_the_share_of_the_class():
    logits, labels = drawn(voxels=500)
    for edges in ("width", "mass"):
        shown = HistogramBinning(bins=1, edges=edges).fit([(logits, labels)]).transform(logits).softmax(0)
        assert shown[:, 0].numpy() == pytest.approx(np.bincount(labels) / 500)
        assert (shown == shown[:, :1]).all()


def test_bins_of_equal_mass_have_equally_many_voxels():
    logits, labels = drawn("sigmoid", voxels=10_000, spread=6)
    histogram = HistogramBinning(activation="sigmoid", bins=8, edges="mass").fit([(logits, labels)])
    for row, limits in zip(logits, histogram.limits, strict=True):
        counts = torch.bucketize(row, limits, right=True).bincount(minlength=8)
        assert counts.tolist() == pytest.approx([1250] * 8, abs=60)  # as steps of log-odds allow
    assert histogram.report.passes == 2


@pytest.mark.parametrize("activation", ["softmax", "sigmoid"])
@pytest.mark.parametrize("calibrator", [Isotonic, HistogramBinning])
def test_reports_hold_the_loss_of_each_class_against_the_rest(calibrator, activation):
    logits, labels = drawn(activation, voxels=3000)
    done = calibrator(activation=activation).fit([(2 * logits, labels)])
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
