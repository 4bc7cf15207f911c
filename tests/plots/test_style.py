"""A method keeps its color, text keeps its letters, and settings stay as they were."""

import matplotlib
import pytest

from segcal.plots import method_colors, new_figure
from segcal.plots.style import default_settings, legend_below, number, width_of, wrap

BLUE, ORANGE, GREEN, VERMILION, PURPLE = "#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7"  # Okabe and Ito


@pytest.mark.parametrize(
    ("name", "color"),
    [
        ("dice-ce", BLUE),
        ("ce", PURPLE),
        ("hard-ace", ORANGE),
        ("soft-ace", GREEN),
        ("temperature", VERMILION),
        ("dice-ce + temperature", VERMILION),
    ],
)
def test_the_papers_methods_have_their_colors(name, color):
    assert method_colors(["mine", name])[name] == color


@pytest.mark.parametrize("name", ["mine", "DSC+CE", "hard-ace 50 bins", "dice", "", "$x_1$"])
def test_other_names_have_none_of_their_colors(name):
    assert method_colors([name])[name] not in {BLUE, ORANGE, GREEN, VERMILION, PURPLE}


def test_colors_differ_and_come_in_order():
    names = ["a", "b", "dice-ce", "temperature", "dice-ce + temperature"]
    colors = method_colors(names)
    assert list(colors) == names
    assert len(set(colors.values())) == 5
    assert colors["dice-ce"] == BLUE
    assert method_colors(["a", "b"]) == {name: colors[name] for name in "ab"}


@pytest.mark.parametrize("text", ["a few words that do not fit", "nospaceanywhereinthisname", "W" * 30, "two\nlines"])
def test_wrapped_lines_are_narrow_and_lose_no_letter(text):
    lines = wrap(text, width_in=0.6, size_pt=8).split("\n")
    assert all(width_of(line, 8) <= 0.6 for line in lines)
    assert "".join(lines).replace(" ", "") == "".join(text.split())


def test_a_letter_of_courier_size_has_the_width_that_the_font_says():
    assert width_of("M", 72) == pytest.approx(0.863, abs=0.02)  # DejaVu Sans: 1767 of 2048 units to the em


def test_small_errors_keep_two_digits():
    assert [number(x) for x in (0.25, 0.0123, 0.0012, 0.0, 1.0)] == ["0.250", "0.012", "0.0012", "0.000", "1.000"]


def test_default_settings_end_with_the_block():
    with matplotlib.rc_context({"font.size": 33.0}):
        with default_settings():
            assert matplotlib.rcParams["font.size"] == 10.0
        assert matplotlib.rcParams["font.size"] == 33.0


def test_a_legend_shows_names_that_begin_with_an_underscore_or_hold_dollars():
    figure = new_figure()
    lines = figure.add_subplot().plot([0, 1], [[0, 1], [1, 2]])
    texts = legend_below(figure, lines, ["_hidden", "a$b$c"]).get_texts()
    assert [text.get_text() for text in texts] == ["_hidden", "a$b$c"]
    assert not any(text.get_parse_math() for text in texts)
