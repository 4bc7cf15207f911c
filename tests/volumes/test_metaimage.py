"""MetaImage headers: every form that SimpleITK reads as it reads it, and forms that must not be read."""

import gzip
import os
import zlib
from pathlib import Path

import numpy as np
import pytest
from simpleitk_oracle import check_as_simpleitk

from segcal.errors import FileError
from segcal.volumes.arrays import read_array

VALUES = np.arange(24, dtype=np.uint8)


def write(path: Path, lines: str, voxels: bytes, *, first: str = "NDims = 2\nDimSize = 4 3\n") -> Path:
    path.write_bytes(f"ObjectType = Image\n{first}{lines}ElementDataFile = LOCAL\n".encode() + voxels)
    return path


def test_voxels_are_in_the_order_of_the_format(tmp_path):
    """By hand: the first axis is the fastest, after the components of a voxel."""
    path = write(tmp_path / "a.mha", "ElementNumberOfChannels = 2\nElementType = MET_UCHAR\n", bytes(VALUES))
    values = read_array(path).values
    assert values.shape == (4, 3, 2)
    assert values[1, 0].tolist() == [2, 3]
    assert values[0, 1].tolist() == [8, 9]


@pytest.mark.parametrize("lines", [
    "ElementSpacing = 2 3\nOffset = 5 6\nTransformMatrix = 0.6 0.8 -0.8 0.6\n",
    "ElementSize = 2 3\nPosition = 5 6\nOrientation = 0 1 1 0\n",
    "Origin = 5 6\nRotation = 0 1 1 0\nElementSize = 9 9\nElementSpacing = 2 3\n",
    "ImagePosition = 5.5 -6e1\n",
    "ElementSpacing = -2 3\n",
    "AnatomicalOrientation = RAI\nCenterOfRotation = 7 7\nComment = 1 = 2\n",
    "Modality = MET_MOD_CT\nElementToIntensityFunctionSlope = 2\n",
])  # fmt: skip
def test_places_are_those_of_simpleitk(tmp_path, lines):
    path = write(tmp_path / "a.mha", f"BinaryData = True\n{lines}ElementType = MET_UCHAR\n", bytes(VALUES[:12]))
    check_as_simpleitk(path)


@pytest.mark.parametrize("name", ["CHAR", "ASCII_CHAR", "UCHAR", "SHORT", "USHORT", "INT", "UINT", "LONG", "ULONG",
                                  "LONG_LONG", "ULONG_LONG", "FLOAT", "DOUBLE", "FLOAT_ARRAY"])  # fmt: skip
@pytest.mark.parametrize("order", ["", "BinaryDataByteOrderMSB = True\n", "ElementByteOrderMSB = 1\n"])
def test_types_and_byte_orders_are_those_of_simpleitk(tmp_path, name, order):
    sizes = {
        "CHAR": 1,
        "ASCII_CHAR": 1,
        "UCHAR": 1,
        "SHORT": 2,
        "USHORT": 2,
        "LONG_LONG": 8,
        "ULONG_LONG": 8,
        "DOUBLE": 8,
    }
    voxels = np.random.default_rng(0).integers(0, 120, 12 * sizes.get(name, 4)).astype(np.uint8).tobytes()
    check_as_simpleitk(write(tmp_path / "a.mha", f"BinaryData = True\n{order}ElementType = MET_{name}\n", voxels))


@pytest.mark.parametrize("lines", ["", "HeaderSize = -1\n", "HeaderSize = 7\n"])
def test_a_header_of_the_voxel_file_is_skipped(tmp_path, lines):
    (tmp_path / "a.raw").write_bytes(bytes(7 if lines else 0) + bytes(VALUES[:12]))
    path = write(tmp_path / "a.mhd", f"{lines}ElementType = MET_UCHAR\n", b"")
    path.write_text(path.read_text().replace("LOCAL", "a.raw"))
    np.testing.assert_array_equal(check_as_simpleitk(path).values, VALUES[:12].reshape(3, 4).T)


def test_compressed_voxels_may_be_gzip_and_of_any_length(tmp_path):
    for compress in (zlib.compress, gzip.compress):
        voxels = compress(bytes(VALUES[:12]))
        for size in ("", f"CompressedDataSize = {len(voxels)}\n"):  # SimpleITK needs it
            lines = f"BinaryData = True\nCompressedData = True\n{size}ElementType = MET_UCHAR\n"
            path = write(tmp_path / "a.mha", lines, voxels)
            np.testing.assert_array_equal(read_array(path).values, VALUES[:12].reshape(3, 4).T)
        check_as_simpleitk(path)


REFUSED = {
    "text": ("BinaryData = False\nElementType = MET_UCHAR\n", r"its voxels are text \(BinaryData = False\)"),
    "type": ("ElementType = MET_STRING\n", "its ElementType is 'MET_STRING', which cannot be read"),
    "no type": ("", "it has no field 'ElementType'"),
    "boolean": ("CompressedData = Drue\nElementType = MET_UCHAR\n", "its CompressedData is 'Drue'"),
    "spacing": ("ElementSpacing = 1 2 3\nElementType = MET_UCHAR\n", "ElementSpacing must be 2 numbers; got '1 2 3'"),
    "word": ("ElementSpacing = 1 1_0\nElementType = MET_UCHAR\n", "ElementSpacing must be 2 numbers; got '1 1_0'"),
    "no size": ("ElementSpacing = 0 1\nElementType = MET_UCHAR\n", "voxel sizes, directions and origin must be finite"),
    "infinite": ("Offset = nan 1\nElementType = MET_UCHAR\n", "voxel sizes, directions and origin must be finite"),
    "flat": ("TransformMatrix = 1 1 1 1\nElementType = MET_UCHAR\n", "directions independent"),
    "channels": ("ElementNumberOfChannels = 0\nElementType = MET_UCHAR\n", "is not that of an image"),
    "skip": ("HeaderSize = 3\nElementType = MET_UCHAR\n", "its HeaderSize must lead to its voxels; got 3"),
    "skipped": ("HeaderSize = -1\nCompressedData = 1\nElementType = MET_UCHAR\n", "must lead to its voxels; got -1"),
    "size": (
        "CompressedData = 1\nCompressedDataSize = 9\nElementType = MET_UCHAR\n",
        "announces 9 bytes and the file has 12: broken",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_fields_that_cannot_be_read_are_named(tmp_path, name):
    lines, reason = REFUSED[name]
    with pytest.raises(FileError, match=rf"^a\.mha must .*{reason}"):
        read_array(write(tmp_path / "a.mha", lines, bytes(VALUES[:12])), peek=True)


def test_a_picture_in_meters_is_read(tmp_path):
    """A third axis of length 1 beside such voxels leads to no usable affine."""
    path = write(tmp_path / "a.mha", "ElementSpacing = 1e-7 2e-7\nElementType = MET_UCHAR\n", bytes(VALUES[:12]))
    stored = read_array(path)
    assert stored.values.shape == (4, 3)
    np.testing.assert_allclose(stored.geometry.zooms, (1e-7, 2e-7, 1))


def test_one_axis_is_no_image(tmp_path):
    lines = "ElementNumberOfChannels = 3\nElementType = MET_UCHAR\n"
    with pytest.raises(FileError, match="it must have at least 2 axes in space"):
        read_array(write(tmp_path / "a.mha", lines, bytes(VALUES[:12]), first="NDims = 1\nDimSize = 4\n"))


HOSTILE = {  # the last lines of a header, and the reason of the error
    "absolute": ("ElementDataFile = /secret.raw", "it names '/secret.raw'"),
    "parent": ("ElementDataFile = ../secret.raw", "it names '../secret.raw'"),
    "folder": ("ElementDataFile = part/a.raw", "it names 'part/a.raw'"),
    "backslash": ("ElementDataFile = ..\\secret.raw", "it names"),
    "list": ("ElementDataFile = LIST\n../secret.raw", "it names 'LIST'"),
    "list of planes": ("ElementDataFile = LIST 2\n../secret.raw", "it names 'LIST 2'"),
    "pattern": ("ElementDataFile = slice%03d.raw 1 6 1", "it names 'slice%03d.raw 1 6 1'"),
    "dots": ("ElementDataFile = ..", r"it names '\.\.'"),
    "nothing": ("ElementDataFile =", "it names ''"),
    "lower case": ("elementdatafile = ../secret.raw\nElementDataFile = a.raw", "'elementdatafile' is not spelled"),
    "space inside": ("Element DataFile = ../secret.raw\nElementDataFile = a.raw", "'Element DataFile' is not spelled"),
    "space before": (" ElementDataFile = ../secret.raw\nElementDataFile = a.raw", "' ElementDataFile' is not spelled"),
    "tab": ("Element\tDataFile = ../secret.raw\nElementDataFile = a.raw", "is not spelled"),
    "colon": ("ElementDataFile: ../secret.raw = b\nElementDataFile = a.raw", "is not spelled"),
    "colon alone": ("ElementDataFile: ../secret.raw", "every line must be a field"),
    "twice": ("DimSize = 4 3\nElementDataFile = a.raw", "'DimSize' is there twice"),
    "two names": ("Offset = 1 2\nPosition = 1 2\nElementDataFile = a.raw", "there twice, last as 'Position'"),
    "more lines": ("ElementDataFile = a.raw\nElementDataFile = ../secret.raw", "the header must end after that"),
    "next line": ("Name = a\x85ElementDataFile = ../secret.raw\nElementDataFile = a.raw", "other line ends"),
    "vertical tab": ("Name = a\x0bElementDataFile = ../secret.raw\nElementDataFile = a.raw", "other line ends"),
    "form feed": ("Name = a\x0cElementDataFile = ../secret.raw\nElementDataFile = a.raw", "other line ends"),
    "file separator": ("Name = a\x1cElementDataFile = ../secret.raw\nElementDataFile = a.raw", "other line ends"),
    "carriage return": ("Name = a\rElementDataFile = ../secret.raw\nElementDataFile = a.raw", "other line ends"),
    "line separator": ("Name = a\u2028ElementDataFile = ../secret.raw\nElementDataFile = a.raw", "other line ends"),
    "zero": ("ElementDataFile = a.raw\0../secret.raw", "control characters"),
    "other digits": ("ElementSpacing = \u0661 1\nElementDataFile = a.raw", "its ElementSpacing must be ASCII text"),
    "missing": ("ElementDataFile = missing.raw", r"missing\.raw must be a file; it does not exist"),
    "pipe": ("ElementDataFile = pipe", "pipe must be a file"),
    "link to a device": ("ElementDataFile = zero.raw", r"zero\.raw must be a file"),
    "link": ("ElementDataFile = link.raw", r"must be in the same folder; 'link\.raw' is a link"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_no_header_leads_to_other_files(tmp_path, name):
    """A file of the right size is in every place; a pipe would wait forever if it were opened."""
    lines, reason = HOSTILE[name]
    folder = tmp_path / "in"
    folder.mkdir()
    for secret in (folder / "a.raw", tmp_path / "secret.raw"):
        secret.write_bytes(bytes(12))
    os.mkfifo(folder / "pipe")
    (folder / "zero.raw").symlink_to("/dev/zero")
    (folder / "link.raw").symlink_to("../secret.raw")
    path = folder / "a.mhd"
    start = "ObjectType = Image\nNDims = 2\nDimSize = 4 3\nElementType = MET_UCHAR\n"
    path.write_bytes((start + lines + "\n").encode("latin-1" if name == "next line" else "utf-8"))
    for peek in (True, False):
        with pytest.raises(FileError, match=reason):
            read_array(path, peek=peek)


def test_a_linked_header_reads_the_voxels_beside_either(tmp_path):
    (tmp_path / "store").mkdir()
    lines = "NDims = 2\nDimSize = 4 3\nElementType = MET_UCHAR\nElementDataFile = a.raw"  # without an end of line
    (tmp_path / "store" / "a.mhd").write_text(lines)
    (tmp_path / "store" / "a.raw").write_bytes(bytes(VALUES[:12]))
    for name in ("a.mhd", "a.raw"):
        (tmp_path / name).symlink_to(f"store/{name}")
    np.testing.assert_array_equal(read_array(tmp_path / "a.mhd").values, VALUES[:12].reshape(3, 4).T)


def test_a_pipe_in_place_of_a_header_is_not_opened(tmp_path):
    for ending in ("mha", "mhd", "nrrd", "nhdr"):
        os.mkfifo(tmp_path / f"a.{ending}")
        with pytest.raises(FileError, match=rf"a\.{ending} must be a file"):
            read_array(tmp_path / f"a.{ending}")
