"""Reports in a real browser."""

from __future__ import annotations

import pytest


@pytest.fixture
def page(watch, report):
    """The module's report."""
    with watch(report) as opened:
        yield opened
