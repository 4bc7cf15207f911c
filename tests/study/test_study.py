"""The phantom study, reduced: from start to report, killed half-way and taken up again, by one process or several."""

from __future__ import annotations

import csv
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import scipy.stats
from typer.testing import CliRunner

from segcal.cli import app
from segcal.datasets import make_phantom
from segcal.study import make_plan, open_study, read_study
from segcal.study.figures import Drawn
from segcal.study.overview import overview
from segcal.study.work import CROSS_FITTED

METHODS = ["dice-ce", "ce", "dice-ce + temperature", "hard-ace", "soft-ace"]
REDUCED = ["--set", "training.epochs=2", "--set", "training.validate_every=2"]


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return make_phantom(tmp_path_factory.mktemp("data"), cases=10)


@pytest.fixture
def no_figures(monkeypatch):
    """Drawing takes longer than the rest of a reduced study; once is enough."""
    monkeypatch.setattr("segcal.study.running.write_figures", lambda *_: Drawn((), ()))


def study(*arguments: object):
    return CliRunner().invoke(app, ["study", *map(str, arguments)])


@pytest.fixture(scope="module")
def whole(root, tmp_path_factory, one_thread):
    """The reduced study, done in one go."""
    out = tmp_path_factory.mktemp("study") / "out"
    done = study("phantom", "--out", out, "--data", f"phantom={root}", *REDUCED)
    assert done.exit_code == 0, done.output
    return out, done


@pytest.fixture(scope="module")
def tables(whole):
    """The files of tables as they were first written."""
    return {path.name: path.read_bytes() for path in (whole[0] / "results").iterdir() if path.name != "runs.csv"}


def rows_of(path: Path):
    return list(csv.DictReader(path.read_text(encoding="utf-8").splitlines()))


def arms(out: Path):
    return open_study(read_study(out / "study.toml"), out).plan.arms


def test_tables_figures_and_page_are_there(whole):
    out, done = whole
    assert {path.name for path in (out / "results").iterdir()} == {
        "results.md", "results.tex", "results.csv", "runs.csv", "choice.json",
    }  # fmt: skip
    page = (out / "report.html").read_text(encoding="utf-8")
    assert all(method in page and method in done.stdout for method in METHODS)
    for name in ("histograms", "radar-phantom", "pareto", "maps-phantom-1", "maps-phantom-2"):
        assert (out / "figures" / f"{name}.png").stat().st_size > 5000
        assert (out / "figures" / f"{name}.pdf").exists()
    assert [row["method"] for row in rows_of(out / "results" / "runs.csv")] == METHODS
    assert "4 runs" in done.stderr
    assert "4 runs: 4 done" in study(out, "--status").stdout


def test_every_number_of_the_tables_follows_from_the_files_of_cases(whole):
    """A few lines of numpy and scipy on what `evaluate` wrote, and nothing of segcal."""
    out, _ = whole
    values: dict[str, dict[tuple[str, str], dict[str, float]]] = {}
    for arm in arms(out):
        found = values.setdefault(arm.method, {})
        for row in rows_of(arm.results(out / "runs", "test") / "cases.csv"):
            found.setdefault((row["metric"], row["class"]), {})[row["case"]] = float(row["value"])
    cases = list(values["dice-ce"]["dice", "organ"])
    classes = ("organ", "core", "vessel")

    def column(method: str, metric: str, label: str) -> np.ndarray:
        if label:
            return np.array([values[method][metric, label][case] for case in cases])
        return np.nanmean([column(method, metric, name) for name in classes], 0)

    checked = 0
    for row in rows_of(out / "results" / "results.csv"):
        if row["average"] != "macro" or row["cases"] != "all" or row["metric"] not in ("dice", "ace", "ece", "mce"):
            continue
        own, base = (column(name, row["metric"], row["class"]) for name in (row["method"], "dice-ce"))
        known = own[~np.isnan(own)]
        assert float(row["value"]) == pytest.approx(known.mean(), abs=1e-12)
        assert float(row["std"]) == pytest.approx(known.std(ddof=1), abs=1e-12)
        if row["method"] == "dice-ce":
            continue
        both = ~np.isnan(own) & ~np.isnan(base)
        mean, before = known.mean(), np.nanmean(base)
        change = mean - before if row["metric"] == "dice" else mean / before - 1
        assert float(row["change"]) == pytest.approx(change, abs=1e-9)
        if (own[both] != base[both]).any():
            assert float(row["p_t"]) == pytest.approx(scipy.stats.ttest_rel(own[both], base[both]).pvalue, rel=1e-6)
            wilcoxon = scipy.stats.wilcoxon(own[both], base[both]).pvalue
            assert float(row["p_wilcoxon"]) == pytest.approx(wilcoxon, rel=1e-6)
        checked += 1
    assert checked == 4 * 4 * 4  # methods beside the baseline, metrics, classes and their mean
    text = (out / "results" / "results.md").read_text(encoding="utf-8")
    for method in METHODS:
        dice, ace = column(method, "dice", ""), column(method, "ace", "")
        assert f"{dice.mean():.3f} ± {dice.std(ddof=1):.3f}" in text
        assert f"{ace.mean():.3f} ± {ace.std(ddof=1):.3f}" in text


def test_the_choice_is_made_on_validation_cases_and_told_with_its_test_result(whole):
    out, done = whole
    (choice,) = json.loads((out / "results" / "choice.json").read_text())
    rows = rows_of(out / "results" / "runs.csv")
    budget = float(rows[0]["validation dsc"]) - 0.005
    within = [row for row in rows if float(row["validation dsc"]) >= budget]
    best = min(within, key=lambda row: float(row["validation macro-ace"]))
    assert choice["method"] == best["method"]
    assert choice["test"]["macro-ace"] == float(best["test macro-ace"])
    assert f"{best['method']} has the lowest macro-ACE there" in " ".join(done.stdout.split())


def test_another_rule_needs_no_run_again(whole, tables, no_figures):
    def times():
        return {path: path.stat().st_mtime_ns for path in (out / "runs").rglob("*") if path.is_file()}

    out, _ = whole
    before = times()
    done = study(out, "--results", "--choose", "dsc >= 0")
    assert done.exit_code == 0, done.output
    assert json.loads((out / "results" / "choice.json").read_text())[0]["rule"] == "dsc >= 0"
    assert times() == before


def test_killed_half_way_it_goes_on_to_the_same_tables(root, tables, tmp_path, no_figures):
    out = tmp_path / "killed"
    command = [sys.executable, "-m", "segcal", "study", "phantom", "--out", str(out), "--data", f"phantom={root}"]
    log = (tmp_path / "log.txt").open("wb")
    process = subprocess.Popen([*command, *REDUCED], env=os.environ | {"OMP_NUM_THREADS": "1"}, stdout=log, stderr=log)
    deadline = time.monotonic() + 240
    while len(list(out.glob("runs/*/last.pt"))) < 2 and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()
    log.close()
    assert process.returncode == -signal.SIGKILL, (tmp_path / "log.txt").read_text()
    found = overview(open_study(read_study(out / "study.toml"), out))
    assert (found.count("done"), found.count("running")) == (1, 0)  # the dead hold nothing
    done = study("phantom", "--out", out, "--data", f"phantom={root}", *REDUCED)
    assert done.exit_code == 0, done.output
    assert {name: (out / "results" / name).read_bytes() for name in tables} == tables


def test_what_is_done_is_not_done_again_and_a_change_reruns_what_it_touches(root, whole, monkeypatch, no_figures):
    out, _ = whole
    trained = []
    monkeypatch.setattr("segcal.study.work.train", lambda config, *_, **__: trained.append(config) or 1 / 0)
    file = out.parent / "changed.toml"
    text = (out / "study.toml").read_text(encoding="utf-8")
    file.write_text(text.replace('"soft-ace",', '"softer",').replace("[variants]", SOFTER), encoding="utf-8")
    done = study(file, "--out", out, "--data", f"phantom={root}")
    assert [config.loss.ace.bins for config in trained] == [7]  # and none of the others
    assert done.exit_code == 1
    assert "softer, seed 0: not there yet" in " ".join(done.output.split())
    assert "ZeroDivisionError" in done.stderr
    assert all(method in done.stdout for method in METHODS[:4])  # the others are compared


SOFTER = """
[variants.softer]
method = "soft-ace"
set.loss.ace.bins = 7
"""


def test_a_run_that_fails_stops_no_other_and_is_tried_again_by_the_next_command(root, tmp_path, monkeypatch):
    shop = open_study(read_study("phantom", changes=["training.epochs=1"]), tmp_path, data=[f"phantom={root}"])
    tried = []

    def fail(run, *_):
        tried.append(run.config.method)
        if run.config.method != "ce":
            return {"fittings": [fitting.folder for fitting in run.fittings], "validation": CROSS_FITTED}
        raise MemoryError("no room")

    monkeypatch.setattr("segcal.study.work.execute", fail)
    said: list[str] = []
    shop.work(say=said.append)
    assert tried == ["dice-ce", "ce", "hard-ace", "soft-ace"]
    states = {state.name.split("-seed")[0]: state for state in shop.states()}
    assert states["phantom-ce"].status == "failed"
    assert states["phantom-ce"].message == "MemoryError: no room"
    assert any("MemoryError: no room" in text for text in said)
    assert "no room" in (shop.runs / states["phantom-ce"].name / "failed.log").read_text()
    shop.work(again=False)
    assert len(tried) == 4
    monkeypatch.setattr("segcal.study.work.execute", lambda run, *_: tried.append("again") or {"fittings": []})
    shop.work()
    assert tried[4:] == ["again"]
    assert overview(shop).count("done") == 4


def test_workers_share_the_runs(root, tmp_path):
    """Two real processes, on steps that only take time; each run is done by one of them."""
    script = (
        "import sys, time, os, segcal.study.work as work\n"
        "def execute(run, folder, prepared, tell):\n"
        "    folder.mkdir(parents=True, exist_ok=True)\n"
        "    with (folder / 'by.txt').open('a') as file: file.write(f'{os.getpid()}\\n')\n"
        "    for i in range(10): time.sleep(0.05); tell('training', i, 10)\n"
        "    return {'fittings': [f.folder for f in run.fittings], 'validation': work.CROSS_FITTED}\n"
        "work.execute = execute\n"
        "from segcal.cli import app\n"
        "app(['study', *sys.argv[1:], '--worker'])\n"
    )
    open_study(read_study("phantom", changes=["training.epochs=1"]), tmp_path, data=[f"phantom={root}"])
    command = [sys.executable, "-c", script, str(tmp_path / "study.toml"), "--out", str(tmp_path)]
    workers = [subprocess.Popen(command) for _ in range(2)]
    assert [worker.wait() for worker in workers] == [0, 0]
    by = {path.parent.name: path.read_text().split() for path in tmp_path.glob("runs/*/by.txt")}
    assert len(by) == 4
    assert all(len(pids) == 1 for pids in by.values())


def test_a_dry_run_lists_runs_epochs_hours_and_what_is_missing(monkeypatch, tmp_path):
    monkeypatch.delenv("SEGCAL_DATA", raising=False)
    done = study("paper", "--dry-run")
    assert done.exit_code == 1  # data are missing
    text = " ".join(done.stdout.split())
    assert "16 runs: about" in text
    assert "GPU hours" in text
    for word in ("1250", "600", "ACDC 17: the folder ACDC must be there", "KiTS 23: the folder KiTS"):
        assert word in text
    assert not list(tmp_path.iterdir())


def test_the_list_names_every_study():
    done = study("--list")
    for name in ("paper:", "sensitivity:", "hippocampus:", "acdc-small:", "phantom:", "phantom-sensitivity:"):
        assert name in done.stdout


def test_slurm_prints_a_job_for_each_open_run(root, tmp_path):
    done = study("phantom", "--out", tmp_path, "--data", f"phantom={root}", "--slurm")
    assert done.exit_code == 0, done.output
    assert "#SBATCH --array=0-3" in done.stdout
    assert f"{tmp_path}/study.toml" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        (["phantom"], "STUDY and --out must be given"),
        (["phantom", "--out", "x", "--status", "--worker"], "must do; got"),
        (["phantom", "--out", "x", "--only", "a"], "--only must come with --worker"),
        (["nothing", "--out", "x"], "a study must be a .toml file"),
        (["phantom", "--out", "x", "--set", "training.epochs"], "key=value"),
        (["phantom", "--out", "x", "--choose", "dsc"], "a condition must be"),
        (["phantom", "--out", "x", "--worker", "--only", "a"], "--only"),
    ],
)
def test_what_makes_no_sense_is_refused_before_anything_runs(arguments, what, root, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = study(*arguments, "--data", f"phantom={root}")
    assert done.exit_code == 2, done.output
    assert what in " ".join(done.output.split())
    assert not list(tmp_path.glob("x/runs/*"))


def test_without_any_data_it_ends_with_where_it_looked(monkeypatch, tmp_path):
    monkeypatch.delenv("SEGCAL_DATA", raising=False)
    done = study("hippocampus", "--out", tmp_path / "out", "--data", tmp_path)
    assert done.exit_code == 2
    assert "Task04_Hippocampus must be there" in " ".join(done.output.split())


def test_the_overview_counts_and_foretells(root, tmp_path):
    shop = open_study(read_study("phantom", changes=["training.epochs=1"]), tmp_path, data=[f"phantom={root}"])
    names = list(
        make_plan(read_study("phantom", changes=["training.epochs=1"]), tmp_path, data=[f"phantom={root}"]).runs
    )
    (shop.runs / names[0]).mkdir(parents=True)
    done = {"fittings": ["calibrated/temperature"], "validation": CROSS_FITTED, "seconds": 100.0}
    (shop.runs / names[0] / "done.json").write_text(json.dumps(done))
    with shop.claims.take(names[1]) as claim:  # type: ignore[union-attr]
        claim.tell(stage="training", share=0.5, seconds=50.0)
        for _ in range(100):
            found = overview(shop)
            if found.states[1].share:
                break
            time.sleep(0.1)
        assert [state.status for state in found.states] == ["done", "running", "waiting", "waiting"]
        assert found.seconds_left == pytest.approx(250.0)  # half a run and two, 100 s each, by one process
        assert found.line == "4 runs: 1 done, 1 running, 0 failed, 2 waiting, about 4 min left"
