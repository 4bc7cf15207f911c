"""Why files found no partner: formats that are not read, and names that differ in a way that can be named."""

from __future__ import annotations

import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from segcal.volumes.arrays import EXTENSIONS, stem_of
from segcal.volumes.pairing import Pairing

_LOOKED_AT = 200  # names of a side; a difference shows in a few
_SHOWN_SUFFIXES = 5


def why_nothing_pairs(predictions: Path, labels: Path, pairing: Pairing) -> str:
    """The sentences on two folders of which no file has a partner."""
    sides = ((predictions, pairing.unpaired_predictions), (labels, pairing.unpaired_labels))
    empty = [folder for folder, names in sides if not names]
    if empty:
        formats = ", ".join(EXTENSIONS)
        found = " and ".join(f"{folder} holds {files_in(folder)}" for folder in empty)
        remedy = "Convert them, or give another folder."
        return f"predictions and labels must be files of the formats {formats}; {found}. {remedy}"
    shown = " and ".join(f"{folder} has {len(names)}, as {', '.join(names[:2])}" for folder, names in sides)
    difference = name_difference(pairing.unpaired_predictions, pairing.unpaired_labels)
    return f"predictions and labels must share case names; {shown}. {difference or 'None of them match.'}"


def files_in(folder: Path) -> str:
    """What a folder and its subfolders hold, counted by the ends of names."""
    places = [folder, *sorted(path for path in folder.iterdir() if path.is_dir())]
    names = [path.name for place in places for path in place.iterdir() if not path.is_dir() and path.name[0] != "."]
    suffixes = Counter(_suffix(name) for name in names).most_common()
    if not suffixes:
        return "no files"
    more = sum(number for _, number in suffixes[_SHOWN_SUFFIXES:])
    counts = [f"{number} {suffix}" for suffix, number in suffixes[:_SHOWN_SUFFIXES]]
    return ", ".join([*counts, *([f"{more} others"] if more else [])])


def _suffix(name: str) -> str:
    path = Path(name.lower())
    return "".join(path.suffixes[-2:]) if path.suffix == ".gz" else path.suffix or "without an ending"


def name_difference(predictions: Sequence[str], labels: Sequence[str]) -> str:
    """A sentence on what keeps names of files apart that would pair otherwise; empty where nothing is known."""
    one, other = (_stems(names) for names in (predictions, labels))
    ways: tuple[tuple[str, Callable[[str], str]], ...] = (
        ("the way Unicode writes accents (NFC or NFD)", lambda name: unicodedata.normalize("NFC", name)),
        ("upper and lower case", lambda name: unicodedata.normalize("NFC", name).casefold()),
    )
    for what, plain in ways:
        again = {plain(name): name for name in other}
        found = next((name for name in one if plain(name) in again), None)
        if found is not None:
            return f"Names differ in {what}: {found!a} and {again[plain(found)]!a}. Rename one side."
    for what, cut in (("an ending", str.removeprefix), ("a beginning", str.removesuffix)):
        for longer, shorter, side in ((one, other, "predictions"), (other, one, "labels")):
            extra = _extra(longer, shorter, cut)
            if extra:
                return f"Names differ in {what}: those of {side} have {extra!a}. Rename one side."
    return ""


def _stems(names: Iterable[str]) -> list[str]:
    paths = [Path(name) for name in names][:_LOOKED_AT]
    return [stem_of(path) or path.name for path in paths]


def _extra(longer: Sequence[str], shorter: Sequence[str], cut: Callable[[str, str], str]) -> str:
    """What most of the longer names have beyond one of the shorter, which is cut off them."""
    beyond = Counter(rest for name in longer for part in shorter if (rest := cut(name, part)) not in ("", name))
    extra, number = beyond.most_common(1)[0] if beyond else ("", 0)
    return extra if 2 * number > min(len(longer), len(shorter)) else ""
