"""The cases that evaluations share, in one order, with the same labels: what can be compared at all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from segcal.errors import ConfigError
from segcal.evaluation.evaluation import Evaluation


def match_cases(
    evaluations: Mapping[str, Evaluation], *, bins: int | None = None, background: bool = False
) -> tuple[dict[str, Evaluation], dict[str, tuple[str, ...]]]:
    """The evaluations cut to the cases that all have, in one order; and which methods lack the others."""
    matched, unmatched = match(flat(evaluations), bins=bins, background=background)
    return {part.method: part.evaluation for part in matched}, unmatched


class Part(NamedTuple):
    method: str
    told: str
    """The method, and which of its seeds where it has several."""
    evaluation: Evaluation


def flat(evaluations: Mapping[str, Evaluation | Sequence[Evaluation]]) -> list[Part]:
    """One evaluation after the other, those of a method together."""
    parts = []
    for method, given in evaluations.items():
        seeds = [given] if isinstance(given, Evaluation) else list(given)
        if not seeds:
            raise ConfigError(f"every method must have at least one evaluation; {method} has none. Add one.")
        for i, seed in enumerate(seeds, 1):
            parts.append(Part(method, method if len(seeds) == 1 else f"{method} (seed {i} of {len(seeds)})", seed))
    return parts


def match(
    parts: Sequence[Part], *, bins: int | None, background: bool
) -> tuple[list[Part], dict[str, tuple[str, ...]]]:
    """The parts cut to the cases that all have, in one order; and which methods lack the others."""
    if not parts:
        raise ConfigError("there must be at least one evaluation; got none. Give at least one.")
    if not background:
        parts = [part._replace(evaluation=part.evaluation.foreground()) for part in parts]
    if bins is not None:
        parts = [part._replace(evaluation=replace(part.evaluation, bins=bins)) for part in parts]
    _, baseline, first = parts[0]
    everywhere = set(first.cases).intersection(*(part.evaluation.cases for part in parts))
    for _, name, part in parts:
        if set(part.classes) != set(first.classes):
            raise ConfigError(
                f"evaluations must have the same classes; {baseline} has {', '.join(first.classes)}, "
                f"{name} has {', '.join(part.classes)}. If they mean the same, evaluate with the same --class-names."
            )
        if part.bins != first.bins:
            raise ConfigError(
                f"evaluations must have the same bins; {baseline} has {first.bins}, {name} {part.bins}. Give bins."
            )
    unmatched = {
        case: tuple(dict.fromkeys(part.method for part in parts if case not in part.evaluation.cases))
        for case in sorted({case for part in parts for case in part.evaluation.cases} - everywhere)
    }
    if not everywhere:
        raise ConfigError(
            f"evaluations must share cases; {', '.join(part.told for part in parts)} have none in common."
            " Evaluate the same cases."
        )
    order = [case for case in first.cases if case in everywhere]
    matched = [part._replace(evaluation=_in_order(part.evaluation, order, first.classes)) for part in parts]
    _check_labels(matched)
    return matched, unmatched


def _in_order(part: Evaluation, cases: Sequence[str], classes: Sequence[str]) -> Evaluation:
    row = {name: i for i, name in enumerate(part.cases)}
    return part.select(cases=[row[name] for name in cases], classes=[part.classes.index(name) for name in classes])


def _check_labels(matched: Sequence[Part]) -> None:
    """The same case must have the same labels everywhere, or the difference is not the methods'."""
    (_, baseline, first), *others = matched
    for _, name, part in others:
        differ = (part.overlap.true != first.overlap.true).nonzero()
        if len(differ):
            case, column = differ[0].tolist()
            came, expected = (int(p.overlap.true[case, column]) for p in (part, first))
            raise ConfigError(
                f"methods must be evaluated against the same labels; case {first.cases[case]!r} has {expected} voxels "
                f"of {first.classes[column]} in {baseline} and {came} in {name}."
                " Evaluate with the same labels."
            )
