"""Pictures: PNG by Pillow, TIFF by tifffile. Their axes are (y, x), below one of channels or pages if there is any.

A palette means its indices, a transparency that is the same everywhere nothing. A picture of the two values 0 and 255
(or 65535) is a mask: its slope makes them 0 and 1, for labels and probabilities alike. Tags on how to show a picture
(turned, or with white as 0) are passed over: numbers count as they are stored. Sizes are checked before anything is
decoded. Pillow accepts PNG images that are damaged or incomplete, so their checksums and sizes are compared here.
"""

from __future__ import annotations

import logging
import math
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from isal import isal_zlib
from numpy.typing import NDArray

from segcal.volumes.stored import StoredArray, byte_size, check_size, needed, no_values, refuse

Array = NDArray[Any]

_PNG_START = b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR"
_PNG_CHANNELS = {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}  # by the type of color
_INTERLACED = ((0, 0, 8, 8), (4, 0, 8, 8), (0, 4, 4, 8), (2, 0, 4, 4), (0, 2, 2, 4), (1, 0, 2, 2), (0, 1, 1, 2))
"""The passes of Adam7: first column and row, then the steps between columns and rows."""
_PALETTE, _GRAY_ALPHA, _RGB_ALPHA = 3, 4, 6
_PIECE_BYTES = 1 << 20
_COMPRESSIONS = {1: 1, 5: 4096, 8: 1032, 32946: 1032, 32773: 128}  # none, LZW, deflate (two), PackBits: most inflation
_RGB, _PALETTE_COLOR = 2, 3  # TIFF's photometric interpretations; 0 and 1 are gray
_ALPHA = (1, 2)  # TIFF's extra samples that are a transparency
logging.getLogger("tifffile").addHandler(logging.NullHandler())  # it reports each odd tag; a progress bar should not


def read_png(path: Path, file: BinaryIO, peek: bool) -> StoredArray:
    """(y, x), or (channel, y, x) of a picture in color."""
    start = file.read(29)
    if len(start) < 29 or not start.startswith(_PNG_START):
        refuse(path, "it does not begin as a PNG does")
    width, height, depth, kind, _, _, interlaced = struct.unpack(">IIBBBBB", start[16:29])
    channels = _PNG_CHANNELS.get(kind)
    if channels is None or depth not in (1, 2, 4, 8, 16):
        refuse(path, f"its color type {kind} with {depth} bits does not exist")
    dtype = np.dtype(np.uint16 if depth == 16 else bool if depth == 1 and kind == 0 else np.uint8)
    check_size(path, height * (-(-width * channels * depth // 8)), compressed=True)
    alpha = kind in (_GRAY_ALPHA, _RGB_ALPHA)
    shape = (height, width) if channels - alpha == 1 else (channels - alpha, height, width)
    byte_size(path, shape, dtype)
    if peek:
        return StoredArray(no_values(shape, dtype), picture=True, color=len(shape) == 3)
    _check_pixels(path, file, _png_size(width, height, depth * channels, interlaced=bool(interlaced)))
    values = _png_values(path, file, deep=depth == 16 and channels > 1)
    if values.shape != ((height, width) if channels == 1 else (height, width, channels)):
        refuse(path, f"it holds {values.shape} and announces {height} rows of {width} pixels")
    return _picture(path, values.astype(dtype, copy=False), alpha=alpha, palette=kind == _PALETTE)


def _png_size(width: int, height: int, pixel_bits: int, *, interlaced: bool) -> int:
    """Return the number of bytes of all rows, each after the byte that names its filter.

    >>> _png_size(5, 3, 8, interlaced=False), _png_size(5, 3, 8, interlaced=True)
    (18, 22)
    """
    size = 0
    for column, row, column_step, row_step in _INTERLACED if interlaced else ((0, 0, 1, 1),):
        columns = -(-(width - column) // column_step)
        rows = -(-(height - row) // row_step)
        if columns > 0 and rows > 0:
            size += rows * (1 + -(-columns * pixel_bits // 8))
    return size


def _check_pixels(path: Path, file: BinaryIO, announced: int) -> None:
    """Compare all checksums of a PNG file, and the size of its pixels with the size that its header announces."""
    inflater = isal_zlib.decompressobj()
    size = 0
    for kind, content in _chunks(path, file):
        while kind == b"IDAT" and content and not inflater.eof and size <= announced:
            size += len(inflater.decompress(content, _PIECE_BYTES))
            content = inflater.unconsumed_tail
    size += len(inflater.flush())
    if size != announced or not inflater.eof:
        refuse(path, f"its header announces {announced:,} bytes of pixels and it holds {size:,}: broken or cut off")
    file.seek(0)


def _chunks(path: Path, file: BinaryIO) -> Iterator[tuple[bytes, bytes]]:
    """Yield the name and the content of each chunk to the last one, IEND, and compare its checksum."""
    left = path.stat().st_size
    file.seek(8)  # the signature
    kind = b""
    while kind != b"IEND":
        start = file.read(8)
        if len(start) < 8:
            raise EOFError
        length, kind = struct.unpack(">I4s", start)
        left -= 12 + length
        if left < 8:
            raise EOFError
        content, crc = file.read(length), file.read(4)
        if isal_zlib.crc32(content, isal_zlib.crc32(kind)) != int.from_bytes(crc, "big"):
            refuse(path, f"its part {kind.decode('latin-1')!r} does not have the checksum behind it: broken")
        yield kind, content


def _png_values(path: Path, file: BinaryIO, *, deep: bool) -> Array:
    """(y, x) or (y, x, channel); Pillow would cut 16-bit colors to 8 bits."""
    if deep:
        return np.asarray(needed("imagecodecs", "images", path).png_decode(file.read()))
    from PIL.PngImagePlugin import PngImageFile

    with PngImageFile(file) as image:  # not Image.open, which warns of pictures that are merely large
        if getattr(image, "n_frames", 1) > 1:
            refuse(path, "it is an animation")
        return np.array(image)


def read_tiff(path: Path, file: BinaryIO, peek: bool) -> StoredArray:
    """(y, x), or (channel, y, x) of one page with channels, or (page, y, x)."""
    tifffile = needed("tifffile", "images", path)
    with tifffile.TiffFile(file) as tiff:
        pages = list(tiff.pages)
        first = _check_pages(path, pages)
        alpha = any(int(sample) in _ALPHA for sample in first.extrasamples)
        color = first.photometric == _RGB and first.dtype.kind == "u"
        channels, rows, columns = _page_shape(path, first)
        if len(pages) > 1 and channels - alpha > 1:
            refuse(path, f"its {len(pages)} pages have {channels} channels each, and it may have one or the other")
        number = max(len(pages), channels - alpha)
        shape = (rows, columns) if number == 1 else (number, rows, columns)
        byte_size(path, shape, first.dtype)
        if peek:
            return StoredArray(no_values(shape, first.dtype), picture=True, color=color)
        planes = [page.asarray(maxworkers=1).reshape(page.shape) for page in pages]
    values = planes[0] if len(planes) == 1 else np.stack(planes, -1)
    if first.axes == "SYX":
        values = np.moveaxis(values, 0, -1)
    return _picture(path, values, alpha=alpha, color=color, palette=first.photometric == _PALETTE_COLOR)


def _check_pages(path: Path, pages: list[Any]) -> Any:
    """The first page, once all are of one kind, and the file long enough for them."""
    if not pages:
        refuse(path, "it has no page")
    first = pages[0]
    if first.dtype is None:
        refuse(path, f"its values of {first.bitspersample} bits are of no known type")
    most = _COMPRESSIONS.get(int(first.compression))
    if most is None:
        refuse(path, "its compression must be none, LZW, deflate or PackBits. Save it again with one of these")
    if int(first.photometric) > _PALETTE_COLOR:
        refuse(path, "its pixels must be gray, RGB or a palette's. Save it again as such")
    kinds = {(page.shape, page.dtype, page.axes, int(page.compression), int(page.photometric)) for page in pages}
    if len(kinds) > 1:
        refuse(path, "its pages differ in size or type, as those of a pyramid do. Save the one that is meant")
    size, announced = path.stat().st_size, 0
    for page in pages:
        ends = [at + count for at, count in zip(page.dataoffsets, page.databytecounts, strict=True)]
        if not ends or min(page.databytecounts) < 1 or max(ends) > size:
            refuse(path, "its pixels lie beyond the end of the file: broken or cut off")
        parts, needed_bytes = math.prod(page.chunked), math.prod(page.shape) * page.bitspersample // 8
        if len(ends) != parts:
            refuse(path, f"its header announces {parts:,} strips or tiles and lists {len(ends):,}: broken")
        if page.compression == 1 and sum(page.databytecounts) < needed_bytes:
            refuse(path, f"its pixels need {needed_bytes:,} bytes and its strips have fewer: broken")
        announced += needed_bytes
    if announced > size * most:
        refuse(path, f"its header announces {announced:,} bytes and the file has {size:,}: broken or cut off")
    return first


def _page_shape(path: Path, page: Any) -> tuple[int, int, int]:
    """Channels, rows and columns."""
    if page.axes == "YX":
        return 1, *page.shape
    if page.axes not in ("YXS", "SYX"):
        refuse(path, f"its axes {page.axes} are not those of a picture")
    rows, columns, channels = page.shape if page.axes == "YXS" else (*page.shape[1:], page.shape[0])
    return channels, rows, columns


def _picture(path: Path, values: Array, *, alpha: bool, palette: bool, color: bool = True) -> StoredArray:
    """What was read as (y, x) or (y, x, channel), without its transparency, and with the scale of a mask."""
    if alpha:
        clear = values[..., -1]
        if clear.min() != clear.max():
            refuse(path, "its transparency differs between pixels, and could mean anything. Save it without")
        values = values[..., :-1] if values.shape[-1] > 2 else values[..., 0]
    if values.ndim == 3:
        values = np.moveaxis(values, -1, 0)
    values = np.ascontiguousarray(values)
    slope = 1.0 if palette or not _is_mask(values) else 1 / np.iinfo(values.dtype).max
    return StoredArray(values, slope, picture=True, color=color and values.ndim == 3)


def _is_mask(values: Array) -> bool:
    """Whether the picture has no value between black and white, and has white."""
    if values.dtype not in (np.uint8, np.uint16):
        return False
    white = values == np.iinfo(values.dtype).max
    return bool(white.any()) and not np.any(values[~white])


def write_png(file: BinaryIO, values: Array) -> None:
    """A gray PNG of (y, x) numbers of 8 or 16 bits."""
    from PIL import Image

    Image.fromarray(np.ascontiguousarray(values)).save(file, format="PNG")


def write_tiff(file: BinaryIO, values: Array) -> None:
    """A gray TIFF image of (y, x), or of (page, y, x)."""
    needed("tifffile", "images", Path("a TIFF image")).imwrite(
        file, np.ascontiguousarray(values), photometric="minisblack", metadata=None
    )
