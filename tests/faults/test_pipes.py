"""A pipe in place of a file is an error at once: whoever opens one would wait for a writer that never comes."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from cohorts import run, write_cohort
from typer.testing import CliRunner

from segcal import BinStatistics, Evaluation, load_calibrator
from segcal._io.files import reject_pipe
from segcal.cli import app
from segcal.datasets.acdc import read_info
from segcal.datasets.layout import read_json
from segcal.datasets.splits import read_split
from segcal.errors import FileError
from segcal.evaluation.groups import read_groups
from segcal.evaluation.intervals import patients_of
from segcal.quality.fitting import load_quality
from segcal.review import read_decisions
from segcal.training.checkpoint import load_checkpoint
from segcal.training.config import read_config
from segcal.volumes.arrays import EXTENSIONS, read_array, read_nifti_start
from segcal.volumes.images import place_of
from segcal.volumes.regions import read_class_names, read_regions

LONGEST_S = 60  # a reader that waits fails after that time


@pytest.fixture(autouse=True)
def alarm() -> Iterator[None]:
    def fail(*_: object) -> None:
        pytest.fail("it waits for a pipe")  # not an OSError, which readers catch

    before = signal.signal(signal.SIGALRM, fail)
    signal.alarm(LONGEST_S)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


READERS: dict[str, Callable[[Path], Any]] = {
    **{f"case{extension}": read_array for extension in EXTENSIONS},
    "place.nii.gz": place_of,
    "start.nii.gz": read_nifti_start,
    "calibrator.json": load_calibrator,
    "quality.json": load_quality,
    "dataset.json": read_class_names,
    "classes.toml": read_class_names,
    "regions.toml": read_regions,
    "any.json": read_json,
    "groups.csv": lambda path: read_groups(path, ["case_1"]),
    "patients.csv": lambda path: patients_of(["case_1"], str(path)),
    "decisions.csv": read_decisions,
    "split.txt": lambda path: read_split(path, None),
    "Info.cfg": read_info,
    "config.toml": read_config,
    "last.pt": load_checkpoint,
    "evaluation.npz": Evaluation.load,
    "statistics.npz": BinStatistics.load,
}


@pytest.mark.parametrize("name", READERS)
def test_no_reader_waits_for_a_pipe(tmp_path, name):
    os.mkfifo(tmp_path / name)
    (tmp_path / "links").mkdir()
    (tmp_path / "links" / name).symlink_to(tmp_path / name)
    for path in (tmp_path / name, tmp_path / "links" / name):
        with pytest.raises(FileError, match=r"must be a (regular )?file; it is a (folder, a )?pipe"):
            READERS[name](path)


def test_what_is_no_regular_file_is_named(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "socket"))
        for path, kind in ((tmp_path / "pipe", "a pipe"), (tmp_path / "socket", "a socket"), ("/dev/zero", "a device")):
            with pytest.raises(FileError, match=f"must be a regular file; it is {kind}. Save its content as a file."):
                reject_pipe(path)
    (tmp_path / "file").write_text("text")
    (tmp_path / "link").symlink_to(tmp_path / "file")
    for name in ("file", "link", "nowhere", "."):
        reject_pipe(tmp_path / name)


@pytest.mark.parametrize("folder", "PL")
@pytest.mark.parametrize("ending", [".nii.gz", ".nii", ".npz", ".npy", ".mha", ".nrrd"])
def test_evaluate_counts_a_pipe_as_a_failed_case(tmp_path, folder, ending):
    path = write_cohort(tmp_path, 2) / folder / "case_1.nii.gz"
    path.unlink()
    os.mkfifo(path.with_name(f"case_1{ending}"))
    result = run(tmp_path)
    assert result.exit_code == 1, result.output
    assert "1 case evaluated, 1 failed" in result.output
    failures = (tmp_path / "out" / "failures.csv").read_text()
    assert f"case_1{ending} must be a file; it is a folder, a pipe or a device. Check the path." in failures


def test_decide_counts_a_pipe_as_a_failed_case(tmp_path):
    path = write_cohort(tmp_path, 2) / "P" / "case_1.nii.gz"
    path.unlink()
    os.mkfifo(path)
    arguments = ["decide", str(path.parent), "--rule", "argmax", "--out", str(tmp_path / "out")]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 1, result.output
    assert "1 case failed" in result.output


@pytest.mark.parametrize("option", ["--rule", "--calibrator", "--class-names", "--regions"])
def test_decide_rejects_a_pipe_in_its_options(tmp_path, option):
    write_cohort(tmp_path, 1)
    pipe = tmp_path / "pipe.json"
    os.mkfifo(pipe)
    options = {"--rule": "argmax", option: str(pipe)}
    arguments = [word for item in options.items() for word in item]
    result = CliRunner().invoke(app, ["decide", str(tmp_path / "P"), "--out", str(tmp_path / "out"), *arguments])
    assert result.exit_code == 2, result.output
    assert "must be a regular file; it is a pipe" in " ".join(result.output.split())


def test_plans_beside_nnunets_arrays_may_not_be_a_pipe(tmp_path):
    import numpy as np

    np.savez(tmp_path / "case.npz", probabilities=np.zeros((2, 3, 4, 5), np.float32))
    os.mkfifo(tmp_path / "plans.json")
    with pytest.raises(FileError, match=r"plans\.json must be a regular file; it is a pipe"):
        read_array(tmp_path / "case.npz")
