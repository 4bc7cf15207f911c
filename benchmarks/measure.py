"""Alternating repetitions, medians, ratios: how every benchmark here is measured.

The machine may be busy with other things; what is compared runs in turn, in one process, and the figure is the
ratio of medians. The spread (quartiles of the ratio of neighboring runs) says how far to trust it. Processes differ,
too, by where their memory lies: `repeat.py` runs a benchmark in several and gathers their rows.
"""

from __future__ import annotations

import csv
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

FOLDER_VARIABLE = "SEGCAL_BENCH_RESULTS"
RESULTS = Path(os.environ.get(FOLDER_VARIABLE) or Path(__file__).parent / "results")


def alternate(
    ours: Callable[[], object],
    theirs: Callable[[], object],
    *,
    repetitions: int = 15,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, float]:
    """Median seconds of both, their ratio (ours / theirs), and the quartiles of the ratio over neighboring runs."""
    ours(), theirs()
    times: list[tuple[float, float]] = []
    for _ in range(repetitions):
        pair = []
        for function in (ours, theirs):
            start = clock()
            function()
            pair.append(clock() - start)
        times.append((pair[0], pair[1]))
    a, b = (statistics.median(column) for column in zip(*times, strict=True))
    low, _, high = statistics.quantiles([x / y for x, y in times], n=4)
    return {"ours_s": a, "theirs_s": b, "ratio": a / b, "ratio_q1": low, "ratio_q3": high}


HIGH_WATER = """
def high_water():
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("VmHWM"))
"""


def peak_bytes(code: str) -> int:
    """Peak memory of a fresh process that runs the code, beyond what it held at the line `# measured from here`."""
    return peak_and_output(code)[0]


def peak_and_output(code: str) -> tuple[int, str]:
    """The same, and what the code printed."""
    before, after = code.split("# measured from here")
    reset = "open('/proc/self/clear_refs', 'w').write('5')\nstart = high_water()"
    script = f"{HIGH_WATER}\n{before}\n{reset}\n{after}\nprint(high_water() - start)"
    fixed = {
        **os.environ,
        "MALLOC_MMAP_THRESHOLD_": "65536",
    }  # large arrays go back when freed: nothing hides in the heap
    output = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, env=fixed)
    said, _, peak = output.stdout.strip().rpartition("\n")
    return int(peak), said


def write_rows(name: str, rows: list[dict[str, object]]) -> None:
    """Write results/NAME.csv and print the rows as a table."""
    RESULTS.mkdir(parents=True, exist_ok=True)
    with (RESULTS / f"{name}.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    shown = [[f"{v:.3g}" if isinstance(v, float) else str(v) for v in row.values()] for row in rows]
    lines = [list(rows[0]), *shown]
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    for line in lines:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())
