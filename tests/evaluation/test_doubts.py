"""Decisions taken for probabilities, probabilities taken for logits, headers that leave the place open."""

import json

import cohorts
import nibabel
import numpy as np
import pytest
from cohorts import SHAPE, make_case, run, write_cohort
from typer.testing import CliRunner

from segcal import Evaluation, ReadOptions, evaluate
from segcal.calibration.fitting import fit_calibrator
from segcal.cli import app

AFFINE = np.array([[-1.5, 0, 0, 40], [0, 1.5, 0, 7], [0, 0, 3, 11], [0, 0, 0, 1.0]])


def save(path, array, affine=AFFINE):
    cohorts.save(path, array, affine)


@pytest.fixture
def folder(tmp_path):
    return write_cohort(tmp_path, 3, AFFINE)


def notes(folder, out="out"):
    """Kinds and cases, as summary.json has them; the evaluation must carry the same."""
    found = json.loads((folder / out / "summary.json").read_text())["notes"]
    assert Evaluation.load(folder / out / "evaluation.npz").provenance["notes"] == found
    return {note["kind"]: note["cases"] for note in found}


def one_hot(i, dtype=np.float32):
    return np.eye(3, dtype=dtype)[make_case(i)[0].argmax(-1)]


def test_a_sound_cohort_has_no_notes(folder):
    assert run(folder).exit_code == 0
    assert notes(folder) == {}


@pytest.mark.parametrize("dtype", [np.float32, np.uint8])
def test_maps_of_hard_decisions_are_measured_and_told(folder, dtype):
    for i in (0, 2):
        save(folder / "P" / f"case_{i}.nii.gz", one_hot(i, dtype))
    result = run(folder)
    assert result.exit_code == 0
    assert notes(folder) == {"hard decisions": ["case_0", "case_2"]}
    told = " ".join(result.output.split())
    assert "note: predictions hold only zeros and ones" in told
    assert "2 cases: case_0, case_2" in told


def test_a_single_soft_voxel_is_no_hard_decision(folder):
    hard = one_hot(0)
    hard[-1, -1, -1] = (0.25, 0.25, 0.5)
    save(folder / "P" / "case_0.nii.gz", hard)
    run(folder)
    assert notes(folder) == {}


def test_a_mask_of_one_class_is_a_hard_decision(tmp_path):
    _, labels = make_case(0, classes=2)
    save(tmp_path / "P" / "a.nii.gz", labels)
    save(tmp_path / "L" / "a.nii.gz", labels)
    assert run(tmp_path).exit_code == 0
    assert notes(tmp_path) == {"hard decisions": ["a"]}


def test_notes_of_kept_cases_are_those_of_measured_ones(folder):
    for i in (0, 2):
        save(folder / "P" / f"case_{i}.nii.gz", one_hot(i))
    run(folder, "--workers", "2")
    before = {p.name: p.read_bytes() for p in (folder / "out").iterdir() if p.is_file()}
    first = evaluate(folder / "P", folder / "L", folder / "out")  # nothing is measured again
    assert first.notes[0].cases == ("case_0", "case_2")
    assert {p.name: p.read_bytes() for p in (folder / "out").iterdir() if p.is_file()} == before


def test_hard_decisions_are_told_through_a_calibrator_and_in_its_fit(folder):
    fit_calibrator(folder / "P", folder / "L", folder / "c.json", method="temperature", folds=0)
    for i in range(3):
        save(folder / "P" / f"case_{i}.nii.gz", one_hot(i))
    assert run(folder, "--calibrator", str(folder / "c.json")).exit_code == 0
    assert list(notes(folder)) == ["hard decisions"]
    fitted = fit_calibrator(folder / "P", folder / "L", folder / "d.json", method="temperature", folds=0)
    assert fitted.notes[0].cases == ("case_0", "case_1", "case_2")
    assert fitted.before.provenance["notes"][0]["kind"] == "hard decisions"


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.int16, np.float32])
@pytest.mark.parametrize("option", [(), ("--logits",), ("--regions", "brats")])
def test_a_label_map_is_no_prediction(folder, dtype, option):
    """Nor is that of a case whose truth has no label beyond 1."""
    for i in range(3):
        predicted, labels = make_case(i)
        save(folder / "P" / f"case_{i}.nii.gz", predicted.argmax(-1).astype(dtype))
        if i == 0:
            save(folder / "L" / f"case_{i}.nii.gz", np.minimum(labels, 1))
    result = run(folder, *option)
    assert result.exit_code == 1
    lines = [line for line in result.output.splitlines() if line.startswith("case_")]
    assert len(lines) == 3
    for line in lines:
        assert "label map" in line
        assert "probabilities" in line


def test_a_label_map_without_the_higher_labels_is_named_where_the_truth_has_them(folder):
    save(folder / "P" / "case_0.nii.gz", np.minimum(make_case(0)[0].argmax(-1), 1).astype(np.uint8))
    result = run(folder)
    assert "they hold [2]. A single channel is one class; if it is a label map, give the probabilities" in result.output


def test_8_bit_probabilities_of_one_class_are_still_read(tmp_path):
    probabilities, labels = make_case(0, classes=2)
    save(tmp_path / "P" / "a.nii.gz", np.round(255 * probabilities[..., 1]).astype(np.uint8))
    save(tmp_path / "L" / "a.nii.gz", labels)
    assert run(tmp_path).exit_code == 0
    assert notes(tmp_path) == {}


@pytest.mark.parametrize("single", [False, True])
def test_probabilities_said_to_be_logits_are_refused(tmp_path, single):
    probabilities, labels = make_case(0, classes=2)
    save(tmp_path / "P" / "a.nii.gz", probabilities[..., 1] if single else probabilities)
    save(tmp_path / "L" / "a.nii.gz", labels)
    result = run(tmp_path, "--logits")
    assert result.exit_code == 1
    assert "logits must not be probabilities" in result.output
    assert "Leave out --logits" in result.output
    save(tmp_path / "P" / "a.nii.gz", np.log(probabilities[..., 1] if single else probabilities))
    assert run(tmp_path, "--logits").exit_code == 0


def test_probabilities_said_to_be_logits_are_not_calibrated(folder):
    for i in range(3):
        save(folder / "P" / f"case_{i}.nii.gz", np.log(make_case(i)[0]))
    fit_calibrator(
        folder / "P", folder / "L", folder / "c.json", method="temperature", options=ReadOptions(logits=True), folds=0
    )
    save(folder / "P" / "case_1.nii.gz", make_case(1)[0])
    arguments = ["calibrate", "apply", str(folder / "c.json"), str(folder / "P"), "--out", str(folder / "maps")]
    result = CliRunner().invoke(app, [*arguments, "--logits"])
    assert result.exit_code == 1
    assert "case_1: RangeError: logits must not be probabilities" in " ".join(result.output.split())
    assert sorted(path.name for path in (folder / "maps").glob("*.nii.gz")) == ["case_0.nii.gz", "case_2.nii.gz"]


def with_qform(path, array, sform, qform):
    image = nibabel.Nifti1Image(array, sform)
    image.header.set_sform(sform, 1)
    image.header.set_qform(qform, 1)
    image.to_filename(path)


def shifted(affine, x):
    moved = affine.copy()
    moved[0, 3] += x
    return moved


def test_headers_without_a_place_are_told_and_may_be_refused(folder):
    save(folder / "P" / "case_1.nii.gz", make_case(1)[0], np.eye(4))
    assert run(folder).exit_code == 0
    assert notes(folder) == {"bare header": ["case_1"]}
    result = run(folder, "--strict-grid", out="strict")
    assert result.exit_code == 1
    assert "case_1: GridError: case_1: the grid must be certain" in result.output
    assert notes(folder, "strict") == {}
    outcome = evaluate(folder / "P", folder / "L", folder / "again", options=ReadOptions(strict_grid=True))
    assert [failure.case for failure in outcome.failures] == ["case_1"]
    for strict, number in ((False, 0), (True, 1)):
        options = ReadOptions(strict_grid=strict)
        fitted = fit_calibrator(
            folder / "P", folder / "L", folder / "c.json", method="temperature", folds=0, options=options
        )
        assert (len(fitted.failures), len(fitted.notes)) == (number, 1 - number)


def test_two_places_in_a_header_are_told_where_the_other_header_has_one(folder):
    """Whether the prediction's first place agrees, its second, or the labels' own."""
    probabilities, labels = make_case(0)
    with_qform(folder / "P" / "case_0.nii.gz", probabilities, AFFINE, shifted(AFFINE, 5))
    probabilities, labels = make_case(1)
    with_qform(folder / "P" / "case_1.nii.gz", probabilities, shifted(AFFINE, 5), AFFINE)
    probabilities, labels = make_case(2)
    with_qform(folder / "L" / "case_2.nii.gz", labels, AFFINE, shifted(AFFINE, 5))
    assert run(folder).exit_code == 0
    assert notes(folder) == {"contradicting headers": ["case_0", "case_1", "case_2"]}
    assert run(folder, "--strict-grid", out="strict").exit_code == 1


def test_headers_that_agree_in_all_they_say_are_no_doubt(folder):
    """The same two places in both, a place that is only rounded, no place in either, or a turned array."""
    probabilities, labels = make_case(0)
    with_qform(folder / "P" / "case_0.nii.gz", probabilities, AFFINE, shifted(AFFINE, 5))
    with_qform(folder / "L" / "case_0.nii.gz", labels, AFFINE, shifted(AFFINE, 5))
    probabilities, labels = make_case(1)
    with_qform(folder / "P" / "case_1.nii.gz", probabilities, shifted(AFFINE, 1e-3), AFFINE)
    probabilities, labels = make_case(2)
    turned = AFFINE @ np.array([[-1, 0, 0, SHAPE[0] - 1], [0, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1.0]])
    with_qform(folder / "P" / "case_2.nii.gz", probabilities[::-1], turned, turned)
    for side, array in zip("PL", make_case(3), strict=True):
        save(folder / side / "case_3.nii.gz", array, np.eye(4))
    assert run(folder, "--strict-grid").exit_code == 0
    assert notes(folder) == {}


def test_label_maps_beside_the_names_of_their_classes_are_called_that(folder):
    (folder / "L" / "dataset.json").write_text(json.dumps({"labels": {"background": 0, "liver": 1, "tumour": 2}}))
    for i in range(3):
        save(folder / "P" / f"case_{i}.nii.gz", make_case(i)[1])
    result = run(folder)
    assert result.exit_code == 2
    assert "If the predictions are label maps, give the probabilities" in " ".join(result.output.split())
