"""A reliability diagram shows the numbers it is given, gaps by their sign."""

import math

import numpy as np
import pytest
import torch

from segcal.evaluation.diagrams import Reliability, reliability
from segcal.plots import new_figure, reliability_diagram, reliability_grid

OVER, UNDER = "#D55E00", "#56B4E9"


@pytest.fixture
def diagram():
    """Four bins: underconfident, empty, overconfident, exact."""
    nan = math.nan

    def row(*values):
        return torch.tensor(values, dtype=torch.float64)

    return Reliability(
        edges=row(0, 0.25, 0.5, 0.75, 1),
        count=row(1000, 0, 100, 10),
        confidence=row(0.1, nan, 0.7, 0.9),
        frequency=row(0.5, nan, 0.3, 0.9),
        low=row(0.45, nan, 0.2, 0.8),
        high=row(0.55, nan, 0.4, 1.0),
        band="95%, made by hand",
        ace=0.2667,
        ece=0.396,
        mce=0.4,
    )


def texts(figure):
    return [text.get_text() for text in figure.findobj(lambda artist: hasattr(artist, "get_text"))]


def test_points_gaps_and_counts_are_the_numbers_given(diagram):
    figure = new_figure(3.5, 4.3)
    upper, lower = reliability_diagram(figure, diagram, title="liver")
    diagonal, points = upper.lines
    np.testing.assert_array_equal(diagonal.get_xydata(), [[0, 0], [1, 1]])
    np.testing.assert_array_equal(points.get_xdata(), diagram.confidence.numpy())
    np.testing.assert_array_equal(points.get_ydata(), diagram.frequency.numpy())
    over, under = upper.containers
    assert [bar.get_bbox().bounds for bar in over] == [pytest.approx((0.5, 0.3, 0.25, 0.4))]
    (bar,) = under
    assert (bar.get_x(), bar.get_width()) == (0, 0.25)
    assert sorted((bar.get_y(), bar.get_y() + bar.get_height())) == pytest.approx([0.1, 0.5])
    assert [bar.get_height() for bar in lower.patches] == [1000, 100, 10]
    assert lower.get_yscale() == "log"


def test_the_band_stands_on_each_point(diagram):
    upper, _ = reliability_diagram(new_figure(), diagram)
    segments = upper.collections[0].get_segments()
    known = [segment for segment in segments if len(segment) and np.isfinite(segment).all()]
    np.testing.assert_allclose(known, [[[0.1, 0.45], [0.1, 0.55]], [[0.7, 0.2], [0.7, 0.4]], [[0.9, 0.8], [0.9, 1.0]]])


def test_errors_are_printed_as_received_and_the_band_is_named(diagram):
    figure = new_figure()
    reliability_diagram(figure, diagram)
    assert "ACE 0.267\nECE 0.396\nMCE 0.400" in texts(figure)
    assert "Bars: 95%, made by hand" in texts(figure)


def test_over_and_underconfident_gaps_have_their_colors(diagram, picture, near):
    figure = new_figure(3.5, 4.3)
    upper, lower = reliability_diagram(figure, diagram, color="#009E73")
    drawn = picture(figure)
    pale = {color: [round(0.35 * int(color[i : i + 2], 16) + 0.65 * 255) for i in (1, 3, 5)] for color in (OVER, UNDER)}
    for x, y, color in ((0.52, 0.45, OVER), (0.02, 0.3, UNDER)):
        seen = drawn.around(upper, x, y, reach=8)
        assert any(near(pixel, color) for pixel in seen), "the hatch"
        assert tuple(pale[color]) in {tuple(int(x) for x in pixel) for pixel in seen} or any(
            max(abs(a - b) for a, b in zip(pixel, pale[color], strict=True)) < 4 for pixel in seen
        ), "the shade"
    assert drawn.at(upper, 0.37, 0.1) == (255, 255, 255)  # an empty bin has no gap
    assert any(near(pixel, "#009E73") for pixel in drawn.around(upper, 0.7, 0.3))
    assert drawn.at(lower, 0.37, 3) == (255, 255, 255)
    assert drawn.at(lower, 0.1, 3) != (255, 255, 255)


def test_without_a_voxel_the_diagram_is_empty_and_says_so(picture):
    empty = torch.full((4,), math.nan, dtype=torch.float64)
    edges = torch.linspace(0, 1, 5, dtype=torch.float64)
    nothing = Reliability(
        edges, torch.zeros(4).double(), empty, empty, empty, empty, "none", math.nan, math.nan, math.nan
    )
    figure = new_figure()
    reliability_diagram(figure, nothing, title="absent")
    assert "ACE none\nECE none\nMCE none" in texts(figure)
    picture(figure)


def test_a_grid_has_a_diagram_for_each_class_and_one_legend(make_evaluation, picture):
    stats = make_evaluation().foreground().binned
    figure = new_figure(7.16, 5)
    names = ["liver", "a$b_c$ and a very long name of a class that no column holds", "third"]
    diagrams = {name: reliability(stats.select(classes=[i % 2])) for i, name in enumerate(names)}
    made = reliability_grid(figure, diagrams, columns=2)
    assert list(made) == names
    assert made["third"][0].get_title() == "third"
    assert made[names[1]][0].get_title().replace("\n", " ") == names[1]
    assert not made[names[1]][0].title.get_parse_math()
    assert len(figure.legends) == 1
    assert picture(figure).nothing_clipped()


def test_nothing_is_clipped_in_a_column(diagram, picture):
    figure = new_figure(3.5, 4.3)
    reliability_diagram(figure, diagram, title="a case with_a_long_name " * 5)
    assert picture(figure).nothing_clipped()


def test_all_text_is_large_enough_to_read(diagram):
    figure = new_figure()
    reliability_diagram(figure, diagram, title="liver")
    sizes = [
        text.get_fontsize()
        for text in figure.findobj(lambda artist: hasattr(artist, "get_fontsize"))
        if text.get_text()
    ]
    assert min(sizes) >= 7


def test_a_figure_within_a_figure_serves_as_well(diagram, picture):
    figure = new_figure(7, 4.3)
    left, right = figure.subfigures(1, 2)
    reliability_diagram(left, diagram, title="one")
    reliability_diagram(right, diagram, title="two")
    assert picture(figure).nothing_clipped()
