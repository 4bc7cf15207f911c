"""About how long fits take, told before they begin: from the time of a pass over the voxels and a trial of steps."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

import torch

from segcal.calibrators.boxes import box_size
from segcal.calibrators.calibrator import Calibrator
from segcal.calibrators.local import BATCH, LocalTemperature

PASSES = {
    "temperature": 5, "class-temperature": 6, "vector": 6, "matrix": 9, "dirichlet": 10, "platt": 11, "beta": 12,
    "isotonic": 3, "histogram": 3, "ensemble-temperature": 6, "local-temperature": 3,
}  # fmt: skip
"""Time of a fit, in times that it takes to read and measure its cases; measured with four classes."""
FOLLOWED = 60  # likewise, where an error is followed downhill
APPLIED = 4  # to calibrate and measure cases, likewise
SURE_KEPT = 0.1  # of voxels that are sure, by a local temperature


def passes_of(calibrator: Calibrator) -> float:
    """What a fit takes, in times that it takes to read and measure its cases."""
    followed = calibrator.settings().get("objective", "nll") != "nll"
    return PASSES[calibrator.method] + (FOLLOWED if followed else 0)


def training_seconds(calibrator: Calibrator, *, classes: int, shape: Sequence[int], unsure: float) -> float:
    """What steps of a training take beyond that, however many cases of about this shape; they are tried for a moment.

    unsure: the share of voxels whose largest probability is 0.99 at most.
    """
    if not isinstance(calibrator, LocalTemperature):
        return 0.0
    if not calibrator.spatial:
        shape = (max(1, round(math.prod(shape) * (unsure + (1 - unsure) * SURE_KEPT))),)
    return calibrator.steps * step_seconds(calibrator, classes, shape)


def step_seconds(calibrator: LocalTemperature, classes: int, shape: Sequence[int]) -> float:
    """Of a step of the training on cases of this shape, by a trial with random logits."""
    trial = LocalTemperature(**calibrator.settings() | {"steps": 2})
    for size in ((1,) * len(shape), box_size(shape, trial.box_voxels) if trial.spatial else tuple(shape)):
        logits = torch.randn(classes, *size)
        labels = logits.argmax(0) if trial.activation == "softmax" else (logits > 0).long()
        start = time.perf_counter()
        trial.fit([(logits, labels)] * BATCH)  # the first, small one waits for compilers
    return (time.perf_counter() - start) / 3  # two steps, and two measurements of half the work


def duration(seconds: float) -> str:
    """For people.

    >>> duration(42), duration(125), duration(2 * 3600 + 59), duration(50 * 3600)
    ('42 s', '2 min', '2 h 1 min', '2 d 2 h')
    """
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes = math.ceil(seconds / 60) if seconds > 3600 else round(seconds / 60)
    if minutes < 60:
        return f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours < 24 else f"{hours // 24} d {hours % 24} h"
