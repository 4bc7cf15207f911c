"""Overlap counts, Dice, Brier score and negative log-likelihood against hand arithmetic and scikit-learn's formulas."""

import math

import pytest
import torch
from monai.metrics import DiceMetric

from segcal import OverlapCounts, ScoreSums, ShapeError, brier, dice, nll
from segcal.binning import Binning
from segcal.collect import read_voxels, sums_of


def scores_of(probabilities, labels):
    voxels = read_voxels(probabilities, labels)
    _, sums = sums_of(voxels, binning=Binning(1), activation="none", classes=True, backend=None)
    return ScoreSums.of_class_sums(sums)


def test_dice_equals_monai_where_classes_are_present():
    probabilities, labels = torch.rand(2, 3, 200).softmax(1), torch.randint(0, 3, (2, 200))
    predicted = torch.nn.functional.one_hot(probabilities.argmax(1), 3).movedim(-1, 1)
    true = torch.nn.functional.one_hot(labels, 3).movedim(-1, 1)
    metric = DiceMetric(reduction="none")
    metric(predicted[..., None], true[..., None])
    expected = metric.aggregate().double()
    torch.testing.assert_close(dice(OverlapCounts.of_classes(probabilities, labels)), expected, rtol=1e-6, atol=1e-6)


def test_a_class_neither_present_nor_predicted_has_no_dice_and_a_false_alarm_has_zero():
    probabilities = torch.tensor([[[0.9, 0.1], [0.1, 0.8], [0.0, 0.1]]])
    values = dice(OverlapCounts.of_classes(probabilities, torch.tensor([[0, 0]])))[0].tolist()
    assert values[:2] == [pytest.approx(2 / 3), 0.0]
    assert math.isnan(values[2])


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
    scores = scores_of(probabilities, torch.tensor([[0, 1]]))
    assert brier(scores)[0].tolist() == pytest.approx([(0.04 + 0.16) / 2] * 2)
    assert nll(scores)[0].tolist() == pytest.approx([-math.log(0.8) / 2, -math.log(0.6) / 2])
    cross_entropy = torch.nn.functional.nll_loss(probabilities.log(), torch.tensor([[0, 1]]))
    assert nll(scores).sum().item() == pytest.approx(cross_entropy.item())


def test_a_probability_of_zero_costs_as_much_as_the_smallest_half_precision_number():
    scores = scores_of(torch.tensor([[[0.0], [1.0]]]), torch.tensor([[0]]))
    assert nll(scores)[0, 0].item() == pytest.approx(24 * math.log(2))


def test_sums_of_different_shapes_are_refused():
    with pytest.raises(ShapeError, match="share one shape"):
        OverlapCounts(torch.zeros(1, 2), torch.zeros(1, 2), torch.zeros(1, 3))
