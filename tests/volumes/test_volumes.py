"""Real files in every format and layout; what nibabel and plain indexing say is the truth.

A label map holds the index of each voxel, a prediction a number made of class and index: together they show that
every voxel comes once and that predictions stay with their labels.
"""

import gzip
import io
import os
import struct
import tracemalloc
import zipfile
from pathlib import Path

import nibabel as nib
import numpy as np
import pytest
from nibabel.orientations import axcodes2ornt, inv_ornt_aff, io_orientation, ornt_transform

from segcal.errors import ConfigError, FileError, GridError, SegcalError
from segcal.volumes import CaseFiles, arrays, open_case, pair_cases

SHAPE = (4, 5, 6)
CLASSES = 3
AFFINE = np.array([[1.5, 0, 0, -20], [0, 1.5, 0, 7], [0, 0, 3, 11], [0, 0, 0, 1.0]])
DATA = os.environ.get("SEGCAL_DATA")


def indices(shape=SHAPE):
    return np.arange(np.prod(shape), dtype=np.int32).reshape(shape)


def coded(classes=CLASSES, shape=SHAPE, dtype=np.float32):
    """Probabilities (class, x, y, z), each a number of its own."""
    number = np.prod(shape) * classes
    return (np.arange(number).reshape(classes, *shape) / number).astype(dtype)


def save_nifti(path, values, affine=AFFINE, *, kind=nib.Nifti1Image, dtype=None, slope=None, inter=0.0, big=False):
    """Write the raw values with exactly this scale in the header."""
    values = np.asarray(values, dtype)
    header = kind.header_class(endianness=">" if big else "<")
    header.set_data_dtype(values.dtype)
    image = kind(values, affine, header)
    image.header.set_slope_inter(*((slope, inter) if slope else (1.0, 0.0)))
    path.parent.mkdir(parents=True, exist_ok=True)
    image.to_filename(path)
    if slope:
        assert nib.load(path).dataobj.slope == pytest.approx(slope)
    return path


def last(values):
    return np.moveaxis(values, 0, -1)


def opened(prediction, label, name="case"):
    predictions = prediction if isinstance(prediction, tuple) else (prediction,)
    return open_case(CaseFiles(name, predictions, label))


def refused(prediction, label, sentence):
    """What a GridError says, after checking for the sentence; with an x for the sign of multiplication."""
    with pytest.raises(GridError) as caught:
        opened(prediction, label)
    told = str(caught.value).replace("\N{MULTIPLICATION SIGN}", "x")
    assert sentence in told
    return told


def gather(case, most_voxels=7):
    slabs = list(case.slabs(most_voxels))
    for probabilities, labels in slabs:
        assert probabilities.flags.c_contiguous
        assert probabilities.flags.writeable
        assert labels.flags.writeable  # torch warns about what cannot be written
        assert probabilities.shape == (case.classes, labels.shape[-1])
        assert labels.shape[-1] <= most_voxels
        assert labels.dtype.kind in "ui"
    return np.concatenate([p for p, _ in slabs], 1), np.concatenate([x for _, x in slabs], -1)


def check(case, truth, most_voxels=7):
    """Every voxel once, each with its own probabilities."""
    probabilities, labels = gather(case, most_voxels)
    assert np.array_equal(np.sort(labels), np.arange(truth[0].size))
    np.testing.assert_array_equal(probabilities, truth.reshape(len(truth), -1)[:, labels])


@pytest.fixture
def label(tmp_path):
    return save_nifti(tmp_path / "labels" / "case.nii.gz", indices())


# Formats and axes


@pytest.mark.parametrize("most_voxels", [1, 3, 4, 7, 20, 45, 119, 120, 10**9])
@pytest.mark.parametrize("extension", [".nii", ".nii.gz", ".npy", ".npz"])
def test_slabs_of_any_size_hold_every_voxel_once(tmp_path, label, extension, most_voxels):
    path = tmp_path / f"case{extension}"
    if extension == ".npy":
        np.save(path, coded())
    elif extension == ".npz":
        np.savez_compressed(path, coded())
    else:
        save_nifti(path, last(coded()))
    check(opened(path, label), coded(), most_voxels)


@pytest.mark.parametrize("kind", [nib.Nifti1Image, nib.Nifti2Image])
@pytest.mark.parametrize("big", [False, True])
@pytest.mark.parametrize("extension", [".nii", ".nii.gz"])
@pytest.mark.parametrize("classes_last", [False, True])
def test_nifti_of_either_version_and_byte_order(tmp_path, kind, big, extension, classes_last):
    label = save_nifti(tmp_path / f"label{extension}", indices(), kind=kind, big=big)
    values = last(coded()) if classes_last else coded()
    case = opened(save_nifti(tmp_path / f"case{extension}", values, kind=kind, big=big), label)
    assert (case.classes, case.grid.shape, case.grid.spacing_mm) == (3, SHAPE, (1.5, 1.5, 3.0))
    np.testing.assert_allclose(case.grid.affine, AFFINE)
    check(case, coded())


def test_nifti_vector_image_has_classes_on_the_fifth_axis(tmp_path, label):
    check(opened(save_nifti(tmp_path / "case.nii.gz", last(coded())[:, :, :, None]), label), coded())


def test_prediction_without_class_axis_is_one_class(tmp_path, label):
    for name, values in (("a", coded(1)[0]), ("b", last(coded(1))), ("c", coded(1))):
        check(opened(save_nifti(tmp_path / f"{name}.nii", values), label), coded(1))


def test_extensions_before_the_voxels_are_skipped(tmp_path, label):
    image = nib.Nifti1Image(last(coded()), AFFINE)
    image.header.extensions.append(nib.nifti1.Nifti1Extension("comment", b"some words" * 50))
    for name in ("case.nii", "case.nii.gz"):
        image.to_filename(tmp_path / name)
        check(opened(tmp_path / name, label), coded())


def test_content_decides_whether_a_file_is_compressed(tmp_path, label):
    save_nifti(tmp_path / "plain.nii", last(coded())).rename(tmp_path / "plain.nii.gz")
    save_nifti(tmp_path / "packed.nii.gz", last(coded())).rename(tmp_path / "packed.nii")
    check(opened(tmp_path / "plain.nii.gz", label), coded())
    check(opened(tmp_path / "packed.nii", label), coded())


@pytest.mark.parametrize(
    "arrange", [lambda p: p, last, lambda p: p.transpose(0, 3, 2, 1), lambda p: last(p).transpose(2, 1, 0, 3)]
)
@pytest.mark.parametrize("fortran", [False, True])
def test_npy_axes_are_found_by_the_shape_of_the_label(tmp_path, label, arrange, fortran):
    np.save(tmp_path / "case.npy", (np.asfortranarray if fortran else np.ascontiguousarray)(arrange(coded())))
    check(opened(tmp_path / "case.npy", label), coded())


def test_npy_with_a_batch_axis_of_one(tmp_path, label):
    np.save(tmp_path / "case.npy", coded()[None])
    check(opened(tmp_path / "case.npy", label), coded())


@pytest.mark.parametrize("key", ["probabilities", "softmax"])
@pytest.mark.parametrize("shape", [SHAPE, (4, 4, 4), (3, 3, 3)])
def test_nnunet_arrays_have_the_axes_of_nifti_reversed(tmp_path, key, shape):
    label = save_nifti(tmp_path / "label.nii.gz", indices(shape))
    np.savez_compressed(tmp_path / "case.npz", **{key: coded(3, shape).transpose(0, 3, 2, 1)})
    check(opened(tmp_path / "case.npz", label), coded(3, shape))


def test_npz_under_another_key_has_axes_in_order_where_both_orders_fit(tmp_path):
    np.save(tmp_path / "label.npy", indices((4, 4, 4)))
    np.savez(tmp_path / "case.npz", arr_0=coded(3, (4, 4, 4)))
    check(opened(tmp_path / "case.npz", tmp_path / "label.npy"), coded(3, (4, 4, 4)))
    np.savez(tmp_path / "case.npz", probabilities=coded(3, (4, 4, 4)))  # nnU-Net reverses what NIfTI orders
    check(opened(tmp_path / "case.npz", tmp_path / "label.npy"), coded(3, (4, 4, 4)))


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_npz_takes_the_array_of_the_known_name(tmp_path, label, save):
    save(tmp_path / "case.npz", softmax=coded().transpose(0, 3, 2, 1), spacing=np.ones(3))
    check(opened(tmp_path / "case.npz", label), coded())
    save(tmp_path / "one.npz", anything=coded())
    check(opened(tmp_path / "one.npz", label), coded())
    save(tmp_path / "two.npz", a=coded(), b=coded())
    with pytest.raises(FileError, match=r"two.npz must hold one array, or one named probabilities or .*: a, b"):
        opened(tmp_path / "two.npz", label)


def test_where_classes_could_be_first_or_last_nifti_has_them_last_and_npy_first(tmp_path):
    shape = (3, 3, 3)
    label = save_nifti(tmp_path / "label.nii", indices(shape))
    check(opened(save_nifti(tmp_path / "case.nii", last(coded(3, shape))), label), coded(3, shape))
    np.save(tmp_path / "case.npy", coded(3, shape))
    check(opened(tmp_path / "case.npy", label), coded(3, shape))


def test_voxel_sizes_decide_where_shapes_do_not(tmp_path):
    shape, affine = (3, 3, 3), np.diag([0.5, 0.7, 4.0, 1.0])
    label = save_nifti(tmp_path / "label.nii", indices(shape), affine)
    image = nib.Nifti1Image(coded(3, shape), np.diag([1, 0.5, 0.7, 1.0]))
    image.header.set_zooms((1, 0.5, 0.7, 4.0))
    image.to_filename(tmp_path / "case.nii")
    check(opened(tmp_path / "case.nii", label), coded(3, shape))


def test_two_dimensional_labels(tmp_path):
    shape = (5, 7)
    np.save(tmp_path / "label.npy", indices(shape))
    np.save(tmp_path / "case.npy", coded(3, shape))
    case = opened(tmp_path / "case.npy", tmp_path / "label.npy")
    assert case.grid.shape == shape
    assert case.grid.spacing_mm is None
    check(case, coded(3, shape))
    label = save_nifti(tmp_path / "label.nii.gz", indices(shape))
    check(opened(save_nifti(tmp_path / "case.nii.gz", last(coded(3, shape))[:, :, None]), label), coded(3, shape))
    check(opened(save_nifti(tmp_path / "one.nii.gz", coded(1, shape)[0]), label), coded(1, shape))


def test_one_file_per_class_in_the_order_given(tmp_path, label):
    files = tuple(save_nifti(tmp_path / f"case_{c}.nii.gz", coded()[c]) for c in range(3))
    check(opened(files, label), coded())
    with pytest.raises(GridError, match="files of one class each must have the axes of space only"):
        opened((files[0], save_nifti(tmp_path / "b.nii.gz", np.zeros((*SHAPE, 2, 2)))), label)


# Types and scales


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64, ">f4", ">f8"])
@pytest.mark.parametrize("extension", [".npy", ".npz"])
def test_floats_keep_their_values_and_double_precision(tmp_path, label, dtype, extension):
    stored = coded().astype(dtype)
    (np.save if extension == ".npy" else np.savez_compressed)(tmp_path / f"case{extension}", stored)
    case = opened(tmp_path / f"case{extension}", label)
    expected = np.float64 if stored.dtype.itemsize == 8 else np.float32
    assert next(case.slabs(10))[0].dtype == expected
    check(case, stored.astype(expected))


@pytest.mark.parametrize("dtype", [np.uint8, np.int16, np.uint16, np.int32, np.float32, np.float64])
@pytest.mark.parametrize("big", [False, True])
@pytest.mark.parametrize("extension", [".nii", ".nii.gz"])
def test_scaled_maps_come_out_as_nibabel_reads_them(tmp_path, label, dtype, big, extension):
    raw = (coded() * 250).astype(dtype)
    path = save_nifti(tmp_path / f"case{extension}", last(raw), slope=1 / 250, inter=0.001, big=big)
    truth = np.moveaxis(nib.load(path).get_fdata(), -1, 0)
    check(opened(path, label), truth if dtype is np.float64 else truth.astype(np.float32))


@pytest.mark.parametrize(("dtype", "full"), [(np.uint8, 255), (np.uint16, 65535), (">u2", 65535)])
@pytest.mark.parametrize("classes", [1, 3])
def test_unscaled_integers_are_shares_of_their_full_scale(tmp_path, label, dtype, full, classes):
    raw = np.round(coded(classes).astype(float) * full).astype(dtype)
    np.save(tmp_path / "case.npy", raw)
    truth = (raw.astype(np.float64) / full).astype(np.float32)
    check(opened(tmp_path / "case.npy", label), truth)
    check(opened(save_nifti(tmp_path / "case.nii.gz", last(raw)), label), truth)


def test_integers_of_zeros_and_ones_stay_as_they_are_where_they_choose_a_class(tmp_path, label):
    chosen = np.stack([indices() % 3 == c for c in range(3)]).astype(np.uint8)
    np.save(tmp_path / "case.npy", chosen)
    check(opened(tmp_path / "case.npy", label), chosen.astype(np.float32))
    check(opened(save_nifti(tmp_path / "one.nii", chosen[0]), label), chosen[:1].astype(np.float32))
    np.save(tmp_path / "bool.npy", chosen[:2].astype(bool))
    check(opened(tmp_path / "bool.npy", label), chosen[:2].astype(np.float32))
    np.save(tmp_path / "empty.npy", 0 * chosen)
    check(opened(tmp_path / "empty.npy", label), 0 * chosen.astype(np.float32))
    np.save(tmp_path / "faint.npy", chosen[:2])
    with pytest.raises(FileError, match="zeros and ones, which could mean 1 or one step of the scale"):
        opened(tmp_path / "faint.npy", label)


@pytest.mark.parametrize("dtype", [np.int8, np.int16, np.int32, np.int64, np.uint32])
def test_other_integers_without_a_scale_are_refused(tmp_path, label, dtype):
    path = save_nifti(tmp_path / "case.nii", last(coded() * 100), dtype=dtype)
    with pytest.raises(FileError, match=rf"case: probabilities must be .* got {np.dtype(dtype)} without a scale"):
        opened(path, label)


# Labels


@pytest.mark.parametrize("dtype", [np.uint8, np.int8, np.int16, np.uint16, np.int32, np.int64, np.float32, np.float64])
@pytest.mark.parametrize("extension", [".nii", ".nii.gz", ".npy", ".npz"])
def test_labels_of_any_type_are_read_as_whole_numbers(tmp_path, dtype, extension):
    path = tmp_path / f"label{extension}"
    if extension.startswith(".nii"):
        save_nifti(path, indices(), dtype=dtype, big=True)
    else:
        (np.save if extension == ".npy" else np.savez_compressed)(path, indices().astype(dtype))
    np.save(tmp_path / "case.npy", coded())
    check(opened(tmp_path / "case.npy", path), coded())


def test_labels_that_a_writer_squeezed_into_scaled_integers_are_restored(tmp_path):
    values = (indices() % 16).astype(np.float64)
    image = nib.Nifti1Image(values, AFFINE)
    image.set_data_dtype(np.uint8)  # nibabel then scales 0..15 to 0..255
    image.to_filename(tmp_path / "label.nii.gz")
    assert not np.array_equal(nib.load(tmp_path / "label.nii.gz").get_fdata(), values)
    probabilities, labels = gather(opened(save_nifti(tmp_path / "case.nii", last(coded())), tmp_path / "label.nii.gz"))
    np.testing.assert_array_equal(labels, np.round(probabilities[0] * 360) % 16)


@pytest.mark.parametrize("value", [1.5, 0.01, np.nan, np.inf, 1e30])
def test_labels_with_fractions_are_refused_by_value(tmp_path, value):
    values = indices().astype(np.float32)
    values[1, 2, 3] = value
    label = save_nifti(tmp_path / "label.nii.gz", values)
    case = opened(save_nifti(tmp_path / "case.nii", last(coded())), label)
    with pytest.raises(
        FileError, match=rf"case: labels must be whole numbers; one is {value:.6g}\.".replace("+", r"\+")
    ):
        list(case.slabs(7))


def test_labels_beyond_64_bits_are_refused(tmp_path):
    np.save(tmp_path / "label.npy", indices().astype(np.uint64) + 2**63)
    np.save(tmp_path / "case.npy", coded())
    with pytest.raises(FileError, match="labels must fit 64 bits"):
        list(opened(tmp_path / "case.npy", tmp_path / "label.npy").slabs(7))


@pytest.mark.parametrize("regions_last", [False, True])
@pytest.mark.parametrize("extension", [".nii", ".nii.gz", ".npy"])
def test_region_labels_have_a_row_per_region(tmp_path, regions_last, extension):
    regions = np.stack([indices(), indices() % 2, indices() // 7])
    values = last(regions) if regions_last else regions
    path = tmp_path / f"label{extension}"
    np.save(path, values) if extension == ".npy" else save_nifti(path, values)
    probabilities, labels = gather(opened(save_nifti(tmp_path / "case.nii.gz", last(coded())), path))
    assert labels.shape == (3, 120)
    np.testing.assert_array_equal(labels, regions.reshape(3, -1)[:, labels[0]])
    np.testing.assert_array_equal(probabilities, coded().reshape(3, -1)[:, labels[0]])


@pytest.mark.parametrize("regions_last", [False, True])
def test_regions_of_a_cube_are_on_the_axis_that_is_no_axis_of_space(tmp_path, regions_last):
    """As many classes as regions: with reversed axes, each array could also be 6 classes of a grid of 6 x 6 x 2."""
    regions = np.random.default_rng(0).integers(0, 2, (2, 6, 6, 6)).astype(np.uint8)
    np.save(tmp_path / "label.npy", last(regions) if regions_last else regions)
    np.save(tmp_path / "case.npy", regions.astype(np.float32))
    probabilities, labels = gather(opened(tmp_path / "case.npy", tmp_path / "label.npy"))
    assert labels.shape == (2, 216)
    np.testing.assert_array_equal(probabilities, labels)


# Orientation and grids


@pytest.mark.parametrize("codes", ["RAS", "LPS", "LAS", "ASR", "SPL", "PIR"])
@pytest.mark.parametrize("extension", [".nii", ".nii.gz"])
@pytest.mark.parametrize("per_class", [False, True])
def test_a_turned_prediction_is_turned_back(tmp_path, label, codes, extension, per_class):
    turn = ornt_transform(io_orientation(AFFINE), axcodes2ornt(codes))
    values = nib.apply_orientation(last(coded()), turn)
    affine = AFFINE @ inv_ornt_aff(turn, SHAPE)
    if per_class:
        path = tuple(save_nifti(tmp_path / f"case_{c}{extension}", values[..., c], affine) for c in range(3))
    else:
        path = save_nifti(tmp_path / f"case{extension}", values, affine)
    check(opened(path, label), coded(), most_voxels=30)


def test_a_turned_prediction_is_turned_back_on_an_oblique_grid_of_equal_sides(tmp_path):
    shape, angle = (4, 4, 4), np.radians(44)
    affine = np.eye(4)
    affine[:2, :2] = [[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]]
    affine[:3, 3] = (100, -50, 3)
    label = save_nifti(tmp_path / "label.nii", indices(shape), affine)
    flip = np.array([[0, -1, 0, 3], [1, 0, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1.0]])  # voxel (i, j) lies at (3 - j, i)
    i, j, k = np.indices(shape)
    case = opened(save_nifti(tmp_path / "case.nii", last(coded(3, shape)[:, 3 - j, i, k]), affine @ flip), label)
    check(case, coded(3, shape))


def test_headers_that_say_nothing_are_accepted_where_shapes_agree(tmp_path, label):
    image = nib.Nifti1Image(last(coded()), None)
    image.to_filename(tmp_path / "unset.nii")
    check(opened(tmp_path / "unset.nii", label), coded())
    check(opened(save_nifti(tmp_path / "identity.nii", last(coded()), np.eye(4)), label), coded())
    check(opened(save_nifti(tmp_path / "itk.nii", last(coded()), np.diag([-1, -1, 1, 1.0])), label), coded())
    bare = save_nifti(tmp_path / "label.nii", indices(), np.eye(4))
    check(opened(save_nifti(tmp_path / "placed.nii", last(coded())), bare), coded())
    image.header.set_zooms((2.0, 2.0, 2.0, 1.0))
    image.to_filename(tmp_path / "sized.nii")
    refused(tmp_path / "sized.nii", label, "labels are 4x5x6 at 1.5x1.5x3.0 mm, probabilities 4x5x6 at 2.0 mm")


def test_voxel_sizes_count_where_the_affine_contradicts_them(tmp_path):
    """ACDC: the affine has steps of 1 mm, the header's voxel sizes are the true ones."""
    image = nib.Nifti1Image(indices(), None)
    image.header.set_sform(np.diag([-1, -1, 1, 1.0]), 2)
    image.header.set_zooms((1.5, 1.5, 10.0))
    nib.Nifti1Image(indices(), None, image.header).to_filename(tmp_path / "label.nii")
    assert nib.load(tmp_path / "label.nii").affine[0, 0] == -1
    case = opened(save_nifti(tmp_path / "a.nii", last(coded()), np.diag([-1.5, -1.5, 10, 1])), tmp_path / "label.nii")
    assert case.grid.spacing_mm == (1.5, 1.5, 10.0)
    check(case, coded())
    affine = np.array([[1.5, 0, 0, -4.5], [0, 1.5, 0, -6], [0, 0, 10, 0], [0, 0, 0, 1.0]])
    turned = save_nifti(tmp_path / "b.nii", last(coded()[:, ::-1, ::-1]), affine)
    check(opened(turned, tmp_path / "label.nii"), coded())


def test_rounding_of_the_affine_is_tolerated(tmp_path, label):
    nearly = AFFINE + np.array([[4e-4, 0, 1e-3, 8e-3], [0, 0, 0, -8e-3], [0, 1e-3, 1e-3, 0], [0, 0, 0, 0]])
    check(opened(save_nifti(tmp_path / "case.nii", last(coded()), nearly), label), coded())


def shifted(x):
    affine = AFFINE.copy()
    affine[0, 3] += x
    return affine


@pytest.mark.parametrize(
    ("shape", "affine", "sentence"),
    [
        ((3, 5, 6), AFFINE, "labels are 4x5x6 at 1.5x1.5x3.0 mm, probabilities 3x5x6 at 1.5x1.5x3.0 mm. Resample"),
        (SHAPE, np.diag([2, 2, 2, 1.0]), "labels are 4x5x6 at 1.5x1.5x3.0 mm, probabilities 4x5x6 at 2.0 mm. Resample"),
        (SHAPE, shifted(5), "both 4x5x6 at 1.5x1.5x3.0 mm, but their origins are (-20.0, 7.0, 11.0) and (-15.0, 7.0,"),
        (SHAPE, shifted(0.05), "but their origins are (-20.0, 7.0, 11.0) and (-19.95, 7.0, 11.0) mm. Resample"),
        (
            SHAPE,
            AFFINE @ np.diag([-1, 1, 1, 1]),
            "but their axes differ by up to 180.00° (RAS and LAS) and origins are",
        ),
    ],
)
def test_a_different_grid_is_named_in_one_sentence(tmp_path, label, shape, affine, sentence):
    path = save_nifti(tmp_path / "case.nii.gz", last(coded(2, shape)), affine)
    told = refused(path, label, sentence)
    assert told.startswith("case: labels ")
    assert told.endswith("Resample the probabilities to the label grid.")


def test_the_sentence_of_the_design(tmp_path):
    label = save_nifti(tmp_path / "label.nii.gz", np.zeros((24, 24, 15), np.uint8), np.eye(4))
    path = save_nifti(tmp_path / "case.nii.gz", np.zeros((12, 12, 12, 4), np.float32), np.diag([1.5, 1.5, 1.5, 1]))
    told = refused(path, label, "")
    assert told == (
        "case: labels are 24x24x15 at 1.0 mm, probabilities 12x12x12 at 1.5 mm. "
        "Resample the probabilities to the label grid."
    )


def test_arrays_of_another_shape_are_refused(tmp_path, label):
    for shape, told in (((2, 4, 5, 7), "4x5x7"), ((9, 9), "9x9x1"), ((2, 2, 4, 5, 6), "2x2x4x5x6")):
        np.save(tmp_path / "case.npy", np.zeros(shape, np.float32))
        refused(tmp_path / "case.npy", label, f"case: labels are 4x5x6 at 1.5x1.5x3.0 mm, probabilities {told}")


# Memory


@pytest.mark.parametrize("extension", [".nii", ".npy", ".npz"])
def test_uncompressed_files_are_read_slab_by_slab(tmp_path, extension):
    shape = (64, 64, 64)  # 4 MiB of probabilities, 0.25 MiB of labels
    label = save_nifti(tmp_path / "label.nii", indices(shape) % 5, dtype=np.uint8)
    values = coded(4, shape)
    path = tmp_path / f"case{extension}"
    if extension == ".nii":
        save_nifti(path, last(values))
    else:
        (np.save if extension == ".npy" else np.savez)(path, values)
    tracemalloc.start()
    try:
        case = opened(path, label)
        voxels = 0
        for probabilities, labels in case.slabs(4096):
            assert probabilities.shape == (4, labels.size)
            voxels += labels.size
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert voxels == 64**3
    assert peak < 6 * 4096 * (4 * 4 + 1)


@pytest.mark.parametrize("extension", [".nii.gz", ".npz"])
def test_compressed_files_are_inflated_once(tmp_path, extension):
    shape = (64, 64, 64)
    label = save_nifti(tmp_path / "label.nii", indices(shape) % 5, dtype=np.uint8)
    path = tmp_path / f"case{extension}"
    if extension == ".npz":
        np.savez_compressed(path, coded(4, shape).astype(np.float16))
    else:
        save_nifti(path, last(coded(4, shape)))
    inflated = 4 * 64**3 * (2 if extension == ".npz" else 4)
    tracemalloc.start()
    try:
        for _ in opened(path, label).slabs(4096):
            pass
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert inflated < peak < inflated + 1.5 * 2**20  # a copy would add 2 or 4 MiB


def test_a_case_that_fits_one_slab_is_not_copied(tmp_path, label):
    case = opened(save_nifti(tmp_path / "case.nii.gz", last(coded())), label)
    ((one, labels),) = case.slabs(120)
    ((again, _),) = case.slabs(120)
    assert np.shares_memory(one, again)
    assert labels.shape == (120,)


def test_slabs_outlive_the_case(tmp_path):
    np.save(tmp_path / "label.npy", indices().astype(np.uint8))
    np.save(tmp_path / "case.npy", coded())
    with opened(tmp_path / "case.npy", tmp_path / "label.npy") as case:
        slabs = list(case.slabs(50))
    with pytest.raises(FileError, match="case: the case must be open"):
        next(case.slabs(50))
    np.testing.assert_array_equal(np.concatenate([labels for _, labels in slabs]), np.arange(120))


def test_a_slab_must_hold_a_voxel(tmp_path, label):
    np.save(tmp_path / "case.npy", coded())
    with pytest.raises(ConfigError, match="most_voxels must be a whole number of at least 1; got 0"):
        next(opened(tmp_path / "case.npy", label).slabs(0))


def test_without_isal_the_standard_library_inflates(tmp_path, label, monkeypatch):
    monkeypatch.setattr(arrays, "gzip", gzip)
    check(opened(save_nifti(tmp_path / "case.nii.gz", last(coded())), label), coded())
    np.savez_compressed(tmp_path / "case.npz", coded())
    check(opened(tmp_path / "case.npz", label), coded())


# Broken files


def nifti_bytes(values=None, **fields):
    image = nib.Nifti1Image(last(coded()) if values is None else values, AFFINE)
    content = bytearray(image.to_bytes())
    for place, form, value in fields.values():
        struct.pack_into(form, content, place, value)
    return bytes(content)


def npy_bytes(values):
    stream = io.BytesIO()
    np.save(stream, values, allow_pickle=True)
    return stream.getvalue()


def npy_announcing(shape):
    stream = io.BytesIO()
    np.lib.format.write_array_header_1_0(stream, {"descr": "<f4", "fortran_order": False, "shape": shape})
    return stream.getvalue() + bytes(64)


def npz_bytes(**members):
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            archive.writestr(f"{name}.npy", content)
    return stream.getvalue()


def damaged(content):
    middle = len(content) // 2
    return content[:middle] + bytes([content[middle] ^ 0xFF]) + content[middle + 1 :]


NOISE = np.random.default_rng(0).random((*SHAPE, 3), np.float32)  # does not compress: damage hits data
BROKEN = {
    "empty.nii.gz": (b"", "the file is empty"),
    "empty.npz": (b"", "the file is empty"),
    "text.nii.gz": (b"This is not an image.\n" * 50, "does not begin with a NIfTI header"),
    "text.nii": (b"short", "does not begin with a NIfTI header"),
    "text.npy": (b"This is not an array.\n" * 50, "must be an .npy file; it cannot be read"),
    "text.npz": (b"This is not an archive.\n" * 50, "must be an .npz file; it cannot be read"),
    "packed_text.nii.gz": (gzip.compress(b"words " * 500), "does not begin with a NIfTI header"),
    "packed_nothing.nii.gz": (gzip.compress(b""), "does not begin with a NIfTI header"),
    "cut.nii.gz": (gzip.compress(nifti_bytes(NOISE))[:-300], "it ends too early"),
    "cut_tail.nii.gz": (gzip.compress(nifti_bytes(NOISE))[:-3], "it ends too early"),
    "cut_start.nii.gz": (gzip.compress(nifti_bytes(NOISE))[:5], "it ends too early"),
    "short.nii.gz": (gzip.compress(nifti_bytes(NOISE)[:-8]), "it ends too early"),
    "damaged.nii.gz": (damaged(gzip.compress(nifti_bytes(NOISE))), "cannot be read"),
    "cut.nii": (nifti_bytes()[:-1], "its header announces 1,792 bytes and the file has 1,791: broken or cut off"),
    "pair.nii": (nifti_bytes(magic=(344, "<4s", b"ni1\0")), "does not begin with a NIfTI header"),
    "kind.nii": (nifti_bytes(kind=(70, "<h", 9999)), "must be a NIfTI image; it cannot be read"),
    "complex.nii": (nifti_bytes(kind=(70, "<h", 32), bits=(72, "<h", 64)), "its values are complex64, not real"),
    "color.nii": (nifti_bytes(kind=(70, "<h", 128), bits=(72, "<h", 24)), "not real numbers"),
    "zero.nii": (nifti_bytes(size=(42, "<h", 0)), r"its shape \(0, 5, 6, 3\) is not that of an image"),
    "negative.nii": (nifti_bytes(size=(42, "<h", -4)), "is not that of an image"),
    "axes.nii": (nifti_bytes(axes=(40, "<h", 99)), "must be a"),
    "huge.nii": (nifti_bytes(x=(42, "<h", 32767), y=(44, "<h", 32767)), "header announces .* and the file has"),
    "huge.nii.gz": (
        gzip.compress(nifti_bytes(x=(42, "<h", 32767), y=(44, "<h", 32767), z=(46, "<h", 32767))),
        "header announces .* and the file has",
    ),
    "offset.nii": (nifti_bytes(offset=(108, "<f", 1e9)), "header announces"),
    "offset_nan.nii": (nifti_bytes(offset=(108, "<f", np.nan)), "must be a"),
    "offset_low.nii": (nifti_bytes(offset=(108, "<f", 16)), "must be a"),
    "inter.nii": (nifti_bytes(slope=(112, "<f", 1), inter=(116, "<f", np.inf)), "must be a NIfTI image"),
    "cut.npy": (npy_bytes(coded())[:-4], "its header announces"),
    "cut_header.npy": (npy_bytes(coded())[:20], "must be an .npy file"),
    "huge.npy": (npy_announcing((3, 10**6, 10**6, 10**6)), "its header announces 12,000,000,000,000,000,128 bytes"),
    "objects.npy": (
        npy_bytes(np.array([[1, "a"], [None, {}]], dtype=object)),
        "Python objects, which are never unpick",
    ),
    "records.npy": (npy_bytes(np.zeros((3, 3), "f4,i4")), "not real numbers"),
    "words.npy": (npy_bytes(np.array([["a", "b"]])), "not real numbers"),
    "scalar.npy": (npy_bytes(np.float32(3)), r"its shape \(\) is not that of an image"),
    "cut.npz": (npz_bytes(probabilities=npy_bytes(coded()))[:-40], "must be an .npz file; it cannot be read"),
    "nothing.npz": (npz_bytes(), "must hold one array, or one named .*; its arrays: none"),
    "objects.npz": (npz_bytes(probabilities=npy_bytes(np.array([[{}]]))), "Python objects, which are never unpickled"),
    "text_inside.npz": (npz_bytes(probabilities=b"words"), "must be"),
    "huge.npz": (npz_bytes(softmax=npy_announcing((3, 10**6, 10**6))), "announces .* bytes and the archive holds"),
    "damaged.npz": (damaged(npz_bytes(softmax=npy_bytes(NOISE))), "must be an .npz file; it cannot be read"),
    "case.txt": (b"words", "must end in one of .nii.gz, .nii, .npz, .npy"),
}


@pytest.mark.parametrize("side", ["prediction", "label"])
@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_file_is_refused_in_one_sentence(tmp_path, label, name, side):
    content, sentence = BROKEN[name]
    (tmp_path / name).write_bytes(content)
    good = save_nifti(tmp_path / "good.nii.gz", last(coded()))
    with pytest.raises(FileError, match=f"^case: {name} .*{sentence}") as caught:
        opened(*((tmp_path / name, label) if side == "prediction" else (good, tmp_path / name)))
    assert str(caught.value).startswith(f"case: {name} must ")
    assert "\n" not in str(caught.value)
    assert str(caught.value).endswith(".")


def test_what_is_no_file_is_refused(tmp_path, label):
    os.mkfifo(tmp_path / "pipe.nii.gz")
    (tmp_path / "folder.nii.gz").mkdir()
    (tmp_path / "loop.nii.gz").symlink_to("loop.nii.gz")
    for name in ("pipe", "folder", "loop", "absent"):
        with pytest.raises(FileError, match=f"case: {name}.nii.gz must be a file; it"):
            opened(tmp_path / f"{name}.nii.gz", label)


@pytest.mark.parametrize("name", ["case.nii", "case.nii.gz", "case.npy", "case.npz"])
def test_no_damage_to_a_header_raises_anything_else(tmp_path, name):
    """Random bytes anywhere in the first part of a file: read, or refused by us."""
    label = tmp_path / "label.npy"
    np.save(label, indices())
    plain = nifti_bytes() if "nii" in name else npy_bytes(coded())
    generator = np.random.default_rng(1)
    for _ in range(60):
        content = bytearray(npz_bytes(probabilities=plain) if name == "case.npz" else plain)
        for _ in range(4):
            content[generator.integers(min(len(content), 400))] = generator.integers(256)
        path = tmp_path / name
        path.write_bytes(gzip.compress(content, 1) if name.endswith(".gz") else content)
        try:
            for _ in opened(path, label).slabs(1000):
                pass
        except SegcalError:
            pass


# Pairing


def touch(root, *names):
    for name in names:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"x")
    return root


def paired(tmp_path, predictions, labels):
    """Case name: (predictions, label), and what was left on either side."""
    one, other = touch(tmp_path / "p", *predictions), touch(tmp_path / "l", *labels)
    pairing = pair_cases(one, other)
    found = {
        case.name: ([p.relative_to(one).as_posix() for p in case.predictions], case.label.relative_to(other).as_posix())
        for case in pairing.cases
    }
    assert [case.name for case in pairing.cases] == sorted(found)
    return found, pairing.unpaired_predictions, pairing.unpaired_labels


def test_equal_stems_pair_whatever_the_format(tmp_path):
    found, *left = paired(
        tmp_path,
        [
            "b.nii.gz",
            "a.npy",
            "c.npz",
            "d.nii",
            ".hidden.nii.gz",
            "._a.nii.gz",
            "notes.txt",
            "dataset.json",
            "e.nii.gz",
        ],
        ["c.nii.gz", "a.nii.gz", "b.npz", "d.npy", "f.nii.gz", "dataset.json", ".DS_Store"],
    )
    assert found == {
        "a": (["a.npy"], "a.nii.gz"),
        "b": (["b.nii.gz"], "b.npz"),
        "c": (["c.npz"], "c.nii.gz"),
        "d": (["d.nii"], "d.npy"),
    }
    assert left == [("e.nii.gz",), ("f.nii.gz",)]


def test_nnunet_folder(tmp_path):
    names = [f"BRATS_{i:03}{end}" for i in (1, 2) for end in (".npz", ".nii.gz", ".pkl")]
    extra = ["dataset.json", "plans.json", "predict_from_raw_data_args.json"]
    found, *left = paired(tmp_path, names + extra, ["BRATS_001.nii.gz", "BRATS_002.nii.gz"])
    assert found == {f"BRATS_00{i}": ([f"BRATS_00{i}.npz"], f"BRATS_00{i}.nii.gz") for i in (1, 2)}
    assert left == [(), ()]


@pytest.mark.parametrize("postfix", ["_seg", "_trans", "_prob", "_pred", "_probabilities", "_softmax", "-prob"])
def test_monai_folders(tmp_path, postfix):
    found, *left = paired(
        tmp_path, [f"{x}/{x}{postfix}.nii.gz" for x in "abd"], ["a.nii.gz", "b_gt.nii.gz", "c_gt.nii.gz"]
    )
    assert found == {"b": ([f"b/b{postfix}.nii.gz"], "b_gt.nii.gz")}  # beside files with an ending, a is an image
    assert left == [(f"a/a{postfix}.nii.gz", f"d/d{postfix}.nii.gz"), ("c_gt.nii.gz",)]


def test_probabilities_win_over_the_segmentation_beside_them(tmp_path):
    found, *left = paired(
        tmp_path, ["a/a_seg.nii.gz", "a/a_prob.nii.gz", "b/prob.npy", "b/seg.npy"], ["a.npy", "b.npy"]
    )
    assert found == {"a": (["a/a_prob.nii.gz"], "a.npy"), "b": (["b/prob.npy"], "b.npy")}
    assert left == [(), ()]


def test_brats_labels_lie_in_case_folders_beside_the_images(tmp_path):
    images = [f"BraTS2021_00000/BraTS2021_00000_{kind}.nii.gz" for kind in ("t1", "t1ce", "t2", "flair", "seg")]
    new = [f"BraTS-GLI-00001-000/BraTS-GLI-00001-000-{kind}.nii.gz" for kind in ("t1n", "t2f", "seg")]
    found, *left = paired(tmp_path, ["BraTS2021_00000.nii.gz", "BraTS-GLI-00001-000.nii.gz"], images + new)
    assert found == {
        "BraTS2021_00000": (["BraTS2021_00000.nii.gz"], images[-1]),
        "BraTS-GLI-00001-000": (["BraTS-GLI-00001-000.nii.gz"], new[-1]),
    }
    assert left == [(), ()]


@pytest.mark.parametrize("predictions", ["{}.npz", "{}/segmentation.nii.gz", "{}/anything.nii.gz", "{}/{}_prob.nii.gz"])
def test_kits_labels_go_by_their_folder(tmp_path, predictions):
    cases = ("case_00000", "case_00001")
    labels = [f"{case}/{kind}.nii.gz" for case in cases for kind in ("imaging", "segmentation", "instances/kidney_1")]
    found, *left = paired(tmp_path, [predictions.format(case, case) for case in cases], labels)
    assert found == {case: ([predictions.format(case, case)], f"{case}/segmentation.nii.gz") for case in cases}
    assert left == [(), ()]


@pytest.mark.parametrize("above", ["", "training/"])
def test_acdc_folders_hold_several_cases_and_their_images(tmp_path, above):
    labels = [
        f"{above}patient001/patient001_{end}.nii.gz" for end in ("4d", "frame01", "frame01_gt", "frame12", "frame12_gt")
    ]
    found, *left = paired(tmp_path, ["patient001_frame01.nii.gz", "patient001_frame12.npz"], [*labels, "Info.cfg"])
    assert found == {
        "patient001_frame01": (["patient001_frame01.nii.gz"], labels[2]),
        "patient001_frame12": (["patient001_frame12.npz"], labels[4]),
    }
    assert left == [(), ()]


@pytest.mark.parametrize("postfix", ["_gt", "_seg", "_label", "_labels", "-seg", "_mask"])
def test_label_endings_are_left_off_where_the_whole_stem_has_no_prediction(tmp_path, postfix):
    found, *left = paired(tmp_path, ["a.npy", f"b{postfix}.npy"], [f"a{postfix}.npy", f"b{postfix}.npy"])
    assert found == {"a": (["a.npy"], f"a{postfix}.npy"), f"b{postfix}": ([f"b{postfix}.npy"], f"b{postfix}.npy")}
    assert left == [(), ()]


def test_a_whole_stem_wins_over_a_shortened_one(tmp_path):
    found, *left = paired(tmp_path, ["a.npy", "a_prob.npy"], ["a.npy"])
    assert found == {"a": (["a.npy"], "a.npy")}
    assert left == [("a_prob.npy",), ()]


@pytest.mark.parametrize(
    "style", ["a_{}", "a_000{}", "a_class{}", "a_prob{}", "a_c0{}", "a-{}", "a_prob_{}", "a/a_{}", "a/{}", "a/class_{}"]
)
@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("label", ["a.nii.gz", "a_gt.nii.gz"])
def test_one_file_per_class_in_order_of_numbers(tmp_path, style, first, label):
    names = [style.format(first + i) + ".nii.gz" for i in range(3)]
    assert paired(tmp_path, reversed(names), [label]) == ({"a": (names, label)}, (), ())


def test_files_per_class_win_over_the_label_map_beside_them(tmp_path):
    names = ["a_0.nii.gz", "a_1.nii.gz"]
    assert paired(tmp_path, [*names, "a.nii.gz"], ["a.nii.gz"]) == ({"a": (names, "a.nii.gz")}, (), ())


def test_class_numbers_are_numbers(tmp_path):
    names = [f"a_{i}.npy" for i in range(12)]
    assert paired(tmp_path, names, ["a.npy"])[0]["a"][0] == names


def test_numbered_cases_are_no_classes(tmp_path):
    names = [f"a_{i}.npy" for i in range(3)]
    assert len(paired(tmp_path / "1", names, names)[0]) == 3
    assert len(paired(tmp_path / "2", names, [f"a_{i}_gt.npy" for i in range(3)] + ["a_gt.npy"])[0]) == 3
    assert paired(tmp_path / "3", ["a_0.npy", "a_2.npy"], ["a.npy"]) == ({}, ("a_0.npy", "a_2.npy"), ("a.npy",))


@pytest.mark.parametrize(
    ("predictions", "labels", "both"),
    [
        (["a.nii", "a.nii.gz"], ["a.npy"], "predictions of case a must be one"),
        (["a_prob.npy", "a_softmax.npy"], ["a.npy"], "predictions of case a must be one"),
        (["x/a.npy", "y/a.npy"], ["a.npy"], "predictions of case a must be one"),
        (["a.npy"], ["a.npy", "a.npz"], "labels of case a must be one"),
        (["a.npy"], ["a_gt.npy", "a_seg.npy"], "labels of case a must be one"),
        (["a_0.npy", "a_00.npy", "a_1.npy"], ["a.npy"], "class 0 of case a must be one file"),
        (["a_0.npy", "a_1.npy", "a_c0.npy", "a_c1.npy"], ["a.npy"], "predictions of case a must be one"),
    ],
)
def test_two_files_that_claim_one_case_are_named(tmp_path, predictions, labels, both):
    with pytest.raises(FileError, match=f"{both}.*; .* and .* both claim it"):
        paired(tmp_path, predictions, labels)


def test_single_files_are_one_case(tmp_path):
    touch(tmp_path, "x.npz", "case_7_seg.nii.gz", "kits_3/segmentation.nii.gz", "folder/a.npy")
    case = CaseFiles("case_7", (tmp_path / "x.npz",), tmp_path / "case_7_seg.nii.gz")
    assert pair_cases(*case.predictions, case.label).cases == (case,)
    assert pair_cases(tmp_path / "x.npz", tmp_path / "kits_3" / "segmentation.nii.gz").cases[0].name == "kits_3"
    with pytest.raises(FileError, match=r"predictions must be a folder, or .*x.npz is a file and the other is not"):
        pair_cases(tmp_path / "x.npz", tmp_path / "folder")
    with pytest.raises(FileError, match=r"labels must be a folder, or .*absent does not exist"):
        pair_cases(tmp_path / "folder", tmp_path / "absent")


def test_links_are_followed_but_never_in_circles(tmp_path):
    real = touch(tmp_path / "elsewhere", "a/a_seg.nii.gz")
    predictions, labels = touch(tmp_path / "p", "a.npy"), touch(tmp_path / "l", "notes.txt")
    (labels / "a").symlink_to(real / "a")
    (labels / "again").symlink_to(labels)
    (real / "a" / "up").symlink_to(labels)
    (predictions / "self").symlink_to("self")
    pairing = pair_cases(predictions, labels)
    assert [case.name for case in pairing.cases] == ["a"]
    assert (pairing.unpaired_predictions, pairing.unpaired_labels) == ((), ())


@pytest.mark.skipif(DATA is None, reason="SEGCAL_DATA names no folder with ACDC and Task04_Hippocampus")
def test_real_labels_are_read_as_nibabel_reads_them(tmp_path):
    for folder, pattern in (("ACDC/database/training", "*/*_gt.nii.gz"), ("Task04_Hippocampus/labelsTr", "*.nii.gz")):
        root, predictions = Path(DATA) / folder, tmp_path / folder
        some = sorted(root.glob(pattern))[:3]
        for path in some:
            image = nib.load(path)
            labels = image.get_fdata()
            chosen = np.stack([labels == c for c in range(4)], -1).astype(np.float32)
            save_nifti(predictions / path.name.replace("_gt", ""), chosen, image.affine)
        if not some:
            pytest.skip(f"{folder} is not there")
        pairing = pair_cases(predictions, root)
        assert [case.label for case in pairing.cases] == some
        for files in pairing.cases:
            probabilities, labels = gather(open_case(files), 10**9)
            assert np.array_equal(probabilities.argmax(0), labels)
            assert np.array_equal(labels, nib.load(files.label).get_fdata().ravel(order="F"))
