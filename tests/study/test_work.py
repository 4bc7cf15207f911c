"""Calibrators of a study are judged on validation cases that they were not fitted to; fitted to all, on test cases."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from layouts import write_acdc
from typer.testing import CliRunner

from segcal import Evaluation, SegcalError, ace, bin_statistics
from segcal._io.jobs import Failure
from segcal.calibrators import make_calibrator
from segcal.cli import app
from segcal.study import do_runs, open_study, read_study, work
from segcal.study.figures import Drawn
from segcal.study.summary import collect
from segcal.training.runs import load_run

pytestmark = pytest.mark.usefixtures("one_thread")
STUDY = """
title = "Calibrators"
methods = ["dice-ce", "dice-ce + isotonic"]
preset = "paper"
[datasets.ACDC]
dataset = "acdc"
root = "data/database"
[set]
network.options = {{init_filters = 4, blocks_down = [1, 1], norm = "BATCH", dsdepth = 2}}
data.patch = [16, 16, 4]
data.split = "{split}"
training.epochs = 1
training.validate_every = 1
"""
SIDES = {1: "train", 2: "validation", 3: "validation", 4: "validation", 5: "test"}


def write_study(folder, sides=SIDES):
    write_acdc(folder / "data", patients=5)
    lines = [f"{side} patient{number:03d}" for number, side in sides.items()]
    (folder / "split.txt").write_text("\n".join(lines))
    (folder / "mine.toml").write_text(STUDY.format(split=folder / "split.txt"))
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_study(tmp_path_factory.mktemp("study"))


@pytest.fixture(scope="module")
def shop(folder, one_thread):
    shop = open_study(read_study(folder / "mine.toml"), folder / "out")
    said: list[str] = []
    do_runs(shop, say=said.append)
    assert said == [f"{name} is done" for name in shop.plan.runs]
    return shop


def saved(shop, place):
    (run,) = shop.plan.runs
    return Evaluation.load(shop.runs / run / place / "evaluation.npz")


def test_a_validation_case_is_measured_without_its_patient_and_a_test_case_with_all(shop):
    """By hand: isotonic regression fitted to the other patients, which overfits six small images."""
    (name,) = shop.plan.runs
    run = load_run(shop.runs / name, root=shop.plan.runs[name].config.data.root)
    cases = run.cases("validation")
    logits = list(run.logits_and_labels("validation"))
    found = saved(shop, "calibrated/isotonic/validation")
    inside = []

    def error(calibrator, values, labels):
        probabilities = calibrator.transform(values).softmax(0).double()
        return ace(bin_statistics(probabilities[None], labels[None]))[0, 1:]

    for i, case in enumerate(cases):
        others = [logits[j] for j, each in enumerate(cases) if each.patient != case.patient]
        assert len(others) == 4
        expected = error(make_calibrator("isotonic").fit(others), *logits[i])
        own = found.foreground().case_metrics()["ace"][found.cases.index(case.name)]
        np.testing.assert_allclose(own, expected, atol=1e-5)
    whole = make_calibrator("isotonic").fit(logits)
    for values, labels in logits:
        truth = torch.nn.functional.one_hot(labels.long(), len(values)).movedim(-1, 0)
        inside.append(((whole.transform(values).softmax(0) - truth) ** 2).flatten(1).mean(1)[1:])
    outside = found.foreground().case_metrics()["brier"].mean().item()
    assert outside > 1.005 * torch.stack(inside).mean().item()  # to what it was fitted to it looks better
    assert "cross-fitted: 3 of them" in found.provenance["run"]["calibrator"]
    (values, labels), *_ = run.logits_and_labels("test")
    tested = saved(shop, "calibrated/isotonic/test").foreground().case_metrics()["ace"][0]
    np.testing.assert_allclose(tested, error(whole, values, labels), atol=1e-5)


def test_validation_numbers_are_those_of_the_cross_fit(shop):
    results = collect(shop)
    (run,) = [each for each in results.datasets[0].run_values["validation"] if "isotonic" in each.method]
    assert run.values["macro-ace"] == saved(shop, "calibrated/isotonic/validation").means()["macro", "ace"]
    assert not any("without validation results" in note for note in results.notes)


def test_results_of_a_fit_to_the_same_cases_are_done_again_and_nothing_else(shop, monkeypatch):
    (run,) = shop.plan.runs.values()
    done = shop.runs / run.name / work.DONE
    facts = json.loads(done.read_text())
    before = saved(shop, "calibrated/isotonic/validation").case_metrics()["ace"]
    old = {name: value for name, value in facts.items() if name != "validation"}
    done.write_text(json.dumps({**old, "fittings": ["calibrated/isotonic", "calibrated/other"]}))
    (shop.runs / run.name / "calibrated/isotonic/validation/evaluation.npz").write_bytes(b"in-sample")
    assert not shop.is_done(run)
    assert "not there yet" in " ".join(collect(shop).remarks)
    fitted = []
    monkeypatch.setattr(work, "spooled", lambda *_: fitted.append(1))
    do_runs(shop)
    assert shop.is_done(run)
    assert json.loads(done.read_text())["fittings"] == ["calibrated/isotonic"]  # the other one is not known to be fair
    assert torch.equal(saved(shop, "calibrated/isotonic/validation").case_metrics()["ace"], before)
    assert fitted == []


def test_killed_between_two_fits_it_goes_on_to_the_same_numbers(shop, tmp_path, monkeypatch):
    write_study(tmp_path)
    script = (
        "import os, signal, segcal.calibrators.calibrator as c, segcal.study as study\n"
        "fits, save = [], c.Calibrator.save\n"
        "def die(self, path):\n"
        "    if 'calibrated' in str(path):\n"
        "        fits.append(path)\n"
        "        if len(fits) == 3: os.kill(os.getpid(), signal.SIGKILL)\n"
        "    save(self, path)\n"
        "c.Calibrator.save = die\n"
        f"shop = study.open_study(study.read_study({str(tmp_path / 'mine.toml')!r}), {str(tmp_path / 'out')!r})\n"
        "study.do_runs(shop)\n"
    )
    ended = subprocess.run([sys.executable, "-c", script], check=False, env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert ended.returncode == -signal.SIGKILL
    assert len(list((tmp_path / "out").glob("runs/*/calibrated/isotonic/folds/*.json"))) == 2
    again = open_study(read_study(tmp_path / "mine.toml"), tmp_path / "out")
    do_runs(again)
    for side in ("validation", "test"):
        one, two = (saved(each, f"calibrated/isotonic/{side}") for each in (shop, again))
        assert torch.equal(one.case_metrics()["ace"], two.case_metrics()["ace"])


def test_with_one_validation_patient_a_calibrator_has_no_validation_results_and_a_note(tmp_path, monkeypatch):
    monkeypatch.setattr("segcal.study.running.write_figures", lambda *_: Drawn((), ()))
    write_study(tmp_path, SIDES | {3: "train", 4: "train"})
    done = CliRunner().invoke(app, ["study", "run", str(tmp_path / "mine.toml"), "--out", str(tmp_path / "out")])
    assert done.exit_code == 0, done.output
    note = "ACDC, without validation results: dice-ce + isotonic. A calibrator is measured on validation cases that it"
    assert note in " ".join(done.stdout.split())
    assert note in (tmp_path / "out" / "report.html").read_text()
    assert not list((tmp_path / "out").glob("runs/*/calibrated/*/validation"))


def test_a_run_tells_how_many_cases_failed_and_why():
    failures = [Failure(f"case_{i}", "GridError", f"is off by {i}.") for i in range(5)]
    with pytest.raises(SegcalError, match=r"5 failed: case_0: is off by 0; .*; case_2: is off by 2 and 2 more\."):
        work._need_all(SimpleNamespace(measured=None, failures=failures))


def test_results_of_a_study_whose_baseline_is_gone_do_not_stay(shop, tmp_path, monkeypatch):
    """Tables, figures and page are of what is there now."""
    out = shop.out
    command = ["study", "report", str(out)]
    assert CliRunner().invoke(app, command).exit_code == 0
    assert "Macro-ACE" in (out / "results" / "results.md").read_text()
    assert (out / "figures" / "pareto.png").exists()
    (run,) = shop.plan.runs
    done = shop.runs / run / work.DONE
    facts = done.read_text()
    done.unlink()
    try:
        assert CliRunner().invoke(app, command).exit_code == 1
    finally:
        done.write_text(facts)
    assert "ACE" not in (out / "results" / "results.md").read_text()
    assert not list((out / "figures").glob("*.png"))
    assert "nothing to compare with yet" in (out / "report.html").read_text()
