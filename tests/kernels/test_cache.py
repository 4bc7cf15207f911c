"""Compiled code on disk: a damaged file is compiled again with a note, and a folder without write access is a note."""

from __future__ import annotations

import importlib.util
import os
import random
import subprocess
import sys
from pathlib import Path

import numba
import pytest

from segcal.kernels import numba_cache

MODULE = """
from segcal.kernels.numba_cache import cached_njit

@cached_njit()
def twice(x):
    return x + x
"""
CHOOSE = """
import numpy as np
from segcal.kernels.numba_decide import choose
places, _ = choose(np.full((3, 4), 0.3, np.float32), np.full(2, 0.5), np.full(2, 100.0), 1200, threads=1)
print(places.tolist())
"""


@pytest.fixture
def load(tmp_path, monkeypatch):
    """Import a module with one compiled function, as a new process would."""
    monkeypatch.setattr(numba_cache, "_messages", set())
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path / "cache"))
    path = tmp_path / "module.py"
    path.write_text(MODULE)

    def load():
        spec = importlib.util.spec_from_file_location("module", path)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module.twice

    return load


def hits(function) -> int:
    return sum(function.stats.cache_hits.values())


def flip(content: bytes) -> bytes:
    """Flip a bit in each of 20 bytes."""
    changed = bytearray(content)
    for place in random.Random(0).sample(range(len(changed)), 20):
        changed[place] ^= 1 << (place % 8)
    return bytes(changed)


DAMAGES = {
    "empty": lambda content: b"",
    "one byte": lambda content: content[:1],
    "truncated": lambda content: content[: len(content) // 2],
    "last byte missing": lambda content: content[:-1],
    "appended": lambda content: content + b"\0",
    "flipped bits": flip,
    "garbage": lambda content: random.Random(0).randbytes(len(content)),
}


def damage(folder: Path, endings: str, kind: str) -> None:
    paths = [path for ending in endings.split() for path in folder.rglob(f"*{ending}")]
    assert paths
    for path in paths:
        path.write_bytes(DAMAGES[kind](path.read_bytes()))


@pytest.mark.parametrize("kind", DAMAGES)
@pytest.mark.parametrize("endings", [".nbi", ".nbc", ".nbi .nbc"])
def test_damaged_code_is_compiled_again_with_one_note(endings, kind, load, tmp_path, capsys):
    assert load()(3) == 6
    kept = load()
    assert (kept(3), hits(kept)) == (6, 1)
    assert capsys.readouterr().err == ""
    damage(tmp_path, endings, kind)
    again = load()
    assert (again(3), hits(again)) == (6, 0)
    assert capsys.readouterr().err.count("note: compiled code in ") == 1
    kept = load()
    assert (kept(3), hits(kept)) == (6, 1)
    assert capsys.readouterr().err == ""


def test_each_signature_has_its_own_file_even_if_two_processes_compile_at_once(load, tmp_path):
    load()(3)
    of_integers = {path: path.read_bytes() for path in tmp_path.rglob("*.nb?")}
    for path in of_integers:
        path.unlink()  # the other process has not seen these
    load()(1.5)
    for path, content in of_integers.items():  # and writes them last
        path.write_bytes(content)
    both = load()
    assert (both(3), both(1.5), hits(both)) == (6, 3.0, 1)
    again = load()
    assert (again(3), again(1.5), hits(again)) == (6, 3.0, 2)


def test_code_that_cannot_be_kept_is_compiled_with_a_note(load, monkeypatch, capsys):
    def full(self, name, data):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(numba_cache._CheckedFile, "_save_data", full)
    assert load()(3) == 6
    assert "cannot be kept" in capsys.readouterr().err
    assert load()(3) == 6


def test_code_that_cannot_be_read_is_compiled(load, tmp_path):
    load()(3)
    for path in tmp_path.rglob("*.nbc"):
        path.unlink()
        path.mkdir()
    assert load()(3) == 6


def test_without_any_folder_for_compiled_code_there_is_a_note(load, monkeypatch, capsys):
    def no_folder(function):
        raise RuntimeError("cannot cache function: no locator available")

    monkeypatch.setattr(numba_cache, "_CheckedCache", no_folder)
    assert load()(3) == 6
    assert "Set NUMBA_CACHE_DIR to a folder." in capsys.readouterr().err


def test_a_decision_survives_flipped_bits_in_its_machine_code(tmp_path):
    environment = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path)}

    def run() -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-c", CHOOSE], env=environment, capture_output=True, text=True, check=True
        )

    first = run()
    damage(tmp_path, ".nbc", "flipped bits")
    second = run()
    assert (second.stdout, first.stderr) == (first.stdout, "")
    assert second.stderr.count("\n") == second.stderr.count("note: compiled code in ") == 1
