"""What there is to review: the cases of evaluations and of queues, with the numbers that order and filter them.

Files may be anyone's: what has not the form that segcal writes is refused with a sentence.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from segcal._io.jobs import Failure
from segcal._io.parsing import parse_json
from segcal.errors import FileError, SegcalError
from segcal.evaluation.evaluation import Evaluation
from segcal.evaluation.options import Options
from segcal.evaluation.remarks import evaluation_notes, failed_cases
from segcal.volumes.averaging import PLAIN, Averaging

Array = NDArray[Any]

EVALUATION, QUEUE = "evaluation.npz", "queue.json"
EMPTY, ABSENT = "empty", "not in the labels"


class Metric(NamedTuple):
    """A number of a case and class: its name in files, its heading and its decimal places."""

    name: str
    heading: str
    digits: int = 3


OF_EVALUATIONS = (
    Metric("expected_dice", "Expected Dice"),
    Metric("dice", "Dice"),
    Metric("ace", "ACE"),
    Metric("ece", "ECE", 4),
    Metric("brier", "Brier score", 4),
    Metric("nll", "NLL", 4),
    Metric("volume_ml", "Volume, ml", 2),
    Metric("true_volume_ml", "True volume, ml", 2),
    Metric("uncertain_volume_ml", "Uncertain, ml", 2),
)
OF_QUEUES = (
    Metric("predicted_dice", "Predicted Dice"),
    Metric("dice_low", "Dice from"),
    Metric("dice_high", "Dice to"),
    Metric("expected_dice", "Expected Dice"),
    Metric("volume_ml", "Volume, ml", 2),
    Metric("volume_low_ml", "Volume from, ml", 2),
    Metric("volume_high_ml", "Volume to, ml", 2),
    Metric("uncertain_volume_ml", "Uncertain, ml", 2),
    Metric("like_reference_p", "Like the reference, p"),
)


@dataclass(frozen=True, eq=False)
class Result:
    """The cases of one evaluation or queue.

    name: of the method, or of the folder.
    file: what it was read from.
    cases, classes: their names, without the background.
    quality: what the cases are ordered by, the least first: (case, 1 + class), the first column of all classes.
    quality_name: what that is.
    metrics, values: what else is known, each of the same shape; NaN where a number has no value.
    flags: of each case: those of all classes together, then of each class.
    failures: cases that could not be measured.
    options: how the predictions were read.
    folders: of "predictions" and "labels", as far as the file tells.
    members, averaging: further folders of predictions, and how the mean of all was taken.
    dataset: of a study's run; "" otherwise.
    prefix: what stands before the names of cases that the files have, to tell those of several datasets apart.
    """

    name: str
    file: Path
    cases: tuple[str, ...]
    classes: tuple[str, ...]
    quality: Array
    quality_name: str
    metrics: tuple[Metric, ...]
    values: Mapping[str, Array]
    flags: Sequence[Sequence[tuple[str, ...]]]
    failures: tuple[Failure, ...] = ()
    options: Options = field(default_factory=Options)
    folders: Mapping[str, str] = field(default_factory=dict)
    members: tuple[str, ...] = ()
    averaging: Averaging = PLAIN
    dataset: str = ""
    prefix: str = ""

    def content(self) -> dict[str, Any]:
        """As the page takes it: NaN is null, flags are numbers of names."""
        names = list(dict.fromkeys(flag for each in self.flags for flag in each[0]))
        place = {name: i for i, name in enumerate(names)}
        return {
            "name": self.name,
            "classes": list(self.classes),
            "cases": list(self.cases),
            "quality": _plain(self.quality),
            "qualityName": self.quality_name,
            "metrics": [metric._asdict() for metric in self.metrics],
            "values": {name: _plain(array) for name, array in self.values.items()},
            "flagNames": names,
            "flags": [[[place[flag] for flag in flags] for flags in each] for each in self.flags],
            "failures": [failure._asdict() for failure in self.failures],
        }


def find_results(source: Path) -> list[Result]:
    """What is in a folder: its own evaluation or queue, those of a study's runs, or those of the folders in it.

    `source` may be one of the files itself. FileError where there is nothing to review.
    """
    files = _files(source)
    if not files:
        raise FileError(
            f"{source} must hold results to review: {EVALUATION} of `segcal evaluate`, {QUEUE} of `segcal quality "
            "apply`, or the runs of `segcal study run`; it holds none."
            " Give the folder of results."
        )
    found = [_read(name, path) for name, path in files.items()]
    if len({result.dataset for result in found}) > 1:  # cases of different datasets may have the same names
        found = [_under_dataset(result) for result in found]
    return found


def _files(source: Path) -> dict[str, Path]:
    """By name, the files with results."""
    if source.is_file():
        return {source.parent.name or source.stem: source}
    if own := [path for name in (QUEUE, EVALUATION) if (path := source / name).is_file()]:
        return _named({path: source.absolute().name for path in own})
    runs = source / "runs"
    study = sorted([*runs.glob(f"*/test/{EVALUATION}"), *runs.glob(f"*/calibrated/*/test/{EVALUATION}")])
    if study:
        return _named({path: " + ".join(path.relative_to(runs).parts[:-2:2]) for path in study})
    below = [path for name in (QUEUE, EVALUATION) for path in sorted(source.glob(f"*/{name}"))]
    return _named({path: path.parent.name for path in below})


def _named(files: Mapping[Path, str]) -> dict[str, Path]:
    """By names that differ: a queue beside an evaluation says so, and others that are the same are numbered."""
    names = list(files.values())
    named: dict[str, Path] = {}
    for path, name in files.items():
        label = name if names.count(name) == 1 else f"{name}, {'queue' if path.name == QUEUE else 'evaluation'}"
        while label in named:
            label += " (2)"
        named[label] = path
    return named


def _read(name: str, path: Path) -> Result:
    return _of_queue(name, path) if path.suffix == ".json" else _of_evaluation(name, path)


def _under_dataset(result: Result) -> Result:
    prefix = f"{result.dataset}/"
    return replace(result, cases=tuple(prefix + case for case in result.cases), prefix=prefix)


def _of_evaluation(name: str, path: Path) -> Result:
    evaluation = Evaluation.load(path).foreground()
    of_cases = evaluation.case_values()
    decided = {name: values.numpy() for name, values in evaluation.decision_metrics().items()}
    values: dict[str, Array] = {}
    for metric in OF_EVALUATIONS:
        if metric.name in decided:
            values[metric.name] = _with_mean(decided[metric.name], volume=metric.name.endswith("_ml"))
        elif (None, metric.name) in of_cases:
            columns = [of_cases[label, metric.name].numpy() for label in (None, *evaluation.classes)]
            values[metric.name] = np.stack(columns, 1)
    by = "expected_dice" if "expected_dice" in values else "dice"
    told = evaluation.provenance if isinstance(evaluation.provenance, Mapping) else {}
    options = _options(path, told.get("options"))
    return Result(
        name, path, evaluation.cases, evaluation.classes, values[by], _heading(by, OF_EVALUATIONS),
        tuple(metric for metric in OF_EVALUATIONS if metric.name in values), values, _evaluation_flags(evaluation),
        tuple(failed_cases(evaluation)), options, _folders(told.get("folders")),
        *_members(told.get("mean"), options), _dataset(told.get("run")),
    )  # fmt: skip


def _evaluation_flags(evaluation: Evaluation) -> list[list[tuple[str, ...]]]:
    of_case: dict[str, list[str]] = {}
    for note in evaluation_notes(evaluation):
        for case in note.cases:
            of_case.setdefault(case, []).append(note.kind)
    empty, absent = (evaluation.overlap.predicted == 0).tolist(), (evaluation.overlap.true == 0).tolist()
    found = []
    for case, none, gone in zip(evaluation.cases, empty, absent, strict=True):
        each = [
            [EMPTY] * bool(is_empty) + [ABSENT] * bool(is_gone) for is_empty, is_gone in zip(none, gone, strict=True)
        ]
        found.append(_together(each, of_case.get(case, ())))
    return found


def _together(each: Iterable[Iterable[str]], whole: Iterable[str] = ()) -> list[tuple[str, ...]]:
    """Flags of all classes, then of each; those of the whole case count for every class."""
    own = [tuple(dict.fromkeys((*flags, *whole))) for flags in each]
    return [tuple(dict.fromkeys(flag for flags in own for flag in flags)), *own]


def _of_queue(name: str, path: Path) -> Result:
    try:
        content = parse_json(path.read_text(encoding="utf-8"))
        rows = [_row(row) for row in content["queue"]]
        failures = tuple(Failure(*(str(each.get(key, "")) for key in Failure._fields)) for each in content["failures"])
        cases = [(case, list(own)) for case, own in groupby(rows, key=lambda row: row["case"])]
        classes = tuple(row["class"] for row in cases[0][1]) if cases else ()
        if len({case for case, _ in cases}) != len(cases):
            raise ValueError("rows of a case do not stand together")
        if any(tuple(row["class"] for row in own) != classes for _, own in cases):
            raise ValueError("cases have different classes")
        told = content.get("provenance") or {}
        folders, options = _folders(told.get("folders")), _options(path, told.get("options"))
    except SegcalError:
        raise
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        reason = str(error).rstrip(".")
        raise FileError(
            f"{path} must be a queue that `segcal quality apply` wrote; {reason}. Run `segcal quality apply` again."
        ) from error
    values = {
        metric.name: _with_mean(
            np.array([[row[metric.name] for row in own] for _, own in cases]).reshape(len(cases), len(classes)),
            volume=metric.name.endswith("_ml"),
        )
        for metric in OF_QUEUES
    }
    predicted, expected = (values[name][:, 1:] for name in ("predicted_dice", "expected_dice"))
    quality = _with_mean(np.where(np.isnan(predicted), expected, predicted))
    flags = [_together([row["flags"] for row in own]) for _, own in cases]
    return Result(
        name, path, tuple(case for case, _ in cases), classes, quality, _heading("predicted_dice", OF_QUEUES),
        OF_QUEUES, values, flags, failures, options, folders,
    )  # fmt: skip


def _row(row: Mapping[str, Any]) -> dict[str, Any]:
    """One row, with NaN for null."""
    if not (isinstance(row["case"], str) and isinstance(row["class"], str)):
        raise ValueError("names of cases and classes must be texts")
    if not all(isinstance(flag, str) for flag in row["flags"]):
        raise ValueError("flags must be texts")
    numbers = {metric.name: math.nan if row[metric.name] is None else float(row[metric.name]) for metric in OF_QUEUES}
    return {"case": row["case"], "class": row["class"], "flags": list(row["flags"]), **numbers}


def _with_mean(values: Array, *, volume: bool = False) -> Array:
    """(case, class) with the mean over classes before them; of volumes, which have none, NaN."""
    known = ~np.isnan(values)
    number = known.sum(1)
    mean = np.where(number > 0, np.where(known, values, 0).sum(1) / np.maximum(number, 1), np.nan)
    if volume:
        mean[:] = np.nan
    return np.concatenate([mean[:, None], values], 1)


def _heading(name: str, metrics: Iterable[Metric]) -> str:
    return next(metric.heading for metric in metrics if metric.name == name)


def _plain(values: Array) -> list[list[float | None]]:
    return [[float(f"{x:.6g}") if math.isfinite(x) else None for x in row] for row in values.tolist()]


def _folders(told: object) -> dict[str, str]:
    if not isinstance(told, Mapping):
        return {}
    return {str(name): folder for name, folder in told.items() if isinstance(folder, str)}


def _members(told: object, options: Options) -> tuple[tuple[str, ...], Averaging]:
    """The folders of predictions after the first, and how the mean was taken."""
    members = told.get("members") if isinstance(told, Mapping) else None
    if not (isinstance(told, Mapping) and isinstance(members, list) and all(isinstance(each, str) for each in members)):
        return (), PLAIN
    return tuple(members[1:]), Averaging(told.get("of", "probabilities"), told.get("logits") is True, options.sigmoid)


def _dataset(told: object) -> str:
    """Of a study's run, from its configuration."""
    for key in ("config", "data", "dataset"):
        told = told.get(key) if isinstance(told, Mapping) else None
    return told if isinstance(told, str) else ""


def _options(path: Path, told: object) -> Options:
    if not isinstance(told, Mapping):
        return Options()
    try:
        return Options.from_json(told)
    except (SegcalError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise FileError(
            f"{path} must tell how its predictions were read; {str(error).rstrip('.')}."
            " Run the command that wrote it again."
        ) from error
