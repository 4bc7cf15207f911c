"""What CI's script promises whatever its stages do: tried with a `make` that only pretends."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
STAGES = ("setup", "lint", "test", "test-long", "test-adapters", "docs", "bench-short", "peers", "wheel")
MAKE = """#!/bin/sh
echo "$1 begins"
echo "$1" >>begun
if [ "$1" = "$FAILS" ]; then exit 3; fi
if [ "$1" = "$LASTS" ]; then sleep 600 & echo $! >lasting; wait; fi
sleep 0.1
echo "$1 ends"
"""

pytestmark = pytest.mark.skipif(shutil.which("flock") is None, reason="CI runs on Linux")


@pytest.fixture
def ci(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for folder in ("repo/.ci", "programs", "tmp"):
        (tmp_path / folder).mkdir(parents=True)
    shutil.copy(ROOT / ".ci" / "run", tmp_path / "repo" / ".ci" / "run")
    program = tmp_path / "programs" / "make"
    program.write_text(MAKE)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    for name in ("FAILS", "LASTS"):
        monkeypatch.setenv(name, "")
    return tmp_path / "repo"


def start(ci: Path) -> subprocess.Popen[str]:
    return subprocess.Popen([ci / ".ci" / "run"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def has_ended(process: int) -> bool:
    """Within a moment, which a signal takes; it may wait there for somebody to ask how."""
    for _ in range(50):
        try:
            if Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except (FileNotFoundError, ProcessLookupError):
            return True
        time.sleep(0.1)
    return False


def test_every_stage_runs_once_and_its_output_is_printed_whole(ci):
    process = start(ci)
    said = process.communicate(timeout=60)[0]
    assert process.returncode == 0, said
    assert sorted((ci / "begun").read_text().split()) == sorted(STAGES)
    for name in STAGES:
        assert re.search(rf"=== {name}: passed after \d+ s\n{name} begins\n{name} ends\n", said), said
        assert re.search(rf"^{name} \d+\.\d+ \d+\.\d+ \d+\.\d+$", said, re.MULTILINE), said
    assert not list((ci.parent / "tmp").iterdir())


def test_tests_with_packages_of_others_wait_for_these(ci):
    start(ci).communicate(timeout=60)
    begun = (ci / "begun").read_text().split()
    assert begun.index("peers") < begun.index("test-adapters")
    assert [name for name in begun if name not in ("peers", "wheel")] == list(STAGES[:7])


@pytest.mark.parametrize("fails", ["test", "docs", "peers", "wheel"])
def test_a_stage_that_fails_fails_the_run(ci, fails, monkeypatch):
    monkeypatch.setenv("FAILS", fails)
    process = start(ci)
    said = process.communicate(timeout=60)[0]
    assert process.returncode == 3, said
    assert f"=== {fails}: FAILED (3) after" in said
    assert said.endswith("=== CI failed\n")


@pytest.mark.parametrize(("fails", "lasts"), [("peers", "test"), ("lint", "peers")])
def test_a_failure_ends_the_other_lane_with_all_its_processes(ci, fails, lasts, monkeypatch):
    monkeypatch.setenv("FAILS", fails)
    monkeypatch.setenv("LASTS", lasts)
    if lasts == "test":  # begins later than `peers` would fail
        script = ci.parent / "programs" / "make"
        script.write_text(MAKE.replace("exit 3", "until [ -e lasting ]; do sleep 0.1; done; exit 3"))
    process = start(ci)
    process.communicate(timeout=60)
    assert process.returncode == 3
    assert has_ended(int((ci / "lasting").read_text()))


def test_stopped_from_outside_it_leaves_nothing_behind(ci, monkeypatch):
    monkeypatch.setenv("LASTS", "test")
    process = start(ci)
    while not (ci / "lasting").exists():
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    assert process.returncode == 143
    assert has_ended(int((ci / "lasting").read_text()))
    assert not list((ci.parent / "tmp").iterdir())
