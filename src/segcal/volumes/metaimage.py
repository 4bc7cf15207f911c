"""MetaImage (.mha, .mhd): fields as `Key = value`, the last of which says where the voxels are."""

from __future__ import annotations

import math
from pathlib import Path
from typing import BinaryIO

import numpy as np

from segcal.volumes.stored import Geometry, StoredArray, refuse
from segcal.volumes.text_header import TextHeader, read_voxels

_FIELDS = (
    "NDims", "BinaryData", "BinaryDataByteOrderMSB", "CompressedData", "CompressedDataSize", "TransformMatrix",
    "Offset", "ElementSpacing", "ElementSize", "DimSize", "HeaderSize", "ElementNumberOfChannels", "ElementType",
    "ElementDataFile",
)  # fmt: skip
_NAMES = {name: name for name in _FIELDS} | {  # and older names
    "ElementByteOrderMSB": "BinaryDataByteOrderMSB",
    "Orientation": "TransformMatrix",
    "Rotation": "TransformMatrix",
    "Position": "Offset",
    "Origin": "Offset",
    "ImagePosition": "Offset",
}
_TYPES = {
    "CHAR": "i1", "ASCII_CHAR": "i1", "UCHAR": "u1", "SHORT": "i2", "USHORT": "u2", "INT": "i4", "UINT": "u4",
    "LONG": "i4", "ULONG": "u4", "LONG_LONG": "i8", "ULONG_LONG": "u8", "FLOAT": "f4", "DOUBLE": "f8",
}  # fmt: skip
_CODES = {f"MET_{name}{ending}": code for name, code in _TYPES.items() for ending in ("", "_ARRAY")}
_BOOLEANS = dict.fromkeys(("True", "true", "TRUE", "1"), True) | dict.fromkeys(("False", "false", "FALSE", "0"), False)
_LOCAL = ("LOCAL", "Local", "local")


def read_metaimage(path: Path, file: BinaryIO, peek: bool) -> StoredArray:
    """Read (x, y), (x, y, z), or either with the components of a voxel last."""
    header = _read_header(path, file)
    (axes,) = header.integers("NDims", 1)
    sizes = header.integers("DimSize", axes)
    (components,) = header.integers("ElementNumberOfChannels", 1, "1")
    big_endian = header.choice("BinaryDataByteOrderMSB", _BOOLEANS, "False")
    dtype = np.dtype(header.choice("ElementType", _CODES)).newbyteorder(">" if big_endian else "<")
    if not header.choice("BinaryData", _BOOLEANS, "True"):
        header.refuse("its voxels are text (BinaryData = False), which cannot be read")
    shape = tuple(sizes) if components == 1 else (components, *sizes)
    name = header.fields.get("ElementDataFile", "")
    with header.open_data(None if name in _LOCAL else name, file) as data:
        compression = _find_voxels(header, data, math.prod(shape) * dtype.itemsize)
        values = read_voxels(path, data, shape, dtype, compression, peek=peek)
    values = values if components == 1 else np.moveaxis(values, 0, -1)
    return StoredArray(values, geometry=_geometry(header, axes), order="F")


def _read_header(path: Path, file: BinaryIO) -> TextHeader:
    """Read up to the field ElementDataFile; fields that other programs add are ignored."""
    header = TextHeader(path, _NAMES)
    for line in header.lines(file):
        key, separator, value = line.partition("=")
        if line.strip() and not separator:
            header.refuse(f"every line must be a field, Key = value; got {line[:80]!r}")
        header.add(key.rstrip(" \t"), value)
        if "ElementDataFile" in header.fields:
            break
    return header


def _find_voxels(header: TextHeader, data: BinaryIO, size: int) -> str:
    """Go to the first byte of the voxels; return how they are compressed."""
    compressed = header.choice("CompressedData", _BOOLEANS, "False")
    (skip,) = header.integers("HeaderSize", 1, "0")
    start, end = data.tell(), data.seek(0, 2)
    if skip == -1 and not compressed:
        skip = max(start, end - size)  # the voxels are the last bytes
    if skip != 0 and not start <= skip <= end:
        header.refuse(f"its HeaderSize must lead to its voxels; got {header.fields['HeaderSize']}")
    start = data.seek(skip or start)
    if not compressed:
        return ""
    (announced,) = header.integers("CompressedDataSize", 1, str(end - start))
    if announced != end - start:
        refuse(
            header.path, f"its header announces {announced:,} bytes and the file has {end - start:,}: broken or cut off"
        )
    gzip = data.read(2) == b"\x1f\x8b"
    data.seek(start)
    return "gzip" if gzip else "zlib"


def _geometry(header: TextHeader, axes: int) -> Geometry:
    """One row of TransformMatrix is the direction of an axis."""
    ones = " ".join(["1"] * axes)
    spacing = header.numbers("ElementSpacing", axes, header.fields.get("ElementSize", ones))
    identity = " ".join(str(number) for number in np.eye(axes).ravel())
    directions = np.reshape(header.numbers("TransformMatrix", axes * axes, identity), (axes, axes))
    origin = header.numbers("Offset", axes, " ".join(["0"] * axes))
    return Geometry.of_steps(header.path, directions * np.reshape(spacing, (axes, 1)), np.array(origin))
