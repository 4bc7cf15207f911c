"""Short trainings from beginning to end: what they write, how they go on after anything that stopped them."""

from __future__ import annotations

import csv
import errno
import math
import os
import pickle
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import layouts
import pytest
import tiny
import torch
import workers
from typer.testing import CliRunner

from segcal._io import files
from segcal.cli import app
from segcal.datasets import open_dataset, read_split
from segcal.errors import ConfigError, FileError, SegcalError
from segcal.training import loop, train
from segcal.training.checkpoint import load_checkpoint
from segcal.training.config import make_config, read_config
from segcal.training.distributed import Processes
from segcal.training.inference import evaluate_prepared
from segcal.training.preprocessing import PreparedStore
from segcal.training.runs import evaluate_run, load_run

EPOCHS = 4
ONE_THREAD = os.environ | {"OMP_NUM_THREADS": "1"}
PATIENCE = 120  # seconds, for processes that import torch and train an instant
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    return layouts.write_acdc(tmp_path_factory.mktemp("acdc"))


@pytest.fixture(scope="module")
def whole(root, tmp_path_factory) -> Path:
    """A run that nothing interrupted."""
    out = tmp_path_factory.mktemp("runs") / "whole"
    train(tiny.tiny_config("acdc", root, epochs=EPOCHS), out)
    return out


def rows(folder: Path) -> list[dict[str, str]]:
    with (folder / "log.csv").open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


def without_seconds(folder: Path) -> list[dict[str, str]]:
    return [{name: value for name, value in row.items() if name != "seconds"} for row in rows(folder)]


def same_weights(one: dict, other: dict) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


def same_runs(one: Path, other: Path) -> bool:
    """To the bit."""
    pairs = [[load_checkpoint(folder / name) for folder in (one, other)] for name in ("last.pt", "best.pt")]
    assert all(same_weights(a["network"], b["network"]) for a, b in pairs)
    moments = [pairs[0][i]["optimizer"]["state"] for i in (0, 1)]
    assert all(same_weights(moments[0][key], moments[1][key]) for key in moments[0])
    assert without_seconds(one) == without_seconds(other)
    return True


class StoppedError(Exception):
    pass


def stop_after(epoch: int):
    def progress(done: int, total: int, text: str) -> None:
        if done == epoch:
            raise StoppedError

    return progress


def started(config, out: Path, *, epochs: int = 1) -> Path:
    """A run that stopped after so many epochs."""
    with pytest.raises(StoppedError):
        train(config, out, progress=stop_after(epochs))
    return out


def run_cli(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def train_arguments(root, out, **options):
    sets = [part for change in tiny.changes(**options) for part in ("--set", change)]
    return ["train", "--dataset", "acdc", "--data-root", root, "--method", "soft-ace", "--out", out, *sets]


def test_without_a_gpu_a_smaller_network_is_suggested_and_preparing_is_shown(root, tmp_path, monkeypatch):
    told = []
    monkeypatch.setattr("segcal.cli.training.say", told.append)
    done = run_cli(*train_arguments(root, tmp_path / "run"), "--prepared", tmp_path / "prepared")
    assert done.exit_code == 0, done.output
    assert told[0].startswith("no GPU found")
    assert "--preset small" in told[0]
    (stored,) = (line for line in told if "prepared images" in line)
    size = sum(path.stat().st_size for path in (tmp_path / "prepared").glob("*.npy"))
    assert f"take {size / 1e6:.1f} MB in {tmp_path / 'prepared'}" in stored
    texts = []
    train(tiny.tiny_config("acdc", root), tmp_path / "other", progress=lambda done, total, text: texts.append(text))
    prepared = [text for text in texts if text.startswith("preparing image ")]
    assert prepared == [f"preparing image {i + 1} of {len(prepared)}" for i in range(len(prepared))]
    assert len(prepared) > 2


@pytest.mark.parametrize(
    ("name", "classes"),
    [
        ("acdc", ("right ventricle", "myocardium", "left ventricle")),
        ("amos", None),
        ("brats", ("ET", "TC", "WT")),
        ("kits", ("tumour", "mass", "kidney and masses")),
        ("decathlon", ("near", "far")),
        ("nnunet", ("liver", "spleen", "lesion")),
    ],
)
def test_each_dataset_goes_from_files_to_an_evaluation(tmp_path, name, classes):
    data = getattr(layouts, f"write_{name}")(tmp_path / "data")
    done = train(tiny.tiny_config(name, data), tmp_path / "run")
    assert (done.epochs, done.best_epoch) == (1, 1)
    run = load_run(tmp_path / "run")
    outcome = evaluate_run(run, tmp_path / "out")
    assert outcome.failures == []
    shown = outcome.evaluation.foreground()
    assert shown.classes == (classes or open_dataset(name, data).classes[1:])
    assert set(shown.cases) == set(read_split(tmp_path / "run" / "split.txt", run.dataset).test)
    for metric in ("dice", "ace", "ece", "mce"):
        values = shown.case_metrics()[metric]
        known = values[~values.isnan()]
        assert len(known)
        assert ((known >= 0) & (known <= 1)).all()
    voxels = shown.statistics.count.sum(-1)  # every voxel of the original grid, in every class
    assert (voxels == math.prod(layouts.SIZE if name != "amos" else (30, 8, 6))).all()


def test_the_loss_decreases_and_the_dice_rises_where_there_is_something_to_learn(root, tmp_path):
    config = tiny.tiny_config("acdc", root, epochs=8, more=("training.patches_per_case=3",))
    train(config, tmp_path / "run")
    found = rows(tmp_path / "run")
    assert float(found[-1]["loss"]) < 0.6 * float(found[0]["loss"])
    assert float(found[-1]["dice"]) > 0.6


def test_the_log_has_a_row_an_epoch_and_validation_where_there_was_one(root, tmp_path):
    config = tiny.tiny_config("acdc", root, epochs=5, more=("training.validate_every=2",))
    train(config, tmp_path / "run")
    found = rows(tmp_path / "run")
    assert list(found[0]) == [
        "epoch", "learning_rate", "loss", "dice_loss", "ce_loss", "ace_loss", "seconds", "dice", "ace", "ece", "mce",
    ]  # fmt: skip
    assert [int(row["epoch"]) for row in found] == [1, 2, 3, 4, 5]
    assert [bool(row["dice"]) for row in found] == [False, True, False, True, True]  # the last epoch always
    for row in found:
        assert all(math.isfinite(float(row[name])) for name in ("loss", "dice_loss", "ce_loss", "ace_loss"))
    assert list((tmp_path / "run" / "tensorboard").iterdir())


def test_the_learning_rate_warms_up_from_half_over_two_epochs_and_falls_along_a_cosine():
    training = make_config(dataset="acdc", root="x", changes=["training.epochs=10"]).training
    some = SimpleNamespace(config=SimpleNamespace(training=training), _peak_rate=1e-4)
    rates = {epoch: loop._Training.rate(some, epoch) / 1e-4 for epoch in (0, 1, 2, 4, 6, 8, 9.9, 10)}
    assert rates[0] == 0.5
    assert rates[1] == 0.75
    assert rates[2] == 1
    assert rates[4] == pytest.approx((1 + math.sqrt(0.5)) / 2)  # cosine of 45 degrees
    assert rates[6] == pytest.approx(0.5)
    assert rates[8] == pytest.approx((1 - math.sqrt(0.5)) / 2)
    assert 0 < rates[9.9] < 0.001
    assert rates[10] == pytest.approx(0, abs=1e-12)


def test_a_run_shorter_than_the_warm_up_still_reaches_its_peak():
    training = make_config(dataset="acdc", root="x", changes=["training.epochs=2"]).training
    some = SimpleNamespace(config=SimpleNamespace(training=training), _peak_rate=1.0)
    assert [loop._Training.rate(some, epoch) for epoch in (0, 1, 2)] == pytest.approx([0.5, 1, 0])


def test_the_logged_rate_is_that_of_the_epochs_last_step(whole):
    found = [float(row["learning_rate"]) for row in rows(whole)]
    steps = 2  # two patients to train, with two frames each, in batches of two
    warm = [0.01 * (0.5 + 0.5 * (epoch + (steps - 1) / steps) / 2) for epoch in (0, 1)]
    cool = [0.01 * (1 + math.cos(math.pi * (epoch + 0.5) / 2)) / 2 for epoch in (0, 1)]
    assert found == pytest.approx(warm + cool)


def validation(folder: Path, prepared: Path) -> dict[str, float]:
    """Figures of best.pt, in this process alone."""
    run = load_run(folder)
    store = PreparedStore(prepared, run.dataset, run.config.data)
    alone = Processes(0, 1, torch.device("cpu"))
    found = evaluate_prepared(run.network, run.cases("validation"), store, run.dataset, run.config, alone)
    values = found.case_values()
    return {metric: values[None, metric].nanmean().item() for metric in ("dice", "ace", "ece", "mce")}


def test_the_best_network_is_that_of_the_epoch_with_the_highest_validation_dice(whole):
    found = rows(whole)
    best = max(found, key=lambda row: float(row["dice"]))
    content = load_checkpoint(whole / "best.pt")
    assert content["epoch"] == int(best["epoch"])
    figures = validation(whole, whole.parent / "prepared")
    assert figures == pytest.approx({metric: float(best[metric]) for metric in figures}, abs=1e-6)


def test_a_run_is_described_by_what_lies_in_its_folder(whole, root):
    config = read_config(whole / "config.toml")
    assert config == tiny.tiny_config("acdc", root, epochs=EPOCHS).resolved(open_dataset("acdc", root))
    split = read_split(whole / "split.txt", open_dataset("acdc", root))
    assert [len(side) for side in (split.train, split.validation, split.test)] == [4, 2, 2]
    assert torch.__version__ in (whole / "versions.json").read_text()


def test_that_file_runs_it_again(whole, root, tmp_path):
    train(read_config(whole / "config.toml"), tmp_path / "again")
    assert same_runs(whole, tmp_path / "again")


@pytest.mark.parametrize("epoch", [0, 1, 3])
def test_a_run_stopped_after_an_epoch_ends_with_the_same_weights(whole, root, tmp_path, epoch):
    config = tiny.tiny_config("acdc", root, epochs=EPOCHS)
    started(config, tmp_path / "run", epochs=epoch)
    texts = []
    train(config, tmp_path / "run", progress=lambda done, total, text: texts.append(text))
    assert texts[0] == (f"going on after epoch {epoch}" if epoch else "preparing images")
    assert same_runs(whole, tmp_path / "run")


def test_a_run_that_is_done_trains_no_further(whole, root, tmp_path):
    shutil.copytree(whole, tmp_path / "run")
    before = (tmp_path / "run" / "last.pt").read_bytes()
    done = train(tiny.tiny_config("acdc", root, epochs=EPOCHS), tmp_path / "run")
    assert (tmp_path / "run" / "last.pt").read_bytes() == before
    assert done.best_epoch == load_checkpoint(whole / "best.pt")["epoch"]
    assert rows(tmp_path / "run") == rows(whole)


def test_a_log_that_was_killed_before_its_last_row_is_made_whole(whole, root, tmp_path):
    shutil.copytree(whole, tmp_path / "run")
    log = tmp_path / "run" / "log.csv"
    log.write_text("".join(log.read_text().splitlines(keepends=True)[:-1]))
    train(tiny.tiny_config("acdc", root, epochs=EPOCHS), tmp_path / "run")
    assert rows(tmp_path / "run") == rows(whole)


def wait_for(condition, process) -> None:
    end = time.monotonic() + PATIENCE
    while not condition():
        assert process.poll() is None, process.communicate()[1].decode()
        assert time.monotonic() < end, "too slow"
        time.sleep(0.01)


def test_a_run_killed_within_an_epoch_ends_with_the_same_weights_after_the_same_command(root, tmp_path):
    options = {"epochs": 5, "more": ("training.patches_per_case=12",)}
    arguments = [str(part) for part in train_arguments(root, tmp_path / "killed", **options)]
    process = subprocess.Popen([sys.executable, "-m", "segcal", *arguments], stderr=subprocess.PIPE, env=ONE_THREAD)
    log = tmp_path / "killed" / "log.csv"
    wait_for(lambda: log.exists() and len(log.read_text().splitlines()) > 2, process)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert len(rows(tmp_path / "killed")) < 5
    again = run_cli(*arguments)
    assert again.exit_code == 0, again.output
    assert "best validation DSC" in again.output
    train(tiny.tiny_config("acdc", root, **options), tmp_path / "whole")
    assert same_runs(tmp_path / "whole", tmp_path / "killed")


@pytest.mark.parametrize("content", [b"", b"garbage", b"PK\x03\x04" + 100 * b"\0"], ids=["empty", "text", "zip"])
def test_a_checkpoint_that_is_none_is_refused_by_its_name(whole, root, tmp_path, content):
    shutil.copytree(whole, tmp_path / "run")
    (tmp_path / "run" / "last.pt").write_bytes(content)
    with pytest.raises(FileError, match=r"last\.pt must be a checkpoint of a run; "):
        train(tiny.tiny_config("acdc", root, epochs=EPOCHS), tmp_path / "run")


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9, 0.999])
def test_half_a_checkpoint_is_refused_by_its_name(whole, tmp_path, share):
    content = (whole / "last.pt").read_bytes()
    path = tmp_path / "last.pt"
    path.write_bytes(content[: int(share * len(content))])
    with pytest.raises(FileError, match=r"last\.pt must be a checkpoint of a run; "):
        load_checkpoint(path)


def test_a_checkpoint_with_a_flipped_bit_is_refused_by_its_name(whole, tmp_path):
    content = (whole / "best.pt").read_bytes()
    weights = max(
        (value.numpy().tobytes() for value in load_checkpoint(whole / "best.pt")["network"].values()), key=len
    )
    place = content.index(weights) + len(weights) // 2
    path = tmp_path / "best.pt"
    path.write_bytes(content[:place] + bytes([content[place] ^ 64]) + content[place + 1 :])
    with pytest.raises(FileError, match=r"best\.pt must be a checkpoint of a run; its part \S+ is damaged\. Train"):
        load_checkpoint(path)


def test_a_checkpoint_of_another_kind_is_refused_by_its_name(whole, root, tmp_path):
    shutil.copytree(whole, tmp_path / "run")
    shutil.copy(whole / "best.pt", tmp_path / "run" / "last.pt")
    with pytest.raises(FileError, match=r"last\.pt must be the last checkpoint of a run; 'optimizer'"):
        train(tiny.tiny_config("acdc", root, epochs=EPOCHS), tmp_path / "run")
    torch.save({"other": 3}, tmp_path / "run" / "last.pt")
    with pytest.raises(FileError, match="it holds no network"):
        train(tiny.tiny_config("acdc", root, epochs=EPOCHS), tmp_path / "run")


class Planted:
    def __init__(self, place: Path) -> None:
        self.place = place

    def __reduce__(self):
        return os.mkdir, (str(self.place),)


@pytest.mark.parametrize("how", ["pickle", "torch"])
def test_a_pickle_planted_in_a_checkpoint_is_not_executed(whole, root, tmp_path, how):
    shutil.copytree(whole, tmp_path / "run")
    path, place = tmp_path / "run" / "last.pt", tmp_path / "planted"
    if how == "torch":
        torch.save({"network": Planted(place)}, path)
    else:
        path.write_bytes(pickle.dumps(Planted(place), protocol=2))
    with pytest.raises(FileError, match=r"last\.pt must be a checkpoint of a run"):
        train(tiny.tiny_config("acdc", root, epochs=EPOCHS), tmp_path / "run")
    assert not place.exists()


def test_another_configuration_in_the_folder_of_a_run_is_refused_by_its_key(whole, root):
    before = (whole / "last.pt").read_bytes()
    other = tiny.tiny_config("acdc", root, epochs=EPOCHS, more=("loss.ace.weight=0.3", "training.loader_workers=1"))
    with pytest.raises(ConfigError) as caught:
        train(other, whole)
    assert str(caught.value) == (
        f"{whole} holds another run, which differs in loss.ace.weight (1.0 there, 0.3 now). Choose another --out."
    )
    assert (whole / "last.pt").read_bytes() == before


def test_a_folder_where_nothing_was_learned_yet_takes_another_configuration(root, tmp_path):
    wrong = tiny.tiny_config("acdc", root, patch=(15, 16, 4))
    with pytest.raises(ConfigError, match=r"data\.patch must be divisible"):
        train(wrong, tmp_path / "run")
    assert train(tiny.tiny_config("acdc", root), tmp_path / "run").epochs == 1


def test_data_that_moved_are_the_same_run(whole, root, tmp_path):
    shutil.copytree(whole, tmp_path / "run")
    shutil.copytree(root, tmp_path / "moved")
    done = train(tiny.tiny_config("acdc", tmp_path / "moved", epochs=EPOCHS), tmp_path / "run")
    assert done.best_epoch == load_checkpoint(whole / "best.pt")["epoch"]


def test_a_run_whose_cases_would_change_sides_is_refused(tmp_path):
    data = layouts.write_acdc(tmp_path / "data", patients=4)
    config = tiny.tiny_config("acdc", data, epochs=2)
    started(config, tmp_path / "run")
    shutil.rmtree(tmp_path / "data")
    layouts.write_acdc(tmp_path / "data", patients=12)
    with pytest.raises(ConfigError, match=r"holds a run with another split, .*split\.txt"):
        train(config, tmp_path / "run")


@pytest.mark.parametrize(("lines", "numbers"), [("test patient001", "0 and 0"), ("train patient001", "2 and 0")])
def test_a_split_without_cases_to_train_or_validate_is_refused(root, tmp_path, lines, numbers):
    (tmp_path / "split.txt").write_text(lines)
    config = tiny.tiny_config("acdc", root, more=(f"data.split={tmp_path / 'split.txt'}",))
    with pytest.raises(ConfigError, match=f"must have cases to train and to validate; it has {numbers}"):
        train(config, tmp_path / "run")


def test_a_second_process_in_the_same_folder_is_refused(root, tmp_path):
    out = tmp_path / "run"
    out.mkdir()
    with files.locked(out / ".lock", out), pytest.raises(ConfigError, match="is being written by another process"):
        train(tiny.tiny_config("acdc", root), out)
    assert train(tiny.tiny_config("acdc", root), out).epochs == 1


@pytest.fixture
def half(tmp_path):
    """Data of its own, and a run on them that stopped after its first epoch."""
    data = layouts.write_acdc(tmp_path / "data")
    config = tiny.tiny_config("acdc", data, epochs=2)
    return SimpleNamespace(data=data, config=config, out=started(config, tmp_path / "run"))


def test_a_case_that_cannot_be_read_is_named_and_leaves_the_checkpoint(half):
    before = (half.out / "last.pt").read_bytes()
    name = read_split(half.out / "split.txt", open_dataset("acdc", half.data)).train[0]
    (image,) = half.data.rglob(f"{name}.nii.gz")
    image.write_bytes(image.read_bytes()[:200])
    with pytest.raises(FileError, match=f"{name}: {name}.nii.gz must be"):
        train(half.config, half.out)
    assert (half.out / "last.pt").read_bytes() == before


def full(descriptor: int) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_full_disk_leaves_the_checkpoint_of_before_and_says_so(half, monkeypatch):
    before = {name: (half.out / name).read_bytes() for name in ("last.pt", "best.pt", "log.csv")}

    def fill(done: int, total: int, text: str) -> None:
        monkeypatch.setattr(files.os, "fsync", full)

    with pytest.raises(
        FileError, match=r"\.pt cannot be written: No space left on device\. The previous checkpoint is kept"
    ):
        train(half.config, half.out, progress=fill)
    assert {name: (half.out / name).read_bytes() for name in before} == before
    assert not [path for path in half.out.iterdir() if path.name.startswith((".last", ".best"))]
    monkeypatch.undo()
    assert train(half.config, half.out).epochs == 2


def test_a_loss_that_is_no_number_stops_the_run_before_its_checkpoint(half, monkeypatch):
    before = (half.out / "last.pt").read_bytes()
    monkeypatch.setattr(loop._Training, "rate", lambda self, epoch: math.inf)
    with pytest.raises(SegcalError, match=r"it became nan in epoch 2\. The checkpoint of epoch 1 stands\. Lower"):
        train(half.config, half.out)
    assert (half.out / "last.pt").read_bytes() == before


def test_a_loss_that_is_no_number_at_once_speaks_of_no_checkpoint(root, tmp_path):
    config = tiny.tiny_config("acdc", root, more=("training.learning_rate=1e30",))
    with pytest.raises(SegcalError, match=r"it became nan in epoch 1\. Lower training\.learning_rate"):
        train(config, tmp_path / "run")


def test_patches_cut_by_other_processes_give_the_same_weights(root, tmp_path, whole):
    config = tiny.tiny_config("acdc", root, epochs=EPOCHS, more=("training.loader_workers=1",))
    train(config, tmp_path / "run", prepared=whole.parent / "prepared")
    assert same_runs(whole, tmp_path / "run")


@pytest.mark.long
def test_two_processes_end_with_one_network_whose_figures_one_process_finds_again(root, tmp_path):
    arguments = train_arguments(root, tmp_path / "run", epochs=2)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*command, workers.__file__, str(tmp_path), *map(str, arguments)],
        env=ONE_THREAD,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    first, second = (torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in (0, 1))
    assert same_weights(first, second)  # batch norm's statistics included
    assert same_weights(first, load_checkpoint(tmp_path / "run" / "last.pt")["network"])
    found = rows(tmp_path / "run")
    assert len(found) == 2
    best = found[load_checkpoint(tmp_path / "run" / "best.pt")["epoch"] - 1]
    figures = validation(tmp_path / "run", tmp_path / "prepared")
    assert figures == pytest.approx({metric: float(best[metric]) for metric in figures}, abs=1e-6)


def test_the_command_trains_and_says_where(root, tmp_path):
    done = run_cli(*train_arguments(root, tmp_path / "run"))
    assert done.exit_code == 0, done.output
    assert f"in epoch 1 of 1: {tmp_path / 'run'}" in done.stderr
    assert "testing/ has no labeled patients here" in done.stderr  # what is special about the split
    assert done.stdout == ""


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--dataset", "acdc"], "ConfigError: the configuration: data.root must be given"),
        (["--dataset", "acdc", "--data-root", "nowhere"], "nowhere must have the layout"),
        (["--dataset", "adcd", "--data-root", "."], "Did you mean 'acdc'?"),
        (["--dataset", "acdc", "--data-root", ".", "--set", "loss.ace.num_bins=3"], "Did you mean 'loss.ace.bins'?"),
        (["--dataset", "acdc", "--data-root", ".", "--method", "dsc"], "method must be one of"),
        (["--config", "none.toml"], "none.toml must be a configuration file"),
    ],
)
def test_a_command_that_cannot_be_followed_ends_with_a_sentence_and_code_2(tmp_path, arguments, message):
    done = run_cli("train", "--out", tmp_path / "run", *arguments)
    assert done.exit_code == 2
    assert message in done.stderr
    assert "Traceback" not in done.output
    assert not (tmp_path / "run").exists()


def test_a_command_without_out_is_misused():
    assert run_cli("train", "--dataset", "acdc").exit_code == 2


def test_ctrl_c_says_what_is_kept_and_the_same_command_goes_on(whole, root, tmp_path, monkeypatch):
    arguments = train_arguments(root, tmp_path / "run", epochs=EPOCHS)
    train_epoch = loop._Training._train_epoch

    def interrupted(self, network, loader, epoch):
        if epoch == 2:
            raise KeyboardInterrupt
        return train_epoch(self, network, loader, epoch)

    with monkeypatch.context() as patch:
        patch.setattr(loop._Training, "_train_epoch", interrupted)
        done = run_cli(*arguments)
    assert done.exit_code == 130
    kept = f"Stopped. Finished work is kept in {tmp_path / 'run'}. Run the same command again to resume from the last"
    assert kept in done.stderr
    assert run_cli(*arguments).exit_code == 0
    assert same_runs(whole, tmp_path / "run")


def test_datasets_are_listed():
    done = run_cli("datasets")
    assert done.exit_code == 0
    assert "acdc: ACDC 2017" in done.stdout
    assert "regions  ET, TC, WT" in done.stdout


def test_a_sound_dataset_is_checked_with_code_0_and_a_broken_one_with_1(tmp_path):
    data = layouts.write_kits(tmp_path)
    sound = run_cli("datasets", "check", "kits", data)
    assert sound.exit_code == 0
    assert "0 problems" in sound.stderr
    (data / "dataset" / "case_00001" / "imaging.nii.gz").write_bytes(b"broken")
    broken = run_cli("datasets", "check", "kits", data)
    assert broken.exit_code == 1
    assert "case_00001: imaging.nii.gz must be" in broken.stdout
    assert run_cli("datasets", "check", "kits", tmp_path / "nowhere").exit_code == 2


def test_a_split_is_written_that_training_takes(root, tmp_path):
    path = tmp_path / "split.txt"
    done = run_cli("datasets", "split", "acdc", root, "--out", path, "--seed", "3")
    assert done.exit_code == 0
    assert f"4 cases to train, 2 to validate, 2 to test: {path}" in done.stderr
    train(tiny.tiny_config("acdc", root, more=(f"data.split={path}",)), tmp_path / "run")
    dataset = open_dataset("acdc", root)
    assert read_split(tmp_path / "run" / "split.txt", dataset) == read_split(path, dataset)


def test_without_the_packages_for_training_the_command_says_how_to_get_them(tmp_path):
    code = "import sys; sys.modules['monai'] = None; from segcal.cli import app; app()"
    command = [sys.executable, "-c", code, "train", "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert done.stderr.startswith("monai must be installed for this command. Type: pip install 'segcal[train]'")
