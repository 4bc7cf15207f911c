"""The numbers that figures are drawn from, worked out by hand."""

import math

import numpy as np
import pytest
import torch

from segcal import Binning, BinStatistics, ShapeError, bin_statistics
from segcal.evaluation.diagrams import normalize, reliability, reliability_histogram
from segcal.evaluation.intervals import wilson

NAN = math.nan


def statistics(count, confidence, frequency):
    """From (case, class, bin) lists of counts, mean confidences and frequencies."""
    count, confidence, frequency = (torch.tensor(x, dtype=torch.float64) for x in (count, confidence, frequency))
    return BinStatistics(count, count * confidence, count * frequency, Binning(count.shape[-1]))


def test_a_diagram_pools_cases_and_classes_and_has_no_value_where_a_bin_is_empty():
    stats = statistics(
        [[[10, 0], [10, 0]], [[20, 0], [0, 0]]],
        [[[0.2, 0], [0.4, 0]], [[0.3, 0], [0, 0]]],
        [[[0.1, 0], [0.5, 0]], [[0.2, 0], [0, 0]]],
    )
    diagram = reliability(stats)
    assert diagram.edges.tolist() == [0, 0.5, 1]
    assert diagram.count.tolist() == [40, 0]
    assert diagram.confidence.numpy() == pytest.approx([(2 + 4 + 6) / 40, NAN], nan_ok=True)
    assert diagram.frequency.numpy() == pytest.approx([(1 + 5 + 4) / 40, NAN], nan_ok=True)
    assert diagram.ace == diagram.ece == diagram.mce == pytest.approx(0.05)
    low, high = wilson(torch.tensor(10.0).double(), torch.tensor(40.0).double())
    assert diagram.low.numpy() == pytest.approx([low.item(), NAN], nan_ok=True)
    assert diagram.high.numpy() == pytest.approx([high.item(), NAN], nan_ok=True)
    assert "Wilson" in diagram.band


def test_with_patients_the_band_is_their_spread_not_that_of_voxels():
    frequency = np.linspace(0.2, 0.6, 21)  # one patient each, many voxels
    stats = statistics([[[1e6]]] * 21, [[[0.4]]] * 21, [[[f]] for f in frequency])
    diagram = reliability(stats, patients=[str(i) for i in range(21)], resamples=4000)
    half = 1.96 * frequency.std() / math.sqrt(21)
    assert diagram.low.item() == pytest.approx(0.4 - half, abs=0.1 * half)
    assert diagram.high.item() == pytest.approx(0.4 + half, abs=0.1 * half)
    assert diagram.band == "95%, bootstrap over 21 patients; none where fewer than 5 fill a bin"
    assert diagram.over_patients
    one = reliability(stats, patients=["same"] * 21)  # a single patient: nothing to draw from
    assert "Wilson" in one.band
    assert not one.over_patients
    with pytest.raises(ShapeError, match=r"one patient per case \(21\); got 2"):
        reliability(stats, patients=["a", "b"])


def test_a_bin_that_few_patients_fill_has_no_band():
    """A bootstrap of one patient's voxels gives a band of no width, outside of which everything lies."""
    count = [[[100, 50 if i == 0 else 0]] for i in range(8)]
    stats = statistics(count, [[[0.2, 0.8]]] * 8, [[[0.1 + 0.02 * i, 0.5]] for i in range(8)])
    diagram = reliability(stats, patients=[str(i) for i in range(8)])
    assert diagram.frequency[1].item() == pytest.approx(0.5)
    assert math.isnan(diagram.low[1])
    assert math.isnan(diagram.high[1])
    assert diagram.low[0] < diagram.frequency[0] < diagram.high[0]


def test_a_bin_in_which_every_draw_is_alike_has_the_band_of_its_voxels():
    """Three voxels of each of 8 patients, all of the class: chance at 97 %, but every draw has the frequency 1."""
    stats = statistics([[[0, 3]]] * 8, [[[0, 0.97]]] * 8, [[[0, 1]]] * 8)
    diagram = reliability(stats, patients=[str(i) for i in range(8)])
    assert diagram.low[1].item() == pytest.approx(wilson(torch.tensor(24.0), torch.tensor(24.0))[0].item())
    assert diagram.low[1] < 0.97 < diagram.high[1] == 1


def test_a_dataset_histogram_counts_cases_by_frequency_in_each_bin():
    stats = statistics(
        [[[5, 5]], [[5, 0]], [[5, 5]], [[5, 5]]],
        [[[0.2, 0.8]]] * 4,
        [[[0.0, 1.0]], [[0.2, 0]], [[0.3, 0.8]], [[0.8, 0.4]]],
    )
    histogram = reliability_histogram(stats, levels=4)
    assert histogram.share.tolist() == [
        [0.5, 0.25, 0, 0.25],
        pytest.approx([0, 1 / 3, 0, 2 / 3]),  # of the three cases that occupy it; a frequency of 1 is in the last level
    ]
    assert histogram.cases.tolist() == [4, 3]
    assert histogram.frequency.numpy() == pytest.approx([(0.2 + 0.3 + 0.8) / 4, (1 + 0.8 + 0.4) / 3])
    assert histogram.confidence.numpy() == pytest.approx([0.2, 0.8])


def test_a_dataset_histogram_averages_over_the_classes_that_occupy_a_bin():
    stats = statistics(
        [[[5, 0], [5, 5]], [[5, 0], [5, 5]]],
        [[[0.2, 0], [0.4, 0.6]]] * 2,
        [[[0.0, 0], [1.0, 1.0]], [[0.0, 0], [0.0, 0.0]]],
    )
    histogram = reliability_histogram(stats, levels=2)
    assert histogram.share.tolist() == [[0.75, 0.25], [0.5, 0.5]]
    assert histogram.frequency.tolist() == [0.25, 0.5]


def test_a_calibrated_predictor_lies_on_the_diagonal():
    probabilities = torch.rand(30, 1, 20_000)
    labels = torch.rand_like(probabilities) < probabilities
    stats = bin_statistics(probabilities, labels, bins=10)
    diagram = reliability(stats, patients=[str(i) for i in range(30)])
    assert diagram.frequency.numpy() == pytest.approx(diagram.confidence.numpy(), abs=0.01)
    inside = (diagram.low <= diagram.confidence) & (diagram.confidence <= diagram.high)
    assert inside.sum() >= 7  # of ten, at 95 % each
    assert reliability_histogram(stats).share.diagonal().min() > 0.9


def test_the_best_method_has_one_on_every_axis_and_outward_is_better():
    values = torch.tensor([[0.8, 0.10, 0.0], [0.9, 0.05, 0.2], [NAN, 0.20, NAN]])
    scaled = normalize(values, higher_is_better=torch.tensor([True, False, False]))
    assert scaled.numpy() == pytest.approx(
        np.array([[8 / 9, 0.5, 1.0], [1.0, 1.0, 0.0], [NAN, 0.25, NAN]]), nan_ok=True
    )
