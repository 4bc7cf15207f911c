"""Jobs of pools that tests spawn; without torch, so that a worker starts in no time."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path


def die_at(number: int, fatal: int) -> int:
    """The number; the process is killed if it is the fatal one."""
    if number == fatal:
        os.kill(os.getpid(), signal.SIGKILL)
    return number


def die_once(number: int, folder: Path) -> int:
    """The number; the first process that has the number 1 is killed."""
    if number == 1 and not (folder / "died").exists():
        (folder / "died").touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return number


def environment(name: str) -> tuple[int, str, str]:
    """The process and two of its variables."""
    time.sleep(0.3)  # the other worker has time to take a job
    return os.getpid(), os.environ[name], os.environ["OMP_NUM_THREADS"]


def span(seconds: float) -> tuple[float, float]:
    """When it began and ended."""
    begin = time.monotonic()
    time.sleep(seconds)
    return begin, time.monotonic()


def note(folder: Path, number: int) -> int:
    """Leaves a mark for every time that it is called with a number."""
    with (folder / str(number)).open("a") as file:
        file.write("x")
    return number
