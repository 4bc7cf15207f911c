"""Numbers beyond ECE, ACE and MCE: sides of the gap, micro averages, equal-mass bins."""

import math

import numpy as np
import pytest
import torch

from segcal import (
    ACELoss,
    ConfigError,
    ace,
    bin_statistics,
    ece,
    equal_mass,
    mce,
    micro,
    occupied,
    overconfidence,
    signed_gap,
    underconfidence,
)
from segcal.binning import Binning
from segcal.statistics import SUMS, BinStatistics


def statistics(probabilities, labels, bins=2):
    return bin_statistics(torch.tensor(probabilities), torch.tensor(labels), bins=bins)


def test_occupied_bins_are_counted_case_by_case_and_pooled():
    # Five bins of 0.2. The first case fills the first (twice) and the last, the second the second, the third all.
    three = [[[0.1, 0.15, 0.9, 1.0, 1.0]], [[0.3] * 5], [[0.1, 0.3, 0.5, 0.7, 0.9]]]
    stats = statistics(three, [[[0, 1, 0, 1, 0]]] * 3, bins=5)
    assert occupied(stats).tolist() == [[pytest.approx(2 / 5)], [pytest.approx(1 / 5)], [1.0]]
    assert occupied(micro(stats.select(cases=[0, 1]))).item() == pytest.approx(3 / 5)
    assert occupied(stats.pool("class")).tolist() == occupied(stats).tolist()


def test_of_a_label_map_two_bins_are_occupied():
    stats = statistics([[[0.0, 1.0, 1.0, 0.0]]], [[[0, 1, 0, 0]]], bins=20)
    assert occupied(stats).item() == pytest.approx(2 / 20)
    assert ace(stats).item() == pytest.approx((0 + 1 / 2) / 2)  # of two bins; the others say nothing


def test_over_and_underconfidence_make_up_the_ece():
    stats = bin_statistics(torch.rand(3, 2, 500).softmax(1), torch.randint(0, 2, (3, 500)), bins=10)
    torch.testing.assert_close(overconfidence(stats) + underconfidence(stats), ece(stats))
    assert (overconfidence(stats) > 0).any()
    assert (underconfidence(stats) > 0).any()


def test_sides_of_the_gap_by_hand():
    # bin 0: 0.25 twice, one of them true: too sure by 0.25; bin 1: 0.75 twice, none true: too sure by 0.75
    stats = statistics([[[0.25, 0.25, 0.75, 0.75]]], [[[1, 0, 0, 0]]])
    assert overconfidence(stats).item() == pytest.approx(0.5)
    assert underconfidence(stats).item() == 0
    assert signed_gap(stats).item() == pytest.approx(0.25)
    # 0.25 twice, none true: not sure enough that it is absent; 0.5, true: not sure of anything
    stats = statistics([[[0.25, 0.25, 0.5, 0.5]]], [[[0, 0, 1, 1]]])
    assert underconfidence(stats).item() == pytest.approx((0.25 + 0.5) / 2)
    assert overconfidence(stats).item() == 0


@pytest.mark.parametrize(("factor", "over"), [(3.0, True), (1 / 3, False)])
def test_logits_that_are_too_large_are_overconfident_whatever_the_share_of_the_class(factor, over):
    generator = torch.Generator().manual_seed(0)
    logits = 1.5 * torch.randn(1, 1, 50_000, generator=generator) - 2.5  # one voxel in eight is of the class
    labels = (torch.rand(logits.shape, generator=generator) < logits.sigmoid()).long()
    stats = bin_statistics((factor * logits).sigmoid(), labels, bins=20)
    more, less = (
        (overconfidence(stats), underconfidence(stats)) if over else (underconfidence(stats), overconfidence(stats))
    )
    assert more.item() > 20 * less.item()


def test_micro_pooled_weighs_voxels_and_micro_paper_weighs_cases():
    # one bin; case 0 has three voxels at 0.2, case 1 (padded out by the mask) one at 0.6; no label is true
    probabilities = torch.tensor([[[0.2, 0.2, 0.2]], [[0.6, 0.0, 0.0]]])
    mask = torch.tensor([[1, 1, 1], [1, 0, 0]])
    stats = bin_statistics(probabilities, torch.zeros(2, 1, 3), bins=1, mask=mask)
    assert ace(micro(stats, reading="pooled")).item() == pytest.approx((3 * 0.2 + 0.6) / 4)
    assert ace(micro(stats, reading="paper")).item() == pytest.approx((0.2 + 0.6) / 2)


def test_micro_is_pooled_unless_the_papers_reading_is_asked_for():
    stats = bin_statistics(torch.rand(4, 2, 60).softmax(1), torch.randint(0, 2, (4, 60)), bins=5)
    for name in SUMS:
        torch.testing.assert_close(getattr(micro(stats), name), getattr(stats.pool("case"), name))
        assert torch.equal(getattr(micro(stats), name), getattr(micro(stats, reading="pooled"), name))
    assert not torch.equal(micro(stats).confidence_sum, micro(stats, reading="paper").confidence_sum)


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
    even = equal_mass(stats, 10, above=0)
    assert even.count.min() > 380
    assert ace(even).item() == pytest.approx(expected, abs=5e-3)


def test_equal_mass_bins_keep_every_voxel_and_need_hard_bins():
    stats = statistics([[[0.0, 0.0, 0.0, 1.0]]], [[[0, 0, 1, 1]]], bins=1200)
    assert equal_mass(stats, 4, above=0).count.sum() == 4
    assert equal_mass(stats, 4).count.sum() == 1  # those below 1 % are left out
    with pytest.raises(ConfigError, match="above must be a probability"):
        equal_mass(stats, 4, above=1.0)
    soft = bin_statistics(torch.rand(1, 1, 5), torch.ones(1, 1, 5), binning=Binning(5, "triangular"))
    with pytest.raises(ConfigError, match="hard"):
        equal_mass(soft, 2)


@pytest.fixture
def even_and_uniform():
    """The same voxels in four equal-mass bins and in four equally wide ones."""
    stats = bin_statistics(torch.rand(2, 1, 200), torch.randint(0, 2, (2, 1, 200)), bins=1200)
    return equal_mass(stats, 4), stats.rebin(4)


@pytest.mark.parametrize(
    ("attempt", "message"),
    [
        (
            lambda even, uniform: even + uniform,
            r"one binning; got .*equal_mass_above=0\.01.*segcal\.equal_mass on both",
        ),
        (lambda even, uniform: uniform + even, r"one binning; got .*segcal\.equal_mass on both"),
        (lambda even, uniform: BinStatistics.concatenate([uniform, even]), r"one binning; got .*equal_mass on both"),
        (lambda even, uniform: even + even, r"to be added; these are equal-mass bins"),
        (lambda even, uniform: even.pool("case"), r"to be pooled; these are equal-mass bins"),
        (lambda even, uniform: even.pool("class"), r"to be pooled; these are equal-mass bins"),
        (lambda even, uniform: even.rebin(2), r"to be rebinned; these are equal-mass bins"),
        (lambda even, uniform: micro(even), r"to be put together for a micro average; these are equal-mass bins"),
        (lambda even, uniform: equal_mass(even, 2), r"to be cut into equal-mass bins; these are equal-mass bins"),
        (lambda even, uniform: even.binning.edges, r"to be placed on \[0, 1\]; these are equal-mass bins"),
        (lambda even, uniform: even.binning.centers, r"to be placed on \[0, 1\]; these are equal-mass bins"),
        (
            lambda even, uniform: bin_statistics(torch.rand(1, 1, 3), torch.ones(1, 1, 3), binning=even.binning),
            r"to be filled with probabilities; these are equal-mass bins",
        ),
        (lambda even, uniform: ACELoss(even.binning), r"to be filled with probabilities; these are equal-mass bins"),
    ],
)
def test_equal_mass_statistics_are_never_mixed_with_others_nor_with_each_other(even_and_uniform, attempt, message):
    with pytest.raises(ConfigError, match=message):
        attempt(*even_and_uniform)


def test_equal_mass_statistics_of_another_threshold_are_others():
    stats = statistics([[[0.2, 0.8]]], [[[0, 1]]], bins=1200)
    with pytest.raises(ConfigError, match="of the same threshold"):
        BinStatistics.concatenate([equal_mass(stats, 2), equal_mass(stats, 2, above=0)])


def test_equal_mass_statistics_keep_their_mark_in_selections_and_files(even_and_uniform, tmp_path):
    even, _ = even_and_uniform
    even.select(cases=[0]).save(tmp_path / "even.npz")
    assert BinStatistics.load(tmp_path / "even.npz").binning == even.binning == Binning(4, equal_mass_above=0.01)


@pytest.mark.parametrize(("options", "message"), [
    ({"equal_mass_above": 1.0}, "from 0 to below 1; got 1.0"),
    ({"equal_mass_above": 0.5, "kernel": "triangular"}, "equal-mass bins are hard; got kernel='triangular'"),
])  # fmt: skip
def test_a_mark_of_equal_mass_that_cannot_be_is_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        Binning(4, **options)


def test_background_does_not_dilute_equal_mass_bins():
    """Without a threshold, 97 % background left two occupied bins and a thirtieth of the error."""
    generator = torch.Generator().manual_seed(0)
    truth = torch.rand(20_000, generator=generator)
    labels = (torch.rand(20_000, generator=generator) < truth).long()
    sharp = (3 * truth.logit(eps=1e-6)).sigmoid()
    errors = {}
    for share in (0.0, 0.9, 0.97):
        more = int(20_000 * share / (1 - share))
        probabilities = torch.cat([sharp, torch.full((more,), 0.0002)])[None, None]
        stats = bin_statistics(probabilities, torch.cat([labels, labels.new_zeros(more)])[None, None], bins=1200)
        even = equal_mass(stats, 20)
        errors[share] = ace(even).item()
        assert ece(even).item() == pytest.approx(errors[share], rel=0.1)  # bins hold about equally many
    assert errors[0.9] == errors[0.97] == pytest.approx(errors[0.0], rel=1e-9)
    assert errors[0.0] > 0.05


@pytest.mark.parametrize("metric", [ece, ace, mce, occupied, signed_gap, overconfidence, underconfidence])
def test_a_case_without_voxels_has_no_error(metric):
    stats = bin_statistics(torch.rand(1, 1, 4), torch.ones(1, 1, 4), mask=torch.zeros(1, 4))
    assert math.isnan(metric(stats).item())
