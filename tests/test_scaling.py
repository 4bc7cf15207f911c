"""Temperatures: against scipy's minimiser, against a known truth, and where there is no minimum."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch
from scipy.optimize import minimize_scalar
from scipy.special import log_softmax

from segcal.errors import ConfigError, FileError, SegcalError
from segcal.scaling import COLDEST, HOTTEST, Temperature, fit_temperature


def drawn(factor=1.0, *, voxels=4000, classes=4, seed=0):
    """Logits times a factor, and labels drawn from the probabilities of the logits themselves."""
    random = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(classes, voxels, generator=random)
    labels = torch.multinomial(logits.softmax(0).T, 1, generator=random)[:, 0]
    return factor * logits, labels


def nll(logits, labels, temperature):
    scaled = log_softmax(logits.double().numpy() / temperature, axis=0)
    return -scaled[labels.numpy(), np.arange(len(labels))].mean()


def best_temperature(logits, labels):
    """By scipy, in the logarithm of the temperature."""
    bounds = math.log(COLDEST), math.log(HOTTEST)
    found = minimize_scalar(
        lambda log: nll(logits, labels, math.exp(log)), bounds=bounds, method="bounded", options={"xatol": 1e-10}
    )
    return math.exp(found.x)


@pytest.mark.parametrize("factor", [0.02, 0.3, 1, 7, 60])
@pytest.mark.parametrize("voxels", [3, 40, 4000])
def test_the_fit_reaches_the_minimum_that_scipy_finds(factor, voxels):
    logits, labels = drawn(factor, voxels=voxels, seed=5)
    labels[0] = logits[:, 0].argmin()  # never separable
    fitted = fit_temperature([(logits, labels)])
    assert fitted.temperature == pytest.approx(best_temperature(logits, labels), rel=1e-5)
    assert fitted.nll_before == pytest.approx(nll(logits, labels, 1), rel=1e-9)
    assert fitted.nll_after == pytest.approx(nll(logits, labels, fitted.temperature), rel=1e-9)


@pytest.mark.parametrize("factor", [0.05, 0.5, 1, 3, 20])
def test_calibrated_logits_times_a_factor_have_the_factor_as_their_temperature(factor):
    fitted = fit_temperature([drawn(factor, voxels=100_000)])
    assert fitted.temperature == pytest.approx(factor, rel=0.02)


def test_adding_a_constant_to_all_logits_changes_nothing():
    logits, labels = drawn(0.5)
    alone, moved = (fit_temperature([(logits.double() + shift, labels)]) for shift in (0, 1000))
    assert moved.temperature == pytest.approx(alone.temperature, rel=1e-6)


def test_cases_count_by_their_voxels_however_they_are_divided():
    logits, labels = drawn(3)
    whole = fit_temperature([(logits, labels)])
    parts = fit_temperature([(logits[:, :7], labels[:7]), (logits[:, 7:], labels[7:])])
    assert parts.temperature == pytest.approx(whole.temperature, rel=1e-9)


def test_volumes_are_taken_as_they_are():
    logits, labels = drawn(3, voxels=60)
    volume = fit_temperature([(logits.reshape(4, 3, 4, 5), labels.reshape(3, 4, 5).byte())])
    assert volume.temperature == pytest.approx(fit_temperature([(logits, labels)]).temperature, rel=1e-9)


@pytest.mark.parametrize("margin", [0.5, 2, 10, 50, 1000])
def test_where_every_voxel_is_right_the_fit_ends_at_the_cold_bound(margin):
    logits = margin * torch.tensor([[1.0, -1.0], [-1.0, 1.0]])
    fitted = fit_temperature([(logits, torch.tensor([0, 1]))])
    assert fitted.temperature == COLDEST
    assert math.isfinite(fitted.nll_after)


@pytest.mark.parametrize("margin", [0.5, 2, 10, 50, 1000])
def test_where_every_voxel_is_wrong_the_fit_ends_at_the_hot_bound(margin):
    logits = margin * torch.tensor([[1.0, -1.0], [-1.0, 1.0]])
    fitted = fit_temperature([(logits, torch.tensor([1, 0]))])
    assert fitted.temperature == HOTTEST


def test_logits_that_say_nothing_keep_their_temperature():
    assert fit_temperature([(torch.zeros(3, 5), torch.arange(5) % 3)]).temperature == 1


def test_the_most_probable_class_stays_what_it_was():
    logits, _ = drawn(3)
    for temperature in (COLDEST, 0.7, HOTTEST):
        assert torch.equal(Temperature(temperature).transform(logits).argmax(0), logits.argmax(0))


def test_no_voxels_are_refused():
    with pytest.raises(ConfigError, match="there must be voxels"):
        fit_temperature([])
    with pytest.raises(ConfigError, match="there must be voxels"):
        fit_temperature([(torch.zeros(3, 0), torch.zeros(0))])


def test_an_iterator_is_refused_before_it_is_used_up():
    with pytest.raises(ConfigError, match="iterated again"):
        fit_temperature(drawn() for _ in range(3))


def test_logits_that_are_no_numbers_are_refused():
    logits, labels = drawn(voxels=5)
    logits[0, 3] = torch.nan
    with pytest.raises(SegcalError, match="logits must be finite"):
        fit_temperature([(logits, labels)])


def test_a_fitted_temperature_comes_back_from_its_file(tmp_path):
    fitted = fit_temperature([drawn(3)])
    fitted.save(tmp_path / "t.json")
    assert Temperature.load(tmp_path / "t.json") == fitted


def test_a_temperature_chosen_by_hand_comes_back_from_its_file(tmp_path):
    Temperature(1.5).save(tmp_path / "t.json")
    json.loads((tmp_path / "t.json").read_text(), parse_constant=pytest.fail)  # NaN is no JSON
    assert Temperature.load(tmp_path / "t.json").temperature == 1.5


GOOD = {"format": "segcal temperature 1", "temperature": 1.5}


@pytest.mark.parametrize(
    "content",
    [
        "",
        "3",
        "[]",
        "{}",
        json.dumps({"temperature": 1.5}),
        json.dumps(GOOD | {"format": "another"}),
        json.dumps(GOOD | {"temperature": "warm"}),
        json.dumps(GOOD | {"temperature": None}),
        json.dumps(GOOD | {"temperature": 0}),
        json.dumps(GOOD | {"temperature": -2}),
        json.dumps(GOOD | {"temperature": 1e9}),
        json.dumps(GOOD | {"temperature": math.nan}),
        json.dumps(GOOD | {"unknown": 3}),
        json.dumps({"format": GOOD["format"]}),
    ],
)
def test_a_malformed_file_is_refused_by_its_name(tmp_path, content):
    (tmp_path / "t.json").write_text(content)
    with pytest.raises(SegcalError, match=r"t\.json"):
        Temperature.load(tmp_path / "t.json")


def test_bytes_and_missing_files_are_refused_by_their_name(tmp_path):
    (tmp_path / "t.json").write_bytes(b"\x80\x81\xff")
    with pytest.raises(SegcalError, match=r"t\.json must be a temperature"):
        Temperature.load(tmp_path / "t.json")
    with pytest.raises(FileError, match=r"none\.json must be a calibrator; No such file"):
        Temperature.load(tmp_path / "none.json")
