"""Files written whole and read safely."""

from __future__ import annotations

import csv
import errno
import io
import json
import os
import re
import shutil
import stat
import tempfile
import unicodedata
import uuid
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import MappingProxyType
from typing import IO, Any, BinaryIO

import numpy as np
from filelock import FileLock, Timeout, lock_descriptor
from numpy.lib import format as npy

from segcal._io.parsing import parse_json
from segcal._io.spool import Piece, Spool
from segcal.errors import ConfigError, FileError, SegcalError

_MARK = re.compile(r"[0-9a-f]{32}")
_STAGE, _WRITTEN = ".new-", ".written.json"
_WINDOWS = os.name == "nt"  # where a file that is open can be neither renamed nor removed


class WriteError(OSError):
    """A file or folder that cannot be written, and why."""

    def __init__(self, number: int, reason: str, path: str) -> None:
        OSError.__init__(self, number, reason, path)

    def __str__(self) -> str:
        return f"{self.filename} cannot be written: {self.strerror}."


class HeldError(ConfigError):
    """A folder that another process is writing."""


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """What the system refuses meanwhile is a WriteError with this name; by itself it would often have none."""
    try:
        yield
    except WriteError:
        raise
    except OSError as error:
        raise WriteError(error.errno or errno.EIO, error.strerror or str(error), os.fspath(path)) from error


def reject_pipe(path: str | os.PathLike[str]) -> None:
    """Raise FileError if a path is a pipe, a device or a socket: opening or reading it could wait forever.

    Call it before opening a file that a user names. A missing file and a folder pass: opening them fails at once.
    """
    try:
        mode = os.stat(path).st_mode
    except (OSError, ValueError):  # opening the file will tell the reason
        return
    if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
        kind = "a pipe" if stat.S_ISFIFO(mode) else "a socket" if stat.S_ISSOCK(mode) else "a device"
        raise FileError(f"{path} must be a regular file; it is {kind}. Save its content as a file.")


def make_folder(folder: Path) -> None:
    """Make a folder, unless it is there, and see that files can be made in it, before there is work to lose."""
    with writing(folder):
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except FileExistsError:
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR)) from None
        with tempfile.TemporaryFile(dir=folder):
            pass


def real_path(path: Path) -> Path:
    """Return the path without symbolic links; unlike `Path.resolve`, links in a circle are no error."""
    return Path(os.path.realpath(path))


def text_path(path: str | os.PathLike[str]) -> str:
    """Return the absolute path as results name it; FileError if it is not valid text, which no results file takes."""
    absolute = os.path.abspath(path)
    if any(unicodedata.category(sign) == "Cs" for sign in absolute):
        raise FileError(f"{absolute} must be a path of valid UTF-8 text; it is not. Rename the folder.")
    return absolute


def stay_outside(out: Path, source: Path, what: str) -> None:
    """Refuse to write into a folder of inputs, or beside an input that is a file."""
    root = real_path(source if source.is_dir() else source.parent)
    if real_path(out) == root or (source.is_dir() and real_path(out).is_relative_to(root)):
        raise ConfigError(
            f"--out must lie outside of the {what}, which stay as they are; got {out} in {root}. Choose another folder."
        )


@contextmanager
def new_file(path: Path) -> Iterator[BinaryIO]:
    """A file to write that has its name only once it is whole, with the permissions that any new file gets.

    Until then it is .NAME.MARK. A process that is killed leaves it like that, for the next that writes NAME to remove
    (on Windows it stays).
    """
    with writing(path):
        if path.exists() and not path.is_file():  # a device, such as /dev/null, would be replaced by a file
            kind = "a folder" if path.is_dir() else "a device or a pipe"
            raise FileError(f"{path} must be a file to write; it is {kind}. Give another file name.")
        _remove_left(path)
        partial, opened = _open_partial(path)
        try:
            with opened as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
                if _WINDOWS:
                    file.close()
                os.replace(partial, path)
        except BaseException:
            partial.unlink(missing_ok=True)
            raise


def _open_partial(path: Path) -> tuple[Path, BinaryIO]:
    """A new file beside `path`, locked, which tells others that its writer lives."""
    while True:
        partial = path.with_name(f"{_partial_start(path)}{uuid.uuid4().hex}")
        file = partial.open("xb")
        with suppress(OSError):  # without locks here, nobody removes anything either
            lock_descriptor(file.fileno())
        if _is_at(file, partial):  # else another process took it for left behind before it was locked
            return partial, file
        file.close()


def _partial_start(path: Path) -> str:
    """What names of files that are to become `path` begin with; a name has room for 255 bytes, mark included."""
    return f".{path.name.encode(errors='surrogateescape')[:200].decode(errors='ignore')}."


def _remove_left(path: Path) -> None:
    """Remove what processes that died while they wrote this file have left."""
    if _WINDOWS:  # to look at a file keeps its writer from renaming it
        return
    start = _partial_start(path)
    for name in os.listdir(path.parent):
        if name.startswith(start) and _MARK.fullmatch(name, len(start)):
            with suppress(OSError), path.with_name(name).open("r+b") as file:
                if lock_descriptor(file.fileno(), blocking=False):
                    path.with_name(name).unlink()


def _is_at(file: IO[Any], path: Path) -> bool:
    """Whether the open file is the one that has this name now."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


def write_whole(path: Path, content: bytes | memoryview) -> None:
    """Write a file so that nobody ever sees a part of it."""
    with new_file(path) as file:
        file.write(content)


@contextmanager
def replacing(folder: Path, names: Iterable[str] = ()) -> Iterator[Path]:
    """A folder to write results to; at the end they take the place of those of the last time in `folder`.

    The old ones go before the first new one has its name, so that both are never there together; if anything fails
    before, the old ones stay. Old are `names`, and whatever else was written through here the last time.
    """
    make_folder(folder)
    _remove_stages(folder)
    with _stage(folder) as stage:
        try:
            yield stage
        except WriteError as error:
            raise WriteError(error.errno or errno.EIO, error.strerror or "", _outside(error.filename, stage)) from error
        with writing(folder):
            _take_over(folder, stage, set(names))


def _take_over(folder: Path, stage: Path, names: set[str]) -> None:
    """Move all files of the stage to the folder, sums last, for others begin with these; before, the old ones go."""
    new = sorted((path.name for path in stage.iterdir()), key=lambda name: (name.endswith(".npz"), name))
    old = _written(folder)
    ledger = folder / _WRITTEN
    if old | (set(new) - names):
        write_whole(ledger, json.dumps(sorted(old.union(new) - names)).encode())
    for name in sorted(old | names):
        (folder / name).unlink(missing_ok=True)
    for name in new:
        os.replace(stage / name, folder / name)
    if others := sorted(set(new) - names):
        write_whole(ledger, json.dumps(others).encode())
    else:
        ledger.unlink(missing_ok=True)


def _written(folder: Path) -> set[str]:
    """Names of files in this folder that were written through `replacing`; none where that is not known."""
    with suppress(OSError, ValueError, TypeError):
        found = parse_json((folder / _WRITTEN).read_text(encoding="utf-8"))
        inside = {name for name in found if isinstance(name, str) and name == Path(name).name}
        return {name for name in inside if (folder / name).is_file()}
    return set()


@contextmanager
def _stage(folder: Path) -> Iterator[Path]:
    """A new folder inside, locked, which tells others that its writer lives; gone at the end."""
    with writing(folder):
        while True:
            stage = Path(tempfile.mkdtemp(prefix=_STAGE, dir=folder))
            handle = _lock_folder(stage, wait=True)
            if stage.exists():  # else another process took it for left behind before it was locked
                break
            _close(handle)
    try:
        yield stage
    finally:
        shutil.rmtree(stage, ignore_errors=True)
        _close(handle)


def _remove_stages(folder: Path) -> None:
    """Remove what processes that died while they wrote results here have left."""
    for left in folder.glob(f"{_STAGE}*"):
        handle = _lock_folder(left, wait=False)
        if handle is not None:
            shutil.rmtree(left, ignore_errors=True)
            _close(handle)


def _lock_folder(folder: Path, *, wait: bool) -> int | None:
    """A handle that locks a folder until closed; None where another has it, or folders have no locks (Windows)."""
    handle = None
    with suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        if lock_descriptor(handle, blocking=wait):
            return handle
    _close(handle)
    return None


def _close(handle: int | None) -> None:
    if handle is not None:
        os.close(handle)


def _outside(path: str, stage: Path) -> str:
    """The path as it will be, of a file in the stage."""
    return os.fspath(stage.parent / Path(path).name) if Path(path).parent == stage else path


def write_npz(
    path: Path,
    header: dict[str, Any],
    arrays: dict[str, np.ndarray[Any, Any]],
    *,
    packed: Mapping[str, Sequence[Piece]] = MappingProxyType({}),
) -> str:
    """Write arrays and a JSON header as .npz: no pickle, the same bytes for the same content. The header's text.

    packed: further arrays of bytes, each from pieces that are read one at a time; they are packed already.
    """
    text = json.dumps(header, indent=2, ensure_ascii=False)
    # Level 1: sums are mostly zeros or noise, and more effort gains little. zipfile writes no time of day.
    with new_file(path) as file, zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        for name, array in {"header": np.array(text), **arrays}.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                npy.write_array(member, np.asarray(array), allow_pickle=False)
        for name, pieces in packed.items():
            with archive.open(zipfile.ZipInfo(f"{name}.npy"), "w", force_zip64=True) as member:  # stored as it is
                size = sum(piece.size for piece in pieces)
                npy.write_array_header_1_0(member, {"descr": "|u1", "fortran_order": False, "shape": (size,)})
                for piece in pieces:
                    member.write(piece.read())
    return text


def read_header(path: str | os.PathLike[str], *, kind: str) -> dict[str, Any]:
    """The header alone of a file that `write_npz` wrote."""
    return _read(path, kind, lambda content: {})[0]


def read_npz(
    path: str | os.PathLike[str],
    *,
    kind: str,
    packed: Mapping[str, str] = MappingProxyType({}),
    remedy: str = "Create the file again",
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Header and arrays of a file that `write_npz` wrote with this `format` in its header; SegcalError otherwise.

    packed: names of arrays of bytes to be put aside in pieces, with the names of the arrays of their sizes.
    remedy: the last sentence of the error.
    """

    def arrays(content: Any) -> dict[str, Any]:
        aside = {name: sizes for name, sizes in packed.items() if sizes in content.files}
        found: dict[str, Any] = {
            name: _array(content, name) for name in content.files if name != "header" and name not in aside
        }
        for name, sizes in aside.items():
            with _member(content, name) as member:
                found[name] = _pieces(member, found[sizes])
        return found

    return _read(path, kind, arrays, remedy)


def _array(content: Any, name: str) -> np.ndarray[Any, Any]:
    """An array of an .npz file."""
    with _member(content, name) as member:
        array: np.ndarray[Any, Any] = npy.read_array(member, allow_pickle=False)
        return array


@contextmanager
def _member(content: Any, name: str) -> Iterator[IO[bytes]]:
    """The file of an array in an .npz file, which must be read to its end: there zipfile compares the checksum."""
    with content.zip.open(f"{name}.npy") as member:
        yield member
        if member.read(1):
            raise ValueError(f"array {name!r} holds more than its header announces")


def _pieces(member: IO[bytes], sizes: np.ndarray[Any, Any]) -> list[Piece]:
    """The bytes of an array in a file, put aside in pieces of these sizes."""
    npy.read_magic(member)
    shape, _, kind = npy.read_array_header_1_0(member)
    if kind != np.uint8 or sizes.dtype.kind not in "iu" or sizes.ndim != 1 or shape != (int(sizes.sum()),):
        raise ValueError("packed sums must be bytes, as many as their sizes tell")
    spool, pieces = Spool(), []
    for size in sizes.tolist():
        content = member.read(size)
        if size < 0 or len(content) != size:
            raise ValueError("packed sums must be as long as their sizes tell")
        pieces.append(spool.add(content))
    return pieces


def _read(
    path: str | os.PathLike[str],
    kind: str,
    arrays: Callable[[Any], dict[str, np.ndarray[Any, Any]]],
    remedy: str = "Create the file again",
) -> tuple[dict[str, Any], dict[str, np.ndarray[Any, Any]]]:
    reject_pipe(path)
    with open(path, "rb") as file:
        try:
            with np.load(file, allow_pickle=False) as content:
                header = parse_json(_text(_array(content, "header")))
                if header["format"] != kind:
                    raise ValueError(f"its format is {header['format']!r}")
                return header, arrays(content)
        except Exception as error:  # numpy, zipfile and zlib raise a dozen kinds for a damaged file
            reason = str(error).split(". ")[0].rstrip(".") or type(error).__name__  # numpy goes on to advise unpickling
            raise SegcalError(f"{path} must be a file of the format {kind!r}; {reason}. {remedy}.") from error


def _text(array: np.ndarray[Any, Any]) -> str:
    """The text in an array; numpy itself would make one of signs that do not exist, at which Python breaks."""
    if array.dtype.kind != "U":
        raise ValueError("its header is no text")
    return array.tobytes().decode("utf-32-be" if array.dtype.byteorder == ">" else "utf-32-le").rstrip("\0")


@contextmanager
def locked(path: Path, folder: Path) -> Iterator[None]:
    """Hold the lock file at `path`, so that two processes never write `folder` at once; it ends with the process."""
    lock = FileLock(path)
    with writing(folder):
        try:
            lock.acquire(blocking=False)
        except Timeout as error:
            raise HeldError(
                f"{folder} is being written by another process; wait for it, or choose another --out."
            ) from error
        own = path.stat()
    try:
        yield
    finally:
        # Removed before it is released: whoever opened it meanwhile finds it without a name, and takes a new one.
        # On Windows no open file can be removed; there, to release removes it.
        with suppress(OSError):
            if os.path.samestat(own, path.stat()):
                path.unlink()
        lock.release()


def is_locked(path: Path) -> bool:
    """Whether a process holds the lock file at `path`; to find out it is taken for a moment."""
    try:
        if path.exists():
            with locked(path, path.parent):
                return False
    except HeldError:
        return True
    except OSError:  # it cannot be written here
        pass
    return False


def csv_text(header: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """A table as CSV, a line each; a carriage return, which would end a line for some readers, is written as \\r."""
    content = io.StringIO()
    _write_rows(content, header, rows)
    return content.getvalue()


def write_csv(path: Path, header: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """Write a table as `csv_text` makes it, line by line, so that nobody ever sees a part of it."""
    with new_file(path) as file:
        text = io.TextIOWrapper(file, encoding="utf-8", newline="")
        _write_rows(text, header, rows)
        text.detach()  # else it would close the file


def _write_rows(file: IO[str], header: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(header)
    writer.writerows([x.replace("\r", "\\r") if isinstance(x, str) else x for x in row] for row in rows)


class Ledger:
    """Which results are whole, and of what: a JSON file written after each."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.content: dict[str, str] = {}
        with suppress(OSError, ValueError, TypeError):  # not there, or not ours: begin anew
            self.content = dict(parse_json(path.read_text(encoding="utf-8")))

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
