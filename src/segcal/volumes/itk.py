"""NRRD (.nrrd, .nhdr) and MetaImage (.mha, .mhd) by SimpleITK; where their voxels lie becomes a NIfTI affine.

Their text headers are looked at first: a file that is named in one must lie beside it, and none may announce more than
there is.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from segcal.volumes.stored import Geometry, StoredArray, byte_size, check_size, needed, no_values, refuse

_LONGEST_HEADER = 1 << 20
_NRRD = (".nrrd", ".nhdr")
_ENCODINGS = ("raw", "gzip", "gz")
_PIXELS = re.compile(r"(?:vector of )?(?P<bits>8|16|32|64)-bit (?P<kind>float|(?:un)?signed integer)")
_KINDS = {"float": "f", "signed integer": "i", "unsigned integer": "u"}


def read_itk(path: Path, file: BinaryIO, peek: bool) -> StoredArray:
    """(x, y), (x, y, z), or either with the components of a voxel last."""
    voxels, compressed = _data_file(path, file.read(_LONGEST_HEADER))
    itk = needed("SimpleITK", "itk", path)
    itk.ProcessObject.SetGlobalWarningDisplay(False)  # they would go to the terminal
    reader = itk.ImageFileReader()
    reader.SetFileName(str(path))
    reader.SetImageIO("NrrdImageIO" if path.suffix.lower() in _NRRD else "MetaImageIO")
    _asked(reader.ReadImageInformation)
    found = _PIXELS.fullmatch(itk.GetPixelIDValueAsString(reader.GetPixelID()))
    if found is None:
        refuse(path, f"its values are {itk.GetPixelIDValueAsString(reader.GetPixelID())}, not real numbers")
    dtype = np.dtype(f"{_KINDS[found['kind']]}{int(found['bits']) // 8}")
    size, components = reader.GetSize(), reader.GetNumberOfComponents()
    shape = (*size, components) if components > 1 else tuple(size)
    check_size(voxels, byte_size(path, shape, dtype), compressed=compressed)
    geometry = _geometry(reader, len(size))
    if peek:
        return StoredArray(no_values(shape, dtype), geometry=geometry, order="F")
    array = itk.GetArrayFromImage(_asked(reader.Execute))
    values = np.moveaxis(array.T, 0, -1) if components > 1 else array.T
    return StoredArray(values, geometry=geometry, order="F")


def _asked(work: Callable[[], Any]) -> Any:
    """What ITK gives; of the many lines with which it refuses, the last says why."""
    try:
        return work()
    except RuntimeError as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        raise ValueError(lines[-1] if lines else "ITK cannot read it") from error


def _geometry(reader: Any, axes: int) -> Geometry:
    """Of up to three axes; a fourth is none of space."""
    space = min(axes, 3)
    directions: NDArray[np.float64] = np.array(reader.GetDirection()).reshape(axes, axes)[:space, :space]
    affine = np.eye(4)
    affine[:space, :space] = directions * np.array(reader.GetSpacing()[:space])
    affine[:space, 3] = reader.GetOrigin()[:space]
    return Geometry.of_lps(affine)


def _data_file(path: Path, start: bytes) -> tuple[Path, bool]:
    """The file that holds the voxels, and whether they are compressed; both as the text header says."""
    nrrd = path.suffix.lower() in _NRRD
    if nrrd and not start.startswith(b"NRRD000"):
        refuse(path, "it does not begin as an NRRD file does")
    fields: dict[str, str] = {}
    for line in start.decode("latin-1").splitlines():
        if nrrd and not line:
            break
        key, _, value = line.partition(":" if nrrd else "=")
        fields[key.strip().lower().replace(" ", "")] = value.strip()
        if not nrrd and "elementdatafile" in fields:
            break
    name = fields.get("datafile") if nrrd else fields.get("elementdatafile", "")
    if nrrd and fields.get("encoding", "").lower() not in _ENCODINGS:
        refuse(path, f"its encoding must be raw or gzip; it is {fields.get('encoding', '')!r}")
    compressed = fields["encoding"].lower() != "raw" if nrrd else fields.get("compresseddata", "").lower() == "true"
    if name in (None, "LOCAL", "Local", "local"):
        return path, compressed
    if not name or Path(name).name != name or not path.with_name(name).is_file():
        refuse(path, f"its voxels must be in it, or in one file beside it; it names {name!r}")
    return path.with_name(name), compressed
