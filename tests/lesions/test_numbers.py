"""Rates, FROC and reliability of lesions, against brute force, hand arithmetic and a simulation that is calibrated."""

import math

import numpy as np
import pytest

from segcal.lesions.case import Lesion
from segcal.lesions.numbers import RATES, bins_for, froc, lesion_reliability, lesions_of_class, rate_name, summarize


def lesion(case, kind, confidence, matched, voxels=10):
    center = (0.0, 0.0, 0.0)
    return Lesion(case, "tumor", kind, voxels, 2.0 * voxels, confidence, matched, int(matched), *center, *center)


def made_up(seed, cases=12, calibrated=False):
    """Random lesions: a true one is found by a prediction or missed, and there are false ones."""
    generator = np.random.default_rng(seed)
    rows = []
    for i in range(cases):
        name = f"case {i}"
        for _ in range(generator.integers(0, 6)):
            size = int(generator.integers(1, 200))
            sure = round(float(generator.uniform(0.5, 1)), 2)  # ties
            if generator.random() < 0.7:
                rows += [lesion(name, "predicted", sure, True, size // 2), lesion(name, "true", sure, True, size)]
            else:
                rows.append(lesion(name, "true", None, False, size))
        for _ in range(generator.integers(0, 20)):
            rows.append(lesion(name, "predicted", round(float(generator.uniform(0.5, 0.95)), 2), False, 5))
    return rows, [f"case {i}" for i in range(cases)]


def brute_force(rows, cases):
    """Sensitivity at each rate: of all cuts that keep to it, the one that finds most."""
    true = [r for r in rows if r.kind == "true"]
    predicted = [r for r in rows if r.kind == "predicted"]
    found = dict.fromkeys(RATES, 0.0)
    for cut in {r.confidence for r in predicted}:
        false = sum(r.confidence >= cut and not r.matched for r in predicted) / len(cases)
        hit = sum(r.matched and r.confidence >= cut for r in true) / len(true)
        for rate in RATES:
            if false <= rate:
                found[rate] = max(found[rate], hit)
    return found


@pytest.mark.parametrize("seed", range(5))
def test_froc_is_that_of_brute_force(seed):
    rows, cases = made_up(seed)
    lesions = lesions_of_class(rows, cases, "tumor")
    numbers = {n.metric: n for n in summarize(lesions, cases, bins=5, resamples=50)}
    expected = brute_force(rows, cases)
    assert {rate: numbers[rate_name(rate)].value for rate in RATES} == pytest.approx(expected)
    assert numbers["froc"].value == pytest.approx(sum(expected.values()) / 7)
    curve = froc(lesions)
    assert curve.sensitivity[-1] == pytest.approx(numbers["sensitivity"].value)
    assert curve.false_positives[-1] == pytest.approx(numbers["false_positives_per_case"].value)
    assert (np.diff(curve.false_positives) >= 0).all()
    assert (np.diff(curve.cuts) < 0).all()


def test_rates_are_those_of_hand_arithmetic():
    rows = [
        lesion("a", "predicted", 0.9, True), lesion("a", "predicted", 0.8, True), lesion("a", "true", 0.9, True),
        lesion("a", "predicted", 0.6, False), lesion("b", "true", None, False),
    ]  # fmt: skip
    cases = ["a", "b", "c", "d"]
    numbers = {n.metric: n for n in summarize(lesions_of_class(rows, cases, "tumor"), cases, bins=5)}
    assert numbers["sensitivity"].value == 1 / 2
    assert numbers["precision"].value == pytest.approx(2 / 3)
    assert numbers["f1"].value == pytest.approx(2 * (1 / 2) * (2 / 3) / (1 / 2 + 2 / 3))
    assert numbers["false_positives_per_case"].value == 1 / 4
    assert numbers["sensitivity_at_1/8"].value == 1 / 2  # cut at 0.8
    # In five bins: 0.9 and 0.8 are real (gap 0.15), 0.6 is not (gap 0.6).
    assert numbers["ace"].value == pytest.approx((0.15 + 0.6) / 2)
    assert numbers["ece"].value == pytest.approx((2 * 0.15 + 0.6) / 3)
    assert math.isnan(numbers["sensitivity"].low)  # four patients


def test_without_lesions_there_is_no_number_and_without_predictions_nothing_is_found():
    cases = [f"case {i}" for i in range(6)]
    nothing = {n.metric: n for n in summarize(lesions_of_class([], cases, "tumor"), cases, bins=5, resamples=20)}
    assert nothing["false_positives_per_case"].value == 0
    assert all(math.isnan(nothing[name].value) for name in ("sensitivity", "precision", "f1", "froc", "ace"))
    missed = [lesion("case 1", "true", None, False)]
    found = {n.metric: n for n in summarize(lesions_of_class(missed, cases, "tumor"), cases, bins=5, resamples=20)}
    assert (found["sensitivity"].value, found["f1"].value, found["froc"].value) == (0, 0, 0)
    assert math.isnan(found["precision"].value)


def test_intervals_hold_the_truth_about_as_often_as_they_say():
    """Ten patients of ten lesions each, found by chance with 0.6: of 100 cohorts about 95 % hold 0.6."""
    generator, held = np.random.default_rng(0), 0
    cases = [f"case {i}" for i in range(10)]
    for _ in range(100):
        rows = [
            lesion(case, "true", 0.9 if hit else None, bool(hit))
            for case in cases
            for hit in generator.random(10) < 0.6
        ]
        number = summarize(lesions_of_class(rows, cases, "tumor"), cases, bins=5, resamples=200)[0]
        held += number.low <= 0.6 <= number.high
    assert 89 <= held <= 100


def test_sure_intervals_are_not_narrower_than_wilsons():
    cases = [f"case {i}" for i in range(8)]
    rows = [lesion(case, "true", 0.9, True) for case in cases]
    number = summarize(lesions_of_class(rows, cases, "tumor"), cases, bins=5, resamples=100)[0]
    assert (number.value, number.high) == (1, 1)
    assert number.low == pytest.approx(0.6756, abs=1e-4)  # 8 of 8


def test_confidence_that_is_the_chance_to_be_real_is_calibrated():
    generator, cases = np.random.default_rng(3), [f"case {i}" for i in range(100)]
    rows = []
    for case in cases:
        for sure in generator.uniform(0.3, 1, 40):
            real = bool(generator.random() < sure)
            rows.append(lesion(case, "predicted", float(sure), real))
    lesions = lesions_of_class(rows, cases, "tumor")
    numbers = {n.metric: n for n in summarize(lesions, cases, bins=10, resamples=300)}
    assert numbers["ece"].value < 0.03
    assert numbers["ece"].low < 0.01
    diagram = lesion_reliability(lesions, cases, bins=10)
    inside = (diagram.low <= diagram.confidence) & (diagram.confidence <= diagram.high)
    assert int(inside[3:].sum()) >= 6
    assert "lesions" not in diagram.band or "voxels" not in diagram.band
    worse = [row._replace(confidence=row.confidence**0.25) for row in rows]
    assert summarize(lesions_of_class(worse, cases, "tumor"), cases, bins=10, resamples=100)[-1].low > 0.1


def test_few_lesions_have_few_bins():
    assert [bins_for(number) for number in (0, 99, 100, 999, 1000)] == [5, 5, 10, 10, 20]
