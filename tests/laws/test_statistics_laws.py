"""The algebra of bin statistics: sums add, whatever the way."""

from __future__ import annotations

import oracle
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from segcal import Binning, BinStatistics, ConfigError, ace, bin_statistics, ece, equal_mass, mce

SUMS = ("count", "confidence_sum", "label_sum")
BINNINGS = st.one_of(
    st.builds(Binning, bins=st.integers(1, 40), closed=st.sampled_from(["left", "right"])),
    st.builds(Binning, bins=st.integers(1, 40), kernel=st.sampled_from(["triangular", "bspline"])),
    st.builds(Binning, bins=st.integers(1, 12), kernel=st.just("gaussian"), bandwidth=st.sampled_from([0.3, 1.0])),
)


@st.composite
def images(draw, cases: int | None = None) -> tuple[Tensor, Tensor]:
    """Probabilities with many on edges, centers, 0 and 1, and soft or one-hot labels, (case, class, voxel)."""
    shape = (cases or draw(st.integers(1, 3)), draw(st.integers(1, 3)), draw(st.integers(1, 30)))
    dtype = draw(st.sampled_from([torch.float32, torch.float64]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**20)))
    anywhere, on_grid = torch.rand(shape, generator=generator), torch.randint(0, 41, shape, generator=generator) / 40
    probabilities = torch.where(torch.rand(shape, generator=generator) < 0.5, anywhere, on_grid).to(dtype)
    labels = torch.rand(shape, generator=generator)
    return probabilities, labels if draw(st.booleans()) else labels.round()


def assert_same(got: BinStatistics, expected: BinStatistics) -> None:
    """Counts of hard bins exactly, the rest to rounding."""
    assert got.binning == expected.binning
    for name in SUMS:
        a, b = getattr(got, name), getattr(expected, name)
        exact = name == "count" and got.binning.kernel == "hard"
        torch.testing.assert_close(a, b, rtol=0 if exact else 1e-9, atol=0 if exact else 1e-9)


@given(images(), BINNINGS, st.data())
def test_any_split_of_the_voxels_adds_up_to_the_same_sums(image, binning, data):
    probabilities, labels = image
    part = torch.tensor(data.draw(st.lists(st.booleans(), min_size=labels.shape[2], max_size=labels.shape[2])))
    whole = bin_statistics(probabilities, labels, binning=binning)
    parts = [bin_statistics(probabilities[..., keep], labels[..., keep], binning=binning) for keep in (part, ~part)]
    assert_same(parts[0] + parts[1], whole)
    masked = [
        bin_statistics(probabilities, labels, binning=binning, mask=keep.expand(len(labels), -1))
        for keep in (part, ~part)
    ]
    assert_same(masked[0] + masked[1], whole)


@given(images(cases=2), images(cases=2), images(cases=2), BINNINGS)
def test_adding_is_associative_and_commutative(a, b, c, binning):
    a, b, c = (bin_statistics(p, y, binning=binning).select(classes=[0]) for p, y in (a, b, c))
    assert_same(a + b, b + a)
    assert_same((a + b) + c, a + (b + c))


@given(images(cases=1), images(cases=1), BINNINGS)
def test_pooling_what_was_concatenated_equals_adding(a, b, binning):
    a, b = (bin_statistics(p, y, binning=binning).select(classes=[0]) for p, y in (a, b))
    assert_same(BinStatistics.concatenate([a, b]).pool("case"), a + b)


@given(images(), BINNINGS)
def test_every_voxel_is_counted_once_and_labels_never_more_than_voxels(image, binning):
    probabilities, labels = image
    stats = bin_statistics(probabilities, labels, binning=binning)
    close = {"rtol": 1e-9, "atol": 1e-9}
    torch.testing.assert_close(stats.count.sum(-1), torch.full(labels.shape[:2], labels.shape[2]).double(), **close)
    torch.testing.assert_close(stats.confidence_sum.sum(-1), probabilities.double().sum(-1), **close)
    torch.testing.assert_close(stats.label_sum.sum(-1), labels.double().sum(-1), **close)
    slack = 1e-6 * labels.shape[2]  # the Gaussian's cubics
    assert (stats.count >= -slack).all()
    assert (stats.label_sum >= -slack).all()
    assert (stats.label_sum <= stats.count + slack).all()


@given(images(), BINNINGS)
def test_sums_are_those_of_the_formula(image, binning):
    probabilities, labels = image
    stats = bin_statistics(probabilities, labels, binning=binning)
    options = {"bins": binning.bins, "kernel": binning.kernel, "closed": binning.closed}
    expected = oracle.bin_sums(probabilities.double(), labels.double(), bandwidth=binning.bandwidth or 0.5, **options)
    for name, value in zip(SUMS, expected, strict=True):
        slack = 1e-6 * labels.shape[2] if binning.kernel == "gaussian" else 1e-9
        torch.testing.assert_close(getattr(stats, name), value, rtol=1e-9, atol=slack)


@given(images(), BINNINGS, st.randoms(use_true_random=False))
def test_permuting_classes_and_cases_permutes_results(image, binning, random):
    probabilities, labels = image
    cases, classes = (random.sample(range(length), length) for length in labels.shape[:2])
    stats = bin_statistics(probabilities, labels, binning=binning)
    permuted = bin_statistics(probabilities[cases][:, classes], labels[cases][:, classes], binning=binning)
    assert_same(permuted, stats.select(cases=cases, classes=classes))
    for error in (ece, ace, mce):
        torch.testing.assert_close(error(permuted), error(stats)[cases][:, classes], equal_nan=True)


@given(images(), st.randoms(use_true_random=False), BINNINGS)
def test_the_order_of_voxels_does_not_matter(image, random, binning):
    probabilities, labels = image
    order = random.sample(range(labels.shape[2]), labels.shape[2])
    shuffled = bin_statistics(probabilities[..., order], labels[..., order], binning=binning)
    assert_same(shuffled, bin_statistics(probabilities, labels, binning=binning))


@given(images(), st.sampled_from([(1200, 20), (1200, 50), (60, 12), (8, 1), (1200, 100)]))
def test_rebinning_equals_coarser_bins_from_the_start(image, bins):
    probabilities, labels = image
    fine, coarse = (bin_statistics(probabilities, labels, bins=number) for number in bins)
    assert_same(fine.rebin(bins[1]), coarse)


@given(images(), BINNINGS)
def test_errors_are_ordered_and_lie_between_zero_and_one(image, binning):
    stats = bin_statistics(*image, binning=binning)
    slack = 1e-4 if binning.kernel == "gaussian" else 1e-9
    for average in (ece(stats), ace(stats), ace(stats, empty_bins="zero")):
        assert (average >= 0).all()
        assert (average <= mce(stats) + slack).all()
    assert (mce(stats) <= 1 + slack).all()
    assert (ace(stats, empty_bins="zero") <= ace(stats) + slack).all()


@given(images())
def test_more_bins_never_hide_a_gap(image):
    """Joining hard bins can only let gaps of opposite sign cancel: the ECE of fewer bins is not larger."""
    fine = bin_statistics(*image, bins=40)
    assert (ece(fine.rebin(8)) <= ece(fine) + 1e-9).all()


@given(images(cases=1), images(cases=1), st.integers(1, 12), st.sampled_from([0, 0.01, 0.3]))
def test_equal_mass_bins_of_what_was_concatenated_are_those_of_each_part(a, b, bins, above):
    fine = [bin_statistics(p, y, bins=1200).select(classes=[0]) for p, y in (a, b)]
    even = [equal_mass(part, bins, above=above) for part in fine]
    assert_same(equal_mass(BinStatistics.concatenate(fine), bins, above=above), BinStatistics.concatenate(even))


@given(images(), st.integers(1, 12), st.sampled_from([0, 0.01, 0.3]))
def test_equal_mass_bins_keep_the_sums_above_the_threshold(image, bins, above):
    fine = bin_statistics(*image, bins=1200)
    even, kept = equal_mass(fine, bins, above=above), fine.binning.edges[:-1] >= above
    for name in SUMS:
        torch.testing.assert_close(getattr(even, name).sum(-1), (getattr(fine, name) * kept).sum(-1))


@given(images(), st.integers(1, 12), st.data())
def test_equal_mass_bins_join_nothing_that_has_other_edges(image, bins, data):
    even = equal_mass(bin_statistics(*image, bins=1200), bins)
    uniform = bin_statistics(*image, bins=bins)
    joins = [lambda: even + even, lambda: even + uniform, lambda: uniform + even, lambda: even.pool("case")]
    joins += [lambda: even.pool("class"), lambda: even.rebin(1), lambda: BinStatistics.concatenate([even, uniform])]
    with pytest.raises(ConfigError, match=r"(?i)equal-mass bins"):
        data.draw(st.sampled_from(joins))()
