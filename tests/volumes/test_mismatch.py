"""Folders of which nothing pairs, links to nothing, and results that would lie among the inputs."""

import unicodedata

import nibabel
import numpy as np
import pytest
from typer.testing import CliRunner

from segcal import evaluate
from segcal.cli import app

CLASSES = np.full((4, 5, 6, 2), 0.5, np.float32)
LABELS = np.zeros((4, 5, 6), np.uint8)


def save(path, array):
    path.parent.mkdir(parents=True, exist_ok=True)
    nibabel.save(nibabel.Nifti1Image(array, np.eye(4)), path)


def run(folder, *options, out="out"):
    arguments = ["evaluate", str(folder / "P"), str(folder / "L"), "--out", str(folder / out), *options]
    return CliRunner().invoke(app, arguments)


def told(result):
    return " ".join(result.output.split())


def make(folder, predictions, labels):
    for name in predictions:
        save(folder / "P" / f"{name}.nii.gz", CLASSES)
    for name in labels:
        save(folder / "L" / f"{name}.nii.gz", LABELS)


def test_formats_that_are_not_read_are_counted_and_those_that_are_listed(tmp_path):
    make(tmp_path, (), ("a", "b"))
    for name in ("a.jpg", "b.JPG", "c.vtk", "d.img", "d.hdr", ".hidden", "below/e.mesh.vtk"):
        path = tmp_path / "P" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"x")
    result = run(tmp_path)
    assert result.exit_code == 2
    assert "must be files of the formats .nii.gz, .nii, .npz, .npy" in told(result)
    assert "P holds 2 .jpg, 2 .vtk, 1 .hdr, 1 .img" in told(result)
    arguments = ["calibrate", "apply", str(tmp_path / "c.json"), str(tmp_path / "P"), "--out", str(tmp_path / "maps")]
    from segcal.calibrators import Temperature

    Temperature(2.0).save(tmp_path / "c.json")
    assert "it holds 2 .jpg, 2 .vtk, 1 .hdr, 1 .img" in told(CliRunner().invoke(app, arguments))


@pytest.mark.parametrize(
    ("predictions", "labels", "sentence"),
    [
        (
            ("Jos\u00e9_1", "Jos\u00e9_2"),
            None,
            "the way Unicode writes accents (NFC or NFD): 'Jos\\xe9_1' and 'Jose\\u0301_1'",
        ),
        (("CASE_01", "CASE_02"), ("case_01", "case_02"), "upper and lower case: 'CASE_01' and 'case_01'"),
        (("c_01_out", "c_02_out"), ("c_01", "c_02"), "an ending: those of predictions have '_out'"),
        (("c_01", "c_02"), ("c_01-truth", "c_02-truth"), "an ending: those of labels have '-truth'"),
        (("net_c_01", "net_c_02"), ("c_01", "c_02"), "a beginning: those of predictions have 'net_'"),
        (("x", "y"), ("1", "2"), "None of them match"),
    ],
)
def test_names_that_nearly_match_are_shown_with_what_differs(tmp_path, predictions, labels, sentence):
    labels = labels or [unicodedata.normalize("NFD", name) for name in predictions]
    make(tmp_path, predictions, labels)
    result = run(tmp_path)
    assert result.exit_code == 2
    assert sentence in told(result)
    assert f"P has 2, as {predictions[0]}.nii.gz, {predictions[1]}.nii.gz" in told(result)
    save(tmp_path / "P" / "both.nii.gz", CLASSES)
    save(tmp_path / "L" / "both.nii.gz", LABELS)
    assert (sentence in told(run(tmp_path))) == (sentence != "None of them match")


@pytest.mark.parametrize("side", ["P", "L"])
def test_a_link_to_nothing_is_a_case_that_failed(tmp_path, side):
    make(tmp_path, ("a", "b"), ("a", "b"))
    lost = tmp_path / side / "b.nii.gz"
    lost.unlink()
    lost.symlink_to(tmp_path / "gone.nii.gz")
    result = run(tmp_path)
    assert result.exit_code == 1
    assert "b: FileError: b: b.nii.gz must be a file; it is a link to what does not exist" in told(result)
    outcome = evaluate(tmp_path / "P", tmp_path / "L", tmp_path / "again")
    assert outcome.evaluation.cases == ("a",)


@pytest.mark.parametrize("inside", ["P", "P/results", "L", "L/results"])
def test_results_never_lie_among_the_inputs(tmp_path, inside):
    """There evaluation.npz would be taken for a prediction."""
    make(tmp_path, ("a",), ("a",))
    result = run(tmp_path, out=inside)
    assert result.exit_code == 2
    assert "--out must lie outside of the" in told(result)
    assert not list(tmp_path.rglob("*.npz"))
