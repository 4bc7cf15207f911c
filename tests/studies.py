"""A study that takes seconds, and a hand that kills a worker in the middle of a training."""

from __future__ import annotations

import csv
import json
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from layouts import write_acdc

EPOCHS = 40
STUDY = """
title = "Two runs"
methods = ["dice-ce", "dice-ce + temperature", "soft-ace"]
preset = "paper"
[datasets.ACDC]
dataset = "acdc"
root = "data/database"
[set]
network.options = {{init_filters = 4, blocks_down = [1, 1], norm = "BATCH", dsdepth = 2}}
data.patch = [16, 16, 4]
training.epochs = {epochs}
training.validate_every = 20
"""


def write_study(folder: Path) -> Path:
    """Its file, with its data beside it."""
    write_acdc(folder / "data", patients=4, test_patients=2)
    (folder / "two.toml").write_text(STUDY.format(epochs=EPOCHS), encoding="utf-8")
    return folder / "two.toml"


def numbers(out: Path) -> dict[str, bytes]:
    """Every number of every case, by run and side."""
    found = {str(path.relative_to(out)): path.read_bytes() for path in (out / "runs").rglob("cases.csv")}
    assert len(found) == 5  # of two runs on validation and test cases, of a temperature on test cases
    return found


def epochs_of(log: Path) -> list[dict[str, str]]:
    """The rows of a training's log, each with the seconds that its epoch took."""
    return list(csv.DictReader(log.read_text(encoding="utf-8").splitlines()))


@contextmanager
def killing(out: Path, victim: Callable[[int], int]) -> Iterator[dict[Path, list[dict[str, str]]]]:
    """Meanwhile, kill a process while a run trains: the victim, given the process of the run.

    Gives the log of that run as it was just before.
    """
    killed: dict[Path, list[dict[str, str]]] = {}
    over = threading.Event()

    def look() -> None:
        while not over.wait(0.005):
            for log in out.glob("runs/*/log.csv"):
                rows = epochs_of(log)
                if 3 <= len(rows) < EPOCHS - 10:
                    pid = victim(json.loads((log.parent / "progress.json").read_text(encoding="utf-8"))["pid"])
                    killed[log] = rows
                    os.kill(pid, signal.SIGKILL)
                    return

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield killed
    finally:
        over.set()
        thread.join()


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def check_resumed(killed: dict[Path, list[dict[str, str]]]) -> None:
    """The run that was killed has all epochs once, and those before its death were not done again."""
    ((log, before),) = killed.items()
    rows = epochs_of(log)
    assert [int(row["epoch"]) for row in rows] == list(range(1, EPOCHS + 1))
    assert rows[: len(before)] == before
