"""Images on their way to a network and back: turned, cut, resampled, normalized; kept on disk."""

from __future__ import annotations

import gzip
import os
from dataclasses import replace
from itertools import permutations, product

import nibabel
import numpy as np
import pytest
import torch
from nibabel.orientations import axcodes2ornt, inv_ornt_aff, ornt_transform

from segcal.datasets import DataCase, Dataset
from segcal.datasets.recipes import PLAIN
from segcal.errors import FileError, GridError, LabelError
from segcal.training import preprocessing as prepare
from segcal.training.config import DataConfig
from segcal.training.preprocessing import PreparedStore, prepare_case, read_image, read_labels, restore
from segcal.volumes.regions import BUILT_IN

SHAPE = (7, 6, 5)
ORIENTATIONS = [
    tuple("LR"[flips[0]] if axis == 0 else "PA"[flips[1]] if axis == 1 else "IS"[flips[2]] for axis in order)
    for order in permutations(range(3))
    for flips in product((0, 1), repeat=3)
]


def config(**options) -> DataConfig:
    settings = {"spacing_mm": "keep", "intensity": "window", "window": (0, 1000), "crop_foreground": False}
    return DataConfig(dataset="test", root="", **settings | options)


def dataset(case, *, channels=1, values=(0, 1, 2, 3), regions=None) -> Dataset:
    names = tuple(f"class {value}" for value in values)
    return Dataset("test", "", case.label, ("MRI",) * channels, names, values, (case,), PLAIN, regions=regions)


def scene(shape=SHAPE):
    """An image whose every voxel differs, and labels that follow from it, in right-anterior-superior order."""
    image = 1 + np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    return image, (image % 4).astype(np.uint8)


def affine_of(spacing=(1.0, 1.0, 1.0), origin=(-20.0, 3.0, 11.0)):
    affine = np.diag([*spacing, 1.0])
    affine[:3, 3] = origin
    return affine


def save(path, array, affine=None, codes="RAS"):
    """Write an array given in RAS order so that its file has its axes in another order; the voxels stay in place."""
    affine = affine_of() if affine is None else affine
    turn = ornt_transform(axcodes2ornt("RAS"), axcodes2ornt(codes))
    turned = nibabel.orientations.apply_orientation(array, turn)
    nibabel.save(nibabel.Nifti1Image(turned, affine @ inv_ornt_aff(turn, array.shape[:3])), path)
    return path


@pytest.fixture
def make(tmp_path):
    """A case of one image and its labels, both stored in any order of axes."""

    def make(image, labels, *, codes="RAS", label_codes=None, affine=None) -> DataCase:
        files = save(tmp_path / "image.nii.gz", image, affine, codes)
        truth = save(tmp_path / "labels.nii.gz", labels, affine, label_codes or codes)
        return DataCase("heart-7", "heart-7", (files,), truth)

    return make


@pytest.mark.parametrize("codes", ORIENTATIONS, ids="".join)
def test_any_order_of_axes_is_turned_to_right_anterior_superior_and_back(make, codes):
    image, labels = scene()
    case = make(image, labels, codes=codes)
    found = prepare_case(case, dataset(case), config())
    np.testing.assert_allclose(found.image[0], image / 1000, rtol=1e-6)
    np.testing.assert_array_equal(found.labels, labels)
    stored = nibabel.load(case.images[0]).get_fdata()
    back = restore(torch.from_numpy(found.image), found.geometry)
    np.testing.assert_allclose(back[0], stored / 1000, rtol=1e-6)


@pytest.mark.parametrize("codes", ["LPS", "RAI", "LAS"])
def test_labels_stored_in_another_order_than_the_image_are_turned_onto_it(make, codes):
    image, labels = scene()
    case = make(image, labels, codes="LPS", label_codes=codes)
    np.testing.assert_array_equal(read_labels(case, dataset(case)), labels[::-1, ::-1])
    np.testing.assert_array_equal(prepare_case(case, dataset(case), config()).labels, labels)


def test_the_image_is_cut_to_what_is_not_zero_and_put_back_in_its_place(make):
    image, labels = np.zeros(SHAPE, np.float32), np.zeros(SHAPE, np.uint8)
    image[2:6, 1:4, 3] = scene((4, 3, 1))[0][..., 0]
    labels[3, 2, 3] = 2
    case = make(image, labels, codes="ALI")
    found = prepare_case(case, dataset(case), config(intensity="zscore", window=None, crop_foreground=True))
    assert found.image.shape == (1, 4, 3, 1)
    assert found.labels[1, 1, 0] == 2
    assert found.foreground.tolist() == [[1, 1, 0]]
    logits = torch.zeros(4, 4, 3, 1)
    logits[2] = torch.arange(12.0).reshape(4, 3, 1)
    back = restore(logits, found.geometry)
    codes = ornt_transform(axcodes2ornt("RAS"), axcodes2ornt("ALI"))
    expected = np.zeros(SHAPE, np.float32)
    expected[2:6, 1:4, 3:4] = logits[2]
    np.testing.assert_array_equal(back[2], nibabel.orientations.apply_orientation(expected, codes))
    outside = back.softmax(0)[0][torch.from_numpy(read_image(case).values[0] == 0)]
    assert (outside > 0.9999).all()  # background


def test_ct_is_cut_to_what_lies_above_the_window(make):
    image, labels = np.full(SHAPE, -1000, np.float32), np.zeros(SHAPE, np.uint8)
    image[1:3, :, 2:] = 40
    case = make(image, labels)
    found = prepare_case(case, dataset(case), config(window=(-100, 200), crop_foreground=True))
    assert found.image.shape == (1, 2, 6, 3)
    np.testing.assert_allclose(found.image, 140 / 300, rtol=1e-6)


def test_an_image_that_is_all_empty_stays_whole(make):
    case = make(np.zeros(SHAPE, np.float32), np.zeros(SHAPE, np.uint8))
    found = prepare_case(case, dataset(case), config(intensity="zscore", window=None, crop_foreground=True))
    assert found.image.shape == (1, *SHAPE)
    assert not found.image.any()
    assert found.foreground.shape == (0, 3)


def smooth(shape, spacing):
    """A wave, by position in millimeters."""
    x, y, z = ((np.arange(n) + 0.5) * step for n, step in zip(shape, spacing, strict=True))
    return (np.sin(x / 7)[:, None, None] + np.cos(y / 6)[:, None] + z / 40).astype(np.float32)


@pytest.mark.parametrize("codes", ["RAS", "SLP"])
def test_resampling_there_and_back_returns_a_smooth_field(make, codes):
    spacing = (1.5, 1.5, 5.0)
    field = smooth((24, 20, 8), spacing)
    case = make(200 * (2 + field), np.zeros(field.shape, np.uint8), affine=affine_of(spacing), codes=codes)
    found = prepare_case(case, dataset(case), config(spacing_mm=(1, 1, 4)))
    assert found.image.shape == (1, 36, 30, 10)  # 24 * 1.5, 20 * 1.5, 8 * 5 / 4
    resampled = smooth((36, 30, 10), (1, 1, 4))
    inner = (slice(2, -2),) * 3  # beyond the outer voxels' middles there is nothing to interpolate
    np.testing.assert_allclose(found.image[0][inner], 0.2 * (2 + resampled)[inner], atol=0.003)
    back = restore(torch.from_numpy(found.image), found.geometry)[0].numpy()
    stored = nibabel.load(case.images[0]).get_fdata() / 1000
    np.testing.assert_allclose(back[inner], stored[inner], atol=0.005)


def test_labels_are_resampled_to_the_nearest_and_stay_aligned(make):
    labels = np.zeros((6, 6, 4), np.uint8)
    labels[2:4, :, 1:3] = 3
    case = make(100.0 * labels, labels, affine=affine_of((2, 1, 3)))
    found = prepare_case(case, dataset(case), config(spacing_mm=(1, 1, 1)))
    expected = np.zeros((12, 6, 12), np.uint8)
    expected[4:8, :, 3:9] = 3
    np.testing.assert_array_equal(found.labels, expected)


def test_voxel_sizes_are_those_stored_beside_an_affine_that_was_never_set(tmp_path):
    """As in ACDC: the affine says 1 mm, pixdim what the scanner measured."""
    image = nibabel.Nifti1Image(scene((8, 8, 4))[0], np.eye(4))
    image.header.set_zooms((1.5, 1.5, 10))
    image.header["qform_code"], image.header["sform_code"] = 0, 2
    nibabel.save(image, tmp_path / "image.nii.gz")
    labels = nibabel.Nifti1Image(scene((8, 8, 4))[1], np.eye(4), image.header)
    nibabel.save(labels, tmp_path / "labels.nii.gz")
    case = DataCase("a", "a", (tmp_path / "image.nii.gz",), tmp_path / "labels.nii.gz")
    assert read_image(case).spacing_mm.tolist() == [1.5, 1.5, 10]
    np.testing.assert_array_equal(read_image(case).affine, np.eye(4))
    found = prepare_case(case, dataset(case), config(spacing_mm=(1, 1, 5)))
    assert found.image.shape == (1, 12, 12, 8)


def test_channels_in_one_file_or_in_several_are_the_same(tmp_path):
    random = np.random.default_rng(0)
    channels = random.normal(size=(3, *SHAPE)).astype(np.float32)
    one = save(tmp_path / "all.nii.gz", np.moveaxis(channels, 0, 3), codes="LPS")
    several = [save(tmp_path / f"{i}.nii.gz", channel, codes="LPS") for i, channel in enumerate(channels)]
    together, apart = (
        prepare_case(case, dataset(case, channels=3), config(window=(-9, 9)), labels=False)
        for case in (DataCase("a", "a", (one,), None), DataCase("a", "a", tuple(several), None))
    )
    np.testing.assert_array_equal(together.image, apart.image)
    np.testing.assert_allclose(together.image, (channels + 9) / 18, rtol=1e-5)


def test_a_channel_stored_in_another_order_is_turned_onto_the_first(tmp_path):
    image, _ = scene()
    paths = tuple(save(tmp_path / f"{codes}.nii.gz", image, codes=codes) for codes in ("LPS", "RSA"))
    first, second = read_image(DataCase("a", "a", paths, None)).values
    np.testing.assert_array_equal(first, second)


def test_the_scale_of_a_header_counts(tmp_path):
    stored = nibabel.Nifti1Image(np.full(SHAPE, 3, np.int16), np.eye(4))
    stored.header.set_slope_inter(2.0, -1024.0)
    nibabel.save(stored, tmp_path / "a.nii")
    assert np.unique(read_image(DataCase("a", "a", (tmp_path / "a.nii",), None)).values).tolist() == [-1018.0]


def test_z_scores_are_of_the_voxels_that_are_not_zero_by_channel(tmp_path):
    random = np.random.default_rng(0)
    channels = np.stack([random.normal(50, 9, SHAPE), random.normal(-3, 2, SHAPE)]).astype(np.float32)
    channels[:, :2] = 0
    path = save(tmp_path / "a.nii.gz", np.moveaxis(channels, 0, 3))
    case = DataCase("a", "a", (path,), None)
    found = prepare_case(case, dataset(case, channels=2), config(intensity="zscore", window=None), labels=False)
    assert not found.image[:, :2].any()
    np.testing.assert_allclose(found.image[:, 2:].mean((1, 2, 3)), 0, atol=1e-5)
    np.testing.assert_allclose(found.image[:, 2:].std((1, 2, 3)), 1, rtol=1e-5)


def brats(case):
    return dataset(case, values=(0, 1, 2, 4), regions=BUILT_IN["brats"])


@pytest.mark.parametrize("enhancing", [4, 3], ids=["2021", "2023"])
def test_label_values_become_class_indices_by_whatever_name(make, enhancing):
    labels = np.zeros(SHAPE, np.uint8)
    labels[0, 0, :4] = 0, 1, 2, enhancing
    case = make(scene()[0], labels)
    assert read_labels(case, brats(case))[0, 0, :4].tolist() == [0, 1, 2, 3]


def test_labels_stored_as_floats_are_read(make):
    image, labels = scene()
    case = make(image, labels.astype(np.float32))
    np.testing.assert_array_equal(read_labels(case, dataset(case)), labels)


def test_an_unknown_label_value_is_named_with_its_case(make):
    image, labels = scene()
    labels[0, 0, 0] = 9
    case = make(image, labels)
    with pytest.raises(LabelError, match=r"heart-7: labels must be among \[0, 1, 2, 3\]; labels.nii.gz holds \[9\]"):
        prepare_case(case, dataset(case), config())


def test_fractions_are_no_labels(make):
    image, labels = scene()
    case = make(image, labels + np.float32(0.3))
    with pytest.raises(FileError, match="heart-7: labels must be whole numbers"):
        read_labels(case, dataset(case))


def test_a_case_without_labels_is_refused_where_they_are_needed(make):
    case = replace(make(*scene()), label=None)
    with pytest.raises(FileError, match="heart-7 must have labels"):
        read_labels(case, dataset(case))


def test_labels_of_another_shape_or_place_are_refused(make, tmp_path):
    image, labels = scene()
    case = make(image, labels)
    save(case.label, labels[1:])
    with pytest.raises(GridError, match=r"heart-7: labels.nii.gz and image.nii.gz must lie on one grid"):
        prepare_case(case, dataset(case), config())
    save(case.label, labels, affine_of(origin=(5.0, 3.0, 11.0)))
    with pytest.raises(GridError, match="must lie on one grid"):
        prepare_case(case, dataset(case), config())


def test_channels_of_other_shapes_or_number_are_refused(make, tmp_path):
    image, _ = scene()
    case = make(*scene())
    other = save(tmp_path / "other.nii.gz", image[:, 1:])
    with pytest.raises(GridError, match=r"heart-7: other.nii.gz and image.nii.gz must lie on one grid"):
        read_image(replace(case, images=(*case.images, other)))
    with pytest.raises(GridError, match="heart-7: the image must have 2 channels; it has 1"):
        prepare_case(case, dataset(case, channels=2), config())


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_an_image_that_is_no_number_somewhere_is_refused(make, bad):
    image, labels = scene()
    image[1, 2, 3] = bad
    case = make(image, labels)
    with pytest.raises(FileError, match="heart-7: the image must hold finite numbers"):
        prepare_case(case, dataset(case), config())


def truncate(path):
    path.write_bytes(path.read_bytes()[:-40])


def truncate_inside(path):
    path.write_bytes(gzip.compress(gzip.decompress(path.read_bytes())[:-40]))


@pytest.mark.parametrize("part", ["image", "labels"])
@pytest.mark.parametrize(
    "spoil", [truncate, truncate_inside, lambda path: path.write_bytes(b"nothing"), lambda path: path.unlink()]
)
def test_a_broken_file_is_named_with_its_case(make, tmp_path, part, spoil):
    case = make(*scene())
    spoil(tmp_path / f"{part}.nii.gz")
    with pytest.raises(FileError, match=rf"heart-7: {part}\.nii\.gz must"):
        prepare_case(case, dataset(case), config())


def test_a_header_without_voxel_sizes_is_refused(make, tmp_path):
    case = make(*scene())
    content = bytearray(gzip.decompress(case.images[0].read_bytes()))
    content[80:84] = np.float32(np.nan).tobytes()  # pixdim[1]
    case.images[0].write_bytes(gzip.compress(bytes(content)))
    with pytest.raises(FileError, match="heart-7: voxel sizes must be above zero"):
        prepare_case(case, dataset(case), config(), labels=False)


def store_of(case, folder, **options):
    return PreparedStore(folder, dataset(case), config(**options))


def same(one, other):
    for part in ("image", "labels", "foreground"):
        np.testing.assert_array_equal(getattr(one, part), getattr(other, part))
    assert one.geometry == other.geometry


def test_a_stored_case_is_what_was_prepared_and_its_files_are_not_read_again(make, tmp_path, monkeypatch):
    case = make(*scene(), codes="LPI")
    first = store_of(case, tmp_path / "store").get(case)
    same(first, prepare_case(case, dataset(case), config()))
    monkeypatch.setattr(prepare, "prepare_case", lambda *_, **__: pytest.fail("read again"))
    again = store_of(case, tmp_path / "store").get(case)
    same(again, first)
    assert isinstance(again.image, np.memmap)


def test_a_case_without_any_foreground_is_stored(make, tmp_path):
    case = make(scene()[0], np.zeros(SHAPE, np.uint8))
    assert store_of(case, tmp_path / "store").get(case).foreground.shape == (0, 3)


@pytest.mark.parametrize("part", ["image", "labels"])
def test_a_changed_file_is_prepared_anew(make, tmp_path, part):
    image, labels = scene()
    case = make(image, labels)
    before = store_of(case, tmp_path / "store").get(case)
    path = tmp_path / f"{part}.nii.gz"
    save(path, scene()[0] + 5 if part == "image" else 3 - labels)
    os.utime(path, (1, 1))  # surely another time
    after = store_of(case, tmp_path / "store").get(case)
    assert not np.array_equal(getattr(before, part), getattr(after, part))
    same(after, prepare_case(case, dataset(case), config()))


def test_other_settings_are_prepared_apart(make, tmp_path):
    case = make(*scene())
    for window in ((0, 1000), (0, 500), (0, 1000)):
        found = store_of(case, tmp_path / "store", window=window).get(case)
        np.testing.assert_allclose(found.image.max(), 210 / window[1], rtol=1e-6)


def test_what_a_killed_process_left_half_way_is_made_again(make, tmp_path, monkeypatch):
    case = make(*scene())

    class Killed(BaseException):
        pass

    def write(path, content, whole=prepare.write_whole):
        if path.suffix == ".json":
            raise Killed
        whole(path, content)

    with monkeypatch.context() as patch:
        patch.setattr(prepare, "write_whole", write)
        with pytest.raises(Killed):
            store_of(case, tmp_path / "store").get(case)
    left = sorted((tmp_path / "store").iterdir())
    assert len(left) == 3
    left[0].write_bytes(b"half")
    same(store_of(case, tmp_path / "store").get(case), prepare_case(case, dataset(case), config()))
