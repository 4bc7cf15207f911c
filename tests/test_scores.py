"""Overlap counts, Dice, Brier score and negative log-likelihood against hand arithmetic and scikit-learn's formulas."""

import math

import pytest
import torch
from monai.metrics import DiceMetric

from segcal import OverlapCounts, ScoreSums, ShapeError, brier, dice, nll


@pytest.mark.parametrize("absent", [False, True], ids=["every class", "one absent and predicted"])
def test_dice_equals_monai(absent):
    probabilities, labels = torch.rand(2, 3, 200).softmax(1), torch.randint(0, 3, (2, 200))
    if absent:
        labels[0][labels[0] == 2] = 1
    predicted = torch.nn.functional.one_hot(probabilities.argmax(1), 3).movedim(-1, 1)
    true = torch.nn.functional.one_hot(labels, 3).movedim(-1, 1)
    metric = DiceMetric(reduction="none")
    metric(predicted[..., None], true[..., None])
    expected = metric.aggregate().double()
    assert bool(expected[0, 2].isnan()) == absent
    values = dice(OverlapCounts.of_classes(probabilities, labels))
    torch.testing.assert_close(values, expected, rtol=1e-6, atol=1e-6, equal_nan=True)


def test_a_class_that_is_not_present_has_no_dice_whether_predicted_or_not():
    probabilities = torch.tensor([[[0.9, 0.1], [0.1, 0.8], [0.0, 0.1]]])
    values = dice(OverlapCounts.of_classes(probabilities, torch.tensor([[0, 0]])))[0].tolist()
    assert values[0] == pytest.approx(2 / 3)
    assert all(map(math.isnan, values[1:]))


def test_regions_are_predicted_from_one_half_on():
    counts = OverlapCounts.of_regions(torch.tensor([[[0.5, 0.49, 0.9]]]), torch.tensor([[[1, 1, 0]]]))
    assert (counts.predicted.item(), counts.true.item(), counts.both.item()) == (2, 2, 1)


def test_counts_add_over_any_split():
    probabilities, labels = torch.rand(1, 4, 300).softmax(1), torch.randint(0, 4, (1, 300))
    whole = OverlapCounts.of_classes(probabilities, labels)
    parts = [OverlapCounts.of_classes(probabilities[..., s], labels[..., s]) for s in (slice(0, 77), slice(77, 300))]
    for name in OverlapCounts.names():
        assert torch.equal(getattr(parts[0] + parts[1], name), getattr(whole, name))


def test_brier_and_nll_by_hand():
    probabilities = torch.tensor([[[0.8, 0.4], [0.2, 0.6]]], dtype=torch.float64)
    labels = torch.tensor([[0, 1]])
    scores, joint = ScoreSums.of_classes(probabilities, labels), ScoreSums.joint_of_classes(probabilities, labels)
    assert brier(scores)[0].tolist() == pytest.approx([(0.04 + 0.16) / 2] * 2)
    assert nll(scores)[0].tolist() == pytest.approx([-(math.log(0.8) + math.log(0.6)) / 2] * 2)  # p and 1 - p
    assert nll(joint).item() == pytest.approx(torch.nn.functional.nll_loss(probabilities.log(), labels).item())
    assert brier(joint).item() == pytest.approx((0.04 + 0.16) / 2)  # of two classes, that of one


def test_two_channels_score_as_one():
    foreground, labels = torch.rand(3, 1, 50), torch.randint(0, 2, (3, 50))
    one = ScoreSums.of_regions(foreground, labels[:, None]).mean_of_classes()
    two = ScoreSums.joint_of_classes(torch.cat([1 - foreground, foreground], 1), labels)
    torch.testing.assert_close(nll(one), nll(two))
    torch.testing.assert_close(brier(one), brier(two))


def test_three_classes_have_the_brier_score_of_all_of_them():
    joint = ScoreSums.joint_of_classes(torch.tensor([[[0.5], [0.3], [0.2]]]), torch.tensor([[1]]))
    assert brier(joint).item() == pytest.approx(0.25 + 0.49 + 0.04)
    assert nll(joint).item() == pytest.approx(-math.log(0.3))


def test_a_probability_of_zero_costs_as_much_as_the_smallest_half_precision_number():
    scores = ScoreSums.of_classes(torch.tensor([[[0.0], [1.0]]]), torch.tensor([[0]]))
    assert nll(scores)[0, 0].item() == pytest.approx(24 * math.log(2))


def test_sums_of_different_shapes_are_refused():
    with pytest.raises(ShapeError, match="share one shape"):
        OverlapCounts(torch.zeros(1, 2), torch.zeros(1, 2), torch.zeros(1, 3))
