from __future__ import annotations

import oracle
import pytest
import torch
from monai.data import MetaTensor
from torch.nn import functional

from segcal import ACELoss, Binning, ConfigError, LabelError, RangeError, SegmentationLoss, ShapeError, bin_statistics
from segcal.errors import SegcalError

TRIANGULAR = Binning(5, kernel="triangular")
LOSSES = {
    "hard": ACELoss(Binning(5)),
    "triangular": ACELoss(TRIANGULAR),
    "gaussian": ACELoss(Binning(5, kernel="gaussian")),
    "bspline": ACELoss(Binning(5, kernel="bspline")),
    "together": SegmentationLoss(binning=TRIANGULAR),
    "together, sigmoid": SegmentationLoss(binning=Binning(5), activation="sigmoid"),
}
every_loss = pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)


def image(*shape: int, dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits that want a gradient, (case, class, ...), and a label map."""
    labels = torch.randint(0, shape[1], (shape[0], *shape[2:]))
    return (2 * torch.randn(shape, dtype=torch.float64)).to(dtype).requires_grad_(), labels


def gradient(loss: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    return torch.autograd.grad(loss, logits)[0]


# Average calibration error


def test_hard_ace_by_hand(backend):
    p = torch.tensor([[[0.1, 0.3, 0.7, 0.9]]], requires_grad=True)
    loss = ACELoss(Binning(5), activation="none", backend=backend)(p, torch.tensor([[[0, 0, 1, 1]]]))
    assert loss.item() == pytest.approx(0.2)  # gaps 0.1, 0.3, 0.3, 0.1
    torch.testing.assert_close(gradient(loss, p), torch.tensor([[[0.25, 0.25, -0.25, -0.25]]]))


def test_soft_ace_by_hand(backend):
    p = torch.tensor([[[0.0, 0.25, 0.5, 0.75, 1.0]]])
    loss = ACELoss(Binning(2, kernel="triangular"), activation="none", backend=backend)
    # both bins weigh 2.5; their confidences are 0.5 / 2.5 and 2 / 2.5, their frequencies 0.5 / 2.5 and 2.5 / 2.5
    assert loss(p, torch.tensor([[[0, 0, 1, 1, 1]]])).item() == pytest.approx(0.1)


def test_the_soft_gradient_flows_through_the_membership_by_hand(backend):
    """Two bins, voxels at 0.5 + d and 0 with labels 1 and 0: the weights are 1/2 -+ 2d, and 1 in the first bin."""
    p = torch.tensor([[[0.5, 0.0]]], dtype=torch.float64, requires_grad=True)
    loss = ACELoss(Binning(2, kernel="triangular"), activation="none", backend=backend)(p, torch.tensor([[[1, 0]]]))
    # gaps: (1/2 - 2d)(1/2 - d) / (3/2 - 2d), and 1/2 - d; at d = 0 they are 1/6 and 1/2
    assert loss.item() == pytest.approx((1 / 6 + 1 / 2) / 2)
    by_d = ((-2 * 0.5 - 0.5) * 1.5 + 2 * 0.25) / 1.5**2
    assert gradient(loss, p)[0, 0, 0].item() == pytest.approx((by_d - 1) / 2)


@pytest.mark.parametrize("activation", ["softmax", "sigmoid", "none"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"empty_bins": "zero"},
        {"absent_classes": "skip"},
        {"absent_classes": "include"},
        {"class_weights": [0.5, 2.0, 0.0]},
        {"background": False},
        {"background": False, "absent_classes": "skip", "class_weights": [3.0, 1.0, 2.0], "empty_bins": "zero"},
    ],
    ids=str,
)
def test_every_option_means_its_formula_in_value_and_gradient(options, activation, kernel):
    logits, labels = image(3, 3, 40)
    labels[0][labels[0] == 2] = 1  # class 2 is absent from case 0, all but class 0 from case 1
    labels[1] = 0
    if activation == "none":
        logits = logits.detach().sigmoid().requires_grad_()
    got = ACELoss(Binning(8, kernel=kernel), activation=activation, **options)(logits, labels)
    dense = oracle.activate(logits, activation), oracle.one_hot(labels, 3)
    expected = oracle.ace_loss(*dense, bins=8, kernel=kernel, **options)
    near = {"atol": 1e-4, "rtol": 1e-2} if kernel == "gaussian" else {"atol": 1e-12, "rtol": 1e-9}
    torch.testing.assert_close(got, expected, **near)
    torch.testing.assert_close(gradient(got, logits), gradient(expected, logits), **near)


def test_absent_classes_count_as_zero_or_not_at_all_or_like_any_other():
    """Class 0 is right on all voxels by 0.75; class 1 has no ground truth and 0.25 everywhere."""
    p, labels = torch.tensor([[[0.75] * 4, [0.25] * 4]]), torch.zeros(1, 4, dtype=torch.int64)
    values = {
        absent: ACELoss(Binning(4), activation="none", absent_classes=absent)(p, labels).item()
        for absent in ("zero", "skip", "include")
    }
    assert values == {"zero": 0.125, "skip": 0.25, "include": 0.25}
    by_class = ACELoss(Binning(4), activation="none", absent_classes="skip", reduction="none")(p, labels)
    assert by_class[0, 0] == 0.25
    assert by_class[0, 1].isnan()


def test_reductions_are_of_the_errors_per_case_and_class():
    logits, labels = image(2, 3, 30)
    each, total, mean = (ACELoss(TRIANGULAR, reduction=word)(logits, labels) for word in ("none", "sum", "mean"))
    assert each.shape == (2, 3)
    torch.testing.assert_close(total, each.sum())
    torch.testing.assert_close(mean, each.mean())


@pytest.mark.parametrize(("absent_classes", "left_out"), [("zero", False), ("skip", True), ("include", False)])
def test_errors_without_reduction_are_nan_only_where_something_was_left_out(absent_classes, left_out):
    loss = ACELoss(TRIANGULAR, absent_classes=absent_classes, reduction="none")
    logits, labels = image(1, 2, 6)
    masked = loss(logits, labels, mask=torch.zeros(1, 6))
    assert masked.isnan().all() if left_out else (masked == 0).all()


def test_empty_below_decides_which_soft_bins_count():
    p, labels = torch.tensor([[[0.26, 0.26]]], dtype=torch.float64), torch.tensor([[[1, 1]]])
    # of two bins the second holds 2 * 0.02
    binnings = [Binning(2, kernel="triangular", empty_below=below) for below in (0.05, 0.03)]
    below, above = (ACELoss(binning, activation="none", empty_bins="zero")(p, labels).item() for binning in binnings)
    assert below == pytest.approx(0.74 / 2)
    assert above == pytest.approx(0.74)


def test_the_loss_of_statistics_equals_the_loss_of_the_voxels(kernel):
    logits, labels = image(2, 3, 50)
    loss = ACELoss(Binning(6, kernel=kernel), class_weights=[1.0, 2.0, 3.0])
    stats = bin_statistics(logits.softmax(1), labels, binning=loss.binning)
    torch.testing.assert_close(loss.of(stats), loss(logits, labels))


# Together with Dice and cross-entropy


@pytest.mark.parametrize("activation", ["softmax", "sigmoid"])
@pytest.mark.parametrize("background", [True, False])
@pytest.mark.parametrize("labeled", ["map", "one-hot", "soft"])
@pytest.mark.parametrize("masked", [False, True])
def test_terms_are_those_of_the_formulas_in_value_and_gradient(activation, background, labeled, masked, backend):
    logits, labels = image(2, 3, 50)
    y = oracle.one_hot(labels, 3) if labeled != "soft" else torch.rand(2, 3, 50, dtype=torch.float64).softmax(1)
    keep = torch.rand(2, 50) < 0.6 if masked else None
    loss = SegmentationLoss(0.5, 2.0, 3.0, TRIANGULAR, activation=activation, background=background, backend=backend)
    terms = loss.terms(logits, labels if labeled == "map" else y, mask=keep)
    p = oracle.activate(logits, activation)
    dice = oracle.dice_loss(p, y, keep, background=background)
    ce = oracle.cross_entropy(logits, y, keep, activation=activation)
    ace = oracle.ace_loss(p, y, keep, bins=5, kernel="triangular", background=background)
    torch.testing.assert_close(torch.stack(terms[1:]), torch.stack([dice, ce, ace]).detach())
    torch.testing.assert_close(terms.total, 0.5 * dice + 2 * ce + 3 * ace)
    expected = gradient(0.5 * dice + 2 * ce + 3 * ace, logits)
    torch.testing.assert_close(gradient(terms.total, logits), expected, atol=1e-12, rtol=1e-9)


@pytest.mark.parametrize("labeled", ["map", "one-hot"])
def test_class_weights_act_on_cross_entropy_as_torchs_do(labeled, backend):
    logits, labels = image(2, 3, 5, 6)
    weights = [0.2, 1.0, 3.0]
    target = labels if labeled == "map" else oracle.one_hot(labels, 3)
    loss = SegmentationLoss(0, 1, 0, class_weights=weights, backend=backend)(logits, target)
    expected = functional.cross_entropy(logits, target, weight=torch.tensor(weights, dtype=torch.float64))
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(gradient(loss, logits), gradient(expected, logits))


def test_twice_the_class_weights_double_dice_and_ace_and_leave_the_cross_entropy_of_a_map():
    logits, labels = image(2, 3, 5, 6)
    y = oracle.one_hot(labels, 3)

    def terms(factor, labels, **options):
        weights = [factor * weight for weight in (0.2, 1.0, 3.0)]
        return SegmentationLoss(class_weights=weights, **options).terms(logits, labels)

    for labeled, options, grown in ((labels, {}, 1), (y, {}, 2), (labels, {"activation": "sigmoid"}, 2)):
        one, two = terms(1, labeled, **options), terms(2, labeled, **options)
        assert (two.dice / one.dice).item() == pytest.approx(2)
        assert (two.ace / one.ace).item() == pytest.approx(2)
        assert (two.ce / one.ce).item() == pytest.approx(grown)


def test_binary_cross_entropy_is_torchs(backend):
    logits, labels = image(2, 3, 40)
    y, weights = oracle.one_hot(labels, 3), torch.tensor([0.2, 1.0, 3.0], dtype=torch.float64)
    loss = SegmentationLoss(0, 1, 0, activation="sigmoid", class_weights=weights, backend=backend)
    expected = functional.binary_cross_entropy_with_logits(logits, y, weight=weights[:, None])
    torch.testing.assert_close(loss(logits, labels), expected)
    torch.testing.assert_close(gradient(loss(logits, labels), logits), gradient(expected, logits))


def test_a_weight_of_zero_switches_a_term_off_and_the_rest_stays():
    logits, labels = image(2, 3, 30)
    together = SegmentationLoss(binning=TRIANGULAR).terms(logits, labels)
    for name in ("dice", "ce", "ace"):
        alone = SegmentationLoss(**{"dice": 0, "ce": 0, "ace": 0, name: 2.0}, binning=TRIANGULAR).terms(logits, labels)
        assert alone.total.item() == pytest.approx(2 * getattr(together, name).item())
        assert [term.item() for term in alone[1:]].count(0) == 2
    assert SegmentationLoss(0, 0, 0).terms(logits, labels).total == 0


def test_ace_within_the_sum_is_the_loss_by_itself(kernel):
    logits, labels = image(2, 3, 60)
    binning = Binning(7, kernel=kernel)
    both = [loss(logits, labels) for loss in (SegmentationLoss(0, 0, 1, binning), ACELoss(binning))]
    torch.testing.assert_close(*both)
    torch.testing.assert_close(*(gradient(loss, logits) for loss in both))


def test_terms_for_the_log_hold_no_graph():
    logits, labels = image(1, 2, 8)
    terms = SegmentationLoss().terms(logits, labels)
    assert terms.total.requires_grad
    assert not any(term.requires_grad for term in terms[1:])


@pytest.mark.parametrize("ignore_index", [None, 7])
def test_ignored_voxels_are_as_if_they_were_not_there(ignore_index, backend):
    logits, labels = image(1, 3, 40)
    keep = torch.rand(1, 40) < 0.5
    if ignore_index is None:
        loss = SegmentationLoss(binning=TRIANGULAR, backend=backend)(logits, labels, mask=keep)
    else:
        loss = SegmentationLoss(binning=TRIANGULAR, ignore_index=ignore_index, backend=backend)(
            logits, labels.masked_fill(~keep, ignore_index)
        )
    cut = SegmentationLoss(binning=TRIANGULAR, backend=backend)(logits[..., keep[0]], labels[..., keep[0]])
    torch.testing.assert_close(loss, cut)
    got = gradient(loss, logits)
    assert (got[..., ~keep[0]] == 0).all()
    torch.testing.assert_close(got, gradient(cut, logits))


# Deep supervision


def outputs_at_three_scales() -> tuple[list[torch.Tensor], torch.Tensor]:
    sizes = [(9, 12, 8), (5, 6, 4), (3, 3, 2)]
    logits = [torch.randn(2, 3, *size, dtype=torch.float64, requires_grad=True) for size in sizes]
    return logits, torch.randint(0, 3, (2, 9, 12, 8))


@pytest.mark.parametrize("labeled", ["map", "map with channel axis", "one-hot"])
@every_loss
def test_deep_supervision_is_the_weighted_sum_over_outputs_with_labels_at_the_middle(loss, labeled):
    outputs, labels = outputs_at_three_scales()
    mask = torch.rand(2, 1, 9, 12, 8) < 0.8
    given = {"map": labels, "map with channel axis": labels[:, None], "one-hot": oracle.one_hot(labels, 3)}[labeled]
    got = loss(outputs, given, mask=mask)

    def at(tensor: torch.Tensor, size: torch.Size) -> torch.Tensor:
        return functional.interpolate(tensor.double(), size=size, mode="nearest-exact")

    expected = sum(
        weight * loss(output, at(labels[:, None], output.shape[2:]), mask=at(mask, output.shape[2:]))
        for weight, output in zip((1, 0.5, 0.25), outputs, strict=True)
    )
    torch.testing.assert_close(got, expected)
    for a, b in zip(torch.autograd.grad(got, outputs), torch.autograd.grad(expected, outputs), strict=True):
        torch.testing.assert_close(a, b)


def test_terms_of_deep_supervision_add_up():
    outputs, labels = outputs_at_three_scales()
    terms = SegmentationLoss(1, 2, 3, TRIANGULAR).terms(tuple(outputs), labels)
    torch.testing.assert_close(terms.total, terms.dice + 2 * terms.ce + 3 * terms.ace)


# Every finite input has a finite gradient


@pytest.mark.parametrize("value", [0.0, 1.0, 0.125, 0.25, 0.5, 0.875], ids=lambda value: f"p = {value}")
def test_a_voxel_on_a_center_or_edge_beside_an_empty_bin_has_a_finite_gradient(value, kernel, backend):
    loss = ACELoss(Binning(4, kernel=kernel), activation="none", backend=backend)
    for voxels in (1, 3):
        p = torch.full((1, 1, voxels), value, requires_grad=True)
        result = loss(p, torch.ones_like(p))
        assert result.item() == pytest.approx(1 - value, abs=1e-5)
        assert gradient(result, p).isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("true", [0, 1, 2])
@every_loss
def test_saturated_logits_have_a_finite_loss_and_gradient(loss, true, dtype, backend):
    loss = with_backend(loss, backend)
    logits = torch.tensor([[[1e4, -1e4, 0.0], [-1e4, 1e4, 0.0], [0.0, 0.0, 0.0]]], dtype=dtype, requires_grad=True)
    result = loss(logits, torch.full((1, 3), true))
    assert result.isfinite()
    assert gradient(result, logits).isfinite().all()


def with_backend(loss: torch.nn.Module, backend: str) -> torch.nn.Module:
    """The same loss on this backend."""
    options = vars(getattr(loss, "calibration", loss))
    options = {name: options[name] for name in ("binning", "activation")} | {"backend": backend}
    return SegmentationLoss(**options) if isinstance(loss, SegmentationLoss) else ACELoss(**options)


def test_cross_entropy_of_saturated_logits_is_their_distance(backend):
    logits = torch.tensor([[[1e4], [-1e4]]], requires_grad=True)
    loss = SegmentationLoss(0, 1, 0, backend=backend)(logits, torch.tensor([[1]]))
    assert loss == 2e4
    assert gradient(loss, logits).tolist() == [[[1], [-1]]]


def test_small_probabilities_keep_their_digits_in_single_precision(backend):
    """The gradient of cross-entropy shows a probability: p / voxels for the class that is not true."""
    low = torch.linspace(-60, 0, 2001)
    logits = torch.stack([low, torch.zeros_like(low)])[None].requires_grad_()
    shown = gradient(SegmentationLoss(0, 1, 0, backend=backend)(logits, torch.ones(1, 2001)), logits)[0, 0] * 2001
    torch.testing.assert_close(shown.double(), low.double().sigmoid(), rtol=5e-7, atol=0)


@pytest.mark.parametrize("activation", ["softmax", "sigmoid", "none"])
@pytest.mark.parametrize("label", [0, 1])
def test_nan_logits_give_a_nan_loss(activation, label, kernel, backend):
    logits = torch.full((1, 2, 40), 0.3)
    logits[0, 1, 7] = torch.nan
    labels = torch.full((1, 40), label)
    assert ACELoss(Binning(5, kernel=kernel), activation=activation, backend=backend)(logits, labels).isnan()
    if activation != "none":
        loss = SegmentationLoss(binning=Binning(5, kernel=kernel), activation=activation, backend=backend)
        assert all(term.isnan() for term in loss.terms(logits, labels))


def test_nan_in_a_class_that_is_absent_is_not_hidden(kernel, backend):
    logits = torch.tensor([[[torch.nan, 0.0, 1.0]]], requires_grad=True)
    loss = ACELoss(Binning(5, kernel=kernel), activation="sigmoid", backend=backend)(logits, torch.zeros(1, 1, 3))
    assert loss.isnan()


@pytest.mark.parametrize("value", [torch.inf, -torch.inf])
@every_loss
def test_infinite_logits_do_not_crash(loss, value, backend):
    logits = torch.zeros(1, 3, 20)
    logits[0, 0, 3] = value
    logits.requires_grad_()
    result = with_backend(loss, backend)(logits, torch.randint(0, 3, (1, 20)))
    result.backward()
    if isinstance(loss, ACELoss) and value < 0:  # a probability of 0
        assert result.isfinite()
        assert logits.grad.isfinite().all()


@pytest.mark.parametrize("absent_classes", ["zero", "skip"])
@pytest.mark.parametrize("activation", ["sigmoid", "softmax", "none"])
def test_every_class_absent_gives_a_differentiable_zero(activation, absent_classes, kernel, backend):
    logits = torch.rand(2, 3, 20, requires_grad=True)
    binning = Binning(5, kernel=kernel)
    loss = ACELoss(binning, activation=activation, absent_classes=absent_classes, backend=backend)
    result = loss(logits, torch.zeros(2, 3, 20))
    assert result == 0
    assert gradient(result, logits).abs().max() == 0


@every_loss
def test_a_case_whose_voxels_are_all_masked_has_no_gradient(loss, backend):
    loss = with_backend(loss, backend)
    logits = torch.randn(2, 3, 20, requires_grad=True)
    mask = torch.tensor([[True], [False]]).expand(2, 20)
    result = loss(logits, torch.randint(0, 3, (2, 20)), mask=mask)
    assert result.isfinite()
    assert gradient(result, logits)[1].abs().max() == 0
    nothing = loss(logits, torch.randint(0, 3, (2, 20)), mask=torch.zeros(2, 20))
    assert gradient(nothing, logits).abs().max() == 0


# Types and layouts


@pytest.mark.parametrize(
    ("dtype", "result", "digits"),
    [
        (torch.float16, torch.float32, 1e-3),
        (torch.bfloat16, torch.float32, 1e-2),
        (torch.float32, torch.float32, 1e-5),
        (torch.float64, torch.float64, 0),
    ],
)
@every_loss
def test_half_precision_gives_a_single_precision_loss_and_a_half_precision_gradient(loss, dtype, result, digits):
    logits, labels = image(1, 3, 60, dtype=dtype)
    value = loss(logits, labels)
    assert value.dtype == result
    wide = logits.detach().double().requires_grad_()
    torch.testing.assert_close(value.double(), loss(wide, labels), rtol=1e-4, atol=1e-5)
    got, expected = gradient(value, logits), gradient(loss(wide, labels), wide)
    assert got.dtype == dtype
    torch.testing.assert_close(got.double(), expected, rtol=digits, atol=digits * expected.abs().max().item())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@every_loss
def test_training_works_under_autocast_and_the_loss_is_not_rounded(loss, dtype):
    network, image_batch = torch.nn.Conv2d(1, 3, 3, padding=1), torch.randn(2, 1, 8, 8)
    labels = torch.randint(0, 3, (2, 8, 8))
    with torch.autocast("cpu", dtype=dtype):
        logits = network(image_batch)
        result = loss(logits, labels)
    assert logits.dtype == dtype
    assert torch.equal(result, loss(logits, labels))
    result.backward()
    assert all(parameter.grad.isfinite().all() for parameter in network.parameters())


@every_loss
def test_logits_need_not_be_contiguous(loss):
    logits, labels = image(2, 3, 6, 7)
    turned = logits.detach().contiguous(memory_format=torch.channels_last).requires_grad_()
    assert not turned.is_contiguous()
    values = loss(turned, labels), loss(logits, labels)
    assert torch.equal(*values)
    assert torch.equal(gradient(values[0], turned), gradient(values[1], logits))


@every_loss
def test_metatensors_are_read_as_tensors(loss):
    logits, labels = image(1, 3, 6, 7)
    plain = loss(logits, labels)
    assert torch.equal(loss(MetaTensor(logits), MetaTensor(labels)), plain)
    smaller = torch.randn(1, 3, 3, 4, dtype=torch.float64)
    scales = loss([logits, smaller], labels)
    assert torch.equal(loss([MetaTensor(logits), MetaTensor(smaller)], MetaTensor(labels)), scales)


@every_loss
def test_soft_labels_that_want_a_gradient_are_read_as_numbers(loss, backend):
    logits, _ = image(1, 3, 20)
    labels = torch.rand(1, 3, 20, dtype=torch.float64).softmax(1).requires_grad_()
    with_backend(loss, backend)(logits, labels).backward()
    assert logits.grad.abs().max() > 0
    assert labels.grad is None


@every_loss
def test_a_batch_is_the_mean_of_its_cases(loss):
    logits, labels = image(3, 3, 40)
    one_by_one = [loss(logits[case : case + 1], labels[case : case + 1]) for case in range(3)]
    torch.testing.assert_close(loss(logits, labels), torch.stack(one_by_one).mean())


@every_loss
def test_permuting_classes_leaves_the_loss_as_it_is(loss):
    logits, labels = image(2, 3, 40)
    order = torch.tensor([2, 0, 1])
    torch.testing.assert_close(loss(logits[:, order], oracle.one_hot(labels, 3)[:, order]), loss(logits, labels))


def test_a_loss_moves_and_saves_like_any_module():
    loss = SegmentationLoss(class_weights=[1.0, 2.0])
    assert loss.state_dict() == {}  # weights are a setting: old checkpoints load with new ones
    logits, labels = image(1, 2, 20)
    before = loss(logits, labels)
    torch.testing.assert_close(loss.double()(logits, labels), before)


# What is refused

LOGITS, MAP = torch.zeros(1, 3, 4), torch.zeros(1, 4, dtype=torch.int64)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ACELoss(activation="relu"), r"activation must be one of 'softmax', 'sigmoid', 'none'; got 'relu'"),
        (lambda: ACELoss(empty_bins="drop"), r"empty_bins must be one of 'skip', 'zero'; got 'drop'"),
        (lambda: ACELoss(absent_classes="no"), r"absent_classes must be one of 'zero', 'skip', 'include'; got 'no'"),
        (lambda: ACELoss(reduction="max"), r"reduction must be one of 'mean', 'sum', 'none'; got 'max'"),
        (lambda: ACELoss(backend="cuda"), r"backend must be one of 'torch', 'numba'; got 'cuda'"),
        (lambda: ACELoss(class_weights=[1, -2]), r"class_weights must be .* at least 0, one per class; got \[1, -2\]"),
        (lambda: ACELoss(class_weights=[1, torch.nan]), r"class_weights must be .* got \[1, nan\]"),
        (lambda: ACELoss(class_weights=[]), r"class_weights must be .* got \[\]"),
        (lambda: ACELoss(class_weights=[[1, 2]]), r"class_weights must be .* got \[\[1, 2\]\]"),
        (lambda: SegmentationLoss(dice=-1), r"the weight dice must be a number of at least 0; got -1"),
        (lambda: SegmentationLoss(ce=torch.nan), r"the weight ce must be a number of at least 0; got nan"),
        (lambda: SegmentationLoss(ace=torch.inf), r"the weight ace must be a number of at least 0; got inf"),
        (lambda: SegmentationLoss(activation="none"), r"activation must be 'softmax' or 'sigmoid'; got 'none'"),
    ],
)
def test_options_that_cannot_be_are_refused(make, message):
    with pytest.raises(ConfigError, match=message):
        make()


@pytest.mark.parametrize(
    ("logits", "labels", "error", "message"),
    [
        (LOGITS, MAP[:, :3], ShapeError, r"got \(1, 3\) for inputs of shape \(1, 3, 4\)"),
        (LOGITS, torch.full((1, 4), 3), LabelError, r"classes 0 to 2; case 0, voxel 0 .* holds 3"),
        (LOGITS, torch.full((1, 3, 4), 2), LabelError, r"case 0, class 0, voxel 0 .* holds 2\. Integer label maps"),
        ([], MAP, ShapeError, r"at least one output; got an empty list"),
        ([torch.zeros(1, 3, 4, 4, 4)], MAP, ShapeError, r"got \(1, 4\) for inputs of shape \(1, 3, 4, 4, 4\)"),
        ([LOGITS], torch.zeros(1, 1, 1, 4), ShapeError, r"got \(1, 1, 1, 4\) for inputs of shape \(1, 3, 4\)"),
    ],
)
@every_loss
def test_bad_input_is_refused_with_its_value_and_place(loss, logits, labels, error, message):
    with pytest.raises(error, match=message):
        loss(logits, labels)


SINGLE = [ACELoss(), SegmentationLoss(), SegmentationLoss(ace=0), SegmentationLoss(dice=0, ce=0)]


@pytest.mark.parametrize("loss", SINGLE, ids=["ace", "together", "dice and ce", "ace of the sum"])
@pytest.mark.parametrize("space", [(9,), (3, 3)])
def test_a_softmax_of_one_channel_is_refused(loss, space, backend):
    """Its probabilities are 1 and its gradient is 0, so that it would train nothing."""
    logits, labels = torch.randn(2, 1, *space, requires_grad=True), torch.randint(0, 2, (2, 1, *space))
    for inputs in (logits, [logits, logits]):
        with pytest.raises(ShapeError, match=r'got one channel\. Use activation="sigmoid"'):
            loss(inputs, labels)


@pytest.mark.parametrize("loss", [ACELoss(activation="sigmoid"), SegmentationLoss(activation="sigmoid")])
def test_a_sigmoid_of_one_channel_trains(loss, backend):
    logits, labels = torch.randn(2, 1, 9, requires_grad=True), torch.randint(0, 2, (2, 1, 9))
    assert gradient(loss(logits, labels), logits).abs().sum() > 0


@pytest.mark.parametrize("loss", [ACELoss(class_weights=[1.0, 2.0]), SegmentationLoss(class_weights=[1.0, 2.0])])
def test_class_weights_must_fit_the_classes(loss):
    with pytest.raises(ShapeError, match=r"one entry per class of the logits; got 2 for 3"):
        loss(LOGITS, MAP)


def test_logits_given_as_probabilities_are_refused(backend):
    with pytest.raises(RangeError, match=r"case 0, class 1 reaches 2\.5\. If these are logits"):
        ACELoss(activation="none", backend=backend)(torch.tensor([[[0.5], [2.5]]]), torch.tensor([[0]]))


@pytest.mark.parametrize("loss", [ACELoss(), SegmentationLoss()])
def test_arrays_that_are_no_tensors_are_refused_with_a_hint(loss):
    logits, labels = torch.randn(1, 2, 4), torch.ones(1, 4).long()
    array, map_array = logits.numpy(), labels.numpy()
    for inputs, truth in ((array, labels), (logits, map_array), ([array], labels), ([logits], map_array)):
        with pytest.raises(ShapeError, match=r"must be a torch tensor; got numpy\.ndarray\. Pass torch\.from_numpy"):
            loss(inputs, truth)


@pytest.mark.parametrize(
    "options", [{"dice": "1"}, {"ace": None}, {"class_weights": "ab"}, {"binning": 20}, {"ignore_index": 0.5}]
)
def test_options_of_a_wrong_type_are_refused(options):
    with pytest.raises(ConfigError, match="must be a"):
        SegmentationLoss(**options)


def test_a_loss_shows_its_settings():
    loss = SegmentationLoss(ace=0.3, binning=Binning(15, kernel="triangular"), class_weights=[1, 2], background=False)
    shown = repr(loss)
    for part in (
        "ace=0.3",
        "dice=1.0",
        "bins=15",
        "kernel='triangular'",
        "class_weights=[1.0, 2.0]",
        "background=False",
    ):
        assert part in shown
    assert "bins=7" in repr(ACELoss(Binning(7)))
    assert "class_weights" not in repr(ACELoss())


@pytest.mark.parametrize("options", [{}, {"dice": 0, "ce": 0}, {"ace": 0}], ids=str)
def test_labels_of_exclusive_classes_must_not_sum_to_more_than_one(options, backend):
    logits, labels = image(2, 3, 40)
    y = oracle.one_hot(labels, 3)
    loss = SegmentationLoss(**options, backend=backend)
    several, none = y.clone(), y.clone()
    several[1, :, 7] = 1
    none[1, :, 7] = 0
    assert loss(logits, none).isfinite()  # a voxel without a label
    for labeled in (several.byte(), several):
        with pytest.raises(LabelError, match=r"exclusive classes must sum to 1 .* in case 1 .*activation='sigmoid'"):
            loss(logits, labeled)
    keep = torch.ones(2, 40, dtype=torch.bool)
    keep[1, 7] = False
    expected = loss(logits, labels, mask=keep)
    torch.testing.assert_close(loss(logits, several, mask=keep), expected)
    assert SegmentationLoss(activation="sigmoid", backend=backend)(logits, several).isfinite()
    soft = torch.rand(2, 3, 40, dtype=torch.float64).softmax(1)
    assert loss(logits, soft).isfinite()
    assert loss(logits, soft.half()).isfinite()


@pytest.mark.parametrize("loss", [ACELoss(), SegmentationLoss()], ids=["ace", "together"])
def test_an_empty_batch_is_refused(loss):
    with pytest.raises(ShapeError, match=r"a batch must have at least one case; got logits \(0, 3, 8\)"):
        loss(torch.randn(0, 3, 8, requires_grad=True), torch.zeros(0, 8, dtype=torch.long))


def test_what_torch_offers_and_sums_do_not_take_is_refused_in_a_sentence():
    loss = SegmentationLoss()
    logits, labels = torch.randn(2, 3, 8, requires_grad=True), torch.randint(0, 3, (2, 8))
    with pytest.raises(ConfigError, match=r"do not go through torch\.func \(vmap"):
        torch.func.vmap(lambda z, y: loss(z[None], y[None]))(logits, labels)
    with pytest.raises(ConfigError, match=r"do not go through torch\.func"):
        torch.func.grad(lambda z: loss(z, labels))(logits.detach())
    with pytest.raises(ConfigError, match=r"give torch\.export the network alone"):
        torch.export.export(loss, (logits.detach(), labels))
    with pytest.raises(ShapeError, match="on the meta device"):
        loss(logits.to("meta"), labels.to("meta"))
    with pytest.raises(ShapeError, match=r"labels must be on the device .* cpu; they are on meta"):
        loss(logits, labels.to("meta"))
    (slope,) = torch.autograd.grad(loss(logits, labels), logits, create_graph=True)
    with pytest.raises(SegcalError, match="first derivatives only"):
        slope.square().sum().backward()
