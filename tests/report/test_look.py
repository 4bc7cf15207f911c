"""What report and queue share: keyboard and screen reader, light, dark and paper; and tables that a report saves."""

from __future__ import annotations

import pytest
import torch
from browsing import (
    downloaded,
    never_sideways,
    prints_as_a_document,
    reads_by_all,
    rows_of,
    switches_theme,
)

from segcal import EvaluationAccumulator, ReadOptions
from segcal.comparison.comparison import compare
from segcal.comparison.tables import write_comparison
from segcal.quality.page import write_queue
from segcal.quality.queue import CohortDice, Queue, Row
from segcal.report import ReportMap, build_report

CLASSES = ("background", 'liver, "left"', "<b>cyst</b>")
CASES = [f"case {i}" for i in range(58)] + ['a "quoted", name', "=1+1 <img src=x>"]
PNG = bytes.fromhex(
    "89504e470d0a1a0a0000000d49484452000000010000000108060000001f15c4890000000d49444154789c626001000000ffff03000006"
    "0005ad5d3ee10000000049454e44ae426082"
)
METHODS = {"sharp": 3.0, "true": 1.0, "dull": 0.6}


def collect(sharpness):
    """Labels drawn from the softmax of random logits; no cyst in the first case."""
    generator = torch.Generator().manual_seed(0)
    logits = 2 * torch.randn(len(CASES), len(CLASSES), 400, generator=generator)
    noise = -torch.rand(logits.shape, generator=generator).log().neg().log()
    labels = (logits + noise).argmax(1)
    labels[0][labels[0] == 2] = 0
    accumulator = EvaluationAccumulator(options=ReadOptions(class_names=list(CLASSES)))
    accumulator.update((sharpness * logits).softmax(1), labels, CASES)
    return accumulator.compute()


@pytest.fixture(scope="module")
def evaluations():
    return {name: collect(sharpness) for name, sharpness in METHODS.items()}


@pytest.fixture(scope="module")
def comparison(evaluations):
    return compare(evaluations, resamples=20)


@pytest.fixture(scope="module")
def report(evaluations, comparison, tmp_path_factory):
    maps = [ReportMap("case 0", "a map", PNG)]
    return build_report(evaluations, tmp_path_factory.mktemp("look") / "r.html", comparison=comparison, maps=maps)


def queue_row(rank, case, name, flags=""):
    return Row(
        rank, case, name, predicted_dice=0.8123, dice_low=0.7, dice_high=0.9, expected_dice=0.83, volume_ml=12.345,
        expected_volume_ml=12.0, volume_low_ml=10.0, volume_high_ml=15.5, uncertain_volume_ml=3.0, voxels=12345,
        flags=flags, like_reference_p=0.5,
    )  # fmt: skip


@pytest.fixture(scope="module")
def queue(tmp_path_factory):
    rows = [queue_row(i + 1, case, name, "tiny; unlike the reference") for i, case in enumerate(CASES) for name in "ab"]
    cohort = (CohortDice(None, 0.81, 0.79, 0.83), CohortDice(CLASSES[1], 0.85, 0.8, 0.9))
    folder = tmp_path_factory.mktemp("queue")
    write_queue(Queue(tuple(rows), cohort, ("a: uncertain share is higher.",), 0.9), folder)
    return folder / "queue.html"


# Tables


def saved(page, name):
    """The table that a button saves, as a list of rows by heading."""
    file, text = downloaded(page, page.get_by_role("button", name=f"Save {name}", exact=True))
    assert file == name
    return rows_of(text)


def test_the_comparison_is_saved_as_segcal_compare_writes_it(page, comparison, tmp_path):
    write_comparison(comparison, tmp_path)
    rows = saved(page, "comparison.csv")
    assert rows == rows_of((tmp_path / "comparison.csv").read_text(encoding="utf-8"))
    assert {row["class"] for row in rows} == {"", *CLASSES[1:]}
    shown = page.locator(".summary tbody tr").first.locator("td").first.inner_text()
    (dice,) = [
        float(row["value"])
        for row in rows
        if (row["method"], row["cases"], row["average"], row["class"], row["metric"])
        == ("sharp", "all", "macro", "", "dice")
    ]
    assert shown.startswith(f"{dice:.3f}")


def test_cases_are_saved_as_sorted_and_filtered_all_of_them_with_names_as_they_are(page, evaluations):
    page.locator("#filters [name=method]").select_option(label="true")
    page.get_by_role("button", name="Case", exact=True).click()
    shown = page.locator("#case-table tbody td.case").all_inner_texts()
    assert len(shown) == 50
    rows = saved(page, "cases.csv")
    assert [row["Case"] for row in rows[:50]] == shown
    assert sorted(row["Case"] for row in rows) == sorted(CASES)
    assert {row["Method"] for row in rows} == {"true"}
    assert [row["Missing"] for row in rows if row["Case"] == "case 0"] == ["<b>cyst</b>"]
    evaluation = evaluations["true"].foreground()
    gaps = evaluation.case_values()[None, "signed_gap"].tolist()
    expected = dict(zip(evaluation.cases, gaps, strict=True))
    assert min(gaps) < 0 < max(gaps)
    assert {row["Case"]: float(row["Signed gap"]) for row in rows} == pytest.approx(expected, abs=5.1e-5)


def test_every_table_scrolls_in_a_frame_with_a_name(watch, report, queue):
    for path in (report, queue):
        with watch(path) as page:
            assert page.evaluate("[...document.querySelectorAll('table')].every((t) => t.closest('.frame .scroll'))")
            frames = page.locator(".frame .scroll")
            assert frames.count() == page.locator("table").count()
            names = [frame.get_attribute("aria-label") for frame in frames.all()]
            assert len(set(names)) == len(names)


# All pages


@pytest.mark.parametrize("check", [reads_by_all, never_sideways, switches_theme, prints_as_a_document])
@pytest.mark.parametrize("name", ["report", "queue"])
def test_every_page(request, watch, name, check):
    with watch(request.getfixturevalue(name)) as page:
        check(page)


@pytest.mark.parametrize("check", [reads_by_all, never_sideways])
def test_the_page_of_a_case(page, check):
    page.goto(f"{page.url}#case=case%203")
    page.locator("#case-title", has_text="case 3").wait_for()
    check(page)


@pytest.mark.parametrize(("name", "first"), [("report", "summary"), ("queue", "cohort")])
def test_the_first_key_skips_the_navigation(request, watch, name, first):
    with watch(request.getfixturevalue(name)) as page:
        page.keyboard.press("Tab")
        assert page.evaluate("document.activeElement.className") == "skip"
        page.keyboard.press("Enter")
        page.wait_for_url(f"**#{first}")  # it follows the key
        page.keyboard.press("Tab")
        assert page.evaluate("(id) => !!document.activeElement.closest(`#${id}`)", first)
