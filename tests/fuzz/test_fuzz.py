"""The first mutations of every target of fuzz.py, so that what was mended stays so; fuzz.py itself runs thousands."""

from __future__ import annotations

import sys
from pathlib import Path
from random import Random

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # mutate.py, targets.py, fuzz.py

import fuzz
from targets import TARGETS

AT_ONCE = ("npz", "evaluation")  # in a child with limits, as the script does: a start takes seconds
HERE = 20


@pytest.mark.parametrize("name", TARGETS)
@pytest.mark.filterwarnings("ignore")
def test_a_spoilt_file_ends_in_success_or_a_sentence(name, tmp_path):
    target = TARGETS[name]
    path = target.write(tmp_path)
    sound = path.read_bytes()
    target.read(path)
    ends = [fuzz.attempt(target, path, sound, number) for number in range(HERE)]
    assert not [end for end in ends if end.startswith("!")]


@pytest.mark.parametrize("name", AT_ONCE)
def test_memory_stays_within_its_limit(name):
    outcome = fuzz.fuzz(name, 60, first=1000)
    assert outcome.findings == []
    assert sum(outcome.ends.values()) == 60


@pytest.mark.parametrize("name", ["nifti", "npz", "config", "local", "evaluation"])
def test_the_same_number_is_the_same_mutation(name, tmp_path):
    target = TARGETS[name]
    sound = target.write(tmp_path).read_bytes()
    one, again, other = (target.spoil(Random(number), sound) for number in (7, 7, 8))
    assert one == again != other
