"""Whatever the numbers: Triton's kernels agree with the reference, or both refuse alike (tests/laws has numba's)."""

from __future__ import annotations

import os

os.environ["TRITON_INTERPRET"] = "1"  # read when the kernels are defined

import pytest
from extremes import EXTREME, SHARES, ace_loss, assert_same_end, examples, segmentation_loss, statistics
from hypothesis import given, settings
from hypothesis import strategies as st

from segcal import Binning

pytest.importorskip("triton")
pytestmark = [
    pytest.mark.peers,
    pytest.mark.filterwarnings("ignore:(overflow|invalid value|divide by zero) encountered:RuntimeWarning"),  # numpy's
]
BINNINGS = st.builds(Binning, bins=st.just(13), kernel=st.sampled_from(["hard", "triangular"]))


@settings(max_examples=40)
@given(examples(SHARES), BINNINGS)
def test_statistics_of_any_probabilities_agree_or_are_refused_alike(example, binning):
    assert_same_end(statistics, example, binning, "none", "triton")


@pytest.mark.parametrize("call", [ace_loss, segmentation_loss])
@settings(max_examples=40)
@given(examples(EXTREME), BINNINGS, st.sampled_from(["softmax", "sigmoid"]))
def test_losses_of_any_logits_agree_or_are_refused_alike(call, example, binning, activation):
    assert_same_end(call, example, binning, activation, "triton")
