"""Ten thousand cases on a Dask cluster whose workers are killed, and a simulation of a hundred thousand on many.

    python benchmarks/clusters.py [--cases 10000] [--kill-every 60]

Needs `pip install "segcal[dask]"`. The first part is real: tiny cases, two worker processes on this machine, one of
which is killed by SIGKILL every minute; the results must be those of a run without Dask, byte by byte. The second part
is a simulation: the times of cases of usual size are measured here, and so is what the scheduler takes for each task;
workers and cases beyond that are simulated. Writes results/clusters.csv and results/clusters_simulated.csv.
"""

from __future__ import annotations

import argparse
import heapq
import logging
import os
import random
import signal
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
from dask.distributed import Client, LocalCluster

import segcal
from evaluate import write_cases
from measure import write_rows
from segcal.adapters.dask import DaskCluster

TABLES = ("evaluation.npz", "cases.csv", "summary.csv", "failures.csv")
SIMULATED_CASES = 100_000
WORKERS = (1, 2, 4, 8, 16, 32, 64, 128, 256)


def make_tiny(folder: Path, cases: int) -> None:
    """Cases of 8 x 8 x 8 voxels and three classes."""
    draw = np.random.default_rng(0)
    for name in ("maps", "labels"):
        (folder / name).mkdir()
    for i in range(cases):
        values = draw.dirichlet((8, 1, 1), (8, 8, 8)).astype(np.float32)
        labels = (draw.random((8, 8, 8, 1)) > values.cumsum(-1)[..., :-1]).sum(-1).astype(np.uint8)
        np.save(folder / "maps" / f"case_{i:05d}.npy", np.moveaxis(values, -1, 0))
        np.save(folder / "labels" / f"case_{i:05d}.npy", labels)


def local_cluster() -> LocalCluster:
    return LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=None, silence_logs=logging.CRITICAL)


class Killer(threading.Thread):
    """Kills a worker of the cluster every so many seconds."""

    def __init__(self, cluster: LocalCluster, every_s: float) -> None:
        super().__init__(daemon=True)
        self.cluster, self.every_s, self.kills, self.over = cluster, every_s, 0, threading.Event()

    def run(self) -> None:
        while not self.over.wait(self.every_s):
            there = self.cluster.scheduler.workers  # the last one to be killed may not be back yet
            workers = [nanny.pid for nanny in self.cluster.workers.values() if nanny.worker_address in there]
            if workers:
                os.kill(random.choice(workers), signal.SIGKILL)
                self.kills += 1


def really(folder: Path, cases: int, kill_every_s: float) -> list[dict[str, object]]:
    make_tiny(folder, cases)
    serial, spread = folder / "serial", folder / "spread"
    start = time.perf_counter()
    segcal.evaluate(folder / "maps", folder / "labels", serial)
    alone = time.perf_counter() - start
    with local_cluster() as cluster, Client(cluster) as client:
        killer = Killer(cluster, kill_every_s)
        killer.start()
        start = time.perf_counter()
        outcome = segcal.evaluate(folder / "maps", folder / "labels", spread, executor=DaskCluster(client))
        together = time.perf_counter() - start
        killer.over.set()
        killer.join()
    same = all((serial / table).read_bytes() == (spread / table).read_bytes() for table in TABLES)
    rows = {
        "cases": cases, "failures": len(outcome.failures), "workers killed": killer.kills,
        "seconds, one process": round(alone, 1), "seconds, two Dask workers": round(together, 1),
        "results the same byte by byte": same,
    }  # fmt: skip
    if not same or outcome.failures:
        raise SystemExit(f"what Dask made differs from what one process made, or cases failed: {rows}")
    return [{"what": what, "value": value} for what, value in rows.items()]


def nothing(number: int) -> int:
    return number


def seconds_of_scheduler(jobs: int = 4000) -> float:
    """What client and scheduler take for each task that does nothing."""
    with local_cluster() as cluster, Client(cluster) as client:
        executor = DaskCluster(client)
        list(executor(nothing, [(i,) for i in range(200)]))
        start = time.perf_counter()
        list(executor(nothing, [(i,) for i in range(jobs)]))
        return (time.perf_counter() - start) / jobs


def seconds_of_cases(folder: Path, cases: int = 12) -> tuple[list[float], float]:
    """Of cases of 4 x 128^3 voxels, compressed, one process with one thread; and the megabytes of one."""
    write_cases(folder, cases, 128)
    ends: list[float] = []
    os.environ["OMP_NUM_THREADS"] = "1"
    segcal.evaluate(folder / "predictions", folder / "labels", folder / "warm")  # compiled, and in the system's cache
    ends.append(time.perf_counter())
    segcal.evaluate(
        folder / "predictions", folder / "labels", folder / "timed",
        progress=lambda done, total: ends.append(time.perf_counter()),
    )  # fmt: skip
    size = sum(path.stat().st_size for name in ("predictions", "labels") for path in (folder / name).iterdir())
    return list(np.diff(ends[1:])), size / cases / 1e6


def simulate(times: list[float], scheduler_s: float, workers: int) -> float:
    """Seconds until all cases are done: the scheduler gives out one task after the other, to who is free first."""
    draw = random.Random(0)
    free = [0.0] * workers
    scheduler = end = 0.0
    for _ in range(SIMULATED_CASES):
        scheduler = max(scheduler, heapq.heappop(free)) + scheduler_s
        done = scheduler + draw.choice(times)
        end = max(end, done)
        heapq.heappush(free, done)
    return end


def simulated(folder: Path) -> list[dict[str, object]]:
    scheduler_s = seconds_of_scheduler()
    times, megabytes = seconds_of_cases(folder)
    mean = sum(times) / len(times)
    rows: list[dict[str, object]] = []
    for workers in WORKERS:
        seconds = simulate(times, scheduler_s, workers)
        rows.append(
            {
                "workers": workers,
                "hours": round(seconds / 3600, 3),
                "cases_per_s": round(SIMULATED_CASES / seconds, 1),
                "efficiency": round(SIMULATED_CASES * mean / workers / seconds, 3),
                "read_MB_per_s": round(SIMULATED_CASES * megabytes / seconds),
                "core_hours_per_1000_cases": round(workers * seconds / 3600 / SIMULATED_CASES * 1000, 3),
                "measured_case_s": round(mean, 4),
                "measured_scheduler_s": round(scheduler_s, 6),
            }
        )
    return rows


if __name__ == "__main__":
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--cases", type=int, default=10_000)
    options.add_argument("--kill-every", type=float, default=60.0, metavar="SECONDS")
    asked = options.parse_args()
    with tempfile.TemporaryDirectory() as name:
        write_rows("clusters", really(Path(name), asked.cases, asked.kill_every))
    with tempfile.TemporaryDirectory() as name:
        write_rows("clusters_simulated", simulated(Path(name)))
