"""Numbers beyond ECE, ACE and MCE: sides of the gap, micro averages, equal-mass bins."""

import math

import numpy as np
import pytest
import torch

from segcal import (
    ConfigError,
    ace,
    bin_statistics,
    ece,
    equal_mass,
    mce,
    micro,
    overconfidence,
    signed_gap,
    underconfidence,
)
from segcal.binning import Binning


def statistics(probabilities, labels, bins=2):
    return bin_statistics(torch.tensor(probabilities), torch.tensor(labels), bins=bins)


def test_over_and_underconfidence_make_up_the_ece():
    stats = bin_statistics(torch.rand(3, 2, 500).softmax(1), torch.randint(0, 2, (3, 500)), bins=10)
    torch.testing.assert_close(overconfidence(stats) + underconfidence(stats), ece(stats))
    assert (overconfidence(stats) > 0).any()
    assert (underconfidence(stats) > 0).any()


def test_sides_of_the_gap_by_hand():
    # bin 0: 0.25 twice, one of them true: 0.25 under; bin 1: 0.75 twice, none true: 0.75 over
    stats = statistics([[[0.25, 0.25, 0.75, 0.75]]], [[[1, 0, 0, 0]]])
    assert overconfidence(stats).item() == pytest.approx(0.375)
    assert underconfidence(stats).item() == pytest.approx(0.125)
    assert signed_gap(stats).item() == pytest.approx(0.25)


def test_micro_pooled_weighs_voxels_and_micro_paper_weighs_cases():
    # one bin; case 0 has three voxels at 0.2, case 1 (padded out by the mask) one at 0.6; no label is true
    probabilities = torch.tensor([[[0.2, 0.2, 0.2]], [[0.6, 0.0, 0.0]]])
    mask = torch.tensor([[1, 1, 1], [1, 0, 0]])
    stats = bin_statistics(probabilities, torch.zeros(2, 1, 3), bins=1, mask=mask)
    assert ace(micro(stats, reading="pooled")).item() == pytest.approx((3 * 0.2 + 0.6) / 4)
    assert ace(micro(stats, reading="paper")).item() == pytest.approx((0.2 + 0.6) / 2)


def test_micro_paper_ignores_cases_that_leave_a_bin_empty():
    stats = statistics([[[0.2, 0.8]], [[0.4, 0.3]]], [[[0, 0]], [[0, 0]]])
    confidence = micro(stats, reading="paper").mean_confidence[0, 0]
    torch.testing.assert_close(confidence, torch.tensor([(0.2 + 0.35) / 2, 0.8], dtype=torch.float64))


def test_micro_refuses_other_readings():
    with pytest.raises(ConfigError, match="reading"):
        micro(statistics([[[0.2]]], [[[0]]]), reading="macro")


def test_equal_mass_bins_agree_with_sorting_the_voxels():
    generator = np.random.default_rng(0)
    probabilities, labels = generator.random(4000), generator.random(4000) < 0.5
    stats = bin_statistics(torch.tensor(probabilities)[None, None], torch.tensor(labels)[None, None], bins=1200)
    order = np.argsort(probabilities)
    groups = np.array_split(order, 10)
    expected = np.mean([abs(probabilities[g].mean() - labels[g].mean()) for g in groups])
    even = equal_mass(stats, 10)
    assert even.count.min() > 380
    assert ace(even).item() == pytest.approx(expected, abs=5e-3)


def test_equal_mass_bins_keep_every_voxel_and_need_hard_bins():
    stats = statistics([[[0.0, 0.0, 0.0, 1.0]]], [[[0, 0, 1, 1]]], bins=1200)
    assert equal_mass(stats, 4).count.sum() == 4
    soft = bin_statistics(torch.rand(1, 1, 5), torch.ones(1, 1, 5), binning=Binning(5, "triangular"))
    with pytest.raises(ConfigError, match="hard"):
        equal_mass(soft, 2)


@pytest.mark.parametrize("metric", [ece, ace, mce, signed_gap, overconfidence, underconfidence])
def test_a_case_without_voxels_has_no_error(metric):
    stats = bin_statistics(torch.rand(1, 1, 4), torch.ones(1, 1, 4), mask=torch.zeros(1, 4))
    assert math.isnan(metric(stats).item())
