"""Kills commands at random moments, over and over, and compares what the last restart made with an undisturbed run.

    python tests/faults/kills.py --kills 50            # evaluate, raters, calibrate, audit, train, study
    python tests/faults/kills.py --kills 50 evaluate

Each round starts in a new folder, kills the command (SIGKILL, with all its processes) a few times, lets it finish, and
looks at every file: whole, and the same as without kills.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))  # helpers beside conftest.py

KILLS_A_ROUND = 5
PATIENCE_S = 600


@dataclass(frozen=True)
class Attack:
    """A command and how to read what it made."""

    command: Callable[[Path, Path], list[str]]
    """Arguments of segcal, given the folder of data and the one to write."""
    prepare: Callable[[Path], None]
    result: Callable[[Path], dict[str, Any]]


def make_maps(data: Path, *, size: tuple[int, int, int] = (48, 48, 32)) -> None:
    import nibabel

    generator = np.random.default_rng(0)
    for i in range(12):
        labels = generator.integers(0, 3, size).astype(np.uint8)
        sharp = np.eye(3)[labels] * generator.uniform(0, 2, (*labels.shape, 1)) + generator.normal(
            0, 1, (*labels.shape, 3)
        )
        maps = np.exp(sharp) / np.exp(sharp).sum(-1, keepdims=True)
        for name, array in (("maps", maps.astype(np.float32)), ("labels", labels)):
            (data / name).mkdir(exist_ok=True)
            nibabel.Nifti1Image(array, np.eye(4)).to_filename(data / name / f"case_{i:02d}.nii.gz")


def make_images(data: Path) -> None:
    import layouts

    layouts.write_acdc(data, patients=4, test_patients=2, size=(24, 24, 8))


STUDY = """
title = "Three methods"
methods = ["dice-ce", "dice-ce + temperature", "soft-ace"]
preset = "small"
[datasets.phantom]
dataset = "phantom"
[set.data]
patch = [16, 16, 16]
[set.training]
epochs = 3
validate_every = 1
"""


def make_study(data: Path) -> None:
    from segcal.datasets import make_phantom

    make_phantom(data / "phantom", cases=8, size=(40, 40, 26))
    (data / "study.toml").write_text(STUDY, encoding="utf-8")


def bytes_of(folder: Path, *names: str) -> dict[str, Any]:
    return {name: (folder / name).read_bytes() for name in names}


def without_times(folder: Path) -> list[dict[str, str]]:
    rows = list(csv.DictReader((folder / "log.csv").read_text(encoding="utf-8").splitlines()))
    return [{name: value for name, value in row.items() if name != "seconds"} for row in rows]


def weights_of(folder: Path) -> dict[str, Any]:
    import torch

    found = {}
    for name in ("best.pt", "last.pt"):
        content = torch.load(folder / name, weights_only=True)["network"]
        found |= {f"{name} {key}": value.numpy().tobytes() for key, value in content.items()}
    return found


def trained(folder: Path) -> dict[str, Any]:
    return {"log": without_times(folder), **weights_of(folder)}


def studied(folder: Path) -> dict[str, Any]:
    tables = (folder / "results").iterdir()
    return {
        path.name: path.read_bytes() for path in tables if path.suffix in (".csv", ".md") and path.name != "runs.csv"
    }


def calibrated(folder: Path) -> dict[str, Any]:
    return bytes_of(folder, "calibrator.json")


def evaluated(folder: Path) -> dict[str, Any]:
    return bytes_of(folder, "cases.csv", "summary.csv", "summary.json", "evaluation.npz", "failures.csv")


def make_raters(data: Path) -> None:
    """The labels of the maps, and those of a second rater, which are flipped along an axis."""
    import nibabel

    make_maps(data)
    (data / "second").mkdir()
    for path in sorted((data / "labels").iterdir()):
        labels = np.flip(np.asarray(nibabel.load(path).dataobj), 0)
        nibabel.Nifti1Image(np.ascontiguousarray(labels), np.eye(4)).to_filename(data / "second" / path.name)


def rated(folder: Path) -> dict[str, Any]:
    names = ["raters.csv", "raters_summary.csv"]
    names += [f"raters/{rater}/{name}" for rater in ("labels", "second") for name in ("cases.csv", "evaluation.npz")]
    return evaluated(folder) | bytes_of(folder, *names)


def audited(folder: Path) -> dict[str, Any]:
    """What was fitted and measured; the page and NEXT.md name folders."""
    files = [path for path in sorted(folder.rglob("*")) if path.suffix == ".csv" and ".parts" not in path.parts]
    found = {str(path.relative_to(folder)): path.read_bytes() for path in files}
    assert (folder / "NEXT.md").is_file()
    return found | bytes_of(folder, "calibrator.json")


def changes(epochs: int) -> list[str]:
    import tiny

    return [part for change in tiny.changes(epochs=epochs) for part in ("--set", change)]


ATTACKS = {
    "evaluate": Attack(
        lambda data, out: ["evaluate", str(data / "maps"), str(data / "labels"), "--out", str(out), "--workers", "2"],
        make_maps,
        evaluated,
    ),
    "raters": Attack(
        lambda data, out: ["evaluate", *map(str, (data / "maps", data / "labels", data / "second")), "--out", str(out)],
        make_raters,
        rated,
    ),
    "audit": Attack(
        lambda data, out: ["audit", str(data / "maps"), str(data / "labels"), "--out", str(out), "--cases", "2"],
        partial(make_maps, size=(12, 12, 8)),
        audited,
    ),
    "calibrate": Attack(
        lambda data, out: [
            *("calibrate", "fit", str(data / "maps"), str(data / "labels")),
            *("--method", "vector", "--out", str(out / "calibrator.json")),
        ],
        make_maps,
        calibrated,
    ),
    "train": Attack(
        lambda data, out: [
            *("train", "--dataset", "acdc", "--data-root", str(data / "database"), "--method", "soft-ace"),
            *("--out", str(out), "--prepared", str(out / "prepared"), *changes(6)),
        ],
        make_images,
        trained,
    ),
    "study": Attack(
        lambda data, out: [
            *("study", "run", str(data / "study.toml"), "--out", str(out), "--data", f"phantom={data / 'phantom'}"),
        ],
        make_study,
        studied,
    ),
}


def start(arguments: list[str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "segcal", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )


def finish(arguments: list[str]) -> float:
    """Run a command to its end; the seconds that took."""
    began = time.monotonic()
    process = start(arguments)
    said, _ = process.communicate(timeout=PATIENCE_S)
    if process.returncode:
        raise AssertionError(f"segcal {' '.join(arguments)} ended with {process.returncode}:\n{said}")
    return time.monotonic() - began


def killed(arguments: list[str], after_s: float) -> bool:
    """Whether the command was still at work when it was killed."""
    process = start(arguments)
    try:
        process.communicate(timeout=after_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        return True
    if process.returncode:
        raise AssertionError(f"segcal {' '.join(arguments)} ended with {process.returncode} after a kill")
    return False


def broken_files(folder: Path) -> list[str]:
    """Files under their final names that cannot be read whole."""
    import torch

    found = []
    for path in sorted(folder.rglob("*")):
        if not path.is_file() or path.name.startswith("."):
            continue
        try:
            if path.suffix == ".npz":
                with np.load(path, allow_pickle=False) as content:
                    [content[name] for name in content.files]
            elif path.suffix == ".npy":
                np.load(path, allow_pickle=False)
            elif path.suffix == ".json":
                json.loads(path.read_text(encoding="utf-8"))
            elif path.suffix == ".pt":
                torch.load(path, weights_only=True)
            elif path.suffix == ".csv":
                text = path.read_text(encoding="utf-8")
                assert text.endswith("\n")
                assert len({len(row) for row in csv.reader(text.splitlines())}) == 1
        except Exception as error:
            found.append(f"{path.relative_to(folder)}: {error}")
    return found


def litter(folder: Path) -> list[str]:
    """What writing left behind, but for locks and the lists of what `replacing` wrote."""
    return [
        str(path.relative_to(folder))
        for path in folder.rglob(".*")
        if path.is_file() and path.name not in (".lock", ".written.json")
    ]


def attack(name: str, kills: int, *, seed: int = 0, warm: bool = False) -> dict[str, Any]:
    """Kill a command so many times; what happened, or AssertionError. `warm`: nothing is left to be compiled."""
    chosen, dice = ATTACKS[name], random.Random(seed)
    with tempfile.TemporaryDirectory() as folder:
        data, calm, again = (Path(folder, name) for name in ("data", "calm", "again"))
        for made in (data, calm, again):
            made.mkdir()
        chosen.prepare(data)
        seconds = finish(chosen.command(data, calm))
        expected = chosen.result(calm)
        if not warm:  # the first has compiled something; another one tells how long it takes
            seconds = finish(chosen.command(data, again))
            assert chosen.result(again) == expected, f"{name} does not make the same twice"
        done = rounds = 0
        while done < kills:
            out = Path(folder, f"round-{rounds}")
            out.mkdir()
            rounds += 1
            command = chosen.command(data, out)
            for _ in range(min(KILLS_A_ROUND, kills - done)):
                if not killed(command, dice.uniform(0, seconds)):
                    break  # it was done before
                done += 1
                assert not broken_files(out), broken_files(out)
            finish(command)
            assert not broken_files(out), broken_files(out)
            got = chosen.result(out)
            different = [key for key in expected.keys() | got.keys() if expected.get(key) != got.get(key)]
            assert not different, f"{name}, round {rounds}: {different} differ from the undisturbed run"
            left = litter(out)
            assert not left, f"{name}, round {rounds}: {left} were left behind"
            shutil.rmtree(out)
            print(f"{name}: {done} kills in {rounds} rounds", file=sys.stderr, flush=True)
    return {"command": name, "kills": done, "rounds": rounds, "undisturbed_s": round(seconds, 1)}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("commands", nargs="*", default=list(ATTACKS), metavar="|".join(ATTACKS))
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    for name in given.commands:
        print(json.dumps(attack(name, given.kills, seed=given.seed)), flush=True)
