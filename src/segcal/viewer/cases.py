"""Which cases of evaluations to look at, and their volumes and numbers together."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from segcal._io.jobs import Failure, failure_of
from segcal.comparison.matching import match_cases
from segcal.errors import ConfigError, check_integer
from segcal.evaluation.columns import HIGHER_IS_BETTER, NAMES
from segcal.evaluation.evaluation import Evaluation
from segcal.plots.maps import files_of, options_of
from segcal.viewer.curves import case_curves
from segcal.viewer.volumes import CaseVolumes, Files, case_volumes
from segcal.volumes import find_predictions, pair_cases
from segcal.volumes.images import find_image

BY = ("dice", "expected_dice", "ace", "ece", "mce", "brier", "nll")
"""What cases can be ordered by."""
BETTER_IF_HIGHER = HIGHER_IS_BETTER | {"expected_dice"}
PLACES = ("worst", "median", "best")


class Choice(NamedTuple):
    """A case, and why it is shown."""

    case: str
    caption: str


class ViewedCase(NamedTuple):
    """A case to look at: its volumes, the numbers at each threshold by method and class, and why it is shown."""

    volumes: CaseVolumes
    curves: list[list[dict[str, Any]]] | None = None
    caption: str = ""


def choose_cases(evaluations: Mapping[str, Evaluation], *, number: int, by: str = "dice") -> list[Choice]:
    """So many cases, the worst first, then those around the median and the best; all of them where there are no more.

    They are ordered by the metric `by`, one of `BY`: its mean over classes but the background, then over methods. Cases
    that not all methods have, or without a value, are left out.

    >>> from segcal import EvaluationAccumulator
    >>> found = EvaluationAccumulator()
    >>> sure = torch.tensor([0.9, 0.8, 0.7, 0.6])[:, None].expand(4, 8)
    >>> found.update(torch.stack([1 - sure, sure], 1), torch.ones(4, 8, dtype=torch.long), ["a", "b", "c", "d"])
    >>> [choice.case for choice in choose_cases({"net": found.compute()}, number=3, by="brier")]
    ['d', 'c', 'a']
    """
    if by not in BY:
        raise ConfigError(f"cases must be chosen by one of {', '.join(BY)}; got {by!r}.")
    check_integer("the number of cases", number)
    matched, _ = match_cases(evaluations)
    values = torch.stack([_values(part.foreground(), by) for part in matched.values()]).mean(0)
    sign = 1 if by in BETTER_IF_HIGHER else -1
    names = next(iter(matched.values())).cases
    known = [(sign * value, name) for value, name in zip(values.tolist(), names, strict=True) if value == value]
    ordered = sorted(known)
    chosen = []
    for i, place in _places(len(ordered), number).items():
        value, name = ordered[i]
        chosen.append(Choice(name, f"{place} by {_name(by)}: {sign * value:.3f}"))
    return chosen


def _values(evaluation: Evaluation, by: str) -> Tensor:
    if by != "expected_dice":
        return evaluation.case_values()[None, by]
    promised = evaluation.decision_metrics().get(by)
    if promised is None:
        raise ConfigError("cases can be chosen by expected_dice where all evaluations have it; one was made without.")
    return promised.nanmean(1)


def _name(by: str) -> str:
    return "expected DSC" if by == "expected_dice" else NAMES[by]


def _places(cases: int, number: int) -> dict[int, str]:
    """Which places of an order from worst to best: a third from each end and one around the middle.

    >>> _places(9, 3), _places(4, 5)
    ({0: 'worst', 4: 'median', 8: 'best'}, {0: 'worst', 1: 'worst', 2: 'median', 3: 'best'})
    """
    number = min(number, cases)
    worst, best = (number + 2) // 3, number // 3
    middle = number - worst - best
    first = min(max(worst, (cases - middle) // 2), cases - best - middle)
    found = dict.fromkeys(range(worst), PLACES[0])
    found |= dict.fromkeys(range(first, first + middle), PLACES[1])
    return found | dict.fromkeys(range(cases - best, cases), PLACES[2])


def view_cases(
    evaluations: Mapping[str, Evaluation],
    predictions: Mapping[str, Path],
    *,
    labels: Path | None = None,
    images: Path | None = None,
    choices: Sequence[Choice],
    on_failure: Callable[[Failure], None] | None = None,
) -> Iterator[ViewedCase]:
    """The chosen cases, cropped, one after the other.

    `predictions` names each method's folder, `labels` and `images` those of the cases; either may be missing. How to
    read the files is what the evaluations were told. A case that cannot be shown is left out if `on_failure` is given,
    which is called with its failure; else its error is raised, as FileError where a case has no file.
    """
    if set(predictions) != set(evaluations):
        raise ConfigError(f"predictions must be of the methods {list(evaluations)}; got {list(predictions)}.")
    match_cases(evaluations)  # refuses evaluations that do not belong together
    files = {method: _files(predictions[method], labels) for method in evaluations}
    for case, caption in choices:
        try:
            own = {method: files_of(case, known, predictions[method]) for method, known in files.items()}
            image = None if images is None else find_image(images, case)
            viewed = view_case(evaluations, case, own, image=image)
            cropped = viewed.volumes.cropped()
        except Exception as error:
            if on_failure is None:
                raise
            on_failure(failure_of(case, error))
        else:
            yield viewed._replace(volumes=cropped, caption=caption)


def view_case(
    evaluations: Mapping[str, Evaluation], case: str, files: Mapping[str, Files], *, image: Path | None = None
) -> ViewedCase:
    """One case, whole: the files of each method, with labels or without, and the numbers of its evaluation."""
    parts = {method: evaluations[method].foreground() for method in files}
    classes = next(iter(parts.values())).classes
    curves = []
    for part in parts.values():
        places = [part.classes.index(name) for name in classes]
        curves.append(case_curves(part.select(classes=places), case))
    options = {method: options_of(evaluations[method]) for method in files}
    volumes = case_volumes(case, files, options=options, classes=classes, image=image)
    return ViewedCase(volumes, curves)


def _files(predictions: Path, labels: Path | None) -> dict[str, Files]:
    if labels is not None:
        return {files.name: files for files in pair_cases(predictions, labels).cases}
    return {files.name: files for files in find_predictions(predictions)}
