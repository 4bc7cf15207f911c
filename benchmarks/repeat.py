"""Benchmarks in several processes each, gathered: medians, and from the least to the largest over the processes.

    python benchmarks/repeat.py [--processes 3] losses.py "calibrate.py --largest 100000000"

Every benchmark writes its rows as it does alone, but into a folder of its own process. In the files that come of them,
a number is the median over processes; ratios, seconds and sizes have their least and largest beside them. What the
machine is goes to results/machine.json.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import platform
import shlex
import statistics
import subprocess
import sys
import tempfile
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from measure import FOLDER_VARIABLE, RESULTS, write_rows

PACKAGES = ("torch", "numba", "llvmlite", "numpy", "monai", "nibabel", "segcal")
SPREAD = ("_q1", "_q3")  # columns that tell the spread within a process


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("benchmarks", nargs="+", help="files beside this one, each with its arguments in one string")
    parser.add_argument("--processes", type=int, default=3)
    arguments = parser.parse_args()
    RESULTS.mkdir(parents=True, exist_ok=True)
    (RESULTS / "machine.json").write_text(json.dumps(machine(), indent=2) + "\n")
    failed = [each for each in arguments.benchmarks if not repeat(shlex.split(each), arguments.processes)]
    if failed:
        sys.exit(f"Failed, and left as they were: {', '.join(failed)}.")


def repeat(command: list[str], processes: int) -> bool:
    """Run a benchmark in so many processes, one after the other, and write what they found; whether all ended well."""
    with tempfile.TemporaryDirectory() as name:
        folders = [Path(name) / str(i) for i in range(processes)]
        for folder in folders:
            script = [sys.executable, str(Path(__file__).parent / command[0]), *command[1:]]
            if subprocess.run(script, env={**os.environ, FOLDER_VARIABLE: str(folder)}).returncode:
                return False
        for file in sorted(folders[0].glob("*.csv")):
            print(f"\n{file.stem}: {processes} processes")
            write_rows(file.stem, gather([_rows(folder / file.name) for folder in folders]))
    return True


def gather(tables: list[list[dict[str, str]]]) -> list[dict[str, object]]:
    """One row for those that are in the same place of all tables.

    >>> gather([[{"what": "a", "ratio": "0.5"}], [{"what": "a", "ratio": "0.9"}], [{"what": "a", "ratio": "0.6"}]])
    [{'what': 'a', 'ratio': 0.6, 'ratio_min': 0.5, 'ratio_max': 0.9}]
    """
    places = [list(rows) for rows in zip(*tables, strict=True)]
    measured = {column for rows in places for column in rows[0] if len({row[column] for row in rows}) > 1}
    return [_gather_row(rows, measured) for rows in places]


def _gather_row(rows: list[dict[str, str]], measured: set[str]) -> dict[str, object]:
    gathered: dict[str, object] = {}
    for column, text in rows[0].items():
        gathered[column] = text
        if column in measured:
            values = [float(row[column]) for row in rows if row[column]]
            gathered[column] = statistics.median(values) if values else ""
            if not column.endswith(SPREAD):
                gathered |= {f"{column}_min": min(values, default=""), f"{column}_max": max(values, default="")}
    return gathered


def _rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def machine() -> dict[str, object]:
    """What the figures depend on: processor, cores, caches, memory, versions."""
    import torch

    return {
        "processor": _of_file("/proc/cpuinfo", "model name") or platform.processor(),
        "family and model": [_of_file("/proc/cpuinfo", key) for key in ("cpu family", "model")],
        "cores": os.cpu_count(),
        "caches": _caches(),
        "memory": _of_file("/proc/meminfo", "MemTotal"),
        "system": f"{platform.system()} {platform.machine()}",
        "threads of torch": torch.get_num_threads(),
        "vector instructions of torch": torch.backends.cpu.get_cpu_capability(),
        "versions": {"python": platform.python_version()} | {name: _version(name) for name in PACKAGES},
    }


def _of_file(path: str, key: str) -> str:
    if not Path(path).exists():
        return ""
    lines = (line.partition(":") for line in Path(path).read_text().splitlines())
    return next((value.strip() for name, _, value in lines if name.strip() == key), "")


def _caches() -> dict[str, str]:
    """Of the first core, as Linux tells: L1 Data, L1 Instruction, L2 Unified, ..."""
    found = {}
    for index in sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*")):
        level, kind, size = ((index / name).read_text().strip() for name in ("level", "type", "size"))
        found[f"L{level} {kind}"] = size
    return found


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


if __name__ == "__main__":
    main()
