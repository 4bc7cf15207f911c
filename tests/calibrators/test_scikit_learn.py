"""segcal against scikit-learn 1.9, which fits voxels one by one where curves here count them in steps of log-odds.

Known disagreement: blocks of an isotonic curve without a true voxel (or with nothing else) are 0 (or 1) there, where
one voxel is enough for an infinite loss; here they are half a voxel away from it.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.special import expit, log_expit
from sklearn.isotonic import IsotonicRegression
from sklearn.linear_model import LogisticRegression
from truths import drawn, nll

from segcal.calibrators import Beta, Dirichlet, Isotonic, Platt, VectorScaling
from segcal.calibrators.curves import FINE, REACH


def theirs_of(odds, labels):
    return IsotonicRegression(out_of_bounds="clip").fit(expit(odds), labels)


def ours_of(odds, labels):
    return Isotonic(activation="sigmoid").fit([(torch.from_numpy(odds)[None], torch.from_numpy(labels))])


def curve(calibrator, odds):
    return calibrator.transform(torch.from_numpy(odds)[None])[0].sigmoid().numpy()


@pytest.mark.parametrize("seed", range(5))
def test_curves_through_probabilities_that_are_alone_in_their_steps_are_scikit_learns(seed):
    random = np.random.default_rng(seed)
    steps = random.choice(np.arange(FINE // 4, 3 * FINE // 4), 300, replace=False)  # log-odds within -10 and 10
    odds = random.choice((steps + random.uniform(0.1, 0.9, len(steps))) * 2 * REACH / FINE - REACH, 3000)
    labels = (random.random(len(odds)) < expit(np.sin(odds) + odds / 2)).astype(int)
    theirs, ours = theirs_of(odds, labels).predict(expit(odds)), curve(ours_of(odds, labels), odds)
    inside = (theirs > 0) & (theirs < 1)
    assert inside.mean() > 0.5
    assert ours[inside] == pytest.approx(theirs[inside], abs=1e-9)
    for end in (0, 1):
        block = theirs == end
        half = (end * block.sum() + 0.5) / (block.sum() + 1)
        nearest = np.abs(theirs[inside] - end).min()
        assert np.abs(ours[block] - end) == pytest.approx(min(abs(half - end), nearest), abs=1e-9)


def test_curves_through_any_probabilities_are_scikit_learns_but_for_the_width_of_a_step():
    (odds,), (labels,) = (side.numpy() for side in drawn("sigmoid", voxels=50_000, classes=1))
    odds = 2.5 * odds
    theirs = theirs_of(odds, labels)
    between = np.linspace(-10, 10, 4001)  # straight between knots: of probability there, of log-odds here
    for where in (odds, between):
        difference = np.abs(theirs.predict(expit(where)) - curve(ours_of(odds, labels), where))
        assert difference.mean() < 0.002
        assert difference.max() < 0.04


def test_platt_scaling_is_logistic_regression_on_the_log_odds():
    logits, labels = drawn("sigmoid", voxels=3000)
    ours = Platt(activation="sigmoid").fit([(2.5 * logits + 1, labels)]).parameters
    for k in range(3):
        theirs = LogisticRegression(C=np.inf, tol=1e-10).fit(2.5 * logits[k][:, None] + 1, labels[k])
        found = [theirs.coef_.item(), theirs.intercept_.item()]
        assert ours[k].tolist() == pytest.approx(found, rel=1e-4)


def test_platt_scaling_of_exclusive_classes_is_one_logistic_regression_for_each():
    logits, labels = drawn(voxels=3000)
    p = (2.5 * logits).softmax(0).numpy()
    ours = Platt().fit([(2.5 * logits, labels)]).parameters
    for k in range(3):
        odds = np.log(p[k]) - np.log(np.delete(p, k, axis=0).sum(0))
        theirs = LogisticRegression(C=np.inf, tol=1e-10).fit(odds[:, None], labels == k)
        assert ours[k].tolist() == pytest.approx([theirs.coef_.item(), theirs.intercept_.item()], rel=1e-4)


def test_beta_calibration_is_logistic_regression_on_two_logarithms():
    logits, labels = drawn("sigmoid", voxels=3000)
    ours = Beta(activation="sigmoid").fit([(2.5 * logits, labels)]).parameters
    for k in range(3):
        odds = 2.5 * logits[k].numpy()
        features = np.stack([log_expit(odds), -log_expit(-odds)], 1)
        theirs = LogisticRegression(C=np.inf, tol=1e-10, max_iter=1000).fit(features, labels[k])
        assert (theirs.coef_ > 0).all()  # or the bounds would part us
        assert ours[k].tolist() == pytest.approx([*theirs.coef_[0], theirs.intercept_.item()], rel=1e-3, abs=1e-4)


@pytest.mark.parametrize("classes", [2, 3, 5])
def test_dirichlet_without_penalties_is_multinomial_logistic_regression(classes):
    logits, labels = drawn(voxels=3000, classes=classes)
    distorted = (2.5 * logits + logits.roll(1, 0)).log_softmax(0)
    ours = Dirichlet(off_diagonal=0, intercept=0).fit([(distorted, labels)])
    theirs = LogisticRegression(C=np.inf, tol=1e-10, max_iter=5000).fit(distorted.T, labels)
    shares = np.log(theirs.predict_proba(distorted.T).T)
    assert ours.report.after == pytest.approx(nll(shares, labels), rel=1e-7)
    assert np.exp(shares) == pytest.approx(ours.transform(distorted).softmax(0), abs=1e-3)
    if classes == 2:  # a factor and bias of each are as much as a matrix
        assert VectorScaling().fit([(distorted, labels)]).report.after == pytest.approx(ours.report.after, rel=1e-9)
