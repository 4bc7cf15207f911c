"""Work on many cases that can be stopped and resumed.

Every kind of it is alike: a result is named by a key of all that it depends on, or remembers that key in a ledger; what
is there is not made again; the rest is done by an executor (one after the other, by processes, by a cluster); a case
that fails is told and does not stop the others.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import traceback
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing, contextmanager
from contextvars import ContextVar
from multiprocessing import get_context
from multiprocessing.context import BaseContext
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

from segcal._io.ending import start_worker
from segcal._io.files import Ledger, WriteError, locked, make_folder
from segcal.errors import FileError, SegcalError, check_integer, one_line

T = TypeVar("T")
PARTS = ".parts"
AHEAD = 4  # jobs of each worker that are handed over before they begin: thousands take room
DEBUG_VARIABLE = "SEGCAL_DEBUG"
CHANCES = 2  # pools that may break while a job is at work, before it is done alone
wanted: ContextVar[Callable[[], bool]] = ContextVar("wanted", default=lambda: True)
"""Tells a long job whether anyone still waits for it; an executor that cannot end a job's process sets it."""


class Failure(NamedTuple):
    """A case that could not be worked on: its name, the kind of error, and a sentence."""

    case: str
    kind: str
    message: str


class Job(NamedTuple):
    """One case to work on: a function at the top of a module, which writes its result to a file, and its arguments."""

    name: str
    function: Callable[..., None]
    arguments: tuple[Any, ...]


class Executor(Protocol):
    """Calls a function at the top of a module with the arguments of each job, here or elsewhere.

    Yields the place of each job and what it gave, in any order; the exception, where a job took its process along.
    """

    def __call__(
        self, function: Callable[..., T], jobs: Sequence[tuple[Any, ...]]
    ) -> Generator[tuple[int, T | BaseException], None, None]: ...


def do_jobs(jobs: Sequence[Job], executor: Executor) -> Generator[tuple[Job, Failure | None], None, None]:
    """Each job as it ends, and its failure if it failed."""
    for i, came in executor(attempt, jobs):
        yield jobs[i], crashed(jobs[i].name) if isinstance(came, BaseException) else came


def attempt(name: str, function: Callable[..., None], arguments: tuple[Any, ...]) -> Failure | None:
    """Do a job; what is wrong with its case is a failure, what would be wrong with every case is raised."""
    try:
        function(*arguments)
    except WriteError:
        raise
    except Exception as error:  # no case may end the others
        return failure_of(name, error)
    return None


def failure_of(case: str, error: Exception) -> Failure:
    """Return the failure of a case; an error that segcal does not know is one to report.

    With the environment variable SEGCAL_DEBUG, the traceback of such an error is printed to stderr.
    """
    if isinstance(error, SegcalError):
        return Failure(case, type(error).__name__, str(error))
    kind = "MemoryError" if isinstance(error, MemoryError) else type(error).__name__  # numpy has a subclass
    reason = str(error).rstrip(".") or kind
    if isinstance(error, (OSError, MemoryError)):
        return Failure(case, kind, one_line(f"reading or measuring this case failed: {reason}."))
    if os.environ.get(DEBUG_VARIABLE):
        traceback.print_exception(error)
    package = str(Path(__file__).parents[1])
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename.startswith(package)]
    place = f" in {Path(frames[-1].filename).name}, line {frames[-1].lineno}" if frames else ""
    message = f"unexpected error{place}: {reason}. Please report it with the files of this case"
    return Failure(case, kind, one_line(f"{message}; {DEBUG_VARIABLE}=1 prints the traceback."))


def crashed(case: str) -> Failure:
    """What is said of a case whose process died."""
    return Failure(case, "CrashError", "the process that read this case died; it may need more memory than there is.")


def in_turn(
    function: Callable[..., T], jobs: Sequence[tuple[Any, ...]]
) -> Generator[tuple[int, T | BaseException], None, None]:
    """The executor that does one job after the other, in this process."""
    for i, arguments in enumerate(jobs):
        yield i, function(*arguments)


class Pool:
    """The executor that does jobs in processes of their own, which share the cores and end with this one.

    A worker that dies breaks the pool: jobs that were at work get a second chance in a new one, and then a last one
    alone, when the others are done; if its process dies again, a job is the cause. Worker i has
    `environments[i % len(environments)]` among its variables. `preload` names a module that all workers need: on
    Linux it is imported once, by the process that they are forked from. `meanwhile` is called while they
    start.
    """

    def __init__(
        self,
        workers: int,
        *,
        environments: Sequence[Mapping[str, str]] = (),
        preload: str | None = None,
        meanwhile: Callable[[], None] = lambda: None,
    ) -> None:
        self.workers = check_integer("workers", workers)
        self.environments, self.meanwhile = environments or ({},), meanwhile
        self.preload = preload

    def __call__(
        self, function: Callable[..., T], jobs: Sequence[tuple[Any, ...]]
    ) -> Generator[tuple[int, T | BaseException], None, None]:
        if self.workers == 1 or len(jobs) < 2:
            yield from in_turn(function, jobs)
            return
        waiting, alone = list(range(len(jobs))), []
        broken: Counter[int] = Counter()
        while waiting:
            left = []
            for i, came in self._try(function, jobs, waiting):
                if isinstance(came, BrokenProcessPool):
                    left.append(i)
                else:
                    yield i, came
            at_work = sorted(left)[: self.workers]  # jobs begin in order
            broken.update(at_work)
            alone += [i for i in at_work if broken[i] == CHANCES]
            waiting = [i for i in sorted(left) if broken[i] < CHANCES]
        for i in alone:
            yield from self._try(function, jobs, [i])

    def _try(
        self, function: Callable[..., T], jobs: Sequence[tuple[Any, ...]], places: Sequence[int]
    ) -> Iterator[tuple[int, T | BaseException]]:
        """Each job once; BrokenProcessPool for those that a death left undone."""
        with self._open(min(self.workers, len(places))) as pool:
            waiting = deque(places)
            futures: dict[Future[T], int] = {}
            if self._forks:  # the first job waits for the server, which is at its imports
                self.meanwhile()
            while waiting or futures:
                while waiting and len(futures) < AHEAD * self.workers:
                    i = waiting.popleft()
                    try:
                        futures[pool.submit(function, *jobs[i])] = i
                    except BrokenProcessPool as broken:
                        yield i, broken
                if not self._forks and len(waiting) + len(futures) == len(places):
                    self.meanwhile()
                for future in wait(futures, return_when=FIRST_COMPLETED).done:
                    i, error = futures.pop(future), future.exception()
                    if error is not None and not isinstance(error, BrokenProcessPool):
                        raise error
                    yield i, future.result() if error is None else error

    @property
    def _forks(self) -> bool:
        return self.preload is not None and sys.platform == "linux"  # elsewhere, libraries do not survive a fork

    def _context(self) -> BaseContext:
        """Processes of their own, or forked from one that has nothing but the preloaded module, which begins here."""
        if not self._forks:
            return get_context("spawn")
        from multiprocessing import forkserver

        context = get_context("forkserver")
        context.set_forkserver_preload([str(self.preload)])
        forkserver.ensure_running()
        return context

    @contextmanager
    def _open(self, workers: int) -> Iterator[ProcessPoolExecutor]:
        context = self._context()
        seats = context.SimpleQueue()  # each worker takes one
        for i in range(workers):
            own = self.environments[i % len(self.environments)]
            seats.put({**os.environ, **own, "OMP_NUM_THREADS": str(threads_of(workers))})
        pool = ProcessPoolExecutor(workers, context, initializer=_start_worker, initargs=(seats,))
        try:
            yield pool
        except BaseException:
            for worker in list((pool._processes or {}).values()):  # files are written whole: nothing is torn
                worker.terminate()
            raise
        finally:
            pool.shutdown(wait=True, cancel_futures=True)  # at the end of the process, Ctrl-C would tear it
            seats.close()


def threads_of(workers: int) -> int:
    """Threads of each of so many processes that share the cores."""
    return max(1, (os.cpu_count() or 1) // check_integer("workers", workers))


def _start_worker(seats: Any) -> None:
    start_worker()
    os.environ.update(seats.get())  # before torch is there, which reads them


def key_of(*content: object) -> str:
    """Names a result by all that it depends on: anything else gives another key."""
    text = json.dumps(content, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def stamp(path: Path) -> dict[str, int]:
    """Size and times of change, which tell whether a file is still the same.

    A copy may bring the time of its content along; `replaced_ns` is the system's own, which nobody can set.
    """
    try:
        status = path.stat()
    except OSError:
        return {"bytes": -1, "changed_ns": -1, "replaced_ns": -1}
    return {"bytes": status.st_size, "changed_ns": status.st_mtime_ns, "replaced_ns": status.st_ctime_ns}


@contextmanager
def unchanged(sources: Sequence[Path]) -> Iterator[None]:
    """Refuse what was read from files that changed meanwhile."""
    before = [stamp(source) for source in sources]
    yield
    for source, then in zip(sources, before, strict=True):
        if stamp(source) != then:
            raise FileError(f"files must stay as they are while they are read; {source} changed. Start again.")


@contextmanager
def open_parts(out: Path) -> Iterator[Path]:
    """The folder of single cases' results in `out`, held so that no other process writes there."""
    parts = out / PARTS
    make_folder(out)
    make_folder(parts)
    with locked(parts / ".lock", out):
        yield parts


def do_all(
    jobs: Sequence[Job], executor: Executor, *, total: int, progress: Callable[[int, int], None]
) -> list[Failure]:
    """Do the jobs that are left of so many in `total`, telling how many are done; those that failed."""
    failures, done = [], total - len(jobs)
    with closing(do_jobs(jobs, executor)) as ended:
        for _, failure in ended:
            failures += [] if failure is None else [failure]
            done += 1
            progress(done, total)
    return failures


def keep_only(parts: Path, wanted: Iterable[Path]) -> None:
    """Remove what is left of other options, other files, or a process that was killed."""
    keep = {path.name for path in wanted}
    for path in parts.iterdir():
        if path.name not in keep:
            path.unlink(missing_ok=True)


class Maps(NamedTuple):
    """Maps that are there, and cases that failed."""

    paths: list[Path]
    failures: list[Failure]


class MapJob(NamedTuple):
    """The maps of one case, which are made again when the key is another than last time."""

    name: str
    key: str
    targets: list[Path]
    make: Callable[[], None]


def make_maps(
    out: Path,
    ledger: str,
    jobs: Sequence[MapJob],
    progress: Callable[[int, int, str], None],
    *,
    begin: Callable[[], None] = lambda: None,
) -> Maps:
    """Make what is not in `out` yet, and remember the keys there; a case that fails does not stop the others.

    `begin` writes what belongs to all maps, once nobody else can write there.
    """
    make_folder(out)
    found = Maps([], [])
    with locked(out / ".lock", out):
        begin()
        done = Ledger(out / ledger)
        for job in jobs:  # maps of other weights or files go first, lest some of them stay among the new
            if done.get(job.name) not in (None, job.key):
                for path in job.targets:
                    path.unlink(missing_ok=True)

        def make(job: MapJob) -> None:
            if not (all(path.exists() for path in job.targets) and done.get(job.name) == job.key):
                job.make()
                done.set(job.name, job.key)

        with closing(do_jobs([Job(job.name, make, (job,)) for job in jobs], in_turn)) as ended:
            for i, (job, (_, failure)) in enumerate(zip(jobs, ended, strict=True)):
                found.paths.extend(job.targets if failure is None else ())
                found.failures.extend([] if failure is None else [failure])
                progress(i + 1, len(jobs), job.name)
    return found
