"""Text headers of NRRD and MetaImage files, and the voxels that they describe.

ITK ignores checksums, surplus bytes and fields that it cannot read, and opens any file that a header names. Here, a
header must be spelled exactly, sizes must agree, every checksum is verified, and the voxels are in the file of the
header or in a regular file of the same folder.
"""

from __future__ import annotations

import os
import re
from bz2 import BZ2Decompressor
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, NoReturn, TypeVar

import numpy as np
from isal.igzip_lib import DECOMP_GZIP, DECOMP_ZLIB, IgzipDecompressor
from numpy.typing import NDArray

from segcal.errors import FileError
from segcal.volumes.stored import MOST_INFLATION, byte_size, check_regular_file, no_values, reading, refuse

LONGEST_HEADER = 1 << 20
_PIECE_BYTES = 1 << 16
_MOST_BZIP2_INFLATION = 1_300_000  # a block of 45.9 MB in at least 36 bytes
_LINE_BREAKS = re.compile(r"[\x00-\x08\x0a-\x1f\x7f\x85\u2028\u2029]")  # for any program, and other control characters
_INTEGER = re.compile(r"[+-]?\d{1,18}", re.ASCII)
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?|nan", re.ASCII | re.IGNORECASE)
_DECOMPRESSORS: dict[str, tuple[Callable[[], Any], int]] = {  # with how far they can expand
    "zlib": (partial(IgzipDecompressor, flag=DECOMP_ZLIB), MOST_INFLATION),
    "gzip": (partial(IgzipDecompressor, flag=DECOMP_GZIP), MOST_INFLATION),
    "bzip2": (BZ2Decompressor, _MOST_BZIP2_INFLATION),
}
_Choice = TypeVar("_Choice")


class TextHeader:
    """The fields of a text header.

    `names`: every spelling of a field that the format allows, and the name under which its value is kept.
    """

    def __init__(self, path: Path, names: Mapping[str, str]) -> None:
        self.path = path
        self.fields: dict[str, str] = {}
        self._names = names
        self._letters = {_letters(name) for name in names}

    def refuse(self, reason: str) -> NoReturn:
        """Raise a `FileError` with the reason."""
        raise FileError(
            f"{self.path.name} must have a valid header; {reason}. Save the image again, for example with SimpleITK."
        )

    def lines(self, file: BinaryIO) -> Iterator[str]:
        """Yield the lines of the header without their ends."""
        left = LONGEST_HEADER
        while left > 0 and (content := file.readline(left)):
            left -= len(content)
            line = _decode(content.removesuffix(b"\n").removesuffix(b"\r"))
            if _LINE_BREAKS.search(line):
                self.refuse(f"a line must not have control characters or other line ends; got {line[:80]!r}")
            yield line

    def add(self, key: str, value: str) -> bool:
        """Store the value of a field; return whether the format has that field."""
        name = self._names.get(key)
        if name is None:
            if _letters(key.partition(":")[0]) in self._letters:
                self.refuse(f"the field {key!r} is not spelled as the format defines it")
            return False
        if name in self.fields:
            self.refuse(f"the field {name!r} is there twice, last as {key!r}")
        self.fields[name] = value.strip(" \t")
        return True

    def text(self, name: str, default: str | None = None) -> str:
        """Return the value of a field that decides how the file is read."""
        value = self.fields.get(name, default)
        if value is None:
            self.refuse(f"it has no field {name!r}")
        if not value.isascii():
            self.refuse(f"its {name} must be ASCII text; got {value[:80]!r}")
        return value

    def choice(self, name: str, choices: Mapping[str, _Choice], default: str | None = None) -> _Choice:
        """Return what a word stands for."""
        value = self.text(name, default)
        if value not in choices:
            self.refuse(f"its {name} is {value!r}, which cannot be read")
        return choices[value]

    def integers(self, name: str, count: int, default: str | None = None) -> list[int]:
        """Return so many whole numbers."""
        return [int(word) for word in self._words(name, count, _INTEGER, self.text(name, default))]

    def numbers(self, name: str, count: int, default: str | None = None) -> list[float]:
        """Return so many numbers."""
        return self.parse_numbers(name, count, self.text(name, default))

    def parse_numbers(self, name: str, count: int, text: str) -> list[float]:
        """Return the numbers in a part of a field."""
        return [float(word) for word in self._words(name, count, _NUMBER, text)]

    def open_data(self, name: str | None, file: BinaryIO) -> AbstractContextManager[BinaryIO]:
        """Open the file of that name, which must be in the same folder; None: the voxels follow the header."""
        if name is None:
            return nullcontext(file)
        if not name or re.search(r"[/\\%]|^LIST|^\.+$", name):
            self.refuse(f"its voxels must be in it, or in one file beside it; it names {name!r}")
        if file.read(LONGEST_HEADER).strip():
            self.refuse(f"its voxels are in {name!r}, and the header must end after that")
        path = self.path.with_name(name)
        check_regular_file(path)
        if path.resolve().parent not in (self.path.parent.resolve(), self.path.resolve().parent):
            self.refuse(f"its voxels must be in the same folder; {name!r} is a link to another one")
        return path.open("rb")

    def _words(self, name: str, count: int, pattern: re.Pattern[str], text: str) -> list[str]:
        words = text.split()
        if len(words) != count or not all(pattern.fullmatch(word) for word in words):
            kind = "whole numbers" if pattern is _INTEGER else "numbers"
            self.refuse(f"its {name} must be {count} {kind}; got {text[:80]!r}")
        return words


def with_detached_data(paths: Iterable[Path]) -> tuple[Path, ...]:
    """Return the paths; each header is followed by the file beside it that holds its voxels."""
    return tuple(file for path in paths for file in (path, *_detached_data(path)))


def _detached_data(path: Path) -> list[Path]:
    if path.suffix.lower() not in (".mhd", ".nhdr"):
        return []
    try:
        with reading(path) as file:
            header = file.read(LONGEST_HEADER)
    except FileError:  # the reader reports it
        return []
    names = re.findall(rb"^(?:ElementDataFile\s*=|data ?file:)\s*([^/\\\r\n]+?)\s*$", header, re.MULTILINE)
    return [path.with_name(os.fsdecode(name)) for name in names]


def read_voxels(
    path: Path, file: BinaryIO, shape: tuple[int, ...], dtype: np.dtype[Any], compression: str, *, peek: bool
) -> NDArray[Any]:
    """Read the rest of a file as an array, its first axis fastest; it must hold that array and nothing else.

    `compression` is "zlib", "gzip", "bzip2" or "". `peek`: return zeros that take no memory.
    """
    size = byte_size(path, shape, dtype)
    available = os.fstat(file.fileno()).st_size - file.tell()
    new_decompressor, inflation = _DECOMPRESSORS.get(compression, (None, 1))
    if size > available * inflation or (new_decompressor is None and size != available):
        refuse(path, f"its header announces {size:,} bytes and the file has {available:,}: broken or cut off")
    if peek:
        return no_values(shape, dtype)
    if new_decompressor is None:
        return np.fromfile(file, dtype).reshape(shape, order="F")
    return np.ndarray(shape, dtype, _decompress(path, file, size, new_decompressor), order="F")


def _decompress(path: Path, file: BinaryIO, size: int, new_decompressor: Callable[[], Any]) -> NDArray[np.uint8]:
    """Read the rest of a file, one compressed stream or several, to its end, where its checksum is."""
    buffer = np.empty(size, np.uint8)
    decompressor = new_decompressor()
    filled = 0
    while True:
        content = b""
        if decompressor.eof:
            content = decompressor.unused_data or file.read(_PIECE_BYTES)
            if not content:
                break
            decompressor = new_decompressor()
        elif decompressor.needs_input:
            content = file.read(_PIECE_BYTES)
            if not content:
                raise EOFError
        part = decompressor.decompress(content, size - filled + 1)  # one byte too many is enough to refuse it
        if len(part) > size - filled:
            refuse(path, f"its header announces {size:,} bytes and its compressed data holds more")
        buffer[filled : filled + len(part)] = np.frombuffer(part, np.uint8)
        filled += len(part)
    if filled < size:
        refuse(path, f"its header announces {size:,} bytes and its compressed data holds {filled:,}")
    return buffer


def _decode(line: bytes) -> str:
    try:
        return line.decode()
    except UnicodeDecodeError:
        return line.decode("latin-1")


def _letters(key: str) -> str:
    return re.sub(r"[\s_-]+", "", key).lower()
