"""Jobs taken by name: never by two workers at once, and taken over from a worker that died.

A claim is the file NAME.GENERATION in a folder that all workers share, and the highest generation counts. To take a
name is to create the next generation, once the last one was released or its holder is dead.

Why two workers never hold one name: the file system lets one worker alone create a file, and no generation is ever
deleted or created again. So each has one holder for all time, and a slow worker that acts on an old view of the folder
wants a generation that is there already: it gets nothing. A release, like a note, replaces the holder's own file by
a whole new one; the file of a holder that was overtaken may change so too, but nobody reads it any more.

Who is alive: on this machine, who keeps a lock on the claim file, which the kernel drops at any death. The lock is
there before the file has its name, and a file found without one counts only if it still has that name afterwards,
for a live holder may just have replaced it. On another machine, who touched the file of late, by the clock of the
file server. A frozen machine thus looks dead and is overtaken: it alone may believe for a while to hold a claim that
is another's, which is what `Claim.check` is for.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import socket
import threading
import uuid
from contextlib import suppress
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

from segcal.errors import ConfigError, SegcalError

_NAME = re.compile(r"[A-Za-z0-9._-]{1,200}")
_GENERATION = re.compile(r"[1-9][0-9]*")
_NO_LINKS = {errno.EPERM, errno.EACCES, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP}
_GONE = {errno.ENOENT, errno.ESTALE}
_NOTE_S = 1.0  # notes are written no more often than this


class ClaimLost(SegcalError):  # noqa: N818 - what happened, not who erred
    """A claim that its worker no longer holds."""


class Holder(NamedTuple):
    """Who holds a claim, and what it told last."""

    host: str
    pid: int
    note: dict[str, Any]


_UNKNOWN = Holder("an unknown host", 0, {})


class Claim:
    """A name that this worker holds until it is released: at the end of a `with`, or by `release`."""

    def __init__(self, claims: Claims, name: str, generation: int, fd: int, content: dict[str, Any]) -> None:
        self.name = name
        self.lost = False  # True once somebody took it over
        self._claims = claims
        self._generation = generation
        self._path = claims._path(name, generation)
        self._fd = fd  # holds the lock
        self._content = content
        self._note = self._written = "{}"
        self._pid = os.getpid()
        self._released = False
        self._told, self._stop = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"claim on {name}", daemon=True)
        self._thread.start()

    def __enter__(self) -> Claim:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def check(self) -> None:
        """Raise ClaimLost unless this worker still holds the name; call it before writing what others will read.

        A folder that cannot be read for a moment is no proof of a loss.
        """
        held = f"The claim on {self.name!r} must be held while its job is worked on and its results are written"
        if self._released:
            raise ClaimLost(f"{held}; this worker released it. Take the name again.")
        holder: Holder | None = None
        with suppress(OSError):
            if self._overtaken():
                self.lost = True
                holder = self._claims.holder(self.name)
        if self.lost:
            came = f"{holder.host} (process {holder.pid}) has it now" if holder else f"{self._path} no longer counts"
            raise ClaimLost(
                f"{held}; {came}. A worker without a sign of life for {self._claims.patience_s:g} s is taken for dead, "
                "as when its machine sleeps. Write nothing more for this job, and take another."
            )

    def tell(self, **facts: Any) -> None:
        """Make these facts the note that others see. Cheap: a thread writes the last note, once a second at most."""
        try:
            self._note = json.dumps(facts)
        except (TypeError, ValueError) as error:
            raise ConfigError(f"A note must be plain numbers, words, lists and dicts; {error} in {facts!r}.") from error
        if os.getpid() == self._pid:  # a forked child has no thread to wake
            self._told.set()

    def release(self) -> None:
        """Let others take the name; a second call does nothing, nor does one in a forked child."""
        if self._released or os.getpid() != self._pid:
            return
        self._released = True
        self._stop.set()
        self._told.set()
        self._thread.join()
        try:
            with suppress(OSError):  # then the lock and the missing beat tell that it is free
                if not self._overtaken():
                    self._rewrite({"worker": None})
        finally:
            _close(self._fd)

    def _run(self) -> None:
        """Touch the file every `beat_s`, write new notes, and notice a takeover."""
        beat_s = self._claims.beat_s
        pause = min(beat_s, _NOTE_S)
        while not self._stop.wait(pause):
            with suppress(OSError):  # perhaps it passes
                os.utime(self._fd)  # no time given: the file server's own
            with suppress(OSError):
                if self._overtaken():
                    self.lost = True
                    return
                if (note := self._note) != self._written:
                    self._rewrite({**self._content, "note": json.loads(note)})
                    self._written = note
            self._told.wait(beat_s - pause)
            self._told.clear()

    def _overtaken(self) -> bool:
        return self._claims._newest(self.name) > self._generation or not _exists(self._path)

    def _rewrite(self, content: dict[str, Any]) -> None:
        """Replace the claim's file by one that is locked as well."""
        part = self._claims._part()
        fd = _write(part, content)
        try:
            os.replace(part, self._path)
        except BaseException as error:
            # A repeated request to a file server may fail because the first one did its work.
            if not (isinstance(error, OSError) and _is_at(fd, self._path)):
                _close(fd)
                _remove(part)
                raise
        old, self._fd = self._fd, fd
        _close(old)


class Claims:
    """The claims in one folder; all its workers need the same `beat_s` and `patience_s`.

    beat_s: how often a holder shows that it is alive. patience_s: how long other machines wait for such a sign.
    """

    def __init__(self, folder: str | os.PathLike[str], *, beat_s: float = 10.0, patience_s: float = 120.0) -> None:
        if not 0 < beat_s < patience_s:
            raise ConfigError(f"beat_s must be above 0 and below patience_s; got {beat_s:g} and {patience_s:g}.")
        self.folder = Path(folder)
        self.beat_s, self.patience_s = beat_s, patience_s
        self.folder.mkdir(parents=True, exist_ok=True)

    def take(self, name: str) -> Claim | None:
        """The claim on a name; None if someone alive holds it, or was faster."""
        newest, holder = self._look(name)
        if holder:
            return None
        content = {"worker": uuid.uuid4().hex, "host": socket.gethostname(), "pid": os.getpid(), "note": {}}
        fd = self._create(self._path(name, newest + 1), content)
        if fd is None:
            return None
        try:
            return Claim(self, name, newest + 1, fd, content)
        except BaseException:
            _close(fd)
            raise

    def holder(self, name: str) -> Holder | None:
        """Who holds a name; None if nobody alive does."""
        return self._look(name)[1]

    def _path(self, name: str, generation: int) -> Path:
        return self.folder / f"{name}.{generation}"

    def _part(self) -> Path:
        """A new file's name that no claim can have."""
        return self.folder / f"~{uuid.uuid4().hex}"

    def _newest(self, name: str) -> int:
        """The highest generation of a name; 0 if there is none."""
        # To open the folder makes NFS ask the server. A listing may miss a file that is replaced meanwhile: look on.
        start = len(name) + 1
        found = (file for file in os.listdir(self.folder) if file.startswith(f"{name}."))
        newest = max((int(file[start:]) for file in found if _GENERATION.fullmatch(file, start)), default=0)
        while _exists(self._path(name, newest + 1)):
            newest += 1
        return newest

    def _look(self, name: str) -> tuple[int, Holder | None]:
        """The highest generation of a name, and its holder if alive."""
        if not _NAME.fullmatch(name):
            raise ConfigError(
                f"The name of a job must be of 1 to 200 letters (a-z, A-Z), digits, '.', '-' or '_'; got {name!r}."
            )
        now = None
        newest = 0
        for _ in range(20):
            newest = self._newest(name)
            if not newest:
                return 0, None
            path = self._path(name, newest)
            try:
                fd = os.open(path, os.O_RDONLY)
            except OSError as error:
                if error.errno in _GONE:
                    continue
                raise
            try:
                said = _parse(_read(fd))
                if said.released:
                    return newest, None
                locked = _locked(fd) if said.machine == _machine() else None
                if locked:
                    return newest, said.holder
                if locked is None:
                    if now is None:  # the time first, then the file: else a nap between the two would make it look old
                        now = self._now()
                        continue
                    if now - os.fstat(fd).st_mtime <= self.patience_s:
                        return newest, said.holder
                if _is_at(fd, path):
                    return newest, None
            except OSError as error:
                if error.errno not in _GONE:
                    raise
            finally:
                os.close(fd)
        return newest, _UNKNOWN  # it changes as often as we look: someone is at work

    def _create(self, path: Path, content: dict[str, Any]) -> int | None:
        """Create a claim's file, locked and whole; the descriptor that holds the lock, None if the file is there."""
        part = self._part()
        fd = _write(part, content)
        try:
            os.link(part, path)
        except BaseException as error:
            # A repeated request to a file server may fail because the first one did its work.
            if isinstance(error, FileExistsError) and _is_at(fd, path):
                return fd
            _close(fd)
            if isinstance(error, FileExistsError):
                return None
            if not (isinstance(error, OSError) and error.errno in _NO_LINKS):
                raise
        else:
            return fd
        finally:
            _remove(part)
        try:  # no links here; until the content is there, the young file counts as held
            return _write(path, content)
        except FileExistsError:
            return None

    def _now(self) -> float:
        """The time by the clock of the file server."""
        part = self._part()
        fd = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        try:
            os.utime(fd)
            return os.fstat(fd).st_mtime
        finally:
            os.close(fd)
            _remove(part)


class _Said(NamedTuple):
    """What a claim's file says."""

    released: bool
    machine: str
    holder: Holder


def _parse(content: bytes) -> _Said:
    """Read a claim's file; what cannot be read is held by someone unknown, for as long as it is young."""
    try:
        said = json.loads(content)
        if said["worker"] is None:
            return _Said(True, "", _UNKNOWN)
        host, pid, machine, note = (said[key] for key in ("host", "pid", "machine", "note"))
    except (ValueError, LookupError, TypeError, RecursionError):
        return _Said(False, "", _UNKNOWN)
    if not (isinstance(host, str) and isinstance(pid, int) and isinstance(machine, str) and isinstance(note, dict)):
        return _Said(False, "", _UNKNOWN)
    return _Said(False, machine, Holder(host, pid, note))


@cache
def _machine() -> str:
    """A name of this machine since it was started; machines of one name share their locks."""
    with suppress(OSError):
        if boot := Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip():
            return boot
    return socket.gethostname()


def _write(path: Path, content: dict[str, Any]) -> int:
    """A new file, first locked and then filled; the descriptor that holds the lock."""
    fd = _open(path)
    try:
        machine = _machine()
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:  # no locks here: all go by the beat, as for another machine
            machine = ""
        with open(fd, "wb", closefd=False) as file:
            file.write(json.dumps({**content, "machine": machine}).encode())
        os.fsync(fd)  # other machines may see the name next
    except BaseException:
        _close(fd)
        _remove(path)
        raise
    return fd


def _read(fd: int) -> bytes:
    with open(fd, "rb", closefd=False) as file:
        return file.read()


def _locked(fd: int) -> bool | None:
    """Whether a holder has its lock on a file; None where there are no locks."""
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)  # shared: those who look do not take one another for the holder
    except BlockingIOError:
        return True
    except OSError:
        return None
    return False


def _is_at(fd: int, path: Path) -> bool:
    """Whether the open file is known to be the one that has this name now."""
    try:
        return os.path.samestat(os.fstat(fd), os.stat(path))
    except OSError:
        return False


def _exists(path: Path) -> bool:
    """Whether a file is there; unlike `Path.exists`, it raises when it cannot know."""
    try:
        os.stat(path)
    except FileNotFoundError:
        return False
    return True


def _remove(path: Path) -> None:
    with suppress(OSError):
        path.unlink()


# A forked child, such as a worker that loads data, shares its parent's locks and would keep them beyond its death. So
# the child closes them first of all; `_forking` keeps a fork from falling between an open and its entry.
_kept: set[int] = set()
_forking = threading.RLock()


def _open(path: Path) -> int:
    with _forking:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
        _kept.add(fd)
        return fd


def _close(fd: int) -> None:
    with _forking:
        _kept.discard(fd)
        os.close(fd)


def _after_in_child() -> None:
    for fd in _kept:
        os.close(fd)
    _kept.clear()
    _forking.release()


os.register_at_fork(before=_forking.acquire, after_in_parent=_forking.release, after_in_child=_after_in_child)
