from __future__ import annotations

import dataclasses

import numpy as np
import oracle
import pytest
import torch

from segcal import Binning, ConfigError, bin_statistics


def edges_and_neighbors(bins: int, dtype: type) -> np.ndarray:
    """Every k / bins as this type has it, with the numbers just below and just above, within [0, 1]."""
    edges = (np.arange(bins + 1) / bins).astype(dtype)
    return np.clip(np.concatenate([np.nextafter(edges, dtype(-1)), edges, np.nextafter(edges, dtype(2))]), 0, 1)


def counts_of_single_voxels(values: np.ndarray, binning: Binning, backend: str) -> torch.Tensor:
    """Counts (voxel, bin), each voxel a case of its own."""
    probabilities = torch.from_numpy(values)[:, None, None]
    return bin_statistics(probabilities, torch.zeros_like(probabilities), binning=binning, backend=backend).count[:, 0]


@pytest.mark.parametrize("closed", ["left", "right"])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("bins", [1, 3, 7, 10, 20, 1200])
def test_a_hard_bin_is_that_of_exact_arithmetic_on_every_edge_and_beside_it(bins, dtype, closed, backend):
    values = edges_and_neighbors(bins, dtype)
    expected = [oracle.hard_bin(float(value), bins, closed) for value in values]
    binning = Binning(bins, closed=closed)
    assert counts_of_single_voxels(values, binning, backend).argmax(-1).tolist() == expected
    assert binning.memberships(torch.from_numpy(values)).argmax(-1).tolist() == expected


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_1200_bins_rebinned_to_20_equal_20_bins_on_every_edge_and_beside_it(dtype, backend):
    values = torch.from_numpy(edges_and_neighbors(1200, dtype))[None, None]
    labels = (torch.arange(values.shape[-1]) % 3 == 0)[None, None]
    fine, coarse = (bin_statistics(values, labels, bins=bins, backend=backend) for bins in (1200, 20))
    assert torch.equal(fine.rebin(20).count, coarse.count)
    assert torch.equal(fine.rebin(20).label_sum, coarse.label_sum)
    torch.testing.assert_close(fine.rebin(20).confidence_sum, coarse.confidence_sum)


def test_zero_belongs_to_the_first_bin_and_one_to_the_last_for_every_kernel(kernel):
    first, last = Binning(5, kernel=kernel).memberships(torch.tensor([0.0, 1.0]))
    assert first.argmax() == 0
    assert last.argmax() == 4


def test_hard_bins_are_closed_on_the_left_and_the_last_on_both_sides():
    quarters = torch.tensor([0.0, 0.25, 0.5, 0.75, 1.0])
    assert Binning(4).memberships(quarters).argmax(-1).tolist() == [0, 1, 2, 3, 3]
    assert Binning(4, closed="right").memberships(quarters).argmax(-1).tolist() == [0, 0, 1, 2, 3]


@pytest.mark.parametrize(
    ("kernel", "weights"),
    [  # at a quarter of the way from the center 0.5 to the center 0.7: u = 1/4
        ("hard", [0, 0, 1, 0, 0]),
        ("triangular", [0, 0, 3 / 4, 1 / 4, 0]),
        ("bspline", [0, 27 / 384, 235 / 384, 121 / 384, 1 / 384]),
    ],
)
def test_weights_between_two_centers_by_hand(kernel, weights):
    got = Binning(5, kernel=kernel).memberships(torch.tensor([0.55], dtype=torch.float64))
    torch.testing.assert_close(got, torch.tensor([weights], dtype=torch.float64), atol=1e-12, rtol=0)


def test_a_probability_beyond_the_outer_centers_belongs_to_the_outer_triangular_bin_alone():
    weights = Binning(4, kernel="triangular").memberships(torch.tensor([0.0, 0.1, 0.125, 0.875, 0.95, 1.0]))
    assert weights.tolist() == [[1, 0, 0, 0]] * 3 + [[0, 0, 0, 1]] * 3


@pytest.mark.parametrize("bins", [1, 2, 20])
@pytest.mark.parametrize("kernel", ["hard", "triangular", "bspline"])
def test_memberships_follow_the_kernels_formula(kernel, bins):
    x = torch.cat([torch.rand(400, dtype=torch.float64), torch.arange(2 * bins + 1) / (2 * bins)])
    expected = oracle.memberships(x, bins, kernel)
    torch.testing.assert_close(Binning(bins, kernel=kernel).memberships(x), expected, atol=1e-12, rtol=0)


@pytest.mark.parametrize("bandwidth", [0.2, 0.25, 0.3, 0.5, 0.77, 1.0, 2.5, 5.0, 10.0])
def test_the_gaussians_cubics_stay_within_a_millionth_of_the_normalized_gaussian(bandwidth):
    x = torch.linspace(0, 1, 5001, dtype=torch.float64)
    got = Binning(10, kernel="gaussian", bandwidth=bandwidth).memberships(x)
    expected = oracle.memberships(x, 10, "gaussian", bandwidth)
    torch.testing.assert_close(got, expected, atol=1e-6, rtol=0)


def test_the_gaussians_bandwidth_is_half_a_bin_if_not_given():
    x = torch.rand(50, dtype=torch.float64)
    default, half = Binning(7, "gaussian"), Binning(7, "gaussian", bandwidth=0.5)
    assert torch.equal(default.memberships(x), half.memberships(x))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("bins", [1, 2, 20, 1200])
def test_every_kernel_is_a_partition_of_unity(kernel, bins, dtype):
    x = torch.cat([torch.rand(300), torch.arange(41) / 40]).to(dtype)
    weights = Binning(bins, kernel=kernel).memberships(x)
    torch.testing.assert_close(weights.sum(-1), torch.ones(len(x), dtype=torch.float64), atol=1e-12, rtol=0)
    assert weights.min() >= -1e-6  # what the Gaussian's cubics may lack
    assert weights.shape == (len(x), bins)


@pytest.mark.parametrize("kernel", ["triangular", "gaussian", "bspline"])
def test_soft_kernels_are_symmetric(kernel):
    x, binning = torch.rand(200, dtype=torch.float64), Binning(9, kernel=kernel)
    torch.testing.assert_close(binning.memberships(1 - x), binning.memberships(x).flip(-1), atol=1e-6, rtol=0)


@pytest.mark.parametrize(("kernel", "tolerance"), [("triangular", 1e-9), ("bspline", 1e-9), ("gaussian", 2e-3)])
def test_memberships_have_the_slopes_of_the_formula(kernel, tolerance):
    weights = torch.randn(9, dtype=torch.float64)
    slopes = []
    for function in (Binning(9, kernel=kernel).memberships, lambda x: oracle.memberships(x, 9, kernel)):
        x = torch.linspace(0.003, 0.997, 300, dtype=torch.float64).requires_grad_()
        slopes.append(torch.autograd.grad((function(x) * weights).sum(), x)[0])
    torch.testing.assert_close(slopes[0], slopes[1], atol=tolerance * 9, rtol=0)


def test_numbers_that_are_no_probabilities_fall_in_the_nearest_bin_and_nan_in_the_first():
    strange = torch.tensor([-5.0, 7.0, torch.inf, -torch.inf, torch.nan])
    assert Binning(4).memberships(strange).argmax(-1).tolist() == [0, 3, 3, 0, 0]


def test_edges_and_centers_by_hand():
    assert Binning(4).edges.tolist() == [0, 0.25, 0.5, 0.75, 1]
    assert Binning(4).centers.tolist() == [0.125, 0.375, 0.625, 0.875]


def test_a_binning_is_a_value():
    assert Binning(5) == Binning(5)
    assert len({Binning(5), Binning(5), Binning(6)}) == 2
    with pytest.raises(dataclasses.FrozenInstanceError):
        Binning(5).bins = 6  # type: ignore[misc]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"bins": 0}, r"bins must be a whole number from 1 to 100000; got 0"),
        ({"bins": -3}, r"got -3"),
        ({"bins": 2.5}, r"got 2\.5"),
        ({"bins": True}, r"got True"),
        ({"bins": 100_001}, r"got 100001"),
        ({"kernel": "box"}, r"kernel must be one of 'hard', 'triangular', 'gaussian', 'bspline'; got 'box'"),
        ({"kernel": "soft"}, r"got 'soft'.*kernel='triangular'"),
        ({"closed": "both"}, r"closed must be one of 'left', 'right'; got 'both'"),
        ({"closed": "right", "kernel": "bspline"}, r"closed='right' belongs to kernel='hard'; got kernel='bspline'"),
        ({"bandwidth": 0.5}, r"bandwidth belongs to kernel='gaussian'; got kernel='hard'"),
        ({"bandwidth": 0.1, "kernel": "gaussian"}, r"bandwidth must lie in \[0\.2, 10\.0\] bin widths; got 0\.1"),
        ({"bandwidth": torch.nan, "kernel": "gaussian"}, r"bandwidth must lie in .* got nan"),
        ({"empty_below": -1.0}, r"empty_below must be a number of at least 0; got -1\.0"),
        ({"empty_below": torch.inf}, r"empty_below .* got inf"),
    ],
)
def test_a_binning_that_cannot_be_is_refused_with_its_value(options, message):
    with pytest.raises(ConfigError, match=message):
        Binning(**options)


@pytest.mark.parametrize(
    "option", [{"bandwidth": "1", "kernel": "gaussian"}, {"empty_below": "0"}, {"empty_below": None}]
)
def test_numbers_of_a_wrong_type_are_refused(option):
    with pytest.raises(ConfigError, match=r"(bandwidth must lie in|empty_below must be a number)"):
        Binning(**option)
