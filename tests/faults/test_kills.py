"""A short form of `kills.py`, which is to be run by hand with many more, and with studies (tests/study kills those)."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import kills


@pytest.mark.parametrize(
    ("command", "times"),
    [
        ("evaluate", 1),
        pytest.param("evaluate", 3, marks=pytest.mark.long),
        pytest.param("raters", 2, marks=pytest.mark.long),
        pytest.param("audit", 1, marks=pytest.mark.long),
        pytest.param("calibrate", 1, marks=pytest.mark.long),
        pytest.param("train", 1, marks=pytest.mark.long),
    ],
)
def test_a_command_killed_at_random_moments_ends_as_if_it_had_not_been(command, times):
    assert kills.attack(command, times, seed=1, warm=True)["kills"] == times
