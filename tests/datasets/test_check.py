"""Files are broken by hand, one way at a time; the check names each, and finds nothing in sound ones."""

import os
from pathlib import Path

import layouts
import nibabel
import numpy as np
import pytest

from segcal.datasets import check_dataset, open_dataset
from segcal.datasets.phantom import make_phantom

DATA = Path(os.environ.get("SEGCAL_DATA", "nowhere"))
TIMES = "\N{MULTIPLICATION SIGN}"


def check(name, root):
    return check_dataset(open_dataset(name, root))


@pytest.fixture
def acdc(tmp_path):
    return layouts.write_acdc(tmp_path, patients=3)


def frame(root, ending=""):
    return root / "database" / "training" / "patient001" / f"patient001_frame01{ending}.nii.gz"


def only_problem(name, root):
    (problem,) = check(name, root).problems
    return problem.case, problem.what.replace(TIMES, "x")


@pytest.mark.parametrize("name", ["acdc", "amos", "brats", "kits", "decathlon", "nnunet"])
def test_sound_files_have_no_problems(tmp_path, name):
    assert check(name, getattr(layouts, f"write_{name}")(tmp_path)).problems == ()


def test_sound_files_of_several_channels_in_one_have_no_problems(tmp_path):
    assert check("decathlon", layouts.write_decathlon(tmp_path, channels=("FLAIR", "T1w"))).problems == ()


def test_the_phantom_has_no_problems(tmp_path):
    make_phantom(tmp_path, cases=4, size=(40, 40, 26))
    assert check("phantom", tmp_path).problems == ()


def test_facts_are_counted(tmp_path):
    found = check("acdc", layouts.write_acdc(tmp_path, patients=3, test_patients=1))
    assert (found.cases, found.patients, found.unlabelled, found.read) == (8, 4, 0, 8)
    assert found.present == {"right ventricle": 7, "myocardium": 8, "left ventricle": 8}
    assert found.missing == {"patient002_frame12": ("right ventricle",)}
    assert found.missing_share == 1 / 8
    assert found.shapes == (layouts.SIZE, layouts.SIZE)
    assert found.spacing_mm == (layouts.SPACING_MM, layouts.SPACING_MM)
    assert found.notes == ("The paper has 150 patients; 4 are here.",)
    rows = dict(found.facts())
    assert rows["cases that lack a class"] == "1 (12.5%)"
    assert rows["voxels"].replace(TIMES, "x") == "12x10x6"


def test_fewer_cases_and_no_test_folder_are_notes(acdc):
    found = check("acdc", acdc)
    assert found.problems == ()
    assert found.notes[0] == "The paper has 150 patients; 3 are here."
    assert found.notes[1].startswith("testing/ has no labeled patients here")


def test_progress_reaches_the_number_of_cases(acdc):
    seen = []
    check_dataset(open_dataset("acdc", acdc), progress=lambda done, total: seen.append((done, total)))
    assert seen == [(done, 6) for done in range(1, 7)]


def test_an_unknown_label_value_is_named(acdc):
    label = np.zeros(layouts.SIZE, np.uint8)
    label[0, 0, :3] = 1, 7, 200
    layouts.save(frame(acdc, "_gt"), label)
    assert only_problem("acdc", acdc) == ("patient001_frame01", "labels must be among 0, 1, 2, 3; they hold 7, 200.")


def test_a_fraction_among_the_labels_is_named(acdc):
    layouts.save(frame(acdc, "_gt"), np.full(layouts.SIZE, 0.5, np.float32))
    _, what = only_problem("acdc", acdc)
    assert what == "patient001_frame01_gt.nii.gz: labels must be whole numbers; one is 0.5. Correct the labels."


def test_whole_numbers_stored_as_floats_are_fine(acdc):
    label = nibabel.load(frame(acdc, "_gt")).get_fdata().astype(np.float32)
    layouts.save(frame(acdc, "_gt"), label)
    assert check("acdc", acdc).problems == ()


def test_enhancing_tumour_may_be_3_in_brats(tmp_path):
    layouts.write_brats(tmp_path, cases=1)
    path = tmp_path / "BraTS2021_00000" / "BraTS2021_00000_seg.nii.gz"
    label = np.asarray(nibabel.load(path).dataobj)
    layouts.save(path, np.where(label == 4, 3, label).astype(np.uint8), spacing_mm=(1, 1, 1))
    found = check("brats", tmp_path)
    assert found.problems == ()
    assert found.present["enhancing tumour"] == 1


@pytest.mark.parametrize("ending", ["", "_gt"])
def test_a_file_of_another_shape_is_named_with_both_shapes(acdc, ending):
    layouts.save(frame(acdc, ending), np.ones((12, 10, 5), np.uint8))
    case, what = only_problem("acdc", acdc)
    assert case == "patient001_frame01"
    assert "patient001_frame01.nii.gz and patient001_frame01_gt.nii.gz must lie on one grid" in what
    assert "12x10x5 at 1.5x1.5x5 mm" in what
    assert "12x10x6 at 1.5x1.5x5 mm" in what


def test_another_voxel_size_and_another_place_are_named(acdc):
    path = frame(acdc)
    values = np.asarray(nibabel.load(path).dataobj)
    layouts.save(path, values, spacing_mm=(1.5, 1.5, 8.0))
    assert "at 1.5x1.5x8 mm" in only_problem("acdc", acdc)[1]
    affine = np.diag([1.5, 1.5, 5.0, 1.0])
    affine[:3, 3] = 0, 30, 0
    nibabel.Nifti1Image(values, affine).to_filename(path)
    assert "RAS from (0, 30, 0)" in only_problem("acdc", acdc)[1]


def test_rounding_in_a_header_is_no_problem(acdc):
    path = frame(acdc)
    affine = np.diag([1.5, 1.5, 5.0, 1.0])
    affine[:3, 3] = 1e-4
    nibabel.Nifti1Image(np.asarray(nibabel.load(path).dataobj), affine).to_filename(path)
    assert check("acdc", acdc).problems == ()


def test_a_channel_off_the_grid_of_the_others_is_named(tmp_path):
    layouts.write_brats(tmp_path, cases=2)
    path = tmp_path / "BraTS2021_00001" / "BraTS2021_00001_t2.nii.gz"
    layouts.save(path, np.ones((12, 10, 7), np.int16), spacing_mm=(1, 1, 1))
    case, what = only_problem("brats", tmp_path)
    assert case == "BraTS2021_00001"
    assert "BraTS2021_00001_t2.nii.gz and BraTS2021_00001_seg.nii.gz must lie on one grid" in what


def test_channels_without_labels_are_checked_too(tmp_path):
    root = layouts.write_nnunet(tmp_path)
    layouts.save(root / "imagesTs" / "scan-04_0001.nii.gz", np.ones((12, 10, 7), np.int16))
    assert only_problem("nnunet", root)[0] == "scan-04"


def test_a_wrong_number_of_channels_is_named(tmp_path):
    root = layouts.write_decathlon(tmp_path, channels=("FLAIR", "T1w"))
    layouts.save(root / "imagesTr" / "test_001.nii.gz", np.ones((*layouts.SIZE, 3), np.int16))
    what = "test_001.nii.gz must have three axes and a last one of 2 channels; it is 12x10x6x3."
    assert only_problem("decathlon", root) == ("test_001", what)


def test_an_empty_file_is_named(acdc):
    frame(acdc).write_bytes(b"")
    what = "patient001_frame01.nii.gz must hold an array; the file is empty. Create the file again."
    assert only_problem("acdc", acdc) == ("patient001_frame01", what)


@pytest.mark.parametrize("ending", ["", "_gt"])
def test_a_file_cut_off_is_named(acdc, ending):
    path = frame(acdc, ending)
    path.write_bytes(path.read_bytes()[:-20])
    _, what = only_problem("acdc", acdc)
    assert what == f"{path.name} must be complete; it ends too early (a broken copy?). Copy it again."


def test_a_file_of_something_else_is_named(acdc):
    frame(acdc).write_bytes(b"<html>404</html>" * 100)
    assert "does not begin with a NIfTI header" in only_problem("acdc", acdc)[1]


def test_a_damaged_byte_is_found_by_the_checksum(acdc):
    path = frame(acdc)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0xFF
    path.write_bytes(bytes(content))
    assert only_problem("acdc", acdc)[0] == "patient001_frame01"


def test_what_opening_found_is_among_the_problems(tmp_path):
    layouts.write_kits(tmp_path)
    (tmp_path / "dataset" / "case_00001" / "imaging.nii.gz").unlink()
    assert only_problem("kits", tmp_path) == ("case_00001", "segmentation.nii.gz must have an image; there is none.")


def test_a_class_that_no_case_holds_is_a_note(tmp_path):
    layouts.write_kits(tmp_path, cases=4)
    for path in (tmp_path / "dataset").rglob("segmentation.nii.gz"):
        label = np.asarray(nibabel.load(path).dataobj)
        layouts.save(path, np.where(label == 3, 0, label).astype(np.uint8))
    found = check("kits", tmp_path)
    assert "No case holds cyst." in found.notes
    assert found.missing_share == 1


def test_headers_that_contradict_themselves_are_a_note(acdc):
    path = frame(acdc)
    image = nibabel.Nifti1Image(np.asarray(nibabel.load(path).dataobj), np.diag([1.5, 1.5, 5.0, 1.0]))
    image.set_sform(np.eye(4), code=1)
    image.header["pixdim"][1:4] = 1.5, 1.5, 5
    image.to_filename(path)
    found = check("acdc", acdc)
    assert found.problems == ()
    assert any("other voxel sizes than those stored beside it: 1." in note for note in found.notes)


def test_headers_that_leave_the_place_open_are_a_note_or_problems(acdc):
    path = frame(acdc, "_gt")
    nibabel.Nifti1Image(np.asarray(nibabel.load(path).dataobj), np.eye(4)).to_filename(path)
    found = check("acdc", acdc)
    assert found.problems == ()
    assert any("leave open whether they lie in one place: patient001_frame01." in note for note in found.notes)
    (problem,) = check_dataset(open_dataset("acdc", acdc), strict_grid=True).problems
    assert problem.case == "patient001_frame01"
    assert "headers must say where the voxels lie" in problem.what


@pytest.mark.skipif(not (DATA / "ACDC").is_dir(), reason="SEGCAL_DATA does not hold ACDC")
def test_the_real_acdc_has_no_problems():
    dataset = open_dataset("acdc", DATA / "ACDC")
    found = check_dataset(dataset)
    assert found.problems == ()
    assert (found.patients, found.cases, found.read) == (len(dataset.patients), 2 * len(dataset.patients), found.cases)


@pytest.mark.skipif(not (DATA / "Task04_Hippocampus").is_dir(), reason="SEGCAL_DATA does not hold Task04_Hippocampus")
def test_the_real_hippocampus_has_no_problems():
    found = check("decathlon", DATA / "Task04_Hippocampus")
    assert found.problems == ()
    assert found.present["Anterior"] == found.cases
