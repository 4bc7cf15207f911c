"""The queue as files: a table, JSON, and one HTML page that needs nothing else."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

from segcal import __version__
from segcal._io.files import csv_text, make_folder, replacing, write_whole
from segcal._io.words import counted
from segcal.evaluation.outcome import as_plain
from segcal.quality.queue import NO_GUARANTEE, Queue, Row
from segcal.report.rendering import render_page

FILES = ("queue.csv", "queue.json", "queue.html")
COLUMNS = tuple("class" if name == "class_name" else name for name in Row._fields)


class ShownCase(NamedTuple):
    """A case of the page, with a row for each class."""

    rank: int
    name: str
    rows: list[Row]
    flags: list[str]


def write_queue(queue: Queue, out: Path, *, statistics: bool = False) -> None:
    """Write queue.csv, queue.json and queue.html, in the place of those that are there; if asked, statistics/*.json."""
    with replacing(out, FILES) as new:
        rows = [[_empty(value) for value in row] for row in queue.rows]
        write_whole(new / "queue.csv", csv_text(COLUMNS, rows).encode())
        write_whole(new / "queue.json", json.dumps(_content(queue), indent=2, ensure_ascii=False).encode())
        write_whole(new / "queue.html", queue_page(queue).encode())
    if statistics:
        folder = out / "statistics"
        make_folder(folder)
        for case in shown_cases(queue):
            content = {row.class_name: _statistics(row) for row in case.rows}
            write_whole(folder / f"{case.name}.json", json.dumps(content, indent=2, ensure_ascii=False).encode())


def _empty(value: object) -> object:
    return "" if isinstance(value, float) and math.isnan(value) else value


def _null(value: object) -> object:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _statistics(row: Row) -> dict[str, Any]:
    """As TotalSegmentator has them: the volume in mm3; and what is promised."""
    told = {
        "volume": row.volume_ml * 1000,
        "volume_low": row.volume_low_ml * 1000,
        "volume_high": row.volume_high_ml * 1000,
        "dice": row.predicted_dice,
        "dice_low": row.dice_low,
        "dice_high": row.dice_high,
    }
    return {name: _null(value) for name, value in told.items()} | {"flags": _flags(row)}


def _flags(row: Row) -> list[str]:
    return row.flags.split("; ") if row.flags else []


def _content(queue: Queue) -> dict[str, Any]:
    """As JSON has it; NaN is null."""
    return {
        "segcal": __version__,
        "level": queue.level,
        "guaranteed": not queue.shifted,
        "shift": [*queue.shifted, *([NO_GUARANTEE] if queue.shifted else [])],
        "cohort": [
            {name.replace("_name", ""): _null(value) for name, value in each._asdict().items()} for each in queue.cohort
        ],
        "failures": [failure._asdict() for failure in queue.failures],
        "notes": as_plain(queue.notes),
        "provenance": dict(queue.provenance),
        "queue": [
            {name: _null(value) for name, value in zip(COLUMNS, row, strict=True)} | {"flags": _flags(row)}
            for row in queue.rows
        ],
    }


def shown_cases(queue: Queue) -> Iterator[ShownCase]:
    """In the order of the queue."""
    for rank, rows in groupby(queue.rows, key=lambda row: row.rank):
        each = list(rows)
        flags = list(dict.fromkeys(flag for row in each for flag in _flags(row)))
        yield ShownCase(rank, each[0].case, each, flags)


def queue_page(queue: Queue) -> str:
    """The page. Names of cases and classes are escaped by Jinja."""
    cases = list(shown_cases(queue))
    return render_page(
        "queue.html.j2",
        title="Review queue",
        queue=queue,
        cases=cases,
        number_of_cases=counted(len(cases), "case"),
        flagged=sum(bool(case.flags) for case in cases),
        no_guarantee=NO_GUARANTEE,
        sized=any(not math.isnan(row.volume_ml) for row in queue.rows),
    )
