"""What report and queue share: tables as CSV, keyboard and screen reader, light, dark and paper."""

from __future__ import annotations

import pytest
import torch
from browsing import (
    copied,
    copy_button,
    downloaded,
    never_sideways,
    prints_as_a_document,
    reads_by_all,
    rows_of,
    switches_theme,
)

from segcal import EvaluationAccumulator, ReadOptions
from segcal.comparison.comparison import compare
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


def test_the_summary_is_copied_with_the_numbers_of_the_comparison(page, comparison):
    rows = copied(page, "Summary")
    assert [row["Method"] for row in rows] == list(METHODS)
    for row in rows:
        dice, ace, nll = (comparison.find(row["Method"], metric=metric) for metric in ("dice", "ace", "nll"))
        assert row["DSC"] == f"{dice.value:.3f}"
        assert [row["DSC low"], row["DSC high"]] == [f"{dice.low:.3f}", f"{dice.high:.3f}"]
        assert [row["ACE"], row["ACE floor"], row["ACE stars"]] == [f"{ace.value:.3f}", f"{ace.floor:.3f}", ace.stars]
        assert row["NLL"] == f"{nll.value:.4f}"
    assert rows[0]["Change of ACE"] == ""
    assert rows[1]["Change of ACE"] == f"{100 * comparison.find('true', metric='ace').change:+.0f} %"
    assert rows[1]["Change of ACE word"] == "better"


def test_every_number_of_a_cell_has_a_column_and_every_row_its_class(page, comparison):
    rows = copied(page, "All 60 cases. Each class: overlap, calibration and what it cost")
    assert [(row["Class"], row["Method"]) for row in rows] == [(c, m) for c in CLASSES[1:] for m in METHODS]
    for row in rows:
        entry = comparison.find(row["Method"], label=row["Class"], metric="ace")
        shown = [row[f"Macro-ACE{part}"] for part in ("", " std", " low", " high", " floor")]
        expected = (entry.value, entry.std, entry.low, entry.high, entry.floor)
        assert shown == [f"{value:.3f}" for value in expected]


def test_cases_are_copied_as_sorted_and_filtered_all_of_them_with_names_as_they_are(page):
    assert page.locator("#case-table tbody tr").count() == 50
    page.locator("#filters [name=method]").select_option(label="true")
    page.get_by_role("button", name="Case", exact=True).click()
    rows = copied(page, "Cases")
    assert [row["Case"] for row in rows] == page.locator("#case-table tbody td.case").all_inner_texts()
    assert sorted(row["Case"] for row in rows) == sorted(CASES)
    assert {row["Method"] for row in rows} == {"true"}
    assert [row["Missing"] for row in rows if row["Case"] == "case 0"] == ["<b>cyst</b>"]
    gaps = [row["Signed gap"] for row in rows]
    assert any(gap.startswith("-") for gap in gaps)
    assert all(-1 <= float(gap) <= 1 for gap in gaps)


def test_decisions_are_copied_as_the_chosen_class_has_them(page):
    page.locator("#decisions-class").select_option(label="<b>cyst</b>")
    rows = {row["Quantity"]: row for row in copied(page, "Decisions")}
    assert rows["Cases with the class"]["sharp"] == "59"
    shown = page.locator("#decisions-table tr", has_text="Best threshold").locator("td").first
    best = rows["Best threshold"]
    assert shown.inner_text().split("\n") == [best["sharp"], best["sharp remark"]]


def test_every_table_of_every_page_can_be_copied(watch, report, queue):
    for path in (report, queue):
        with watch(path) as page:
            assert page.evaluate("[...document.querySelectorAll('table')].every((t) => t.closest('.frame .scroll'))")
            buttons = page.locator(".frame > .tool")
            assert buttons.count() == page.locator("table").count()
            names = [button.get_attribute("aria-label") for button in buttons.all()]
            assert len(set(names)) == len(names)


def test_the_queue_is_copied_with_its_intervals_and_flags(watch, queue):
    with watch(queue) as page:
        rows = copied(page, "Queue")
    assert len(rows) == 2 * len(CASES)
    assert [row["Case"] for row in rows[::2]] == CASES
    row = rows[0]
    assert [row["Rank"], row["Predicted Dice"]] == ["1", "0.812"]
    assert [row["Interval low"], row["Interval high"]] == ["0.700", "0.900"]
    assert row["Flags"] == "tiny; unlike the reference"
    assert "Picture of the interval" not in row
    assert "Interval" not in row


@pytest.mark.parametrize(
    "clipboard", ["undefined", "{ writeText: async () => { throw new DOMException('no', 'NotAllowedError'); } }"]
)
def test_without_a_clipboard_a_file_is_saved(browser, queue, clipboard):
    page = browser.new_page()
    page.add_init_script(f"Object.defineProperty(navigator, 'clipboard', {{ value: {clipboard} }});")
    page.goto(queue.as_uri())
    name, text = downloaded(page, copy_button(page, "Dice over all cases"))
    told = page.locator("#told").text_content()
    page.close()
    assert name == "dice-over-all-cases.csv"
    assert [row["Class"] for row in rows_of(text)] == ["all classes", CLASSES[1]]
    assert text.endswith('"liver, ""left""",0.850,0.800,0.900\n')
    assert told == "Saved as a file: Dice over all cases"


def test_tables_are_copied_by_keyboard_and_said_to_a_screen_reader(page):
    copy_button(page, "Summary").focus()
    page.keyboard.press("Enter")
    page.locator("#told", has_text="Copied: Summary").wait_for(state="attached")
    assert page.evaluate("navigator.clipboard.readText()").startswith("Method,DSC,")


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
