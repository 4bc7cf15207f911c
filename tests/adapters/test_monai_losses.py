from __future__ import annotations

import inspect

import oracle
import pytest
import torch
from monai.data import MetaTensor
from monai.losses import DeepSupervisionLoss
from monai.utils import LossReduction

from segcal import ACELoss, Binning, ConfigError, ShapeError
from segcal.adapters.monai import HardL1ACELoss, SoftL1ACELoss

both = pytest.mark.parametrize("loss_type", [HardL1ACELoss, SoftL1ACELoss])


def batch(*space: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of three classes and labels with a channel axis."""
    return torch.randn(2, 3, *space, requires_grad=True), torch.randint(0, 3, (2, 1, *space))


def tensor(*values: float) -> torch.Tensor:
    return torch.tensor([[list(values)]])


@pytest.mark.parametrize(
    ("loss", "p", "y", "expected"),
    [
        (HardL1ACELoss(num_bins=5), tensor(0.1, 0.3, 0.7, 0.9), tensor(0, 0, 1, 1), 0.2),
        (SoftL1ACELoss(num_bins=2), tensor(0, 0.25, 0.5, 0.75, 1), tensor(0, 0, 1, 1, 1), 0.1),
        (SoftL1ACELoss(num_bins=2, empty_weight=0), tensor(0.5), tensor(1), 0.5),
    ],
)
def test_known_values(loss, p, y, expected):
    assert loss(p, y).item() == pytest.approx(expected)


def test_arguments_have_the_names_order_and_defaults_that_monai_proposes():
    expected = {
        "num_bins": 20,
        "include_background": True,
        "to_onehot_y": False,
        "sigmoid": False,
        "softmax": False,
        "other_act": None,
        "reduction": LossReduction.MEAN,
        "weight": None,
        "right": False,
        "ignore_empty_classes": True,
    }
    hard, soft = (
        {name: parameter.default for name, parameter in inspect.signature(loss).parameters.items()}
        for loss in (HardL1ACELoss, SoftL1ACELoss)
    )
    assert list(hard.items()) == list(expected.items())
    assert soft.pop("empty_weight") == 0.01
    assert list(soft.items()) == list(expected.items())


@both
@pytest.mark.parametrize("space", [(20,), (6, 7), (4, 5, 6)])
def test_softmax_and_integer_labels_equal_probabilities_and_one_hot_labels(loss_type, space):
    logits, labels = batch(*space)
    got = loss_type(softmax=True, to_onehot_y=True)(logits, labels)
    expected = loss_type()(logits.softmax(1), oracle.one_hot(labels[:, 0], 3))
    torch.testing.assert_close(got, expected)
    torch.testing.assert_close(*(torch.autograd.grad(value, logits)[0] for value in (got, expected)))


@both
def test_any_activation_may_be_given(loss_type):
    logits, labels = batch(30)
    y = oracle.one_hot(labels[:, 0], 3)
    expected = loss_type()(logits.sigmoid(), y)
    torch.testing.assert_close(loss_type(sigmoid=True)(logits, y), expected)
    torch.testing.assert_close(loss_type(other_act=torch.sigmoid)(logits, y), expected)


@pytest.mark.parametrize(("loss_type", "kernel"), [(HardL1ACELoss, "hard"), (SoftL1ACELoss, "triangular")])
def test_the_loss_is_that_of_the_formula(loss_type, kernel):
    logits, labels = batch(8, 8)
    expected = oracle.ace_loss(
        logits.double().softmax(1).flatten(2), oracle.one_hot(labels[:, 0], 3).flatten(2), bins=10, kernel=kernel
    )
    got = loss_type(num_bins=10, softmax=True, to_onehot_y=True)(logits, labels)
    torch.testing.assert_close(got.double(), expected, rtol=1e-5, atol=1e-6)


@both
def test_reductions_weights_and_background(loss_type):
    logits, labels = batch(5, 6)
    options = {"softmax": True, "to_onehot_y": True}
    each = loss_type(**options, reduction="none")(logits, labels)
    assert each.shape == (2, 3, 1, 1)
    torch.testing.assert_close(loss_type(**options)(logits, labels), each.mean())
    torch.testing.assert_close(loss_type(**options, reduction="sum")(logits, labels), each.sum())
    torch.testing.assert_close(loss_type(**options, weight=2.0)(logits, labels), 2 * each.mean())
    weighted = loss_type(**options, weight=[1.0, 0.0, 3.0], reduction="none")(logits, labels)
    torch.testing.assert_close(weighted[:, :, 0, 0], each[:, :, 0, 0] * torch.tensor([1.0, 0.0, 3.0]))
    foreground = loss_type(**options, include_background=False, weight=torch.tensor([1.0, 3.0]), reduction="none")
    torch.testing.assert_close(foreground(logits, labels)[:, :, 0, 0], each[:, 1:, 0, 0] * torch.tensor([1.0, 3.0]))


@both
def test_a_weight_acts_on_a_single_channel_too(loss_type):
    p, y = torch.rand(2, 1, 9), torch.randint(0, 2, (2, 1, 9))
    for weight in (2.0, [2.0]):
        torch.testing.assert_close(loss_type(weight=weight)(p, y), 2 * loss_type()(p, y))


@both
def test_an_empty_class_counts_as_zero_unless_it_is_wanted(loss_type):
    p, y = torch.tensor([[[0.25, 0.75], [0.25, 0.75]]]), torch.tensor([[[0.0, 1.0], [0.0, 0.0]]])
    options = {"num_bins": 2, "reduction": "none"}
    assert loss_type(**options)(p, y).flatten().tolist() == [0.25, 0]
    assert loss_type(**options, ignore_empty_classes=False)(p, y).flatten().tolist() == [0.25, 0.5]


@both
def test_every_class_empty_gives_a_differentiable_zero(loss_type):
    p = torch.full((2, 2, 4), 0.25, requires_grad=True)
    loss = loss_type()(p, torch.zeros_like(p))
    loss.backward()
    assert loss == 0
    assert p.grad.abs().max() == 0


@pytest.mark.parametrize(
    ("right", "expected"), [(False, (0.25 + 0.125) / 2), (True, (0.375 + 0.25) / 2)], ids=["left", "right"]
)
def test_right_decides_where_an_edge_belongs(right, expected):
    """Of two bins, 0.5 shares one with 0.75, or with 0.25."""
    loss = HardL1ACELoss(num_bins=2, right=right)
    assert loss(tensor(0.25, 0.5, 0.75), tensor(0, 0, 1)).item() == pytest.approx(expected)


@both
def test_they_work_inside_deep_supervision(loss_type):
    outputs = [torch.randn(2, 3, *size, requires_grad=True) for size in ((8, 8), (4, 4), (2, 2))]
    labels = torch.randint(0, 3, (2, 1, 8, 8)).float()
    got = DeepSupervisionLoss(loss_type(num_bins=5, softmax=True, to_onehot_y=True))(outputs, labels)
    kernel = "hard" if loss_type is HardL1ACELoss else "triangular"
    torch.testing.assert_close(got, ACELoss(Binning(5, kernel=kernel))(outputs, labels))
    got.backward()
    assert all(output.grad.isfinite().all() and output.grad.abs().max() > 0 for output in outputs)


@both
def test_metatensors_and_half_precision_are_read(loss_type):
    p, y = torch.rand(1, 2, 6, 6), torch.randint(0, 2, (1, 2, 6, 6))
    expected = loss_type()(p, y)
    assert torch.equal(loss_type()(MetaTensor(p), MetaTensor(y)), expected)
    half = loss_type()(p.half(), y)
    assert half.dtype == torch.float32
    assert half.item() == pytest.approx(loss_type()(p.half().double(), y).item(), rel=1e-5)


@both
def test_options_for_several_classes_are_said_to_be_ignored_for_a_single_channel(loss_type):
    p, y = torch.rand(1, 1, 6), torch.randint(0, 2, (1, 1, 6))
    with pytest.warns(UserWarning, match="single channel prediction") as caught:
        value = loss_type(to_onehot_y=True, include_background=False)(p, y)
    assert len(caught) == 2
    assert torch.equal(value, loss_type()(p, y))


@both
def test_a_softmax_of_one_channel_is_refused_and_a_sigmoid_trains(loss_type):
    """MONAI's losses warn and apply no activation, so that logits pass for probabilities."""
    logits, y = torch.randn(1, 1, 6, requires_grad=True), torch.randint(0, 2, (1, 1, 6))
    with pytest.raises(ShapeError, match=r"softmax=True needs .* got one channel\. Use sigmoid=True"):
        loss_type(softmax=True)(logits, y)
    loss_type(sigmoid=True, ignore_empty_classes=False)(logits, y).backward()
    assert logits.grad.abs().sum() > 0


@both
@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"num_bins": 0}, ConfigError, "bins must be a whole number"),
        ({"sigmoid": True, "softmax": True}, ConfigError, "at most one of sigmoid, softmax and other_act"),
        ({"softmax": True, "other_act": torch.exp}, ConfigError, "at most one of"),
        ({"other_act": 1}, TypeError, "other_act must be None or callable; got int"),
        ({"weight": [1.0, -1.0]}, ConfigError, r"weight must .* got \[1\.0, -1\.0\]"),
        ({"weight": torch.nan}, ConfigError, "weight must .* got nan"),
        ({"weight": [torch.inf]}, ConfigError, r"weight must .* got \[inf\]"),
        ({"weight": [[1.0]]}, ConfigError, r"weight must .* got \[\[1\.0\]\]"),
        ({"reduction": "median"}, ValueError, "median"),
    ],
)
def test_options_that_cannot_be_are_refused(loss_type, options, error, message):
    with pytest.raises(error, match=message):
        loss_type(**options)


@pytest.mark.parametrize("empty_weight", [-1.0, torch.nan, torch.inf])
def test_an_empty_weight_that_cannot_be_is_refused(empty_weight):
    with pytest.raises(ConfigError, match="empty_below must be a number of at least 0"):
        SoftL1ACELoss(empty_weight=empty_weight)


@both
@pytest.mark.parametrize(
    ("options", "target", "message"),
    [
        ({}, torch.zeros(1, 1, 4), r"target must be BNHW\[D\] with to_onehot_y=False; got \(1, 1, 4\)"),
        (
            {"to_onehot_y": True},
            torch.zeros(1, 2, 4),
            r"target must be B1HW\[D\] with to_onehot_y=True; got \(1, 2, 4\)",
        ),
        ({}, torch.zeros(1, 2, 5), r"got \(1, 2, 5\) for inputs of shape \(1, 2, 4\)"),
        ({"weight": [1.0, 2.0, 3.0]}, torch.zeros(1, 2, 4), r"one entry per class counted .* got 3 for 2"),
    ],
)
def test_targets_and_weights_that_do_not_fit_are_refused(loss_type, options, target, message):
    with pytest.raises(ShapeError, match=message):
        loss_type(**options)(torch.rand(1, 2, 4), target)
