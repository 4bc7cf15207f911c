"""The result in plain words, for a reader who decides with these probabilities: the same numbers, the same sentences.

Classes are judged one by one, from their pooled bins: together, what one class is given too much hides what another
is given too little. A bin speaks only where its gap is at least a percentage point and its confidence lies outside the
band of its frequency, which is over patients, widened for as many bins as could speak: of twenty bins of a method that
is calibrated, one is outside its own band. Neighboring bins that err to the same side make a range; the range that
adds most to the ACE is told.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Literal, NamedTuple

from scipy import stats as scipy_stats

from segcal._io.words import counted
from segcal.comparison.comparison import Comparison
from segcal.comparison.cost import costs
from segcal.comparison.entry import Entry
from segcal.evaluation.columns import Column
from segcal.evaluation.diagrams import Reliability
from segcal.evaluation.intervals import FEWEST_PATIENTS

WORTH_TELLING = 0.01  # a gap below one percentage point changes no decision
EXCESS = 0.02  # of a case's ACE over its floor: more, and single cases are off even where their average is not
ALSO = 1 / 3  # a range on the other side is told, too, where it weighs this share of the heaviest


class MethodDiagrams(NamedTuple):
    """The reliability of one method over all cases: of all classes together, and of each."""

    pooled: Reliability
    classes: dict[str, Reliability]


class _Range(NamedTuple):
    """Neighboring bins that err to the same side; `gaps` are confidence less frequency."""

    start: float
    end: float
    gaps: tuple[float, ...]

    @property
    def weight(self) -> float:
        return abs(sum(self.gaps))

    @property
    def sign(self) -> int:
        return 1 if self.gaps[0] > 0 else -1

    def sentence(self, thing: str) -> str:
        gap = sum(self.gaps) / len(self.gaps)
        points = f"{abs(gap) * 100:.1f} percentage points"
        return (
            f"where it gives {self.start * 100:.0f} to {self.end * 100:.0f} %, {thing} is there "
            f"{points} {'less' if gap > 0 else 'more'} often than it says"
        )


class Verdict(NamedTuple):
    """In what way a class is off, and where: "is overconfident about", "where it gives 50 to 95 %, ..."."""

    verb: str
    where: str


class Calibration(NamedTuple):
    """How far the probabilities of a method can be taken at their word."""

    kind: Literal["none", "unknown", "off", "uneven", "good"]
    """No class has a value; too few patients; a class is off; single cases are, not their average; nothing is."""
    off: Mapping[str, Verdict]
    """The classes that are off, the furthest first."""


def reading(comparison: Comparison, diagrams: Mapping[str, MethodDiagrams]) -> list[str]:
    """Paragraphs on each method against the baseline, one on each method's calibration, and one on missing classes.

    "Overconfident" means further from 50 % than the class's frequency, too sure of a yes or of a no; "overestimates"
    that the class is there less often than it says at low and at high probabilities alike.
    """
    paid = costs(comparison)
    paragraphs = []
    for method in comparison.methods[1:]:
        paragraphs += [_against_baseline(method, comparison), *([paid[method]] if method in paid else [])]
    if len(comparison.methods) > 2:
        paragraphs.append(_best_of_all(comparison))
    paragraphs += [_calibration(method, comparison, diagrams[method]) for method in comparison.methods]
    if comparison.complete < comparison.cases:
        paragraphs.append(_on_complete_cases(comparison))
    return paragraphs


def _calibration(method: str, comparison: Comparison, diagrams: MethodDiagrams) -> str:
    entry = comparison.find(method, metric="ace")
    found = calibration_of(method, comparison, diagrams)
    if found.kind == "none":
        why = "case has one by every method" if len(comparison.methods) > 1 else "class has a value"
        return f"{method} has no calibration error: no {why}."
    on_average = (
        f"On average over cases its ACE, the mean gap over bins, is {_error(entry.value)}; a perfectly calibrated "
        f"model would show at least {_error(entry.floor)} by chance."
    )
    if found.kind == "unknown":
        few = f"Whether {method} is well calibrated cannot be told from fewer than {FEWEST_PATIENTS} patients."
        return f"{few} {on_average}"
    if found.kind == "off":
        return f"{_worst_class(method, comparison, found.off)} {on_average}"
    if found.kind == "uneven":
        return (
            f"{method} is calibrated on average over patients, but not case by case: pooled over cases, no range of "
            f"probabilities of any class is off by a percentage point beyond chance. {on_average}"
        )
    return (
        f"{method} is well calibrated: no range of probabilities of any class is off by a percentage point beyond "
        f"chance. {on_average}"
    )


def calibration_of(method: str, comparison: Comparison, diagrams: MethodDiagrams) -> Calibration:
    """Whether the probabilities of a method can be taken at their word, and of which classes not."""
    entry = comparison.find(method, metric="ace")
    if math.isnan(entry.value):
        return Calibration("none", {})
    if not diagrams.pooled.over_patients:
        return Calibration("unknown", {})
    wider = _widening(diagrams.classes.values(), comparison)
    verdicts = {name: _verdict(diagram, name, wider) for name, diagram in diagrams.classes.items()}
    off = {name: verdict for name, verdict in verdicts.items() if verdict is not None}
    if off:
        worst = max(off, key=lambda name: _excess(method, comparison, name))
        return Calibration("off", {worst: off[worst], **off})
    return Calibration("uneven" if entry.value - entry.floor >= EXCESS else "good", {})


def _widening(diagrams: Iterable[Reliability], comparison: Comparison) -> float:
    """By what factor all bands together must be wider, so that each class of a calibrated method lies within them."""
    bins = sum(int((~diagram.low.isnan()).sum()) for diagram in diagrams)
    beyond = (1 - comparison.level) / 2
    one, all_of_them = scipy_stats.t.isf([beyond, beyond / max(bins, 1)], comparison.patients - 1)
    return float(all_of_them / one)


def _excess(method: str, comparison: Comparison, name: str) -> float:
    """How far the pooled ACE of a class lies above its floor."""
    entry = comparison.find(method, average="micro pooled", label=name, metric="ace")
    return entry.value - entry.floor


def _worst_class(method: str, comparison: Comparison, off: Mapping[str, Verdict]) -> str:
    """What is told of the class that is furthest off, which comes first, and which others are."""
    worst = next(iter(off))
    entry = comparison.find(method, average="micro pooled", label=worst, metric="ace")
    told = f"{method} {off[worst].verb} {worst}: {off[worst].where}."
    if len(comparison.classes) == 1:
        return told
    others = [f"{verdict.verb} {name}" for name, verdict in off.items() if name != worst]
    rest = f" It also {' and '.join(others)}." if others else " The other classes are not off beyond chance."
    return (
        f"{told} Of all classes this one is furthest off, with a pooled ACE of {_error(entry.value)} against at least "
        f"{_error(entry.floor)} by chance.{rest}"
    )


def _verdict(diagram: Reliability, thing: str, wider: float) -> Verdict | None:
    """None where nothing is off, with bands so many times wider."""
    both = _ranges(diagram, wider, sign=1) + _ranges(diagram, wider, sign=-1)
    ranges = sorted(both, key=lambda part: -part.weight)
    if not ranges:
        return None
    heaviest = ranges[0]
    other = [part for part in ranges[1:] if part.sign != heaviest.sign and part.weight >= ALSO * heaviest.weight]
    told = sorted([heaviest, *other[:1]])
    return Verdict(_verb(ranges), ", and ".join(part.sentence(thing) for part in told))


def _verb(ranges: list[_Range]) -> str:
    """What the ranges have in common, by their weights above and below 50 %."""
    weight = {(high, sign): 0.0 for high in (False, True) for sign in (1, -1)}
    for part in ranges:
        weight[part.start >= 0.5, part.sign] += part.weight
    sides = {high for (high, _), some in weight.items() if some}
    found = {
        "is overconfident about": weight[True, 1] + weight[False, -1],
        "is underconfident about": weight[True, -1] + weight[False, 1],
    }
    if len(sides) == 2:
        found["overestimates"] = weight[True, 1] + weight[False, 1]
        found["underestimates"] = weight[True, -1] + weight[False, -1]
    return max(found, key=found.__getitem__)


def _ranges(diagram: Reliability, wider: float, *, sign: int) -> list[_Range]:
    """Runs of neighboring bins that err to one side, beyond their wider band; 50 % ends a run, empty bins do not.

    A bin without a band, which too few patients fill, says nothing.
    """
    runs: list[_Range] = []
    going_on = False
    rows = zip(diagram.confidence.tolist(), diagram.frequency.tolist(), diagram.low.tolist(), diagram.high.tolist(),
               strict=True)  # fmt: skip
    edges = diagram.edges.tolist()
    for i, (confidence, frequency, low, high) in enumerate(rows):
        if math.isnan(frequency):
            continue
        gap = confidence - frequency
        if gap * sign >= WORTH_TELLING and (gap < wider * (low - frequency) or gap > wider * (high - frequency)):
            going_on = going_on and not runs[-1].start < 0.5 <= edges[i]
            start, gaps = runs.pop()[::2] if going_on else (edges[i], ())
            runs.append(_Range(start, edges[i + 1], (*gaps, gap)))
            going_on = True
        else:
            going_on = False
    return runs


def _against_baseline(method: str, comparison: Comparison) -> str:
    baseline = comparison.methods[0]
    ace, base = (comparison.find(name, metric="ace") for name in (method, baseline))
    name = "paired t-test" if comparison.test == "t" else "Wilcoxon signed-rank test"
    corrected = ", Holm-corrected" if comparison.correction == "holm" else ""
    others = (
        _beside("Dice coefficient", *(comparison.find(each, metric="dice") for each in (method, baseline)), digits=3),
        _beside(
            "negative log-likelihood", *(comparison.find(each, metric="nll") for each in (method, baseline)), digits=4
        ),
    )
    tested = "" if math.isnan(ace.p) else f" Tests: {name} over {comparison.patients} patients{corrected}."
    return f"{method} {_change(ace, base, baseline)}, {_significance(ace)}. {' '.join(filter(None, others))}{tested}"


def _beside(name: str, entry: Entry, base: Entry, *, digits: int) -> str:
    """What a number is beside the baseline's; empty where there is none."""
    if math.isnan(entry.value - base.value):
        return ""
    return f"Its {name} is {entry.value:.{digits}f} against {base.value:.{digits}f}, {_significance(entry)}."


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
        return f"not tested, for fewer than {FEWEST_PATIENTS} patients (n/a)"
    return f"{'a' if entry.stars else 'no'} significant difference, {p_text(entry)}"


def p_text(entry: Entry) -> str:
    return "p < 0.001" if entry.p < 0.001 else f"p = {entry.p:.3f}"


def _best_of_all(comparison: Comparison) -> str:
    def of(metric: str) -> dict[str, float]:
        found = {name: comparison.find(name, metric=metric).value for name in comparison.methods}
        return {name: value for name, value in found.items() if not math.isnan(value)}

    errors, overlaps = of("ace"), of("dice")
    if not errors or not overlaps:
        return "No method has a value for every comparison."
    calibrated, overlapping = min(errors, key=errors.__getitem__), max(overlaps, key=overlaps.__getitem__)
    return (
        f"Of all methods, {calibrated} has the lowest ACE ({_error(errors[calibrated])}"
        f"{_doubt(comparison, calibrated, 'ace')}) and {overlapping} the highest Dice coefficient "
        f"({overlaps[overlapping]:.3f}{_doubt(comparison, overlapping, 'dice')})."
    )


def _doubt(comparison: Comparison, method: str, metric: str) -> str:
    """What must be said of a best method whose difference from the baseline may be chance."""
    entry, baseline = comparison.find(method, metric=metric), comparison.methods[0]
    return "" if method == baseline or entry.stars else f"; against {baseline} {_significance(entry)}"


def _on_complete_cases(comparison: Comparison) -> str:
    lacking = comparison.cases - comparison.complete
    start = f"{lacking} of {counted(comparison.cases, 'case')} {'lacks' if lacking == 1 else 'lack'} at least one class"
    if not comparison.complete:
        return f"{start}; none is complete."
    found = ", ".join(
        f"{name} {_error(comparison.find(name, cases='complete', metric='ace').value)}" for name in comparison.methods
    )
    return f"{start}. On the {counted(comparison.complete, 'complete case')} alone the ACE is: {found}."


def _error(value: float) -> str:
    return "unknown" if math.isnan(value) else f"{value:.{Column('ace', 'macro').digits}f}"
