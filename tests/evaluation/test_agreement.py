"""`evaluate` prints how far promises were kept, and keeps it in summary.json, as numpy has it from the maps."""

import json

import nibabel
import numpy as np
import pytest
from cohorts import make_case
from scipy.stats import spearmanr
from typer.testing import CliRunner

from segcal.cli import app


def run(folder, cases):
    for i in range(cases):
        for name, array in zip(("predictions", "labels"), make_case(i), strict=True):
            (folder / name).mkdir(exist_ok=True)
            nibabel.save(nibabel.Nifti1Image(array, np.eye(4)), folder / name / f"case_{i}.nii.gz")
    paths = (str(folder / name) for name in ("predictions", "labels"))
    result = CliRunner().invoke(app, ["evaluate", *paths, "--out", str(folder / "out")])
    assert result.exit_code == 0
    return result.stdout, json.loads((folder / "out" / "summary.json").read_text())["decisions"]


def dices(case, c):
    """Expected and actual Dice of the most probable class."""
    probabilities, labels = make_case(case)
    decided, p = probabilities.argmax(-1) == c, probabilities[..., c].astype(np.float64)
    true = labels == c
    return 2 * p[decided].sum() / (decided.sum() + p.sum()), 2 * (decided & true).sum() / (decided.sum() + true.sum())


def test_each_class_has_its_line_and_its_numbers(tmp_path):
    printed, kept = run(tmp_path, 6)
    assert set(kept) == {"class 1", "class 2", "all classes"}
    for c in (1, 2):
        expected, actual = np.array([dices(i, c) for i in range(6)]).T
        error, guess = np.abs(expected - actual).mean(), np.abs(actual - np.median(actual)).mean()
        rank = spearmanr(expected, actual).statistic
        assert kept[f"class {c}"] == pytest.approx(
            {
                "cases": 6,
                "expected": expected.mean(),
                "actual": actual.mean(),
                "bias": (expected - actual).mean(),
                "mean_absolute_error": error,
                "constant_guess": guess,
                "rank_correlation": rank,
            },
            abs=1e-6,
        )
        line = (
            f"class {c}: expected DSC {expected.mean():.3f}, actual {actual.mean():.3f}; mean absolute error "
            f"{error:.3f} (constant guess {guess:.3f}); rank correlation {rank:.2f}"
        )
        assert line in printed.splitlines()


def test_few_cases_have_numbers_but_no_line(tmp_path):
    printed, kept = run(tmp_path, 4)
    assert "expected DSC" not in printed
    assert kept["class 1"]["cases"] == 4
