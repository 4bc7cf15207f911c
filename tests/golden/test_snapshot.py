"""Commands print the same help and write the same tables as when the snapshot was taken."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from golden.snapshot import STORED, take

NUMBER = re.compile(r"(?<![\w.])[+-]?\d+(?:\.\d+)?(?:e[+-]?\d+)?(?![\w.])", re.IGNORECASE)


def files_of(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def assert_same_text(text: str, expected: str) -> None:
    """Compare texts whose numbers may differ by rounding, as the order of sums differs between processors."""
    assert NUMBER.sub("#", text) == NUMBER.sub("#", expected)
    numbers = [float(number) for number in NUMBER.findall(text)]
    assert numbers == pytest.approx([float(number) for number in NUMBER.findall(expected)], rel=1e-6, abs=1e-9)


@pytest.fixture(scope="module")
def taken(tmp_path_factory):
    folder = tmp_path_factory.mktemp("snapshot")
    take(folder)
    return folder


def test_snapshot_has_the_same_files(taken):
    assert files_of(taken) == files_of(STORED)


@pytest.mark.parametrize("name", sorted(files_of(STORED)))
def test_file_of_snapshot_is_the_same(name, taken):
    assert_same_text((taken / name).read_text(encoding="utf-8"), (STORED / name).read_text(encoding="utf-8"))
