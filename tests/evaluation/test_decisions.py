"""Agreement of what decisions promised with what came of them: by hand, by scipy, and on simulated labels."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy import stats as scipy_stats

from segcal import EvaluationAccumulator, ReadOptions
from segcal.evaluation.agreement import (
    agreement_content,
    agreement_lines,
    case_dices,
    dice_agreement,
    dice_agreements,
)
from segcal.evaluation.decisions import agreement_of, risk_coverage, volume_agreement

NAN = math.nan
CLASSES = ["background", "liver", "cyst"]


def collect(probabilities, labels, classes=CLASSES, *, sigmoid=False):
    options = ReadOptions(class_names=classes, sigmoid=sigmoid)
    accumulator = EvaluationAccumulator(options=options)
    accumulator.update(probabilities, labels, [f"case {i}" for i in range(len(labels))])
    return accumulator.compute().foreground()


def hand():
    """Two cases of four voxels. Liver: decided {0, 1} and {0, 1}, true {0, 1, 2} and {0}. No cyst in the second."""
    liver = torch.tensor([[0.9, 0.6, 0.4, 0.1], [0.8, 0.7, 0.2, 0.0]])
    cyst = torch.tensor([[0.0, 0.0, 0.0, 0.8], [0.0, 0.0, 0.0, 0.0]])
    return collect(torch.stack([1 - liver - cyst, liver, cyst], 1), torch.tensor([[1, 1, 1, 2], [1, 0, 0, 0]]))


def test_expected_and_actual_dice_are_those_by_hand():
    pairs = case_dices(hand())
    expected, actual = pairs["liver"]
    assert expected == pytest.approx([2 * 1.5 / (2 + 2.0), 2 * 1.5 / (2 + 1.7)])
    assert actual == pytest.approx([2 * 2 / (2 + 3), 2 * 1 / (2 + 1)])
    found = dice_agreements(hand())["liver"]
    assert found.bias == pytest.approx((0.75 - 0.8 + 3 / 3.7 - 2 / 3) / 2)
    assert found.mean_absolute_error == pytest.approx((0.05 + 3 / 3.7 - 2 / 3) / 2)
    assert found.constant_guess == pytest.approx((0.8 - 2 / 3) / 2)


def test_a_class_that_is_absent_counts_in_no_dice_and_in_no_mean_over_classes():
    pairs = case_dices(hand())
    assert pairs["cyst"][1] == pytest.approx([1, NAN], nan_ok=True)
    assert dice_agreements(hand())["cyst"].cases == 1
    cyst = 2 * 0.8 / (1 + 0.8)
    assert pairs[None][0] == pytest.approx([(0.75 + cyst) / 2, 3 / 3.7])
    assert pairs[None][1] == pytest.approx([(0.8 + 1) / 2, 2 / 3])


def test_a_class_that_no_case_has_is_nan_everywhere():
    evaluation = hand().select(cases=[1])
    found = agreement_of(evaluation).labels["cyst"]
    assert found.dice.cases == 0
    numbers = (found.dice.bias, found.dice.rank_correlation, found.risk.area, *found.thresholds.best)
    assert all(math.isnan(x) for x in (*numbers, found.thresholds.decision_dice, found.decided_volume.bias))
    assert len(found.risk.risk) == 0
    assert np.isnan(found.thresholds.dice).all()


def test_a_class_that_is_there_and_got_no_probability_promises_a_dice_of_zero():
    probabilities = torch.tensor([[[1.0, 1.0], [0.0, 0.0]]])
    pairs = case_dices(collect(probabilities, torch.tensor([[0, 1]]), ["background", "liver"]))
    assert (pairs["liver"][0].tolist(), pairs["liver"][1].tolist()) == ([0.0], [0.0])


def test_one_case_has_no_rank_correlation_and_no_limits():
    found = agreement_of(hand().select(cases=[0])).labels["liver"]
    assert found.dice.cases == 1
    assert math.isnan(found.dice.rank_correlation)
    assert found.dice.constant_guess == 0
    assert (found.risk.coverage.tolist(), found.risk.risk.tolist()) == ([1], pytest.approx([0.2]))
    assert found.decided_volume.bias == -1
    assert math.isnan(found.decided_volume.low)


@pytest.mark.parametrize("ties", [False, True])
def test_the_rank_correlation_is_scipys(ties):
    generator = np.random.default_rng(3)
    expected, actual = generator.uniform(size=(2, 40))
    if ties:
        expected, actual = expected.round(1), actual.round(1)
    assert dice_agreement(expected, actual).rank_correlation == pytest.approx(
        scipy_stats.spearmanr(expected, actual).statistic
    )


def test_the_best_constant_is_the_median_and_no_other_is_better():
    actual = np.array([0.9, 0.85, 0.8, 0.2])
    guess = dice_agreement(np.full(4, 0.5), actual).constant_guess
    assert guess == pytest.approx((0.075 + 0.025 + 0.025 + 0.625) / 4)
    assert all(np.abs(actual - c).mean() >= guess - 1e-12 for c in np.linspace(0, 1, 1001))
    assert math.isnan(dice_agreement(np.full(4, 0.5), actual).rank_correlation)


def test_the_area_under_risk_and_coverage_is_that_by_hand():
    # By promise: risks 0.2, 0.1, 0.4, 0.5; ideal: 0.1, 0.2, 0.4, 0.5. The case without a Dice is left out.
    found = risk_coverage(np.array([0.6, 0.9, NAN, 0.8, 0.7]), np.array([0.5, 0.8, NAN, 0.9, 0.6]))
    risks = [0.2, 0.3 / 2, 0.7 / 3, 1.2 / 4]
    ideal = [0.1, 0.3 / 2, 0.7 / 3, 1.2 / 4]
    assert found.coverage.tolist() == [0.25, 0.5, 0.75, 1]
    assert found.risk == pytest.approx(risks)
    assert found.ideal == pytest.approx(ideal)
    assert found.area == pytest.approx(sum(risks) / 4)
    assert found.ideal_area == pytest.approx(sum(ideal) / 4)
    assert found.random_area == pytest.approx(0.3)


def test_cases_that_promise_the_same_count_as_in_random_order():
    actual = np.array([0.9, 0.2, 0.5])
    same = risk_coverage(np.full(3, 0.7), actual)
    assert same.risk == pytest.approx(np.full(3, 1 - actual.mean()))
    assert same.area == pytest.approx(same.random_area)
    first = risk_coverage(np.array([0.7, 0.7, 0.1]), actual)
    other = risk_coverage(np.array([0.7, 0.7, 0.1]), actual[[1, 0, 2]])
    assert first.risk == pytest.approx([0.45, 0.45, 1.4 / 3])
    assert first.risk == pytest.approx(other.risk)


def test_bland_and_altman_by_hand():
    found = volume_agreement(np.array([12.0, 9.0, NAN, 21.0]), np.array([10.0, 10.0, 5.0, 20.0]))
    assert found.mean == pytest.approx([11, 9.5, NAN, 20.5], nan_ok=True)
    assert found.difference == pytest.approx([2, -1, NAN, 1], nan_ok=True)
    deviation = math.sqrt(((2 - 2 / 3) ** 2 + (-1 - 2 / 3) ** 2 + (1 - 2 / 3) ** 2) / 2)
    assert (found.bias, found.low, found.high) == pytest.approx(
        (2 / 3, 2 / 3 - 1.96 * deviation, 2 / 3 + 1.96 * deviation)
    )


def test_volumes_are_in_voxels_unless_the_size_is_known_of_every_case():
    evaluation = hand()
    found = agreement_of(evaluation)
    assert found.unit == "voxels"
    assert found.labels["liver"].decided_volume.difference.tolist() == [-1, 1]
    assert found.labels["liver"].expected_volume.difference == pytest.approx([-1, 0.7])
    assert found.labels["cyst"].decided_volume.difference == pytest.approx([0, NAN], nan_ok=True)
    assert found.labels[None].decided_volume is None
    for known in ([0.002, 0.004], [0.002, NAN]):
        size = torch.tensor(known, dtype=torch.float64)[:, None].expand(2, 2)
        sized = agreement_of(replace(evaluation, decisions=replace(evaluation.decisions, voxel_ml=size)))
        if math.isnan(known[1]):
            assert sized.unit == "voxels"
        else:
            assert sized.unit == "ml"
            assert sized.labels["liver"].decided_volume.difference == pytest.approx([-0.002, 0.004])


def test_threshold_curves_are_means_over_the_cases_with_the_class():
    curves = agreement_of(hand()).labels["liver"].thresholds
    assert len(curves.thresholds) == 101
    assert curves.thresholds[[0, 50, 99]].tolist() == [0, 0.5, 0.99]
    at = {t: int(np.argmin(np.abs(curves.thresholds - t))) for t in (0.0, 0.3, 0.5, 0.75)}
    # Above 0.75 one voxel each: true positives 1 of 1 decided; 3 and 1 true, 2.0 and 1.7 expected.
    assert curves.dice[at[0.75]] == pytest.approx((2 / 4 + 2 / 2) / 2)
    assert curves.expected_dice[at[0.75]] == pytest.approx((2 * 0.9 / (1 + 2.0) + 2 * 0.8 / (1 + 1.7)) / 2)
    assert curves.sensitivity[at[0.75]] == pytest.approx((1 / 3 + 1) / 2)
    assert curves.precision[at[0.75]] == pytest.approx(1)
    assert curves.expected_precision[at[0.5]] == pytest.approx((1.5 / 2 + 1.5 / 2) / 2)
    assert curves.expected_sensitivity[at[0.3]] == pytest.approx((1.9 / 2.0 + 1.5 / 1.7) / 2)
    assert curves.sensitivity[0] == 1
    # 0.9 of the first is left beyond 0.8: its precision alone counts, while Dice of the second is 0.
    assert curves.precision[85] == 1
    assert curves.dice[85] == pytest.approx((0.5 + 0) / 2)


def test_the_best_threshold_is_sought_among_all_edges_and_the_promised_one_without_labels():
    curves = agreement_of(hand()).labels["liver"].thresholds
    # Between 0.2 and 0.4: 3 of 3 and 1 of 2, mean (1 + 2/3) / 2; above 0.7: (1/2 + 1) / 2; in between less.
    assert curves.best.dice == pytest.approx((1 + 2 / 3) / 2)
    assert curves.best.threshold == pytest.approx(0.4, abs=1 / 1200)
    assert curves.best.expected_dice == pytest.approx((3.8 / 5 + 3 / 3.7) / 2)
    assert curves.promised.expected_dice == pytest.approx(
        (3.8 / 5 + 3 / 3.7) / 2
    )  # 0.76 against 0.75 of one voxel less
    assert curves.promised.threshold == curves.best.threshold
    assert curves.decision_dice == pytest.approx((0.8 + 2 / 3) / 2)
    mean = agreement_of(hand()).labels[None].thresholds
    assert mean.decision_dice == pytest.approx((0.9 + 2 / 3) / 2)
    assert mean.dice[50] == pytest.approx(((0.8 + 1) / 2 + 2 / 3) / 2)


def test_labels_drawn_from_the_probabilities_give_no_bias():
    generator = torch.Generator().manual_seed(0)
    shift = torch.linspace(-1, 1, 60)[:, None]
    one = torch.sigmoid(2 * torch.randn(60, 4000, generator=generator) + shift)
    labels = (torch.rand(one.shape, generator=generator) < one).long()
    found = agreement_of(collect(torch.stack([1 - one, one], 1), labels, ["background", "liver"])).labels["liver"]
    assert abs(found.dice.bias) < 0.003  # a case's Dice wobbles by 0.01: 60 of them by 0.0013
    assert found.dice.mean_absolute_error < 0.5 * found.dice.constant_guess
    assert found.dice.rank_correlation > 0.8
    assert found.risk.ideal_area <= found.risk.area < found.risk.random_area
    assert np.abs(found.thresholds.dice - found.thresholds.expected_dice).max() < 0.01
    assert found.thresholds.best.threshold == pytest.approx(found.thresholds.best.dice / 2, abs=0.05)
    volumes = found.expected_volume
    assert abs(volumes.bias) < 3 * np.nanstd(volumes.difference) / math.sqrt(60)


def test_too_sharp_probabilities_promise_too_much():
    generator = torch.Generator().manual_seed(1)
    logits = 1.5 * torch.randn(20, 2000, generator=generator)
    labels = (torch.rand(logits.shape, generator=generator) < torch.sigmoid(logits)).long()
    sharp = torch.sigmoid(3 * logits)
    found = agreement_of(collect(torch.stack([1 - sharp, sharp], 1), labels, ["background", "liver"])).labels["liver"]
    assert found.dice.bias > 0.05


def test_fine_bins_of_another_number_and_regions_work():
    probabilities = torch.rand(6, 2, 50, generator=torch.Generator().manual_seed(2))
    labels = (torch.rand(probabilities.shape, generator=torch.Generator().manual_seed(3)) < probabilities).float()
    evaluation = collect(probabilities, labels, ["whole", "core"], sigmoid=True)
    coarse = replace(evaluation, statistics=evaluation.statistics.rebin(40))
    found = agreement_of(coarse)
    assert set(found.labels) == {"whole", "core", None}
    assert len(found.labels["whole"].thresholds.thresholds) == 40
    at_half = found.labels["whole"].thresholds.dice[20]
    assert at_half == pytest.approx(found.labels["whole"].thresholds.decision_dice)  # which is what regions decide by


def test_an_evaluation_without_sums_of_decisions_has_none():
    old = replace(hand(), decisions=None)
    assert agreement_of(old) is None
    assert case_dices(old) == {}
    assert agreement_lines(old) == []
    assert agreement_content(old) == {}


def test_a_line_is_written_for_each_class_that_five_cases_have():
    five = collect(*_many(5))
    (line,) = agreement_lines(five)
    found = dice_agreements(five)["liver"]
    assert line == (
        f"liver: expected DSC {found.expected:.3f}, actual {found.actual:.3f}; mean absolute error "
        f"{found.mean_absolute_error:.3f} (constant guess {found.constant_guess:.3f}); rank correlation "
        f"{found.rank_correlation:.2f}"
    )
    assert agreement_lines(five.select(cases=range(4))) == []
    content = agreement_content(five)
    assert set(content) == {"liver", "cyst", "all classes"}
    assert content["liver"]["mean_absolute_error"] == found.mean_absolute_error
    assert content["cyst"]["cases"] == 0
    assert content["cyst"]["bias"] is None


def _many(cases):
    """Liver in every case, a cyst in none."""
    generator = torch.Generator().manual_seed(4)
    probabilities = torch.randn(cases, 3, 100, generator=generator).softmax(1)
    return probabilities, (torch.rand(cases, 100, generator=generator) < probabilities[:, 1]).long()
