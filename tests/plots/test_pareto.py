"""Every marker stands where its numbers are, and the front is what its definition says."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.lines import Line2D

from segcal import ConfigError
from segcal.evaluation.diagrams import pareto_front
from segcal.plots import TradeOff, method_colors, new_figure, pareto, pareto_figure

NAN = math.nan
RUNS = [
    TradeOff("dice-ce", 0.86, 0.15),
    TradeOff("dice-ce", 0.88, 0.13),
    TradeOff("ce", 0.85, 0.16),
    TradeOff("hard-ace", 0.85, 0.10),
    TradeOff("hard-ace", 0.86, 0.12),
    TradeOff("soft-ace", 0.84, 0.07),
    TradeOff("soft-ace", 0.85, 0.09),
]
MEANS = {"dice-ce": (0.87, 0.14), "ce": (0.85, 0.16), "hard-ace": (0.855, 0.11), "soft-ace": (0.845, 0.08)}


def beats(a, b):
    return a[0] >= b[0] and a[1] <= b[1] and (a[0] > b[0] or a[1] < b[1])


# Few values, so that many are equal.
FEW = st.sampled_from([0.0, 0.25, 0.5, 0.75, 1.0, NAN])


@given(st.lists(st.tuples(FEW, FEW), max_size=12))
def test_the_front_holds_those_that_no_other_beats(points):
    valued = {i for i, point in enumerate(points) if not np.isnan(point).any()}
    wanted = {i for i in valued if not any(beats(points[j], points[i]) for j in valued)}
    front = pareto_front(points)
    assert set(front) == wanted
    assert len(front) == len(wanted)
    assert [points[i][0] for i in front] == sorted(points[i][0] for i in front)


def test_the_front_of_many_points():
    points = [tuple(point) for point in np.random.default_rng(0).random((300, 2))]
    wanted = {i for i, point in enumerate(points) if not any(beats(other, point) for other in points)}
    assert set(pareto_front(points)) == wanted


@pytest.mark.parametrize(
    ("points", "front"),
    [
        ([], []),
        ([(0.8, 0.1)], [0]),
        ([(NAN, 0.1), (0.8, NAN)], []),
        ([(0.8, 0.1), (0.9, 0.2), (0.8, 0.1)], [0, 2, 1]),  # equal points together
        ([(0.8, 0.1), (0.8, 0.2), (0.9, 0.2), (0.9, NAN)], [0, 2]),
    ],
)
def test_small_fronts(points, front):
    assert pareto_front(points) == front


def test_runs_means_and_front_stand_where_their_numbers_are(picture, near):
    figure = new_figure()
    ax = figure.add_subplot()
    made = pareto(ax, RUNS, title="ACDC")
    assert list(made) == [*MEANS, "front"]
    for method, mean in MEANS.items():
        np.testing.assert_allclose(made[method].get_xydata(), [mean])
        assert made[method].get_color() == method_colors(MEANS)[method]
    dots = [line for line in ax.lines if line.get_alpha() is not None]
    np.testing.assert_array_equal(np.concatenate([line.get_xydata() for line in dots]), [run[1:] for run in RUNS])
    front = made["front"].get_xydata()
    np.testing.assert_allclose(front, [MEANS["soft-ace"], MEANS["hard-ace"], MEANS["dice-ce"]])
    assert (ax.get_xlabel(), ax.get_ylabel(), ax.get_title()) == ("DSC ↑", "macro ACE ↓", "ACDC")
    drawn = picture(figure)
    assert near(drawn.at(ax, *MEANS["soft-ace"]), "#009E73")
    # From the first of the front the line goes up, then right: what lies above or left of it is beaten.
    gray = [any(near(pixel, "#8C8C8C") for pixel in drawn.around(ax, *at)) for at in ((0.845, 0.11), (0.855, 0.08))]
    assert gray == [True, False]
    assert drawn.nothing_clipped()


def test_a_method_with_a_run_without_value_has_no_mean_and_is_not_on_the_front(picture):
    figure = new_figure()
    made = pareto(figure.add_subplot(), [*RUNS, TradeOff("new", 0.99, 0.01), TradeOff("new", NAN, 0.01)])
    assert np.isnan(made["new"].get_xydata()).any()
    assert len(made["front"].get_xydata()) == 3
    picture(figure)


@pytest.mark.parametrize(
    ("runs", "front"),
    [
        ([TradeOff("a", 0.8, 0.1)], [(0.8, 0.1)]),
        ([TradeOff("a", 0.8, 0.1), TradeOff("b", 0.8, 0.1)], [(0.8, 0.1)] * 2),
        ([TradeOff("a", NAN, 0.1)], None),
        ([], None),
    ],
)
def test_few_runs_can_be_drawn(runs, front, picture):
    figure = new_figure()
    axes = pareto_figure(figure, {"": runs})
    lines = [line for line in axes[""].lines if line.get_drawstyle() == "steps-pre"]
    assert [line.get_xydata().tolist() for line in lines] == ([] if front is None else [[list(p) for p in front]])
    assert picture(figure).nothing_clipped()


def test_panels_share_colors_and_one_legend(picture):
    figure = new_figure(7.16, 4.5)
    panels = {"ACDC": RUNS[3:], "KiTS": RUNS, "BraTS": RUNS[:3]}
    axes = pareto_figure(figure, panels)
    assert list(axes) == list(panels)
    places = [ax.get_subplotspec() for ax in axes.values()]
    assert [(place.rowspan.start, place.colspan.start) for place in places] == [(0, 0), (0, 1), (1, 0)]
    assert [ax.get_ylabel() != "" for ax in axes.values()] == [True, False, True]
    assert [ax.get_xlabel() != "" for ax in axes.values()] == [False, True, True]
    (legend,) = figure.legends
    names = [text.get_text() for text in legend.get_texts()]
    assert names == ["hard-ace", "soft-ace", "dice-ce", "ce", "front"]
    shown = {name: (line.get_color(), line.get_marker()) for name, line in zip(names, legend.get_lines(), strict=False)}
    for ax in axes.values():
        for line in ax.lines:
            if line.get_alpha() is None and line.get_linestyle() == "None":
                assert (line.get_color(), line.get_marker()) in shown.values()
    assert "mean of a method's runs" in legend.get_title().get_text()
    assert picture(figure).nothing_clipped()


def test_twenty_methods_can_be_told_apart(picture):
    figure = new_figure(7.16, 3.6)
    runs = [TradeOff(f"weight {i}", 0.8 + i / 200, 0.1 + i / 100) for i in range(20)]
    made = pareto(figure.add_subplot(), runs)
    means = [artist for artist in made.values() if isinstance(artist, Line2D) and artist is not made["front"]]
    assert len({(line.get_color(), line.get_marker()) for line in means}) == 20
    figure = new_figure(7.16, 3.6)
    pareto_figure(figure, {"ACDC": runs})
    assert figure.legends[0].get_title().get_text() == ""  # one run a method: nothing to explain
    assert len(figure.legends[0].get_texts()) == 21
    assert picture(figure).nothing_clipped()
    sizes = [text.get_fontsize() for text in figure.findobj(match=lambda each: hasattr(each, "get_fontsize"))]
    assert min(sizes) >= 7


def test_names_and_panels_that_do_not_fit_are_refused():
    ax = new_figure().add_subplot()
    with pytest.raises(ConfigError, match="'ce' has none"):
        pareto(ax, RUNS[:3], colors={"dice-ce": "#000000"})
    with pytest.raises(ConfigError, match="no method may be called 'front'"):
        pareto(ax, [TradeOff("front", 0.8, 0.1)])
    with pytest.raises(ConfigError, match="at least one; got none"):
        pareto_figure(new_figure(), {})
