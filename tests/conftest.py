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


# Files that take longest, by measurement: begun last, one of them would keep a process busy when the other is done.
LONGEST = (
    "faults/test_signals.py", "report/test_report.py", "report/test_look.py", "study/test_study.py",
    "report/test_viewer.py", "audit/test_audit.py", "faults/test_kills.py", "review/test_page.py",
    "calibration/test_fitting.py", "training/test_training.py", "study/test_page.py", "review/test_server.py",
    "training/test_two_nodes.py", "evaluation/test_cohort.py", "faults/test_streams.py",
)  # fmt: skip


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    order = {Path(__file__).parent / name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: order.get(item.path, len(order)))


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
