"""What report and queue share: tables as CSV, figures as SVG, keyboard and screen reader, light, dark and paper."""

from __future__ import annotations

import re
from xml.etree import ElementTree

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
SVG = "{http://www.w3.org/2000/svg}"


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


# Figures


def save(page, name):
    return downloaded(page, page.get_by_role("button", name=f"Save SVG: {name}", exact=True))


def texts(root):
    return " ".join(element.text or "" for element in root.iter(f"{SVG}text"))


FIGURES = {  # and words that are in each
    "Reliability of true, all classes pooled": "ACE 0.",
    "Reliability of every class": "<b>cyst</b>",
    "Dataset reliability histogram of sharp, average of classes": "frequency",
    "Expected and actual DSC, average of classes": "A dot is a case.",
    "Threshold curves, average of classes": "dull",
    "Radar of 60 cases": "sharp",
}


def test_a_saved_figure_needs_no_style_sheet_and_is_the_same_in_dark(watch, report):
    with watch(report, color_scheme="dark") as dark, watch(report, color_scheme="light") as light:
        for title, words in FIGURES.items():
            name, text = save(dark, title)
            assert name == f"{title.lower().replace(',', '').replace(' ', '-')}.svg"
            assert save(light, title) == (name, text)
            root = ElementTree.fromstring(text.encode())
            assert root.tag == f"{SVG}svg"
            assert root.find(f"{SVG}title").text == title
            assert title.split(",")[0].split()[0] in texts(root)
            assert words in texts(root)
            assert not re.search(r"var\(|light-dark|class=|data:|href|<script|<style| on\w+=", text)
            assert root.find(f"{SVG}rect").get("fill") == "rgb(255, 255, 255)"
            assert all(element.get("font-family") for element in root.iter(f"{SVG}text"))


def test_a_saved_figure_looks_as_on_the_page(watch, report, browser, tmp_path):
    title = "Reliability of true, all classes pooled"
    with watch(report) as page:
        _, text = save(page, title)
        dot = page.locator(f'svg[aria-label="{title}"] .dot').first
        blue = dot.evaluate("(dot) => getComputedStyle(dot).fill")
        place = [dot.get_attribute(name) for name in ("cx", "cy", "r")]
    (tmp_path / "figure.svg").write_text(text, encoding="utf-8")
    opened = browser.new_page()
    opened.goto((tmp_path / "figure.svg").as_uri())
    first = opened.locator("svg svg circle").first
    assert [first.get_attribute(name) for name in ("cx", "cy", "r")] == place
    assert first.evaluate("(dot) => getComputedStyle(dot).fill") == blue
    assert first.bounding_box()["width"] > 5
    box = opened.locator("svg").first.bounding_box()
    for part in opened.locator("text").all():
        place = part.bounding_box()
        assert box["x"] <= place["x"]
        assert place["x"] + place["width"] <= box["x"] + box["width"]
        assert box["y"] <= place["y"]
        assert place["y"] + place["height"] <= box["y"] + box["height"]
    opened.close()


def test_a_map_is_saved_with_its_picture_inside(page):
    name, text = save(page, "case 0 a map")
    assert name == "case-0-a-map.svg"
    image = next(ElementTree.fromstring(text.encode()).iter(f"{SVG}image"))
    assert image.get("href").startswith("data:image/png;base64,iVBORw0")


def test_every_figure_can_be_saved_also_those_of_a_case(page):
    assert page.locator("#report figure:has(svg, img)").count() == page.locator("#report figure > .tool").count()
    page.goto(f"{page.url}#case=case%203")
    page.locator("#case-title", has_text="case 3").wait_for()
    assert page.locator("#case figure > .tool").count() == 2 * len(METHODS)
    name, text = save(page, "Reliability of dull, <b>cyst</b>, case case 3")
    assert name == "reliability-of-dull-b-cyst-b-case-case-3.svg"
    assert "Reliability of dull, <b>cyst</b>," in texts(ElementTree.fromstring(text.encode()))


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
