"""Faults of the system: no room, no right to write, files that go or change, clocks, kills, and Ctrl-C.

A full disk is a device too small for what a command makes, where the tests may mount one, and always the limit that the
kernel sets on the size of files: a write beyond it fails half way. Commands run in this process; each is first run
undisturbed, which is what must come out.
"""

from __future__ import annotations

import csv
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import layouts
import nibabel
import numpy as np
import pytest
import tiny
import torch
from typer.testing import CliRunner

from segcal import evaluate
from segcal._io import files
from segcal._io.jobs import stamp
from segcal.calibration import fitting as calibration
from segcal.cli import app
from segcal.datasets import make_phantom
from segcal.errors import FileError
from segcal.evaluation import cohort
from segcal.study.figures import Drawn
from segcal.study.work import spooled
from segcal.training import runs

pytestmark = pytest.mark.usefixtures("one_thread")
SHAPE = (9, 8, 7)
STUDY = """
title = "One run"
methods = ["dice-ce + temperature"]
preset = "small"
[datasets.phantom]
dataset = "phantom"
[set.data]
patch = [16, 16, 16]
[set.training]
epochs = 1
validate_every = 1
"""


def save(path: Path, array: np.ndarray) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    nibabel.Nifti1Image(array, np.eye(4)).to_filename(path)


def make_maps(folder: Path, *, seed: int = 0, ending: str = ".nii.gz") -> Path:
    """Three cases of three classes."""
    random = np.random.default_rng(seed)
    for i in range(3):
        labels = random.integers(0, 3, SHAPE).astype(np.uint8)
        exponentials = np.exp(random.normal(size=(*SHAPE, 3)) + 2 * np.eye(3)[labels])
        probabilities = exponentials / exponentials.sum(-1, keepdims=True)
        save(folder / "maps" / f"case_{i}{ending}", probabilities.astype(np.float32))
        save(folder / "labels" / f"case_{i}{ending}", labels)
    return folder


@dataclass(frozen=True)
class Command:
    """A command on the shared data: its arguments, given where to write; what it made; what it never made in part."""

    arguments: Callable[[Path, Path], list[Any]]
    result: Callable[[Path], Any]
    work: str
    """A function that does its work."""
    stopped: str = ""


def contents(*endings: str) -> Callable[[Path], dict[str, bytes]]:
    def read(out: Path) -> dict[str, bytes]:
        found = (path for path in out.rglob("*") if path.is_file() and not path.name.startswith("."))
        return {str(path.relative_to(out)): path.read_bytes() for path in found if path.name.endswith(endings)}

    return read


def trained(out: Path) -> dict[str, Any]:
    """The log but for its times, and the weights."""
    rows = csv.DictReader((out / "log.csv").read_text(encoding="utf-8").splitlines())
    log = [{name: value for name, value in row.items() if name != "seconds"} for row in rows]
    weights = {
        f"{name} {key}": value.numpy().tobytes()
        for name in ("best.pt", "last.pt")
        for key, value in torch.load(out / name, weights_only=True)["network"].items()
    }
    return {"log": log, **weights}


def changes() -> list[str]:
    return [part for change in tiny.changes() for part in ("--set", change)]


RESUMES = "again to resume"
COMMANDS = {
    "evaluate": Command(
        lambda data, out: ["evaluate", data / "maps", data / "labels", "--out", out],
        contents(".csv", ".json", ".npz"),
        "segcal.evaluation.cohort.measure_case",
        RESUMES,
    ),
    "fit": Command(
        lambda data, out: [
            *("calibrate", "fit", data / "maps", data / "labels", "--method", "temperature", "--folds", 0),
            *("--out", out / "calibrator.json"),
        ],
        contents(".json"),
        "segcal.evaluation.cohort.measure_case",
        RESUMES,
    ),
    "apply": Command(
        lambda data, out: ["calibrate", "apply", data / "calibrator.json", data / "maps", "--out", out],
        contents(".json", ".gz"),
        "segcal.calibration.applying.open_prediction",
        RESUMES,
    ),
    "compare": Command(
        lambda data, out: ["compare", data / "evaluation", "--out", out, "--resamples", 100],
        contents(".csv", ".md", ".tex"),
        "segcal.compare",
    ),
    "report": Command(
        lambda data, out: ["report", data / "evaluation", "--out", out / "report.html"],
        contents(".html"),
        "segcal.report.page.compare",
    ),
    "train": Command(
        lambda data, out: [
            *("train", "--dataset", "acdc", "--data-root", data / "acdc", "--method", "soft-ace"),
            *("--out", out, "--prepared", out / "prepared", *changes()),
        ],
        trained,
        "segcal.training.loop.build_network",
        RESUMES,
    ),
    "predict": Command(
        lambda data, out: ["predict", data / "run", "--out", out, "--split", "validation"],
        contents(".json", ".gz"),
        "segcal.training.runs.prepare_case",
        RESUMES,
    ),
    "study": Command(
        lambda data, out: ["study", "run", data / "study.toml", "--out", out, "--data", f"phantom={data / 'phantom'}"],
        lambda out: {
            name: content for name, content in contents(".csv", ".md")(out / "results").items() if name != "runs.csv"
        },
        "segcal.study.work.train",
        RESUMES,
    ),
}


def run(name: str, data: Path, out: Path):
    return CliRunner().invoke(app, [str(part) for part in COMMANDS[name].arguments(data, out)])


def said(done) -> str:
    return " ".join(done.output.split())


@pytest.fixture(scope="module")
def data(tmp_path_factory, one_thread) -> Path:
    """What the commands read."""
    folder = make_maps(tmp_path_factory.mktemp("data"))
    layouts.write_acdc(folder / "acdc")
    make_phantom(folder / "phantom", cases=6, size=(40, 40, 26))
    (folder / "study.toml").write_text(STUDY)
    return folder


@pytest.fixture(scope="module")
def calm(data) -> Iterator[dict[str, Any]]:
    """What each command makes undisturbed; later ones read what earlier ones made."""
    found = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("segcal.study.running.write_figures", lambda *_: Drawn((), ()))  # slow, and of the same kind
        for name, command in COMMANDS.items():
            out = data / f"calm-{name}"
            done = run(name, data, out)
            assert done.exit_code == 0, done.output
            found[name] = command.result(out)
            if name == "evaluate":
                shutil.copytree(out, data / "evaluation")
            elif name == "fit":
                shutil.copy(out / "calibrator.json", data)
            elif name == "train":
                shutil.copytree(out, data / "run")
        yield found


@contextmanager
def room_for(size: int) -> Iterator[None]:
    """No file may grow beyond so many bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def hidden(folder: Path) -> list[Path]:
    return [path for path in folder.rglob(".*") if path.is_file() or path.name.startswith(".logits-")]


@pytest.mark.parametrize(
    ("name", "size"),
    [
        *((name, size) for name in ("evaluate", "fit", "apply", "train", "predict") for size in (0, 400)),
        *(("compare", 400), ("report", 400)),
        ("study", 20_000),  # enough for its own file, not for the first image
    ],
)
def test_a_full_disk_ends_in_one_sentence_and_with_room_the_same_command_ends_as_undisturbed(
    name, size, data, calm, tmp_path
):
    out = tmp_path / "out"
    with room_for(size):
        full = run(name, data, out)
    assert full.exit_code == 1, full.output
    assert re.search(r"\S+ cannot be written: File too large\.", said(full)), full.output
    assert isinstance(full.exception, SystemExit)
    assert not [path for path in out.rglob("*") if path.is_file() and path.stat().st_size == size > 0]
    assert not hidden(out)
    again = run(name, data, out)
    assert again.exit_code == 0, again.output
    assert COMMANDS[name].result(out) == calm[name]


@contextmanager
def mounted(folder: Path, options: str) -> Iterator[Path]:
    """A file system in memory."""
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "none", folder], capture_output=True, check=False)
    if done.returncode:
        pytest.skip(f"nothing can be mounted here: {done.stderr.decode().strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", folder], check=True)


PAGE = resource.getpagesize()


@pytest.mark.parametrize("name", COMMANDS)
def test_a_device_without_room_for_all_ends_in_one_sentence_and_with_room_as_undisturbed(name, data, calm, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    made = [path.stat().st_size for path in (data / f"calm-{name}").rglob("*") if path.is_file()]
    pages = sum(-(-size // PAGE) for size in made)
    with mounted(out, f"size={max(1, pages // 2) * PAGE}"):
        (out / "of somebody else").write_bytes(bytes(PAGE))
        full = run(name, data, out)
        assert full.exit_code == 1, full.output
        assert re.search(r"\S+ cannot be written: No space left on device\.", said(full)), full.output
        assert isinstance(full.exception, SystemExit)
        assert not hidden(out)
        subprocess.run(["mount", "-o", "remount,size=1g", out], check=True)
        again = run(name, data, out)
        assert again.exit_code == 0, again.output
        assert COMMANDS[name].result(out) == calm[name]


@pytest.fixture
def read_only(tmp_path) -> Iterator[Path]:
    folder = tmp_path / "read-only"
    folder.mkdir(mode=0o555)
    if os.geteuid():
        yield folder
        return
    with mounted(folder, "ro"):  # the superuser may write everywhere else
        yield folder


@pytest.mark.parametrize("name", COMMANDS)
def test_where_nothing_can_be_written_that_is_said_before_any_work(name, data, calm, read_only, tmp_path, monkeypatch):
    (tmp_path / "file").touch()

    def work(*arguments: Any, **named: Any) -> None:
        raise AssertionError("work was done that cannot be kept")

    monkeypatch.setattr(COMMANDS[name].work, work)
    for out, why in (
        (read_only, "Read-only file system|Permission denied"),
        (read_only / "new", "Read-only file system|Permission denied"),
        (tmp_path / "file" / "new", "Not a directory"),
    ):
        done = run(name, data, out)
        assert done.exit_code == 1, (out, done.output)
        assert re.search(f"WriteError: {out}.* cannot be written: ({why})\\.", said(done)), done.output


@pytest.mark.parametrize("ending", [".nii.gz", ".nii"])
@pytest.mark.parametrize("gone", ["labels", "maps"])
def test_a_folder_that_disappears_half_way_costs_the_cases_not_read_yet(gone, ending, tmp_path):
    make_maps(tmp_path, ending=ending)
    whole = evaluate(tmp_path / "maps", tmp_path / "labels", tmp_path / "whole").evaluation

    def lose(done: int, total: int) -> None:
        if done == 1:
            (tmp_path / gone).rename(tmp_path / "elsewhere")

    outcome = evaluate(tmp_path / "maps", tmp_path / "labels", tmp_path / "out", progress=lose)
    assert outcome.evaluation.cases == ("case_0",)
    assert [failure.case for failure in outcome.failures] == ["case_1", "case_2"]
    assert all("does not exist" in failure.message for failure in outcome.failures)
    assert "case_2" in (tmp_path / "out" / "failures.csv").read_text()
    (tmp_path / "elsewhere").rename(tmp_path / gone)
    again = evaluate(tmp_path / "maps", tmp_path / "labels", tmp_path / "out")
    assert not again.failures
    assert torch.equal(again.evaluation.statistics.count, whole.statistics.count)


def test_a_fit_whose_labels_disappear_ends_in_a_sentence_and_leaves_no_file(tmp_path):
    make_maps(tmp_path)

    def lose(done: int, total: int, text: str) -> None:
        if text.startswith("fitting"):
            shutil.rmtree(tmp_path / "labels", ignore_errors=True)

    with pytest.raises(FileError, match=r"case_\d: .* does not exist"):
        calibration.fit_calibrator(
            tmp_path / "maps", tmp_path / "labels", tmp_path / "out" / "calibrator.json", method="temperature",
            progress=lose,
        )  # fmt: skip
    assert not list((tmp_path / "out").glob("*.json"))


def test_images_that_disappear_half_way_fail_by_name(data, calm, tmp_path):
    found = runs.load_run(data / "run", with_data=False)
    for i in range(3):
        save(tmp_path / "images" / f"case_{i}.nii.gz", np.ones((12, 10, 6), np.int16))

    def lose(done: int, total: int) -> None:
        shutil.rmtree(tmp_path / "images", ignore_errors=True)

    cases = runs.image_cases(tmp_path / "images", 1)
    made = runs.predict(found, tmp_path / "out", cases=cases, progress=lose)
    assert [path.name for path in made.paths] == ["case_0.nii.gz"]
    assert [failure.case for failure in made.failures] == ["case_1", "case_2"]


@pytest.mark.parametrize("name", ["evaluate", "fit", "apply", "train", "predict"])
def test_a_second_process_in_the_same_place_is_refused_and_a_dead_ones_lock_is_not(name, data, calm, tmp_path):
    out = tmp_path / "out"
    lock = {"evaluate": out / ".parts" / ".lock", "fit": out / ".calibrator.json.lock"}.get(name, out / ".lock")
    lock.parent.mkdir(parents=True)
    with files.locked(lock, out):
        done = run(name, data, out)
        assert done.exit_code == 2
        assert "is being written by another process; wait for it, or choose another --out." in said(done)
    lock.write_text("")  # left by a process that was killed
    assert run(name, data, out).exit_code == 0
    assert COMMANDS[name].result(out) == calm[name]
    assert not lock.exists()


HOLD = """
import sys, time
from pathlib import Path
from segcal.errors import ConfigError
from segcal._io.files import locked
folder = Path(sys.argv[1])
held = refused = 0
print("ready", flush=True)
sys.stdin.readline()
while held < 300:
    try:
        with locked(folder / ".lock", folder):
            (folder / "inside").mkdir()  # fails if another is there
            (folder / "inside").rmdir()
            held += 1
    except ConfigError:
        refused += 1
        time.sleep(0)  # whoever holds it may need this core
print(refused)
"""


def test_a_lock_that_is_removed_and_made_again_is_never_held_by_two(tmp_path):
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    workers = [subprocess.Popen([sys.executable, "-c", HOLD, tmp_path], **pipes) for _ in range(3)]
    for worker in workers:
        assert worker.stdout.readline() == b"ready\n"
    for worker in workers:
        worker.stdin.write(b"go\n")
        worker.stdin.flush()
    ended = [worker.communicate(timeout=120) for worker in workers]
    assert [errors for _, errors in ended] == [b""] * 3
    assert sum(int(refused) for refused, _ in ended) > 0, "they never met"
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("seconds", [4e9, 0.0])
def test_results_do_not_depend_on_what_clocks_say(seconds, data, calm, tmp_path, monkeypatch):
    make_maps(tmp_path)
    for path in tmp_path.rglob("*.nii.gz"):
        os.utime(path, (seconds, seconds))
    out = tmp_path / "out"
    assert run("evaluate", tmp_path, out).exit_code == 0
    for path in out.rglob("*"):
        os.utime(path, (4e9 - seconds, 4e9 - seconds))
    tables = contents(".csv")
    assert tables(out) == {name: content for name, content in calm["evaluate"].items() if name.endswith(".csv")}
    with monkeypatch.context() as patch:
        patch.setattr(cohort, "measure_case", None)  # nothing is read again
        assert run("evaluate", tmp_path, out).exit_code == 0
    assert tables(out) == {name: content for name, content in calm["evaluate"].items() if name.endswith(".csv")}


@pytest.mark.parametrize("how", ["rename", "copy", "write"])
def test_a_file_replaced_by_one_of_the_same_size_and_time_is_measured_again(how, tmp_path):
    make_maps(tmp_path, ending=".nii")
    make_maps(tmp_path / "other", seed=1, ending=".nii")
    evaluate(tmp_path / "maps", tmp_path / "labels", tmp_path / "out")
    label, other = (folder / "labels" / "case_1.nii" for folder in (tmp_path, tmp_path / "other"))
    before = label.stat()
    if how == "rename":
        os.utime(other, ns=(before.st_atime_ns, before.st_mtime_ns))
        other.rename(label)
    elif how == "copy":
        shutil.copyfile(other, label)
    else:
        label.write_bytes(other.read_bytes())
    os.utime(label, ns=(before.st_atime_ns, before.st_mtime_ns))
    after = label.stat()
    assert (after.st_size, after.st_mtime_ns) == (before.st_size, before.st_mtime_ns)
    evaluate(tmp_path / "maps", tmp_path / "labels", tmp_path / "out")
    evaluate(tmp_path / "maps", tmp_path / "labels", tmp_path / "fresh")
    tables = contents(".csv")
    assert tables(tmp_path / "out") == tables(tmp_path / "fresh")


def test_a_case_replaced_while_it_is_read_fails_and_is_read_again_by_the_next_command(tmp_path, monkeypatch):
    make_maps(tmp_path)
    make_maps(tmp_path / "other", seed=1)
    measure = cohort.measure_case

    def replaced(case, *arguments, **named):
        sums = measure(case, *arguments, **named)
        if case.name == "case_1":
            shutil.copy(tmp_path / "other" / "labels" / "case_1.nii.gz", case.label)
        return sums

    with monkeypatch.context() as patch:
        patch.setattr(cohort, "measure_case", replaced)
        outcome = evaluate(tmp_path / "maps", tmp_path / "labels", tmp_path / "out")
    (failure,) = outcome.failures
    assert failure.case == "case_1"
    assert "must stay as they are while they are read" in failure.message
    assert not evaluate(tmp_path / "maps", tmp_path / "labels", tmp_path / "out").failures
    evaluate(tmp_path / "maps", tmp_path / "labels", tmp_path / "fresh")
    assert contents(".csv")(tmp_path / "out") == contents(".csv")(tmp_path / "fresh")


def test_a_stamp_tells_a_file_from_another_and_stays_while_it_is_read(tmp_path):
    path = tmp_path / "a"
    path.write_bytes(b"one")
    first = stamp(path)
    path.read_bytes()
    assert stamp(path) == first
    path.unlink()
    assert stamp(path) != first


KILLED = """
import os, signal, sys
from pathlib import Path
from segcal._io.files import new_file
with new_file(Path(sys.argv[1])) as file:
    file.write(b"half")
    file.flush()
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_a_killed_writer_left_goes_with_the_next_and_nothing_else_does(tmp_path):
    path = tmp_path / "table.csv"
    subprocess.run([sys.executable, "-c", KILLED, path], check=False)
    (left,) = tmp_path.iterdir()
    assert re.fullmatch(r"\.table\.csv\.[0-9a-f]{32}", left.name)
    foreign = [
        tmp_path / name
        for name in (f".table.csv.{'a' * 31}", f".table.csv.{'g' * 32}", f".other.csv.{'a' * 32}", ".table.csv.lock")
    ]
    for other in foreign:
        other.touch()
    files.write_whole(path, b"whole")
    assert sorted(tmp_path.iterdir()) == sorted([*foreign, path])
    assert path.read_bytes() == b"whole"


def test_what_a_living_writer_has_open_stays(tmp_path):
    path = tmp_path / "table.csv"
    with files.new_file(path) as file:
        file.write(b"first begun, ")
        files.write_whole(path, b"second")
        assert path.read_bytes() == b"second"
        file.write(b"last done")
    assert path.read_bytes() == b"first begun, last done"
    assert list(tmp_path.iterdir()) == [path]


def test_many_writers_of_one_file_never_lose_theirs(tmp_path):
    path = tmp_path / "table.csv"
    failed = []

    def write() -> None:
        try:
            for _ in range(50):
                files.write_whole(path, b"whole")
        except Exception as error:
            failed.append(error)

    threads = [threading.Thread(target=write) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
    assert list(tmp_path.iterdir()) == [path]


def test_logits_that_a_killed_study_spooled_are_removed(data, calm, tmp_path):
    (tmp_path / ".logits-left").mkdir()
    (tmp_path / ".logits-left" / "0.logits.npy").write_bytes(b"many")
    with spooled(runs.load_run(data / "run"), tmp_path) as cases:
        assert len(list(cases)) > 0
        assert len(list(tmp_path.iterdir())) == 1
    assert not list(tmp_path.iterdir())


@pytest.fixture
def interruptible() -> Iterator[None]:
    """As in a terminal; who starts the tests in the background may have switched Ctrl-C off."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize("name", COMMANDS)
def test_ctrl_c_says_what_is_kept_and_the_same_command_goes_on(name, data, calm, tmp_path, monkeypatch):
    out, write = tmp_path / "out", files.new_file
    written = []

    def interrupted(path: Path):
        written.append(path)
        if len(written) == 2 or name in ("fit", "report"):  # they write one file before they show it
            signal.raise_signal(signal.SIGINT)
        return write(path)

    with monkeypatch.context() as patch:
        patch.setattr(files, "new_file", interrupted)
        patch.setattr("segcal.volumes.predictions.new_file", interrupted)
        patch.setattr("segcal.training.runs.new_file", interrupted)
        done = run(name, data, out)
    assert done.exit_code == 130, done.output
    assert "Stopped." in said(done)
    assert COMMANDS[name].stopped in said(done)
    again = run(name, data, out)
    assert again.exit_code == 0, again.output
    assert COMMANDS[name].result(out) == calm[name]
