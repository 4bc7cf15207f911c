"""The page of the review queue in a real browser: its numbers, hostile names, and narrow screens."""

from __future__ import annotations

import math

import pytest

from segcal.quality.page import write_queue
from segcal.quality.queue import NO_GUARANTEE, CohortDice, Queue, Row

HOSTILE = "<img src=x onerror=alert(1)>"


def row(rank: int, case: str, name: str, flags: str = "", **other: float) -> Row:
    numbers = {
        "predicted_dice": 0.8123, "dice_low": 0.7, "dice_high": 0.9, "expected_dice": 0.83, "volume_ml": 12.345,
        "expected_volume_ml": 12.0, "volume_low_ml": 10.0, "volume_high_ml": 15.5, "uncertain_volume_ml": 3.0,
    } | other  # fmt: skip
    return Row(rank, case, name, **numbers, voxels=12345, flags=flags, like_reference_p=0.5)


@pytest.fixture
def report(tmp_path):
    rows = (
        row(1, HOSTILE, "left ventricle", "tiny; unlike the reference"),
        row(1, HOSTILE, "myocardium"),
        row(
            2, "a_rather_long_name_of_a_case_as_they_are", "left ventricle", predicted_dice=math.nan, dice_low=math.nan
        ),
        row(2, "a_rather_long_name_of_a_case_as_they_are", "myocardium"),
    )
    cohort = (CohortDice(None, 0.81, 0.79, 0.83), CohortDice("left ventricle", 0.85, 0.8, 0.9))
    write_queue(Queue(rows, cohort, ("left ventricle: uncertain share is higher.",), 0.9), tmp_path)
    return tmp_path / "queue.html"


def test_the_page_has_the_numbers_in_the_order_of_the_queue(page):
    first = page.locator("#queue tbody").first
    assert HOSTILE in first.inner_text()
    assert [text for text in first.inner_text().split("\t") if text.strip()][3:5] == ["0.812", "0.700 to 0.900"]
    assert page.locator("#queue .flag").all_inner_texts() == ["tiny", "unlike the reference"]
    assert "0.790 to 0.830" in page.locator("#cohort").inner_text()
    assert NO_GUARANTEE in page.locator(".warning").inner_text()
    assert "nan" not in page.content().lower().replace("nanum", "")


@pytest.mark.parametrize("width", [420, 1400])
def test_the_page_does_not_scroll_sideways(page, width):
    page.set_viewport_size({"width": width, "height": 900})
    assert page.evaluate("document.documentElement.scrollWidth") <= width
