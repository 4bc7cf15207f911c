"""Fits of the calibration error itself, against the dense formulas; and the paper's one epoch, against torch."""

from __future__ import annotations

import oracle
import pytest
import torch
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy
from truths import KINDS, drawn, nll, probabilities

from segcal.calibrators import Temperature, make_calibrator
from segcal.errors import ConfigError

SOFT = {"bins": 20, "kernel": "triangular"}


def error(objective, activation, cases):
    """Soft-binned error of (logits, labels), averaged over classes and cases."""
    errors = []
    for logits, labels in cases:
        p = probabilities(logits, activation)[None]
        y = oracle.one_hot(labels[None], len(logits)) if activation == "softmax" else labels[None].double()
        if objective == "ace":
            errors.append(oracle.ace_loss(p, y, absent_classes="skip", **SOFT))
        else:
            _, confidence, label = oracle.bin_sums(p, y, **SOFT)
            errors.append((confidence - label).abs().sum(-1).mean() / logits.shape[1])
    return float(torch.stack(errors).mean())


@pytest.mark.parametrize(("method", "activation"), KINDS)
def test_the_likelihood_that_a_report_names_is_the_one_of_its_numbers(method, activation):
    """Binary where each class stands against the rest, by scipy; that of the true class otherwise."""
    logits, labels = drawn(activation, voxels=600)
    report = make_calibrator(method, activation=activation).fit([(logits, labels)]).report
    apart = activation == "sigmoid" or method in ("platt", "beta", "isotonic")
    assert report.objective == ("binary nll" if apart else "nll")
    odds = logits if activation == "sigmoid" else torch.logit(logits.softmax(0))
    truth = oracle.one_hot(labels[None], len(logits))[0] if labels.ndim == 1 else labels
    expected = nll(odds, truth, "sigmoid") if apart else nll(logits, labels)
    assert report.before == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("objective", ["ace", "ece"])
@pytest.mark.parametrize(
    ("method", "activation"),
    [("temperature", "sigmoid"), ("vector", "softmax"), ("platt", "softmax")],
)
def test_the_error_that_is_fitted_is_lower_than_that_of_the_likeliest(method, activation, objective):
    cases = [drawn(activation, voxels=800, seed=seed) for seed in range(2)]
    cases = [(2.5 * logits, labels) for logits, labels in cases]
    likeliest = make_calibrator(method, activation=activation).fit(cases)
    fitted = make_calibrator(method, activation=activation, objective=objective).fit(cases)

    def after(calibrator):
        return error(objective, activation, [(calibrator.transform(logits), labels) for logits, labels in cases])

    assert fitted.report.objective == objective
    assert fitted.report.before == pytest.approx(error(objective, activation, cases), rel=1e-4)
    assert fitted.report.after == pytest.approx(after(fitted), rel=1e-4)
    assert after(fitted) < after(likeliest) < fitted.report.before
    assert "local optimum" in fitted.report.notes[-1]


@pytest.mark.parametrize("objective", ["ace", "ece"])
@pytest.mark.parametrize("activation", ["softmax", "sigmoid"])
def test_temperatures_of_least_error_are_near_the_true_one(objective, activation):
    cases = [drawn(activation, voxels=8000, seed=seed) for seed in range(3)]
    cases = [(2.5 * logits, labels) for logits, labels in cases]
    fitted = Temperature(activation=activation, objective=objective).fit(cases)
    assert fitted.temperature == pytest.approx(2.5, rel=0.04)


@pytest.mark.parametrize(
    ("method", "objective", "seed"),  # where the likeliest parameters have the larger error
    [("temperature", "ace", 3), ("temperature", "ace", 8), ("class-temperature", "ece", 14)],
)
def test_the_error_never_gets_worse_than_it_was(method, objective, seed):
    case = drawn("sigmoid", voxels=300, classes=2, seed=seed)
    report = make_calibrator(method, activation="sigmoid", objective=objective).fit([case]).report
    assert report.after <= report.before


def test_cases_in_slabs_have_the_error_of_whole_cases():
    logits, labels = drawn(voxels=900)

    class Slabs:
        def slabs(self):
            yield logits[:, :100], labels[:100]
            yield logits[:, 100:], labels[100:]

    whole, parts = (Temperature(objective="ace").fit([case]) for case in ((logits, labels), Slabs()))
    assert parts.temperature == pytest.approx(whole.temperature, rel=1e-9)


@pytest.mark.parametrize("method", ["temperature", "vector", "dirichlet", "platt", "beta"])
def test_an_error_to_be_fitted_needs_every_voxel(method):
    for objective in ("ace", "ece"):
        with pytest.raises(ConfigError, match=f"objective '{objective}' needs every voxel"):
            make_calibrator(method, objective=objective, voxels=1000)
    with pytest.raises(ConfigError, match="objective must be one of"):
        make_calibrator(method, objective="brier")


@pytest.mark.parametrize("activation", ["softmax", "sigmoid"])
def test_the_one_epoch_protocol_is_adam_on_one_case_after_another(activation):
    cases = [drawn(activation, voxels=50 * (seed + 1), seed=seed) for seed in range(7)]
    logits, _ = drawn(activation, voxels=50, seed=9)
    cases.insert(3, (logits, logits.argmax(0) if activation == "softmax" else (logits > 0).byte()))  # without mistakes
    fitted = Temperature(activation=activation, protocol="one-epoch").fit(cases)

    temperature = torch.tensor(1.5, dtype=torch.float64, requires_grad=True)
    adam = torch.optim.Adam([temperature], lr=1e-3)
    for logits, labels in cases:
        adam.zero_grad()
        scaled = logits / temperature
        if activation == "softmax":
            loss = cross_entropy(scaled.T, labels.long())
        else:
            loss = binary_cross_entropy_with_logits(scaled, labels.double())
        loss.backward()
        adam.step()
    assert fitted.temperature == pytest.approx(temperature.item(), rel=1e-9)
    assert fitted.temperature != pytest.approx(1.5, abs=1e-4)

    everything = torch.cat([logits for logits, _ in cases], 1), torch.cat([labels for _, labels in cases], -1)
    report = fitted.report
    assert report.before == pytest.approx(nll(*everything, activation), rel=1e-9)
    assert report.after == pytest.approx(nll(everything[0] / fitted.temperature, everything[1], activation), rel=1e-9)
    assert report.voxels == everything[0].shape[1]
    assert report.gradient > 1e-3
    assert "not the optimum" in report.notes[0]


def test_the_one_epoch_protocol_starts_at_one_and_a_half_and_moves_a_thousandth_for_a_case():
    logits, labels = drawn(voxels=500)
    for factor, step in ((10, 1e-3), (0.1, -1e-3)):
        fitted = Temperature(protocol="one-epoch").fit([(factor * logits, labels)])
        assert fitted.temperature == pytest.approx(1.5 + step, abs=1e-8)


def test_the_one_epoch_protocol_takes_every_voxel_and_the_likelihood():
    for other in ({"voxels": 100}, {"objective": "ace"}):
        with pytest.raises(ConfigError, match="one-epoch"):
            Temperature(protocol="one-epoch", **other)
    with pytest.raises(ConfigError, match="protocol must be one of"):
        Temperature(protocol="two-epochs")
