"""Cross-fitting by several processes finds the same calibrator and numbers as by one, also after a kill."""

import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import torch
from tests.calibration.test_fitting import draw, folder, save  # noqa: F401

from segcal.calibration import cross_fitting, fitting, planning
from segcal.calibration.choosing import Candidate
from segcal.calibration.fitting import fit_calibrator
from segcal.errors import LabelError, SegcalError
from segcal.kernels.threads import one_torch_thread, pass_threads

QUICK = (
    Candidate("temperature", "temperature", {}, (1.0,)),
    Candidate("vector", "vector", {"voxels": 2000}, (1.0, 0.5)),  # begins from voxels that are drawn
    Candidate("local-temperature, smoothing", "local-temperature", {"smoothing": True, "steps": 5}),
)


def test_several_processes_find_what_one_finds(folder, monkeypatch):  # noqa: F811
    """To the bit, whatever the threads of this process; a broken case is told alike, and progress never goes back."""
    monkeypatch.setattr(planning, "CANDIDATES", QUICK)
    save(folder / "probabilities" / "case_6.nii.gz", torch.ones(4, 4, 4, 3).numpy())
    (folder / "labels" / "case_6.nii.gz").write_bytes(b"broken")
    told: dict[int, list[int]] = {}
    found = []
    for workers in (1, 2):
        told[workers] = []
        found.append(
            fit_calibrator(
                folder / "probabilities", folder / "labels", folder / f"{workers}.json", folds=2, workers=workers,
                progress=lambda done, total, text, workers=workers: told[workers].append(done),
            )
        )  # fmt: skip
        assert told[workers] == sorted(told[workers])
    one, other = found
    assert (folder / "1.json").read_bytes() == (folder / "2.json").read_bytes()
    assert one.choice == other.choice
    assert [failure.case for failure in one.failures] == ["case_6"]
    assert one.failures == other.failures
    for here, there in ((one.before, other.before), (one.after, other.after)):
        for name in ("count", "confidence_sum", "label_sum"):
            assert torch.equal(getattr(here.statistics, name), getattr(there.statistics, name))
    assert [held.cases for held in one.held_out] == [held.cases for held in other.held_out]
    assert not list(folder.glob(".*.json*"))


@pytest.mark.skipif(sys.platform == "win32", reason="sends signals")
def test_killed_on_the_way_it_goes_on_to_the_same_calibrator(folder):  # noqa: F811
    """kill -9: its workers end with it, what they have made stays, and is not made again."""
    command = [sys.executable, "-m", "segcal", "calibrate", "fit", "probabilities", "labels", "--method", "vector"]
    command += ["--folds", "4", "--workers", "2"]
    parts = folder / ".c.json.parts"
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    started = subprocess.Popen([*command, "--out", "c.json"], cwd=folder, env=environment, stderr=subprocess.DEVNULL)
    try:
        end = time.monotonic() + 120
        while not list(parts.glob("*.json")) and started.poll() is None and time.monotonic() < end:
            time.sleep(0.005)
    finally:
        started.kill()
    assert started.wait() == -signal.SIGKILL
    time.sleep(0.5)  # for workers to notice
    kept = {path: path.stat().st_mtime_ns for path in parts.glob("*.json")}
    assert 1 <= len(kept) <= 4
    assert not (folder / "c.json").exists()
    texts: list[str] = []
    fit_calibrator(
        folder / "probabilities", folder / "labels", folder / "c.json", method="vector", folds=4,
        progress=lambda done, total, text: texts.append(text),
    )  # fmt: skip
    fits = {text.split(", pass")[0] for text in texts if ", pass" in text and "drawing" not in text}
    assert len(fits) == 4 - len(kept) + 1  # and the one to all cases
    fit_calibrator(folder / "probabilities", folder / "labels", folder / "calm.json", method="vector", folds=4)
    assert (folder / "c.json").read_bytes() == (folder / "calm.json").read_bytes()
    assert not parts.exists()


class Dying:
    """A pool whose jobs take their processes along."""

    def __call__(self, function, jobs):
        yield from ((i, RuntimeError("dead")) for i in range(len(jobs)))


def test_a_process_that_dies_is_told_with_its_case_or_its_fit(folder, monkeypatch):  # noqa: F811
    arguments = (folder / "probabilities", folder / "labels", folder / "c.json")
    with monkeypatch.context() as patch:
        patch.setattr(fitting, "Pool", lambda workers: Dying())
        with pytest.raises(SegcalError, match="case_0: the process that read this case died"):
            fit_calibrator(*arguments, method="temperature", folds=2, workers=2)
    monkeypatch.setattr(cross_fitting, "Pool", lambda workers: Dying())
    with pytest.raises(SegcalError, match="temperature, fitting without part 1 of 2: the process died"):
        fit_calibrator(*arguments, method="temperature", folds=2)


@pytest.mark.parametrize("workers", [1, 2])
def test_a_candidate_that_cannot_be_fitted_is_left_out(folder, monkeypatch, workers):  # noqa: F811
    """Vector scaling needs voxels of every class; a temperature does not."""
    for i in range(6):
        _, labels = draw(i)
        save(folder / "labels" / f"case_{i}.nii.gz", np.where(labels == 2, 0, labels).astype(np.uint8))
    monkeypatch.setattr(planning, "CANDIDATES", QUICK[:2])
    arguments = (folder / "probabilities", folder / "labels", folder / "c.json")
    fitted = fit_calibrator(*arguments, folds=2, workers=workers)
    assert [trial.name for trial in fitted.choice.trials] == ["as it is", "temperature"]
    with pytest.raises(LabelError, match="vector needs voxels of every class in the labels; class 2 has none"):
        fit_calibrator(*arguments, method="vector", folds=2, workers=workers)


def test_torch_keeps_to_one_thread_and_our_passes_to_theirs(monkeypatch):
    before = torch.get_num_threads()
    with one_torch_thread():
        assert (torch.get_num_threads(), pass_threads()) == (1, before)
        with one_torch_thread():
            assert (torch.get_num_threads(), pass_threads()) == (1, before)
    assert (torch.get_num_threads(), pass_threads()) == (before, before)
