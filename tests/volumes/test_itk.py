"""NRRD and MetaImage, written by SimpleITK, against the same volume in NIfTI: the same voxels in the same places."""

import gzip
from pathlib import Path

import nibabel
import numpy as np
import pytest

from segcal.errors import FileError, GridError
from segcal.evaluation.measure import measure_case
from segcal.evaluation.options import Options
from segcal.volumes import CaseFiles, find_predictions, open_prediction, pair_cases
from segcal.volumes.arrays import read_array

itk = pytest.importorskip("SimpleITK", reason="NRRD and MetaImage are read by SimpleITK")

RANDOM = np.random.default_rng(0)
SHAPE = (4, 5, 6)
LABELS = RANDOM.integers(0, 3, SHAPE).astype(np.uint8)
_RAW = RANDOM.random((*SHAPE, 3)) ** 2
MAPS = (_RAW / _RAW.sum(-1, keepdims=True)).astype(np.float32)
ENDINGS = ("nrrd", "nhdr", "mha", "mhd")


def oblique() -> np.ndarray:
    """Directions that no axis runs along, as scanners tilted by 20 and 30 degrees have them; in RAS."""
    a, b = np.radians(20), np.radians(30)
    tilt = np.array([[1, 0, 0], [0, np.cos(a), -np.sin(a)], [0, np.sin(a), np.cos(a)]])
    turn = np.array([[np.cos(b), -np.sin(b), 0], [np.sin(b), np.cos(b), 0], [0, 0, 1]])
    affine = np.eye(4)
    affine[:3, :3] = tilt @ turn @ np.diag([0.7, 0.8, 2.5])
    affine[:3, 3] = 12, -34, 56
    return affine


AFFINE = oblique()


def write(path: Path, values: np.ndarray, affine: np.ndarray = AFFINE, *, compressed: bool = True) -> Path:
    """(x, y, z), or (x, y, z, class) as a vector per voxel; ITK counts to left and posterior."""
    path.parent.mkdir(parents=True, exist_ok=True)
    vector = values.ndim == 4
    image = itk.GetImageFromArray(values.transpose(2, 1, 0, 3) if vector else values.T, isVector=vector)
    lps = np.diag([-1, -1, 1, 1]) @ affine
    spacing = np.linalg.norm(lps[:3, :3], axis=0)
    image.SetSpacing(spacing.tolist())
    image.SetDirection((lps[:3, :3] / spacing).ravel().tolist())
    image.SetOrigin(lps[:3, 3].tolist())
    itk.WriteImage(image, str(path), compressed)
    return path


def nifti(path: Path, values: np.ndarray, affine: np.ndarray = AFFINE) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    nibabel.Nifti1Image(values, affine).to_filename(path)
    return path


def measured(prediction: Path, label: Path):
    return measure_case(CaseFiles("case", (prediction,), label), Options(), threads=1)


def same(one, other, *, rtol: float = 0) -> None:
    assert one.doubts == other.doubts
    for name in ("bins", "overlap", "scores", "joint"):
        np.testing.assert_allclose(getattr(one.sums, name), getattr(other.sums, name), rtol=rtol)
    np.testing.assert_allclose(one.sums.voxel_ml, other.sums.voxel_ml, rtol=1e-6)


@pytest.mark.parametrize("compressed", [True, False])
@pytest.mark.parametrize("ending", ENDINGS)
def test_what_itk_wrote_is_read_where_it_lies(tmp_path, ending, compressed):
    for values in (LABELS, MAPS, MAPS[..., 0].astype(np.float64), LABELS.astype(np.int16) - 1):
        path = write(tmp_path / f"a.{ending}", values, compressed=compressed)
        stored, peeked = read_array(path), read_array(path, peek=True)
        np.testing.assert_array_equal(stored.values, values)
        for found in (stored, peeked):
            assert (found.values.shape, found.values.dtype) == (values.shape, values.dtype)
            np.testing.assert_allclose(found.geometry.affines[0], AFFINE, atol=1e-6)
            np.testing.assert_allclose(found.geometry.zooms, (0.7, 0.8, 2.5), rtol=1e-6)


@pytest.mark.parametrize("ending", ["nrrd", "mha"])
def test_formats_mix_on_one_oblique_grid(tmp_path, ending):
    expected = measured(nifti(tmp_path / "m.nii.gz", MAPS), nifti(tmp_path / "l.nii.gz", LABELS))
    for label in (write(tmp_path / f"l.{ending}", LABELS), tmp_path / "l.nii.gz"):
        for maps in (write(tmp_path / f"m.{ending}", MAPS), tmp_path / "m.nii.gz"):
            same(measured(maps, label), expected)


def test_turned_axes_are_turned_back_and_other_places_refused(tmp_path):
    label = nifti(tmp_path / "l.nii.gz", LABELS)
    expected = measured(nifti(tmp_path / "m.nii.gz", MAPS), label)
    flipped = AFFINE @ np.array([[-1, 0, 0, SHAPE[0] - 1], [0, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1.0]])
    same(
        measured(write(tmp_path / "m.nrrd", MAPS[::-1], flipped), label), expected, rtol=1e-12
    )  # voxels in other order
    moved = AFFINE.copy()
    moved[0, 3] += 5
    with pytest.raises(GridError, match="their origins are"):
        measured(write(tmp_path / "n.nrrd", MAPS, moved), label)


def test_names_pair_across_formats_and_slicers_ending_is_no_name(tmp_path):
    nifti(tmp_path / "maps" / "one.nii.gz", MAPS)
    write(tmp_path / "labels" / "one.seg.nrrd", LABELS)
    (case,) = pair_cases(tmp_path / "maps", tmp_path / "labels").cases
    assert (case.name, case.label.name) == ("one", "one.seg.nrrd")


def test_calibrated_maps_and_labels_become_nifti_in_the_same_place(tmp_path):
    from segcal.volumes import place_of_labels

    write(tmp_path / "maps" / "one.mha", MAPS)
    (files,) = find_predictions(tmp_path / "maps")
    prediction = open_prediction(files)
    (path,) = prediction.rewrite(lambda values: values / 2, tmp_path / "out", tmp_path / "maps")
    target = tmp_path / "labels" / place_of_labels(files, tmp_path / "maps")
    prediction.write_labels(LABELS, target)
    assert (path.name, target.name) == ("one.nii.gz", "one.nii.gz")
    for written, values in ((path, MAPS / 2), (target, LABELS)):
        image = nibabel.load(written)
        np.testing.assert_allclose(image.affine, AFFINE, atol=1e-4)
        np.testing.assert_array_equal(np.asarray(image.dataobj), values)


@pytest.mark.parametrize("elsewhere", ["/dev/zero", "../secret.raw", "missing.raw", "LIST", "slice%03d.raw"])
def test_a_header_may_only_name_a_file_beside_it(tmp_path, elsewhere):
    (tmp_path / "secret.raw").write_bytes(bytes(1000))
    write(tmp_path / "in" / "a.mhd", LABELS, compressed=False)
    path = tmp_path / "in" / "a.mhd"
    path.write_text(path.read_text().replace("a.raw", elsewhere))
    with pytest.raises(FileError, match="its voxels must be in it, or in one file beside it; it names"):
        read_array(path)


@pytest.mark.parametrize("ending", ["nrrd", "mha"])
def test_a_header_that_announces_too_much_is_refused(tmp_path, ending):
    path = write(tmp_path / f"a.{ending}", LABELS, compressed=False)
    content = path.read_bytes()
    assert content.count(b"4 5 6") == 1
    path.write_bytes(content.replace(b"4 5 6", b"40000 50000 60000"))
    with pytest.raises(FileError, match="announces 120,000,000,000,000 bytes and the file has"):
        read_array(path)


@pytest.mark.parametrize("ending", ["nrrd", "mha"])
def test_broken_files_are_a_sentence(tmp_path, ending):
    path = write(tmp_path / f"a.{ending}", LABELS)
    sound = path.read_bytes()
    for content in (sound[:-40], b"none", gzip.compress(sound), sound[:60]):
        path.write_bytes(content)
        with pytest.raises(FileError, match=rf"^a\.{ending} must be "):
            read_array(path)


def test_a_missing_package_is_told_with_what_to_type(tmp_path, monkeypatch):
    import sys

    path = write(tmp_path / "a.mha", LABELS)
    monkeypatch.setitem(sys.modules, "SimpleITK", None)
    with pytest.raises(
        FileError, match=r"without SimpleITK, which is not installed\. Type: pip install 'segcal\[itk\]'\."
    ):
        read_array(path)


def test_a_network_says_the_same_of_an_image_in_another_format(tmp_path):
    """Through reading, turning, predicting and writing: maps of the MetaImage and of its NIfTI twin."""
    from tiny import untrained_run

    from segcal.training.runs import image_cases, load_run, predict

    run = load_run(untrained_run(tmp_path), with_data=False)
    image = RANDOM.normal(100, 20, (12, 10, 6)).astype(np.int16)
    write(tmp_path / "itk" / "one.mha", image)
    nifti(tmp_path / "nifti" / "one.nii.gz", image)
    maps = [predict(run, tmp_path / f"{name}-maps", cases=image_cases(tmp_path / name, 1)) for name in ("itk", "nifti")]
    ours, twin = (nibabel.load(each.paths[0]) for each in maps)
    np.testing.assert_array_equal(np.asarray(ours.dataobj), np.asarray(twin.dataobj))
    np.testing.assert_allclose(ours.affine, twin.affine, atol=1e-4)
    np.testing.assert_allclose(ours.header.get_zooms(), twin.header.get_zooms(), rtol=1e-6)
