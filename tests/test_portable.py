"""Losses, statistics, metrics and evaluations work where Windows and macOS lack what Linux has."""

from __future__ import annotations

import errno
import subprocess
import sys

import pytest

from segcal._io import files

WITHOUT = """
import signal, sys, warnings
for name in ("fcntl", "grp", "pwd", "resource", "termios", "tty"):
    sys.modules[name] = None  # to import it is an ImportError
for name in {"SIGHUP", "SIGPIPE", "pthread_kill"} & set(dir(signal)):
    delattr(signal, name)
warnings.simplefilter("ignore")  # filelock says that it locks by files alone
"""
USE = """
from pathlib import Path
import nibabel, numpy as np, torch
import segcal
from segcal import Binning, ConfigError, Evaluation, SegmentationLoss, ace, bin_statistics, evaluate
from segcal._io.files import locked, replacing

logits, labels = torch.randn(1, 2, 4, 4, requires_grad=True), torch.randint(0, 2, (1, 4, 4))
SegmentationLoss(binning=Binning(20, kernel="triangular"))(logits, labels).backward()
assert logits.grad.isfinite().all()
assert ace(bin_statistics(logits.detach().softmax(1), labels)).shape == (1, 2)

for i in range(2):
    truth = np.arange(60).reshape(3, 4, 5) % 2
    maps = np.stack([0.9 - 0.8 * truth, 0.1 + 0.8 * truth], -1).astype(np.float32)
    for name, array in (("maps", maps), ("labels", truth.astype(np.uint8))):
        Path(name).mkdir(exist_ok=True)
        nibabel.Nifti1Image(array, np.eye(4)).to_filename(f"{name}/case_{i}.nii.gz")
for again in range(2):
    evaluation = evaluate("maps", "labels", "out").evaluation
evaluation.save("copy.npz")
assert Evaluation.load("copy.npz").cases == ("case_0", "case_1")

folder = Path("out")
with locked(folder / ".lock", folder):
    try:
        with locked(folder / ".lock", folder):
            raise AssertionError("held by two")
    except ConfigError as error:
        assert "is being written by another process" in str(error)
assert not (folder / ".lock").exists()

from segcal.cli import app
app(["evaluate", "maps", "labels", "--out", "by-command"], standalone_mode=False)
assert not [path for path in Path().rglob(".*") if path.name.startswith((".new-", ".lock"))]
"""


def test_everything_needed_works_without_what_only_posix_has(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT + USE], cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr


def test_files_are_written_whole_where_open_files_cannot_be_renamed(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "_WINDOWS", True)
    replace = files.os.replace
    opened = []

    def checked(source, target):
        assert all(file.closed for file in opened)
        replace(source, target)

    monkeypatch.setattr(files.os, "replace", checked)
    with files.new_file(tmp_path / "table.csv") as file:
        opened.append(file)
        file.write(b"whole")
    assert (tmp_path / "table.csv").read_bytes() == b"whole"
    assert [path.name for path in tmp_path.iterdir()] == ["table.csv"]
    with pytest.raises(ZeroDivisionError), files.new_file(tmp_path / "other.csv") as file:
        file.write(b"1" * (1 // 0))
    assert [path.name for path in tmp_path.iterdir()] == ["table.csv"]


def test_results_are_replaced_where_folders_have_no_locks(tmp_path, monkeypatch):
    def refuse(*_: object, **__: object) -> bool:
        raise PermissionError(errno.EACCES, "Permission denied")  # what Windows says of a folder

    (tmp_path / ".new-left").mkdir()
    monkeypatch.setattr(files, "lock_descriptor", refuse)
    for content in (b"first", b"second"):
        with files.replacing(tmp_path, ["table.csv"]) as stage:
            (stage / "table.csv").write_bytes(content)
    assert (tmp_path / "table.csv").read_bytes() == b"second"
    assert sorted(path.name for path in tmp_path.iterdir()) == [".new-left", "table.csv"]  # its writer may live
