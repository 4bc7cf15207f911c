"""Promises on cases without labels: `segcal quality apply`."""

from __future__ import annotations

import os
from dataclasses import asdict, replace
from pathlib import Path

from segcal import __version__
from segcal._io.files import stay_outside, text_path
from segcal._io.jobs import Executor, Pool, keep_only, key_of, open_parts, stamp, threads_of
from segcal.errors import ConfigError
from segcal.evaluation.cohort import CaseJob, Progress, measure_parts
from segcal.evaluation.unlabelled import measure_to
from segcal.quality.fitting import Quality, load_quality
from segcal.quality.page import write_queue
from segcal.quality.queue import Queue, make_queue
from segcal.volumes import find_predictions


def apply_quality(
    quality: str | os.PathLike[str] | Quality,
    predictions: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    calibrator: str | os.PathLike[str] | None = None,
    patients: str | None = None,
    statistics: bool = False,
    workers: int = 1,
    executor: Executor | None = None,
    progress: Progress = lambda done, total: None,
) -> Queue:
    """Predict Dice and volumes of cases without labels, with intervals, and rank the cases for review.

    Writes queue.csv, queue.json and queue.html. Predictions are read as those were that the quality file was learned
    from. A case that cannot be read is a failure with a sentence; it does not stop the others. Interrupted and called
    again, it goes on. ConfigError where the predictions have other classes, or another calibrator was learned with.

    quality: what `fit_quality` learned, or its file.
    predictions: folder of probability maps, or one file, as `evaluate` takes them.
    out: folder for the results, outside of the predictions.
    calibrator: file of the calibrator that was used for learning, where it is no longer in its place.
    patients: which cases are one patient's, as `compare` takes it.
    statistics: also write statistics/CASE.json with the volume in mm3 and the promises of each class.
    workers: processes, each with one case at a time.
    executor: measures cases elsewhere, in place of the workers, as `segcal.adapters.dask.DaskCluster`.
    progress: called with the number of cases that are done, and of all.

    >>> import tempfile, numpy as np
    >>> from segcal import evaluate, fit_quality
    >>> folder, draw = Path(tempfile.mkdtemp()), np.random.default_rng(0)
    >>> (folder / "maps").mkdir(), (folder / "labels").mkdir()
    (None, None)
    >>> for case in range(12):
    ...     foreground = draw.random((8, 8, 8), np.float32)
    ...     np.save(folder / "maps" / f"case_{case}.npy", np.stack([1 - foreground, foreground]))
    ...     np.save(folder / "labels" / f"case_{case}.npy", (draw.random((8, 8, 8)) < foreground).astype(np.uint8))
    >>> quality = fit_quality(evaluate(folder / "maps", folder / "labels", folder / "results").evaluation)
    >>> queue = apply_quality(quality, folder / "maps" / "case_0.npy", folder / "queue")
    >>> [row.case for row in queue.rows], sorted(path.name for path in (folder / "queue").glob("*.*"))
    (['case_0'], ['.parts', 'queue.csv', 'queue.html', 'queue.json'])
    """
    learned = quality if isinstance(quality, Quality) else load_quality(quality)
    source, out = Path(predictions), Path(out)
    stay_outside(out, source, "predictions")
    folders = {"predictions": text_path(source)}
    options = learned.reading(calibrator)
    threads = threads_of(workers) if executor is None else 1
    cases = [
        CaseJob(
            files.name,
            key_of(
                __version__, files.name, [stamp(path) for path in files.all], asdict(replace(options, calibrator=None))
            ),
            measure_to,  # where no torch is, which workers need not wait for
            (files if executor is None else files.absolute(), options, threads),
        )
        for files in find_predictions(source)
    ]
    with open_parts(out) as parts:
        outcome, kept = measure_parts(cases, options, parts, executor=executor or Pool(workers), progress=progress)
        found = outcome.evaluation.foreground()
        if found.classes != learned.classes:
            raise ConfigError(
                f"predictions must have the classes {', '.join(learned.classes)} that the quality file was learned "
                f"for; they have {', '.join(found.classes)}."
            )
        queue = replace(
            make_queue(learned, found, patients=patients),
            failures=tuple(outcome.failures),
            notes=outcome.notes,
            provenance={"folders": folders, "options": asdict(options)},
        )
        write_queue(queue, out, statistics=statistics)
        keep_only(parts, kept)
    return queue
