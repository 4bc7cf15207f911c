"""Bytes put aside: in memory while they are few, in a temporary file once they are many."""

from __future__ import annotations

import os
import tempfile
import weakref
from threading import Lock
from typing import IO, Any, NamedTuple

FEW = 2**19  # bytes that stay in memory


class Piece(NamedTuple):
    """What was put aside at one time."""

    spool: Spool
    start: int
    size: int

    def read(self) -> bytes:
        """The bytes."""
        return self.spool.read(self.start, self.size)


class Spool:
    """Takes bytes, and gives them back as often as they are asked for; its file, if it has one, ends with it."""

    def __init__(self, few: int = FEW) -> None:
        self._few = few
        self._memory = bytearray()
        self._file: IO[bytes] | None = None
        self._end = 0
        self._lock = Lock()

    def add(self, content: bytes) -> Piece:
        """Put these bytes aside."""
        with self._lock:
            piece = Piece(self, self._end, len(content))
            self._end += len(content)
            if self._file is None and self._end > self._few:
                self._file = tempfile.TemporaryFile()  # noqa: SIM115
                weakref.finalize(self, self._file.close)
                self._file.write(self._memory)
                self._memory = bytearray()
            if self._file is None:
                self._memory += content
            else:
                self._file.seek(piece.start)
                self._file.write(content)
            return piece

    def read(self, start: int, size: int) -> bytes:
        """So many bytes from a place on."""
        with self._lock:
            if self._file is None:
                return bytes(self._memory[start : start + size])
            self._file.flush()
            if hasattr(os, "pread"):  # does not move what a forked process shares
                return os.pread(self._file.fileno(), size, start)
            self._file.seek(start)
            return self._file.read(size)

    def __reduce__(self) -> tuple[Any, ...]:
        return _spool_of, (self.read(0, self._end),)


def _spool_of(content: bytes) -> Spool:
    """What a pickle holds; an empty one has nothing to add."""
    made = Spool()
    made.add(content)
    return made
