"""Lesions of a folder of predictions against a folder of labels: one case at a time, resumable as `evaluate` is."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from segcal import __version__
from segcal._io.files import stay_outside, text_path, write_whole
from segcal._io.jobs import (
    Executor,
    Job,
    Pool,
    do_all,
    keep_only,
    key_of,
    open_parts,
    unchanged,
)
from segcal._io.parsing import parse_json
from segcal.errors import ConfigError, check_integer
from segcal.evaluation.cohort import case_key, open_cohort
from segcal.evaluation.deciding import foreground_names
from segcal.evaluation.options import Options, ReadOptions
from segcal.lesions.case import Lesion, chosen_classes, find_lesions
from segcal.lesions.components import Rules
from segcal.lesions.results import LesionOutcome, LesionSummary, write_lesions
from segcal.volumes import CaseFiles, Pairing, count_channels

Progress = Callable[[int, int], None]
_FORMAT = "segcal lesions of a case 1"


class _Asked(NamedTuple):
    """What numbers are asked for."""

    bins: int | None
    patients: str | None
    level: float
    resamples: int
    seed: int


def evaluate_lesions(
    predictions: str | os.PathLike[str],
    labels: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    rules: Rules | None = None,
    classes: Sequence[str] = (),
    bins: int | None = None,
    options: ReadOptions | None = None,
    calibrator: str | os.PathLike[str] | None = None,
    patients: str | None = None,
    level: float = 0.95,
    resamples: int = 2000,
    seed: int = 0,
    workers: int = 1,
    executor: Executor | None = None,
    progress: Progress = lambda done, total: None,
) -> LesionOutcome:
    """Match the predicted lesions of every case with the true ones, and write what they tell to `out`.

    Writes lesions.csv (every predicted and every true lesion), summary.csv and summary.json (sensitivity, precision,
    false positives per case, FROC and reliability, with intervals over patients), froc.csv and failures.csv.
    Interrupted and called again, it goes on. A case that cannot be read does not stop the others. ConfigError where
    options contradict each other or the files.

    predictions: folder of probability maps, or one file; whatever `evaluate` reads.
    labels: folder of label maps, or one file.
    out: folder for the results, outside of the others.
    rules: what a lesion is, and when a predicted one is real: see `segcal.lesions.components.Rules`.
    classes: names of the classes to look at; all but the background if none is given.
    bins: of the confidence; 5 below 100 predicted lesions, 10 below 1,000, else 20, if not given.
    options: how to read the predictions.
    calibrator: file of a calibrator that predictions go through first.
    patients: which cases belong together, as in `compare`.
    level, resamples, seed: of the bootstrap intervals.
    workers: processes, each with one case at a time.
    executor: looks at cases elsewhere, in place of the workers, as `segcal.adapters.dask.DaskCluster`.
    progress: is called with the number of cases that are done, and of all.

    >>> import tempfile, numpy as np
    >>> folder = Path(tempfile.mkdtemp())
    >>> (folder / "maps").mkdir(), (folder / "labels").mkdir()
    (None, None)
    >>> lesion = np.zeros((8, 8, 8), np.float32)
    >>> lesion[1:3, 1:3, 1:3], lesion[5:7, 5:7, 5:7] = 0.9, 0.6  # two predicted lesions
    >>> np.save(folder / "maps" / "case_1.npy", np.stack([1 - lesion, lesion]))  # class, x, y, z
    >>> np.save(folder / "labels" / "case_1.npy", (lesion > 0.8).astype(np.uint8))  # one of them is real
    >>> found = evaluate_lesions(folder / "maps", folder / "labels", folder / "lesions")
    >>> found.summary.find("class 1", "sensitivity").value, found.summary.find("class 1", "precision").value
    (1.0, 0.5)
    """
    rules = rules or Rules()
    pool = Pool(workers, preload="segcal.lesions.case")
    out = Path(out)
    for source, what in ((labels, "labels"), (predictions, "predictions")):
        stay_outside(out, Path(source), what)
    meant, pairing = open_cohort(predictions, labels, options or ReadOptions(), bins=20, calibrator=calibrator)
    folders = {"predictions": text_path(predictions), "labels": text_path(labels)}
    asked = _Asked(bins, patients, level, resamples, seed)
    _check(pairing, meant, classes, asked)
    with open_parts(out) as parts:
        told = [asdict(rules), list(classes)]
        paths = {
            files.name: (parts / f"{key_of(__version__, case_key(files, meant), told)}.json").absolute()
            for files in pairing.cases
        }
        waiting = [files for files in pairing.cases if _read_part(paths[files.name]) is None]
        jobs = [
            Job(
                files.name,
                _find_in_files,
                (files if executor is None else files.absolute(), meant, rules, tuple(classes), paths[files.name]),
            )
            for files in waiting
        ]
        failures = do_all(jobs, executor or pool, total=len(pairing.cases), progress=progress)
        failed = {failure.case for failure in failures}
        names = [files.name for files in pairing.cases if files.name not in failed]
        found = {name: part for name in names if (part := _read_part(paths[name])) is not None}
        summary = _summary(found, rules, asked) if found else None
        lesions = [lesion for own, _ in found.values() for lesion in own]
        outcome = LesionOutcome(lesions, summary, sorted(failures), pairing)
        write_lesions(outcome, out, {"version": __version__, "folders": folders, "options": asdict(meant)})
        keep_only(parts, [paths[name] for name in names])
    return outcome


def _check(
    pairing: Pairing,
    options: Options,
    classes: Sequence[str],
    asked: _Asked,
) -> None:
    """Refuse what cannot be meant, before there is work to lose."""
    from segcal.binning import MOST_BINS
    from segcal.errors import SegcalError, check_seed
    from segcal.evaluation.intervals import MOST_RESAMPLES, patients_of

    if asked.bins is not None:
        check_integer("bins", asked.bins, most=MOST_BINS)
    check_integer("resamples", asked.resamples, most=MOST_RESAMPLES)
    if asked.patients is not None:
        patients_of([files.name for files in pairing.cases], asked.patients)
    if not 0 < asked.level < 1:
        raise ConfigError(f"level must lie between 0 and 1, as 0.95; got {asked.level}.")
    check_seed(asked.seed)
    for files in pairing.cases if classes else ():
        try:
            channels = count_channels(files)
        except (SegcalError, OSError):
            continue  # whoever reads it says why
        chosen_classes(foreground_names(channels, options), classes)
        return


def _find_in_files(files: CaseFiles, options: Options, rules: Rules, classes: tuple[str, ...], path: Path) -> None:
    """Write the lesions of a case to a file."""
    with unchanged(files.all):
        found = find_lesions(files, options, rules, classes)
    content = {"format": _FORMAT, "classes": found.classes, "lesions": [lesion[1:] for lesion in found.lesions]}
    write_whole(path, json.dumps(content | {"case": files.name}).encode())


def _read_part(path: Path) -> tuple[list[Lesion], tuple[str, ...]] | None:
    """The lesions of a case, and the classes that were looked at; None where they are not there."""
    try:
        content: dict[str, Any] = parse_json(path.read_text(encoding="utf-8"))
        if content["format"] != _FORMAT:
            return None
        return [Lesion(content["case"], *row) for row in content["lesions"]], tuple(content["classes"])
    except (OSError, ValueError, LookupError, TypeError):
        return None


def _summary(found: dict[str, tuple[list[Lesion], tuple[str, ...]]], rules: Rules, asked: _Asked) -> LesionSummary:
    """The numbers of all cases, from the lesions and the classes of each."""
    from segcal.evaluation.intervals import patients_of
    from segcal.kernels.threads import one_torch_thread
    from segcal.lesions.numbers import bins_for, froc, lesion_reliability, lesions_of_class, summarize

    lesions = [lesion for own, _ in found.values() for lesion in own]
    names = tuple(dict.fromkeys(name for _, own in found.values() for name in own))
    cases = tuple(found)
    who = patients_of(cases, asked.patients)
    numbers, curves, diagrams = [], {}, {}
    predicted = [lesion.class_name for lesion in lesions if lesion.kind == "predicted"]
    bins = asked.bins or bins_for(max((predicted.count(name) for name in names), default=0))
    with one_torch_thread():
        for name in names:
            own = lesions_of_class(lesions, cases, name)
            numbers += summarize(own, who, bins=bins, level=asked.level, resamples=asked.resamples, seed=asked.seed)
            curves[name] = froc(own)
            diagrams[name] = lesion_reliability(own, who, bins=bins, level=asked.level, seed=asked.seed)
    return LesionSummary(rules, names, len(cases), len(set(who)), bins, asked.level, tuple(numbers), curves, diagrams)
