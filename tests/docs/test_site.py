"""The site: it builds without a warning, loads nothing from elsewhere, and its reference is complete."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import segcal

pytestmark = pytest.mark.peers

ROOT = Path(__file__).parents[2]
LOADED = re.compile(r"""<(?:script|img|iframe|link)[^>]+(?:src|href)=["']?(?:https?:)?//[^>]+>""")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    quiet = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=quiet, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return folder


def test_no_page_loads_anything_from_elsewhere(site):
    pages = list(site.rglob("*.html"))
    assert len(pages) > 30
    assert [(page.name, found) for page in pages for found in LOADED.findall(page.read_text(encoding="utf-8"))] == []


def test_every_public_name_is_in_the_reference(site):
    text = "".join(page.read_text(encoding="utf-8") for page in (site / "reference").glob("*.html"))
    names = [name for name in segcal.__all__ if name != "__version__"]
    assert [name for name in names if not re.search(rf'id="segcal\.[\w.]+\.{name}"', text)] == []


def test_options_in_docstrings_are_lists_and_examples_code(site):
    text = (site / "reference" / "losses.html").read_text(encoding="utf-8")
    assert re.search(r"<li>\s*(?:<p>)?<code>absent_classes</code>: a class without", text)
    assert re.search(r'<span class="gp">&gt;&gt;&gt; </span>', text)
    assert "<blockquote>" not in text  # what Markdown makes of a bare prompt


def test_every_command_and_option_is_on_the_page_of_commands(site):
    text = (site / "cli.html").read_text(encoding="utf-8")
    for command in ("evaluate", "study run", "study plan", "calibrate fit", "datasets check"):
        shown = subprocess.run(
            [sys.executable, "-m", "segcal", *command.split(), "--help"], capture_output=True, text=True, check=True
        )
        section = text.split(f">segcal {command}</code>")[1].split("<h2")[0]
        options = set(re.findall(r"(?<=│ )[ *]*(--[a-z-]+)", shown.stdout)) - {"--help"}
        assert len(options) > 0
        assert [option for option in options if option not in section] == []


def test_notebooks_show_their_stored_pictures(site):
    page = site / "notebooks" / "audit.html"
    pictures = re.findall(r'<img[^>]+src="([^"]+\.png)"', page.read_text(encoding="utf-8"))
    assert len(pictures) >= 3
    assert all((page.parent / picture).is_file() for picture in pictures)
