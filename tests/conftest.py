"""Every test starts from the same seed; helpers beside this file are found from every folder."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import settings

# pytest's importlib mode leaves sys.path alone; processes that tests spawn inherit this entry.
sys.path.insert(0, str(Path(__file__).parent))
from browsing import browser, watch  # noqa: F401  fixtures of all tests that open a page

# The first call compiles, so a deadline would fail by chance; the same examples each time, so CI fails for a reason.
settings.register_profile("segcal", deadline=None, derandomize=True, max_examples=60)
settings.load_profile("segcal")


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(params=["numba", "torch"])
def backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=["hard", "triangular", "gaussian", "bspline"])
def kernel(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """For small networks, whose threads would wait for one another."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
