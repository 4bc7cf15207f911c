"""A dataset reliability histogram shows shares in gamma-corrected shades, and the mean of each bin."""

import math

import matplotlib
import numpy as np
import pytest
import torch

from segcal.evaluation import diagrams
from segcal.plots import histogram_grid, new_figure, reliability_histogram


@pytest.fixture
def histogram():
    """Two bins, two levels, four cases in the first bin and none in the second."""
    return diagrams.ReliabilityHistogram(
        share=torch.tensor([[0.25, 0.75], [0.0, 0.0]], dtype=torch.float64),
        confidence=torch.tensor([0.3, math.nan], dtype=torch.float64),
        frequency=torch.tensor([0.6, math.nan], dtype=torch.float64),
        cases=torch.tensor([4.0, 0.0], dtype=torch.float64),
    )


def test_the_image_has_levels_upwards_and_hides_bins_without_cases(histogram):
    ax = new_figure().add_subplot()
    image = reliability_histogram(ax, histogram)
    array = image.get_array()
    np.testing.assert_array_equal(array.mask, [[False, True], [False, True]])
    np.testing.assert_array_equal(array.data[:, 0], [0.25, 0.75])
    assert image.get_extent() == [0, 1, 0, 1]
    assert image.origin == "lower"
    diagonal, mean = ax.lines
    np.testing.assert_array_equal(diagonal.get_xydata(), [[0, 0], [1, 1]])
    np.testing.assert_array_equal(mean.get_xydata(), [[0.3, 0.6], [math.nan, math.nan]])


def test_pixels_have_the_shade_of_the_share_to_the_power_of_gamma(histogram, picture):
    figure = new_figure()
    ax = figure.add_subplot()
    reliability_histogram(ax, histogram)
    drawn = picture(figure)
    for share, y in ((0.25, 0.2), (0.75, 0.9)):
        expected = np.array(matplotlib.colormaps["magma_r"](share**0.35)[:3]) * 255
        np.testing.assert_allclose(drawn.at(ax, 0.15, y), expected, atol=3)
    assert drawn.at(ax, 0.9, 0.2) == (0xE4, 0xE4, 0xE4)


def test_a_share_of_zero_is_white(picture, histogram):
    whole = diagrams.ReliabilityHistogram(
        torch.tensor([[1.0, 0.0], [0.0, 1.0]]).double(), histogram.confidence, histogram.frequency, torch.ones(2)
    )
    figure = new_figure()
    ax = figure.add_subplot()
    reliability_histogram(ax, whole)
    drawn = picture(figure)
    assert drawn.at(ax, 0.1, 0.9) == (255, 255, 255)
    assert max(drawn.at(ax, 0.1, 0.3)) < 12  # magma ends near black


def test_a_color_bar_runs_from_0_to_1_beside_the_axes(histogram, picture):
    figure = new_figure()
    (ax,) = histogram_grid(figure, {"": {"a$b": histogram}}).values()
    (bar,) = ax.child_axes
    assert [text.get_text() for text in bar.get_yticklabels()] == ["0", "0.01", "0.1", "0.3", "1"]
    assert bar.get_ylim() == (0, 1)
    assert picture(figure).nothing_clipped()


def test_a_grid_names_rows_and_columns_and_may_lack_some(histogram, picture):
    rows = ["liver", "a class of a very very long name with $ and _", "tumour"]
    grid = {row: {"dice-ce": histogram, "a_method$of$ rather long name " * 3: histogram} for row in rows}
    grid["tumour"] = {"dice-ce": histogram}
    figure = new_figure(7.16, 7)
    made = histogram_grid(figure, grid)
    assert len(made) == 5
    shown = [text.get_text().replace("\n", " ") for ax in made.values() for text in (*ax.texts, ax.title)]
    assert all(row in shown for row in rows)
    assert "dice-ce" in shown
    assert not any(text.get_parse_math() for ax in made.values() for text in (*ax.texts, ax.title) if text.get_text())
    assert made["liver", "dice-ce"].lines[1].get_color() == "#0072B2"
    assert picture(figure).nothing_clipped()


def test_one_case_and_an_absent_class_are_drawn(make_evaluation, picture):
    stats = make_evaluation(cases=1, absent=[(0, 2)]).foreground().binned
    figure = new_figure()
    histogram_grid(figure, {"": {"dice-ce": diagrams.reliability_histogram(stats)}})
    assert picture(figure).nothing_clipped()
