"""An unexpected error in one case is the failure of that case; the command continues with the others."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import layouts
import pytest
from cohorts import write_cohort
from typer.testing import CliRunner

from segcal._io.files import WriteError
from segcal._io.jobs import attempt
from segcal.audit.viewing import view
from segcal.cli import app
from segcal.evaluation.evaluation import Evaluation
from segcal.volumes import pair_cases

BROKEN = "case_5"
REPORT = "Please report it with the files of this case; SEGCAL_DEBUG=1 prints the traceback."


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    """Maps P and labels L of 12 cases, an evaluation, a calibrator and a quality file of them; and a dataset."""
    folder = write_cohort(tmp_path_factory.mktemp("data"), 12)
    maps, labels = folder / "P", folder / "L"
    for command in (
        ["evaluate", maps, labels, "--out", folder / "evaluation"],
        ["calibrate", "fit", maps, labels, "--method", "temperature", "--folds", 0, "--out", folder / "calibrator"],
        ["quality", "fit", folder / "evaluation", "--out", folder / "quality.json"],
    ):
        done = run(command)
        assert done.exit_code == 0, done.output
    layouts.write_acdc(folder / "dataset", patients=2)
    return folder


def run(words: list[Any]) -> Any:
    return CliRunner().invoke(app, [str(word) for word in words])


def break_case(monkeypatch, place: str, name: str) -> None:
    """Let a function, as "module:function", raise RuntimeError if the name is in one of its arguments."""
    module, _, attribute = place.partition(":")
    function = getattr(import_module(f"segcal.{module}"), attribute)

    def broken(*arguments: Any, **named: Any) -> Any:
        if any(name in str(getattr(each, "name", each)) for each in arguments):
            raise RuntimeError("no such lesion.")
        return function(*arguments, **named)

    monkeypatch.setattr(f"segcal.{module}.{attribute}", broken)


@pytest.mark.parametrize(
    ("command", "place", "result"),
    [
        ("evaluate P L --out OUT", "evaluation.cohort:measure_case", "11 cases evaluated, 1 failed"),
        ("lesions P L --out OUT", "lesions.cohort:find_lesions", "11 cases measured, 1 failed"),
        ("decide P --rule argmax --out OUT", "quality.deciding:decide_case", "11 label maps"),
        ("calibrate fit P L --method temperature --folds 0 --out OUT", "evaluation.cohort:measure_case", ""),
        ("calibrate apply calibrator P --out OUT", "calibration.applying:open_prediction", "11 maps"),
        ("quality apply quality.json P --out OUT", "evaluation.unlabelled:open_prediction", "queue.csv"),
        ("datasets check acdc dataset", "datasets.check:read_array", "1 problem"),
        ("report evaluation --predictions P --cases 12 --out OUT", "viewer.cases:view_case", "report: "),
        ("report evaluation --predictions P --labels L --worst 12 --out OUT", "plots.maps:case_maps", "report: "),
    ],
)
def test_an_unexpected_error_fails_one_case_and_no_other(command, place, result, data, tmp_path, monkeypatch):
    break_case(monkeypatch, place, "patient001_frame01_gt" if "acdc" in command else BROKEN)
    words = [tmp_path / "out" if word == "OUT" else data / word if (data / word).exists() else word
             for word in command.split()]  # fmt: skip
    done = run(words)
    assert done.exit_code == 1, done.output
    assert isinstance(done.exception, SystemExit)
    text = " ".join(done.output.split())
    assert "no such lesion. " + REPORT in text
    assert result in text


def test_an_audit_shows_the_other_cases_after_an_unexpected_error(data, tmp_path, monkeypatch):
    break_case(monkeypatch, "audit.viewing:view_case", BROKEN)
    evaluations = {"predictions": Evaluation.load(data / "evaluation" / "evaluation.npz")}
    files = {each.name: each for each in pair_cases(data / "P", data / "L").cases}
    messages = []
    shown = view(evaluations, files, tmp_path, images=None, number=12, say=messages.append, progress=lambda *_: None)
    assert len(list(shown)) == 11
    (message,) = messages
    assert message.startswith(f"{BROKEN} cannot be shown: unexpected error")


def test_a_report_of_which_no_case_can_be_read_is_not_written(data, tmp_path, monkeypatch):
    break_case(monkeypatch, "viewer.cases:view_case", "case")
    done = run(["report", data / "evaluation", "--predictions", data / "P", "--cases", 3, "--out", tmp_path / "page"])
    assert done.exit_code == 2, done.output
    assert not (tmp_path / "page").exists()


def raising(error: BaseException) -> None:
    raise error


@pytest.mark.parametrize(
    ("error", "kind", "message"),
    [
        (RuntimeError("two\nlines"), "RuntimeError", r"two\nlines. " + REPORT),
        (KeyError(), "KeyError", "KeyError. " + REPORT),
        (MemoryError(), "MemoryError", "reading or measuring this case failed: MemoryError."),
        (type("_ArrayMemoryError", (MemoryError,), {})("no room"), "MemoryError", "this case failed: no room."),
        (OSError("bad disk"), "OSError", "reading or measuring this case failed: bad disk."),
    ],
)
def test_errors_of_a_case_become_a_failure_of_one_line(error, kind, message):
    failure = attempt("case_1", raising, (error,))
    assert (failure.case, failure.kind) == ("case_1", kind)
    assert failure.message.endswith(message)
    assert "\n" not in failure.message


@pytest.mark.parametrize("error", [KeyboardInterrupt(), WriteError(28, "No space left on device", "out")])
def test_ctrl_c_and_a_full_disk_end_all_cases(error):
    with pytest.raises(type(error)):
        attempt("case_1", raising, (error,))


def test_the_traceback_of_an_unexpected_error_is_printed_on_demand(monkeypatch, capsys):
    attempt("case_1", raising, (RuntimeError("no such lesion"),))
    assert capsys.readouterr().err == ""
    monkeypatch.setenv("SEGCAL_DEBUG", "1")
    failure = attempt("case_1", raising, (RuntimeError("no such lesion"),))
    printed = capsys.readouterr().err
    assert printed.startswith("Traceback")
    assert "in raising" in printed
    assert failure.message.startswith("unexpected error in jobs.py, line ")
