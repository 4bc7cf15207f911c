from __future__ import annotations

import oracle
import pytest
import torch

from segcal import Binning, BinStatistics, ConfigError, ace, bin_statistics, ece, mce

NAN = torch.nan


def statistics(count, confidence_sum, label_sum, **binning) -> BinStatistics:
    sums = [torch.tensor(values, dtype=torch.float64) for values in (count, confidence_sum, label_sum)]
    return BinStatistics(*sums, Binning(sums[0].shape[-1], **binning))


@pytest.fixture
def by_hand() -> BinStatistics:
    """Gaps of case 0: class 0 has 0.125, none, 0.25, 0.1 for 4, 0, 2, 10 voxels; class 1 has no voxels at all."""
    return statistics(
        [[[4, 0, 2, 10], [0, 0, 0, 0]], [[8, 8, 0, 0], [0, 0, 0, 4]]],
        [[[0.5, 0, 1.5, 9.0], [0, 0, 0, 0]], [[1.0, 3.0, 0, 0], [0, 0, 0, 4.0]]],
        [[[1, 0, 1, 10], [0, 0, 0, 0]], [[0, 4, 0, 0], [0, 0, 0, 4]]],
    )


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (ece, [[(4 * 0.125 + 2 * 0.25 + 10 * 0.1) / 16, NAN], [0.125, 0.0]]),
        (ace, [[(0.125 + 0.25 + 0.1) / 3, NAN], [0.125, 0.0]]),
        (lambda stats: ace(stats, empty_bins="zero"), [[(0.125 + 0.25 + 0.1) / 4, NAN], [0.0625, 0.0]]),
        (mce, [[0.25, NAN], [0.125, 0.0]]),
    ],
    ids=["ece", "ace", "ace over all bins", "mce"],
)
def test_errors_by_hand_with_nan_for_a_class_without_voxels(by_hand, error, expected):
    torch.testing.assert_close(error(by_hand), torch.tensor(expected, dtype=torch.float64), equal_nan=True)


def test_micro_is_the_error_of_the_pooled_cases(by_hand):
    pooled = by_hand.pool("case")  # class 0: 12, 8, 2, 10 voxels with gaps 0.5/12, 1/8, 0.5/2, 1/10
    gaps = [0.5 / 12, 0.125, 0.25, 0.1]
    assert ace(pooled)[0, 0].item() == pytest.approx(sum(gaps) / 4)
    assert ece(pooled)[0, 0].item() == pytest.approx((0.5 + 1 + 0.5 + 1) / 32)
    assert mce(pooled)[0, 0].item() == pytest.approx(0.25)


def test_a_bin_below_the_threshold_has_no_say():
    sums = ([[[1.0, 0.005]]], [[[0.25, 0.005]]], [[[0.5, 0.0]]])
    assert [error(statistics(*sums)).item() for error in (ece, ace, mce)] == [0.25, 0.25, 0.25]
    counted = statistics(*sums, empty_below=0)
    assert ace(counted).item() == 0.625
    assert mce(counted).item() == 1.0
    assert ece(counted).item() == pytest.approx((0.25 + 0.005) / 1.005)


@pytest.mark.parametrize("error", [ece, ace, mce])
def test_a_voxel_right_and_sure_has_no_error_and_one_wrong_and_sure_has_all(error, backend):
    sure = torch.tensor([[[1.0], [0.0]]])
    right, wrong = (bin_statistics(sure, torch.tensor([[label]]), backend=backend) for label in (0, 1))
    assert error(right).tolist() == [[0, 0]]
    assert error(wrong).tolist() == [[1, 1]]


@pytest.mark.parametrize("error", [ece, ace, mce])
def test_errors_have_no_nan_gradient_beside_an_empty_bin(error, backend):
    on_center = torch.tensor([[[0.125, 0.625]]], requires_grad=True)  # of 4 bins; the others are empty
    stats = bin_statistics(
        on_center, torch.tensor([[[0, 1]]]), binning=Binning(4, kernel="triangular"), backend=backend
    )
    error(stats).sum().backward()
    assert on_center.grad.isfinite().all()


def test_ace_has_the_gradient_of_the_formula(kernel):
    labels = torch.randint(0, 3, (2, 60))
    gradients = []
    p = torch.randn(2, 3, 60, dtype=torch.float64).softmax(1).requires_grad_()
    stats = bin_statistics(p, labels, binning=Binning(6, kernel=kernel))
    gradients.append(torch.autograd.grad(ace(stats).mean(), p)[0])
    expected = oracle.ace_loss(p, oracle.one_hot(labels, 3), bins=6, kernel=kernel)
    gradients.append(torch.autograd.grad(expected, p)[0])
    tolerance = 1e-4 if kernel == "gaussian" else 1e-12  # the Gaussian's slopes are those of its cubics
    torch.testing.assert_close(*gradients, atol=tolerance, rtol=1e-2 if kernel == "gaussian" else 1e-9)


def test_an_unknown_word_for_empty_bins_is_refused(by_hand):
    with pytest.raises(ConfigError, match=r"empty_bins must be one of 'skip', 'zero'; got 'drop'"):
        ace(by_hand, empty_bins="drop")
