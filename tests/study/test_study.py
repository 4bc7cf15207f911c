"""The phantom study, reduced: from start to report, killed half-way and taken up again, by one process or several."""

from __future__ import annotations

import csv
import json
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
import scipy.stats
import studies
import workers
from typer.testing import CliRunner

from segcal._io.files import locked
from segcal.cli import app
from segcal.datasets import make_phantom
from segcal.study import do_runs, load_study, open_study, read_study, running, work
from segcal.study.figures import Drawn
from segcal.study.overview import overview
from segcal.study.work import CROSS_FITTED, PROGRESS

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
    done = study("run", "phantom", "--out", out, "--data", f"phantom={root}", *REDUCED)
    assert done.exit_code == 0, done.output
    return out, done


@pytest.fixture(scope="module")
def tables(whole):
    """The files of tables as they were first written."""
    return {path.name: path.read_bytes() for path in (whole[0] / "results").iterdir() if path.name != "runs.csv"}


def rows_of(path: Path):
    return list(csv.DictReader(path.read_text(encoding="utf-8").splitlines()))


def arms(out: Path):
    return load_study(out).plan.arms


def test_tables_figures_and_page_are_there(whole):
    out, done = whole
    assert {path.name for path in (out / "results").iterdir()} == {
        "results.md", "results.tex", "results.csv", "runs.csv",
    }  # fmt: skip
    page = (out / "report.html").read_text(encoding="utf-8")
    assert all(method in page and method in done.stdout for method in METHODS)
    for name in ("histograms", "radar-phantom", "pareto", "maps-phantom-1", "maps-phantom-2"):
        assert (out / "figures" / f"{name}.png").stat().st_size > 5000
        assert (out / "figures" / f"{name}.pdf").exists()
    assert [row["method"] for row in rows_of(out / "results" / "runs.csv")] == METHODS
    assert "4 runs" in done.stderr
    assert "4 runs: 4 done" in study("status", out).stdout


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


def test_a_report_needs_no_run_again(whole, no_figures):
    def times():
        return {path: path.stat().st_mtime_ns for path in (out / "runs").rglob("*") if path.is_file()}

    out, _ = whole
    before = times()
    done = study("report", out)
    assert done.exit_code == 0, done.output
    assert times() == before


def test_killed_half_way_it_goes_on_to_the_same_tables(root, tables, tmp_path, no_figures):
    out = tmp_path / "killed"
    command = [
        sys.executable,
        "-m",
        "segcal",
        "study",
        "run",
        "phantom",
        "--out",
        str(out),
        "--data",
        f"phantom={root}",
    ]
    log = (tmp_path / "log.txt").open("wb")
    process = subprocess.Popen([*command, *REDUCED], env=os.environ | {"OMP_NUM_THREADS": "1"}, stdout=log, stderr=log)
    deadline = time.monotonic() + 240
    while len(list(out.glob("runs/*/last.pt"))) < 2 and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()
    log.close()
    assert process.returncode == -signal.SIGKILL, (tmp_path / "log.txt").read_text()
    found = overview(load_study(out))
    assert (found.count("done"), found.count("running")) == (1, 0)  # the dead hold nothing
    done = study("run", "phantom", "--out", out, "--data", f"phantom={root}", *REDUCED)
    assert done.exit_code == 0, done.output
    assert {name: (out / "results" / name).read_bytes() for name in tables} == tables


def test_what_is_done_is_not_done_again_and_a_change_reruns_what_it_touches(root, whole, monkeypatch, no_figures):
    out, _ = whole
    trained = []
    monkeypatch.setattr("segcal.study.work.train", lambda config, *_, **__: trained.append(config) or 1 / 0)
    file = out.parent / "changed.toml"
    text = (out / "study.toml").read_text(encoding="utf-8")
    file.write_text(text.replace('"soft-ace",', '"softer",').replace("[variants]", SOFTER), encoding="utf-8")
    done = study("run", file, "--out", out, "--data", f"phantom={root}")
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
    do_runs(shop, say=said.append)
    assert tried == ["dice-ce", "ce", "hard-ace", "soft-ace"]
    states = {state.name.split("-seed")[0]: state for state in shop.states()}
    assert states["phantom-ce"].status == "failed"
    assert states["phantom-ce"].message == "MemoryError: no room"
    assert any("MemoryError: no room" in text for text in said)
    assert "no room" in (shop.runs / states["phantom-ce"].name / "failed.log").read_text()
    assert len(tried) == 4
    monkeypatch.setattr("segcal.study.work.execute", lambda run, *_: tried.append("again") or {"fittings": []})
    do_runs(shop)
    assert tried[4:] == ["again"]
    assert overview(shop).count("done") == 4


@pytest.fixture
def shop(root, tmp_path):
    """A study whose runs are open."""
    return open_study(read_study("phantom", changes=["training.epochs=1"]), tmp_path, data=[f"phantom={root}"])


def done_by(shop):
    """The processes that did each run."""
    return {path.parent.name: path.read_text().split() for path in shop.runs.glob("*/by.txt")}


def test_processes_share_the_runs(shop, monkeypatch):
    """Two real processes, on steps that only take time; each run is done by one of them."""
    monkeypatch.setattr(running, "do_run", workers.idle_run)
    said: list[str] = []
    do_runs(shop, jobs=2, say=said.append)
    by = done_by(shop)
    assert sorted(by) == sorted(shop.plan.runs)
    assert all(len(pids) == 1 for pids in by.values())
    assert str(os.getpid()) not in {pid for pids in by.values() for pid in pids}
    assert sorted(said) == sorted(f"{name} is done" for name in by)
    assert not list(shop.runs.glob(f"*/{PROGRESS}"))


def test_a_run_that_kills_its_processes_fails_and_stops_no_other(shop, monkeypatch):
    monkeypatch.setattr(running, "do_run_apart", work.do_run)
    facts = {"validation": CROSS_FITTED}
    monkeypatch.setattr(work, "execute", lambda run, *_: facts | {"fittings": [f.folder for f in run.fittings]})

    def executor(function, asked):
        for i, job in enumerate(asked):
            yield i, BrokenProcessPool() if job[0].config.method == "ce" else function(*job)

    do_runs(shop, executor=executor)
    states = {state.name.split("-seed")[0]: state for state in shop.states()}
    assert [name for name, state in states.items() if state.status == "failed"] == ["phantom-ce"]
    assert states["phantom-ce"].message.startswith("CrashError: the processes that did this run died;")
    assert overview(shop).count("done") == 3


def test_a_run_that_another_process_holds_is_left_and_then_waited_for(shop, monkeypatch):
    facts = {"validation": CROSS_FITTED}
    monkeypatch.setattr(work, "execute", lambda run, *_: facts | {"fittings": [f.folder for f in run.fittings]})
    monkeypatch.setattr(work, "PATIENCE_S", 0.1)
    name = list(shop.plan.runs)[1]
    folder = shop.runs / name
    folder.mkdir(parents=True)
    with locked(folder / ".lock", folder):
        done = study("run", shop.out, "--only", name)
        assert done.exit_code == 1
        assert f"{name} is left alone: another process is at it" in done.stderr
        assert not list(folder.glob("*.json"))
    held = ExitStack()
    held.enter_context(locked(folder / ".lock", folder))
    said: list[str] = []

    def release(text: str) -> None:
        said.append(text)
        if text.startswith(f"{name} is left"):
            threading.Timer(2, held.close).start()

    do_runs(shop, say=release)
    assert said[1] == f"{name} is left alone: another process is at it"
    assert said[-1] == f"{name} is done"
    assert len(said) == 5
    assert study("run", shop.out, "--only", name).exit_code == 0


@pytest.mark.long
@pytest.mark.usefixtures("one_thread")
def test_a_worker_that_is_killed_loses_nothing(tmp_path, monkeypatch):
    """Its run resumes from the last checkpoint, and ends with the numbers of an undisturbed study."""
    monkeypatch.setattr(os, "cpu_count", lambda: 1)  # one thread in every process, also when a run is tried alone
    file = studies.write_study(tmp_path)
    serial, killed = (open_study(read_study(file), tmp_path / name) for name in ("serial", "killed"))
    do_runs(serial)
    with studies.killing(killed.out, lambda pid: pid) as deaths:
        do_runs(killed, jobs=2)
    assert overview(killed).count("done") == 2
    studies.check_resumed(deaths)
    assert studies.numbers(killed.out) == studies.numbers(serial.out)


def test_a_plan_lists_runs_epochs_steps_and_what_is_missing(monkeypatch, tmp_path):
    monkeypatch.delenv("SEGCAL_DATA", raising=False)
    done = study("plan", "paper")
    assert done.exit_code == 1  # data are missing
    text = " ".join(done.stdout.split())
    for word in ("16 runs.", "1250", "600", "54000"):
        assert word in text
    assert "ACDC 17: the folder ACDC must be there" in text
    assert "KiTS 23: the folder KiTS" in text
    assert not list(tmp_path.iterdir())
    done = study("plan", "paper", "--names")
    assert (done.exit_code, done.stdout) == (1, "")  # a run without data cannot start


def test_the_list_names_every_study():
    done = study("list")
    for name in ("paper:", "sensitivity:", "hippocampus:", "acdc-small:", "phantom:", "phantom-sensitivity:"):
        assert name in done.stdout


@pytest.mark.usefixtures("one_thread", "no_figures")
def test_only_trains_one_run_by_its_name_and_a_later_run_adds_the_others(root, tmp_path):
    """As the tasks of a job array do, each with a line of `segcal study plan --names`."""
    options = ["--data", f"phantom={root}", "--set", "training.epochs=1"]
    names = study("plan", "phantom", *options, "--names").stdout.splitlines()
    assert [name.split("-seed0-")[0] for name in names] == [
        "phantom-dice-ce", "phantom-ce", "phantom-hard-ace", "phantom-soft-ace",
    ]  # fmt: skip
    out = tmp_path / "out"
    done = study("run", "phantom", "--out", out, *options, "--only", names[1])
    assert done.exit_code == 0, done.output
    assert [path.name for path in (out / "runs").iterdir()] == [names[1]]
    assert not (out / "report.html").exists()
    assert "4 runs: 1 done" in study("status", out).stdout
    weights = (out / "runs" / names[1] / "best.pt").stat().st_mtime_ns
    done = study("run", "phantom", "--out", out, *options)
    assert done.exit_code == 0, done.output
    assert sorted(path.name for path in (out / "runs").iterdir()) == sorted(names)
    assert (out / "runs" / names[1] / "best.pt").stat().st_mtime_ns == weights
    assert {row["status"] for row in rows_of(out / "results" / "runs.csv")} == {"done"}
    assert (out / "report.html").exists()


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        (["run", "phantom"], "--out must be given"),
        (["run", "phantom", "--out", "x", "--jobs", "2", "--dask", "tcp://x:1"], "got both"),
        (["run", "nothing", "--out", "x"], "a study must be a .toml file"),
        (["run", "phantom", "--out", "x", "--set", "training.epochs"], "KEY=VALUE"),
        (["run", "phantom", "--out", "x", "--only", "a"], "--only"),
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
    done = study("run", "hippocampus", "--out", tmp_path / "out", "--data", tmp_path)
    assert done.exit_code == 2
    assert "Task04_Hippocampus must be there" in " ".join(done.output.split())


def test_only_the_folder_of_a_study_has_a_status_and_a_report(tmp_path):
    for command in ("status", "report"):
        done = study(command, tmp_path)
        assert done.exit_code == 2
        assert "must be the folder of a study; it has no study.toml" in " ".join(done.output.split())
    assert not list(tmp_path.iterdir())


def test_the_overview_counts_and_foretells(shop):
    first, second, third, _ = shop.plan.runs
    for name in (first, second, third):
        (shop.runs / name).mkdir(parents=True)
    done = {"fittings": ["calibrated/temperature"], "validation": CROSS_FITTED, "seconds": 100.0}
    (shop.runs / first / "done.json").write_text(json.dumps(done))
    progress = {"host": "here", "pid": 7, "stage": "training", "share": 0.5, "begun": 0.0, "seconds": 50.0,
                "time": "2026-01-02T03:04:05+00:00"}  # fmt: skip
    (shop.runs / second / PROGRESS).write_text(json.dumps(progress))
    (shop.runs / third / PROGRESS).write_text(json.dumps(progress | {"share": 0.25}))  # its process died
    with locked(shop.runs / second / ".lock", shop.runs / second):
        found = overview(shop)
        shown = study("status", shop.out).stdout
    assert [state.status for state in found.states] == ["done", "running", "waiting", "waiting"]
    assert found.states[1].where == found.states[2].where == "here, process 7"
    assert found.states[2].message == "stopped, last seen 2026-01-02T03:04:05+00:00"
    assert found.seconds_left == pytest.approx(225.0)  # 0.5, 0.75 and 1 of a run, 100 s each, by one process
    assert found.line == "4 runs: 1 done, 1 running, 0 failed, 2 waiting, about 4 min left"
    assert found.line in shown
    assert "stopped, last seen" in " ".join(shown.split())
    assert overview(shop).count("running") == 0  # nobody holds a lock any more
