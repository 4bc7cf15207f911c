"""Helpers beside this file are found; small sums wait for no other thread."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(autouse=True, scope="module")
def _one_thread(one_thread):
    pass
