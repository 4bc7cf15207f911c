"""segcal against MONAI 1.6: where it agrees, and each known disagreement with its reason.

| MONAI 1.6 | segcal | why |
| --- | --- | --- |
| float32 counts stop at 2**24 | exact | see tests/test_collect.py |
| `right=False` gives (left, right] | [left, right) | MONAI's documentation; `torch.bucketize` means the reverse |
| the last edge is 1 + eps, and the inner ones move up with it | edges are k / M | 1 must fall in the last bin |
| one-hot labels are made in float32, and Dice takes their norm there | exact | about 1e-8 of the loss |
"""

from __future__ import annotations

import oracle
import pytest
import torch
from monai.losses import DeepSupervisionLoss, DiceCELoss
from monai.metrics import CalibrationErrorMetric, calibration_binning

from segcal import Binning, SegmentationLoss, ace, bin_statistics, ece, mce


def image(*shape: int, dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(shape, dtype=dtype, requires_grad=True), torch.randint(0, shape[1], (shape[0], 1, *shape[2:]))


def dice_ce(**options) -> DiceCELoss:
    return DiceCELoss(**{"softmax": True, "squared_pred": True, "smooth_nr": 0, "smooth_dr": 1e-5, **options})


def value_and_gradient(loss, logits: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    value = loss(logits, labels)
    return value.detach(), torch.autograd.grad(value, logits)[0]


@pytest.mark.parametrize("shape", [(2, 3, 50), (2, 4, 9, 10), (1, 3, 5, 6, 7)], ids=["1-D", "2-D", "3-D"])
@pytest.mark.parametrize("background", [True, False])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("one_hot", [False, True])
def test_dice_and_cross_entropy_are_monais_in_value_and_gradient(shape, background, weighted, one_hot, backend):
    logits, labels = image(*shape)
    labels = oracle.one_hot(labels[:, 0], shape[1]) if one_hot else labels
    weights = torch.rand(shape[1], dtype=torch.float64) if weighted else None
    ours = SegmentationLoss(1, 1, 0, background=background, class_weights=weights, backend=backend)
    theirs = dice_ce(to_onehot_y=not one_hot, include_background=background, weight=weights)
    digits = 1e-12 if one_hot else 1e-6  # MONAI makes one-hot labels in float32 and takes their norm there
    for got, expected in zip(
        value_and_gradient(ours, logits, labels), value_and_gradient(theirs, logits, labels), strict=True
    ):
        torch.testing.assert_close(got, expected, rtol=digits, atol=digits * 1e-2)


def test_weights_of_the_terms_are_monais_lambdas(backend):
    logits, labels = image(2, 3, 6, 6)
    ours = SegmentationLoss(0.3, 0.6, 0, backend=backend)(logits, labels)
    torch.testing.assert_close(ours, dice_ce(to_onehot_y=True, lambda_dice=0.3, lambda_ce=0.6)(logits, labels))


def test_single_precision_is_as_near_to_double_as_monais(backend):
    logits, labels = image(2, 3, 40, 40, dtype=torch.float32)
    exact = value_and_gradient(dice_ce(to_onehot_y=True), logits.detach().double().requires_grad_(), labels)
    ours = value_and_gradient(SegmentationLoss(1, 1, 0, backend=backend), logits, labels)
    torch.testing.assert_close(ours[0].double(), exact[0], rtol=1e-6, atol=0)
    torch.testing.assert_close(ours[1].double(), exact[1], rtol=1e-5, atol=1e-6 * exact[1].abs().max().item())


def test_an_absent_class_has_monais_dice(backend):
    logits, _ = image(2, 3, 30)
    labels = torch.zeros(2, 1, 30, dtype=torch.int64)
    for got, expected in zip(
        value_and_gradient(SegmentationLoss(1, 1, 0, backend=backend), logits, labels),
        value_and_gradient(dice_ce(to_onehot_y=True), logits, labels),
        strict=True,
    ):
        torch.testing.assert_close(got, expected)


def test_deep_supervision_is_monais():
    outputs = [torch.randn(2, 3, *size, requires_grad=True) for size in ((9, 10, 8), (5, 5, 4), (3, 2, 2), (2, 1, 1))]
    labels = torch.randint(0, 3, (2, 1, 9, 10, 8)).float()  # MONAI interpolates labels, so they must be floats
    ours = SegmentationLoss(1, 1, 0)(outputs, labels)
    theirs = DeepSupervisionLoss(dice_ce(to_onehot_y=True))(outputs, labels)
    torch.testing.assert_close(ours, theirs)
    for got, expected in zip(torch.autograd.grad(ours, outputs), torch.autograd.grad(theirs, outputs), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("bins", [1, 7, 20])
def test_binning_is_monais_away_from_edges(bins, backend):
    p, labels = torch.randn(2, 3, 9, 10).softmax(1), torch.randint(0, 3, (2, 9, 10))
    stats = bin_statistics(p, labels, bins=bins, backend=backend)
    confidence, frequency, count = calibration_binning(p, oracle.one_hot(labels, 3), num_bins=bins)
    for got, expected in ((stats.count, count), (stats.mean_confidence, confidence), (stats.frequency, frequency)):
        torch.testing.assert_close(got.float(), expected, equal_nan=True)


@pytest.mark.parametrize(("word", "error"), [("expected", ece), ("average", ace), ("maximum", mce)])
def test_errors_are_monais_metric(word, error):
    p, labels = torch.randn(3, 2, 60).softmax(1), torch.randint(0, 2, (3, 60))
    metric = CalibrationErrorMetric(num_bins=10, calibration_reduction=word, metric_reduction="none")
    metric(p, oracle.one_hot(labels, 2))
    torch.testing.assert_close(error(bin_statistics(p, labels, bins=10)).float(), metric.aggregate())


def monai_counts(p: torch.Tensor, *, right: bool) -> list[float]:
    return calibration_binning(p, torch.zeros_like(p), num_bins=4, right=right)[2][0, 0].tolist()


def test_known_disagreement_monais_edges_are_moved_up_by_rounding():
    edges = torch.tensor([[[0.25, 0.5, 0.75]]])
    assert monai_counts(edges, right=False) == monai_counts(edges, right=True) == [1, 1, 1, 0]
    for closed, expected in (("left", [0, 1, 1, 1]), ("right", [1, 1, 1, 0])):
        stats = bin_statistics(edges, torch.zeros_like(edges), binning=Binning(4, closed=closed))
        assert stats.count[0, 0].tolist() == expected


def test_known_disagreement_monais_right_is_the_reverse_of_its_documentation():
    edges = torch.linspace(0, 1 + torch.finfo(torch.float32).eps, 5)[None, None, 1:-1]  # MONAI's own
    assert monai_counts(edges, right=False) == [1, 1, 1, 0]  # documented: [left, right)
    assert monai_counts(edges, right=True) == [0, 1, 1, 1]  # documented: (left, right]
