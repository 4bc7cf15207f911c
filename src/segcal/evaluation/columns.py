"""What each number is called, how it is written, and which way is better: in tables, figures and pages alike."""

from __future__ import annotations

from typing import NamedTuple

NAMES = {
    "dice": "DSC",
    "ace": "ACE",
    "ece": "ECE",
    "mce": "MCE",
    "occupied": "Occupied bins",
    "signed_gap": "Signed gap",
    "brier": "Brier",
    "nll": "NLL",
}
"""By the metric's name in code; any other is written in capitals."""
FINE = frozenset({"ece", "signed_gap", "brier", "nll"})  # small, since most voxels are background: four decimals
HIGHER_IS_BETTER = frozenset({"dice"})
TWO_SIDED = frozenset({"signed_gap", "occupied"})  # neither high nor low is better
IN_POINTS = frozenset({"dice", "signed_gap"})  # changes are differences, not shares of the baseline's value
OF_CASES = frozenset({"dice", "occupied"})  # a macro average is meant where none is named
JOINT = ("brier", "nll")  # over all classes: not a mean of theirs, but a score of the whole distribution

Label = str | None
"""A class; None is all classes, in the one way that a metric has for that (see `scope_of`)."""


def scope_of(label: Label, metric: str) -> str:
    """What a number is about: a "class", or all of them as their "mean", "joint" or by the "top label" of each voxel.

    >>> scope_of("mean", "ace"), scope_of(None, "ace"), scope_of(None, "nll")
    ('class', 'mean', 'joint')
    """
    if label is not None:
        return "class"
    return "joint" if metric in JOINT else "top label" if metric.startswith("top_label") else "mean"


class Column(NamedTuple):
    """A metric in one average: "macro", "micro paper" or "micro pooled"."""

    metric: str
    average: str

    @property
    def name(self) -> str:
        return NAMES.get(self.metric, self.metric.upper().replace("_", " "))

    @property
    def heading(self) -> str:
        """As tables have it.

        >>> Column("dice", "macro").heading, Column("ace", "micro paper").heading, Column("ace", "micro pooled").heading
        ('DSC', 'Micro-ACE (paper)', 'Micro-ACE')
        """
        if self.metric in OF_CASES and self.average == "macro":
            return self.name
        average, _, reading = self.average.partition(" ")
        return f"{average.capitalize()}-{self.name}" + (f" ({reading})" if reading == "paper" else "")

    @property
    def axis(self) -> str:
        """As figures have it.

        >>> Column("dice", "macro").axis, Column("ace", "micro pooled").axis
        ('DSC', 'micro ACE')
        """
        heading = self.heading
        return heading if heading == self.name else heading[0].lower() + heading[1:].replace("-", " ", 1)

    @property
    def arrow(self) -> str:
        return "" if self.metric in TWO_SIDED else "↑" if self.metric in HIGHER_IS_BETTER else "↓"

    @property
    def digits(self) -> int:
        return 4 if self.metric in FINE else 3


RADAR = (
    Column("dice", "macro"),
    *(Column(metric, average) for average in ("macro", "micro pooled") for metric in ("ace", "ece", "mce")),
)
"""What a radar plot shows."""
