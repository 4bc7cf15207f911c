"""NRRD (.nrrd, .nhdr): fields as `name: value` up to an empty line; each axis has a size, a kind and a direction."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import BinaryIO, Literal

import numpy as np

from segcal.volumes.stored import Geometry, StoredArray, refuse
from segcal.volumes.text_header import LONGEST_HEADER, TextHeader, read_voxels

_MAGIC = re.compile(rb"NRRD000[1-5]\r?\n")
_FIELDS = (
    "content", "number", "type", "block size", "dimension", "space", "space dimension", "sizes", "spacings",
    "thicknesses", "axis mins", "axis maxs", "space directions", "centers", "kinds", "labels", "units", "min", "max",
    "old min", "old max", "endian", "encoding", "line skip", "byte skip", "sample units", "space units", "space origin",
    "measurement frame", "data file",
)  # fmt: skip
_NAMES = {name: field for field in _FIELDS for name in (field, field.replace(" ", ""))} | {"centerings": "centers"}
_TYPES = {
    "i1": ("signed char", "int8", "int8_t"),
    "u1": ("uchar", "unsigned char", "uint8", "uint8_t"),
    "i2": ("short", "short int", "signed short", "signed short int", "int16", "int16_t"),
    "u2": ("ushort", "unsigned short", "unsigned short int", "uint16", "uint16_t"),
    "i4": ("int", "signed int", "int32", "int32_t"),
    "u4": ("uint", "unsigned int", "uint32", "uint32_t"),
    "i8": ("longlong", "long long", "long long int", "signed long long", "signed long long int", "int64", "int64_t"),
    "u8": ("ulonglong", "unsigned long long", "unsigned long long int", "uint64", "uint64_t"),
    "f4": ("float",),
    "f8": ("double",),
}
_CODES = {name: code for code, names in _TYPES.items() for name in names}
_COMPRESSIONS = {"raw": "", "gzip": "gzip", "gz": "gzip", "bzip2": "bzip2", "bz2": "bzip2"}
_ENDIANS: dict[str, Literal["<", ">"]] = {"little": "<", "big": ">"}
_DOMAINS = ("domain", "space", "time", "none", "???")
_COMPONENTS = (
    "list", "vector", "contravariant-vector", "covariant-vector", "normal", "point", "2-vector", "3-vector", "4-vector",
    "3-gradient", "3-normal", "3-color", "4-color", "RGB-color", "RGBA-color", "HSV-color", "XYZ-color", "quaternion",
    "stub", "scalar",
)  # fmt: skip
_SPACES = {  # signs that turn them into LPS; ITK takes the last three for LPS
    "right-anterior-superior": (-1, -1, 1),
    "left-anterior-superior": (1, -1, 1),
    "left-posterior-superior": (1, 1, 1),
    "RAS": (-1, -1, 1),
    "LAS": (1, -1, 1),
    "LPS": (1, 1, 1),
    "scanner-xyz": (1, 1, 1),
    "3D-right-handed": (1, 1, 1),
    "3D-left-handed": (1, 1, 1),
}
_VECTOR = re.compile(r"[ \t]*(none|\([^()]*\))")


def read_nrrd(path: Path, file: BinaryIO, peek: bool) -> StoredArray:
    """Read (x, y), (x, y, z), or either with the components of a voxel last."""
    header = _read_header(path, file)
    (axes,) = header.integers("dimension", 1)
    shape = tuple(header.integers("sizes", axes))
    kinds = header.text("kinds", "none " * axes).split()
    if len(kinds) != axes or not set(kinds) <= {*_DOMAINS, *_COMPONENTS}:
        header.refuse(f"its kinds must be {axes} that can be read; got {header.text('kinds')!r}")
    components = [axis for axis, kind in enumerate(kinds) if kind in _COMPONENTS]
    if len(components) > 1:
        header.refuse(f"its kinds must have at most one axis of components; got {header.text('kinds')!r}")
    dtype = np.dtype(header.choice("type", _CODES))
    dtype = dtype.newbyteorder(header.choice("endian", _ENDIANS, "little" if dtype.itemsize == 1 else None))
    compression = header.choice("encoding", _COMPRESSIONS)
    with header.open_data(header.fields.get("data file"), file) as data:
        _skip(header, data, math.prod(shape) * dtype.itemsize, compression)
        values = read_voxels(path, data, shape, dtype, compression, peek=peek)
    for axis in components:
        values = np.squeeze(values, axis) if shape[axis] == 1 else np.moveaxis(values, axis, -1)
    domain = [axis for axis in range(axes) if axis not in components]
    return StoredArray(values, geometry=_geometry(header, axes, domain), order="F")


def _read_header(path: Path, file: BinaryIO) -> TextHeader:
    """Read up to the empty line, or to the end of a header whose voxels are in another file."""
    if not _MAGIC.fullmatch(file.readline(16)):
        refuse(path, "it does not begin as an NRRD file does")
    header = TextHeader(path, _NAMES)
    for line in header.lines(file):
        if not line:
            return header
        key, separator, value = line.partition(": ")
        if line.startswith("#") or (separator and header.add(key, value)):
            continue
        if ":=" not in line:  # key:=value, such as 3D Slicer adds for segments, is no field
            header.refuse(f"every line must be a field of the format; got {line[:80]!r}")
    if "data file" not in header.fields:
        header.refuse("it must end with an empty line")
    return header


def _skip(header: TextHeader, data: BinaryIO, size: int, compression: str) -> None:
    """Go to the first byte of the voxels."""
    (lines,) = header.integers("line skip", 1, "0")
    (skip,) = header.integers("byte skip", 1, "0")
    if (compression and (lines or skip)) or lines < 0 or skip < -1:
        header.refuse(f"its line skip ({lines}) and byte skip ({skip}) cannot be read with that encoding")
    for _ in range(lines):
        if not data.readline(LONGEST_HEADER).endswith(b"\n"):
            header.refuse(f"its line skip must lead to its voxels; got {lines}")
    start, end = data.tell(), data.seek(0, 2)
    data.seek(max(start, end - size) if skip == -1 else start + skip)


def _geometry(header: TextHeader, axes: int, domain: list[int]) -> Geometry:
    """The steps of the domain axes from their directions, or from spacings where there is no space."""
    fields = header.fields
    if "axis mins" in fields or "axis maxs" in fields:
        header.refuse("its axis mins and maxs cannot be read; it must have space directions and a space origin")
    count = len(domain)
    steps, origin, signs = np.eye(count), np.zeros(count), np.ones(count)
    if "space" in fields or "space dimension" in fields:
        if "spacings" in fields or ("space" in fields and "space dimension" in fields):
            header.refuse("it must have space or space dimension, and no spacings")
        signs = np.array(header.choice("space", _SPACES)) if "space" in fields else signs
        (dimension,) = header.integers("space dimension", 1, "3")
        if dimension != count:
            header.refuse(f"its space must have one dimension for each of its {count} domain axes; it has {dimension}")
        if "space directions" in fields:
            vectors = _vectors(header, "space directions", axes, count)
            steps = np.array([vectors[axis] for axis in domain])
        if "space origin" in fields:
            origin = np.array(_vectors(header, "space origin", 1, count)[0])
    elif "space directions" in fields or "space origin" in fields:
        header.refuse("its space directions need the field space or space dimension")
    elif "spacings" in fields:
        spacings = header.numbers("spacings", axes)
        steps = np.diag([spacings[axis] for axis in domain])
    return Geometry.of_steps(header.path, steps * signs, origin * signs)


def _vectors(header: TextHeader, name: str, count: int, dimension: int) -> list[list[float]]:
    """Return vectors such as (1,0,0); none is a vector of NaN."""
    text = header.text(name)
    if not re.fullmatch(f"({_VECTOR.pattern}){{{count}}}", text):
        header.refuse(f"its {name} must be {count} vectors; got {text[:80]!r}")
    none = ",".join(["nan"] * dimension)
    parts = [none if part == "none" else part[1:-1] for part in _VECTOR.findall(text)]
    return [header.parse_numbers(name, dimension, part.replace(",", " ")) for part in parts]
