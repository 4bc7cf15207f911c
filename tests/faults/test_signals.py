"""Commands with workers that are asked to end, or are killed: pipes close, no process is left, and the work goes on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import nibabel
import numpy as np
import pytest
import tiny

from segcal._io.ending import Ended, ending_in_order, import_whole
from segcal.datasets import make_phantom
from segcal.evaluation.cohort import evaluate

PATIENCE_S = 20
CASES = 800  # so many that they are not done before a signal comes, on a busy machine, too

pytestmark = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="looks for processes in /proc")


def processes_of(session: int) -> set[int]:
    """All processes of a session that are not dead; multiprocessing's tracker of resources, which goes last, too."""
    found = set()
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                state, _, _, own = (folder / "stat").read_text().rpartition(")")[2].split()[:4]
            except (OSError, ValueError):
                continue
            if int(own) == session and state != "Z":
                found.add(int(folder.name))
    return found


def wait_for(what: Callable[[], object], seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < end, "nothing happened"
        time.sleep(0.05)


@contextmanager
def started(*arguments: object) -> Iterator[subprocess.Popen[str]]:
    """A command in a session of its own, its output in a pipe."""
    process = subprocess.Popen(
        [sys.executable, "-m", "segcal", *map(str, arguments)],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
    )  # fmt: skip
    try:
        yield process
    finally:
        for left in processes_of(process.pid):
            os.kill(left, signal.SIGKILL)


def ends(process: subprocess.Popen[str], number: signal.Signals) -> str:
    """What a command says that gets a signal, alone: its pipe closes, and no process is left."""
    assert len(processes_of(process.pid)) > 2, "there are no workers"
    os.kill(process.pid, number)
    output, _ = process.communicate(timeout=PATIENCE_S)
    wait_for(lambda: not processes_of(process.pid), PATIENCE_S)
    assert process.returncode == (-number if number == signal.SIGKILL else 128 + number), output
    if number != signal.SIGKILL:  # of a parent that is killed, torch's loaders may say that they miss it
        assert "Traceback" not in output
    return output


@pytest.fixture(scope="module")
def maps(tmp_path_factory) -> Path:
    """Many cases, which are all the same."""
    folder = tmp_path_factory.mktemp("maps")
    for name in ("predictions", "labels"):
        (folder / name).mkdir()
    random = np.random.default_rng(0)
    np.save(folder / "map.npy", random.dirichlet(np.ones(3), (24, 24, 24)).astype(np.float32).transpose(3, 0, 1, 2))
    labels = nibabel.Nifti1Image(random.integers(0, 3, (24, 24, 24)).astype(np.uint8), np.eye(4))
    nibabel.save(labels, folder / "label.nii.gz")
    for i in range(CASES):
        os.link(folder / "map.npy", folder / "predictions" / f"case_{i}.npy")
        os.link(folder / "label.nii.gz", folder / "labels" / f"case_{i}.nii.gz")
    return folder


LONG_SIGKILL = pytest.param(signal.SIGKILL, marks=pytest.mark.long, id="SIGKILL")


@pytest.mark.parametrize(
    "number",
    [
        pytest.param(signal.SIGTERM, id="SIGTERM"),
        pytest.param(signal.SIGHUP, marks=pytest.mark.long, id="SIGHUP"),
        LONG_SIGKILL,
    ],
)
def test_an_evaluation_that_ends_takes_its_workers_along_and_goes_on_later(number, maps, tmp_path):
    out, parts = tmp_path / "out", tmp_path / "out" / ".parts"
    with started("evaluate", maps / "predictions", maps / "labels", "--out", out, "--workers", 2) as process:
        wait_for(lambda: len(list(parts.glob("*.npz"))) > 3)
        output = ends(process, number)
    assert ("again to resume" in " ".join(output.split())) == (number != signal.SIGKILL)
    kept = {path.name for path in parts.glob("*.npz")}
    assert 3 < len(kept) < CASES
    times = {name: (parts / name).stat().st_mtime_ns for name in kept}
    outcome = evaluate(maps / "predictions", maps / "labels", out)
    assert outcome.evaluation is not None
    assert len(outcome.evaluation.cases) == CASES
    assert {name: (parts / name).stat().st_mtime_ns for name in kept} == times  # none was measured again


@pytest.fixture(scope="module")
def images(tmp_path_factory) -> Path:
    return make_phantom(tmp_path_factory.mktemp("data"), cases=10)


@pytest.mark.parametrize("number", [pytest.param(signal.SIGTERM, id="SIGTERM"), LONG_SIGKILL])
def test_a_training_that_ends_takes_its_loaders_along(number, images, tmp_path):
    out = tmp_path / "run"
    settings = [*tiny.changes(), "training.loader_workers=2", "training.epochs=500", "training.validate_every=500"]
    changes = [word for setting in settings for word in ("--set", setting)]
    with started("train", "--out", out, "--dataset", "phantom", "--data-root", images, *changes) as process:
        wait_for((out / "log.csv").exists, 120)
        output = ends(process, number)
    assert ("resume from the last checkpoint" in " ".join(output.split())) == (number != signal.SIGKILL)


@pytest.mark.parametrize("number", [pytest.param(signal.SIGTERM, id="SIGTERM"), LONG_SIGKILL])
def test_a_study_that_ends_takes_its_jobs_along(number, images, tmp_path):
    out = tmp_path / "study"
    arguments = ("--data", f"phantom={images}", "--jobs", 2, "--set", "training.epochs=500")
    with started("study", "run", "phantom", "--out", out, *arguments) as process:
        wait_for(lambda: len(list((out / "runs").glob("*/config.toml"))) == 2, 120)
        output = ends(process, number)
    assert ("again to resume" in " ".join(output.split())) == (number != signal.SIGKILL)
    assert not list((out / "runs").glob("*/failed.json"))


@pytest.fixture
def default_hup() -> Iterator[None]:
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.usefixtures("default_hup")
def test_a_signal_that_is_ignored_as_under_nohup_stays_so():
    with ending_in_order(), pytest.raises(Ended):
        signal.raise_signal(signal.SIGHUP)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with ending_in_order():
        signal.raise_signal(signal.SIGHUP)
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN


@pytest.mark.usefixtures("default_hup")
def test_a_signal_while_a_module_is_imported_comes_after_it(tmp_path, monkeypatch):
    module = "import signal\nsignal.raise_signal(signal.SIGHUP)\nwhole = True\n"
    (tmp_path / "interrupted_while_imported.py").write_text(module)
    monkeypatch.syspath_prepend(tmp_path)
    with ending_in_order(), pytest.raises(Ended):
        import_whole("interrupted_while_imported")
    assert sys.modules.pop("interrupted_while_imported").whole
