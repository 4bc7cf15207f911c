"""The section on decisions shows the numbers of `agreement_of`, and can be read in a browser."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from markup import Markup

from segcal import (
    ConfigError,
    Evaluation,
    EvaluationAccumulator,
    OverlapCounts,
    ReadOptions,
    ScoreSums,
    bin_statistics,
)
from segcal.evaluation.decisions import CURVES, agreement_of
from segcal.quality.summaries import summaries_of
from segcal.report import build_report

CLASSES = ("background", "liver", "<b>cyst</b>")
CASES = 8


def collect(sharpness, *, cases=CASES, size=0.002, seed=0, classes=CLASSES):
    """Labels drawn from the softmax of random logits; no cyst in the first case."""
    generator = torch.Generator().manual_seed(seed)
    shift = torch.linspace(0, 2, cases)[:, None, None]
    logits = (1 + shift) * torch.randn(cases, len(classes), 600, generator=generator)
    noise = (
        -torch.rand(logits.shape, generator=generator).log().neg().log()
    )  # Gumbel's: the largest is drawn by softmax
    labels = (logits + noise).argmax(1)
    if len(classes) > 2:
        labels[0][labels[0] == 2] = 0
    accumulator = EvaluationAccumulator(options=ReadOptions(class_names=list(classes)))
    accumulator.update((sharpness * logits).softmax(1), labels, [f"case {i}" for i in range(cases)])
    evaluation = accumulator.compute()
    sizes = torch.full_like(evaluation.decisions.voxel_ml, size)
    return replace(evaluation, decisions=replace(evaluation.decisions, voxel_ml=sizes))


@pytest.fixture(scope="module")
def evaluations():
    return {"sharp": collect(3.0), "true": collect(1.0)}


@pytest.fixture(scope="module")
def report(evaluations, tmp_path_factory):
    return build_report(evaluations, tmp_path_factory.mktemp("decisions") / "r.html", resamples=20)


def shown(values):
    return [None if x != x else round(x, 4) for x in values.tolist()]


def test_the_page_holds_the_numbers_of_the_agreement(report, evaluations):
    data = Markup(report).data["decisions"]
    assert data["unit"] == "ml"
    assert data["cases"] == list(range(CASES))
    for records, evaluation in zip(data["methods"], evaluations.values(), strict=True):
        found = agreement_of(evaluation.foreground())
        for record, label in zip(records, (None, *CLASSES[1:]), strict=True):
            expected = found.labels[label]
            assert record["actual"] == shown(expected.actual)
            present = [x for x, y in zip(record["expected"], record["actual"], strict=True) if y is not None]
            assert present == shown(expected.expected[expected.actual == expected.actual])
            assert record["risk"] == [shown(getattr(expected.risk, name)) for name in ("coverage", "risk", "ideal")]
            assert record["thresholds"] == shown(expected.thresholds.thresholds[::2])
            for curve, name in zip(record["curves"], CURVES, strict=True):
                assert curve == shown(getattr(expected.thresholds, name)[::2])
            assert record["best"] == pytest.approx(expected.thresholds.best[:2], abs=6e-5)
            if label is not None:
                assert record["volumes"]["mean"] == shown(expected.decided_volume.mean)
                assert record["volumes"]["difference"] == shown(expected.decided_volume.difference)
            assert record["table"][4] == [f"{expected.dice.mean_absolute_error:.3f}", ""]
            assert record["table"][7][1] == (
                f"ideal {expected.risk.ideal_area:.3f}, random {expected.risk.random_area:.3f}"
            )
    assert data["methods"][0][2]["actual"][0] is None  # the case without a cyst
    assert data["methods"][0][0]["volumes"] is None


def test_evaluations_without_sums_of_decisions_are_named_in_one_sentence(evaluations, tmp_path):
    old = {name: replace(each, decisions=None) for name, each in evaluations.items()}
    markup = Markup(build_report(old, tmp_path / "old.html", resamples=20))
    assert "These evaluations have no sums of decisions" in markup.text
    assert markup.data["decisions"]["methods"] == [None, None]
    mixed = Markup(build_report({**evaluations, "sharp": old["sharp"]}, tmp_path / "mixed.html", resamples=20))
    assert "Not shown, since they have no sums of decisions: sharp." in mixed.text
    assert mixed.data["decisions"]["methods"][0] is None
    assert mixed.data["decisions"]["methods"][1] is not None


def test_an_evaluation_built_from_sums_is_not_said_to_be_of_another_version(tmp_path):
    probabilities, labels = torch.tensor([[[0.9, 0.2], [0.1, 0.8]]]), torch.tensor([[0, 0]])
    built = Evaluation(  # as the docstring of Evaluation shows
        statistics=bin_statistics(probabilities, labels, bins=1200),
        overlap=OverlapCounts.of_classes(probabilities, labels),
        scores=ScoreSums.of_classes(probabilities, labels),
        top_label=None,
        cases=("patient 1",),
        classes=("background", "liver"),
        has_background=True,
    )
    text = Markup(build_report({"built": built}, tmp_path / "built.html", resamples=20)).text
    assert "segcal 0.2" not in text
    assert "This evaluation has no sums of decisions, which this section needs. Run segcal evaluate again" in text
    with pytest.raises(ConfigError, match="must hold the sums of decisions; it has none"):
        summaries_of(built)


def test_volumes_of_all_methods_are_in_one_unit(evaluations, tmp_path):
    sums = evaluations["true"].decisions
    unsized = replace(evaluations["true"], decisions=replace(sums, voxel_ml=torch.full_like(sums.voxel_ml, torch.nan)))
    markup = Markup(build_report({**evaluations, "true": unsized}, tmp_path / "r.html", resamples=20))
    assert markup.data["decisions"]["unit"] == "voxels"
    first = markup.data["decisions"]["methods"][0][1]["volumes"]["difference"]
    assert first == (evaluations["sharp"].overlap.predicted - evaluations["sharp"].overlap.true)[:, 1].tolist()


def test_every_figure_is_drawn_and_follows_the_chosen_class(page, evaluations):
    figures = page.locator("#decisions-figures svg")
    assert figures.count() == 3  # volumes are of single classes
    assert figures.first.locator(".dot").count() == 2 * CASES
    page.locator("#decisions-class").select_option(label="<b>cyst</b>")
    assert figures.count() == 4
    assert figures.first.locator(".dot").count() == 2 * (CASES - 1)
    assert figures.nth(3).locator(".trace").count() == 2 * 3  # bias and limits of each
    found = agreement_of(evaluations["sharp"].foreground()).labels["<b>cyst</b>"].dice
    row = page.locator("#decisions-table tr", has_text="Mean absolute error")
    assert row.locator("td").first.inner_text() == f"{found.mean_absolute_error:.3f}"


def test_the_threshold_curve_can_be_of_dice_sensitivity_or_precision(page):
    chart = page.locator("#decisions-figures svg").nth(2)
    assert chart.locator(".dot").count() == chart.locator(".ring").count() == 2
    before = chart.locator(".trace").first.get_attribute("d")
    page.locator("#decisions-curve").select_option(label="Sensitivity")
    assert chart.locator(".trace").first.get_attribute("d") != before
    assert chart.locator(".dot").count() == 0
    chart.focus()
    page.keyboard.press("ArrowRight")
    assert "Threshold 0.00\nsharp: sensitivity 1.000, expected 1.000" in page.locator("#tip").inner_text()


def test_a_dot_tells_its_case_and_opens_it(page):
    page.locator("#decisions-class").select_option(label="liver")
    chart = page.locator("#decisions-figures svg").first
    chart.focus()
    page.keyboard.press("ArrowRight")
    tip = page.locator("#tip").inner_text()
    assert tip.startswith("case 0\nsharp\nExpected DSC ")
    chart.locator(".hit").first.dispatch_event("click")
    page.locator("#case-title", has_text="case 0").wait_for()


@pytest.mark.parametrize("width", [320, 420, 1400])
@pytest.mark.parametrize("label", ["Average of classes", "liver"])
def test_the_section_never_scrolls_sideways(page, width, label):
    page.set_viewport_size({"width": width, "height": 800})
    page.locator("#decisions-class").select_option(label=label)
    assert page.evaluate("document.documentElement.scrollWidth") <= width


def test_one_class_one_case_and_no_sums_of_decisions_open_without_an_error(watch, tmp_path):
    one = collect(1.0, cases=1, classes=("background", "liver"))
    old = replace(one, decisions=None)
    for name, evaluation in {"one": one, "old": old}.items():
        path = build_report({"net": evaluation}, tmp_path / f"{name}.html", resamples=20)
        with watch(path) as page:
            assert page.locator("#decisions-figures svg").count() == (4 if name == "one" else 0)
