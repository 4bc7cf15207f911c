"""Whatever the numbers: the fast backend agrees with the reference, or both refuse alike."""

from __future__ import annotations

import pytest
from extremes import EXTREME, KERNELS, SHARES, ace_loss, assert_same_end, examples, segmentation_loss, statistics
from hypothesis import given, settings
from hypothesis import strategies as st

from segcal import Binning

BINNINGS = st.builds(Binning, bins=st.sampled_from([1, 13]), kernel=st.sampled_from(KERNELS))


@settings(max_examples=150)
@given(examples(SHARES), BINNINGS)
def test_statistics_of_any_probabilities_agree_or_are_refused_alike(example, binning):
    assert_same_end(statistics, example, binning, "none")


@pytest.mark.parametrize("call", [ace_loss, segmentation_loss])
@settings(max_examples=150)
@given(examples(EXTREME), BINNINGS, st.sampled_from(["softmax", "sigmoid"]))
def test_losses_of_any_logits_agree_or_are_refused_alike(call, example, binning, activation):
    assert_same_end(call, example, binning, activation)


@settings(max_examples=100)
@given(examples(SHARES), BINNINGS)
def test_a_loss_of_any_probabilities_agrees_or_is_refused_alike(example, binning):
    assert_same_end(ace_loss, example, binning, "none")
