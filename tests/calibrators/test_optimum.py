"""Fits end where scipy, on likelihoods written out in numpy, finds nothing lower."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy.optimize import minimize, minimize_scalar
from scipy.special import expit, log_expit, log_softmax, logsumexp
from truths import drawn, nll

from segcal.calibrators import Beta, Dirichlet, Temperature, make_calibrator
from segcal.calibrators.forms import COLDEST, HOTTEST
from segcal.errors import SegcalError


def log_odds(z, activation):
    if activation == "sigmoid":
        return z
    rest = [logsumexp(np.delete(z, k, axis=0), axis=0) for k in range(len(z))]
    return z - np.stack(rest)


def one_hot(labels, classes):
    return np.eye(classes, dtype=int)[:, labels] if labels.ndim == 1 else labels


def objective(method, activation, logits, labels, *, off_diagonal=1e-3, intercept=1e-3):
    """The function that a method promises to minimize, of parameters in a row, and those that change nothing."""
    z, y = logits.double().numpy(), labels.numpy()
    classes, identity = len(z), np.eye(len(z))
    affine = np.tile([1.0, 0.0], classes)

    def apart(out):
        return nll(out, one_hot(y, classes), "sigmoid")

    def matrix(theta, features):
        theta = theta.reshape(classes, classes + 1)
        return theta[:, :-1] @ features + theta[:, -1:]

    def dirichlet(theta):
        full = theta.reshape(classes, classes + 1)
        off, bias = full[:, :-1][identity == 0], full[:, -1]
        added = off_diagonal * (off**2).mean() + intercept * (bias**2).mean()
        return nll(matrix(theta, log_softmax(z, axis=0)), y) + added

    def beta(theta):
        odds = log_odds(z, activation)
        a, b, c = theta.reshape(classes, 3).T[..., None]
        return apart(a * log_expit(odds) - b * log_expit(-odds) + c)

    return {
        "temperature": (lambda t: nll(t * z, y, activation), np.ones(1)),
        "class-temperature": (lambda t: nll(t[:, None] * z, y, activation), np.ones(classes)),
        "vector": (lambda t: nll(t[::2, None] * z + t[1::2, None], y, activation), affine),
        "dirichlet": (dirichlet, np.eye(classes, classes + 1).ravel()),
        "platt": (lambda t: apart(t[::2, None] * log_odds(z, activation) + t[1::2, None]), affine),
        "beta": (beta, np.tile([1.0, 1.0, 0.0], classes)),
    }[method]


def check_optimum(fitted, function, start, bounds=None):
    ours = fitted.parameters.flatten().numpy()
    assert fitted.report.before == pytest.approx(function(start), rel=1e-9)
    assert fitted.report.after == pytest.approx(function(ours), rel=1e-9)
    assert fitted.report.gradient < 1e-6
    found = minimize(function, start, method="L-BFGS-B", bounds=bounds, options={"ftol": 1e-15, "maxfun": 100_000})
    again = minimize(function, ours, method="L-BFGS-B", bounds=bounds, options={"ftol": 1e-15})
    assert function(ours) <= min(found.fun, again.fun) * (1 + 1e-7)
    assert found.fun == pytest.approx(function(ours), rel=1e-5)  # scipy came as far, from the start


LINEAR = [
    (method, activation)
    for method in ("temperature", "class-temperature", "vector", "dirichlet", "platt", "beta")
    for activation in ("softmax", "sigmoid")
    if (method, activation) != ("dirichlet", "sigmoid")
]


@pytest.mark.parametrize(("method", "activation"), LINEAR)
def test_scipy_finds_nothing_likelier(method, activation):
    logits, labels = drawn(activation, voxels=1000, seed=3)
    logits = 2.5 * (logits + torch.tensor([[0.5], [0.0], [-0.5]]))
    fitted = make_calibrator(method, activation=activation).fit([(logits, labels)])
    bounds = [(0, None), (0, None), (None, None)] * 3 if method == "beta" else None
    check_optimum(fitted, *objective(method, activation, logits, labels), bounds)


@pytest.mark.parametrize(("off_diagonal", "intercept"), [(0, 0), (0.1, 0), (0, 0.1), (3, 0.01)])
def test_the_penalty_of_dirichlet_is_the_mean_square_of_what_it_names(off_diagonal, intercept):
    logits, labels = drawn(voxels=800, seed=4)
    settings = {"off_diagonal": off_diagonal, "intercept": intercept}
    fitted = Dirichlet(**settings).fit([(logits + 1.5 * logits.roll(1, 0), labels)])
    check_optimum(fitted, *objective("dirichlet", "softmax", logits + 1.5 * logits.roll(1, 0), labels, **settings))


@pytest.mark.parametrize("wanted", [(-1, 3, 0), (2, -1, 0.5), (-1, -1, 0)])
def test_beta_curves_that_would_fall_end_at_their_bounds(wanted):
    shown, _ = drawn("sigmoid", voxels=1500, classes=2, seed=5)
    a, b, c = wanted
    p = expit(shown.numpy())
    truth = expit(a * np.log(p) - b * np.log1p(-p) + c)
    labels = torch.from_numpy((np.random.default_rng(0).random(p.shape) < truth).astype(np.uint8))
    fitted = Beta(activation="sigmoid").fit([(shown, labels)])
    check_optimum(fitted, *objective("beta", "sigmoid", shown, labels), [(0, None), (0, None), (None, None)] * 2)
    falls = torch.tensor([value < 0 for value in (a, b)])
    assert (fitted.parameters[:, :2][:, falls] == 0).all()


@pytest.mark.parametrize("activation", ["softmax", "sigmoid"])
@pytest.mark.parametrize("factor", [0.02, 0.3, 1, 7, 60])
@pytest.mark.parametrize("voxels", [3, 40, 4000])
def test_temperatures_of_any_scale_are_those_of_scipy(activation, factor, voxels):
    logits, labels = drawn(activation, voxels=voxels, seed=5)
    if activation == "softmax":
        labels[0] = logits[:, 0].argmin()  # never separable
    else:
        labels[0] = logits[0] < 0
    fitted = Temperature(activation=activation).fit([(factor * logits, labels)])

    def function(log):
        return nll(factor * logits / math.exp(log), labels, activation)

    bounds = math.log(COLDEST), math.log(HOTTEST)
    found = minimize_scalar(function, bounds=bounds, method="bounded", options={"xatol": 1e-10})
    assert fitted.temperature == pytest.approx(math.exp(found.x), rel=1e-5)
    assert fitted.report.before == pytest.approx(function(0), rel=1e-9)
    assert fitted.report.after == pytest.approx(function(math.log(fitted.temperature)), rel=1e-9)


@pytest.mark.parametrize("method", ["temperature", "platt", "beta", "dirichlet"])
def test_adding_a_constant_to_all_logits_of_a_voxel_changes_nothing(method):
    logits, labels = drawn(voxels=2000)
    alone, moved = (make_calibrator(method).fit([(logits / 2 + shift, labels)]) for shift in (0, 1000))
    assert moved.report.after == pytest.approx(alone.report.after, rel=1e-9)
    changed = moved.transform(logits / 2 + 1000).softmax(0)
    assert torch.allclose(changed, alone.transform(logits / 2).softmax(0), atol=1e-6)


@pytest.mark.parametrize("margin", [0.5, 2, 10, 50, 1000])
@pytest.mark.parametrize("protocol", ["exclusive", "overlapping"])
def test_where_every_voxel_is_right_no_temperature_is_best(margin, protocol):
    logits = margin * torch.tensor([[1.0, -1.0], [-1.0, 1.0]])
    right = torch.tensor([0, 1]) if protocol == "exclusive" else (logits > 0).byte()
    activation = "softmax" if protocol == "exclusive" else "sigmoid"
    with pytest.raises(SegcalError, match="no finite fit is best"):
        Temperature(activation=activation).fit([(logits, right)])


@pytest.mark.parametrize("margin", [0.5, 2, 10, 50, 1000])
def test_where_every_voxel_is_wrong_the_fit_ends_at_the_hot_bound_and_says_so(margin):
    logits = margin * torch.tensor([[1.0, -1.0], [-1.0, 1.0]])
    fitted = Temperature().fit([(logits, torch.tensor([1, 0]))])
    assert fitted.temperature == HOTTEST
    assert "hottest" in fitted.report.notes[0]
    assert fitted.report.gradient == 0


def test_a_temperature_beyond_the_cold_bound_ends_at_it_and_says_so():
    logits, labels = drawn(voxels=2000)
    fitted = Temperature().fit([(logits / 500, labels)])
    assert fitted.temperature == COLDEST
    assert "coldest" in fitted.report.notes[0]


def test_logits_that_say_nothing_keep_their_temperature():
    assert Temperature().fit([(torch.zeros(3, 5), torch.arange(5) % 3)]).temperature == 1


def test_one_voxel_that_is_wrong_among_very_many_is_enough():
    logits, labels = torch.zeros(2, 1_000_000), torch.zeros(1_000_000, dtype=torch.uint8)
    logits[0] = 5
    labels[0] = 1
    fitted = Temperature().fit([(logits, labels)])
    assert fitted.temperature == pytest.approx(5 / math.log(999_999), rel=1e-6)  # p of the wrong one is 1e-6
