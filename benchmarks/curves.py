"""All that is shown of decisions, of a large cohort: threshold curves of every case and class, and what follows."""

from __future__ import annotations

import statistics
import time

from measure import write_rows
from report import cohort
from segcal.decisions import threshold_curves
from segcal.evaluation.decisions import agreement_of
from segcal.kernels.threads import one_torch_thread

REPETITIONS = 5


def seconds(function: object) -> float:
    """Median of a few runs, after one that warms up."""
    assert callable(function)
    function()
    times = []
    for _ in range(REPETITIONS):
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def measure(cases: int, classes: int) -> dict[str, object]:
    evaluation = cohort(cases, classes, sharpness=1.2, seed=0).foreground()
    return {
        "data": f"{cases} cases x {classes} classes",
        "must": "<= 2 s",
        "all curves, s": seconds(lambda: threshold_curves(evaluation.statistics)),
        "all agreement, s": seconds(lambda: agreement_of(evaluation)),
    }


if __name__ == "__main__":
    with one_torch_thread():  # as the report works them out
        write_rows("curves", [measure(50, 3), measure(200, 15)])
