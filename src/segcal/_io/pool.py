"""Jobs spread over processes: those of this machine here, those of a cluster by an adapter of the same form.

Local workers end with the process that started them. A worker that dies (out of memory, a fault in a library) breaks
its pool: the jobs that were at work get another chance in a new pool, and then one alone, which shows the culprit.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from contextvars import ContextVar
from multiprocessing import get_context
from typing import Any, Protocol, TypeVar

from segcal._io.ending import start_worker

T = TypeVar("T")
CHANCES = 2  # pools that may break while a job is at work, before it is run alone
_threads = os.cpu_count() or 1  # of this process; workers share the cores

wanted: ContextVar[Callable[[], bool]] = ContextVar("wanted", default=lambda: True)
"""Tells a long job whether anyone still waits for it; an engine that cannot end a job's process sets it."""


class Spread(Protocol):
    """Does jobs elsewhere, each a call of a function at the top of a module.

    Yields the place of each job and what it returned, in any order; the exception, where a job took its process along.
    """

    def __call__(
        self, function: Callable[..., T], jobs: Sequence[tuple[Any, ...]]
    ) -> Generator[tuple[int, T | BaseException], None, None]: ...


class LocalPool:
    """A `Spread` over so many processes of this machine; with one worker or one job, the calling process does it.

    The cores are shared evenly. Worker i has `environments[i % len(environments)]` among its variables. `meanwhile` is
    called once the jobs are on their way.
    """

    def __init__(
        self,
        workers: int,
        *,
        environments: Sequence[Mapping[str, str]] = (),
        meanwhile: Callable[[], None] = lambda: None,
    ) -> None:
        self.workers, self.environments, self.meanwhile = workers, environments or ({},), meanwhile

    def __call__(
        self, function: Callable[..., T], jobs: Sequence[tuple[Any, ...]]
    ) -> Generator[tuple[int, T | BaseException], None, None]:
        if self.workers == 1 or len(jobs) < 2:
            for i, job in enumerate(jobs):
                yield i, function(*job)
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
        with self._executor(min(self.workers, len(places))) as executor:
            futures = {}
            for i in places:
                try:
                    futures[executor.submit(function, *jobs[i])] = i
                except BrokenProcessPool as broken:
                    yield i, broken
            self.meanwhile()
            for future in as_completed(futures):
                error = future.exception()
                if error is not None and not isinstance(error, BrokenProcessPool):
                    raise error
                yield futures[future], future.result() if error is None else error

    @contextmanager
    def _executor(self, workers: int) -> Iterator[ProcessPoolExecutor]:
        context = get_context("spawn")
        threads = max(1, (os.cpu_count() or 1) // workers)
        seats = context.SimpleQueue()  # each worker takes one
        for i in range(workers):
            seats.put({**self.environments[i % len(self.environments)], "OMP_NUM_THREADS": str(threads)})
        executor = ProcessPoolExecutor(workers, context, initializer=_start, initargs=(seats, threads))
        try:
            yield executor
        except BaseException:
            for worker in list((executor._processes or {}).values()):  # files are written whole: nothing is torn
                worker.terminate()
            raise
        finally:
            executor.shutdown(wait=True, cancel_futures=True)  # at the end of the process Ctrl-C would tear it
            seats.close()


def _start(seats: Any, threads: int) -> None:
    global _threads
    start_worker()
    os.environ.update(seats.get())  # before torch is there, which reads them
    _threads = threads


def own_threads() -> int:
    """How many threads this process may use: all cores, or a worker's share of them."""
    return _threads
