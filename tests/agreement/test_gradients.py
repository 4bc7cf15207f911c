"""Gradients are those of the formula: by finite differences in double precision, by the dense oracle in single."""

from __future__ import annotations

import oracle
import pytest
import torch

from segcal import ACELoss, Binning, SegmentationLoss


def labels_of(kind: str) -> torch.Tensor:
    labels = torch.randint(0, 3, (1, 6))
    labels[:, :3] = torch.arange(3)  # no class is absent
    return {
        "map": labels,
        "one-hot": oracle.one_hot(labels, 3),
        "soft": torch.rand(1, 3, 6, dtype=torch.float64).softmax(1),
    }[kind]


@pytest.mark.parametrize("labeled", ["map", "one-hot", "soft"])
@pytest.mark.parametrize("activation", ["softmax", "sigmoid", "none"])
def test_ace_by_finite_differences(kernel, activation, labeled, backend):
    inputs = torch.randn(1, 3, 6, dtype=torch.float64)
    inputs = (inputs if activation != "none" else inputs.sigmoid()).requires_grad_()
    loss = ACELoss(Binning(4, kernel=kernel), activation=activation, backend=backend)
    labels = labels_of(labeled)
    assert torch.autograd.gradcheck(lambda x: loss(x, labels), inputs)


@pytest.mark.parametrize("labeled", ["map", "one-hot", "soft"])
@pytest.mark.parametrize("activation", ["softmax", "sigmoid"])
def test_all_terms_by_finite_differences(kernel, activation, labeled, backend):
    inputs, labels = torch.randn(1, 3, 6, dtype=torch.float64, requires_grad=True), labels_of(labeled)
    mask = torch.tensor([[1, 1, 1, 1, 0, 1]])
    binning = Binning(4, kernel=kernel)
    loss = SegmentationLoss(0.7, 1.3, 2.0, binning, activation=activation, class_weights=[0.5, 1, 2], backend=backend)
    assert torch.autograd.gradcheck(lambda x: loss(x, labels, mask=mask), inputs)


@pytest.mark.parametrize("activation", ["softmax", "sigmoid"])
def test_single_precision_has_the_gradient_of_the_dense_formula_in_double(kernel, activation, backend):
    logits, labels = 3 * torch.randn(2, 3, 400), torch.randint(0, 3, (2, 400))
    single, double = logits.requires_grad_(), logits.detach().double().requires_grad_()
    loss = SegmentationLoss(binning=Binning(20, kernel=kernel), activation=activation, backend=backend)
    got = loss(single, labels)
    p, y = oracle.activate(double, activation), oracle.one_hot(labels, 3)
    terms = (
        oracle.dice_loss(p, y),
        oracle.cross_entropy(double, y, activation=activation),
        oracle.ace_loss(p, y, bins=20, kernel=kernel),
    )
    expected = torch.stack(terms).sum()
    torch.testing.assert_close(got.double(), expected, rtol=1e-5, atol=0)
    (gradient,), (true,) = torch.autograd.grad(got, single), torch.autograd.grad(expected, double)
    digits = 1e-3 if kernel == "gaussian" else 2e-6  # the Gaussian's slopes are those of its cubics
    torch.testing.assert_close(gradient.double(), true, rtol=0, atol=digits * true.abs().max().item())
