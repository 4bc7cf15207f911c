"""Cases measured, and runs of a study done, by the workers of a Dask cluster, which see the same files.

    from segcal import evaluate
    from segcal.adapters.dask import DaskCluster

    evaluate("maps", "labels", "results", executor=DaskCluster("tcp://scheduler:8786"))

Workers write what they make to the results' folder, as local processes do: the results are the same, and what was
done before an interruption is not done again.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any, TypeVar

from dask.distributed import Client, KilledWorker, as_completed, get_worker

import segcal
from segcal._io.jobs import wanted
from segcal.errors import ConfigError, SegcalError

T = TypeVar("T")
GPU = "GPU"


class DaskCluster:
    """Does jobs on a cluster that runs already, given its scheduler's address or a client of it.

    A job whose worker dies is done by another one. After as many deaths as Dask allows (three, by its own setting
    `distributed.scheduler.allowed-failures`) it is tried once more, when the others are done; if its workers die
    again, it is the cause. With `gpus`, a job takes one GPU of a worker, where workers declare them as a resource of
    Dask (`dask worker --resources GPU=1`); where none does, a job takes a thread, as all jobs do.
    """

    def __init__(self, cluster: str | Client, *, timeout_s: float = 30.0, gpus: bool = False) -> None:
        self.client = cluster if isinstance(cluster, Client) else _connected(cluster, timeout_s)
        self._check()
        self.resources = {GPU: 1} if gpus and self._have_gpus() else None

    def __call__(
        self, function: Callable[..., T], jobs: Sequence[tuple[Any, ...]]
    ) -> Generator[tuple[int, T | BaseException], None, None]:
        """The place of each job and what it gave, as they come; a job's own exceptions are raised."""
        killed: list[int] = []
        for i, came in self._done(function, jobs, range(len(jobs))):
            if isinstance(came, KilledWorker):
                killed.append(i)
            else:
                yield i, came
        for i in killed:  # Dask blames a job's neighbors on the same worker, too: alone, each shows what it does
            yield from self._done(function, jobs, [i])

    def _done(
        self, function: Callable[..., T], jobs: Sequence[tuple[Any, ...]], places: Sequence[int]
    ) -> Iterator[tuple[int, T | BaseException]]:
        futures = {
            self.client.submit(_watched, function, *jobs[i], pure=False, resources=self.resources): i for i in places
        }
        try:
            for future in as_completed(futures, loop=self.client.loop):
                error = future.exception()
                if error is not None and not isinstance(error, KilledWorker):
                    raise error
                came = future.result() if error is None else error
                place = futures.pop(future)
                future.release()  # a worker that holds a result would do the job again, should it die
                yield place, came
        finally:
            self.client.cancel(list(futures))  # those that are not done, if we were interrupted

    def _have_gpus(self) -> bool:
        workers = self.client.scheduler_info(n_workers=-1)["workers"]
        return any(GPU in worker["resources"] for worker in workers.values())

    def _check(self) -> None:
        """Workers must be there and have this segcal."""
        versions = self.client.run(_version)
        if not versions:
            raise ConfigError(
                f"the Dask cluster at {self._address} must have workers; it has none. Start workers with `dask worker`."
            )
        for worker, version in versions.items():
            if version != segcal.__version__:
                came = f"segcal {version}" if version else "no segcal"
                raise ConfigError(
                    f"every Dask worker must have segcal {segcal.__version__}; {worker} has {came}."
                    " Install the same version on every worker."
                )

    @property
    def _address(self) -> str:
        return str(self.client.scheduler.address)


def _connected(address: str, timeout_s: float) -> Client:
    try:
        return Client(address, timeout=timeout_s, set_as_default=False)
    except (OSError, ValueError) as error:
        raise SegcalError(
            f"a Dask scheduler must answer at {address}, as tcp://HOST:8786, within {timeout_s:g} s; {error}."
            " Start the scheduler or correct the address."
        ) from error


def _watched(function: Callable[..., T], *job: Any) -> T:
    """What the function returns; meanwhile it can ask whether its task was cancelled, as when the client is gone."""
    worker = get_worker()
    key = worker.get_current_task()

    def is_wanted() -> bool:
        task = worker.state.tasks.get(key)
        return task is not None and task.state != "cancelled"

    token = wanted.set(is_wanted)
    try:
        return function(*job)
    finally:
        wanted.reset(token)


def _version() -> str | None:
    try:
        import segcal
    except ImportError:
        return None
    return segcal.__version__
