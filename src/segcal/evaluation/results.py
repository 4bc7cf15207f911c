"""The sums of cases put together as an evaluation, and written as files."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

import segcal
from segcal._io.files import Ledger, WriteError, csv_text, locked, make_folder, replacing, write_whole
from segcal.errors import ConfigError, SegcalError
from segcal.evaluation.doubts import MEANINGS, OF_GRIDS
from segcal.evaluation.measure import CaseSums, Options
from segcal.volumes import Pairing

if TYPE_CHECKING:
    from segcal.evaluation.evaluation import Evaluation


PARTS = ".parts"
RESULTS = ("evaluation.npz", "evaluation.json", "cases.csv", "summary.csv", "summary.json", "failures.csv")


@contextmanager
def open_parts(out: Path) -> Iterator[Path]:
    """The folder of single cases' sums in `out`, held so that no other process writes there."""
    parts = out / PARTS
    make_folder(out)
    make_folder(parts)
    with locked(parts / ".lock", out):
        yield parts


def keep_only(parts: Path, wanted: Iterable[Path]) -> None:
    """Remove what is left of other options, other files, or a process that was killed."""
    keep = {path.name for path in wanted}
    for path in parts.iterdir():
        if path.name not in keep:
            path.unlink(missing_ok=True)


class Failure(NamedTuple):
    """A case that could not be measured: its name, the kind of error, and a sentence."""

    case: str
    kind: str
    message: str


def crashed(case: str) -> Failure:
    """What is said of a case whose process died."""
    return Failure(case, "CrashError", "the process that read this case died; it may need more memory than there is.")


class Note(NamedTuple):
    """Something to know of some of the cases: what kind of thing, a sentence, and their names."""

    kind: str
    message: str
    cases: tuple[str, ...]


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


class Outcome(NamedTuple):
    """What was evaluated (None: not a single case), what failed, which files had no partner, and what to know of it."""

    evaluation: Evaluation | None
    failures: list[Failure]
    pairing: Pairing
    notes: tuple[Note, ...] = ()


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


class Maps(NamedTuple):
    """Maps that are there, and cases that failed."""

    paths: list[Path]
    failures: list[Failure]


class MapJob(NamedTuple):
    """The maps of one case: another key than last time, and they are made again."""

    name: str
    key: str
    targets: list[Path]
    make: Callable[[], None]


def make_maps(
    out: Path,
    ledger: str,
    jobs: Sequence[MapJob],
    progress: Callable[[int, int, str], None],
    *,
    begin: Callable[[], None] = lambda: None,
) -> Maps:
    """Make what is not in `out` yet, and remember the keys there; a case that fails does not stop the others.

    `begin` writes what belongs to all maps, once nobody else can write there.
    """
    make_folder(out)
    found = Maps([], [])
    with locked(out / ".lock", out):
        begin()
        done = Ledger(out / ledger)
        for job in jobs:  # maps of other weights or files go first, lest some of them stay among the new
            if done.get(job.name) not in (None, job.key):
                for path in job.targets:
                    path.unlink(missing_ok=True)
        for i, job in enumerate(jobs):
            try:
                if not (all(path.exists() for path in job.targets) and done.get(job.name) == job.key):
                    job.make()
                    done.set(job.name, job.key)
                found.paths.extend(job.targets)
            except WriteError:  # it would be the same for every case
                raise
            except (SegcalError, OSError, MemoryError) as error:
                found.failures.append(Failure(job.name, type(error).__name__, str(error)))
            progress(i + 1, len(jobs), job.name)
    return found


def stack_cases(
    names: Sequence[str], load: Callable[[str], tuple[CaseSums, dict[str, Any]]], options: Options
) -> Evaluation:
    """The cases of these names, loaded one at a time, so that a cohort's fine bins are held once."""
    import torch

    from segcal.binning import Binning
    from segcal.evaluation.evaluation import Evaluation
    from segcal.scores import OverlapCounts, ScoreSums
    from segcal.statistics import BinStatistics

    stamps, columns = {}, {}
    for i, name in enumerate(names):
        sums, stamps[name] = load(name)
        for field in fields(sums):
            array = getattr(sums, field.name)
            if i == 0:
                columns[field.name] = np.empty((len(array), len(names), *array.shape[1:]))
            columns[field.name][:, i] = array
    versions = {"segcal": segcal.__version__, "torch": torch.__version__, "numpy": np.__version__}
    exclusive = columns["top_label"].size > 0

    def stack(name: str) -> list[torch.Tensor]:
        return list(torch.from_numpy(columns[name]).unbind())

    binning = Binning(options.fine_bins)
    count, confidence_sum, label_sum = stack("bins")
    top = [part[:, None] for part in stack("top_label")]
    return Evaluation(
        BinStatistics(count, confidence_sum, label_sum, binning),
        OverlapCounts(*stack("overlap")),
        ScoreSums(*stack("scores")),
        BinStatistics(top[0], top[1], top[2], binning) if exclusive else None,
        joint=ScoreSums(*stack("joint")),
        label_counts=stack("labels")[0] if columns["labels"].size else None,
        cases=tuple(names),
        classes=class_names(count.shape[1], options),
        has_background=exclusive,
        bins=options.bins,
        provenance={"versions": versions, "options": asdict(options), "files": stamps},
    )


def class_names(number: int, options: Options) -> tuple[str, ...]:
    """Of the regions, or of so many classes; those without a name are numbered."""
    if options.regions is not None:
        return tuple(options.regions.members)
    names = dict(options.class_names or ())
    labels = options.values or tuple(range(max(number, 2)))
    surplus = [name for value, name in names.items() if value not in labels]
    if surplus:
        raise ConfigError(f"class names must be those of {number} classes; {surplus[0]!r} is of none of them.")
    return tuple(names.get(value, f"class {value}") for value in (labels[1:] if number == 1 else labels))


def write_results(outcome: Outcome, options: Options, out: Path) -> None:
    """Write cases.csv, summary.csv, summary.json, evaluation.npz (with .json) and failures.csv.

    They replace those of the last time. Where no case could be measured, failures.csv alone is there.
    """
    with replacing(out, RESULTS) as new:
        _write_csv(new / "failures.csv", Failure._fields, outcome.failures)
        if outcome.evaluation is not None:
            _write_numbers(outcome.evaluation, outcome, options, new)


def _write_numbers(evaluation: Evaluation, outcome: Outcome, options: Options, out: Path) -> None:
    evaluation.save(out / "evaluation.npz")
    shown = evaluation if options.background else evaluation.foreground()
    _write_csv(out / "cases.csv", ("case", "scope", "class", "metric", "value"), _tidy(shown))
    summary = shown.summary()
    fields = ("cases", "average", "scope", "class", "metric", "value", "std", "number")
    _write_csv(out / "summary.csv", fields, summary)
    content = {
        "cases": len(shown.cases),
        "complete_cases": len(shown.complete().cases),
        "failed": len(outcome.failures),
        "unpaired_predictions": outcome.pairing.unpaired_predictions,
        "unpaired_labels": outcome.pairing.unpaired_labels,
        "notes": as_plain(outcome.notes),
        "bins": options.bins,
        "classes": shown.classes,
        "summary": [
            {name: None if isinstance(x, float) and math.isnan(x) else x for name, x in zip(fields, row, strict=True)}
            for row in summary
        ],
    }
    write_whole(out / "summary.json", json.dumps(content, indent=2, ensure_ascii=False).encode())


def _tidy(evaluation: Evaluation) -> Iterator[tuple[str, str, str, str, float]]:
    from segcal.evaluation.evaluation import scope_of

    metrics = {name: values.tolist() for name, values in evaluation.case_metrics().items()}
    whole = evaluation.joint_scores() | evaluation.top_label_errors()
    of_all = {name: values.tolist() for name, values in whole.items()}
    for i, case in enumerate(evaluation.cases):
        for j, name in enumerate(evaluation.classes):
            for metric, values in metrics.items():
                yield case, "class", name, metric, values[i][j]
        for metric, values in of_all.items():
            yield case, scope_of(None, metric), "", metric, values[i]


def _write_csv(path: Path, fields: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    write_whole(path, csv_text(fields, rows).encode())
