"""Nothing is ever unpickled: a pickle that would make a folder is planted in every file that could hold one."""

from __future__ import annotations

import os
import pickle
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path

import layouts
import numpy as np
import pytest
import tiny
import torch
from typer.testing import CliRunner

from segcal import Binning, SegcalError
from segcal.cli import app
from segcal.evaluation.evaluation import Evaluation
from segcal.statistics import BinStatistics
from segcal.training import train
from segcal.training.runs import load_run


class Planted:
    """Makes a folder when it is unpickled."""

    def __init__(self, place: Path) -> None:
        self.place = place

    def __reduce__(self):
        return os.mkdir, (str(self.place),)


def objects(place: Path) -> np.ndarray:
    return np.array([[Planted(place)] * 4] * 4, dtype=object)


def as_npy(path: Path, place: Path) -> None:
    np.save(path, objects(place), allow_pickle=True)


def as_npz(path: Path, place: Path) -> None:
    np.savez(path, probabilities=objects(place), labels=objects(place), header=objects(place))


def as_pickle(path: Path, place: Path) -> None:
    path.write_bytes(pickle.dumps(Planted(place), protocol=2))


def as_torch(path: Path, place: Path) -> None:
    torch.save({"network": Planted(place)}, path)


def as_old_torch(path: Path, place: Path) -> None:
    torch.save({"network": Planted(place)}, path, _use_new_zipfile_serialization=False)


def inside(member: str) -> Callable[[Path, Path], None]:
    """Plants in one array of an archive and leaves the others as they are."""

    def plant(path: Path, place: Path) -> None:
        whole = path.with_name("whole.npz")
        path.rename(whole)
        with zipfile.ZipFile(whole) as old, zipfile.ZipFile(path, "w") as new:
            assert f"{member}.npy" in old.namelist()
            for name in old.namelist():
                if name != f"{member}.npy":
                    new.writestr(name, old.read(name))
            with new.open(f"{member}.npy", "w") as file:
                np.lib.format.write_array(file, objects(place), allow_pickle=True)
        whole.unlink()

    return plant


def write_maps(root: Path) -> None:
    first = np.random.default_rng(0).random((4, 4, 4), np.float32)
    layouts.save(root / "maps" / "case.nii.gz", np.stack([first, 1 - first], -1))
    layouts.save(root / "labels" / "case.nii.gz", (first < 0.4).astype(np.uint8))


def run(*arguments: object) -> str:
    """What the command says; it ends by itself, with or without success."""
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return " ".join(result.output.split())


@pytest.fixture
def place(tmp_path):
    """Where the planted folder would be; it must not be there at the end."""
    yield tmp_path / "planted"
    assert not (tmp_path / "planted").exists()


def test_the_planted_pickle_would_work(tmp_path):
    pickle.loads(pickle.dumps(Planted(tmp_path / "planted")))
    assert (tmp_path / "planted").is_dir()


@pytest.mark.parametrize(
    ("name", "plant"), [("case.npz", as_npz), ("case.npy", as_npy), ("case.npz", as_pickle), ("case.npy", as_pickle)]
)
@pytest.mark.parametrize("side", ["maps", "labels"])
def test_in_volumes(tmp_path, place, name, plant, side):
    write_maps(tmp_path)
    (tmp_path / side / "case.nii.gz").unlink()
    plant(tmp_path / side / name, place)
    run("evaluate", tmp_path / "maps", tmp_path / "labels", "--out", tmp_path / "out")
    assert "must be" in (tmp_path / "out" / "failures.csv").read_text()
    run("calibrate", "fit", tmp_path / "maps", tmp_path / "labels", "--out", tmp_path / "calibrator.json")


def test_beside_the_output_of_nnunet(tmp_path, place):
    """nnU-Net writes CASE.pkl with the properties of an image, and plans.pkl; they are passed over."""
    write_maps(tmp_path)
    for name in ("case.pkl", "plans.pkl", "plans.json"):
        as_pickle(tmp_path / "maps" / name, place)
    run("evaluate", tmp_path / "maps", tmp_path / "labels", "--out", tmp_path / "out")
    assert (tmp_path / "out" / "failures.csv").read_text().count("\n") == 1  # the heading
    assert (tmp_path / "out" / "cases.csv").exists()


@pytest.mark.parametrize("plant", [as_npz, as_pickle, inside("header"), inside("statistics"), inside("scores_voxels")])
def test_in_an_evaluation(tmp_path, place, plant):
    write_maps(tmp_path)
    run("evaluate", tmp_path / "maps", tmp_path / "labels", "--out", tmp_path / "out")
    path = tmp_path / "out" / "evaluation.npz"
    plant(path, place)
    with pytest.raises(SegcalError, match=r"evaluation\.npz must be a file of the format"):
        Evaluation.load(path)
    assert "must be a file of" in run("report", tmp_path / "out", "--out", tmp_path / "report.html")
    assert "must be a file of" in run("compare", f"a={tmp_path / 'out'}", f"b={tmp_path / 'out'}", "--out", tmp_path)


def test_in_the_sums_of_a_case_that_a_resumed_evaluation_finds(tmp_path, place):
    write_maps(tmp_path)
    command = ("evaluate", tmp_path / "maps", tmp_path / "labels", "--out", tmp_path / "out")
    run(*command)
    (part,) = (tmp_path / "out").rglob("*/*.npz")
    expected = (tmp_path / "out" / "cases.csv").read_text()
    inside("bins")(part, place)
    (tmp_path / "out" / "cases.csv").unlink()
    run(*command)
    assert (tmp_path / "out" / "cases.csv").read_text() == expected  # measured again


@pytest.mark.parametrize("member", ["count", "label_sum"])
def test_in_bin_statistics(tmp_path, place, member):
    path = tmp_path / "statistics.npz"
    BinStatistics(*[torch.zeros(1, 1, 20, dtype=torch.float64)] * 3, Binning(20)).save(path)
    inside(member)(path, place)
    with pytest.raises(SegcalError, match=r"statistics\.npz must be a file of the format"):
        BinStatistics.load(path)


@pytest.fixture(scope="module")
def trained(tmp_path_factory, one_thread):
    folder = tmp_path_factory.mktemp("trained")
    config = tiny.tiny_config("acdc", layouts.write_acdc(folder / "data", patients=4))
    train(config, folder / "run")
    return folder


@pytest.mark.parametrize("plant", [as_pickle, as_torch, as_old_torch])
def test_in_a_checkpoint_that_predicts(trained, tmp_path, place, plant):
    """tests/training/test_training.py has the one that training goes on from."""
    shutil.copytree(trained / "run", tmp_path / "run")
    plant(tmp_path / "run" / "best.pt", place)
    with pytest.raises(SegcalError, match=r"best\.pt must be a checkpoint of a run"):
        load_run(tmp_path / "run")
    assert "must be a checkpoint of a run" in run("predict", tmp_path / "run", "--out", tmp_path / "out")


@pytest.mark.parametrize("plant", [as_npy, as_pickle])
def test_in_prepared_images(trained, tmp_path, place, plant):
    shutil.copytree(trained / "prepared", tmp_path / "prepared")
    arrays = list((tmp_path / "prepared").glob("*.npy"))
    assert arrays
    for path in arrays:
        plant(path, place)
    config = tiny.tiny_config("acdc", trained / "data" / "database")
    train(config, tmp_path / "again")  # from images that were prepared anew
    for path in arrays:
        np.load(path, allow_pickle=False)
