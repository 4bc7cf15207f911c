"""In a notebook a case is a viewer by ipyniivue, or a picture where that is missing; both hold the case's volumes."""

from __future__ import annotations

import nibabel
import numpy as np
import pytest
from cohorts import STRAIGHT, make_case, run, save, write_cohort
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from matplotlib.text import Text

from segcal import ConfigError
from segcal.evaluation.evaluation import Evaluation
from segcal.viewer import notebook


@pytest.fixture
def folder(tmp_path):
    write_cohort(tmp_path, 2)
    save(tmp_path / "I" / "case_1.nii.gz", make_case(1)[1].astype(np.float32), STRAIGHT)
    assert run(tmp_path, "--class-names", "background,liver,tumor").exit_code == 0
    return tmp_path


@pytest.fixture
def evaluation(folder):
    return Evaluation.load(folder / "out" / "evaluation.npz")


def test_a_picture_shows_the_slice_of_the_largest_error(folder, evaluation, monkeypatch):
    monkeypatch.setattr(notebook, "find_spec", lambda name: None)
    probabilities, labels = make_case(1)
    figure = evaluation.view("case_1", folder / "P", labels=folder / "L", images=folder / "I", class_name="tumor")
    assert isinstance(figure, Figure)
    error = np.abs(probabilities[..., 2] - (labels == 2)).sum((0, 1))  # slices are 2.5 mm apart, voxels 1 mm wide
    written = " ".join(text.get_text() for text in figure.findobj(Text))
    assert f"tumor, slice {error.argmax()}" in written.replace("\n", " ")
    shown = [np.asarray(picture.get_array()) for picture in figure.findobj(AxesImage)]
    expected = probabilities[::-1, :, error.argmax(), 2].T  # the patient's left is on the right
    assert any(each.shape == expected.shape and np.abs(each - expected).max() <= 0.51 / 255 for each in shown)


def test_without_labels_there_is_a_picture_too(folder, evaluation, monkeypatch):
    monkeypatch.setattr(notebook, "find_spec", lambda name: None)
    assert isinstance(evaluation.view("case_0", folder / "P"), Figure)


def test_the_viewer_has_image_probability_and_label(folder, evaluation):
    ipyniivue = pytest.importorskip("ipyniivue", reason="ipyniivue shows volumes in notebooks")
    probabilities, labels = make_case(1)
    widget = evaluation.view("case_1", folder / "P", labels=folder / "L", images=folder / "I")
    assert isinstance(widget, ipyniivue.NiiVue)
    image, probability, label = (nibabel.Nifti1Image.from_bytes(layer.data) for layer in widget.volumes)
    assert np.array_equal(label.dataobj, labels == 1)
    assert np.abs(np.asarray(probability.dataobj) / 255 - probabilities[..., 1]).max() <= 0.5001 / 255
    assert np.asarray(image.dataobj).max() == 255
    assert probability.affine == pytest.approx(STRAIGHT)
    assert [layer.name for layer in widget.volumes] == ["image.nii", "probability of liver.nii", "label of liver.nii"]
    bare = evaluation.view("case_1", folder / "P", class_name="tumor")
    assert len(bare.volumes) == 2


def test_cases_and_classes_that_are_not_there_are_refused(folder, evaluation):
    with pytest.raises(ConfigError, match="the case must be one of the evaluation's 2; got 'x'"):
        evaluation.view("x", folder / "P")
    with pytest.raises(ConfigError, match="the class must be one of liver, tumor; got 'x'"):
        evaluation.view("case_0", folder / "P", class_name="x")
