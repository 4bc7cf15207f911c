"""The result in plain words, for a reader who decides with these probabilities: the same numbers, the same sentences.

A bin speaks only where its gap is at least a percentage point and its confidence lies outside the band of its
frequency. Neighbouring bins that err to the same side make a range; the range that adds most to the ACE is told.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

from segcal.comparison import Comparison, Entry
from segcal.diagrams import Reliability
from segcal.tables import Column

WORTH_TELLING = 0.01  # a gap below one percentage point changes no decision
ONE_SIDED = 3.0  # an error this many times that of the other side is told alone


class MethodDiagrams(NamedTuple):
    """The reliability of one method over all cases: of all classes together, and of each."""

    pooled: Reliability
    classes: dict[str, Reliability]


class _Range(NamedTuple):
    """Neighbouring bins that err to the same side; `gaps` are confidence less frequency."""

    start: float
    end: float
    gaps: tuple[float, ...]

    @property
    def weight(self) -> float:
        return abs(sum(self.gaps))

    def sentence(self, thing: str) -> str:
        gap = sum(self.gaps) / len(self.gaps)
        points = f"{abs(gap) * 100:.1f} percentage points"
        return (
            f"where it gives {self.start * 100:.0f} to {self.end * 100:.0f} %, {thing} is there "
            f"{points} {'less' if gap > 0 else 'more'} often than it says"
        )


class _Verdict(NamedTuple):
    """In what way a diagram is off, and where: "overconfident", "where it gives 50 to 95 %, ..."."""

    kind: str
    where: str


def reading(comparison: Comparison, diagrams: Mapping[str, MethodDiagrams]) -> list[str]:
    """A paragraph on each method against the baseline, one on each method's calibration, and one on missing classes.

    "Overconfident" means that the class is there less often than its probability says; "too extreme" that this is so
    of high probabilities while low ones are too low.
    """
    paragraphs = [_against_baseline(method, comparison) for method in comparison.methods[1:]]
    if len(comparison.methods) > 2:
        paragraphs.append(_best_of_all(comparison))
    paragraphs += [_calibration(method, comparison, diagrams[method]) for method in comparison.methods]
    if comparison.complete < comparison.cases:
        paragraphs.append(_on_complete_cases(comparison))
    return paragraphs


def _calibration(method: str, comparison: Comparison, diagrams: MethodDiagrams) -> str:
    verdict = _verdict(diagrams.pooled, "the class" if len(comparison.classes) > 1 else comparison.classes[0])
    sentences = [f"{method} is {verdict.kind}: {verdict.where}."]
    if len(comparison.classes) > 1:
        sentences.append(_worst_class(method, comparison, diagrams, verdict.kind))
    entry = comparison.find(method, metric="ace")
    if not math.isnan(entry.value):
        sentences.append(
            f"In a typical case its ACE, the mean gap over bins, is {_error(entry.value)}; a perfectly calibrated "
            f"model would show {_error(entry.floor)} by chance."
        )
    return " ".join(sentences)


def _worst_class(method: str, comparison: Comparison, diagrams: MethodDiagrams, kind: str) -> str:
    entries = [comparison.find(method, average="micro pooled", label=name, metric="ace") for name in comparison.classes]
    known = [entry for entry in entries if not math.isnan(entry.value - entry.floor)]
    if not known:
        return "No class has a value."
    worst = max(known, key=lambda entry: entry.value - entry.floor)
    verdict = _verdict(diagrams.classes[worst.label], worst.label)
    there = "" if verdict.kind == kind else f"it is {verdict.kind} there, "
    return (
        f"It is furthest off for {worst.label}, with a pooled ACE of {_error(worst.value)} against "
        f"{_error(worst.floor)} by chance: {there}{verdict.where}."
    )


def _verdict(diagram: Reliability, thing: str) -> _Verdict:
    over, under = _ranges(diagram, sign=1), _ranges(diagram, sign=-1)
    if not over and not under:
        return _Verdict("well calibrated", "no range of probabilities is off by a percentage point beyond its band")
    over_weight, under_weight = (sum(part.weight for part in side) for side in (over, under))
    if over_weight >= ONE_SIDED * under_weight:
        return _Verdict("overconfident", _heaviest(over).sentence(thing))
    if under_weight >= ONE_SIDED * over_weight:
        return _Verdict("underconfident", _heaviest(under).sentence(thing))
    low, high = sorted((_heaviest(over), _heaviest(under)))
    kind = (
        "too cautious, underconfident at high and overconfident at low probabilities"
        if low.gaps[0] > 0
        else "too extreme, overconfident at high and underconfident at low probabilities"
    )
    return _Verdict(kind, f"{low.sentence(thing)}, and {high.sentence(thing)}")


def _heaviest(ranges: list[_Range]) -> _Range:
    return max(ranges, key=lambda part: part.weight)


def _ranges(diagram: Reliability, *, sign: int) -> list[_Range]:
    """Runs of neighbouring bins that err to one side, beyond their band; empty bins do not break a run."""
    runs: list[_Range] = []
    going_on = False
    rows = zip(diagram.confidence.tolist(), diagram.frequency.tolist(), diagram.low.tolist(), diagram.high.tolist(),
               strict=True)  # fmt: skip
    edges = diagram.edges.tolist()
    for i, (confidence, frequency, low, high) in enumerate(rows):
        if math.isnan(frequency):
            continue
        gap = confidence - frequency
        if gap * sign >= WORTH_TELLING and not low <= confidence <= high:
            start, gaps = runs.pop()[::2] if going_on else (edges[i], ())
            runs.append(_Range(start, edges[i + 1], (*gaps, gap)))
            going_on = True
        else:
            going_on = False
    return runs


def _against_baseline(method: str, comparison: Comparison) -> str:
    baseline = comparison.methods[0]
    ace, base = (comparison.find(name, metric="ace") for name in (method, baseline))
    dice, base_dice = (comparison.find(name, metric="dice") for name in (method, baseline))
    name = "paired t-test" if comparison.test == "t" else "Wilcoxon signed-rank test"
    corrected = ", Holm-corrected" if comparison.correction == "holm" else ""
    return (
        f"{method} {_change(ace, base, baseline)}, {_significance(ace)}. Its Dice coefficient is {dice.value:.3f} "
        f"against {base_dice.value:.3f}, {_significance(dice)} ({name} over {comparison.patients} patients{corrected})."
    )


def _change(entry: Entry, base: Entry, baseline: str) -> str:
    if math.isnan(entry.value - base.value):
        return f"has no ACE to compare with that of {baseline}"
    if entry.value == base.value:
        return f"leaves the ACE of {baseline} as it is, {_error(entry.value)}"
    word = "lowers" if entry.value < base.value else "raises"
    share = "" if math.isnan(entry.change) else f" by {abs(entry.change) * 100:.0f} %,"
    return f"{word} the ACE of {baseline}{share} from {_error(base.value)} to {_error(entry.value)}"


def _significance(entry: Entry) -> str:
    if math.isnan(entry.p):
        return "which too few patients leave untested"
    p = "p < 0.001" if entry.p < 0.001 else f"p = {entry.p:.3f}"
    return f"a significant difference, {p}" if entry.stars else f"no significant difference, {p}"


def _best_of_all(comparison: Comparison) -> str:
    def of(metric: str) -> dict[str, float]:
        found = {name: comparison.find(name, metric=metric).value for name in comparison.methods}
        return {name: value for name, value in found.items() if not math.isnan(value)}

    errors, overlaps = of("ace"), of("dice")
    if not errors or not overlaps:
        return "No method has a value for every comparison."
    calibrated, overlapping = min(errors, key=errors.__getitem__), max(overlaps, key=overlaps.__getitem__)
    return (
        f"Of all methods, {calibrated} has the lowest ACE ({_error(errors[calibrated])}) and {overlapping} the "
        f"highest Dice coefficient ({overlaps[overlapping]:.3f})."
    )


def _on_complete_cases(comparison: Comparison) -> str:
    lacking = comparison.cases - comparison.complete
    start = f"{lacking} of {comparison.cases} cases lack at least one class"
    if not comparison.complete:
        return f"{start}; none is complete."
    found = ", ".join(
        f"{name} {_error(comparison.find(name, cases='complete', metric='ace').value)}" for name in comparison.methods
    )
    return f"{start}. On the {comparison.complete} complete cases alone the ACE is: {found}."


def _error(value: float) -> str:
    return "unknown" if math.isnan(value) else f"{value:.{Column('ace', 'macro').digits}f}"
