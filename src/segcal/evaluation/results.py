"""The sums of cases put together as an evaluation, and written as files."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

import segcal
from segcal._io.files import replacing, write_csv, write_whole
from segcal._io.jobs import Failure
from segcal.errors import ConfigError
from segcal.evaluation.agreement import agreement_content
from segcal.evaluation.facets import facet_files, remove_facets
from segcal.evaluation.options import Options
from segcal.evaluation.outcome import Outcome, as_plain
from segcal.evaluation.sums import CaseSums
from segcal.volumes import Pairing

if TYPE_CHECKING:
    from segcal._io.spool import Piece
    from segcal.evaluation.evaluation import Evaluation

PACKED = ("bins", "top_label")  # of a case's sums, those in fine bins
RESULTS = (
    "evaluation.npz",
    "evaluation.json",
    "cases.csv",
    "summary.csv",
    "summary.json",
    "failures.csv",
    "raters.csv",
    "raters_summary.csv",
    "group_summary.csv",
    "group_gaps.csv",
)


def stack_cases(
    names: Sequence[str], load: Callable[[str], tuple[CaseSums, dict[str, Any]]], options: Options
) -> Evaluation:
    """The cases of these names, loaded one at a time; their fine bins are kept packed."""
    import torch

    from segcal._io.spool import Spool
    from segcal.binning import Binning
    from segcal.decisions import DecisionSums
    from segcal.evaluation.evaluation import Evaluation
    from segcal.evaluation.fine import FineStatistics
    from segcal.scores import OverlapCounts, ScoreSums

    stamps, columns = {}, {}
    spools = {name: Spool() for name in PACKED}
    pieces: dict[str, list[Piece]] = {name: [] for name in PACKED}
    classes, exclusive = 0, False
    for i, name in enumerate(names):
        sums, stamps[name] = load(name)
        classes, exclusive = sums.bins.shape[1], sums.top_label.size > 0
        for kind, content in sums.packed().items():
            pieces[kind].append(spools[kind].add(content))
        for field in fields(sums):
            array = getattr(sums, field.name)
            if field.name not in PACKED:
                if i == 0:
                    columns[field.name] = np.empty((len(array), len(names), *array.shape[1:]))
                columns[field.name][:, i] = array
    versions = {"segcal": segcal.__version__, "torch": torch.__version__, "numpy": np.__version__}

    def stack(name: str) -> list[torch.Tensor]:
        return list(torch.from_numpy(columns[name]).unbind())

    binning = Binning(options.fine_bins)
    decided, largest = stack("decided")
    return Evaluation(
        FineStatistics.packed(pieces["bins"], classes, binning),
        OverlapCounts(*stack("overlap")),
        ScoreSums(*stack("scores")),
        FineStatistics.packed(pieces["top_label"], 1, binning) if exclusive else None,
        joint=ScoreSums(*stack("joint")),
        decisions=DecisionSums(decided, largest, stack("voxel_ml")[0].expand_as(decided).clone()),
        label_counts=stack("labels")[0] if columns["labels"].size else None,
        cases=tuple(names),
        classes=class_names(classes, options),
        has_background=exclusive,
        bins=options.bins,
        provenance={"versions": versions, "options": asdict(options), "files": stamps},
    )


def stack_facets(parts: Mapping[str, Path], options: Options) -> dict[str, Evaluation]:
    """The facets of all cases, each an evaluation of the cases that have it.

    parts: By case, the file of its sums.
    """
    files: dict[str, dict[str, Path]] = {}
    for case, path in parts.items():
        for name, file in facet_files(path).items():
            files.setdefault(name, {})[case] = file
    return {
        name: stack_cases(list(own), lambda case, own=own: CaseSums.load(own[case]), options)  # type: ignore[misc]
        for name, own in sorted(files.items())
    }


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

    They replace those of the last time. Where no case could be measured, failures.csv alone is there. Facets go to
    folders of their names; what their raters tell goes to raters.csv and raters_summary.csv.
    """
    remove_facets(out, outcome.facets)
    for name, facet in outcome.facets.items():
        with replacing(out / name, RESULTS) as new:
            _write_numbers(facet, Outcome(facet, [], Pairing(())), options, new)
    with replacing(out, RESULTS) as new:
        write_csv(new / "failures.csv", Failure._fields, outcome.failures)
        if outcome.measured is not None:
            if any(name.startswith("raters/") for name in outcome.facets):
                _write_raters(outcome, options, new)
            _write_numbers(outcome.measured, outcome, options, new)


def _write_raters(outcome: Outcome, options: Options, out: Path) -> None:
    from segcal.evaluation.raters import RaterNumber, RaterRow, numbers_of_raters, summarize_raters, told

    evaluation = outcome.evaluation
    shown = evaluation.classes if options.background else evaluation.foreground().classes
    found, pooled = numbers_of_raters(outcome)
    rows = [row for row in found if row.label in shown]
    summary = [*summarize_raters(rows), *(row for row in pooled if row.label in shown)]
    write_csv(out / "raters.csv", ("case", "class", *RaterNumber._fields[2:]), rows)
    write_csv(out / "raters_summary.csv", ("class", *RaterRow._fields[1:]), summary)
    evaluation.provenance["raters"] = told(summary)  # the report shows it


def _write_numbers(evaluation: Evaluation, outcome: Outcome, options: Options, out: Path) -> None:
    evaluation.save(out / "evaluation.npz")
    shown = evaluation if options.background else evaluation.foreground()
    write_csv(out / "cases.csv", ("case", "scope", "class", "metric", "value"), _tidy(shown))
    summary = shown.summary(background=options.background)
    fields = ("cases", "average", "scope", "class", "metric", "value", "std", "number")
    write_csv(out / "summary.csv", fields, summary)
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
        "decisions": agreement_content(shown),
    }
    write_whole(out / "summary.json", json.dumps(content, indent=2, ensure_ascii=False).encode())


def _tidy(evaluation: Evaluation) -> Iterator[tuple[str, str, str, str, float]]:
    from segcal.evaluation.columns import scope_of

    by_class = evaluation.case_metrics() | evaluation.decision_metrics()
    whole = evaluation.joint_scores() | evaluation.top_label_errors()
    scopes = [scope_of(None, metric) for metric in whole]
    for i, case in enumerate(evaluation.cases):  # as numbers of Python one case at a time: they take more room
        columns = [values[i].tolist() for values in by_class.values()]
        for name, row in zip(evaluation.classes, zip(*columns, strict=True), strict=True):
            for metric, value in zip(by_class, row, strict=True):
                yield case, "class", name, metric, value
        for scope, (metric, values) in zip(scopes, whole.items(), strict=True):
            yield case, scope, "", metric, values[i].item()
