from __future__ import annotations

import shutil

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from segcal import ACELoss, Binning, SegmentationLoss, bin_statistics, ece

COMPILER = shutil.which("g++") or shutil.which("clang++")


def compare(loss, compiled, logits, labels, **options) -> None:
    values = loss(logits, labels, **options), compiled(logits, labels, **options)
    torch.testing.assert_close(*values)
    torch.testing.assert_close(*(torch.autograd.grad(value, logits) for value in values))


@pytest.fixture(autouse=True)
def fresh() -> None:
    torch._dynamo.reset()


@pytest.mark.parametrize(
    "loss",
    [
        SegmentationLoss(binning=Binning(6, kernel="triangular"), class_weights=[1.0, 2.0, 0.5], background=False),
        SegmentationLoss(1, 1, 0, activation="sigmoid"),
        ACELoss(Binning(6), absent_classes="skip", empty_bins="zero"),
        ACELoss(Binning(6, kernel="gaussian"), activation="sigmoid", ignore_index=2, backend="torch"),
    ],
    ids=["together", "without ACE", "hard", "gaussian"],
)
def test_the_whole_loss_compiles_to_one_graph_with_the_same_value_and_gradient(loss):
    logits, labels = torch.randn(2, 3, 8, 9, requires_grad=True), torch.randint(0, 3, (2, 8, 9))
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    compare(loss, compiled, logits, labels)
    compare(loss, compiled, logits, labels[:, None].byte(), mask=torch.rand(2, 8, 9) < 0.5)


@pytest.mark.skipif(COMPILER is None, reason="inductor needs a C++ compiler")
def test_the_default_compiler_gives_the_same_value_and_gradient_for_a_network_with_its_loss():
    network, loss = torch.nn.Conv2d(1, 3, 3, padding=1), SegmentationLoss(binning=Binning(6, kernel="triangular"))
    images, labels = torch.randn(2, 1, 8, 8), torch.randint(0, 3, (2, 8, 8))
    step = torch.compile(lambda: loss(network(images), labels), fullgraph=True)
    values = step(), loss(network(images), labels)
    torch.testing.assert_close(*values)
    gradients = [torch.autograd.grad(value, tuple(network.parameters())) for value in values]
    torch.testing.assert_close(*gradients)


def test_images_of_another_size_need_no_new_code_by_hand():
    loss = SegmentationLoss(binning=Binning(6))
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager", dynamic=True)
    for size in (20, 33, 7):
        compare(loss, compiled, torch.randn(2, 3, size, requires_grad=True), torch.randint(0, 3, (2, size)))


def test_the_loss_of_several_scales_compiles():
    loss = SegmentationLoss(binning=Binning(6))
    outputs = [torch.randn(1, 3, size, size, requires_grad=True) for size in (8, 4)]
    labels = torch.randint(0, 3, (1, 8, 8))
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    values = loss(outputs, labels), compiled(outputs, labels)
    torch.testing.assert_close(*values)
    torch.testing.assert_close(*(torch.autograd.grad(value, outputs) for value in values))


@pytest.mark.parametrize("labeled", ["map", "soft"])
@pytest.mark.parametrize(("bins", "kernel"), [(0, "hard"), (5, "hard"), (5, "gaussian")])
@pytest.mark.parametrize("masked", [False, True])
def test_the_operator_keeps_torchs_rules(labeled, bins, kernel, masked, backend):
    inputs = torch.randn(2, 3, 12, requires_grad=True)
    labels = torch.randint(0, 3, (2, 1, 12)) if labeled == "map" else torch.rand(2, 3, 12).softmax(1)
    mask = torch.rand(2, 12) < 0.5 if masked else None
    arguments = (inputs, labels, mask, bins, kernel, None, "left", "softmax", True, backend)
    outcome = torch.library.opcheck(torch.ops.segcal.voxel_sums, arguments)
    assert set(outcome.values()) == {"SUCCESS"}


def test_fake_tensors_have_the_shapes_of_real_ones():
    with FakeTensorMode():
        probabilities, labels = torch.rand(2, 3, 4, 5), torch.zeros(2, 4, 5, dtype=torch.int64)
        loss = SegmentationLoss()(probabilities, labels)
    assert loss.shape == ()


def test_statistics_can_be_collected_in_inference_mode_and_the_loss_trained_after_that(kernel):
    binning = Binning(11, kernel=kernel)
    with torch.inference_mode():
        stats = bin_statistics(torch.rand(1, 2, 20).softmax(1), torch.zeros(1, 20), binning=binning)
        assert ece(stats).isfinite().all()
    logits = torch.randn(1, 2, 20, requires_grad=True)
    ACELoss(binning)(logits, torch.zeros(1, 20)).backward()
    binning.memberships(logits.sigmoid()).square().sum().backward()
    assert logits.grad.isfinite().all()
