"""Compiled code on disk that a damaged file, a full disk or a second process cannot turn into a crash.

numba loads whatever it finds in its cache: a truncated file ends in an error of pickle, and flipped bits of machine
code end the process. Here, every file ends with the SHA-256 of the bytes before it; otherwise it is compiled again.
"""

from __future__ import annotations

import hashlib
import io
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from numba import njit
from numba.core.caching import FunctionCache, IndexDataCacheFile

DIGEST_BYTES = 32
_messages: set[str] = set()  # that were printed


class _CheckedFile(IndexDataCacheFile):
    """An index and its data files, each with a checksum at its end, where pickle does not look."""

    @contextmanager
    def _open_for_write(self, filepath: str) -> Iterator[io.BytesIO]:
        content = io.BytesIO()
        yield content
        with super()._open_for_write(filepath) as file:
            file.write(content.getvalue() + hashlib.sha256(content.getvalue()).digest())

    def _load_index(self) -> dict[Any, str]:
        return super()._load_index() if self._is_sound(self._index_path) else {}

    def _load_data(self, name: str) -> Any:
        return super()._load_data(name) if self._is_sound(self._data_path(name)) else None

    def save(self, key: Any, data: Any) -> None:
        """Save compiled code in a file named after its signature, so that two processes never share a name."""
        name = self._data_name(int(hashlib.sha256(repr(key).encode()).hexdigest()[:12], 16))
        self._save_data(name, data)
        self._save_index(self._load_index() | {key: name})

    def _is_sound(self, path: str) -> bool:
        if not os.path.exists(path):
            return True  # numba knows what to do
        with open(path, "rb") as file:
            content = file.read()
        if hashlib.sha256(content[:-DIGEST_BYTES]).digest() == content[-DIGEST_BYTES:]:
            return True
        _say(f"compiled code in {self._cache_path} was damaged; segcal compiles it again.")
        return False


class _CheckedCache(FunctionCache):
    """The cache of one function; if it cannot be read or written, the function is compiled in every process."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__(function)
        name = f"{self._impl.filename_base}.checked"  # numba's own files have no checksum
        self._cache_file = _CheckedFile(self._cache_path, name, self._impl.locator.get_source_stamp())

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        try:
            return super().load_overload(sig, target_context)
        except OSError:
            return None

    def save_overload(self, sig: Any, data: Any) -> None:
        try:
            super().save_overload(sig, data)
        except OSError as error:
            _say(f"compiled code cannot be kept in {self._cache_path} ({error.strerror}); the next start is slow.")


def cached_njit(**options: Any) -> Callable[[Callable[..., Any]], Any]:
    """Return numba's decorator with these options and a checked cache on disk, if a folder for one can be written."""

    def compiled(function: Callable[..., Any]) -> Any:
        dispatcher = njit(**options)(function)
        try:
            dispatcher._cache = _CheckedCache(function)
        except RuntimeError:  # numba found no folder
            _say("no folder can be written for compiled code; every start is slow. Set NUMBA_CACHE_DIR to a folder.")
        return dispatcher

    return compiled


def _say(message: str) -> None:
    """Print a note to stderr, once."""
    if message not in _messages:
        print(f"note: {message}", file=sys.stderr)
    _messages.add(message)
