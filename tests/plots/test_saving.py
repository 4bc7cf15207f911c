"""Figures are written whole, in three formats, the same bytes each time."""

import io
import xml.etree.ElementTree as ElementTree

import pytest
from PIL import Image

from segcal import ConfigError
from segcal.plots import figure_bytes, new_figure, save_figure
from segcal.plots.style import add_title


def draw():
    figure = new_figure(3.5, 2.0)
    ax = figure.add_subplot()
    ax.plot([0, 1], [0, 1])
    ax.bar([0.5], [0.5], hatch="//")
    add_title(ax, "case a$b_c")
    return figure


@pytest.mark.parametrize("suffix", [".png", ".svg", ".pdf"])
def test_the_same_drawing_gives_the_same_bytes_and_no_other_file(tmp_path, suffix):
    first = save_figure(draw(), tmp_path / f"one{suffix}")
    again = save_figure(draw(), tmp_path / f"two{suffix}")
    assert first.read_bytes() == again.read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"one{suffix}", f"two{suffix}"]


def test_a_png_has_the_size_of_its_resolution_and_no_metadata_of_ours():
    image = Image.open(io.BytesIO(figure_bytes(draw())))
    image.load()
    assert image.size == (1050, 600)
    assert round(image.info["dpi"][0]) == 300
    assert "Software" not in image.info


def test_text_in_an_svg_is_text_and_has_no_date():
    content = figure_bytes(draw(), "svg").decode()
    root = ElementTree.fromstring(content)
    texts = ["".join(node.itertext()) for node in root.iter("{http://www.w3.org/2000/svg}text")]
    assert "case a$b_c" in texts
    assert "date" not in content.lower().replace("dates", "")


def test_a_pdf_has_its_fonts_as_truetype_and_no_date():
    content = figure_bytes(draw(), "pdf")
    assert content.startswith(b"%PDF-")
    assert content.rstrip().endswith(b"%%EOF")
    assert b"/Type3" not in content
    assert b"CIDFontType2" in content
    assert b"CreationDate" not in content


@pytest.mark.parametrize("name", ["figure.jpg", "figure"])
def test_other_formats_are_refused(tmp_path, name):
    with pytest.raises(ConfigError, match="the format of a figure must be one of 'png', 'svg', 'pdf'"):
        save_figure(draw(), tmp_path / name)
    assert not list(tmp_path.iterdir())
