"""Arrays as files store them: NIfTI (.nii, .nii.gz), .npy and .npz, opened without a second copy; others by name.

What is not compressed is mapped and costs no memory until it is read. What is compressed is inflated once, into
a buffer of exactly the size that its header announces. Streams are read to their end, where their checksum is. Nothing
is ever unpickled. A file that cannot be read raises `FileError`, whatever is wrong with it.
"""

from __future__ import annotations

import io
import logging
import mmap
import struct
import zipfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, Literal, cast

import numpy as np
from nibabel.nifti1 import Nifti1Header
from nibabel.nifti2 import Nifti2Header
from numpy.lib import format as npy
from numpy.typing import NDArray

from segcal._io.files import reject_pipe
from segcal._io.parsing import parse_json
from segcal.errors import FileError
from segcal.volumes.dicom import read_segmentation
from segcal.volumes.metaimage import read_metaimage
from segcal.volumes.nrrd import read_nrrd
from segcal.volumes.pictures import read_png, read_tiff
from segcal.volumes.stored import (
    MOST_INFLATION,
    byte_size,
    check_exact_size,
    check_size,
    invertible,
    no_values,
    reading,
    refuse,
)
from segcal.volumes.stored import Geometry as Geometry
from segcal.volumes.stored import StoredArray as StoredArray

try:
    from isal import igzip as gzip
    from isal import isal_zlib as zlib
except ImportError:  # slower, otherwise the same
    import gzip  # type: ignore[no-redef]
    import zlib  # type: ignore[no-redef]

NNUNET_KEYS = ("probabilities", "softmax")  # arrays with the axes (class, z, y, x)
NIFTI = (".nii.gz", ".nii")
NUMPY = (".npz", ".npy")
PICTURES = (".png", ".tif", ".tiff")
ITK = (".seg.nrrd", ".nrrd", ".nhdr", ".mha", ".mhd")
DICOM = (".dcm",)
EXTENSIONS = (*NIFTI, *NUMPY, *PICTURES, *ITK, *DICOM)
_NIFTI: dict[int, tuple[Any, int, bytes]] = {  # by header size: class, place of the magic bytes, the magic bytes
    348: (Nifti1Header, 344, b"n+1\0"),
    540: (Nifti2Header, 4, b"n+2\0"),
}
_PIECE_BYTES = 1 << 18
_QUIET = logging.getLogger("segcal.nifti")  # nibabel reports each header it corrects; the progress bar should not
_QUIET.addHandler(logging.NullHandler())
_QUIET.propagate = False


def stem_of(path: Path) -> str | None:
    """The file's name without its extension; None where it is not a format we read.

    >>> stem_of(Path("out/case_1.nii.gz")), stem_of(Path("plans.json"))
    ('case_1', None)
    """
    for extension in EXTENSIONS:
        if path.name.lower().endswith(extension) and len(path.name) > len(extension):
            return path.name[: -len(extension)]
    return None


def read_array(path: Path, *, keys: tuple[str, ...] = (), peek: bool = False) -> StoredArray:
    """The array in a file; of several in an .npz file the first that goes by one of `keys`.

    `peek`: read no further than its header; in place of the values stand zeros that take no memory.
    """
    extension = path.suffix.lower()
    if stem_of(path) is None:
        raise FileError(f"{path.name} must end in one of {', '.join(EXTENSIONS)}. Rename or convert it.")
    with reading(path) as file:
        if extension == ".npz":
            return _read_npz(path, file, keys, peek)
        return _READERS.get(extension, _read_nifti)(path, file, peek)


def read_nifti_start(path: Path) -> tuple[Any, bytes, bool]:
    """Header, all bytes before the voxels (the header as stored, and extensions), whether the file is compressed."""
    with reading(path) as file:
        stream, compressed = _uncompressed(file)
        header, start = _nifti_header(path, stream)
        offset = header.get_data_offset()
        check_size(path, offset, compressed=compressed)
        start += stream.read(max(0, offset - len(start)))
        if len(start) != offset:
            raise EOFError
        return header, start, compressed


def refuse_objects(path: Path) -> None:
    """Refuse an .npz file with Python objects in any of its arrays: they are never unpickled, nor passed on."""
    with reading(path) as file, zipfile.ZipFile(file) as archive:
        for member in archive.infolist():
            if member.filename.endswith(".npy"):
                with archive.open(member) as stream:
                    _npy_header(path, cast(BinaryIO, stream))


def _read_nifti(path: Path, file: BinaryIO, peek: bool) -> StoredArray:
    stream, compressed = _uncompressed(file)
    header, start = _nifti_header(path, stream)
    position = len(start)
    shape, dtype, offset = header.get_data_shape(), header.get_data_dtype(), header.get_data_offset()
    slope, inter = header.get_slope_inter()
    shape = tuple(int(length) for length in shape)
    if offset < position:
        refuse(path, f"its voxels cannot begin at byte {offset}, within the header")
    size = byte_size(path, shape, dtype)
    if compressed:
        check_size(path, offset + size, compressed=True)
    else:
        check_exact_size(path, offset + size)
    mapping = None
    if peek:
        values = no_values(shape, dtype)
    elif compressed:
        _skip(stream, offset - position)
        values = np.ndarray(shape, dtype, _inflate(path, stream, size), order="F")
    else:
        mapping = _map(file)
        values = np.ndarray(shape, dtype, mapping, offset, order="F")
    with np.errstate(all="ignore"):  # senseless numbers are left out where they matter
        geometry = _geometry(header)
    return StoredArray(values, slope or 1.0, inter or 0.0, geometry, order="F", mapping=mapping)


def _uncompressed(file: BinaryIO) -> tuple[BinaryIO, bool]:
    """What the file holds, and whether it is compressed: by what it is, not by what it is called."""
    compressed = file.read(2) == b"\x1f\x8b"
    file.seek(0)
    return (_gunzip(file) if compressed else file), compressed


def _nifti_header(path: Path, stream: BinaryIO) -> tuple[Any, bytes]:
    """The header, corrected as nibabel does, and its original bytes."""
    start = stream.read(348)
    if start[:4] in (struct.pack("<i", 540), struct.pack(">i", 540)):
        start += stream.read(540 - 348)
    kind, place, magic = _NIFTI.get(len(start), (None, 0, b"none"))
    if start[place : place + 4] != magic:
        refuse(path, "it does not begin with a NIfTI header")
    header = kind(start, check=False)
    header.check_fix(logger=_QUIET)
    return header, start


def _geometry(header: Any) -> Geometry:
    """Readings of the affine, best first: nibabel's choice, its directions with the stored voxel sizes (which is what
    ITK reads, and what ACDC means), and the quaternion form."""
    zooms = tuple(float(zoom) for zoom in header.get_zooms())
    known = int(header["sform_code"]) > 0 or int(header["qform_code"]) > 0
    best = header.get_best_affine()
    lengths = np.linalg.norm(best[:3, :3], axis=0)
    sizes = np.array((zooms + (1.0,) * 3)[:3])
    affines = [best]
    if (lengths > 0).all() and not np.allclose(lengths, sizes, rtol=1e-3):
        affines.append(best @ np.diag([*(sizes / lengths), 1.0]))
    if int(header["sform_code"]) > 0 and int(header["qform_code"]) > 0:
        with suppress(ValueError):  # no rotation; then the other form has to do
            affines.append(header.get_qform())
    usable = tuple(affine for affine in affines if known and invertible(affine))
    bare = not usable or bool(np.array_equal(np.abs(best), np.eye(4)))
    return Geometry(usable, zooms, bare)


def _read_npy(path: Path, file: BinaryIO, peek: bool) -> StoredArray:
    shape, fortran, dtype = _npy_header(path, file)
    offset = file.tell()
    order: Literal["C", "F"] = "F" if fortran else "C"
    check_exact_size(path, offset + byte_size(path, shape, dtype))
    if peek:
        return StoredArray(no_values(shape, dtype), order=order)
    mapping = _map(file)
    return StoredArray(np.ndarray(shape, dtype, mapping, offset, order=order), order=order, mapping=mapping)


def _npy_header(path: Path, stream: BinaryIO) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    version = npy.read_magic(stream)
    if version not in ((1, 0), (2, 0)):
        refuse(path, f"its format version {version} is not one of plain arrays")
    shape, fortran, dtype = (npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0)(stream)
    if dtype.hasobject:
        refuse(path, "it holds Python objects, which are never unpickled")
    return shape, fortran, dtype


def _read_npz(path: Path, file: BinaryIO, keys: tuple[str, ...], peek: bool) -> StoredArray:
    """One member of the archive: mapped where it is stored plainly, inflated where it is compressed."""
    with zipfile.ZipFile(file) as archive:
        members = archive.infolist()
        for member in members:
            archive.open(member).close()  # fails if the name beside the data is another than in the directory
    member = _choose(path, members, keys)
    key = member.filename.removesuffix(".npy")
    if member.flag_bits & 1 or member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        refuse(path, f"array {key!r} is encrypted or compressed in a way that numpy does not write")
    file.seek(member.header_offset)
    name_length, extra_length = struct.unpack_from("<HH", file.read(30), 26)
    file.seek(name_length + extra_length, io.SEEK_CUR)
    deflated = member.compress_type == zipfile.ZIP_DEFLATED
    start = file.tell()
    stream = _gunzip(_AsGzip(file, member)) if deflated else file
    shape, fortran, dtype = _npy_header(path, stream)
    size = byte_size(path, shape, dtype)
    order: Literal["C", "F"] = "F" if fortran else "C"
    if size > member.file_size or member.file_size > MOST_INFLATION * (member.compress_size + 64):
        refuse(path, f"array {key!r} announces {size:,} bytes and the archive holds {member.file_size:,}")
    mapping = None
    if peek:
        values = no_values(shape, dtype)
    elif deflated:
        values = np.ndarray(shape, dtype, _inflate(path, stream, size), order=order)
    else:
        offset, mapping = file.tell(), _map(file)
        if offset + size != start + member.file_size:
            refuse(path, f"array {key!r} announces {size:,} bytes and the archive holds another number: broken")
        file.seek(start)
        _check_crc(path, file, member)
        values = np.ndarray(shape, dtype, mapping, offset, order=order)
    turned = key in NNUNET_KEYS and _turned_by_nnunet(path)
    return StoredArray(values, key=key, order=order, mapping=mapping, turned=turned)


def _turned_by_nnunet(path: Path) -> bool:
    """Whether the plans beside a prediction, or above the fold that it validates, read images in turned axes.

    The label map beside the array is turned back; the array is not.
    """
    for folder in (path.parent, path.parent.parent.parent):
        plans_file = folder / "plans.json"
        reject_pipe(plans_file)
        if not plans_file.is_file():
            continue
        try:
            plans = parse_json(plans_file.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise FileError(f"{plans_file} must be a JSON file that can be read; {error}. Correct the file.") from error
        return isinstance(plans, dict) and plans.get("image_reader_writer") == "NibabelIOWithReorient"
    return False


def _choose(path: Path, members: list[zipfile.ZipInfo], keys: tuple[str, ...]) -> zipfile.ZipInfo:
    """The member under the first key that exists, or the only array."""
    arrays = {member.filename.removesuffix(".npy"): member for member in members if member.filename.endswith(".npy")}
    for key in keys:
        if key in arrays:
            return arrays[key]
    if len(arrays) != 1:
        names = ", ".join(sorted(arrays)) or "none"
        raise FileError(
            f"{path.name} must hold one array, or one named {' or '.join(keys)}; its arrays: {names}. Save one array."
        )
    return next(iter(arrays.values()))


class _AsGzip(io.RawIOBase):
    """A deflated member of a zip archive dressed as a gzip file: one fast inflater, checksum included, for both."""

    def __init__(self, file: BinaryIO, member: zipfile.ZipInfo) -> None:
        self._file, self._left = file, member.compress_size
        self._head = b"\x1f\x8b\x08" + bytes(7)
        self._tail = struct.pack("<II", member.CRC, member.file_size & 0xFFFFFFFF)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        most = len(buffer)
        if self._head:
            part, self._head = self._head[:most], self._head[most:]
        elif self._left:
            part = self._file.read(min(most, self._left))
            self._left -= len(part)
        else:
            part, self._tail = self._tail[:most], self._tail[most:]
        buffer[: len(part)] = part
        return len(part)


def _gunzip(file: BinaryIO | io.RawIOBase) -> BinaryIO:
    opener: Any = gzip.GzipFile
    return cast(BinaryIO, opener(fileobj=file))


def gzip_into(file: BinaryIO) -> BinaryIO:
    """A stream that compresses into the file, fast, and with neither a name nor a time of day in it."""
    opener: Any = gzip.GzipFile
    return cast(BinaryIO, opener(filename="", mode="wb", compresslevel=1, fileobj=file, mtime=0))


def _check_crc(path: Path, file: BinaryIO, member: zipfile.ZipInfo) -> None:
    """Compare the checksum of a member that is stored without compression, which begins where the file stands."""
    crc = 0
    for first in range(0, member.file_size, _PIECE_BYTES):
        crc = zlib.crc32(file.read(min(_PIECE_BYTES, member.file_size - first)), crc)
    if crc != member.CRC:
        refuse(path, f"its member {member.filename} does not have the checksum in the archive: broken")


def _inflate(path: Path, stream: BinaryIO, size: int) -> NDArray[np.uint8]:
    """The rest of the stream, which must have `size` bytes and the checksum behind them."""
    buffer = np.empty(size, np.uint8)
    filled = 0
    while filled < size:
        part = stream.read(min(_PIECE_BYTES, size - filled))
        if not part:
            raise EOFError
        buffer[filled : filled + len(part)] = np.frombuffer(part, np.uint8)
        filled += len(part)
    if stream.read(1):  # reads the checksum if the stream ends here
        refuse(path, f"its header announces {size:,} bytes of values and it holds more")
    return buffer


def _skip(stream: BinaryIO, size: int) -> None:
    while size > 0:
        part = stream.read(min(_PIECE_BYTES, size))
        if not part:
            raise EOFError
        size -= len(part)


def _map(file: BinaryIO) -> mmap.mmap:
    return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


_READERS: dict[str, Callable[[Path, BinaryIO, bool], StoredArray]] = {
    ".npy": _read_npy,
    ".png": read_png,
    **dict.fromkeys(PICTURES[1:], read_tiff),
    **dict.fromkeys((".nrrd", ".nhdr"), read_nrrd),
    **dict.fromkeys((".mha", ".mhd"), read_metaimage),
    **dict.fromkeys(DICOM, read_segmentation),
}
