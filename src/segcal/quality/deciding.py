"""Write label maps of a folder of predictions: the most probable class, or what reaches a threshold.

A case is read in slabs, twice where the decision needs its sums first; what is held is the file (if it is compressed)
and the labels. Each case leaves a small file of what was decided, so that an interrupted run resumes.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from segcal import __version__
from segcal._io.files import csv_text, reject_pipe, stay_outside, write_whole
from segcal._io.jobs import (
    Executor,
    Failure,
    Job,
    Pool,
    do_all,
    keep_only,
    key_of,
    open_parts,
    stamp,
    threads_of,
    unchanged,
)
from segcal._io.parsing import parse_json
from segcal.errors import ConfigError, FileError, ShapeError
from segcal.evaluation.cohort import with_calibrator
from segcal.evaluation.deciding import CaseDecision, Cutting, decide_case, foreground_names
from segcal.evaluation.naming import check_names, read_naming
from segcal.evaluation.options import Options, ReadOptions
from segcal.evaluation.rules import Cuts
from segcal.evaluation.unlabelled import open_maps
from segcal.volumes import PredictionFiles, find_predictions, place_of_labels

if TYPE_CHECKING:
    from segcal.quality.fitting import Quality

Array = NDArray[Any]
Progress = Callable[[int, int], None]
TABLE = "decisions.csv"
_FORMAT = "segcal decisions 1"
_OURS = "targets.json"


class Rule(NamedTuple):
    """How to decide: by which kind of rule, and at which threshold or by the file of which content."""

    kind: Literal["argmax", "threshold", "quality"]
    threshold: float = math.nan
    path: str | None = None
    fingerprint: str | None = None


class Decision(NamedTuple):
    """What was decided of a class in a case; None: it has no value, or is not known.

    expected_dice: of the decision, as the probabilities have it.
    """

    case: str
    class_name: str
    threshold: float | None
    voxels: int
    volume_ml: float | None
    expected_dice: float | None


class Decided(NamedTuple):
    """Label maps that are there, what was decided, cases that failed, and voxels that several exclusive classes
    wanted."""

    paths: list[Path]
    decisions: list[Decision]
    failures: list[Failure]
    contested: int


def decide(
    predictions: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    rule: str | os.PathLike[str] = "argmax",
    options: ReadOptions | None = None,
    calibrator: str | os.PathLike[str] | None = None,
    masks: bool = False,
    workers: int = 1,
    executor: Executor | None = None,
    progress: Progress = lambda done, total: None,
) -> Decided:
    """Write a label map of every prediction, on its own grid, and decisions.csv: thresholds, volumes, expected Dice.

    Images have the header of the map. Arrays become .npy files, or images in the place of the label map beside them, as
    nnU-Net has them. Labels have the smallest integer type. Classes that overlap, and regions, have a channel each.
    An interrupted call resumes when repeated; a case that fails does not stop the others. ConfigError where options
    contradict each other or the files.

    predictions: folder of probability maps or logits, or one file; whatever `evaluate` reads.
    out: folder for the labels, outside of the predictions. A file there that `decide` has not written stays: it is
        refused.
    rule: "argmax": the most probable class, or a probability of at least 1/2 for classes that overlap and for regions.
        "threshold=0.4": every class where it has this probability, of exclusive classes the most probable one, and
        background elsewhere. Or a file of `segcal quality fit` with thresholds.
    options: how to read the predictions. Without labels, neither the ignored one nor strict grids matter.
    calibrator: file of a calibrator that predictions go through first.
    masks: write the whole set of every class but the background as a channel, whether they overlap or not.
    workers: processes, each with one case at a time.
    executor: decides cases elsewhere, in place of the workers, as `segcal.adapters.dask.DaskCluster`.
    progress: is called with the number of cases that are done, and of all.

    >>> import tempfile
    >>> folder = Path(tempfile.mkdtemp())
    >>> (folder / "maps").mkdir()
    >>> foreground = np.array([[[0.9, 0.4, 0.1]]], np.float32)
    >>> np.save(folder / "maps" / "case_1.npy", np.stack([1 - foreground, foreground]))  # class, x, y, z
    >>> decided = decide(folder / "maps", folder / "labels", rule="threshold=0.4")
    >>> np.load(folder / "labels" / "case_1.npy").tolist()
    [[[1, 1, 0]]]
    """
    pool = Pool(workers)
    source, out = Path(predictions), Path(out)
    stay_outside(out, source, "predictions")
    meant = read_rule(rule)
    found = find_predictions(source)
    reading = _reading(source, options or ReadOptions(), meant, found, calibrator)
    threads = threads_of(workers) if executor is None else 1  # elsewhere a process may do several cases at a time
    root = source if source.is_dir() else source.parent
    targets = {files.name: (out / place_of_labels(files, root)).absolute() for files in found}
    with open_parts(out) as parts:
        paths = {files.name: (parts / f"{_key(files, reading, meant, masks)}.json").absolute() for files in found}
        waiting = [files for files in found if _read_part(paths[files.name], targets[files.name]) is None]
        _take(out, parts / _OURS, [targets[files.name] for files in waiting])
        jobs = [
            Job(
                files.name,
                _decide_files,
                (files.absolute(), reading, meant, masks, threads, targets[files.name], paths[files.name]),
            )
            for files in waiting
        ]
        failures = do_all(jobs, executor or pool, total=len(found), progress=progress)
        decided = _gather([(targets[files.name], paths[files.name]) for files in found], failures)
        rows = [["" if cell is None else cell for cell in row] for row in decided.decisions]
        write_whole(out / TABLE, csv_text([name.removesuffix("_name") for name in Decision._fields], rows).encode())
        keep_only(parts, [*paths.values(), parts / _OURS])
    return decided


def read_rule(rule: str | os.PathLike[str]) -> Rule:
    """What a rule means; ConfigError where it means nothing.

    >>> read_rule("threshold=0.4").threshold
    0.4
    """
    text = os.fspath(rule)
    if text == "argmax":
        return Rule("argmax")
    if text.startswith("threshold="):
        number = text.removeprefix("threshold=")
        try:
            threshold = float(number)
        except ValueError:
            threshold = math.nan
        if not 0 < threshold <= 1:
            raise ConfigError(
                f"the threshold must be a number above 0 and at most 1, as threshold=0.4; got {number!r}."
            )
        return Rule("threshold", threshold)
    path = Path(text)
    reject_pipe(path)
    if not path.is_file():
        raise ConfigError(
            f"the rule must be argmax, threshold=T, or a file that `segcal quality fit` wrote; {text!r} is none."
        )
    return Rule("quality", path=os.path.abspath(path), fingerprint=hashlib.sha256(path.read_bytes()).hexdigest())


@lru_cache(maxsize=2)
def _quality(path: str, fingerprint: str | None) -> Quality:
    """The quality file, read once in a process; it must be the one of the fingerprint."""
    if hashlib.sha256(Path(path).read_bytes()).hexdigest() != fingerprint:
        raise FileError(f"{path} must stay the same while it is used; it has changed since. Run the command again.")
    from segcal.quality.fitting import load_quality  # brings torch, which takes seconds

    return load_quality(path)


def cutting_of(rule: Rule, bins: int) -> Cutting | None:
    """What makes thresholds of the sums of a case; None: the most probable class counts."""
    if rule.kind == "argmax":
        return None
    if rule.kind == "threshold":
        return lambda count, confidence: Cuts.at(rule.threshold, len(count), bins)
    assert rule.path is not None
    quality = _quality(rule.path, rule.fingerprint)
    return lambda count, confidence: Cuts.at_bins(np.asarray(quality.thresholds(count, confidence)), bins)


def _reading(
    source: Path,
    given: ReadOptions,
    rule: Rule,
    found: Sequence[PredictionFiles],
    calibrator: str | os.PathLike[str] | None,
) -> Options:
    """How the predictions are read: as the options and the files beside them say."""
    if rule.path is not None:
        return _reading_of_quality(source, given, rule, found, calibrator)
    naming = read_naming(source, source, given)
    meant = naming.into(Options.of(given, bins=20, background=False))
    if calibrator is not None:
        meant = with_calibrator(meant, calibrator)
    check_names(naming, found, meant, count=lambda files: open_maps(files, meant).classes)
    return meant


def _reading_of_quality(
    source: Path,
    given: ReadOptions,
    rule: Rule,
    found: Sequence[PredictionFiles],
    calibrator: str | os.PathLike[str] | None,
) -> Options:
    """The same for thresholds of a quality file: as it says, unless the options say more."""
    assert rule.path is not None
    quality = _quality(rule.path, rule.fingerprint)
    learned = quality.reading(calibrator)
    meant = learned
    if given != ReadOptions():
        told = read_naming(source, source, given).into(Options.of(given, bins=learned.bins, background=False))
        meant = replace(told, calibrator=learned.calibrator, calibrator_fingerprint=learned.calibrator_fingerprint)
    bins = np.arange(meant.fine_bins) / meant.fine_bins
    each = np.ones((len(quality.classes), len(bins)))
    quality.thresholds(each, each * bins)  # refuses a file without thresholds before there is work to lose
    _check_classes(rule, quality.classes, found, meant)
    return meant


def _check_classes(rule: Rule, classes: tuple[str, ...], found: Sequence[PredictionFiles], options: Options) -> None:
    """Refuse a quality file if predictions can be read, but none has its classes."""
    other = None
    for files in found:
        try:
            names = foreground_names(open_maps(files, options).classes, options)
        except Exception:
            continue  # `_decide_files` reports it as the failure of this case
        if names == classes:
            return
        other = other or names
    if other is not None:
        raise ConfigError(
            f"predictions must have the classes of {rule.path}, {', '.join(classes)}; they have {', '.join(other)}. "
            f"Fit a file to an evaluation of such predictions."
        )


def _key(files: PredictionFiles, options: Options, rule: Rule, masks: bool) -> str:
    """Names what was decided of a case: other files, another rule or other options give another key."""
    stamps = [stamp(path) for path in files.all]
    meant = asdict(replace(options, calibrator=None))  # by its fingerprint, wherever it lies
    return key_of(__version__, files.name, stamps, meant, rule.kind, str(rule.threshold), rule.fingerprint, masks)


def _take(out: Path, ours: Path, targets: Sequence[Path]) -> None:
    """Remove the label maps that are to be made anew, and remember them as ours; refuse if one there is not."""
    known: list[str] = []
    with suppress(OSError, ValueError, TypeError):  # not there, or spoilt: then nothing is known to be ours
        known = [str(place) for place in parse_json(ours.read_text(encoding="utf-8"))]
    places = {target: os.path.relpath(target, out.absolute()) for target in targets}
    for target, place in places.items():
        if target.exists() and place not in known:
            raise ConfigError(
                f"--out must not hold label maps of others; {target} is there, and `segcal decide` has not written it. "
                f"Choose another folder."
            )
    write_whole(ours, json.dumps(sorted({*known, *places.values()})).encode())
    for target in targets:
        target.unlink(missing_ok=True)


def _decide_files(
    files: PredictionFiles, options: Options, rule: Rule, masks: bool, threads: int, target: Path, part: Path
) -> None:
    """Decide a case, write its labels, and then what was decided."""
    with unchanged(files.all):
        prediction = open_maps(files, options)
        names = foreground_names(prediction.classes, options)
        if rule.path is not None and names != (classes := _quality(rule.path, rule.fingerprint).classes):
            raise ShapeError(
                f"the map must have the classes of {rule.path}, {', '.join(classes)}; it has {', '.join(names)}. "
                f"Use maps of the network that the file was learned for."
            )
        decided = decide_case(prediction, options, cutting_of(rule, options.fine_bins), masks=masks, threads=threads)
    prediction.write_labels(decided.labels, target)
    rows = _rows(decided, names, options.fine_bins, prediction.grid.voxel_ml)
    content = {"format": _FORMAT, "case": files.name, "rows": rows, "contested": decided.contested}
    write_whole(part, json.dumps(content | {"labels": stamp(target)}).encode())


def _rows(decided: CaseDecision, names: Sequence[str], bins: int, voxel_ml: float) -> list[list[Any]]:
    """The fields of each class's `Decision` but the case."""
    rows: list[list[Any]] = []
    for c, name in enumerate(names):
        voxels, dice = int(decided.voxels[c]), float(decided.expected_dice[c])
        threshold = None
        if decided.lowest is not None:
            threshold = min(float(decided.lowest[c]), bins + 1) / bins  # beyond 1: nothing is decided
        volume = None if math.isnan(voxel_ml) else voxels * voxel_ml
        rows.append([name, threshold, voxels, volume, None if math.isnan(dice) else dice])
    return rows


def _read_part(part: Path, target: Path) -> dict[str, Any] | None:
    """What was decided of a case; None where that, or the label map of it, is not there."""
    try:
        content: dict[str, Any] = parse_json(part.read_text(encoding="utf-8"))
        return content if content["format"] == _FORMAT and content["labels"] == stamp(target) else None
    except (OSError, ValueError, LookupError, TypeError):
        return None


def _gather(made: Sequence[tuple[Path, Path]], failures: list[Failure]) -> Decided:
    """What is there of all cases."""
    decided = Decided([], [], failures, 0)
    contested = 0
    for target, part in made:
        content = _read_part(part, target)
        if content is not None:
            decided.paths.append(target)
            decided.decisions.extend(Decision(content["case"], *row) for row in content["rows"])
            contested += content["contested"]
    return decided._replace(contested=contested)
