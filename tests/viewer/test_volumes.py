"""Volumes for the browser hold what the files hold, turned to right, front and head, and cropped to what is seen."""

from __future__ import annotations

from pathlib import Path

import nibabel
import numpy as np
import pytest
from cohorts import STRAIGHT, make_case, run, save, write_cohort

from segcal import ConfigError, FileError, GridError
from segcal.evaluation.evaluation import Evaluation
from segcal.evaluation.options import Options
from segcal.plots.maps import options_of
from segcal.viewer import case_volumes
from segcal.volumes import CaseFiles, find_predictions
from segcal.volumes.regions import Regions

TURNED = np.array([[0.0, -2.0, 0.0, 30.0], [0.0, 0.0, 3.0, -7.0], [-1.5, 0.0, 0.0, 5.0], [0.0, 0.0, 0.0, 1.0]])


def in_bytes(probabilities):
    return np.floor(np.asarray(probabilities, dtype=np.float64) * 255 + 0.5).astype(np.uint8)


def canonical(array, affine):
    """By nibabel, independently of us."""
    return nibabel.as_closest_canonical(nibabel.Nifti1Image(array, affine))


def write(folder, probabilities, labels, affine=STRAIGHT, name="one"):
    folder.mkdir(exist_ok=True)
    save(folder / "P" / f"{name}.nii.gz", probabilities, affine)
    save(folder / "L" / f"{name}.nii.gz", labels, affine)
    return CaseFiles(name, (folder / "P" / f"{name}.nii.gz",), folder / "L" / f"{name}.nii.gz")


@pytest.mark.parametrize("affine", [STRAIGHT, TURNED], ids=["straight", "turned"])
def test_bytes_are_those_of_the_files_in_the_axes_of_the_body(tmp_path, affine):
    probabilities, labels = make_case(3)
    found = case_volumes("one", {"net": write(tmp_path, probabilities, labels, affine)})
    true = canonical(labels, affine)
    assert found.classes == ("class 1", "class 2")  # not the background
    for c in (1, 2):
        expected = canonical(in_bytes(probabilities[..., c]), affine)
        assert np.array_equal(found.probabilities[0, c - 1], expected.dataobj)
        assert np.array_equal(found.labels[c - 1], np.asarray(true.dataobj) == c)
    assert found.oriented
    assert found.affine == pytest.approx(true.affine)
    assert found.spacing_mm == pytest.approx(true.header.get_zooms())


def test_volumes_are_written_as_nifti(tmp_path):
    probabilities, labels = make_case(3)
    found = case_volumes("one", {"net": write(tmp_path, probabilities, labels)})
    probability, label = found.nifti("probability", 0, 1), found.nifti("label", None, 0)
    stored = nibabel.Nifti1Image.from_bytes(probability)
    np.testing.assert_array_equal(stored.dataobj, in_bytes(probabilities[..., 2]))
    assert stored.affine == pytest.approx(STRAIGHT)
    x, y, z = 4, 3, 2
    at = 352 + x + found.shape[0] * (y + found.shape[1] * z)  # as viewer.js reads it: a header, then x fastest
    assert probability[at] == in_bytes(probabilities[x, y, z, 2])
    assert label[at] == (labels[x, y, z] == 1)
    assert len(label) == 352 + labels.size
    with pytest.raises(ConfigError, match="one: the volume must be an image, a label or a probability"):
        found.nifti("image")


def test_the_box_is_what_is_seen_and_ten_millimeters_around_it_and_lies_where_it_did(tmp_path):
    """Spacing 2 mm, 1 mm, 4 mm: margins of 5, 10 and 3 voxels; at the border of the volume there is no more."""
    labels = np.zeros((40, 40, 20), np.uint8)
    labels[10:13, 20:22, 1:3] = 1
    certain = labels.astype(np.float32)
    certain[20, 25, 9] = 0.06  # is seen
    certain[35, 35, 15] = 0.04  # is not
    affine = np.diag([2.0, 1.0, 4.0, 1.0])
    whole = case_volumes("one", {"net": write(tmp_path, np.stack([1 - certain, certain], -1), labels, affine)})
    box = whole.cropped()
    assert box.shape == (21, 26, 13)
    corner = box.affine @ [5, 10, 1, 1]  # the first labeled voxel
    assert corner == pytest.approx(affine @ [10, 20, 1, 1])
    assert box.labels[0, 5, 10, 1] == 1
    assert box.labels.sum() == labels.sum()
    empty = np.zeros_like(certain)
    nothing = write(tmp_path, np.stack([1 - empty, empty], -1), labels * 0, affine, "none")
    assert case_volumes("none", {"net": nothing}).cropped().shape == (40, 40, 20)


def test_two_methods_have_their_classes_in_the_order_asked_for(tmp_path):
    probabilities, labels = make_case(1)
    one = write(tmp_path, probabilities, labels)
    names = Options(class_names=((0, "background"), (1, "liver"), (2, "tumor")))
    found = case_volumes("one", {"old": one, "new": one}, options=names, classes=["tumor", "liver"])
    assert (found.methods, found.classes) == (("old", "new"), ("tumor", "liver"))
    assert np.array_equal(found.probabilities[1, 0], in_bytes(probabilities[..., 2]))
    assert np.array_equal(found.labels[0], labels == 2)
    with pytest.raises(ConfigError, match="classes must be those of old, which are background, liver, tumor; got 'x'"):
        case_volumes("one", {"old": one}, options=names, classes=["x"])


def test_regions_overlap(tmp_path):
    probabilities, labels = make_case(2)
    regions = Regions({"whole": (1, 2), "core": (2,)})
    found = case_volumes("one", {"net": write(tmp_path, probabilities, labels)}, options=Options(regions=regions))
    assert found.classes == ("whole", "core")
    assert np.array_equal(found.labels[0], labels > 0)
    expected = probabilities[..., 1] + probabilities[..., 2]
    assert np.abs(found.probabilities[0, 0] / 255 - expected).max() <= 0.5001 / 255
    assert (found.labels[1] <= found.labels[0]).all()


def test_a_single_channel_of_logits_is_one_class(tmp_path):
    labels = make_case(2, classes=2)[1]
    logits = np.random.default_rng(0).normal(size=labels.shape).astype(np.float32)
    found = case_volumes("one", {"net": write(tmp_path, logits, labels)}, options=Options(logits=True))
    assert found.classes == ("class 1",)
    assert np.abs(found.probabilities[0, 0] / 255 - 1 / (1 + np.exp(-logits))).max() <= 0.5001 / 255
    assert np.array_equal(found.labels[0], labels)


def test_a_picture_without_an_affine_has_its_rows_from_the_top(tmp_path):
    certain = np.random.default_rng(0).random((5, 8)).astype(np.float32)
    np.save(tmp_path / "p.npy", np.stack([1 - certain, certain]))
    np.save(tmp_path / "l.npy", (certain > 0.5).astype(np.uint8))
    found = case_volumes("one", {"net": CaseFiles("one", (tmp_path / "p.npy",), tmp_path / "l.npy")})
    assert not found.oriented
    assert found.shape == (8, 5, 1)  # columns run across
    bottom_left = found.probabilities[0, 0, 0, 0, 0]
    assert bottom_left == in_bytes(certain[4, 0])


def test_predictions_without_labels_have_none(tmp_path):
    probabilities, labels = make_case(4)
    write(tmp_path, probabilities, labels, TURNED)
    save(tmp_path / "I" / "one.nii.gz", probabilities[..., 0], TURNED)
    (files,) = find_predictions(tmp_path / "P")
    found = case_volumes("one", {"net": files}, image=tmp_path / "I" / "one.nii.gz")
    assert found.labels is None
    assert np.array_equal(found.probabilities[0, 1], canonical(in_bytes(probabilities[..., 2]), TURNED).dataobj)
    assert found.image.shape == found.shape
    assert found.facts()["hasLabels"] is False
    assert found.facts()["hasImage"] is True


def test_the_image_goes_from_black_to_white_but_for_extremes(tmp_path):
    """Of 0, 1, ..., 503 those at the minimum count for nothing; percentiles of 1 to 503 are 3.51 and 500.49."""
    probabilities, labels = make_case(4)
    values = np.arange(labels.size, dtype=np.int16).reshape(labels.shape)
    save(tmp_path / "image.nii.gz", values, STRAIGHT)
    found = case_volumes("one", {"net": write(tmp_path, probabilities, labels)}, image=tmp_path / "image.nii.gz")
    expected = np.rint(np.clip((values - 3.51) / (500.49 - 3.51), 0, 1) * 255)
    assert np.abs(found.image - expected).max() <= 1
    assert (found.image.min(), found.image.max()) == (0, 255)


def test_an_image_elsewhere_or_of_no_kind_is_refused(tmp_path):
    probabilities, labels = make_case(4)
    files = {"net": write(tmp_path, probabilities, labels)}
    save(tmp_path / "image.nii.gz", labels[:4], STRAIGHT)
    with pytest.raises(GridError, match=r"one: the image image\.nii\.gz must lie on the grid of the labels"):
        case_volumes("one", files, image=tmp_path / "image.nii.gz")
    with pytest.raises(FileError, match=r"one: none\.nii\.gz must be a file"):
        case_volumes("one", files, image=tmp_path / "none.nii.gz")
    with pytest.raises(ConfigError, match="predictions of at least one method"):
        case_volumes("one", {})


def test_methods_must_lie_on_one_grid(tmp_path):
    probabilities, labels = make_case(4)
    one = write(tmp_path / "a", probabilities, labels)
    other = write(tmp_path / "b", probabilities[:5], labels[:5])
    with pytest.raises(GridError, match="one: methods must lie on one grid; new has"):
        case_volumes("one", {"old": one, "new": other})


def test_ignored_voxels_have_no_label(tmp_path):
    probabilities, labels = make_case(4)
    labels[0] = 7
    found = case_volumes("one", {"net": write(tmp_path, probabilities, labels)}, options=Options(ignore_index=7))
    assert found.labels[:, 0].sum() == 0
    assert np.array_equal(found.labels[0, 1:], labels[1:] == 1)


def test_what_is_shown_is_what_was_measured_through_a_calibrator_as_well(tmp_path):
    """The mean of bytes is the mean confidence that the evaluation found, to half a step."""
    from typer.testing import CliRunner

    from segcal.cli import app

    folder = write_cohort(tmp_path, 3)
    fit = ["calibrate", "fit", str(folder / "P"), str(folder / "L"), "--method", "temperature"]
    assert CliRunner().invoke(app, [*fit, "--out", str(folder / "c.json")]).exit_code == 0
    assert run(folder).exit_code == 0
    assert run(folder, "--calibrator", str(folder / "c.json"), out="through").exit_code == 0
    means = {}
    for out in ("out", "through"):
        evaluation = Evaluation.load(folder / out / "evaluation.npz")
        files = CaseFiles("case_1", (folder / "P" / "case_1.nii.gz",), folder / "L" / "case_1.nii.gz")
        found = case_volumes("case_1", {"net": files}, options=options_of(evaluation))
        means[out] = found.probabilities[0].reshape(2, -1).mean(1) / 255
        sums = evaluation.foreground().statistics.confidence_sum[1].sum(-1).numpy()
        assert means[out] == pytest.approx(sums / found.probabilities[0, 0].size, abs=0.5 / 255)
    assert np.abs(means["out"] - means["through"]).max() > 1e-3


def test_the_vendored_script_is_the_published_one(monkeypatch, tmp_path):
    import hashlib
    import json

    from segcal.viewer import embedding

    told = json.loads((Path(embedding.__file__).parent / "vendor" / "niivue.json").read_text())
    embedding.niivue_script.cache_clear()
    script = embedding.niivue_script()
    assert hashlib.sha256(script.encode()).hexdigest() == told["sha256"]
    assert "</script" not in script
    (tmp_path / "niivue.json").write_text(json.dumps(told))
    (tmp_path / told["file"]).write_text(script + " ")
    monkeypatch.setattr(embedding, "VENDOR", tmp_path)
    embedding.niivue_script.cache_clear()
    with pytest.raises(FileError, match=r"niivue\.umd\.js must be that of NiiVue 0\.69\.0"):
        embedding.niivue_script()
    embedding.niivue_script.cache_clear()
