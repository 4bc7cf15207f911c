"""A probability map shows each voxel where it lies, and outlines right and wrong in blue, red and yellow."""

import matplotlib
import numpy as np
import pytest

from segcal import ShapeError
from segcal.plots import new_figure, probability_map, probability_row

BLUE, RED, YELLOW = "#4DA6FF", "#FF3B30", "#FFE119"


@pytest.fixture
def slices():
    """12 by 8 voxels: predicted right at x 2-3, missed at x 5-6, invented at x 9-10, all at y 2-5."""
    probability, labels = np.zeros((12, 8)), np.zeros((12, 8), np.uint8)
    probability[2:4, 2:6] = probability[9:11, 2:6] = 0.9
    probability[5:7, 2:6] = 0.3
    labels[2:4, 2:6] = labels[5:7, 2:6] = 1
    return np.full((12, 8), 100.0), probability, labels


def test_contours_are_of_true_positives_false_negatives_and_false_positives(slices, picture, near):
    image, probability, labels = slices
    figure = new_figure(3.5, 2.5)
    ax = figure.add_subplot()
    probability_map(ax, image, probability, labels, title="dice-ce")
    drawn = picture(figure)
    for left, color in ((2, BLUE), (5, RED), (9, YELLOW)):
        edge = left + 0.15  # the line runs just inside the region
        assert any(near(pixel, color) for pixel in drawn.around(ax, edge, 4.0)), color
        others = {BLUE, RED, YELLOW} - {color}
        assert not any(near(pixel, other) for pixel in drawn.around(ax, edge, 4.0) for other in others)


def test_voxels_have_the_shade_of_their_probability_over_the_image(slices, picture):
    image, probability, labels = slices
    image[6:] = 0.0  # black and white halves
    figure = new_figure(3.5, 2.5)
    ax = figure.add_subplot()
    probability_map(ax, image, probability, labels)
    drawn = picture(figure)
    assert drawn.at(ax, 0.5, 0.5) == (255, 255, 255)  # no probability: the image alone
    assert drawn.at(ax, 11.5, 0.5) == (0, 0, 0)
    viridis = np.array(matplotlib.colormaps["viridis"](0.8 * 0.9)[:3]) * 255
    np.testing.assert_allclose(drawn.at(ax, 3.0, 4.0), 0.7 * viridis + 0.3 * 255, atol=4)
    np.testing.assert_allclose(drawn.at(ax, 10.0, 4.0), 0.7 * viridis, atol=4)


def test_the_first_axis_runs_right_the_second_up_in_millimeters(picture):
    image = np.zeros((4, 2))
    image[3, 1] = 1.0  # the far end of both
    figure = new_figure()
    ax = figure.add_subplot()
    probability_map(ax, image, np.zeros((4, 2)), np.zeros((4, 2)), spacing_mm=(1.0, 3.0))
    drawn = picture(figure)
    assert drawn.at(ax, 3.5, 4.5) == (255, 255, 255)
    assert drawn.at(ax, 0.5, 1.5) == (0, 0, 0)
    box = ax.get_window_extent()
    assert box.height / box.width == pytest.approx(6 / 4)


def test_a_given_prediction_wins_over_the_threshold(slices, picture, near):
    image, probability, labels = slices
    figure = new_figure(3.5, 2.5)
    ax = figure.add_subplot()
    probability_map(ax, image, probability, labels, labels)
    drawn = picture(figure)
    assert any(near(pixel, BLUE) for pixel in drawn.around(ax, 5.15, 4.0))


def test_a_row_shows_the_image_first_and_then_each_method(slices, picture):
    image, probability, labels = slices
    figure = new_figure(7.16, 2.5)
    long = "a method_of $long$ name " * 3
    axes = probability_row(figure, image, {"dice-ce": probability, long: probability / 2}, labels, title="case$1_a")
    assert [ax.get_title().replace("\n", " ").strip() for ax in axes] == ["case$1_a", "dice-ce", long.strip()]
    assert not any(ax.title.get_parse_math() for ax in axes)
    np.testing.assert_array_equal(axes[1].images[1].get_array(), probability.T)
    np.testing.assert_array_equal(axes[2].images[1].get_array(), probability.T / 2)
    drawn = picture(figure)
    assert drawn.nothing_clipped()
    (legend,) = figure.legends
    assert [t.get_text() for t in legend.get_texts()] == ["labels", "true positive", "false negative", "false positive"]


@pytest.mark.parametrize("image", [None, np.full((3, 3), np.nan), np.zeros((3, 3), np.int16)])
def test_a_map_needs_no_image_no_labels_and_no_contrast(image, picture):
    figure = new_figure()
    probability_row(figure, image, {"dice-ce": np.zeros((3, 3))}, np.zeros((3, 3)))
    assert picture(figure).nothing_clipped()


def test_slices_of_other_shapes_are_refused(slices):
    image, probability, labels = slices
    with pytest.raises(ShapeError, match=r"labels must have the probabilities' shape \(12, 8\); got \(8, 12\)"):
        probability_map(new_figure().add_subplot(), image, probability, labels.T)
