"""A radar plot puts the best method of each axis on the rim, and says its value."""

import math

import numpy as np
import pytest

from segcal import ConfigError
from segcal.plots import new_figure, radar, radar_pair, radar_values

VALUES = {
    "dice-ce": {"DSC": 0.8, "macro ACE": 0.2, "micro ACE": 0.1},
    "soft-ace": {"DSC": 0.4, "macro ACE": 0.05, "micro ACE": 0.1},
}


def polar():
    figure = new_figure()
    return figure, figure.add_subplot(projection="polar")


def test_scores_are_divided_by_the_best_and_errors_divide_it():
    _, ax = polar()
    first, second = radar(ax, VALUES)
    np.testing.assert_allclose(first.get_ydata(), [1, 0.25, 1, 1])  # closed: the first comes again
    np.testing.assert_allclose(second.get_ydata(), [0.5, 1, 1, 0.5])
    np.testing.assert_allclose(first.get_xdata(), [0, 2 * np.pi / 3, 4 * np.pi / 3, 0])


def test_the_best_value_of_each_axis_is_readable():
    _, ax = polar()
    radar(ax, VALUES)
    assert [text.get_text() for text in ax.texts] == ["DSC ↑\n0.800", "macro ACE ↓\n0.050", "micro ACE ↓\n0.100"]


def test_lines_have_the_methods_colors_in_the_picture(picture, near):
    figure, ax = polar()
    radar(ax, VALUES)
    drawn = picture(figure)
    assert any(near(pixel, "#0072B2") for pixel in drawn.around(ax, 2 * np.pi / 3, 0.25))
    assert any(near(pixel, "#009E73") for pixel in drawn.around(ax, 2 * np.pi / 3, 1.0))
    assert any(near(pixel, "#009E73") for pixel in drawn.around(ax, 0, 0.5))


def test_a_missing_value_breaks_the_line_and_is_no_best(picture):
    values = {"a": {"DSC": math.nan, "ACE": 0.2, "ECE": math.nan}, "b": {"DSC": 0.5, "ACE": 0.4, "ECE": math.nan}}
    figure, ax = polar()
    first, second = radar(ax, values)
    np.testing.assert_allclose(first.get_ydata(), [math.nan, 1, math.nan, math.nan])
    np.testing.assert_allclose(second.get_ydata(), [1, 0.5, math.nan, 1])
    assert ax.texts[2].get_text() == "ECE ↓\nnone"
    picture(figure)


def test_methods_with_other_axes_are_refused():
    _, ax = polar()
    with pytest.raises(ConfigError, match="same axes"):
        radar(ax, {"a": {"DSC": 1.0}, "b": {"ACE": 1.0}})
    with pytest.raises(ConfigError, match="same axes"):
        radar(ax, {})


def test_values_are_those_of_the_summary_without_background(make_evaluation):
    evaluation = make_evaluation()
    values = radar_values({"m": evaluation})["m"]
    metrics = evaluation.case_metrics()
    assert values["DSC"] == pytest.approx(metrics["dice"][:, 1:].mean().item())
    assert values["macro MCE"] == pytest.approx(metrics["mce"][:, 1:].mean().item())
    assert list(values) == ["DSC", "macro ACE", "macro ECE", "macro MCE", "micro ACE", "micro ECE", "micro MCE"]


def test_complete_cases_have_a_plot_of_their_own_where_they_differ(make_evaluation, picture):
    long = "a method_of $long$ name " * 4
    parts = {"DSC+CE": make_evaluation(absent=[(1, 2)]), long: make_evaluation(absent=[(1, 2)], sharpness=0.5)}
    figure = new_figure(7.16, 3.9)
    axes = radar_pair(figure, parts)
    assert [ax.get_title() for ax in axes] == ["all cases (n = 4)", "complete cases (n = 3)"]
    (legend,) = figure.legends
    assert "Outward is better" in legend.get_title().get_text()
    assert [text.get_text().replace("\n", " ").strip() for text in legend.get_texts()] == ["DSC+CE", long.strip()]
    assert picture(figure).nothing_clipped()


def test_where_all_cases_are_complete_there_is_one_plot(make_evaluation, picture):
    figure = new_figure(3.5, 3.6)
    assert len(radar_pair(figure, {"dice-ce": make_evaluation()})) == 1
    assert picture(figure).nothing_clipped()


def test_without_a_complete_case_the_second_plot_is_empty(make_evaluation, picture):
    figure = new_figure(7.16, 3.9)
    _, second = radar_pair(figure, {"dice-ce": make_evaluation(cases=1, absent=[(0, 1)])})
    assert second.get_title() == "complete cases (n = 0)"
    assert np.isnan(second.lines[0].get_ydata()).all()
    picture(figure)
