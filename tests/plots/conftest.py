"""What the tests of figures share: evaluations made by hand, and a look at pixels."""

from __future__ import annotations

import sys

import matplotlib
import numpy as np
import pytest
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg

from segcal import Evaluation, OverlapCounts, ScoreSums, bin_statistics


@pytest.fixture(autouse=True)
def _nothing_global():
    """No drawing changes a setting, and none goes through pyplot."""
    before = dict(matplotlib.rcParams)
    yield
    assert dict(matplotlib.rcParams) == before
    pyplot = sys.modules.get("matplotlib.pyplot")
    assert pyplot is None or not pyplot.get_fignums()


@pytest.fixture
def make_evaluation():
    """Evaluations of random probabilities; `absent` are (case, class) pairs without a voxel."""

    def make(seed=0, cases=4, classes=("background", "liver", "tumour"), absent=(), sharpness=1.0):
        generator = torch.Generator().manual_seed(seed)
        logits = 2 * torch.randn(cases, len(classes), 500, generator=generator)
        labels = (logits + torch.randn(logits.shape, generator=generator)).argmax(1)
        for case, c in absent:
            labels[case][labels[case] == c] = 0
        probabilities = (sharpness * logits).softmax(1)
        return Evaluation(
            bin_statistics(probabilities, labels, bins=1200),
            OverlapCounts.of_classes(probabilities, labels),
            ScoreSums.of_classes(probabilities, labels),
            None,
            cases=tuple(f"case {i}" for i in range(cases)),
            classes=tuple(classes),
            has_background=True,
        )

    return make


class Picture:
    """A drawn figure: its pixels by the coordinates of the data."""

    def __init__(self, figure, dpi=200):
        figure.set_dpi(dpi)
        canvas = FigureCanvasAgg(figure)
        canvas.draw()
        self.figure = figure
        self.pixels = np.asarray(canvas.buffer_rgba())[..., :3].astype(int)

    def at(self, ax, x, y):
        across, up = ax.transData.transform((x, y))
        return tuple(self.pixels[len(self.pixels) - 1 - int(up), int(across)])

    def around(self, ax, x, y, reach=2):
        """All colors within a few pixels of a point, for lines that are thin."""
        across, up = (int(value) for value in ax.transData.transform((x, y)))
        row = len(self.pixels) - 1 - up
        window = self.pixels[row - reach : row + reach + 1, across - reach : across + reach + 1]
        return {tuple(color) for color in window.reshape(-1, 3)}

    def nothing_clipped(self):
        """Whether everything drawn lies within the figure, to a tenth of a point."""
        box = self.figure.get_tightbbox()
        width, height = self.figure.get_size_inches()
        slack = 0.1 / 72
        return box.x0 >= -slack and box.y0 >= -slack and box.x1 <= width + slack and box.y1 <= height + slack


@pytest.fixture
def picture():
    return Picture


def near(color, hexadecimal, tolerance=40):
    wanted = [int(hexadecimal[i : i + 2], 16) for i in (1, 3, 5)]
    return max(abs(a - b) for a, b in zip(color, wanted, strict=True)) <= tolerance


@pytest.fixture(name="near")
def near_fixture():
    return near
