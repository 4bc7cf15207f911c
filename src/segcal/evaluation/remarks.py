"""What a reader must know of evaluations beside their numbers: cases that failed, how they were read, empty bins.

The first two are in the provenance of an evaluation. It may come from a file of anyone's, so whatever is not of the
form written here is left out.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from segcal._io.jobs import Failure
from segcal._io.words import counted, listed
from segcal.evaluation.evaluation import Evaluation
from segcal.evaluation.outcome import Note
from segcal.metrics import occupied

MOST = 5  # cases that a sentence names
FEWEST_OCCUPIED = 0.5  # of the bins; of a label map, 2 of them are


def failed_cases(evaluation: Evaluation) -> list[Failure]:
    """The cases that failed when this evaluation was made."""
    return [
        Failure(*(_text(each.get(name)) for name in Failure._fields))
        for each in _objects(evaluation, "failures")
        if "case" in each
    ]


def evaluation_notes(evaluation: Evaluation) -> list[Note]:
    """What was noticed when this evaluation was made, and whether most of its bins are empty."""
    found = []
    for each in _objects(evaluation, "notes"):
        cases = each.get("cases")
        names = tuple(map(_text, cases)) if isinstance(cases, list | tuple) else ()
        found.append(Note(_text(each.get("kind")), _text(each.get("message")), names))
    return [*(note for note in found if note.kind or note.message), *empty_bins(evaluation)]


def empty_bins(evaluation: Evaluation) -> list[Note]:
    """A note where fewer than half of the bins hold voxels, on average over cases and classes but the background.

    Classes that a case lacks do not count: to be sure that they are not there is no fault.
    """
    part = evaluation.foreground()
    shares = occupied(part.binned).where(part.overlap.true > 0, math.nan)
    share = shares.nanmean(1).nanmean().item()
    if not share < FEWEST_OCCUPIED:
        return []
    return [
        Note(
            "empty bins",
            f"only {100 * share:.0f} % of the bins hold voxels, on average over cases and their classes: most are "
            "empty, as in label maps, so that ACE says little (see How ACE can be gamed).",
        )
    ]


def remarks(evaluations: Mapping[str, Evaluation | Sequence[Evaluation]]) -> list[str]:
    """A sentence for each method with cases that failed, and for each note; the same of several seeds once."""
    found: dict[str, None] = {}
    for method, given in evaluations.items():
        for evaluation in [given] if isinstance(given, Evaluation) else given:
            found |= dict.fromkeys(_sentences(method, evaluation))
    return list(found)


def _sentences(method: str, evaluation: Evaluation) -> Iterator[str]:
    if failed := failed_cases(evaluation):
        told = [f"{each.case} ({': '.join(filter(None, each[1:])) or 'unknown'})" for each in failed]
        number = counted(len(failed) + len(evaluation.cases), "case")
        yield f"{method}: {len(failed)} of {number} failed and count nowhere: {listed(told, MOST, joint='; ')}"
    for note in evaluation_notes(evaluation):
        which = f" ({counted(len(note.cases), 'case')}: {listed(note.cases, MOST)})" if note.cases else ""
        yield f"{method}: {note.message or note.kind}{which}"


def _objects(evaluation: Evaluation, name: str) -> list[Mapping[str, object]]:
    given = evaluation.provenance.get(name) if isinstance(evaluation.provenance, Mapping) else None
    return [each for each in given if isinstance(each, Mapping)] if isinstance(given, list | tuple) else []


def _text(value: object) -> str:
    return "" if value is None else str(value)
