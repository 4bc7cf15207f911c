"""Predictions written back where they came from; nibabel and numpy read what was written.

The values of a prediction are a number of its own for every class and voxel, so that nothing can change places
unnoticed.
"""

import gzip
import pickle
import shutil
import tracemalloc
import zipfile

import nibabel as nib
import numpy as np
import pytest

from segcal.errors import ConfigError, FileError, GridError, ShapeError
from segcal.volumes import (
    CaseFiles,
    PredictionFiles,
    arrays,
    find_predictions,
    open_case,
    open_prediction,
    predictions,
)

SHAPE = (4, 5, 6)
CLASSES = 3
AFFINE = np.array([[1.5, 0, 0, -20], [0, 1.5, 0, 7], [0, 0, 3, 11], [0, 0, 0, 1.0]])


def coded(classes=CLASSES, shape=SHAPE, dtype=np.float32):
    """Probabilities (class, x, y, z) of at most 0.5."""
    number = np.prod(shape) * classes
    return (np.arange(number).reshape(classes, *shape) / number / 2).astype(dtype)


def last(values):
    return np.moveaxis(values, 0, -1)


def backwards(values):
    return values.transpose(0, *range(values.ndim - 1, 0, -1))


def save_nifti(path, values, affine=AFFINE, *, kind=nib.Nifti1Image, slope=None, inter=0.0, big=False):
    """Write the raw values with exactly this scale in the header."""
    values = np.asarray(values)
    header = kind.header_class(endianness=">" if big else "<")
    header.set_data_dtype(values.dtype)
    image = kind(values, affine, header)
    image.header.set_slope_inter(*((slope, inter) if slope else (1.0, 0.0)))
    path.parent.mkdir(parents=True, exist_ok=True)
    image.to_filename(path)
    return path


def save(path, values):
    """Write an array of these values in the format of the name; the path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".npy":
        np.save(path, values)
    elif path.suffix == ".npz":
        np.savez_compressed(path, values)
    else:
        save_nifti(path, values)
    return path


def raw(path):
    """The numbers in a file, as stored."""
    if path.name.endswith((".nii", ".nii.gz")):
        return np.asanyarray(nib.load(path).dataobj.get_unscaled())
    content = np.load(path, allow_pickle=False)
    return content if path.suffix == ".npy" else content[content.files[0]]


def content(path):
    """All bytes of a file, unpacked."""
    packed = path.read_bytes()
    return gzip.decompress(packed) if packed[:2] == b"\x1f\x8b" else packed


def opened(*paths, name="case", reference=None, classes=CLASSES):
    return open_prediction(PredictionFiles(name, paths, reference), classes=classes)


def write(prediction, values, folder, root, **how):
    """Write these values, whatever stands there."""
    return prediction.rewrite(lambda _: values, folder, root, **how)


def rewritten(path, change=lambda values: values, *, classes=CLASSES, **how):
    """Where one file with changed values was written, at once; part by part it is the same to the byte."""
    prediction = opened(path, classes=classes, **how)
    (target,) = prediction.rewrite(change, path.parent / "out", path.parent)
    assert target == path.parent / "out" / path.name
    assert [file.name for file in target.parent.iterdir()] == [path.name]
    for most_voxels in (1, 7):
        (again,) = prediction.rewrite(change, path.parent / "parts", path.parent, most_voxels=most_voxels)
        assert again.read_bytes() == target.read_bytes()
        shutil.rmtree(again.parent)
    return target


# Formats and layouts

NIFTI = {
    "last": last,
    "first": lambda values: values,
    "vector": lambda values: last(values)[:, :, :, None],
}
ARRAYS = {
    "first": lambda values: values,
    "last": last,
    "batch": lambda values: values[None],
    "fortran": np.asfortranarray,
    "last_fortran": lambda values: np.asfortranarray(last(values)),
}


@pytest.mark.parametrize("layout", NIFTI)
@pytest.mark.parametrize("extension", [".nii", ".nii.gz"])
@pytest.mark.parametrize("kind", [nib.Nifti1Image, nib.Nifti2Image])
@pytest.mark.parametrize("dtype", ["<f4", ">f4", "<f8"])
def test_nifti_comes_back_byte_for_byte_and_doubled_where_doubled(tmp_path, layout, extension, kind, dtype):
    truth = coded(dtype=dtype)
    stored = NIFTI[layout](truth)
    path = save_nifti(tmp_path / f"case{extension}", stored, kind=kind, big=dtype[0] == ">")
    prediction = opened(path)
    values = prediction.read()
    assert (prediction.name, prediction.classes, prediction.grid.shape) == ("case", 3, SHAPE)
    np.testing.assert_array_equal(prediction.grid.affine, AFFINE)
    assert values.dtype == (np.float64 if dtype == "<f8" else np.float32)
    assert values.flags.writeable
    np.testing.assert_array_equal(values, truth)
    assert content(rewritten(path)) == content(path)
    doubled = rewritten(path, lambda values: 2 * values)
    assert type(nib.load(doubled)) is kind
    np.testing.assert_array_equal(nib.load(doubled).get_fdata(), 2 * stored.astype(np.float64))
    assert (doubled.read_bytes()[:2] == b"\x1f\x8b") == (extension == ".nii.gz")


@pytest.mark.parametrize("layout", ARRAYS)
@pytest.mark.parametrize("extension", [".npy", ".npz"])
@pytest.mark.parametrize("dtype", ["<f2", "<f4", ">f4", "<f8"])
def test_arrays_come_back_with_the_same_type_and_axes(tmp_path, layout, extension, dtype):
    truth = coded(dtype=dtype)
    path = save(tmp_path / f"case{extension}", ARRAYS[layout](truth))
    prediction = opened(path)
    values = prediction.read()
    assert (prediction.classes, prediction.grid.shape, prediction.grid.affine) == (3, SHAPE, None)
    assert values.dtype == (np.float64 if dtype == "<f8" else np.float32)
    np.testing.assert_array_equal(values, truth)
    same, double = raw(rewritten(path)), raw(rewritten(path, lambda values: 2 * values))
    assert same.dtype == dtype
    assert same.flags.f_contiguous == raw(path).flags.f_contiguous
    assert same.tobytes("A") == raw(path).tobytes("A")
    np.testing.assert_array_equal(double, 2 * ARRAYS[layout](truth))
    if extension == ".npy":
        assert content(rewritten(path)) == content(path)


@pytest.mark.parametrize("key", ["probabilities", "softmax"])
def test_nnunet_arrays_are_read_as_nifti_orders_the_axes(tmp_path, key):
    np.savez_compressed(tmp_path / "case.npz", **{key: backwards(coded())})
    np.testing.assert_array_equal(opened(tmp_path / "case.npz").read(), coded())
    np.testing.assert_array_equal(opened(tmp_path / "case.npz", classes=None).read(), coded())
    written = rewritten(tmp_path / "case.npz", lambda values: 2 * values)
    with np.load(written, allow_pickle=False) as found:
        assert found.files == [key]
        np.testing.assert_array_equal(found[key], 2 * backwards(coded()))


@pytest.mark.parametrize("extension", [".nii.gz", ".npy", ".npz"])
def test_images_of_two_axes_get_a_third(tmp_path, extension):
    truth = coded(shape=(5, 7))
    stored = last(truth) if extension == ".nii.gz" else truth
    path = save(tmp_path / f"case{extension}", stored)
    prediction = opened(path)
    assert (prediction.grid.shape, prediction.classes) == ((5, 7), 3)
    np.testing.assert_array_equal(prediction.read(), truth[..., None])
    np.testing.assert_array_equal(raw(rewritten(path, lambda values: 2 * values)), 2 * stored)


@pytest.mark.parametrize("extension", [".nii.gz", ".npy"])
def test_one_class_may_lack_its_axis(tmp_path, extension):
    truth = coded(1)
    for name, stored in (("a", truth[0]), ("b", truth), ("c", last(truth))):
        path = save(tmp_path / name / f"case{extension}", stored)
        np.testing.assert_array_equal(opened(path, classes=1).read(), truth)
        doubled = raw(rewritten(path, lambda values: 2 * values, classes=1))
        np.testing.assert_array_equal(doubled.ravel(), 2 * stored.ravel())
        assert doubled.shape == raw(path).shape


def test_where_both_ends_have_the_number_of_classes_nifti_has_them_last_and_arrays_first(tmp_path):
    truth = coded(3, (3, 5, 3))
    for classes in (3, None):
        path = save(tmp_path / "case.nii", last(truth))
        np.testing.assert_array_equal(opened(path, classes=classes).read(), truth)
        path = save(tmp_path / "case.npy", truth)
        np.testing.assert_array_equal(opened(path, classes=classes).read(), truth)


def test_without_a_number_of_classes_the_likelier_axis_counts(tmp_path):
    assert opened(save(tmp_path / "a.nii", np.zeros((4, 5, 6, 2), "f4")), classes=None).classes == 2
    assert opened(save(tmp_path / "b.nii", np.zeros((4, 5, 6), "f4")), classes=None).classes == 1
    assert opened(save(tmp_path / "c.npy", np.zeros((2, 4, 5, 6), "f4")), classes=None).classes == 2
    assert opened(save(tmp_path / "d.npy", np.zeros((2, 4, 5), "f4")), classes=None).classes == 2
    assert opened(save(tmp_path / "e.npy", np.zeros((4, 5), "f4")), classes=None).classes == 1


def test_without_isal_the_standard_library_packs(tmp_path, monkeypatch):
    monkeypatch.setattr(arrays, "gzip", gzip)
    path = save(tmp_path / "case.nii.gz", last(coded()))
    assert content(rewritten(path)) == content(path)


def test_what_is_packed_under_another_name_stays_packed(tmp_path):
    path = save(tmp_path / "x.nii.gz", last(coded())).rename(tmp_path / "case.nii")
    written = rewritten(path)
    assert written.read_bytes()[:2] == b"\x1f\x8b"
    assert content(written) == content(path)


def test_the_header_stays_as_it_was(tmp_path):
    angle = np.radians(20)
    oblique = AFFINE.copy()
    oblique[:2, :2] = 1.5 * np.array([[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]])
    image = nib.Nifti1Image(last(coded()), oblique)
    image.set_qform(AFFINE, 1)
    image.set_sform(oblique, 4)
    image.header.set_zooms((1.5, 1.5, 3.0, 2.5))
    image.header.set_xyzt_units("mm", "sec")
    image.header.set_intent("estimate", name="softmax")
    image.header["descrip"] = b"fold 3"
    image.header["cal_max"] = 1
    image.header.extensions.append(nib.nifti1.Nifti1Extension("comment", b"made by hand"))
    image.to_filename(tmp_path / "case.nii.gz")
    before, after = (
        nib.load(path)
        for path in (tmp_path / "case.nii.gz", rewritten(tmp_path / "case.nii.gz", lambda values: values / 2))
    )
    assert after.header == before.header
    assert after.header.get_zooms() == (1.5, 1.5, 3.0, 2.5)
    assert after.header.get_xyzt_units() == ("mm", "sec")
    assert [int(after.header[code]) for code in ("qform_code", "sform_code")] == [1, 4]
    np.testing.assert_array_equal(after.affine, before.affine)
    np.testing.assert_array_equal(after.get_qform(), before.get_qform())
    assert [extension.get_content() for extension in after.header.extensions] == [b"made by hand"]
    np.testing.assert_array_equal(after.get_fdata(), before.get_fdata() / 2)


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_other_arrays_of_an_archive_are_carried_over(tmp_path, save):
    save(tmp_path / "case.npz", spacing=np.array([1.5, 1.5, 3]), probabilities=backwards(coded()), name="case")
    written = rewritten(tmp_path / "case.npz", lambda values: values / 2)
    with np.load(written, allow_pickle=False) as found:
        assert found.files == ["spacing", "probabilities", "name"]
        np.testing.assert_array_equal(found["spacing"], [1.5, 1.5, 3])
        np.testing.assert_array_equal(found["probabilities"], backwards(coded()) / 2)
        assert found["name"] == "case"
    kinds = {member.compress_type for member in zipfile.ZipFile(written).infolist()}
    assert kinds == {zipfile.ZIP_STORED if save is np.savez else zipfile.ZIP_DEFLATED}


class Planted:
    """Whoever unpickles it raises."""

    def __reduce__(self):
        return exec, ("raise SystemExit('unpickled')",)


def test_an_archive_with_python_objects_is_refused(tmp_path):
    np.savez(tmp_path / "case.npz", probabilities=backwards(coded()), extra=np.array([Planted()], dtype=object))
    with pytest.raises(FileError, match=r"case: case.npz must .*; .* Python objects, which are never unpickled"):
        opened(tmp_path / "case.npz")


# Integers


@pytest.mark.parametrize("dtype", [np.uint8, np.int8, np.int16, np.uint16])
@pytest.mark.parametrize("big", [False, True])
@pytest.mark.parametrize(("slope", "inter"), [(1 / 250, 0.001), (-1 / 300, 0.5), (0.25, -4)])
def test_scaled_integers_come_back_bit_for_bit_and_rounded_to_their_steps(tmp_path, dtype, big, slope, inter):
    numbers = (last(coded()) * 240).astype(dtype)
    path = save_nifti(tmp_path / "case.nii.gz", numbers, slope=slope, inter=inter, big=big)
    np.testing.assert_allclose(last(opened(path).read()), nib.load(path).get_fdata(), rtol=1e-6, atol=1e-7)
    assert content(rewritten(path)) == content(path)
    moved = rewritten(path, lambda values: values + np.float32(2.3 * slope))
    assert nib.load(moved).header == nib.load(path).header
    np.testing.assert_array_equal(raw(moved), numbers + 2)
    almost = rewritten(path, lambda values: np.full_like(values, (np.iinfo(dtype).max + 0.3) * slope + inter))
    assert (raw(almost) == np.iinfo(dtype).max).all()


@pytest.mark.parametrize("big", [False, True])
def test_values_beyond_a_scale_are_written_as_float32(tmp_path, big):
    numbers = (last(coded()) * 500).astype(np.uint8)
    path = save_nifti(tmp_path / "case.nii.gz", numbers, slope=1 / 250, big=big)
    for change in (lambda values: values + 1, lambda values: values - 0.25, lambda values: np.log(values)):
        with np.errstate(divide="ignore"):
            changed = change(opened(path).read())
            image = nib.load(rewritten(path, change))
        assert image.get_data_dtype() == (">f4" if big else "<f4")
        assert (image.dataobj.slope, image.dataobj.inter) == (1, 0)
        np.testing.assert_array_equal(image.get_fdata(), last(changed))
        np.testing.assert_array_equal(image.affine, AFFINE)


def test_not_a_number_is_written_as_float32(tmp_path):
    path = save_nifti(tmp_path / "case.nii", (last(coded()) * 500).astype(np.uint16), slope=1 / 250)
    assert np.isnan(nib.load(rewritten(path, lambda values: values * np.nan)).get_fdata()).all()


def test_scaled_floats_keep_their_values_and_lose_the_scale(tmp_path):
    path = save_nifti(tmp_path / "case.nii", last(coded()), slope=0.3, inter=0.1)
    values = opened(path).read()
    written = nib.load(rewritten(path, lambda values: 2 * values))
    assert (written.get_data_dtype(), written.dataobj.slope, written.dataobj.inter) == (np.float32, 1, 0)
    np.testing.assert_array_equal(written.get_fdata(), 2 * last(values))


@pytest.mark.parametrize(("dtype", "full"), [(np.uint8, 255), (np.uint16, 65535), (">u2", 65535)])
@pytest.mark.parametrize("extension", [".nii.gz", ".npy", ".npz"])
def test_unscaled_integers_are_shares_of_their_full_scale(tmp_path, dtype, full, extension):
    numbers = np.round(coded().astype(float) * full).astype(dtype)
    path = save(tmp_path / f"case{extension}", last(numbers) if extension == ".nii.gz" else numbers)
    np.testing.assert_array_equal(opened(path).read(), (numbers / np.float32(full)).astype(np.float32))
    same = rewritten(path)
    assert raw(same).dtype == raw(path).dtype
    np.testing.assert_array_equal(raw(same), raw(path))
    doubled = rewritten(path, lambda values: 2 * values)
    np.testing.assert_array_equal(raw(doubled), 2 * raw(path))
    assert raw(doubled).dtype == raw(path).dtype
    np.testing.assert_allclose(opened(doubled).read(), 2 * opened(path).read(), rtol=1e-6)
    threefold = rewritten(path, lambda values: 3 * values)
    np.testing.assert_array_equal(raw(threefold), 3 * (raw(path) / np.float32(full)).astype(np.float32))


def test_shares_too_small_to_show_their_scale_are_written_as_float32(tmp_path):
    """Zeros and ones alone would be read as 0 and 1."""
    path = save(tmp_path / "case.npy", np.round(coded() * 255).astype(np.uint8))
    written = rewritten(path, lambda values: values / 100)
    np.testing.assert_allclose(raw(written), opened(path).read() / 100, rtol=1e-6)
    np.testing.assert_array_equal(opened(written).read(), raw(written))


@pytest.mark.parametrize("dtype", [np.uint8, bool])
def test_zeros_and_ones_stay_until_they_are_anything_else(tmp_path, dtype):
    chosen = np.stack([np.arange(120).reshape(SHAPE) % 3 == c for c in range(3)]).astype(dtype)
    path = save(tmp_path / "case.npy", chosen)
    assert content(rewritten(path)) == content(path)
    for factor in (0.9, 2):
        written = raw(rewritten(path, lambda values, factor=factor: factor * values))
        assert written.dtype == np.float32
        np.testing.assert_array_equal(written, np.float32(factor) * chosen)


def test_integers_without_a_scale_are_refused_as_by_open_case(tmp_path):
    path = save_nifti(tmp_path / "case.nii", (last(coded()) * 100).astype(np.int16))
    with pytest.raises(FileError, match=r"case: probabilities must be .* got int16 without a scale"):
        opened(path).read()
    np.save(tmp_path / "faint.npy", np.ones((3, *SHAPE), np.uint8))
    with pytest.raises(FileError, match="zeros and ones, which could mean 1 or one step of the scale"):
        opened(tmp_path / "faint.npy").read()


def test_half_precision_stays_unless_the_values_are_too_large_for_it(tmp_path):
    path = save(tmp_path / "case.npy", (1e5 * coded(dtype=np.float64)).astype(np.float16))
    assert raw(rewritten(path)).dtype == np.float16
    written = raw(rewritten(path, lambda values: 2 * values))
    assert written.dtype == np.float32
    np.testing.assert_array_equal(written, 2 * raw(path).astype(np.float32))
    infinite = raw(rewritten(path, lambda values: np.full_like(values, np.inf)))
    assert infinite.dtype == np.float16


# Files per class


@pytest.mark.parametrize("style", ["a_{}", "a_000{}", "a_class{}", "a_prob_{}", "a/a_{}", "a/{}", "a/class_{}"])
@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("extension", [".nii.gz", ".npy"])
@pytest.mark.parametrize("classes", [3, None])
def test_files_numbered_by_class_are_one_prediction(tmp_path, style, first, extension, classes):
    root, out = tmp_path / "predictions", tmp_path / "out"
    names = [style.format(first + c) + extension for c in range(3)]
    for name, values in zip(names, coded(), strict=True):
        save(root / name, values)
    (files,) = find_predictions(root, classes=classes)
    assert files == PredictionFiles("a", tuple(root / name for name in names))
    prediction = open_prediction(files, classes=classes)
    assert (prediction.classes, prediction.grid.shape) == (3, SHAPE)
    np.testing.assert_array_equal(prediction.read(), coded())
    written = write(prediction, 2 * prediction.read(), out, root)
    assert written == tuple(out / name for name in names)
    for path, values in zip(written, coded(), strict=True):
        np.testing.assert_array_equal(raw(path), 2 * values)


def test_a_turned_class_is_turned_back_and_written_as_it_was(tmp_path):
    flipped = AFFINE @ np.array([[-1, 0, 0, 3], [0, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1.0]])
    paths = (
        save_nifti(tmp_path / "a_0.nii", coded(2)[0]),
        save_nifti(tmp_path / "a_1.nii", coded(2)[1, ::-1], flipped),
    )
    prediction = opened(*paths, classes=2)
    np.testing.assert_array_equal(prediction.read(), coded(2))
    written = write(prediction, prediction.read(), tmp_path / "out", tmp_path)
    assert [content(path) for path in written] == [content(path) for path in paths]


def test_classes_on_different_grids_are_refused(tmp_path):
    one = save_nifti(tmp_path / "a_0.nii", coded(2)[0])
    for values, affine, told in (
        (coded(2)[1], AFFINE + np.eye(4, k=3), "class 1 4x5x6 at 1.5x1.5x3.0 mm as well, but elsewhere"),
        (coded(2)[1, 1:], AFFINE, "class 0 is 4x5x6 at 1.5x1.5x3.0 mm, class 1 3x5x6 at 1.5x1.5x3.0 mm."),
        (last(coded(2)), AFFINE, "class 1 4x5x6x2."),
    ):
        with pytest.raises(GridError, match="case: files of one class each must lie on one grid") as caught:
            opened(one, save_nifti(tmp_path / "a_1.nii", values, affine), classes=2)
        assert told in str(caught.value).replace("\N{MULTIPLICATION SIGN}", "x")


def test_integer_classes_share_their_scale(tmp_path):
    """A class of zeros and ones beside one of full scale is meant in steps, and stays so."""
    numbers = np.stack([np.full(SHAPE, 254, np.uint8), np.ones(SHAPE, np.uint8)])
    paths = tuple(save_nifti(tmp_path / f"a_{c}.nii", numbers[c]) for c in range(2))
    prediction = opened(*paths, classes=2)
    np.testing.assert_allclose(prediction.read()[:, 0, 0, 0], [254 / 255, 1 / 255], rtol=1e-6)
    written = write(prediction, prediction.read(), tmp_path / "out", tmp_path)
    assert [content(path) for path in written] == [content(path) for path in paths]


def test_numbered_files_that_hold_all_classes_are_a_case_each(tmp_path):
    for number in (0, 1, 2):
        save(tmp_path / "four" / f"scan_000{number}.nii.gz", last(coded()))
        save(tmp_path / "array" / f"case_{number}.npy", coded())
        save(tmp_path / "flat" / f"case_{number}.npy", coded(shape=(5, 7)))
    for folder in ("four", "array", "flat"):
        for classes in (3, 2) if folder == "four" else (3,):
            assert len(find_predictions(tmp_path / folder, classes=classes)) == 3


def test_numbered_files_of_one_class_are_cases_where_numbers_or_shapes_say_so(tmp_path):
    for name, numbers, shape in (
        ("gap", (0, 2), (SHAPE, SHAPE)),
        ("late", (2, 3), (SHAPE, SHAPE)),
        ("shapes", (0, 1), (SHAPE, (4, 5, 7))),
        ("few", (0, 1), (SHAPE, SHAPE)),
    ):
        for number, size in zip(numbers, shape, strict=True):
            save(tmp_path / name / f"case_{number}.nii.gz", np.zeros(size, np.float32))
    for name, classes in (("gap", None), ("late", None), ("shapes", None), ("few", 1), ("few", 3)):
        assert len(find_predictions(tmp_path / name, classes=classes)) == 2
    assert len(find_predictions(tmp_path / "few", classes=2)) == 1


def test_thin_volumes_numbered_by_class_are_one_prediction(tmp_path):
    """Three slices of three classes: NIfTI has classes on the fourth axis."""
    for c, values in enumerate(coded(3, (4, 5, 3))):
        save(tmp_path / f"a_{c}.nii.gz", values)
    (files,) = find_predictions(tmp_path, classes=3)
    np.testing.assert_array_equal(open_prediction(files, classes=3).read(), coded(3, (4, 5, 3)))


def test_arrays_per_class_win_over_nifti_files_beside_them(tmp_path):
    for c, values in enumerate(coded()):
        save(tmp_path / f"a_{c}.npy", values)
        save(tmp_path / f"a_{c}.nii.gz", values)
    reference = save(tmp_path / "a.nii.gz", np.zeros(SHAPE, np.uint8))
    (files,) = find_predictions(tmp_path, classes=3)
    assert files == PredictionFiles("a", tuple(tmp_path / f"a_{c}.npy" for c in range(3)), reference)
    np.testing.assert_array_equal(open_prediction(files).grid.affine, AFFINE)


def test_a_broken_file_among_the_classes_is_named_when_it_is_opened(tmp_path):
    for c in range(3):
        save(tmp_path / f"a_{c}.nii.gz", coded()[c])
    (tmp_path / "a_1.nii.gz").write_bytes(b"words")
    (files,) = find_predictions(tmp_path, classes=3)
    with pytest.raises(FileError, match=r"a: a_1.nii.gz must be a readable image"):
        open_prediction(files, classes=3)


# Names and places


def found(root, *names, classes=CLASSES):
    """Files by the name that their prediction goes by, after writing a small array to each."""
    for name in names:
        path = root / name
        stored = coded(shape=(4, 4, 4))
        save(path, last(stored) if path.name.endswith((".nii", ".nii.gz")) else stored)
    files = find_predictions(root, classes=classes)
    assert [each.name for each in files] == sorted(each.name for each in files)
    return {each.name: [path.relative_to(root).as_posix() for path in each.predictions] for each in files}


def test_hidden_and_foreign_files_are_left_out(tmp_path):
    (tmp_path / "dataset.json").write_text("{}")
    (tmp_path / "notes.txt").write_text("words")
    names = ["b.nii.gz", "a.npy", "c.npz", "d.nii"]
    assert found(tmp_path, *names, ".hidden.nii.gz", "._a.npy", ".x/e.npy") == {name[0]: [name] for name in names}


@pytest.mark.parametrize("postfix", ["_prob", "_softmax", "-logits", "_probabilities", "_pred", "_seg", "_trans"])
def test_endings_are_left_off(tmp_path, postfix):
    names = [f"{x}/{x}{postfix}.nii.gz" for x in "ab"]
    assert found(tmp_path / "1", *names) == {"a": names[:1], "b": names[1:]}
    assert found(tmp_path / "2", f"case_7{postfix}.npz") == {"case_7": [f"case_7{postfix}.npz"]}


def test_endings_stay_where_a_name_would_be_taken(tmp_path):
    assert found(tmp_path / "1", "a.npy", "a_prob.npy") == {"a": ["a.npy"], "a_prob": ["a_prob.npy"]}
    names = ["a_logits.npy", "a_prob.npy"]
    assert found(tmp_path / "2", *names) == {"a_logits": names[:1], "a_prob": names[1:]}


def test_bare_words_and_repeated_names_go_by_their_folder(tmp_path):
    for names in (["a/prob.npy", "b/prob.npy"], ["a/map.npy", "b/map.npy"], ["a/x_prob.npy", "b/x_prob.npy"]):
        assert found(tmp_path / names[0].replace("/", ""), *names) == {"a": names[:1], "b": names[1:]}
    assert found(tmp_path / "bare", "prob.npy") == {"prob": ["prob.npy"]}


def test_decisions_beside_probabilities_are_no_predictions(tmp_path):
    assert found(tmp_path / "1", "a/a_prob.nii.gz", "a/a_seg.nii.gz", "b/prob.npy", "b/seg.npy") == {
        "a": ["a/a_prob.nii.gz"],
        "b": ["b/prob.npy"],
    }
    assert found(tmp_path / "2", "a.npz", "a_seg.nii.gz") == {"a": ["a.npz"]}


def test_nested_folders_keep_their_place(tmp_path):
    names = ["a.npy", "x/b.nii.gz"]
    root, out = tmp_path / "predictions", tmp_path / "deep" / "out"
    assert found(root, *names) == {"a": names[:1], "b": names[1:]}
    for files in find_predictions(root, classes=CLASSES):
        prediction = open_prediction(files, classes=CLASSES)
        write(prediction, prediction.read(), out, root)
    assert sorted(path.relative_to(out).as_posix() for path in out.rglob("*.n*")) == names
    below = tmp_path / "below"
    assert found(below, "x/y/a.npy") == {"a": ["x/y/a.npy"]}


@pytest.mark.parametrize(
    "names",
    [
        ["a.nii", "a.nii.gz"],
        ["a.npy", "a.npz"],
        ["x/a.npy", "x/b.npy", "y/a.npy", "y/b.npy"],
        ["x/a_prob.nii", "x/a_prob.nii.gz"],
    ],
)
def test_two_files_that_claim_one_case_are_named(tmp_path, names):
    with pytest.raises(FileError, match=r"predictions of case a\w* must be one; .* and .* both claim it"):
        found(tmp_path, *names)


def test_two_files_that_claim_one_class_are_named(tmp_path):
    for name in ("a_0.npy", "a_00.npy", "a_1.npy"):
        save(tmp_path / name, coded()[0])
    with pytest.raises(FileError, match=r"class 0 of case a must be one file; .* and .* both claim it"):
        find_predictions(tmp_path, classes=2)


def test_a_single_file_is_one_prediction(tmp_path):
    path = save(tmp_path / "case_7_prob.npy", coded())
    (files,) = find_predictions(path)
    assert files == PredictionFiles("case_7", (path,))
    prediction = open_prediction(files)
    (written,) = write(prediction, prediction.read(), tmp_path / "out", path)
    assert written == tmp_path / "out" / "case_7_prob.npy"
    assert find_predictions(save(tmp_path / "kits_3" / "prob.npy", coded()))[0].name == "kits_3"


def test_nothing_to_find_is_said(tmp_path):
    (tmp_path / "notes.txt").write_text("words")
    with pytest.raises(
        FileError, match=r"must hold predictions, as .nii.gz, .nii, .npz, .npy, .+ files; it holds 1 .txt"
    ):
        find_predictions(tmp_path)
    with pytest.raises(FileError, match=r"predictions must be a folder or a file; .*absent is not there"):
        find_predictions(tmp_path / "absent")
    with pytest.raises(FileError, match=r"notes: notes.txt must end in one of"):
        open_prediction(PredictionFiles("notes", (tmp_path / "notes.txt",)))


# nnU-Net


@pytest.mark.parametrize("shape", [SHAPE, (4, 4, 4)])
def test_an_nnunet_folder(tmp_path, shape):
    root = tmp_path / "predictions"
    for number in (1, 2):
        name = f"BRATS_00{number}"
        save_nifti(root / f"{name}.nii.gz", np.zeros(shape, np.uint8))
        np.savez_compressed(root / f"{name}.npz", probabilities=backwards(coded(3, shape).astype(np.float16)))
        (root / f"{name}.pkl").write_bytes(pickle.dumps(Planted()))
    (root / "plans.json").write_text("{}")
    files = find_predictions(root, classes=3)
    assert files == [
        PredictionFiles(f"BRATS_00{i}", (root / f"BRATS_00{i}.npz",), root / f"BRATS_00{i}.nii.gz") for i in (1, 2)
    ]
    assert find_predictions(root) == files
    assert find_predictions(root / "BRATS_001.npz") == files[:1]
    prediction = open_prediction(files[0], classes=3)
    assert (prediction.grid.shape, prediction.grid.spacing_mm) == (shape, (1.5, 1.5, 3.0))
    np.testing.assert_array_equal(prediction.grid.affine, AFFINE)
    np.testing.assert_array_equal(prediction.read(), coded(3, shape).astype(np.float16))
    write(prediction, prediction.read() / 2, tmp_path / "out", root)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["BRATS_001.npz"]
    with np.load(tmp_path / "out" / "BRATS_001.npz", allow_pickle=False) as written:
        assert written["probabilities"].dtype == np.float16
        np.testing.assert_array_equal(written["probabilities"], backwards(coded(3, shape).astype(np.float16)) / 2)


def test_a_label_map_beside_an_array_tells_the_order_of_its_axes(tmp_path):
    reference = save_nifti(tmp_path / "case.nii.gz", np.zeros(SHAPE, np.uint8))
    for arrange in (backwards, lambda values: values, last, lambda values: last(backwards(values))):
        for classes in (3, None):
            path = save(tmp_path / "case.npz", arrange(coded()))
            assert find_predictions(path)[0].reference == reference
            prediction = opened(path, reference=reference, classes=classes)
            np.testing.assert_array_equal(prediction.read(), coded())
            np.testing.assert_array_equal(prediction.grid.affine, AFFINE)
    path = save(tmp_path / "case.npy", coded(1)[0])
    np.testing.assert_array_equal(opened(path, reference=reference, classes=None).read(), coded(1))


def test_a_label_map_of_another_shape_says_nothing(tmp_path):
    """nnU-Net 1 crops its arrays."""
    reference = save_nifti(tmp_path / "case.nii.gz", np.zeros((9, 9, 9), np.uint8))
    np.savez(tmp_path / "case.npz", softmax=backwards(coded()))
    prediction = opened(tmp_path / "case.npz", reference=reference)
    assert (prediction.grid.shape, prediction.grid.affine) == (SHAPE, None)
    np.testing.assert_array_equal(prediction.read(), coded())


@pytest.mark.parametrize("kind", [nib.Nifti1Image, nib.Nifti2Image])
@pytest.mark.parametrize("order", ["<", ">"])
@pytest.mark.parametrize("scaled", [False, True])
def test_arrays_become_images_in_the_place_of_the_label_map(tmp_path, kind, order, scaled):
    """Whatever the header of the label map says about labels is not said about probabilities."""
    image = kind(np.zeros(SHAPE, f"{order}i2"), AFFINE, kind.header_class(endianness=order))
    image.header.set_intent("label")
    image.header.set_xyzt_units("mm")
    image.header.set_qform(AFFINE, 1)
    image.header["cal_max"] = 4
    image.header.extensions.append(nib.nifti1.Nifti1Extension("comment", b"labels"))
    if scaled:
        image.header.set_slope_inter(3, 1)
    nib.save(image, tmp_path / "case.nii.gz")
    np.savez(tmp_path / "case.npz", probabilities=backwards(coded()))
    (files,) = find_predictions(tmp_path)
    (target,) = write(open_prediction(files), coded() / 2, tmp_path / "out", tmp_path, nifti=True)
    assert target == tmp_path / "out" / "case.nii.gz"
    assert [path.name for path in target.parent.iterdir()] == ["case.nii.gz"]
    written = nib.load(target)
    assert type(written) is kind
    assert written.get_data_dtype().newbyteorder("=") == np.float32
    assert not written.header.extensions
    np.testing.assert_array_equal(written.get_fdata(), last(coded() / 2))
    np.testing.assert_array_equal(written.affine, image.affine)
    np.testing.assert_allclose(written.header.get_zooms(), (*image.header.get_zooms(), 1))
    assert written.header.get_xyzt_units()[0] == "mm"
    assert (written.header.get_intent()[0], written.header["cal_max"]) == ("none", 0)


def test_images_stay_what_they_are_where_images_are_asked_for(tmp_path):
    path = save_nifti(tmp_path / "case.nii", last(coded()))
    (target,) = write(opened(path), coded(), tmp_path / "out", tmp_path, nifti=True)
    assert target.name == "case.nii"
    assert content(target) == content(path)


def test_files_of_one_class_each_become_an_image_each(tmp_path):
    reference = save_nifti(tmp_path / "a.nii.gz", np.zeros(SHAPE, np.uint8))
    paths = [save(tmp_path / f"a_{c}.npy", coded()[c]) for c in range(3)]
    targets = write(opened(*paths, reference=reference), coded(), tmp_path / "out", tmp_path, nifti=True)
    assert [path.name for path in targets] == ["a_0.nii.gz", "a_1.nii.gz", "a_2.nii.gz"]
    for c, path in enumerate(targets):
        np.testing.assert_array_equal(nib.load(path).get_fdata()[..., 0], coded()[c])


def test_an_array_of_nowhere_becomes_no_image(tmp_path):
    np.savez(tmp_path / "case.npz", softmax=backwards(coded()))
    with pytest.raises(FileError, match=r"case: a NIfTI image needs a label map .* as nnU-Net .*; there is none"):
        write(opened(tmp_path / "case.npz"), coded(), tmp_path / "out", tmp_path, nifti=True)
    reference = save_nifti(tmp_path / "case.nii.gz", np.zeros((9, 9, 9), np.uint8))
    with pytest.raises(FileError, match=r"case\.nii\.gz has another shape"):
        write(opened(tmp_path / "case.npz", reference=reference), coded(), tmp_path / "out", tmp_path, nifti=True)
    assert not (tmp_path / "out").exists()


TURNS = [
    np.diag([-1.0, 1.5, 2.0, 1.0]),
    np.array([[0, 0, -2.0, 3], [1.5, 0, 0, -7], [0, -1.0, 0, 5], [0, 0, 0, 1]]),
    np.array([[-0.99, 0.14, 0, 3], [-0.14, -0.99, 0, -7], [0, 0, 2.5, 5], [0, 0, 0, 1]]),  # oblique
]


@pytest.mark.parametrize("affine", TURNS)
@pytest.mark.parametrize("place", ["beside", "above"])
def test_arrays_of_images_that_nnunet_turned_lie_as_the_images_do(tmp_path, affine, place):
    """Its plans say so: beside predictions, or above the fold whose validation cases they are."""
    folder = tmp_path / "model" / "fold_0" / "validation"
    folder.mkdir(parents=True)
    plans = (folder if place == "beside" else tmp_path / "model") / "plans.json"
    plans.write_text('{"image_reader_writer": "NibabelIOWithReorient"}')
    truth = coded()
    turned = nib.as_closest_canonical(nib.Nifti1Image(last(truth), affine)).get_fdata().astype(np.float32)
    np.savez(folder / "case.npz", probabilities=backwards(np.moveaxis(turned, -1, 0)))
    nib.save(nib.Nifti1Image(np.zeros(SHAPE, np.uint8), affine), folder / "case.nii.gz")
    (files,) = find_predictions(folder)
    prediction = open_prediction(files, classes=3)
    np.testing.assert_array_equal(prediction.read(), truth)
    write(prediction, 2 * prediction.read(), tmp_path / "out", folder)
    with np.load(tmp_path / "out" / "case.npz") as written:
        np.testing.assert_array_equal(written["probabilities"], 2 * backwards(np.moveaxis(turned, -1, 0)))
    with open_case(CaseFiles("case", (folder / "case.npz",), folder / "case.nii.gz")) as case:
        np.testing.assert_array_equal(case.voxels((slice(None),) * 3)[0].reshape(truth.shape), truth)


def test_turned_arrays_of_another_shape_are_refused(tmp_path):
    (tmp_path / "plans.json").write_text('{"image_reader_writer": "NibabelIOWithReorient"}')
    np.savez(tmp_path / "case.npz", probabilities=backwards(coded()))
    save_nifti(tmp_path / "case.nii.gz", np.zeros((9, 9, 9), np.uint8))
    (files,) = find_predictions(tmp_path)
    with pytest.raises(GridError, match=r"case: labels are 9.9.9 at"):
        open_prediction(files)


def test_label_maps_that_nnunet_gathers_beside_its_folds_are_no_predictions(tmp_path):
    for fold in range(2):
        folder = tmp_path / f"fold_{fold}" / "validation"
        folder.mkdir(parents=True)
        np.savez(folder / f"case_{fold}.npz", probabilities=backwards(coded()))
        save_nifti(folder / f"case_{fold}.nii.gz", np.zeros(SHAPE, np.uint8))
        (tmp_path / "crossval_results_folds_0_1").mkdir(exist_ok=True)
        save_nifti(tmp_path / "crossval_results_folds_0_1" / f"case_{fold}.nii.gz", np.zeros(SHAPE, np.uint8))
    assert [files.name for files in find_predictions(tmp_path)] == ["case_0", "case_1"]
    assert all(files.predictions[0].suffix == ".npz" for files in find_predictions(tmp_path))


# Refusals


@pytest.mark.parametrize(
    ("name", "shape", "classes", "told"),
    [
        ("case.nii.gz", (8, 9, 7, 3), 4, "4 classes, as the calibrator has; the array is 8x9x7x3."),
        ("case.npy", (3, 8, 9, 7), 4, "4 classes, as the calibrator has; the array is 3x8x9x7."),
        ("case.npy", (3, 8, 9, 7), 1, "1 class, as the calibrator has; the array is 3x8x9x7."),
        ("case.nii", (8, 9, 7), 4, "4 classes, as the calibrator has; the array is 8x9x7."),
        ("case.nii", (8, 9, 7, 2, 4), 4, "4 classes, as the calibrator has; the array is 8x9x7x2x4."),
        (
            "case.npy",
            (2, 3, 8, 9, 7),
            None,
            "two or three axes of space, and of classes at most one; the array is 2x3x",
        ),
    ],
)
def test_another_number_of_classes_is_refused_in_one_sentence(tmp_path, name, shape, classes, told):
    path = save(tmp_path / name, np.zeros(shape, np.float32))
    with pytest.raises(ShapeError) as caught:
        opened(path, classes=classes, name="case_3")
    sentence = str(caught.value).replace("\N{MULTIPLICATION SIGN}", "x")
    assert sentence.startswith(f"case_3: predictions must have {told}")


def test_another_number_of_files_is_refused_in_one_sentence(tmp_path):
    paths = [save(tmp_path / f"a_{c}.npy", coded()[c]) for c in range(3)]
    with pytest.raises(ShapeError, match=r"must have 4 classes, .*; there are 3 files of one class each\."):
        opened(*paths, classes=4)
    with pytest.raises(ShapeError, match="files of one class each must have the axes of space only; the array is"):
        opened(save(tmp_path / "b.npy", coded()), paths[1], classes=2)


def test_a_broken_file_is_named_with_its_case(tmp_path):
    (tmp_path / "text.nii.gz").write_bytes(b"words")
    with pytest.raises(FileError, match=r"^case: text.nii.gz must be a readable image"):
        opened(tmp_path / "text.nii.gz")
    path = save(tmp_path / "cut.nii.gz", np.random.default_rng(0).random((*SHAPE, 3), np.float32))
    path.write_bytes(path.read_bytes()[:-300])
    with pytest.raises(FileError, match=r"^case: cut.nii.gz must be complete; it ends too early"):
        opened(path).read()


def test_values_of_another_shape_are_refused(tmp_path):
    prediction = opened(save(tmp_path / "case.npy", coded()))
    with pytest.raises(ShapeError, match=r"case: values must have the shape \(3, 4, 5, 6\); got \(4, 5, 6\)"):
        write(prediction, coded()[0], tmp_path / "out", tmp_path)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("way", ["same", "dots", "link"])
def test_predictions_are_never_written_over(tmp_path, way):
    root = tmp_path / "predictions"
    path = save(root / "case.npy", coded())
    before = path.read_bytes()
    (tmp_path / "link").symlink_to(root)
    out = {"same": root, "dots": tmp_path / "link" / ".." / "predictions", "link": tmp_path / "link"}[way]
    prediction = opened(path)
    with pytest.raises(ConfigError, match="--out must be another folder than the predictions"):
        write(prediction, 2 * prediction.read(), out, root)
    with pytest.raises(ConfigError, match="--out must be another folder than the predictions"):
        write(prediction, 2 * prediction.read(), out, path)
    assert path.read_bytes() == before
    with pytest.raises(ConfigError, match=r"case: predictions must lie under .*elsewhere; .*case.npy does not"):
        write(prediction, prediction.read(), tmp_path / "out", tmp_path / "elsewhere")


def test_what_was_written_before_is_replaced(tmp_path):
    prediction = opened(save(tmp_path / "case.npy", coded()))
    for factor in (1, 2):
        (written,) = write(prediction, factor * coded(), tmp_path / "out", tmp_path)
        np.testing.assert_array_equal(np.load(written), factor * coded())


@pytest.mark.parametrize("extension", [".nii.gz", ".npy", ".npz"])
def test_an_error_in_the_middle_leaves_no_part_of_a_file(tmp_path, monkeypatch, extension):
    paths = [save(tmp_path / f"case_{c}{extension}", coded()[c]) for c in range(3)]
    prediction = opened(*paths)
    values = prediction.read()
    write_like, calls = predictions.write_like, []

    def fail_at_the_second(file, *how):
        write_like(file, *how)
        calls.append(file.name)
        if len(calls) == 2:
            raise OSError("no space left")

    with monkeypatch.context() as patched:
        patched.setattr(predictions, "write_like", fail_at_the_second)
        with pytest.raises(OSError, match="no space left"):
            write(prediction, values, tmp_path / "out", tmp_path)
    assert len(calls) == 2
    assert list((tmp_path / "out").iterdir()) == []
    assert len(write(prediction, values, tmp_path / "out", tmp_path)) == 3
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [path.name for path in paths]


def test_a_damaged_neighbor_in_an_archive_is_told_and_leaves_nothing(tmp_path):
    path = tmp_path / "case.npz"
    np.savez(path, probabilities=backwards(coded()), other=np.full(1000, 7, np.uint8))
    prediction = opened(path)
    values = prediction.read()
    whole = path.read_bytes()
    path.write_bytes(whole.replace(bytes([7] * 1000), bytes([7] * 999 + [8])))
    with pytest.raises(FileError, match=r"case: case.npz must be an .npz file; it cannot be read"):
        write(prediction, values, tmp_path / "out", tmp_path)
    assert list((tmp_path / "out").iterdir()) == []


# Memory


@pytest.mark.parametrize("extension", [".nii", ".nii.gz", ".npy", ".npz"])
def test_a_case_takes_the_memory_of_one_array(tmp_path, extension):
    shape = (64, 64, 64)  # 4 MiB
    path = save(tmp_path / f"case{extension}", last(coded(4, shape)) if "nii" in extension else coded(4, shape))
    tracemalloc.start()
    try:
        prediction = opened(path, classes=4)
        assert tracemalloc.get_traced_memory()[1] < 1.5 * 2**20
        prediction.rewrite(lambda values: 2 * values, tmp_path / "out", tmp_path, most_voxels=1 << 13)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < (4 + 2.5) * 2**20
    np.testing.assert_array_equal(opened(tmp_path / "out" / path.name, classes=4).read(), 2 * coded(4, shape))
