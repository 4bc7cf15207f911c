"""Which cases are for training, validation and test: by patient, the same for the same seed everywhere.

As text, one line for each case or patient; blank lines and comments are allowed:

    # ACDC, seed 0
    train patient001_frame01
    test patient002
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path

from segcal._io.files import reject_pipe, write_whole
from segcal.datasets.dataset import Dataset
from segcal.errors import ConfigError, check_seed

SIDES = ("train", "validation", "test")


@dataclass(frozen=True)
class Split:
    """Names of the cases on each side, sorted."""

    train: tuple[str, ...]
    validation: tuple[str, ...]
    test: tuple[str, ...]
    note: str = field(default="", compare=False)
    """What a reader of the results must know: why it is not the paper's split, or which cases are left out."""


def make_split(dataset: Dataset, *, seed: int = 0, file: str | os.PathLike[str] | None = None) -> Split:
    """The split in the file, if one is given; otherwise the paper's, drawn by patient from the seed.

    Where there are fewer patients than the paper had, its numbers are scaled, at least one patient on each side. A
    patient's place in the draw depends on seed and name alone, not on the other patients.
    """
    if file is not None:
        return read_split(file, dataset)
    check_seed(seed)
    official = set(dataset.official_test)
    held_out = {case.patient for case in dataset.cases if case.name in official}
    patients = sorted(set(dataset.patients) - held_out, key=lambda patient: (_draw(seed, patient), patient))
    train, validation, test = dataset.shares
    if held_out:
        test = 0
    total = train + validation + test
    tests, validations = (_part(len(patients), share, total) for share in (test, validation))
    if len(patients) <= tests + validations:
        needed = 1 + bool(validations) + bool(tests)
        raise ConfigError(
            f"{dataset.root} must have at least {needed} labeled patients to divide; it has {len(patients)}. "
            f"Give a split file that uses them as you wish."
        )
    return Split(
        train=_cases_of(dataset, patients[tests + validations :]),
        validation=_cases_of(dataset, patients[tests : tests + validations]),
        test=_cases_of(dataset, held_out.union(patients[:tests])),
        note=dataset.split_note,
    )


def write_split(split: Split, path: str | os.PathLike[str]) -> None:
    """Write the split as text, its note as a comment; `read_split` gives it back.

    ConfigError where a name cannot stand in a line: it holds a line break or a #, or begins or ends with a space.
    """
    for name in (name for side in SIDES for name in getattr(split, side)):
        if not name or name != name.partition("#")[0].strip() or not name.isprintable():
            raise ConfigError(f"a case must have a name that fits a line of {path}, without '#'; got {name!r}.")
    lines = [f"# {split.note}"] if split.note else []
    lines += [f"{side} {name}" for side in SIDES for name in getattr(split, side)]
    write_whole(Path(path), "".join(f"{line}\n" for line in lines).encode())


def read_split(path: str | os.PathLike[str], dataset: Dataset) -> Split:
    """The split in a text file. A line may name a patient, which stands for all of its cases.

    ConfigError names file and line where a case is unknown or named twice, or a patient is on two sides.
    """
    path = Path(path)
    reject_pipe(path)
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} must be a split file that can be read; {error}. Check the path.") from error
    patient_of = {case.name: case.patient for case in dataset.cases}
    cases_of: dict[str, list[str]] = {}
    for case in dataset.cases:
        cases_of.setdefault(case.patient, []).append(case.name)
    side_of: dict[str, tuple[str, int]] = {}  # of a patient, and the line that says so
    line_of: dict[str, int] = {}  # of a case
    sides: dict[str, list[str]] = {side: [] for side in SIDES}
    for number, side, name in _lines(path, text):
        where = f"{path}, line {number}"
        if name not in patient_of and name not in cases_of:
            raise ConfigError(f"{where}: {_unknown(name, dataset)}")
        patient = patient_of.get(name, name)
        known, line = side_of.setdefault(patient, (side, number))
        if known != side:
            raise ConfigError(
                f"{where}: patient {patient} must be on one side; line {line} has {known}, this {side}."
                " Correct the file."
            )
        for one in [name] if name in patient_of else cases_of[name]:
            if one in line_of:
                raise ConfigError(
                    f"{where}: case {one} must be named once; line {line_of[one]} names it too."
                    " Remove one of the lines."
                )
            line_of[one] = number
            sides[side].append(one)
    return _split_of(path, sides, dataset)


def _split_of(path: Path, sides: dict[str, list[str]], dataset: Dataset) -> Split:
    used = sum(len(names) for names in sides.values())
    if not used:
        raise ConfigError(
            f"{path} must name at least one case, as in 'train {dataset.cases[0].name}'; it names none. Add lines."
        )
    left_out = len(dataset.cases) - used
    note = f"The split file leaves out {left_out} of {len(dataset.cases)} cases." if left_out else ""
    train, validation, test = (tuple(sorted(sides[side])) for side in SIDES)
    return Split(train, validation, test, note)


def _lines(path: Path, text: str) -> Iterator[tuple[int, str, str]]:
    """Number, side and name of each line that has them."""
    for number, line in enumerate(text.splitlines(), start=1):
        words = line.partition("#")[0].strip().split(maxsplit=1)
        if not words:
            continue
        if len(words) != 2 or words[0] not in SIDES:
            raise ConfigError(
                f"{path}, line {number}: a line must be one of {', '.join(SIDES)} and a case; got {line.strip()!r}."
                " Correct the line."
            )
        yield number, words[0], words[1]


def _unknown(name: str, dataset: Dataset) -> str:
    if any(name in (case.name, case.patient) for case in dataset.unlabelled):
        return f"case {name} must have labels; it has none."
    names = [case.name for case in dataset.cases]
    close = get_close_matches(name, names, n=1)
    hint = f" Did you mean {close[0]!r}?" if close else ""
    return f"case {name!r} must be one of the {len(names)} labeled cases of {dataset.root}; it is not.{hint}"


def _draw(seed: int, patient: str) -> str:
    """A place in the order that nothing but seed and name decides, on every machine."""
    return hashlib.sha256(f"{seed} {patient}".encode()).hexdigest()


def _part(number: int, share: int, total: int) -> int:
    """How many of the patients a share is: rounded, and at least one unless the share is zero.

    >>> _part(1251, 51, 1251), _part(10, 51, 1251), _part(10, 0, 1251)
    (51, 1, 0)
    """
    return max(1, round(number * share / total)) if share else 0


def _cases_of(dataset: Dataset, patients: Iterable[str]) -> tuple[str, ...]:
    wanted = set(patients)
    return tuple(sorted(case.name for case in dataset.cases if case.patient in wanted))
