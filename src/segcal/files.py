"""Files written whole and read safely."""

from __future__ import annotations

import csv
import fcntl
import io
import json
import os
import re
import uuid
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.lib import format as npy

from segcal.errors import ConfigError, SegcalError


@contextmanager
def new_file(path: Path) -> Iterator[BinaryIO]:
    """A file to write that has its name only once it is whole, with the permissions that any new file gets."""
    partial = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        with partial.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def write_whole(path: Path, content: bytes | memoryview) -> None:
    """Write a file so that nobody ever sees a part of it."""
    with new_file(path) as file:
        file.write(content)


def write_npz(path: Path, header: dict[str, Any], arrays: dict[str, np.ndarray[Any, Any]]) -> str:
    """Write arrays and a JSON header as .npz: no pickle, the same bytes for the same content. The header's text."""
    text = json.dumps(header, indent=2, ensure_ascii=False)
    content = io.BytesIO()
    # Level 1: sums are mostly zeros or noise, and more effort gains little. zipfile writes no time of day.
    with zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        for name, array in {"header": np.array(text), **arrays}.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                npy.write_array(member, np.asarray(array), allow_pickle=False)
    write_whole(path, content.getbuffer())
    return text


def read_header(path: str | os.PathLike[str], *, kind: str) -> dict[str, Any]:
    """The header alone of a file that `write_npz` wrote."""
    return _read(path, kind, lambda content: {})[0]


def read_npz(path: str | os.PathLike[str], *, kind: str) -> tuple[dict[str, Any], dict[str, np.ndarray[Any, Any]]]:
    """Header and arrays of a file that `write_npz` wrote with this `format` in its header; SegcalError otherwise."""
    return _read(path, kind, lambda content: {name: content[name] for name in content.files if name != "header"})


def _read(
    path: str | os.PathLike[str], kind: str, arrays: Callable[[Any], dict[str, np.ndarray[Any, Any]]]
) -> tuple[dict[str, Any], dict[str, np.ndarray[Any, Any]]]:
    with open(path, "rb") as file:
        try:
            with np.load(file, allow_pickle=False) as content:
                header = json.loads(str(content["header"]))
                if header["format"] != kind:
                    raise ValueError(f"its format is {header['format']!r}")
                return header, arrays(content)
        except (
            OSError,
            ValueError,
            LookupError,
            TypeError,
            EOFError,
            AttributeError,
            RuntimeError,  # a damaged zip may claim to be encrypted, or of a later version
            zipfile.BadZipFile,
            zlib.error,
        ) as error:
            reason = str(error).split(". ")[0].rstrip(".")  # numpy goes on to advise unpickling
            raise SegcalError(f"{path} must be a file of the format {kind!r}; {reason}.") from error


@contextmanager
def locked(path: Path, folder: Path) -> Iterator[None]:
    """Hold the lock file at `path`, so that two processes never write `folder` at once; it ends with the process."""
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise ConfigError(
                f"{folder} is being written by another process; wait for it, or choose another --out."
            ) from error
        yield


def csv_text(header: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """A table as CSV, a line each."""
    content = io.StringIO()
    writer = csv.writer(content, lineterminator="\n")
    writer.writerow(header)
    writer.writerows(rows)
    return content.getvalue()


class Ledger:
    """Which results are whole, and of what: a JSON file written after each."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.content: dict[str, str] = {}
        with suppress(OSError, ValueError, TypeError):  # not there, or not ours: begin anew
            self.content = dict(json.loads(path.read_text(encoding="utf-8")))

    def get(self, name: str) -> str | None:
        return self.content.get(name)

    def set(self, name: str, key: str) -> None:
        self.content[name] = key
        write_whole(self.path, json.dumps(self.content, indent=2, sort_keys=True).encode())


def file_stems(names: Iterable[str]) -> dict[str, str]:
    """A name for a file for each name, all different, whatever signs the names hold.

    >>> file_stems(["DSC + CE", "DSC/CE", "ünï"])
    {'DSC + CE': 'DSC-CE', 'DSC/CE': 'DSC-CE-2', 'ünï': 'ünï'}
    """
    stems: dict[str, str] = {}
    for name in names:
        plain = re.sub(r"[^\w.]+", "-", name).strip("-.") or "method"
        taken, stem, again = set(stems.values()), plain, 2
        while stem.lower() in {each.lower() for each in taken}:  # some file systems do not tell case
            stem, again = f"{plain}-{again}", again + 1
        stems[name] = stem
    return stems
