"""Curves run through the numbers they are given."""

import numpy as np
import pytest

from segcal import Binning, ConfigError
from segcal.plots import SensitivityPoint, memberships, new_figure, sensitivity, sensitivity_figure

POINTS = [
    SensitivityPoint("hard-ace", 20, 0.87, 0.10, 0.02, 0.01),
    SensitivityPoint("hard-ace", 5, 0.88, 0.11, 0.02, 0.01),
    SensitivityPoint("soft-ace", 5, 0.86, 0.07),
    SensitivityPoint("soft-ace", 20, 0.85, 0.06),
]


def test_memberships_are_squares_and_triangles():
    ax = new_figure().add_subplot()
    lines = memberships(ax, [Binning(5), Binning(5, kernel="triangular")])
    assert len(lines) == 10
    assert {lines[0, k].get_linestyle() for k in range(5)} == {"-"}
    assert {lines[1, k].get_linestyle() for k in range(5)} == {"--"}
    assert len({lines[0, k].get_color() for k in range(5)}) == 5
    assert all(lines[0, k].get_color() == lines[1, k].get_color() for k in range(5))
    x, y = lines[0, 2].get_data()
    assert set(np.unique(y)) == {0.0, 1.0}
    np.testing.assert_allclose([x[y == 1].min(), x[y == 1].max()], [0.4, 0.6], atol=1e-8)
    x, y = lines[1, 2].get_data()
    np.testing.assert_allclose(y, np.maximum(1 - 5 * np.abs(x - 0.5), 0), atol=1e-7)
    x, y = lines[1, 0].get_data()
    assert (y[x <= 0.1] == 1).all()  # below the first center


def test_memberships_in_the_picture_have_the_bins_colors(picture, near):
    figure = new_figure(3.5, 2.2)
    ax = figure.add_subplot()
    memberships(ax, [Binning(5)])
    drawn = picture(figure)
    for x, color in ((0.1, "#0072B2"), (0.3, "#D55E00"), (0.5, "#009E73")):
        assert any(near(pixel, color) for pixel in drawn.around(ax, x, 1.0))
    assert drawn.at(ax, 0.1, 0.5) == (255, 255, 255)
    assert drawn.nothing_clipped()


def test_sensitivity_draws_each_method_in_order_of_the_setting(picture, near):
    figure = new_figure(3.5, 4)
    upper, lower = figure.subplots(2)
    lines = sensitivity((upper, lower), POINTS, against="bins")
    np.testing.assert_array_equal(lines["hard-ace", "dice"].get_xydata(), [[5, 0.88], [20, 0.87]])
    np.testing.assert_array_equal(lines["soft-ace", "ace"].get_xydata(), [[5, 0.07], [20, 0.06]])
    assert upper.get_xscale() == lower.get_xscale() == "log"
    assert [text.get_text() for text in lower.get_xticklabels()] == ["5", "20"]
    assert len(upper.collections) == 1  # a band for the method that has spreads
    band = upper.collections[0].get_paths()[0].vertices
    assert (band[:, 1].min(), band[:, 1].max()) == pytest.approx((0.85, 0.90))
    drawn = picture(figure)
    assert any(near(pixel, "#E69F00") for pixel in drawn.around(upper, 10, 0.875))
    assert any(near(pixel, "#009E73") for pixel in drawn.around(lower, 10, 0.065))


def test_the_whole_study_shares_scales_and_one_legend(picture):
    figure = new_figure(7.16, 3.6)
    weights = [point._replace(setting=weight) for point in POINTS for weight in (0.1, 1, 10)]
    axes = sensitivity_figure(figure, bins=POINTS, weights=weights)
    assert axes[0].get_ylim() == axes[2].get_ylim()
    assert [axes[1].get_xlabel(), axes[3].get_xlabel()] == ["bins", "weight λ"]
    assert len(figure.legends) == 1
    markers = {
        text.get_text(): line.get_marker()
        for text, line in zip(figure.legends[0].get_texts(), figure.legends[0].get_lines(), strict=True)
    }
    assert markers == {"hard-ace": axes[0].lines[0].get_marker(), "soft-ace": axes[0].lines[1].get_marker()}
    assert picture(figure).nothing_clipped()


def test_a_weight_of_zero_has_no_place_on_a_log_axis():
    with pytest.raises(ConfigError, match="positive; got 0"):
        sensitivity(tuple(new_figure().subplots(2)), [POINTS[0]._replace(setting=0)], against="lambda")
