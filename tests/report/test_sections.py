"""Further sections of the report: what they hold is shown, escaped, and linked at the top."""

import re
import shutil

import pytest
import torch
from handmade import evaluation_of
from typer.testing import CliRunner

from segcal import build_report, evaluate_lesions
from segcal.cli import app
from segcal.evaluation.tables import Cell, Table
from segcal.report import ReportSection


@pytest.fixture
def evaluation():
    return evaluation_of(torch.full((6, 2), 0.1), torch.full((6, 2), 0.8))


def test_a_section_is_shown_and_linked_and_its_text_escaped(tmp_path, evaluation):
    table = Table("Sizes <b>", ("class", "ACE"), ((Cell("a & b"), Cell("0.100", "[0.05, 0.20]", stars="*")),))
    section = ReportSection("sizes", "By <size>", "Lead.", (table,), notes=("Read <this>.",))
    page = build_report({"mine": evaluation}, tmp_path / "r.html", sections=[section], resamples=10).read_text()
    assert '<a href="#sizes">By &lt;size&gt;</a>' in page
    assert "Sizes &lt;b&gt;" in page
    assert "a &amp; b" in page
    assert re.search(r'0\.100<span class="stars">\*</span><span class="fine"[^>]*>\[0\.05, 0\.20\]', page)
    assert "Read &lt;this&gt;." in page


def test_without_sections_the_page_has_none(tmp_path, evaluation):
    page = build_report({"mine": evaluation}, tmp_path / "r.html", resamples=10).read_text()
    assert 'class="plates' not in page


def test_lesions_have_a_section_with_figures_and_tables(tmp_path, evaluation):
    import numpy as np

    for name in ("P", "L"):
        (tmp_path / name).mkdir()
    for i in range(5):
        p = np.zeros((8, 8, 8), np.float32)
        p[2:4, 2:4, 2:4], p[6, 6, 6] = 0.9, 0.6
        np.save(tmp_path / "P" / f"case_{i}.npy", np.stack([1 - p, p]))
        np.save(tmp_path / "L" / f"case_{i}.npy", (p > 0.8).astype(np.uint8))
    evaluate_lesions(tmp_path / "P", tmp_path / "L", tmp_path / "found", resamples=20)
    evaluation.save(tmp_path / "evaluation.npz")
    arguments = ["report", str(tmp_path / "evaluation.npz"), "--out", str(tmp_path / "r.html")]
    done = CliRunner().invoke(app, [*arguments, "--lesions", f"network={tmp_path / 'found'}"])
    assert done.exit_code == 0, done.output
    page = (tmp_path / "r.html").read_text()
    assert page.count("data:image/svg+xml;base64,") == 2
    assert "Lesions in 5 cases, 5 bins" in page
    assert "Sensitivity at false positives per case" in page
    for name in ("a", "b"):
        shutil.copytree(tmp_path / "found", tmp_path / name / "found")
    lesions = ["--lesions", str(tmp_path / "a" / "found"), "--lesions", str(tmp_path / "b" / "found")]
    done = CliRunner().invoke(app, [*arguments, *lesions])
    assert done.exit_code == 0, done.output
    page = (tmp_path / "r.html").read_text()
    assert "a/found" in page
    assert "b/found" in page
    done = CliRunner().invoke(app, [*arguments, "--lesions", f"x={lesions[1]}", "--lesions", f"x={lesions[3]}"])
    assert done.exit_code == 2
    assert "results must have different names; got x more than once" in done.output
    done = CliRunner().invoke(app, [*arguments, "--lesions", str(tmp_path)])
    assert done.exit_code == 2
    assert "--lesions must be a folder that `segcal lesions` wrote" in done.output
