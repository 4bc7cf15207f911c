"""Numbers as files store them, and files written with other numbers, all else as it was."""

from __future__ import annotations

import math
import shutil
import zipfile
import zlib
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO, cast

import numpy as np
from nibabel.nifti1 import Nifti1Header
from numpy.lib import format as npy
from numpy.typing import NDArray

from segcal.errors import FileError
from segcal.volumes.arrays import NIFTI, PICTURES, Geometry, StoredArray, gzip_into, read_array, read_nifti_start
from segcal.volumes.cases import Source
from segcal.volumes.pictures import write_png, write_tiff
from segcal.volumes.steps import STEPS, StoredAs

_PIECE_BYTES = 1 << 20


@dataclass(frozen=True)
class Form:
    """How numbers are stored: a value is `number * slope + inter`. `full_scale`: no header says that slope."""

    dtype: np.dtype[Any]
    slope: float = 1.0
    inter: float = 0.0
    full_scale: int = 1

    @property
    def limits(self) -> tuple[float, float]:
        """The least and the largest number, as floats that do not lie beyond them."""
        if self.dtype.kind == "b":
            return 0.0, 1.0
        info = np.iinfo(self.dtype)
        top = float(info.max)
        return float(info.min), top if int(top) <= info.max else float(np.nextafter(top, 0))

    def expresses(self, values: NDArray[Any]) -> bool:
        """Whether the numbers reach as far as the values, up to half a step."""
        if self.dtype.kind == "f":
            most = np.finfo(np.float16).max  # other floats hold whatever was read from them, and more
            return self.dtype.itemsize > 2 or not any((np.abs(row[np.isfinite(row)]) > most).any() for row in values)
        if (self.slope, self.inter) == (1.0, 0.0):  # zeros and ones that mean just that; a two would mean two steps
            return all(bool(((row == 0) | (row == 1)).all()) for row in values)
        with np.errstate(invalid="ignore"):
            first, last = sorted((float(end) - self.inter) / self.slope for end in (values.min(), values.max()))
        low, high = self.limits
        return low - 0.5 <= first and last <= high + 0.5  # false for NaN

    @property
    def steps(self) -> int:
        """The largest number, where that stands for 1 and none for 0; 0 for all other scales."""
        shares = self.dtype.kind == "u" and self.inter == 0
        return int(self.limits[1]) if shares and math.isclose(self.slope * self.limits[1], 1, rel_tol=1e-6) else 0


FLOAT32 = Form(np.dtype(np.float32))


def form_of(dtype: StoredAs, *, told: bool) -> Form:
    """The form of probabilities in files of this type; `told`: their header has the scale."""
    steps = STEPS.get(dtype)
    if steps is None:
        return FLOAT32
    return Form(np.min_scalar_type(steps), 1 / steps, full_scale=1 if told else steps)


def own_form(source: Source) -> Form:
    stored = source.stored
    slope = stored.slope if stored.scaled else 1 / source.full_scale
    full_scale = round(1 / slope) if stored.picture and stored.scaled else source.full_scale  # a mask has no header
    return Form(stored.values.dtype, slope, stored.inter, full_scale)


def room_for(stored: StoredArray, form: Form) -> StoredArray:
    """An array like the stored one for numbers of this form: itself, where it is of that kind and in memory."""
    if stored.mapping is None and stored.values.dtype == form.dtype:
        return stored
    return replace(stored, values=np.empty(stored.values.shape, form.dtype, order=stored.order), mapping=None)


def fill(view: NDArray[Any], values: NDArray[Any], form: Form) -> None:
    """Write the numbers that stand for the values to the view, class by class."""
    for numbers, row in zip(view, values, strict=True):
        with np.errstate(over="ignore", under="ignore", invalid="ignore"):
            if form.dtype.kind == "f":
                np.copyto(numbers, row, casting="same_kind")
            else:
                steps = np.subtract(row, form.inter, dtype=np.float64)
                steps /= form.slope
                np.clip(np.rint(steps, out=steps), *form.limits, out=steps)
                np.copyto(numbers, steps, casting="unsafe")


def write_like(file: BinaryIO, source: Path, new: StoredArray, form: Form | None) -> None:
    """Write the new array as the source has its own; `form`, if the header must tell another one.

    NRRD, MetaImage and DICOM files become NIfTI, PNG becomes .npy.
    """
    if new.geometry is not None and source.name.lower().endswith(NIFTI):
        _write_nifti(file, source, new.values, form)
    elif new.geometry is not None:
        write_maps(file, source, np.ascontiguousarray(new.values.T), slope=form.slope if form else 1)
    elif source.suffix.lower() in PICTURES[1:]:
        write_tiff(file, new.values)
    elif new.key is not None:
        _write_npz(file, source, f"{new.key}.npy", new.values)
    else:
        write_npy(file, new.values)


def _write_nifti(file: BinaryIO, source: Path, values: NDArray[Any], form: Form | None) -> None:
    """The source's header and extensions, byte for byte where its type and scale stay, then the values."""
    header, start, compressed = read_nifti_start(source)
    if form is not None:
        size = len(header.binaryblock)
        header = type(header)(start[:size], check=False)
        header.set_data_dtype(form.dtype)
        header["scl_slope"], header["scl_inter"] = form.slope, form.inter
        start = header.binaryblock + start[size:]
        values = values.astype(header.get_data_dtype(), copy=False)  # in the header's byte order
    with gzip_into(file) if compressed else nullcontext(file) as stream:
        stream.write(start)
        _write_numbers(stream, values.T)


def write_maps(
    file: BinaryIO, reference: Path, values: NDArray[Any], *, slope: float = 1, compressed: bool = True
) -> None:
    """Values (class, z, y, x), or (z, y, x), as an image (x, y, z, class), or (x, y, z), in the place of the reference.

    The image has their type; what they mean is `slope` times as much.
    """
    header = header_like(reference)
    header.set_data_shape(values.T.shape)
    header.set_data_dtype(values.dtype)
    header["pixdim"][4], header["scl_slope"], header["scl_inter"] = 1, slope, 0
    header["vox_offset"] = len(header.binaryblock) + 4
    for name in ("cal_min", "cal_max", "intent_code"):  # of other values
        header[name] = 0
    with gzip_into(file) if compressed else nullcontext(file) as stream:
        stream.write(header.binaryblock + bytes(4))  # no extensions
        _write_numbers(stream, values.astype(header.get_data_dtype(), copy=False))


def header_like(path: Path) -> Any:
    """The header of a NIfTI image, or a new one that tells the place of another."""
    if path.name.lower().endswith(NIFTI):
        return read_nifti_start(path)[0]
    geometry = read_array(path, peek=True).geometry
    assert geometry is not None  # pictures and arrays have other labels and maps
    return new_header(geometry)


def new_header(geometry: Geometry) -> Any:
    """A NIfTI header for this place, in millimeters; one that does not know its place says nothing of it."""
    kind: Any = Nifti1Header  # nibabel has no types
    header = kind()
    header.set_data_shape((1, 1, 1))
    if geometry.affines:
        header.set_sform(geometry.affines[0], code=1)
        header.set_qform(geometry.affines[0], code=1, strip_shears=True)
    header["pixdim"][1:4] = (*geometry.zooms, 1.0, 1.0)[:3]
    header.set_xyzt_units("mm")
    return header


def write_picture(file: BinaryIO, path: Path, values: NDArray[Any]) -> None:
    """Labels (y, x) as the PNG or TIFF image that the path names; those of several planes as pages of a TIFF image."""
    numbers = values.astype(np.uint8 if values.max() < 256 else np.uint16)
    if path.suffix.lower() != ".png":
        write_tiff(file, numbers)
    elif numbers.ndim > 2 and len(numbers) > 1:
        raise FileError(
            f"{path.name} must have one number a pixel, for it is a PNG; there are {len(numbers)} masks, which may "
            f"overlap. Give the predictions as TIFF or .npy files."
        )
    else:
        write_png(file, numbers.reshape(numbers.shape[-2:]))


def write_npy(file: BinaryIO, values: NDArray[Any]) -> None:
    """A contiguous array as an .npy file."""
    layout = npy.header_data_from_array_1_0(values)
    npy.write_array_header_1_0(file, layout)
    _write_numbers(file, values.T if layout["fortran_order"] else values)


def _write_numbers(file: BinaryIO, values: NDArray[Any]) -> None:
    """All bytes of a contiguous array, piece by piece: whoever compresses them takes no second copy."""
    numbers = values.reshape(-1).view(np.uint8)
    for first in range(0, len(numbers), _PIECE_BYTES):
        file.write(numbers[first : first + _PIECE_BYTES].data)


def _write_npz(file: BinaryIO, source: Path, name: str, values: NDArray[Any]) -> None:
    """The source's archive with one array exchanged; level 1, since more effort gains little on such maps."""
    try:
        with zipfile.ZipFile(source) as old:
            kind = old.getinfo(name).compress_type
            with zipfile.ZipFile(file, "w", kind, compresslevel=1) as new:
                for member in old.infolist():
                    with new.open(member.filename, "w", force_zip64=True) as stream:
                        if member.filename == name:
                            write_npy(cast(BinaryIO, stream), values)
                        else:
                            with old.open(member) as other:
                                shutil.copyfileobj(other, stream)
    except (zipfile.BadZipFile, zlib.error, EOFError, LookupError) as error:
        raise FileError(
            f"{source.name} must be an .npz file; it cannot be read ({error}). Create the file again."
        ) from error
