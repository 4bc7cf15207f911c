"""PNG and TIFF images, written by Pillow and tifffile: what was written is what is read, and what it means."""

import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from segcal.errors import FileError, GridError
from segcal.evaluation.measure import measure_case
from segcal.evaluation.options import Options
from segcal.volumes import CaseFiles, find_predictions, open_case, open_prediction, pair_cases
from segcal.volumes.arrays import read_array

SHAPE = (5, 7)
RANDOM = np.random.default_rng(0)
BYTES = RANDOM.integers(0, 250, SHAPE).astype(np.uint8)
WORDS = RANDOM.integers(0, 65000, SHAPE).astype(np.uint16)
COLORS = RANDOM.integers(0, 250, (*SHAPE, 3)).astype(np.uint8)
LABELS = RANDOM.integers(0, 3, SHAPE).astype(np.uint8)
FIRST = RANDOM.random(SHAPE).astype(np.float32)
MAPS = np.stack([FIRST / 2, 1 - FIRST, FIRST / 2])


def png(path: Path, values: np.ndarray, mode: str | None = None, **options) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    image = Image.fromarray(values)
    (image.convert(mode) if mode else image).save(path, **options)
    return path


def tiff(path: Path, values: np.ndarray, **options) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pytest.importorskip("tifffile").imwrite(path, values, **options)
    return path


def npy(path: Path, values: np.ndarray) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    np.save(path, values)
    return path


def check(path: Path, expected: np.ndarray) -> None:
    """Values, type and shape are those expected; a peek tells the latter two."""
    stored, peeked = read_array(path), read_array(path, peek=True)
    assert stored.picture
    np.testing.assert_array_equal(stored.values, expected)
    for found in (stored, peeked):
        assert (found.values.shape, found.values.dtype) == (expected.shape, expected.dtype)
    assert stored.color == peeked.color


def sums(prediction: tuple[Path, ...] | Path, label: Path):
    files = prediction if isinstance(prediction, tuple) else (prediction,)
    return measure_case(CaseFiles("case", files, label), Options(), threads=1).sums


def same(one, other) -> None:
    for name in ("bins", "overlap", "scores", "joint"):
        np.testing.assert_array_equal(getattr(one, name), getattr(other, name))


@pytest.mark.parametrize("values", [BYTES, WORDS, BYTES > 99], ids=["8", "16", "1"])
def test_gray_png_comes_back(tmp_path, values):
    check(png(tmp_path / "a.png", values), values)


def test_color_png_has_its_channels_first_and_an_even_transparency_is_dropped(tmp_path):
    check(png(tmp_path / "a.png", COLORS), np.moveaxis(COLORS, -1, 0))
    check(png(tmp_path / "b.png", COLORS, "RGBA"), np.moveaxis(COLORS, -1, 0))
    check(png(tmp_path / "c.png", BYTES, "LA"), BYTES)


def test_uneven_transparency_is_refused(tmp_path):
    path = png(tmp_path / "a.png", np.dstack([COLORS, BYTES]))
    with pytest.raises(FileError, match="its transparency differs between pixels"):
        read_array(path)


def test_a_palette_means_its_indices_even_if_they_are_0_and_255(tmp_path):
    image = Image.frombytes("P", SHAPE[::-1], (LABELS * 100 + 55).tobytes())
    image.putpalette([255 - value for value in range(256) for _ in range(3)])
    image.save(tmp_path / "a.png", transparency=0)
    check(tmp_path / "a.png", LABELS * 100 + 55)
    two = Image.frombytes("P", SHAPE[::-1], ((LABELS > 0) * np.uint8(255)).tobytes())
    two.putpalette([value for value in range(256) for _ in range(3)])
    two.save(tmp_path / "b.png")
    assert not read_array(tmp_path / "b.png").scaled


def test_pixels_stay_where_they_are_whatever_exif_says(tmp_path):
    exif = Image.Exif()
    exif[274] = 6  # turned by a quarter
    check(png(tmp_path / "a.png", BYTES, exif=exif), BYTES)


def test_sixteen_bit_colors_are_not_cut_to_eight(tmp_path):
    codecs = pytest.importorskip("imagecodecs")
    deep = RANDOM.integers(0, 65000, (*SHAPE, 3)).astype(np.uint16)
    (tmp_path / "a.png").write_bytes(codecs.png_encode(deep))
    check(tmp_path / "a.png", np.moveaxis(deep, -1, 0))


@pytest.mark.parametrize(
    ("values", "options", "channels_last"),
    [
        (BYTES, {}, False),
        (WORDS, {"compression": "lzw"}, False),
        (WORDS.astype(np.int16), {"compression": "zlib", "predictor": True}, False),
        (FIRST, {"compression": "packbits"}, False),
        (BYTES > 99, {}, False),
        (COLORS, {"photometric": "rgb"}, True),
        (COLORS.astype(np.uint16) * 200, {"photometric": "rgb", "compression": "lzw"}, True),
        (MAPS, {"photometric": "minisblack"}, False),
        (MAPS, {"photometric": "minisblack", "planarconfig": "separate"}, False),
        (np.moveaxis(MAPS, 0, -1), {"photometric": "minisblack", "planarconfig": "contig"}, True),
    ],
    ids=["8", "16-lzw", "signed-zlib", "float", "1", "rgb", "rgb16", "pages", "planes", "samples"],
)
def test_tiff_comes_back(tmp_path, values, options, channels_last):
    if "compression" in options:
        pytest.importorskip("imagecodecs")
    path = tiff(tmp_path / "a.tif", values, **options)
    check(path, np.moveaxis(values, -1, 0) if channels_last else values)


def test_tiff_by_pillow_comes_back(tmp_path):
    pytest.importorskip("tifffile")
    for name, values in (("a.tif", BYTES), ("b.tiff", WORDS), ("c.tif", FIRST)):
        check(png(tmp_path / name, values), values)


# What labels mean.


@pytest.mark.parametrize("top", [np.uint8(255), np.uint16(65535)])
def test_a_mask_of_black_and_white_is_zeros_and_ones(tmp_path, top):
    black_and_white = png(tmp_path / "mask.png", (LABELS > 0) * top)
    plain = npy(tmp_path / "plain.npy", (LABELS > 0).astype(np.uint8))
    maps = npy(tmp_path / "maps.npy", MAPS[:2] / MAPS[:2].sum(0))
    same(sums(maps, black_and_white), sums(maps, plain))
    # As a prediction it is a decision: probabilities of exactly 0 and 1.
    with open_case(CaseFiles("case", (black_and_white,), plain)) as case:
        ((values, _),) = case.slabs(1000)
        assert np.unique(values).tolist() == [0.0, 1.0]


def test_white_is_no_mask_where_it_is_the_label_to_ignore(tmp_path):
    void = np.where(LABELS > 1, 255, 0).astype(np.uint8)
    options, maps = Options(ignore_index=255), (npy(tmp_path / "maps.npy", MAPS),)
    found, expected = (
        measure_case(CaseFiles("case", maps, label), options, threads=1).sums
        for label in (png(tmp_path / "label.png", void), npy(tmp_path / "label.npy", void))
    )
    same(found, expected)
    assert found.bins[0].sum() == 3 * (void == 0).sum()


def test_other_gray_values_are_labels_as_they_are(tmp_path):
    label = png(tmp_path / "a.png", np.where(LABELS > 0, LABELS, 255).astype(np.uint8))
    with open_case(CaseFiles("case", (npy(tmp_path / "m.npy", MAPS),), label)) as case:
        ((_, labels),) = case.slabs(1000)
    assert set(labels.tolist()) == {1, 2, 255}


def test_gray_labels_saved_in_color_are_gray_and_colors_are_refused(tmp_path):
    maps = npy(tmp_path / "maps.npy", MAPS)
    plain = sums(maps, png(tmp_path / "gray.png", LABELS))
    same(sums(maps, png(tmp_path / "rgb.png", np.dstack([LABELS] * 3))), plain)
    with pytest.raises(GridError, match="labels must be one number a pixel; the picture has colors"):
        sums(maps, png(tmp_path / "colors.png", COLORS))


# What probabilities mean.


def test_every_way_to_store_maps_gives_the_sums_of_an_array(tmp_path):
    label = png(tmp_path / "label.png", LABELS)
    as_array = sums(npy(tmp_path / "a.npy", MAPS), label)
    same(sums(tiff(tmp_path / "a.tif", MAPS, photometric="minisblack"), label), as_array)
    last = tiff(tmp_path / "b.tif", np.moveaxis(MAPS, 0, -1), photometric="minisblack", planarconfig="contig")
    same(sums(last, label), as_array)
    same(sums(npy(tmp_path / "a.npy", MAPS), tiff(tmp_path / "label.tif", LABELS)), as_array)


@pytest.mark.parametrize("kind", [np.uint8, np.uint16])
def test_gray_pictures_per_class_are_shares_of_their_scale(tmp_path, kind):
    top = np.iinfo(kind).max
    steps = np.rint(MAPS * top).astype(kind)
    steps[1] = top - steps[0] - steps[2]
    label = png(tmp_path / "labels" / "case.png", LABELS)
    for index, row in enumerate(steps):
        png(tmp_path / "maps" / f"case_class{index}.png", row)
    (case,) = pair_cases(tmp_path / "maps", label.parent).cases
    assert [path.name for path in case.predictions] == [f"case_class{index}.png" for index in range(3)]
    expected = sums(npy(tmp_path / "a.npy", (steps / np.float32(top)).astype(np.float32)), label)
    same(measure_case(case, Options(), threads=1).sums, expected)


def test_one_gray_picture_is_one_foreground(tmp_path):
    label = png(tmp_path / "label.png", (LABELS > 0).astype(np.uint8))
    found = sums(png(tmp_path / "a.png", BYTES), label)
    same(found, sums(npy(tmp_path / "a.npy", BYTES / np.float32(255)), label))
    assert found.bins.shape[1] == 1


def test_colors_are_three_classes_only_if_they_sum_to_one(tmp_path):
    label = png(tmp_path / "label.png", LABELS)
    steps = np.rint(MAPS * 255).astype(np.uint8)
    steps[1] = 255 - steps[0] - steps[2]
    found = sums(png(tmp_path / "a.png", np.moveaxis(steps, 0, -1)), label)
    same(found, sums(npy(tmp_path / "a.npy", (steps / np.float32(255)).astype(np.float32)), label))
    with pytest.raises(FileError, match="only if they sum to 255 in every pixel, and these do not"):
        sums(png(tmp_path / "b.png", COLORS), label)


# Axes: square pictures show whether rows stay rows.


def square(classes=2):
    first = RANDOM.random((6, 6)).astype(np.float32)
    return np.stack([first, 1 - first][:classes]), (RANDOM.random((6, 6)) < first).astype(np.uint8)


def test_nnunets_arrays_of_pictures_are_not_turned(tmp_path):
    maps, labels = square()
    label = png(tmp_path / "labels" / "case.png", labels)
    (tmp_path / "maps").mkdir()
    np.savez(tmp_path / "maps" / "case.npz", probabilities=maps[:, None])
    png(tmp_path / "maps" / "case.png", labels)  # the label map that nnU-Net writes beside it
    (case,) = pair_cases(tmp_path / "maps", label.parent).cases
    same(measure_case(case, Options(), threads=1).sums, sums(npy(tmp_path / "a.npy", maps), label))
    (files,) = find_predictions(tmp_path / "maps")
    np.testing.assert_array_equal(open_prediction(files).read()[..., 0], maps)


def test_a_picture_beside_an_image_that_has_x_first_is_turned(tmp_path):
    import nibabel

    maps, labels = square()
    label = png(tmp_path / "label.png", labels)
    nifti = tmp_path / "maps.nii.gz"
    nibabel.Nifti1Image(maps.T[:, :, None], np.eye(4)).to_filename(nifti)  # (x, y, 1, class)
    same(sums(nifti, label), sums(npy(tmp_path / "a.npy", maps), label))


# Which files count.


def test_pictures_beside_volumes_are_figures(tmp_path):
    for name in ("one", "two"):
        npy(tmp_path / "maps" / f"{name}.npy", MAPS)
        png(tmp_path / "maps" / f"{name}.png", BYTES)
        png(tmp_path / "maps" / "figures" / f"{name}_overview.png", BYTES)
        png(tmp_path / "labels" / f"{name}.png", LABELS)
    pairing = pair_cases(tmp_path / "maps", tmp_path / "labels")
    assert [case.predictions[0].suffix for case in pairing.cases] == [".npy", ".npy"]
    assert (pairing.unpaired_predictions, pairing.unpaired_labels) == ((), ())


# What is written.


def test_calibrated_tiff_stays_tiff_and_png_becomes_an_array(tmp_path):
    tiff(tmp_path / "tiff" / "case.tif", MAPS, photometric="minisblack")
    for index, row in enumerate(np.rint(MAPS * 255).astype(np.uint8)):
        png(tmp_path / "png" / f"case_{index}.png", row)
    for folder, names in (("tiff", ["case.tif"]), ("png", [f"case_{index}.npy" for index in range(3)])):
        (files,) = find_predictions(tmp_path / folder)
        written = open_prediction(files).rewrite(lambda values: values / 2, tmp_path / "out", tmp_path / folder)
        assert [path.name for path in written] == names
        (again,) = find_predictions(tmp_path / "out")
        found = open_prediction(again)
        assert found.read().dtype == np.float32
        np.testing.assert_array_equal(found.read(), open_prediction(files).read() / 2)
        for path in written:
            path.unlink()
    with pytest.raises(FileError, match="Leave out --nifti"):
        open_prediction(files).rewrite(lambda values: values, tmp_path / "out", tmp_path / "png", nifti=True)


def test_labels_of_pictures_are_pictures(tmp_path):
    from segcal.volumes import place_of_labels

    path = png(tmp_path / "case.png", BYTES)
    (files,) = find_predictions(path)
    target = tmp_path / "out" / place_of_labels(files, tmp_path)
    open_prediction(files).write_labels(LABELS[..., None], target)
    with Image.open(target) as image:
        np.testing.assert_array_equal(np.asarray(image), LABELS)
    with pytest.raises(FileError, match="there are 2 masks, which may overlap"):
        open_prediction(files).write_labels(np.stack([LABELS, LABELS])[..., None], target)


# Files that are broken, or lie.


def chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


def test_a_header_that_lies_costs_no_memory(tmp_path):
    import tracemalloc

    header = struct.pack(">IIBBBBB", 200_000, 200_000, 16, 0, 0, 0, 0)
    path = tmp_path / "a.png"
    path.write_bytes(
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")
    )
    tracemalloc.start()
    with pytest.raises(FileError, match=r"announces 80,000,000,000 bytes and the file has \d+"):
        read_array(path)
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()


@pytest.mark.parametrize("name", ["a.png", "a.tif"])
def test_cut_off_and_foreign_files_are_a_sentence(tmp_path, name):
    if name == "a.tif":
        pytest.importorskip("tifffile")
    large = RANDOM.integers(0, 250, (60, 60)).astype(np.uint8)
    path = png(tmp_path / name, large)
    sound = path.read_bytes()
    for content in (sound[: len(sound) // 2], b"GIF89a" * 9, sound[:20]):
        path.write_bytes(content)
        with pytest.raises(FileError, match=r"^a\.(png|tif) must be "):
            read_array(path)


def test_a_missing_package_is_told_with_what_to_type(tmp_path, monkeypatch):
    import sys

    (tmp_path / "a.tif").write_bytes(b"II*\0")
    monkeypatch.setitem(sys.modules, "tifffile", None)
    with pytest.raises(
        FileError, match=r"without tifffile, which is not installed\. Type: pip install 'segcal\[images\]'\."
    ):
        read_array(tmp_path / "a.tif")


def test_a_pyramid_is_refused(tmp_path):
    tifffile = pytest.importorskip("tifffile")
    with tifffile.TiffWriter(tmp_path / "a.tif") as writer:
        writer.write(BYTES, photometric="minisblack")
        writer.write(BYTES[::2, ::2], photometric="minisblack")
    with pytest.raises(FileError, match="its pages differ in size or type"):
        read_array(tmp_path / "a.tif")


def test_a_figure_above_volumes_hides_none_and_pictures_above_others_count(tmp_path):
    model, labels = tmp_path / "model", tmp_path / "labels"
    (model / "fold_0" / "validation").mkdir(parents=True)
    labels.mkdir()
    np.save(labels / "a.npy", np.zeros((4, 5), np.uint8))
    np.save(model / "fold_0" / "validation" / "a.npy", np.full((2, 4, 5), 0.5, np.float32))
    Image.fromarray(BYTES).save(model / "fold_0" / "progress.png")  # as nnU-Net draws it
    (case,) = pair_cases(model, labels).cases
    assert case.predictions == (model / "fold_0" / "validation" / "a.npy",)
    assert [found.name for found in find_predictions(model)] == ["a"]
    pictures = tmp_path / "pictures"
    (pictures / "new" / "old").mkdir(parents=True)
    Image.fromarray(BYTES).save(pictures / "new" / "a.png")
    Image.fromarray(BYTES).save(pictures / "new" / "old" / "a.png")
    (case,) = pair_cases(pictures, labels).cases
    assert case.predictions == (pictures / "new" / "a.png",)
