"""The progress of a fit and its check: steps of several kinds, told as one number."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from segcal.evaluation.calibrated import FolderCase

FIT_STEPS = 10  # of the progress
HALF_WAY = 3  # passes after which a fit that takes as many as it needs is about half-way
Progress = Callable[[int, int, str], None]


class Steps:
    """Tells the progress of a job of several kinds of steps."""

    def __init__(self, progress: Progress, total: int) -> None:
        self.progress, self.done, self.total = progress, 0, total

    def tell(self, text: str, more: int = 0) -> None:
        """What is done now, and `more` steps of it."""
        self.progress(self.done + more, self.total, text)

    def next(self, text: str) -> None:
        self.tell(text)
        self.done += 1

    def advance(self, steps: int, text: str) -> None:
        """Report so many steps that are done."""
        self.done += steps
        self.tell(text)

    @contextmanager
    def fit(self, text: str) -> Iterator[Callable[[float, str], None]]:
        """The steps of a fit; what comes tells which share of it is done, and a word more."""

        def tell(share: float, more: str) -> None:
            self.tell(f"{text}, {more}", int(share * FIT_STEPS))

        self.tell(text)
        yield tell
        self.done += FIT_STEPS

    def end(self) -> None:
        self.progress(self.total, self.total, "done")


class Watched:
    """Cases to fit on that tell how often they have been gone through."""

    def __init__(self, cases: Sequence[FolderCase], tell: Callable[[float, str], None]) -> None:
        self.cases, self.tell, self.passes = cases, tell, 0

    def __len__(self) -> int:
        return len(self.cases)

    def __iter__(self) -> Iterator[FolderCase]:
        self.passes += 1
        for i, case in enumerate(self.cases):
            done = self.passes - 1 + i / len(self.cases)
            self.tell(done / (done + HALF_WAY), f"pass {self.passes}, case {i + 1} of {len(self.cases)}")
            yield case
