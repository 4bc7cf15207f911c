"""`segcal doctor`: every backend is compared with the reference, a wrong one is named, and the advice follows."""

from __future__ import annotations

import json
import math

import pytest
import torch
from typer.testing import CliRunner

from segcal import ConfigError
from segcal.cli import app
from segcal.doctor import BackendCheck, check_backend, checks, diagnose
from segcal.doctor.diagnosis import recommend
from segcal.kernels import numba_cpu


@pytest.fixture(autouse=True)
def quick(monkeypatch) -> None:
    monkeypatch.setattr(checks, "TIMED_SHAPE", (1, 2, 8, 8, 8))
    monkeypatch.setattr(checks, "REPEATS", 1)
    monkeypatch.delenv("SEGCAL_BACKEND", raising=False)


def run(*options: str):
    return CliRunner().invoke(app, ["doctor", *options])


@pytest.fixture
def broken(monkeypatch) -> None:
    """numba with one voxel too many in each sum."""
    right = numba_cpu.forward

    def forward(*arguments):
        sums = right(*arguments)
        return sums._replace(moments=sums.moments + 1)

    monkeypatch.setattr(numba_cpu, "forward", forward)


def test_all_backends_agree_here():
    done = run()
    assert done.exit_code == 0, done.output
    for word in ("segcal 0.", "Python 3.", "torch 2.", "numba*", "cpu:", "Leave SEGCAL_BACKEND unset"):
        assert word in done.stdout
    assert "NO" not in done.stdout


def test_json_holds_versions_devices_checks_and_the_advice():
    done = run("--json")
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert found["versions"]["torch"] == torch.__version__
    assert found["devices"][0]["name"] == "cpu"
    assert found["picked"]["cpu"] == "numba"
    assert {check["backend"] for check in found["checks"] if check["device"] == "cpu"} == {"torch", "numba"}
    assert all(check["agrees"] and check["milliseconds"]["SegmentationLoss"] > 0 for check in found["checks"])
    assert (found["agrees"], found["setting"]) == (True, None)


@pytest.mark.usefixtures("broken")
def test_a_backend_with_wrong_values_is_named_and_ends_in_exit_code_1():
    done = run()
    assert done.exit_code == 1
    assert "numba on cpu: bin_statistics, hard bins, softmax: values must be within" in done.stdout
    assert "Set SEGCAL_BACKEND=torch: numba on cpu disagrees with the reference." in done.stdout


@pytest.mark.usefixtures("broken")
def test_json_of_a_disagreement_names_it_too():
    done = run("--json")
    assert done.exit_code == 1
    found = json.loads(done.stdout)
    assert [check["backend"] for check in found["checks"] if not check["agrees"]] == ["numba"]
    assert (found["agrees"], found["setting"]) == (False, "torch")


def test_a_backend_with_wrong_gradients_alone_is_found(monkeypatch):
    right = numba_cpu.backward
    monkeypatch.setattr(numba_cpu, "backward", lambda *arguments: right(*arguments) * 1.0001)
    found = check_backend("numba", "cpu")
    assert not found.agrees
    assert all("gradients must be within" in text for text in found.complaints)


@pytest.mark.parametrize("wrong", [math.nan, math.inf])
def test_a_backend_that_gives_no_number_is_found_and_json_has_none_either(monkeypatch, wrong):
    right = numba_cpu.backward
    monkeypatch.setattr(numba_cpu, "backward", lambda *arguments: right(*arguments) * wrong)
    done = run("--json")
    assert done.exit_code == 1
    (check,) = [check for check in json.loads(done.stdout)["checks"] if check["backend"] == "numba"]
    assert check["gradient_difference"] is None


def test_a_backend_that_fails_is_named_with_the_reason(monkeypatch):
    def fail(*arguments):
        raise RuntimeError("no compiler here")

    monkeypatch.setattr(numba_cpu, "forward", fail)
    found = check_backend("numba", "cpu")
    assert len(found.complaints) == 8
    assert found.complaints[0] == "bin_statistics, hard bins, softmax: RuntimeError: no compiler here"
    assert math.isnan(found.value_difference)
    assert not found.milliseconds


def test_a_variable_that_names_no_backend_is_refused(monkeypatch):
    monkeypatch.setenv("SEGCAL_BACKEND", "cuda")
    with pytest.raises(ConfigError, match="SEGCAL_BACKEND must be one of"):
        diagnose()
    assert run().exit_code == 2


def check(device: str, backend: str, milliseconds: float, *complaints: str) -> BackendCheck:
    times = {} if complaints else {"bin_statistics": milliseconds, "SegmentationLoss": milliseconds}
    return BackendCheck(backend, device, 0.0, 0.0, complaints, times)


CPU = [check("cpu", "torch", 9.0), check("cpu", "numba", 3.0)]


@pytest.mark.parametrize(
    ("found", "now", "setting", "told"),
    [
        (CPU, None, None, "Leave SEGCAL_BACKEND unset: what segcal picks by itself agrees"),
        (CPU, "torch", None, "Unset SEGCAL_BACKEND: what segcal picks"),
        ([*CPU, check("cuda:0", "torch", 4.0)], None, None, "Leave SEGCAL_BACKEND unset"),
        ([*CPU, check("cuda:0", "torch", 4.0, "bad")], None, None, "keep tensors on the CPU"),
        ([CPU[0], check("cpu", "numba", 3.0, "bad")], None, "torch", "Set SEGCAL_BACKEND=torch: numba on cpu"),
    ],
)
def test_the_advice_is_what_agrees(found, now, setting, told, monkeypatch):
    if now is not None:
        monkeypatch.setenv("SEGCAL_BACKEND", now)
    advised, sentence = recommend(found)
    assert advised == setting
    assert told in sentence
