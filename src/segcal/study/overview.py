"""How far a study is, and how long it will take, from what its folder tells."""

from __future__ import annotations

import math
from typing import NamedTuple

from segcal._io.words import counted, duration
from segcal.study.plan import PlannedRun
from segcal.study.work import TRAINING, RunState, Workshop

EARLY = 0.05  # of a run; before that its pace says little


class Overview(NamedTuple):
    """Runs by how they stand, and the seconds left at the pace so far (NaN: nobody works, or too early to say)."""

    states: tuple[RunState, ...]
    seconds_left: float

    def count(self, status: str) -> int:
        return sum(state.status == status for state in self.states)

    @property
    def line(self) -> str:
        """In one line."""
        left = "" if math.isnan(self.seconds_left) else f", about {duration(self.seconds_left)} left"
        counts = ", ".join(f"{self.count(status)} {status}" for status in ("done", "running", "failed", "waiting"))
        return f"{counted(len(self.states), 'run')}: {counts}{left}"


def overview(shop: Workshop) -> Overview:
    """How the study in this folder stands now, whoever works on it."""
    states = tuple(shop.states())
    size = {run.name: _size(run) for run in shop.plan.runs.values()}
    paces = [
        (state.share - state.begun) * size[state.name] / state.seconds
        for state in states
        if state.seconds > 0 and state.share - state.begun > EARLY
    ]
    workers = sum(state.status == "running" for state in states)
    if not paces or not workers:
        return Overview(states, math.nan)
    rest = sum((1 - state.share) * size[state.name] for state in states if state.status in ("running", "waiting"))
    return Overview(states, rest / (workers * sum(paces) / len(paces)))


def _size(run: PlannedRun) -> float:
    """What a run costs, in no unit: voxels of patches."""
    if run.members:
        return (1 - TRAINING) * sum(map(_size, run.members))
    config = run.config
    return float((config.training.epochs or 1) * math.prod(config.data.patch or (1,)))
