"""Distortions that are known: every calibrator undoes those of its family, to an accuracy that is stated."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.special import expit, logit
from truths import KINDS, distance, drawn, probabilities

from segcal.calibrators import Beta, Dirichlet, Isotonic, Temperature, make_calibrator

VOXELS = 40_000
# Largest mean difference from the true probabilities on new voxels. Platt, beta and the curves see each class against
# the rest, where a temperature of three classes is no longer one; bins are as coarse as they are.
CLOSE = {"platt": 0.01, "beta": 0.01, "isotonic": 0.015}
FACTORS, BIASES = torch.tensor([[0.5], [1.5], [2.5]]).double(), torch.tensor([[1.0], [-2.0], [0.5]]).double()


@pytest.mark.parametrize(("method", "activation"), KINDS)
def test_logits_that_are_too_large_are_undone(method, activation):
    logits, labels = drawn(activation, voxels=VOXELS)
    fitted = make_calibrator(method, activation=activation).fit([(2.5 * logits, labels)])
    others, _ = drawn(activation, voxels=VOXELS, seed=1)
    before = float((probabilities(2.5 * others, activation) - probabilities(others, activation)).abs().mean())
    assert before > 0.09
    assert distance(fitted, 2.5 * others, others) < CLOSE.get(method, 0.005)


@pytest.mark.parametrize("factor", [0.05, 2.5, 20])
@pytest.mark.parametrize("activation", ["softmax", "sigmoid"])
def test_the_temperature_is_the_factor_of_calibrated_logits(factor, activation):
    logits, labels = drawn(activation, voxels=200_000)
    assert Temperature(activation=activation).fit([(factor * logits, labels)]).temperature == pytest.approx(
        factor, rel=0.01
    )


@pytest.mark.parametrize("activation", ["softmax", "sigmoid"])
def test_vector_scaling_finds_the_factor_and_bias_of_every_class(activation):
    logits, labels = drawn(activation, voxels=VOXELS)
    fitted = make_calibrator("vector", activation=activation).fit([((logits - BIASES) / FACTORS, labels)])
    found, shift = fitted.parameters[:, :1], fitted.parameters[:, 1:] - BIASES
    assert found == pytest.approx(FACTORS, rel=0.03)
    if activation == "softmax":
        shift = shift - shift.mean()  # the same added to all changes nothing
    assert shift.abs().max() < 0.05


@pytest.mark.parametrize("activation", ["softmax", "sigmoid"])
def test_class_temperatures_are_those_of_the_classes(activation):
    logits, labels = drawn(activation, voxels=VOXELS)
    fitted = make_calibrator("class-temperature", activation=activation).fit([(logits / FACTORS, labels)])
    assert fitted.parameters == pytest.approx(FACTORS, rel=0.03)


@pytest.mark.parametrize(
    ("method", "activation"),
    [("vector", "softmax"), ("vector", "sigmoid"), ("platt", "sigmoid"), ("beta", "sigmoid"), ("isotonic", "sigmoid")],
)
def test_a_factor_and_bias_of_every_class_are_undone(method, activation):
    logits, labels = drawn(activation, voxels=VOXELS)
    distorted = (logits - BIASES) / FACTORS
    fitted = make_calibrator(method, activation=activation).fit([(distorted, labels)])
    assert distance(fitted, distorted, logits) < (0.015 if method == "isotonic" else 0.005)


def test_dirichlet_undoes_a_mixture_of_the_logits():
    logits, labels = drawn(voxels=VOXELS)
    # Rows of equal sums: then the constant that log-probabilities lack stays a constant.
    mixed = torch.tensor([[1.0, 0.4, -0.2], [0.3, 1.0, -0.1], [-0.5, 0.2, 1.5]]).double() @ logits
    assert distance(Dirichlet().fit([(mixed, labels)]), mixed, logits) < 0.004
    assert distance(make_calibrator("vector").fit([(mixed, labels)]), mixed, logits) > 0.02


def warped(seed=0):
    """Probabilities of a network that are a rising curve of the true ones, other for each class; and labels."""
    logits, labels = drawn("sigmoid", voxels=VOXELS, seed=seed)
    true = expit(logits.numpy())
    shown = np.stack([true[0] ** 3, true[1] + 0.12 * np.sin(2 * np.pi * true[1]), np.sqrt(true[2])])
    return torch.from_numpy(logit(shown.clip(1e-12, 1 - 1e-12))), labels, logits


def test_curves_undo_a_warp_that_no_formula_has():
    calibrator = Isotonic(activation="sigmoid").fit([warped()[:2]])
    shown, _, true = warped(seed=1)
    assert float((shown.sigmoid() - true.sigmoid()).abs().mean()) > 0.1
    assert distance(calibrator, shown, true) < 0.015


def test_beta_calibration_finds_the_parameters_of_a_beta_curve():
    shown, _ = drawn("sigmoid", voxels=200_000)
    p = expit(shown.numpy())
    wanted = np.array([[0.5, 2.0, -0.3], [1.5, 0.2, 0.4], [3.0, 1.0, 1.0]])
    a, b, c = wanted.T[..., None]
    true = a * np.log(p) - b * np.log1p(-p) + c
    labels = torch.from_numpy(np.random.default_rng(1).random(p.shape) < expit(true))
    fitted = Beta(activation="sigmoid").fit([(shown, labels)])
    assert fitted.parameters.numpy() == pytest.approx(wanted, abs=0.1)
    assert distance(fitted, shown, torch.from_numpy(true)) < 0.004


def test_calibrated_logits_stay_as_they_are():
    logits, labels = drawn(voxels=VOXELS)
    for method in ("temperature", "class-temperature", "vector", "dirichlet"):
        assert distance(make_calibrator(method).fit([(logits, labels)]), logits, logits) < 0.004
