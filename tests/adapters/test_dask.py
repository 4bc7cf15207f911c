"""Cases, and runs of a study, on a real Dask cluster: the same results as here, whoever of its workers dies."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from itertools import pairwise

import jobs
import layouts
import nibabel
import numpy as np
import pytest
import studies
import tiny
from typer.testing import CliRunner

import segcal
from segcal import ConfigError, Evaluation, SegcalError, evaluate
from segcal.calibrators import Temperature
from segcal.cli import app
from segcal.study import do_runs, open_study, read_study
from segcal.study.overview import overview
from segcal.training import train
from segcal.training.ensemble import load_ensemble
from segcal.training.runs import evaluate_run, load_run, predict

dask = pytest.importorskip("dask", reason="dask[distributed] is not installed")
distributed = pytest.importorskip("distributed", reason="dask[distributed] is not installed")

from segcal.adapters.dask import DaskCluster  # noqa: E402

pytestmark = [
    pytest.mark.peers,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),  # sockets of workers that were killed
]
CASES, SHAPE = 8, (24, 24, 16)


@pytest.fixture(scope="module")
def cluster():
    """Two workers, processes of their own, on the loopback address."""
    with (
        dask.config.set({"distributed.scheduler.allowed-failures": 1}),
        distributed.LocalCluster(
            n_workers=2, threads_per_worker=1, host="127.0.0.1", dashboard_address=":0", silence_logs=50
        ) as started,
        distributed.Client(started, set_as_default=False) as client,
    ):
        yield client


@pytest.fixture(autouse=True)
def both_there(cluster) -> None:
    """Workers that a test before has killed come back, in their time."""
    cluster.wait_for_workers(2, timeout=60)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("maps")
    generator = np.random.default_rng(0)
    for name in ("maps", "labels"):
        (folder / name).mkdir()
    for i in range(CASES):
        labels = generator.integers(0, 3, SHAPE).astype(np.uint8)
        maps = generator.dirichlet([1, 1, 1], SHAPE).astype(np.float32)
        nibabel.save(nibabel.Nifti1Image(maps, np.eye(4)), folder / "maps" / f"case_{i}.nii.gz")
        nibabel.save(nibabel.Nifti1Image(labels, np.eye(4)), folder / "labels" / f"case_{i}.nii.gz")
    (folder / "maps" / "case_5.nii.gz").write_bytes(b"no image")
    evaluate(folder / "maps", folder / "labels", folder / "local")
    return folder


def test_cases_without_labels_are_decided_and_promised_as_here(cluster, folder, tmp_path):
    """The same label maps and the same queue, byte for byte; the case that cannot be read is a failure in both."""
    executor = DaskCluster(cluster)
    evaluation = Evaluation.load(folder / "local" / "evaluation.npz")
    quality = segcal.fit_quality(evaluation, level=0.5)
    for name, where in (("here", None), ("there", executor)):
        decided = segcal.decide(folder / "maps", tmp_path / name / "labels", rule="threshold=0.3", executor=where)
        queue = segcal.apply_quality(quality, folder / "maps", tmp_path / name / "queue", executor=where)
        assert [failure.case for failure in decided.failures] == ["case_5"]
        assert [failure.case for failure in queue.failures] == ["case_5"]
    made = sorted(path.relative_to(tmp_path / "here") for path in (tmp_path / "here").glob("*/[!.]*"))
    assert len(made) == CASES - 1 + 4  # label maps and their table; csv, json and html of the queue
    for path in made:
        assert (tmp_path / "here" / path).read_bytes() == (tmp_path / "there" / path).read_bytes(), path


def tables(folder):
    return {name: (folder / name).read_bytes() for name in ("cases.csv", "summary.csv", "failures.csv", "summary.json")}


def test_the_results_are_those_of_this_machine_and_what_is_done_is_not_done_again(cluster, folder, monkeypatch):
    monkeypatch.chdir(folder)  # paths are the caller's, not the workers'
    address = cluster.scheduler.address
    arguments = ["evaluate", "maps", "labels", "--out", "spread", "--dask", address]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 1  # one case is broken
    assert tables(folder / "spread") == tables(folder / "local")
    parts = {path: path.stat().st_mtime_ns for path in (folder / "spread" / ".parts").glob("*.npz")}
    assert len(parts) == CASES - 1
    evaluate("maps", "labels", "spread")  # here: it finds what the workers wrote
    assert {path: path.stat().st_mtime_ns for path in (folder / "spread" / ".parts").glob("*.npz")} == parts


def test_a_worker_that_is_killed_loses_nothing(cluster, folder):
    killed = []

    def kill(done, total):
        if not killed:
            killed.append(next(iter(cluster.run(os.getpid).values())))
            os.kill(killed[0], signal.SIGKILL)

    outcome = evaluate(
        folder / "maps", folder / "labels", folder / "killed", executor=DaskCluster(cluster), progress=kill
    )
    assert killed
    assert [failure.case for failure in outcome.failures] == ["case_5"]
    assert tables(folder / "killed") == tables(folder / "local")


def test_a_job_whose_result_came_is_not_done_again_when_its_worker_dies(cluster, tmp_path):
    ended = 0
    for _ in DaskCluster(cluster)(jobs.note, [(tmp_path, i) for i in range(40)]):
        ended += 1
        if ended == 36:
            os.kill(next(iter(cluster.run(os.getpid).values())), signal.SIGKILL)
    assert ended == 40
    often = [len(path.read_text()) for path in sorted(tmp_path.iterdir())]
    assert len(often) == 40
    assert sum(often) <= 40 + 4  # those that were under way alone


def test_a_case_that_kills_every_worker_is_a_failure_and_stops_no_other(cluster):
    came = dict(DaskCluster(cluster)(jobs.die_at, [(i, 1) for i in range(4)]))
    assert isinstance(came.pop(1), distributed.KilledWorker)
    assert came == {0: 0, 2: 2, 3: 3}


def test_what_a_job_raises_is_raised_here(cluster):
    with pytest.raises(ZeroDivisionError):
        list(DaskCluster(cluster)(divmod, [(1, 0)]))


def test_a_run_is_evaluated_by_workers_as_by_itself(cluster, tmp_path):
    train(tiny.tiny_config("acdc", layouts.write_acdc(tmp_path / "data"), epochs=1), tmp_path / "run")
    run = load_run(tmp_path / "run")
    fitted = Temperature().fit(list(run.logits_and_labels("validation")))
    here = evaluate_run(run, tmp_path / "here", calibrator=fitted)
    there = evaluate_run(run, tmp_path / "there", calibrator=fitted, executor=DaskCluster(cluster))
    assert there.failures == here.failures == []
    assert there.evaluation.cases == here.evaluation.cases
    a, b = (Evaluation.load(tmp_path / name / "evaluation.npz").statistics for name in ("here", "there"))
    assert np.array_equal(a.count.numpy(), b.count.numpy())
    assert np.allclose(a.confidence_sum.numpy(), b.confidence_sum.numpy(), rtol=1e-12)


def test_an_ensemble_is_evaluated_by_workers_as_by_itself(cluster, tmp_path):
    config = tiny.tiny_config("acdc", layouts.write_acdc(tmp_path / "data"), epochs=1)
    for seed in range(2):
        train(config.model_copy(update={"seed": seed}), tmp_path / f"run{seed}")
    ensemble = load_ensemble([tmp_path / "run0", tmp_path / "run1"], flips=True)
    here = evaluate_run(ensemble, tmp_path / "here")
    there = evaluate_run(ensemble, tmp_path / "there", executor=DaskCluster(cluster))
    assert there.failures == here.failures == []
    a, b = (Evaluation.load(tmp_path / name / "evaluation.npz").statistics for name in ("here", "there"))
    assert np.allclose(a.confidence_sum.numpy(), b.confidence_sum.numpy(), rtol=1e-5)
    maps = {name: tmp_path / name for name in ("maps0", "maps1")}
    for name, run in zip(maps, ensemble.members, strict=True):
        predict(run, maps[name])
    (tmp_path / "labels").mkdir()
    for case in ensemble.cases("test"):
        shutil.copy(case.label, tmp_path / "labels" / f"{case.name}.nii.gz")
    arguments = maps["maps0"], tmp_path / "labels"
    local = evaluate(*arguments, tmp_path / "local", members=[maps["maps1"]])
    far = evaluate(*arguments, tmp_path / "far", members=[maps["maps1"]], executor=DaskCluster(cluster))
    assert far.failures == local.failures == []
    assert tables(tmp_path / "far") == tables(tmp_path / "local")


def test_where_nothing_answers_the_address_is_named():
    with pytest.raises(SegcalError, match=r"must answer at tcp://127\.0\.0\.1:1,"):
        DaskCluster("tcp://127.0.0.1:1", timeout_s=0.5)


def test_workers_with_another_segcal_are_refused(cluster, monkeypatch):
    monkeypatch.setattr(segcal, "__version__", "0.0.1")
    with pytest.raises(ConfigError, match=r"must have segcal 0\.0\.1; tcp.* has segcal"):
        DaskCluster(cluster)


def test_predict_spreads_only_what_it_evaluates(tmp_path):
    done = CliRunner().invoke(app, ["predict", str(tmp_path), "--out", str(tmp_path / "o"), "--dask", "tcp://x:1"])
    assert done.exit_code == 2
    assert "--dask must be used with --evaluate" in done.stderr


@pytest.mark.usefixtures("one_thread")
def test_a_run_of_a_study_resumes_where_its_worker_was_killed(cluster, tmp_path):
    """On another worker, from the last checkpoint; both runs end with the numbers of a study done here."""
    file = studies.write_study(tmp_path)
    here, there = (open_study(read_study(file), tmp_path / name) for name in ("here", "there"))
    do_runs(here)
    said: list[str] = []
    with studies.killing(there.out, studies.parent_of) as deaths:  # the worker, whose child does the run
        pids = set(cluster.run(os.getpid).values())
        do_runs(there, executor=DaskCluster(cluster, gpus=True), say=said.append)
    assert overview(there).count("done") == 2, said
    studies.check_resumed(deaths)
    cluster.wait_for_workers(2, timeout=60)
    assert len(pids - set(cluster.run(os.getpid).values())) == 1
    assert studies.numbers(there.out) == studies.numbers(here.out)
    assert not list(there.out.glob("runs/*/failed.json"))


def test_a_study_that_is_killed_leaves_no_run_at_work(cluster, tmp_path):
    file = studies.write_study(tmp_path)
    command = [sys.executable, "-m", "segcal", "study", "run", str(file), "--out", str(tmp_path / "out")]
    command += ["--set", "training.epochs=5000", "--dask", cluster.scheduler.address]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    shop = None
    try:
        wait_for(lambda: len(list((tmp_path / "out").glob("runs/*/log.csv"))) == 2)
        shop = open_study(read_study(tmp_path / "out" / "study.toml"), tmp_path / "out")
        assert overview(shop).count("running") == 2
    finally:
        process.kill()
        process.wait()
    wait_for(lambda: overview(shop).count("running") == 0)
    assert not list((tmp_path / "out").glob("runs/*/failed.json"))


def wait_for(what, seconds=120):
    end = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < end, "nothing happened"
        time.sleep(0.2)


def test_a_run_takes_a_gpu_where_workers_declare_them(cluster):
    assert DaskCluster(cluster, gpus=True).resources is None
    with (
        distributed.LocalCluster(
            n_workers=1, threads_per_worker=4, resources={"GPU": 1}, host="127.0.0.1", dashboard_address=":0",
            silence_logs=50,
        ) as started,
        distributed.Client(started, set_as_default=False) as client,
    ):  # fmt: skip
        assert DaskCluster(client).resources is None
        with_gpus = DaskCluster(client, gpus=True)
        assert with_gpus.resources == {"GPU": 1}
        spans = sorted(span for _, span in with_gpus(jobs.span, [(0.2,)] * 3))
    assert all(end <= begin for (_, end), (begin, _) in pairwise(spans))  # one at a time
