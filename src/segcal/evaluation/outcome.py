"""What comes of evaluating a cohort: the evaluation, the cases that failed, and what was noticed on the way."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from segcal._io.jobs import Failure
from segcal.errors import SegcalError
from segcal.evaluation.doubts import MEANINGS, OF_GRIDS
from segcal.volumes import Pairing

if TYPE_CHECKING:
    from segcal.evaluation.evaluation import Evaluation
    from segcal.evaluation.groups import GroupComparison


class Note(NamedTuple):
    """Something to know of some of the cases: what kind of thing, a sentence, and their names (none: all cases)."""

    kind: str
    message: str
    cases: tuple[str, ...] = ()


@dataclass(frozen=True, eq=False)
class Outcome:
    """What `segcal.evaluate` found.

    measured: the cases that could be measured; None where not a single one could. `evaluation` is never None.
    failures: the cases that could not, (case, kind, message) each.
    pairing: which files belong together, and which have no partner.
    notes: what was noticed, (kind, message, cases) each.
    facets: further evaluations of the same cases by name: against each of several raters, as "raters/anna".

    >>> failure = Failure("case_1", "FileError", "cannot be read.")
    >>> Outcome(None, [failure], Pairing(())).evaluation
    Traceback (most recent call last):
    segcal.errors.SegcalError: there must be a case that can be measured; all 1 failed. case_1: cannot be read.
    """

    measured: Evaluation | None
    failures: list[Failure]
    pairing: Pairing
    notes: tuple[Note, ...] = ()
    facets: Mapping[str, Evaluation] = field(default_factory=dict)
    parts: Mapping[str, Path] = field(default_factory=dict)
    """By case, the file of its sums while results are written."""
    groups: GroupComparison | None = None
    """What groups of cases show, where they were asked for."""

    @property
    def evaluation(self) -> Evaluation:
        """The cases that could be measured. SegcalError where not a single one could."""
        if self.measured is None:
            told = "; ".join(f"{failure.case}: {failure.message}" for failure in self.failures[:1])
            raise SegcalError(f"there must be a case that can be measured; all {len(self.failures)} failed. {told}")
        return self.measured


def gather_notes(doubts: Mapping[str, Sequence[str]]) -> tuple[Note, ...]:
    """A note for each kind of doubt, from the doubts of each case."""
    notes = []
    for kind, meaning in MEANINGS.items():
        cases = tuple(sorted(case for case, found in doubts.items() if kind in found))
        if cases:
            remedy = " --strict-grid refuses such cases." if kind in OF_GRIDS else ""
            notes.append(Note(kind, f"{meaning}{remedy}", cases))
    return tuple(notes)


def as_plain(notes: Iterable[Note]) -> list[dict[str, Any]]:
    """Notes as JSON has them."""
    return [{"kind": note.kind, "message": note.message, "cases": list(note.cases)} for note in notes]


def outcome_of(
    evaluation: Evaluation | None, failures: Iterable[Failure], pairing: Pairing, notes: tuple[Note, ...] = ()
) -> Outcome:
    """The outcome, failures in the order of their names; the evaluation's provenance tells of them, and of notes."""
    found = sorted(failures)
    if evaluation is not None:
        evaluation.provenance.update(failures=told(found), notes=as_plain(notes))
    return Outcome(evaluation, found, pairing, notes)


def told(failures: Iterable[Failure]) -> list[dict[str, str]]:
    """As an evaluation's provenance has them."""
    return [failure._asdict() for failure in sorted(failures)]
