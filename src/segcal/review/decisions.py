"""The decisions of a review, as a CSV file that is whole at every moment.

Every change is in the file, by a new one that takes the old one's place, before anybody is told that it is saved. Each
decision has a revision, a number that grows with every change. Who changes a decision says which revision they have
seen; if it is not the last one, somebody else has decided meanwhile, and nothing is written. One process at a time
holds the file (a lock beside it); the browsers of that process are as many as one likes. Whoever edits the file by hand
meanwhile is somebody else, too: their rows are read before the next change is written, and none is lost.

A spreadsheet takes a cell for a formula that begins with a sign such as `=`, and some split lines at semicolons. So a
quote is put before such a sign, wherever a cell could begin; `read_decisions` takes it away again, exactly.
"""

from __future__ import annotations

import csv
import io
import os
import re
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from segcal._io.files import HeldError, locked, make_folder, reject_pipe, write_whole
from segcal._io.jobs import stamp
from segcal.errors import ConfigError, FileError

COLUMNS = ("case", "decision", "comment", "reviewer", "time")
ACCEPT, REJECT, OPEN = "accept", "reject", ""
DECISIONS = (ACCEPT, REJECT, OPEN)
LONGEST_COMMENT, LONGEST_REVIEWER = 10_000, 200
_FORMULA = "=+\\-@\uff1d\uff0b\uff0d\uff20"  # the last four are the wide ones of East Asian keyboards
_STARTS = '(^|[,;|"\\t\\n\\r])'  # where some program or other begins a cell
_HIDE = re.compile(f"{_STARTS}(?=['{_FORMULA}])")
_SHOW = re.compile(f"{_STARTS}'(?=['{_FORMULA}])")


@dataclass(frozen=True)
class ReviewDecision:
    """What was decided of a case.

    case: its name.
    decision: "accept", "reject", or "" where there is a comment alone.
    comment, reviewer: as they were typed; "" where there is none.
    time: of the last change, in UTC, as 2026-01-31T12:00:00.000Z.

    >>> ReviewDecision("case_1", "reject", comment="misses the apex").decision
    'reject'
    """

    case: str
    decision: str
    comment: str = ""
    reviewer: str = ""
    time: str = ""

    @property
    def is_empty(self) -> bool:
        """Whether nothing was said of the case: it needs no row."""
        return self.decision == OPEN and not self.comment


class ConflictError(ConfigError):
    """Somebody else has decided on the case meanwhile."""


def read_decisions(path: str | os.PathLike[str]) -> list[ReviewDecision]:
    """The decisions in a file that `segcal review` wrote, in its order; none where there is no file.

    Texts are those that were typed: the quote that keeps spreadsheets from taking them for formulas is gone. FileError
    where the file is something else.

    path: of the file, as results/decisions.csv.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     file = Path(folder, "decisions.csv")
    ...     _ = file.write_text("case,decision,comment,reviewer,time\\ncase_1,accept,'=fine,,2026-01-31T12:00:00Z\\n")
    ...     read_decisions(file)[0].comment
    '=fine'
    """
    path = Path(path)
    reject_pipe(path)
    try:
        text = path.read_bytes().decode().removeprefix("\ufeff")
    except FileNotFoundError:
        return []
    except (OSError, UnicodeDecodeError) as error:
        raise FileError(
            f"{path} must be a file of decisions, in UTF-8; {error}. Correct or remove the file."
        ) from error
    return list(_decisions(path, text))


def _decisions(path: Path, text: str) -> Iterator[ReviewDecision]:
    rows = csv.reader(io.StringIO(text, newline=""), strict=True)
    seen: set[str] = set()
    try:
        header = next(rows, None)
        if header is None or tuple(header) != COLUMNS:
            raise FileError(
                f"{path} must have the columns {', '.join(COLUMNS)}, as `segcal review` writes them; it has "
                f"{', '.join(header or ['none'])}. Move it, or give another file with --decisions."
            )
        for row in rows:
            where = f"{path}, line {rows.line_num}"
            if len(row) != len(COLUMNS):
                raise FileError(f"{where} must have {len(COLUMNS)} cells; it has {len(row)}. Correct the line.")
            found = ReviewDecision(*map(_shown, row))
            if found.decision not in DECISIONS:
                raise FileError(
                    f"{where}: the decision must be accept, reject or empty; got {found.decision!r}. Correct the line."
                )
            if found.case in seen:
                raise FileError(f"{where}: a case must have one row; {found.case!r} has another one above. Remove one.")
            seen.add(found.case)
            yield found
    except csv.Error as error:
        raise FileError(
            f"{path}, line {rows.line_num} must be a line of a CSV file; {error}. Correct the line."
        ) from error


def decisions_text(decisions: Iterable[ReviewDecision]) -> str:
    """As the file has them: every cell in quotes, and no cell a formula.

    >>> print(decisions_text([ReviewDecision("case_1", "reject", comment="=1+1")]), end="")
    "case","decision","comment","reviewer","time"
    "case_1","reject","'=1+1","",""
    """
    content = io.StringIO(newline="")
    writer = csv.writer(content, lineterminator="\n", quoting=csv.QUOTE_ALL)
    writer.writerow(COLUMNS)
    writer.writerows([_hidden(getattr(each, name)) for name in COLUMNS] for each in decisions)
    return content.getvalue()


def _hidden(text: str) -> str:
    return _HIDE.sub(r"\1'", text)


def _shown(text: str) -> str:
    return _SHOW.sub(r"\1", text)


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


class Decisions:
    """A file of decisions that this process holds: ask it, and change it from as many threads as you like."""

    def __init__(self, path: Path, clock: Callable[[], str] = now) -> None:
        self.path, self._clock = path, clock
        self._mutex = threading.Lock()
        self._rows: dict[str, tuple[int, ReviewDecision]] = {}
        self._revision = 0
        self._stamp: object = None
        self._refresh()

    @classmethod
    @contextmanager
    def held(cls, path: Path) -> Iterator[Decisions]:
        """The file, held by this process alone; ConfigError where another one holds it."""
        if path.is_dir():
            raise FileError(f"--decisions must be a file, as decisions.csv; {path} is a folder. Give a file name.")
        make_folder(path.parent)
        try:
            lock = locked(path.with_name(f".{path.name}.lock"), path.parent)
            with lock:
                yield cls(path)
        except HeldError:
            raise ConfigError(
                f"{path} must be written by one review at a time; another one is running. Open its address in a second "
                "browser, end it, or give another file with --decisions."
            ) from None

    def after(self, revision: int) -> tuple[int, dict[str, tuple[int, ReviewDecision]]]:
        """The last revision, and by case what has changed after the given one: its revision and the decision."""
        with self._mutex:
            self._refresh()
            return self._revision, {case: found for case, found in self._rows.items() if found[0] > revision}

    def decide(self, decision: ReviewDecision, *, seen: int) -> tuple[int, ReviewDecision]:
        """Write a decision, and give its revision and what is in the file now, with the time.

        `seen` is the revision of the case's decision that the change was made from, 0 where there was none.
        ConflictError where it is not the last; WriteError where the file cannot be written: then nothing has changed.
        """
        _check(decision)
        with self._mutex:
            self._refresh()
            last, there = self._rows.get(decision.case, (0, None))
            if last != seen:
                raise ConflictError(f"{decision.case}: somebody else has decided meanwhile; look at it first.")
            if there is not None and replace(decision, time=there.time) == there:
                return last, there
            made = replace(decision, time=self._clock())
            rows = {**self._rows, decision.case: (self._revision + 1, made)}
            self._write(row for _, row in rows.values())
            self._rows, self._revision = rows, self._revision + 1
            return self._revision, made

    def _write(self, decisions: Iterable[ReviewDecision]) -> None:
        text = decisions_text(each for each in decisions if not each.is_empty)
        write_whole(self.path, text.encode())
        self._stamp = stamp(self.path)

    def _refresh(self) -> None:
        """Read the file if it is not the one that was written here; rows that differ get a new revision."""
        found = stamp(self.path)
        if found == self._stamp:
            return
        rows = {each.case: each for each in read_decisions(self.path)}
        for case, (_, there) in list(self._rows.items()):
            rows.setdefault(case, replace(there, decision=OPEN, comment=""))  # gone from the file
        for case, row in rows.items():
            if case not in self._rows or self._rows[case][1] != row:
                self._revision += 1
                self._rows[case] = self._revision, row
        self._stamp = found


def _check(decision: ReviewDecision) -> None:
    """ConfigError where a decision could not be written and read again."""
    if decision.decision not in DECISIONS:
        raise ConfigError(f"a decision must be accept, reject or empty; got {decision.decision!r}.")
    for what, text, most in (
        ("a comment", decision.comment, LONGEST_COMMENT),
        ("the reviewer", decision.reviewer, LONGEST_REVIEWER),
    ):
        if len(text) > most:
            raise ConfigError(f"{what} must have at most {most} signs; it has {len(text)}.")
        if "\0" in text or any("\ud800" <= sign <= "\udfff" for sign in text):
            raise ConfigError(f"{what} must be text; it holds a sign that no file takes.")
