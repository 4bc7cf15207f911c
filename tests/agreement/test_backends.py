"""numba against the plain torch reference: every sum and gradient, on random upstream gradients."""

from __future__ import annotations

import itertools

import pytest
import torch
from backends import ACTIVATIONS, VOXELS, assert_agreement, assert_close, batch, edge_batch, sums_and_gradient

from segcal.collect import read_voxels
from segcal.kernels import reference


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(
    ("labeled", "dtype"),
    [*itertools.product(("map", "one-hot", "soft"), (torch.float32,)), ("map", torch.float64), ("soft", torch.float64)],
)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_sums_and_gradients_agree(kernel, activation, labeled, dtype, masked):
    mask = torch.rand(2, VOXELS) < 0.7 if masked else None
    voxels = read_voxels(*batch(labeled, dtype, activation), mask=mask)
    assert_agreement(voxels, (13, kernel, None, "left"), activation)


@pytest.mark.parametrize(
    "binning", [(0, "hard", None, "left"), (1200, "hard", None, "right"), (5, "gaussian", 3.0, "left")]
)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_any_number_of_bins_and_any_side_agree(binning, activation):
    assert_agreement(read_voxels(*batch("map", torch.float64, activation)), binning, activation)


@pytest.mark.parametrize("label_dtype", [torch.uint8, torch.int16, torch.float32])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_label_types_agree(label_dtype, activation):
    voxels = read_voxels(*batch("map", torch.float32, activation, label_dtype), ignore_index=2)
    assert_agreement(voxels, (13, "triangular", None, "left"), activation)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_probabilities_of_zero_and_one_and_on_edges_and_centers_agree(kernel, activation):
    voxels = read_voxels(*edge_batch(activation))
    assert_agreement(voxels, (10, kernel, None, "left"), activation)


@pytest.mark.parametrize("voxels", [1, 63, 64, 65, 1023, 1024, 1025, 2**16 - 1, 2**16 + 1])
def test_images_of_any_length_agree(voxels):
    inputs, labels = torch.randn(1, 2, voxels), torch.randint(0, 2, (1, voxels))
    for mask in (None, torch.rand(1, voxels) < 0.5, torch.zeros(1, voxels)):
        assert_agreement(read_voxels(inputs, labels, mask=mask), (7, "triangular", None, "left"), "softmax")


def test_many_classes_agree():
    inputs, labels = torch.randn(1, 40, 3000), torch.randint(0, 40, (1, 3000))
    assert_agreement(read_voxels(inputs, labels), (20, "triangular", None, "left"), "softmax")


def test_the_chunks_and_copies_that_a_gpu_takes_give_the_same_sums(kernel, monkeypatch):
    monkeypatch.setattr(reference, "CHUNK", reference.DEVICE_CHUNK)
    monkeypatch.setattr(reference, "COPIES", reference.DEVICE_COPIES)
    assert_agreement(read_voxels(*batch("map", torch.float32, "softmax")), (13, kernel, None, "left"), "softmax")


def test_chunks_of_the_reference_add_up(monkeypatch):
    voxels = read_voxels(*batch("map", torch.float32, "softmax"))
    binning = (13, "bspline", None, "left")
    whole = sums_and_gradient(voxels, binning, "softmax", "torch")
    monkeypatch.setattr(reference, "CHUNK", 20_000)
    assert_close(sums_and_gradient(voxels, binning, "softmax", "torch"), whole)
