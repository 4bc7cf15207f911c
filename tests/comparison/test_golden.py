"""Evaluation files of version 0.2 load unchanged and give the same tables, byte for byte.

`tests/golden` was written once, by 0.2: two evaluations of eight made-up cases, one of which lacks a class, and the
tables of both. Written anew since: pooled micro averages come before those of the paper, which are named so; occupied
bins, NLL and Brier score are beside the ACE.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from segcal import Evaluation, compare
from segcal.comparison.tables import write_comparison
from segcal.evaluation.tables import summary_table, to_markdown

GOLDEN = Path(__file__).parents[1] / "golden"


@pytest.fixture(scope="module")
def found():
    return {name: Evaluation.load(GOLDEN / f"{name}.npz") for name in ("sharp", "true")}


def test_the_summary_is_the_same(found):
    table = summary_table(found["sharp"], background=True)
    assert to_markdown(table) + "\n" == (GOLDEN / "sharp.md").read_text(encoding="utf-8")


def test_the_comparison_is_the_same(found, tmp_path):
    written = write_comparison(compare(found), tmp_path)
    assert {path.name for path in written} == {"comparison.csv", "comparison.md", "comparison.tex"}
    for path in written:
        assert path.read_text(encoding="utf-8") == (GOLDEN / path.name).read_text(encoding="utf-8"), path.name
