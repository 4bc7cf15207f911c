"""The report shows the numbers of `compare` and `diagrams`, says in words what they mean, and runs nothing foreign."""

from __future__ import annotations

import json
import math
import re
import time
from itertools import pairwise
from urllib.parse import quote

import pytest
import torch
from gaps import BINS, CENTERS, EXTREME, OVER, UNDER, make
from markup import Markup, unpacked

from segcal import ConfigError, FileError
from segcal.comparison.comparison import compare
from segcal.comparison.matching import match_cases
from segcal.evaluation.diagrams import reliability, reliability_histogram
from segcal.report import ReportMap, build_report, reading
from segcal.report.content import method_diagrams
from segcal.report.rendering import embedded_json
from segcal.report.summary import summarize

NONE = "\u2013"  # how the page shows what has no number
PNG = bytes.fromhex(
    "89504e470d0a1a0a0000000d49484452000000010000000108060000001f15c4890000000d49444154789c626001000000ffff03000006"
    "0005ad5d3ee10000000049454e44ae426082"
)
HOSTILE = ["<script>alert(1)</script>", "</script><img src=x onerror=alert(1)>", "a&b\u2028 'q' \"q\" #/?=%20"]


def write(tmp_path, evaluations, **options):
    return build_report(evaluations, tmp_path / "report.html", resamples=50, **options)


# What the page holds


def test_the_tables_show_the_numbers_of_the_comparison(tmp_path):
    evaluations = {
        "old": make(OVER, UNDER, wobble=0.05, absent=[(1, 0)]),
        "new": make(EXTREME, CENTERS, absent=[(1, 0)]),
    }
    text = Markup(write(tmp_path, evaluations)).text
    comparison = compare(evaluations, resamples=50)
    for method in evaluations:
        for which in ("all", "complete"):
            for label in (None, "liver", "tumour"):
                for metric, digits in (
                    ("dice", 3), ("ace", 3), ("occupied", 3), ("nll", 4), ("brier", 4), ("ece", 4), ("mce", 3),
                ):  # fmt: skip
                    e = comparison.find(method, cases=which, label=label, metric=metric)
                    value, std, low, high = (f"{x:.{digits}f}" for x in (e.value, e.std, e.low, e.high))
                    cell = f"{value} ± {std} {e.stars} [{low}, {high}]"
                    if metric in ("ace", "ece", "mce"):
                        cell += f" floor {e.floor:.{digits}f}"
                    assert " ".join(cell.split()) in text
                for average in ("micro paper", "micro pooled"):
                    e = comparison.find(method, cases=which, average=average, label=label, metric="ace")
                    cell = f"{e.value:.3f} {e.stars} [{e.low:.3f}, {e.high:.3f}]"
                    if average == "micro pooled":
                        cell += f" floor {e.floor:.3f}"
                    assert " ".join(cell.split()) in text
    matched, _ = match_cases(evaluations)
    diagrams = method_diagrams(matched, next(iter(matched.values())).cases, level=0.95, seed=0)
    for sentence in (*summarize(comparison, diagrams).sentences, *reading(comparison, diagrams)):
        assert sentence in text


def close(values, expected):
    assert values == pytest.approx([round(float(x), 4) for x in expected], abs=1.01e-4)


def test_the_embedded_data_are_those_of_the_diagrams(tmp_path):
    evaluations = {"old": make(OVER, UNDER, wobble=0.05), "new": make(EXTREME, CENTERS, wobble=0.02)}
    data = Markup(write(tmp_path, evaluations)).data
    for i, evaluation in enumerate(evaluations.values()):
        for j, classes in enumerate(([0, 1], [0], [1])):
            stats = evaluation.binned.select(classes=classes)
            expected = reliability(stats, patients=evaluation.cases)
            shown = data["reliability"][i][j]
            close(shown["errors"], [expected.ace, expected.ece, expected.mce])
            for row in shown["rows"]:
                k = row[0]
                columns = (expected.count, expected.confidence, expected.frequency, expected.low, expected.high)
                close(row[1:], [column[k] for column in columns])
            histogram = reliability_histogram(stats)
            cells = {(k, level): share for k, level, share in data["histograms"][i][j]["cells"]}
            assert set(cells) == {tuple(place) for place in histogram.share.nonzero().tolist()}
            close(list(cells.values()), [histogram.share[place] for place in cells])
        metrics = evaluation.case_metrics()
        for case in range(4):
            close(
                unpacked(data["cases"]["values"])[i][case][1],
                [metrics[m][case, 0] for m in ("dice", "ace", "occupied", "nll", "brier", "ece", "mce", "signed_gap")],
            )
            rows = data["cases"]["rows"][i][case][1]
            close([row[3] for row in rows], evaluation.binned.frequency[case, 1])
    (radar,) = data["radar"]
    comparison = compare(evaluations, resamples=50)
    close([row[1] for row in radar["values"]], [comparison.find(name, metric="ace").value for name in evaluations])
    assert max(row[1] for row in radar["normalized"]) == 1


def test_a_class_that_no_case_has_is_null_and_not_a_number(tmp_path):
    evaluation = make(OVER, CENTERS, absent=[(i, 1) for i in range(4)])
    for sums in (evaluation.statistics.count, evaluation.statistics.confidence_sum, evaluation.statistics.label_sum):
        sums[:, 1] = 0
    markup = Markup(write(tmp_path, {"net": evaluation}))
    assert markup.data["reliability"][0][2] == {
        "rows": [],
        "errors": [None] * 3,
        "band": markup.data["reliability"][0][2]["band"],
    }
    assert unpacked(markup.data["cases"]["values"])[0][0][2][1] is None
    assert not re.search(r"\bnan\b", markup.text, re.IGNORECASE)


def test_one_method_has_no_radar_and_no_tests(tmp_path):
    markup = Markup(write(tmp_path, {"net": make(OVER)}))
    assert markup.data["radar"] == []
    assert ("section", "radar") not in [(tag, a.get("id")) for tag, a in markup.elements]
    assert "p < 0.05" not in markup.text


def test_missing_classes_and_unmatched_cases_are_listed(tmp_path):
    evaluations = {
        "old": make(OVER, UNDER, absent=[(2, 1)]),
        "new": make(OVER, UNDER, absent=[(2, 1)]).select(cases=[0, 1, 2, 4, 5]),
    }
    text = Markup(write(tmp_path, evaluations)).text
    assert "4 of the 5 compared cases have every class" in text
    assert "tumour 1 16.7 % case_2" in text
    assert "case_3 : missing from new" in text


FAILURES = [
    {"case": HOSTILE[0], "kind": "GridError", "message": HOSTILE[1]},
    {"case": "case_9", "kind": "RangeError", "message": "must lie in [0, 1]."},
]
NOTES = [{"kind": "hard", "message": f"Decisions, not probabilities {HOSTILE[0]}.", "cases": ["case_0", HOSTILE[1]]}]


def test_cases_that_failed_and_notes_are_told_with_their_number_and_reason(tmp_path):
    troubled = make(OVER, provenance={"failures": FAILURES, "notes": NOTES, "versions": {"torch": "2"}})
    markup = Markup(write(tmp_path, {"old": make(UNDER, provenance={"failures": FAILURES[1:]}), "new": troubled}))
    assert "6 cases, 1 class, 20 bins; 2 cases failed" in markup.text
    assert "2 cases could not be measured and are not part of any result on this page." in markup.text
    assert f"{HOSTILE[0]} new GridError: {HOSTILE[1]}" in markup.text
    assert "case_9 old RangeError: must lie in [0, 1]." in markup.text
    told = f"new: {NOTES[0]['message']} (2 cases: case_0, {HOSTILE[1]})"
    assert told.replace(" ", "") in markup.text.replace(" ", "")
    assert [tag for tag, _ in markup.elements].count("script") == 2
    assert "img" not in [tag for tag, _ in markup.elements]
    assert markup.text.count("must lie in [0, 1].") == 2  # not among the facts of the provenance again
    none = Markup(write(tmp_path, {"old": make(UNDER, provenance={"failures": []})}))
    assert "failed" not in none.text.lower()
    odd = Markup(write(tmp_path, {"old": make(UNDER, provenance={"failures": "x", "notes": [3, {"kind": None}]})}))
    assert "failed" not in odd.text.lower()


def test_one_of_a_thing_is_no_plural(tmp_path):
    alone = make(OVER, cases=1, provenance={"failures": FAILURES[1:]})
    text = Markup(write(tmp_path, {"old": alone, "new": alone})).text
    assert "1 case, 1 class, 20 bins; 1 case failed" in text
    assert "1 case could not be measured and is not part of any result" in text
    assert "All 1 case " in text
    assert "The compared case has every class." in text
    assert not re.search(r"\b1 (\w+ )?(cases|patients|classes|bins|methods|seeds)\b", text.rpartition("Provenance")[0])


def test_provenance_is_shown_with_what_is_nested_in_it(tmp_path):
    provenance = {
        "versions": {"torch": "2.13"},
        "options": {"logits": False, "regions": None, "class_names": [[1, "liver"]]},
    }
    provenance["files"] = {f"case_{i}": {"a.npz": {"bytes": 17}, "a.nii.gz": {"bytes": 5}} for i in range(40)}
    text = Markup(write(tmp_path, {"net": make(OVER, provenance=provenance)})).text
    assert "versions torch 2.13" in text
    assert "logits no" in text
    assert "files 80; their sizes and times are in the evaluation's .json" in text


def test_the_same_evaluations_give_the_same_bytes_and_threads_come_back(tmp_path):
    evaluations = {"old": make(OVER, wobble=0.05), "new": make(UNDER)}
    threads = torch.get_num_threads()
    first = write(tmp_path, evaluations).read_bytes()
    assert write(tmp_path, evaluations).read_bytes() == first
    assert [path.name for path in tmp_path.iterdir()] == ["report.html"]
    assert torch.get_num_threads() == threads


def test_maps_are_embedded_and_must_be_png(tmp_path):
    maps = [ReportMap("case_0", "liver, slice 7", PNG)]
    markup = Markup(write(tmp_path, {"net": make(OVER)}, maps=maps))
    (image,) = [attributes for tag, attributes in markup.elements if tag == "img"]
    assert image["src"].startswith("data:image/png;base64,iVBORw0")
    assert "slice 7" in image["alt"]
    with pytest.raises(FileError, match="PNG pictures; that of case 'case_0'"):
        write(tmp_path, {"net": make(OVER)}, maps=[ReportMap("case_0", "", b"GIF89a")])


def test_what_cannot_be_written_is_refused_in_a_sentence(tmp_path):
    with pytest.raises(FileError, match="is a folder"):
        build_report({"net": make(OVER)}, tmp_path)
    with pytest.raises(ConfigError, match="at least one evaluation"):
        build_report({}, tmp_path / "report.html")


def test_names_stay_text(tmp_path):
    names = [*HOSTILE, "bad \udcff byte"]
    evaluation = make(
        OVER,
        UNDER,
        cases=4,
        names=names,
        classes=HOSTILE[:2],
        absent=[(0, 0), (1, 1)],
        provenance={HOSTILE[0]: HOSTILE[1]},
    )
    maps = [ReportMap(HOSTILE[1], HOSTILE[0], PNG)]
    markup = Markup(write(tmp_path, {HOSTILE[0]: evaluation, HOSTILE[1]: evaluation}, maps=maps, title=HOSTILE[1]))
    assert [tag for tag, _ in markup.elements].count("script") == 2
    assert [attributes["src"][:10] for tag, attributes in markup.elements if tag == "img"] == ["data:image"]
    assert not [name for _, attributes in markup.elements for name in attributes if name.startswith("on")]
    assert markup.data["cases"]["names"][:3] == HOSTILE
    assert HOSTILE[1] in markup.text


def test_embedded_json_cannot_end_its_element():
    text = embedded_json(["</script><!--", "a&b", "\u2028\u2029"])
    assert not set(text) & set("<>&\u2028\u2029")
    assert json.loads(text) == ["</script><!--", "a&b", "\u2028\u2029"]
    with pytest.raises(ValueError, match="JSON"):
        embedded_json([math.nan])


def test_many_cases_stay_small_and_quick(tmp_path):
    """A quarter of 200 cases by 15 classes; all of them are in benchmarks/report.py."""
    frequencies = [OVER, UNDER, EXTREME, CENTERS] * 4
    classes = [f"organ {i}" for i in range(15)]
    methods = {name: make(*frequencies[i : i + 15][:15], cases=50, classes=classes) for i, name in enumerate("ab")}
    start = time.perf_counter()
    path = write(tmp_path, methods)
    assert time.perf_counter() - start < 15
    assert path.stat().st_size < 15e6 / 4


# What a browser makes of it


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    names = ["case_2", "case_10", HOSTILE[0], HOSTILE[1], HOSTILE[2]]
    options = {"cases": 5, "names": names, "classes": ["liver", "<b>tumour</b>"], "absent": [(1, 1)]}
    # A case without any prediction of either class has no Dice coefficient: NaN, to be sorted last.
    old, new = make(OVER, UNDER, wobble=0.05, **options), make(EXTREME, CENTERS, dice=0.9, **options)
    for evaluation in (old, new):
        evaluation.overlap.true[0] = evaluation.overlap.predicted[0] = evaluation.overlap.both[0] = 0
    folder = tmp_path_factory.mktemp("report")
    maps = [ReportMap("case_2", "a map", PNG), ReportMap(HOSTILE[1], "another", PNG)]
    return build_report({"old": old, "new": new.select(cases=[0, 1, 2, 3])}, folder / "r.html", maps=maps, resamples=50)


def column(page, i):
    return page.locator(f"#case-table tbody td:nth-child({i + 1})").all_inner_texts()


def sort_by(page, name):
    page.get_by_role("button", name=name, exact=True).click()


def test_every_figure_is_drawn(page):
    for place, number in (("reliability-figures", 2), ("glance", 2), ("spread-figures", 2), ("radar-figures", 2)):
        assert page.locator(f"#{place} svg").count() == number, place
    assert page.locator("#reliability-figures svg").first.locator(".dot").count() == BINS
    assert page.locator("#reliability-figures svg").first.locator(".bar").count() == BINS


def test_a_bin_tells_its_numbers_under_the_pointer_and_by_the_arrow_keys(page):
    page.locator("#reliability-class").select_option(label="liver")
    chart = page.locator("#reliability-figures svg").first
    chart.locator(".hit").nth(15).hover()
    tip = page.locator("#tip").inner_text()
    assert "Bin 0.75 to 0.80" in tip
    assert "Confidence 77.5 %" in tip
    assert "too high" in tip
    assert "4,000 voxels" in tip
    chart.focus()
    page.keyboard.press("ArrowRight")
    assert "Bin 0.00 to 0.05" in page.locator("#tip").inner_text()
    page.keyboard.press("Escape")
    assert page.locator("#tip").is_hidden()


def test_cases_sort_by_number_and_by_name_with_what_has_no_number_last(page):
    header = page.locator("#case-table th", has_text="DSC")
    sort_by(page, "DSC")
    assert header.get_attribute("aria-sort") == "ascending"
    values = column(page, 2)
    numbers = [float(value) for value in values if value != NONE]
    assert numbers == sorted(numbers)
    assert values[-2:] == [NONE, NONE]
    header.get_by_role("button").focus()
    page.keyboard.press("Enter")
    assert header.get_attribute("aria-sort") == "descending"
    values = column(page, 2)
    assert [float(value) for value in values[:-2]] == sorted(numbers, reverse=True)
    assert values[-2:] == [NONE, NONE]
    sort_by(page, "Case")
    names = column(page, 0)
    assert names.index("case_2") < names.index("case_10")
    assert page.locator("#case-table th[aria-sort]").count() == 1


def test_cases_are_filtered_by_name_method_class_overlap_and_missing_class(page):
    assert len(column(page, 0)) == 9
    page.get_by_label("Find a case").fill("CASE_1")
    assert column(page, 0) == ["case_10", "case_10"]
    page.get_by_label("Find a case").fill("")
    page.locator("#filters [name=method]").select_option(label="new")
    assert set(column(page, 1)) == {"new"}
    assert len(column(page, 1)) == 4
    page.locator("#filters [name=method]").select_option(label="All")
    page.get_by_label("DSC below").fill("0.85")
    assert set(column(page, 1)) == {"old"}
    assert NONE not in column(page, 2)
    page.get_by_label("DSC below").fill("")
    page.get_by_label("missing a class").check()
    assert set(column(page, 0)) == {"case_2", "case_10"}
    page.get_by_label("missing a class").uncheck()
    before = column(page, 3)
    page.locator("#filters [name=class]").select_option(label="liver")
    assert column(page, 3) != before


def test_a_case_opens_at_its_address_and_back_returns_to_where_the_report_was_left(page):
    page.locator("#case-table").scroll_into_view_if_needed()
    page.evaluate("scrollTo({top: scrollY + 30, behavior: 'instant'})")
    place = page.evaluate("scrollY")
    page.get_by_role("link", name="case_10", exact=True).first.click()
    page.locator("#case").wait_for()
    page.wait_for_url("**#case=case_10")
    assert page.locator("#case-title").inner_text() == "case_10"
    assert page.locator("#report").is_hidden()
    assert page.locator("#case-figures svg").count() == 4
    assert "Missing: <b>tumour</b>" in page.locator("#case").inner_text()
    page.go_back()
    page.locator("#report").wait_for()
    assert page.locator("#case").is_hidden()
    assert abs(page.evaluate("scrollY") - place) < 100
    page.go_forward()
    page.locator("#case").wait_for()
    page.locator("#case-after").click()
    page.wait_for_function("() => document.querySelector('#case-title').innerText !== 'case_10'")
    page.get_by_role("link", name="Radar").click()
    page.locator("#report").wait_for()


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_case_name_is_only_text_wherever_it_goes(page, name):
    title = page.locator("#case-title")
    page.get_by_role("link", name=name, exact=True).first.click()
    title.wait_for()
    assert title.text_content() == name
    page.reload()
    title.wait_for()
    assert title.text_content() == name
    assert page.locator("img[src=x]").count() == 0
    if name == HOSTILE[2]:
        assert "This method lacks the case" in page.locator("#case").inner_text()


def test_a_case_address_that_is_unknown_or_broken_shows_the_report(browser, report):
    for address in ("#case=nobody", "#case=%E0%A4%A"):
        opened = browser.new_page()
        opened.goto(report.as_uri() + address)
        assert opened.locator("#report").is_visible()
        opened.close()


def background(page):
    return page.evaluate("getComputedStyle(document.body).backgroundColor")


def test_dark_and_light_follow_the_system_until_the_button_decides(page):
    page.emulate_media(color_scheme="light")
    light = background(page)
    page.emulate_media(color_scheme="dark")
    dark = background(page)
    assert light != dark
    page.get_by_role("button", name="Light", exact=True).click()
    assert background(page) == light
    page.get_by_role("button", name="Dark", exact=True).click()
    assert background(page) == dark
    page.emulate_media(media="print")
    assert background(page) == light


@pytest.mark.parametrize("address", ["", "#case=case_10"])
@pytest.mark.parametrize("width", [320, 768, 1100, 1400])
def test_the_page_never_scrolls_sideways(page, report, width, address):
    page.set_viewport_size({"width": width, "height": 800})
    page.goto(report.as_uri() + address)
    page.evaluate("for (const details of document.querySelectorAll('details')) details.open = true")
    assert page.evaluate("document.documentElement.scrollWidth") <= width


def test_headings_come_in_order_and_every_control_and_figure_has_a_name(page):
    levels = page.evaluate(
        "[...document.querySelectorAll('#report h1, #report h2, #report h3')].map((h) => Number(h.tagName[1]))"
    )
    assert levels[0] == 1
    assert all(after - before <= 1 for before, after in pairwise(levels))
    assert page.evaluate("[...document.querySelectorAll('input, select')].every((e) => e.labels.length === 1)")
    assert page.evaluate("[...document.querySelectorAll('svg[role=img]')].every((e) => e.getAttribute('aria-label'))")


def test_a_map_is_enlarged_by_click_and_by_keyboard_and_closed_again(page):
    large, small = page.locator("#large"), page.locator("#maps .enlarge").first
    small.click()
    assert large.is_visible()
    assert "case_2: a map" in large.inner_text()
    assert large.locator("img").bounding_box()["width"] > 3 * small.locator("img").bounding_box()["width"]
    assert large.locator("img").evaluate("(image) => image.complete && image.naturalWidth > 0")
    page.keyboard.press("Escape")
    assert large.is_hidden()
    small.focus()
    page.keyboard.press("Enter")
    assert large.is_visible()
    large.get_by_role("button", name="Close").click()
    assert large.is_hidden()
    assert page.evaluate("document.activeElement.className") == "enlarge"


def test_a_case_has_its_maps_on_its_own_page(page, report):
    page.goto(f"{report.as_uri()}#case=case_2")
    page.locator("#case-maps figure").wait_for()
    assert page.locator("#case-maps figure").count() == 1
    assert "a map" in page.locator("#case-maps").inner_text()
    page.locator("#case-maps .enlarge").click()
    assert "case_2: a map" in page.locator("#large").inner_text()
    page.keyboard.press("Escape")
    page.locator("#case-after").click()
    page.locator("#case-title", has_text="case_10").wait_for()
    assert page.locator("#case-maps figure").count() == 0
    page.goto(f"{report.as_uri()}#case={quote(HOSTILE[1], safe='')}")
    page.locator("#case-title", has_text="onerror").wait_for()
    assert page.locator("#case-maps figure").count() == 1


STARS = """
[...document.querySelectorAll('.stars')].filter((s) => s.textContent && s.offsetParent).map((s) => {
  const range = document.createRange();
  range.selectNodeContents(s);
  const frame = s.closest('.scroll') ?? s.closest('.card');
  const next = s.closest('td')?.nextElementSibling;
  const text = next ? [...next.childNodes].find((n) => n.textContent.trim()) : null;
  const start = document.createRange();
  if (text) start.selectNodeContents(text);
  return [range.getBoundingClientRect().right, frame.getBoundingClientRect().right,
          text ? start.getBoundingClientRect().left : Infinity];
})
"""


def test_stars_are_whole_and_touch_no_other_number(browser, tmp_path):
    """With four classes of long names, all significant; of fewer cases scipy would try all signs, for a minute."""
    classes = ["left ventricle", "myocardium", "right ventricle", "anterior hippocampus"]
    old = make(OVER, UNDER, EXTREME, OVER, cases=16, classes=classes, wobble=0.05, dice=0.7, absent=[(1, 0)])
    new = make(*[CENTERS] * 4, cases=16, classes=classes, wobble=0.03, dice=0.9, absent=[(1, 0)])
    path = write(tmp_path, {"Dice + CE": old, "Dice + CE + local temperature": new, "soft ACE": new})
    opened = browser.new_page(viewport={"width": 1400, "height": 900})
    opened.goto(path.as_uri())
    places = opened.evaluate(STARS)
    opened.close()
    assert len(places) > 50
    for right, frame, following in places:
        assert right <= frame
        assert right < following


def test_printing_opens_what_is_folded_but_for_lists_of_files(page):
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert page.locator("#comparison details:not([open])").count() == 0
    page.evaluate("dispatchEvent(new Event('afterprint'))")
    assert page.locator("#comparison details:not([open])").count() > 0
    assert page.pdf().startswith(b"%PDF")
