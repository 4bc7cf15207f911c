"""The progress of several steps as one, in the seconds that each may take."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from segcal.calibrators.cost import duration

Progress = Callable[[float, float | None, str], None]
"""Is called with the seconds' worth of work that is done, that of all (None: not known yet), and a word on it."""


class Course:
    """Steps with the seconds that they may take; what a step tells of itself becomes a place among all of them."""

    def __init__(self, progress: Progress) -> None:
        self.progress, self.seconds, self.done = progress, dict[str, float](), dict[str, float]()

    def plan(self, seconds: Mapping[str, float]) -> None:
        """From now on steps are thought to take so long."""
        self.seconds = dict(seconds)

    def told(self) -> str:
        """How long it takes from here on, for people."""
        left = {name: seconds * (1 - self.done.get(name, 0.0)) for name, seconds in self.seconds.items()}
        parts = ", ".join(f"{name} {duration(seconds)}" for name, seconds in left.items() if seconds >= 1)
        return f"this takes roughly {duration(sum(left.values()))}" + (f": {parts}" if parts else "")

    def step(self, name: str) -> Callable[..., None]:
        """The progress of a step, as functions call it: steps done, all steps, and a text, if any."""

        def tell(done: int, total: int, text: str = "") -> None:
            self.done[name] = done / max(total, 1)
            worth = sum(self.seconds.get(each, 0.0) * share for each, share in self.done.items())
            word = f"{name}: {text}" if text else f"{name}: {done} of {total}"
            self.progress(worth, sum(self.seconds.values()) or None, word)

        return tell

    def end(self, name: str) -> None:
        """The step is done, or was already."""
        self.step(name)(1, 1, "done")


class Pace:
    """Seconds for each case, from the moments at which cases are done; the first one may have waited for compilers."""

    def __init__(self) -> None:
        self.begin = time.perf_counter()
        self.moments: list[tuple[int, float]] = []

    def see(self, done: int) -> None:
        self.moments.append((done, time.perf_counter()))

    @property
    def seconds(self) -> float | None:
        """None: no case was done meanwhile."""
        if not self.moments:
            return None
        (first, then), (last, now) = self.moments[0], self.moments[-1]
        return (now - then) / (last - first) if last > first else now - self.begin
