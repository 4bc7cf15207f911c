"""Damaged files: after any flipped bit or cut, a file with a checksum is read exactly as before, or rejected."""

from __future__ import annotations

import gzip
import io
import struct
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nibabel
import numpy as np
import pytest
from PIL import Image

from segcal.errors import FileError, SegcalError
from segcal.volumes import find_predictions, open_prediction
from segcal.volumes.arrays import read_array
from segcal.volumes.cases import PROBABILITY_KEYS
from segcal.volumes.images import place_of

FLIPS = 1000
RANDOM = np.random.default_rng(0)
LABELS = RANDOM.integers(0, 3, (6, 5, 4)).astype(np.uint8)
LARGE = RANDOM.integers(0, 3, (24, 20, 48)).astype(np.uint8)  # more than inflaters take at once
MAPS = RANDOM.random((2, 4, 5, 6)).astype(np.float16)
GRAY = RANDOM.integers(0, 250, (12, 11)).astype(np.uint8)
DEEP = RANDOM.integers(0, 65000, (12, 11)).astype(np.uint16)
EIGHT_BITS = np.hstack([RANDOM.integers(0, 250, (24, 9)), np.full((24, 13), 7)]).astype(np.uint8)
PICTURE = np.hstack([RANDOM.integers(0, 65000, (24, 9)), np.full((24, 13), 7)]).astype(np.uint16)
AFFINE = np.diag([1.5, 1.5, 3.0, 1.0])

Values = np.ndarray[Any, Any]


def write_nifti(values: Values) -> Callable[[Path], Values]:
    def write(path: Path) -> Values:
        nibabel.Nifti1Image(values, AFFINE).to_filename(path)
        return values

    return write


def write_npy(path: Path) -> Values:
    np.save(path, MAPS)
    return MAPS


def write_npz(path: Path) -> Values:
    np.savez(path, probabilities=MAPS, logits=MAPS + 1)
    return MAPS


def write_compressed_npz(path: Path) -> Values:
    np.savez_compressed(path, probabilities=MAPS, logits=MAPS + 1)
    return MAPS


def write_png(values: Values) -> Callable[[Path], Values]:
    def write(path: Path) -> Values:
        Image.fromarray(values).save(path)
        return values if values.ndim == 2 else np.moveaxis(values, -1, 0)

    return write


def write_deep_color_png(path: Path) -> Values:
    """Of 16 bits, which Pillow cannot write."""
    values = np.dstack([PICTURE, PICTURE[::-1], PICTURE[:, ::-1]])
    path.write_bytes(pytest.importorskip("imagecodecs").png_encode(values))
    return np.moveaxis(values, -1, 0)


def chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


def gray_png(stream: bytes, *, interlaced: bool = False) -> bytes:
    """A PNG of GRAY with this compressed stream."""
    header = struct.pack(">IIBBBBB", *GRAY.shape[::-1], 8, 0, 0, 0, interlaced)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", stream) + chunk(b"IEND", b"")


def plain_rows(values: Values) -> bytes:
    """Rows, each after the filter 0."""
    return b"".join(b"\0" + row.tobytes() for row in values)


def write_interlaced_png(path: Path) -> Values:
    passes = [GRAY[::8, ::8], GRAY[::8, 4::8], GRAY[4::8, ::4], GRAY[::4, 2::4], GRAY[2::4, ::2], GRAY[::2, 1::2]]
    path.write_bytes(gray_png(zlib.compress(b"".join(map(plain_rows, [*passes, GRAY[1::2]]))), interlaced=True))
    return GRAY


def write_tiff(compression: str | None) -> Callable[[Path], Values]:
    def write(path: Path) -> Values:
        tifffile = pytest.importorskip("tifffile")
        pytest.importorskip("imagecodecs")
        tifffile.imwrite(path, DEEP, photometric="minisblack", compression=compression, rowsperstrip=5)
        return DEEP

    return write


WITH_CHECKSUM = {
    "case.nii.gz": write_nifti(LARGE),
    "stored.npz": write_npz,
    "compressed.npz": write_compressed_npz,
    "gray_8.png": write_png(EIGHT_BITS),
    "gray_16.png": write_png(PICTURE),
    "color_8.png": write_png(np.dstack([EIGHT_BITS, EIGHT_BITS[::-1], EIGHT_BITS[:, ::-1]])),
    "color_16.png": write_deep_color_png,
    "interlaced.png": write_interlaced_png,
    "deflate.tif": write_tiff("zlib"),  # in its strips
}
WITHOUT_CHECKSUM = {
    "case.nii": write_nifti(LABELS),
    "case.npy": write_npy,
    "plain.tif": write_tiff(None),
    "lzw.tif": write_tiff("lzw"),
}


def read(path: Path) -> tuple[Any, ...]:
    """Everything that a reader says of a file, in a form that compares exactly."""
    stored = read_array(path, keys=PROBABILITY_KEYS)
    geometry = stored.geometry
    place = geometry and (tuple(affine.tobytes() for affine in geometry.affines), geometry.zooms, geometry.bare)
    values = stored.values
    meaning = (stored.slope, stored.inter, stored.key, stored.order, stored.turned, stored.picture, stored.color)
    return (values.shape, values.dtype, values.tobytes(), meaning, place)


def protected_bytes(path: Path) -> range:
    """Places of all bytes that a checksum covers, or that describe each other."""
    if path.suffix != ".tif":
        return range(path.stat().st_size)
    with pytest.importorskip("tifffile").TiffFile(path) as tiff:  # its tags have no checksum
        first, *_ = tiff.pages[0].dataoffsets
        return range(first, first + sum(tiff.pages[0].databytecounts))


@pytest.mark.parametrize("name", WITH_CHECKSUM)
def test_no_flipped_bit_gives_other_values(tmp_path, name):
    path = tmp_path / name
    expected = WITH_CHECKSUM[name](path)
    intact = read(path)
    np.testing.assert_array_equal(read_array(path, keys=PROBABILITY_KEYS).values, expected)
    content, places = path.read_bytes(), protected_bytes(path)
    rejected = 0
    with path.open("r+b", buffering=0) as file:
        for bit in np.random.default_rng(1).choice(8 * len(places), FLIPS, replace=False).tolist():
            place = places[bit // 8]
            file.seek(place)
            file.write(bytes([content[place] ^ 1 << bit % 8]))
            try:
                assert read(path) == intact, f"bit {bit % 8} of byte {place}"
            except SegcalError:
                rejected += 1
            file.seek(place)
            file.write(content[place : place + 1])
    assert path.read_bytes() == content
    assert rejected > FLIPS / 3  # the others are times of day, and what an archive says twice


@pytest.mark.parametrize("name", [*WITH_CHECKSUM, *WITHOUT_CHECKSUM])
def test_a_file_that_is_cut_off_anywhere_is_rejected(tmp_path, name):
    path = tmp_path / name
    (WITH_CHECKSUM | WITHOUT_CHECKSUM)[name](path)
    with path.open("r+b", buffering=0) as file:
        for length in reversed(range(path.stat().st_size)):
            file.truncate(length)
            with pytest.raises(FileError):
                read_array(path, keys=PROBABILITY_KEYS)


# NIfTI


def nifti_bytes(**fields: Any) -> bytes:
    image = nibabel.Nifti1Image(LARGE, AFFINE)
    content = bytearray(image.to_bytes())
    for place, form, value in fields.values():
        struct.pack_into(form, content, place, value)
    return bytes(content)


SMALLER = {"z": (46, "<h", 2)}  # the third axis, of 48
MOVED = {"x": (292, "<f", 7.0)}  # the offset along the first axis, of 0


def with_checksum_of(content: bytes, original: bytes) -> bytes:
    """What a damaged stream inflates to, with the checksum and the size of the original behind it."""
    return gzip.compress(content)[:-8] + gzip.compress(original)[-8:]


def test_a_header_that_was_damaged_within_a_stream_is_rejected(tmp_path):
    path = tmp_path / "case.nii.gz"
    for fields in (SMALLER, MOVED):
        path.write_bytes(with_checksum_of(nifti_bytes(**fields), nifti_bytes()))
        with pytest.raises(FileError, match=r"case\.nii\.gz must be"):
            read_array(path)


@pytest.mark.parametrize("name", ["case.nii", "case.nii.gz"])
def test_an_image_with_more_bytes_than_its_header_announces_is_rejected(tmp_path, name):
    path = tmp_path / name
    for content in (nifti_bytes(**SMALLER), nifti_bytes() + b"more"):
        path.write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
        with pytest.raises(FileError, match="its header announces"):
            read_array(path)


def test_a_stream_of_several_parts_is_read_and_each_part_has_its_checksum(tmp_path):
    path, content = tmp_path / "case.nii.gz", nifti_bytes()
    parts = [gzip.compress(content[:200]), gzip.compress(content[200:400]), gzip.compress(content[400:])]
    path.write_bytes(b"".join(parts))
    np.testing.assert_array_equal(read_array(path).values, LARGE)
    for damaged in range(3):
        broken = [part[:-8] + bytes(8) if i == damaged else part for i, part in enumerate(parts)]
        path.write_bytes(b"".join(broken))
        with pytest.raises(FileError, match="cannot be read"):
            read_array(path)


def test_a_damaged_label_map_beside_an_array_is_rejected_before_its_header_is_used(tmp_path):
    maps = np.stack([LARGE.T, 2 - LARGE.T]).astype(np.float16) / 2
    np.savez_compressed(tmp_path / "case.npz", probabilities=maps)
    beside = tmp_path / "case.nii.gz"
    beside.write_bytes(with_checksum_of(nifti_bytes(**MOVED), nifti_bytes()))
    (files,) = find_predictions(tmp_path)
    assert files.reference == beside
    with pytest.raises(FileError, match=r"^case: case\.nii\.gz must be"):
        open_prediction(files)
    beside.write_bytes(gzip.compress(nifti_bytes()))
    np.testing.assert_array_equal(open_prediction(files).read(), maps.transpose(0, 3, 2, 1))


def test_the_place_of_an_image_is_that_of_nibabel(tmp_path):
    for name in ("case.nii", "case.nii.gz"):
        write_nifti(LABELS)(tmp_path / name)
        place = place_of(tmp_path / name)
        np.testing.assert_array_equal(place.affine, nibabel.load(tmp_path / name).affine)
        assert (place.spacing_mm, place.voxel_ml) == ((1.5, 1.5, 3.0), pytest.approx(0.00675))
    (tmp_path / "text.nii").write_bytes(b"not an image" * 99)
    with pytest.raises(FileError, match="does not begin with a NIfTI header"):
        place_of(tmp_path / "text.nii")


# numpy


def npy_bytes(values: Values) -> bytes:
    content = io.BytesIO()
    np.save(content, values)
    return content.getvalue()


def test_an_array_with_more_bytes_than_its_header_announces_is_rejected(tmp_path):
    (tmp_path / "a.npy").write_bytes(npy_bytes(LABELS) + b"more")
    for name, kind in (("b.npz", zipfile.ZIP_STORED), ("c.npz", zipfile.ZIP_DEFLATED)):
        with zipfile.ZipFile(tmp_path / name, "w", kind) as archive:
            archive.writestr("a.npy", npy_bytes(LABELS) + b"more")
    for path in sorted(tmp_path.iterdir()):
        with pytest.raises(FileError, match="announces"):
            read_array(path)


def test_an_array_that_is_stored_has_the_checksum_of_the_archive(tmp_path):
    path = tmp_path / "case.npz"
    write_npz(path)
    place = path.read_bytes().index(MAPS.tobytes())
    with path.open("r+b") as file:
        file.seek(place + 5)
        file.write(bytes([MAPS.tobytes()[5] ^ 1]))
    with pytest.raises(FileError, match=r"its member probabilities\.npy does not have the checksum in the archive"):
        read_array(path, keys=PROBABILITY_KEYS)


def test_an_archive_that_has_two_names_for_an_array_is_rejected(tmp_path):
    """Under another name the axes of an array, or another array, would be read."""
    path = tmp_path / "case.npz"
    for write in (write_npz, write_compressed_npz):
        write(path)
        content = path.read_bytes()
        first, last = content.index(b"probabilities"), content.rindex(b"probabilities")
        assert first < last
        for place in (first, last):
            path.write_bytes(content[:place] + b"P" + content[place + 1 :])
            with pytest.raises(FileError, match=r"case\.npz must be an \.npz file"):
                read_array(path, keys=PROBABILITY_KEYS)


def test_plans_beside_nnunets_arrays_that_cannot_be_read_are_named(tmp_path):
    """They say whether the axes of the arrays are turned."""
    write_compressed_npz(tmp_path / "case.npz")
    (tmp_path / "plans.json").write_text('{"image_reader_writer": "NibabelIOWithReor')
    with pytest.raises(FileError, match=r"plans\.json must be a JSON file that can be read"):
        read_array(tmp_path / "case.npz", keys=PROBABILITY_KEYS)


# PNG


@pytest.mark.parametrize(
    ("stream", "sentence"),
    [
        (zlib.compress(plain_rows(GRAY[:6])), "announces 144 bytes of pixels and it holds 72: broken or cut off"),
        (zlib.compress(plain_rows(GRAY[:6]))[:-4], "announces 144 bytes of pixels and it holds 72: broken or cut off"),
        (zlib.compress(plain_rows(GRAY))[:-4], "announces 144 bytes of pixels and it holds 144: broken or cut off"),
        (zlib.compress(plain_rows(GRAY))[:-4] + bytes(4), "must be a PNG image; it cannot be read"),
        (zlib.compress(plain_rows(GRAY) + b"\0"), "announces 144 bytes of pixels and it holds 145"),
        (b"", "announces 144 bytes of pixels and it holds 0"),
    ],
    ids=["half of the rows", "half of a stream", "no checksum", "wrong checksum", "too long", "empty"],
)
def test_a_png_with_another_number_of_rows_is_rejected(tmp_path, stream, sentence):
    path = tmp_path / "case.png"
    path.write_bytes(gray_png(zlib.compress(plain_rows(GRAY))))
    np.testing.assert_array_equal(read_array(path).values, GRAY)
    path.write_bytes(gray_png(stream))
    with pytest.raises(FileError, match=sentence):
        read_array(path)


def test_a_png_in_many_parts_is_read(tmp_path):
    """Empty parts, other parts, and bytes behind the stream and behind the end, all of which decoders ignore."""
    stream = zlib.compress(plain_rows(GRAY))
    parts = [stream[i : i + 7] for i in range(0, len(stream), 7)]
    data = b"".join(chunk(b"IDAT", part) for part in [b"", *parts, b"", b"behind the stream"])
    content = gray_png(b"")
    start, end = content[:33], content[-12:]
    path = tmp_path / "case.png"
    path.write_bytes(start + chunk(b"tEXt", b"Title\0case") + data + end + b"behind the end")
    np.testing.assert_array_equal(read_array(path).values, GRAY)


def test_a_part_of_a_png_with_a_wrong_checksum_is_named(tmp_path):
    content = gray_png(zlib.compress(plain_rows(GRAY)))
    (tmp_path / "case.png").write_bytes(content[:29] + bytes(4) + content[33:])
    with pytest.raises(FileError, match="its part 'IHDR' does not have the checksum behind it"):
        read_array(tmp_path / "case.png")


# TIFF


def test_a_tiff_without_one_of_its_strips_is_rejected(tmp_path):
    tifffile = pytest.importorskip("tifffile")
    for compression in (None, "zlib", "lzw"):
        path = tmp_path / "case.tif"
        write_tiff(compression)(path)
        with tifffile.TiffFile(path) as tiff:
            tags = [tiff.pages[0].tags[name] for name in ("StripOffsets", "StripByteCounts")]
            places = [tag.offset + 4 for tag in tags]  # of their number of values
            assert all(tag.count == 3 for tag in tags)
        with path.open("r+b") as file:
            for place in places:
                file.seek(place)
                file.write(struct.pack("<I", 2))
        with pytest.raises(FileError, match=r"case\.tif must be"):
            read_array(path)


def test_links_to_files_are_read(tmp_path):
    for name, write in {**WITH_CHECKSUM, **WITHOUT_CHECKSUM}.items():
        (tmp_path / "files").mkdir(exist_ok=True)
        expected = write(tmp_path / "files" / name)
        (tmp_path / name).symlink_to(tmp_path / "files" / name)
        np.testing.assert_array_equal(read_array(tmp_path / name, keys=PROBABILITY_KEYS).values, expected)
