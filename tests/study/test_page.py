"""A study's figures and page show the numbers of its comparison, and run nothing foreign."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from functools import partial
from html.parser import HTMLParser
from math import nan
from types import SimpleNamespace

import nibabel
import numpy as np
import pytest
import torch
from browsing import (
    never_sideways,
    prints_as_a_document,
    reads_by_all,
    switches_theme,
    unfold,
)
from handmade import evaluation_of
from layouts import write_brats, write_decathlon

from segcal.comparison.comparison import compare
from segcal.evaluation.columns import Column
from segcal.study import figures as drawing
from segcal.study import summary
from segcal.study.figures import map_cases, study_colors, write_figures
from segcal.study.page import build_page, key_results, lead_sentence
from segcal.study.plan import make_plan, read_study
from segcal.study.summary import collect, relative_changes
from segcal.study.work import DONE, SIDES, Workshop

HOSTILE = "<img src=x onerror=alert(1)>"
STUDY = f"""
title = "A <script>alert(1)</script> & title"
about = "First </style>.\\n\\nSecond."
preset = "small"
seeds = [0, 3]
methods = ["dice-ce", "soft-ace", "{HOSTILE}"]

[variants."{HOSTILE}"]
method = "ce"

[sweep]
methods = ["soft-ace"]
bins = [5, 20]

[datasets."Two parts"]
dataset = "decathlon"
root = "Task09_Test"

[datasets.BraTS]
dataset = "brats"
root = "brats"
"""
CLASSES = {"Two parts": ("near", "far"), "BraTS": ("ET", "TC", "WT")}
GAPS = {"dice-ce": 0.2, "soft-ace": 0.1, HOSTILE: 0.25, "soft-ace, 5 bins": 0.15}
DICES = {"dice-ce": 0.8, "soft-ace": 0.79, HOSTILE: 0.7, "soft-ace, 5 bins": 0.75}
CASES = 6


def evaluation_for(arm, cases, *, side):
    """Gaps and Dice around the method's own, different in every case, class and seed."""
    generator = torch.Generator().manual_seed(arm.seed + 10 * (side == "test"))
    classes = CLASSES[arm.dataset]
    noise = torch.rand(len(cases), len(classes), generator=generator, dtype=torch.float64)
    gaps, dices = GAPS[arm.method] + 0.05 * noise, DICES[arm.method] + 0.02 * noise
    return evaluation_of(gaps, dices, cases=cases, classes=classes, absent=[(1, 0)])


@pytest.fixture(scope="module")
def shop(tmp_path_factory):
    """A study whose runs are done, but for their weights."""
    folder = tmp_path_factory.mktemp("study")
    write_decathlon(folder, cases=CASES)
    write_brats(folder / "brats", cases=CASES)
    (folder / "mine.toml").write_text(STUDY, encoding="utf-8")
    shop = Workshop(make_plan(read_study(folder / "mine.toml"), folder / "out"), folder / "out")
    for arm in shop.plan.arms:
        cases = [case.name for case in shop.plan.runs[arm.run].opened.cases]
        for side in SIDES:
            target = arm.results(shop.runs, side)
            target.mkdir(parents=True)
            evaluation = evaluation_for(arm, cases, side=side)
            replace(evaluation, provenance={"versions": {"torch": "9.9"}}).save(target / "evaluation.npz")
        (shop.runs / arm.run / DONE).write_text(json.dumps({"fittings": [], "seconds": 125}))
    return shop


@pytest.fixture(scope="module")
def results(shop):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(summary, "compare", partial(compare, resamples=50, draws=3))  # quicker
        return collect(shop)


@pytest.fixture(scope="module")
def drawn(results, shop):
    return write_figures(results, shop, shop.out, formats=("png",))  # print is drawn in test_study


@pytest.fixture(scope="module")
def page(results, shop, drawn):
    return build_page(results, drawn, shop.out / "report.html")


class Markup(HTMLParser):
    """The elements of a page, and its text; elements must be closed in order."""

    VOID = frozenset({"meta", "img", "br", "input", "link"})

    def __init__(self, path):
        super().__init__()
        self.elements, self.words, self.open = [], [], []
        self.feed(path.read_text(encoding="utf-8"))
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open[-1:] not in (["style"], ["script"]):
            self.words.append(data)

    @property
    def text(self):
        return " ".join(" ".join(self.words).split()).replace("\N{MINUS SIGN}", "-")


def test_every_figure_is_written_and_told(shop, drawn):
    assert [figure.name for figure in drawn.figures] == [
        "pareto", "histograms", "radar-Two-parts", "radar-BraTS", "sensitivity-Two-parts", "sensitivity-BraTS",
    ]  # fmt: skip
    for figure in drawn.figures:
        assert b"<svg " in figure.svg
        assert (shop.out / "figures" / f"{figure.name}.png").read_bytes().startswith(b"\x89PNG")
        assert not (shop.out / "figures" / f"{figure.name}.svg").exists()
        assert figure.caption.endswith(".")


def test_maps_that_cannot_be_made_are_a_remark(drawn):
    first, second = drawn.remarks
    assert first.startswith("Two parts: no probability maps; ")
    assert second.startswith("BraTS: no probability maps; ")


def test_maps_are_of_the_median_and_the_worst_case_and_of_a_class_that_is_there(results):
    found = results.datasets[0]
    parts = [part.case_metrics()["ace"] for part in found.test["dice-ce"]]
    errors = torch.stack(parts).mean(0)
    order = errors.mean(1).argsort(descending=True).tolist()
    names = found.test["dice-ce"][0].cases
    chosen = map_cases(found, CASES)
    assert [each.case for each in chosen[:3]] == [names[order[3]], names[order[0]], names[order[1]]]
    assert [each.rank for each in chosen[:3]] == ["the median", "the worst", "the second worst"]
    for case, class_name, _ in chosen:
        i = names.index(case)
        expected = "far" if i == 1 else found.comparison.classes[int(errors[i].argmax())]
        assert class_name == expected
    assert map_cases(found, 0) == []


def test_maps_are_drawn_of_classes_and_of_regions(results, shop, tmp_path, monkeypatch):
    def write(run, out, *, cases, calibrator):
        out.mkdir(parents=True)
        for case in cases:
            image = nibabel.load(case.images[0])
            values = np.random.default_rng(0).random((*image.shape[:3], len(run.dataset.classes)), np.float32)
            nibabel.Nifti1Image(values / values.sum(-1, keepdims=True), image.affine).to_filename(
                out / f"{case.name}.nii.gz"
            )
        return SimpleNamespace(failures=[])

    def load(run, runs):
        return SimpleNamespace(dataset=run.opened, config=run.config)

    monkeypatch.setattr(drawing, "load_planned", load)
    monkeypatch.setattr(drawing, "predict", write)
    drawn = write_figures(results, shop, tmp_path, formats=("png",))
    assert drawn.remarks == ()
    names = [f"maps-{stem}-{i}" for stem in ("Two-parts", "BraTS") for i in (1, 2)]
    assert [figure.name for figure in drawn.figures if figure.kind == "maps"] == names
    assert not list(tmp_path.glob("figures/*.pdf"))


def test_labels_that_skip_a_value_are_read_as_values(shop):
    run = next(iter(shop.plan.runs.values()))
    plain = drawing._reading(run.opened, run.config)
    assert (plain.logits, plain.regions) == (False, None)
    odd = drawing._reading(replace(run.opened, values=(0, 1, 5)), run.config)
    assert odd.regions.members == {"background": (0,), "near": (1,), "far": (5,)}


def test_the_page_has_each_number_of_each_table(page, results):
    text = Markup(page).text
    for table in results.tables:
        assert table.title in text
        for row in table.rows:
            for cell in row[table.names :]:
                shown = f"{cell.value} {cell.spread} {cell.stars} {cell.seeds} {cell.change}"
                assert cell.value == "-" or " ".join(shown.split()) in text


def test_the_summary_tells_what_methods_change(page, results):
    keys = key_results(results)
    assert [(key.method, key.datasets) for key in keys] == [("soft-ace", 2), (HOSTILE, 2)]
    mean = relative_changes(results.datasets)["mean of datasets"]["soft-ace"]
    assert list(keys[0].changes.values()) == mean
    text = Markup(page).text
    told = list(keys[0].tested.values())
    shown = zip((f"macro-ACE, % {mean[1]:+.1f}", f"micro-ACE, % {mean[2]:+.1f}", f"DSC, points {mean[0]:+.2f}"), told,
                strict=True)  # fmt: skip
    assert "soft-ace " + " ".join(" ".join(pair) for pair in shown) in text
    assert lead_sentence(results, key_results(results)) in text
    assert f"soft-ace lowers macro-ACE the most: by {-mean[1]:.1f} % against dice-ce, averaged over 2 datasets" in text


def test_failed_cases_and_notes_are_in_the_notes(results, shop, drawn, tmp_path):
    provenance = {
        "failures": [{"case": HOSTILE, "kind": "GridError", "message": "is off."}],
        "notes": [{"kind": "hard", "message": "Decisions, not probabilities."}],
    }
    first, *others = results.datasets
    test = {method: [replace(each, provenance=provenance) for each in seeds] for method, seeds in first.test.items()}
    changed = replace(results, datasets=(replace(first, test=test), *others))
    text = Markup(build_page(changed, drawn, tmp_path / "report.html")).text
    for method in first.methods:
        assert f"Two parts, {method}: 1 of {CASES + 1} cases failed and count nowhere: {HOSTILE} (GridError: is" in text
        assert text.count(f"Two parts, {method}: Decisions, not probabilities.") == 1


def test_what_a_lower_ace_cost_is_in_the_notes_of_each_dataset(results):
    """NLL of soft-ace made to rise by 7 %, its ACE fallen by 20 %."""
    changes = {"ace": -0.2, "nll": 0.07, "brier": 0.0, "occupied": 0.0}
    datasets = []
    for found in results.datasets:
        entries = [
            each._replace(change=changes[each.metric]) if each.method == "soft-ace" and each.metric in changes else each
            for each in found.comparison.entries
        ]
        datasets.append(replace(found, comparison=replace(found.comparison, entries=tuple(entries))))
    told = replace(results, datasets=tuple(datasets)).notes
    for found in datasets:
        (sentence,) = (note for note in told if note.startswith(f"{found.name}, soft-ace: macro-ACE fell"))
        assert "macro-ACE fell by 20 %, but NLL rose by 7.0 %: part of the gain may come from less" in sentence


def with_p(results, **p):
    """The results with these p-values of soft-ace, by dataset."""

    def changed(found):
        value = p[found.name.split()[0]]
        stars = "*" if value < 0.05 else ""
        entries = [each._replace(p=value, stars=stars) if each.method == "soft-ace" else each
                   for each in found.comparison.entries]  # fmt: skip
        return replace(found, comparison=replace(found.comparison, entries=tuple(entries)))

    return replace(results, datasets=tuple(changed(found) for found in results.datasets))


@pytest.mark.parametrize(
    ("p", "told"),
    [
        ({"Two": 0.3, "BraTS": 0.2}, "(significant on 0 of 2 datasets)"),
        ({"Two": 0.01, "BraTS": 0.2}, "(significant on 1 of 2 datasets)"),
        ({"Two": 0.01, "BraTS": nan}, "(significant on 1 of 2 datasets; on 1 not tested, n/a: fewer than 5 patients)"),
        ({"Two": nan, "BraTS": nan}, "(not tested, n/a: fewer than 5 patients)"),
    ],
)
def test_the_first_sentence_says_on_how_many_datasets_a_change_is_significant(results, p, told):
    tested = with_p(results, **p)
    sentence = lead_sentence(tested, key_results(tested))
    assert f"averaged over 2 datasets {told}; it lowers micro-ACE" in sentence
    assert sentence.count(told) == 3


@pytest.mark.parametrize(
    ("p", "told", "stars"),
    [
        (0.2, "(not significant, p = 0.200)", ""),
        (0.02, "(significant, p = 0.020)", "*"),
        (1e-9, "(significant, p < 0.001)", "*"),
        (nan, "(not tested, n/a: fewer than 5 patients)", ""),
    ],
)
def test_the_first_sentence_says_what_the_test_found_as_the_table_does(results, p, told, stars):
    one = with_p(replace(results, datasets=results.datasets[:1]), Two=p)
    sentence = lead_sentence(one, key_results(one))
    assert f"% against dice-ce {told}; it" in sentence
    row = next(row for row in summary.change_table(one).rows if row[1].text == "soft-ace")
    assert {cell.stars for cell in row[2:]} == {stars}
    assert key_results(one)[0].tested[Column("ace", "macro")] == told[1:-1]


def test_the_page_has_figures_runs_settings_and_notes(page, results, shop, drawn):
    markup = Markup(page)
    images = [attributes for tag, attributes in markup.elements if tag == "img"]
    assert len(images) == len(drawn.figures)
    assert {image["alt"] for image in images} == {figure.caption for figure in drawn.figures}
    for arm in shop.plan.arms:
        assert f"{arm.dataset} {arm.method} {arm.seed} done 2 min" in markup.text
        assert arm.run in markup.text
    assert 'dataset = "brats"' in markup.text
    assert "torch 9.9" in markup.text
    for remark in drawn.remarks:
        assert remark in markup.text


def test_names_stay_text_and_nothing_is_fetched(page):
    markup = Markup(page)
    tags = [tag for tag, _ in markup.elements]
    assert tags.count("script") == 1
    assert "link" not in tags
    addresses = [a[name] for _, a in markup.elements for name in ("src", "href") if name in a]
    assert all(address.startswith(("data:image/svg+xml;base64,", "#")) for address in addresses)
    assert not [name for _, attributes in markup.elements for name in attributes if name.startswith("on")]
    assert "url(" not in page.read_text(encoding="utf-8")
    assert "A <script>alert(1)</script> & title" in markup.text
    assert HOSTILE in markup.text
    (meta,) = [a["content"] for tag, a in markup.elements if a.get("http-equiv") == "Content-Security-Policy"]
    assert re.fullmatch(
        "default-src 'none'; img-src data:; script-src 'sha256-[^']+'; style-src 'sha256-[^']+'; base-uri 'none'; "
        "form-action 'none'",
        meta,
    )


def test_a_study_without_results_has_a_page_of_what_is_missing(results, shop, tmp_path):
    none = replace(results, datasets=(), remarks=("all is missing",))
    drawn = write_figures(none, shop, tmp_path)
    assert drawn == ((), ())
    text = Markup(build_page(none, drawn, tmp_path / "deep" / "report.html")).text
    assert "all is missing" in text
    assert lead_sentence(none, key_results(none)) == ""
    assert study_colors(none) == {}


def test_a_browser_shows_its_figures(watch, page):
    with watch(page) as opened:
        unfold(opened)
        assert opened.evaluate("[...document.images].every((image) => image.naturalWidth > 0 && image.width > 300)")


@pytest.mark.parametrize("check", [reads_by_all, never_sideways, switches_theme, prints_as_a_document])
def test_a_browser_shows_it_to_all_at_any_width_and_on_paper(watch, page, check):
    with watch(page) as opened:
        check(opened)
