"""What segcal raises: every message says what must hold, what came, where, and what to do."""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Iterable
from numbers import Integral, Real

LARGEST_SEED = 1 << 32
ALL_CLASSES = "all classes"  # what tables call them together, and so no class
LONGEST = 1000  # signs of a message; more is a file's content


class SegcalError(ValueError):
    """Any refusal of segcal; catch this to catch them all.

    It is a ValueError. Its message is one line that any terminal shows, whatever names and values of files it repeats.

    message: what must hold, what came, where, and what to do.

    >>> print(SegcalError("the name must be one line; got " + chr(10)))
    the name must be one line; got \\n
    """

    def __init__(self, message: object = "") -> None:
        super().__init__(one_line(str(message)))


def one_line(text: str) -> str:
    """Escape what a terminal cannot show, and leave out the middle of a long text."""
    if len(text) > LONGEST:
        half = LONGEST // 2
        text = f"{text[:half]} [...] {text[-half:]}"
    if text.isprintable():
        return text
    return "".join(sign if sign.isprintable() else sign.encode("unicode_escape").decode() for sign in text)


class ConfigError(SegcalError):
    """An option that does not exist or cannot be used as it was.

    >>> from segcal import Binning
    >>> Binning(bins=0)
    Traceback (most recent call last):
    segcal.errors.ConfigError: bins must be a whole number from 1 to 100000; got 0.
    """


class ShapeError(SegcalError):
    """Arrays whose shapes do not belong together.

    >>> import torch
    >>> from segcal import bin_statistics
    >>> bin_statistics(torch.zeros(1, 2, 4), torch.zeros(1, 5))
    Traceback (most recent call last):
    segcal.errors.ShapeError: labels must be an integer map (case, ...) or (case, 1, ...), or have a channel per ...
    """


class LabelError(SegcalError):
    """A label that is not one of the classes, or not a share in [0, 1].

    >>> import torch
    >>> from segcal import bin_statistics
    >>> bin_statistics(torch.full((1, 2, 1), 0.5), torch.tensor([[7]]))
    Traceback (most recent call last):
    segcal.errors.LabelError: labels must be one of the classes 0 to 1; case 0, voxel 0 (...) holds 7. ...
    """


class RangeError(SegcalError):
    """A probability outside [0, 1], or not a number.

    >>> import torch
    >>> from segcal import bin_statistics
    >>> bin_statistics(torch.tensor([[[7.31]]]), torch.tensor([[[1]]]))
    Traceback (most recent call last):
    segcal.errors.RangeError: probabilities must lie in [0, 1]; case 0, class 0 reaches 7.31. ...
    """


class FileError(SegcalError):
    """A file that is missing, broken, or not what it must be.

    >>> from segcal import load_calibrator
    >>> load_calibrator("nowhere.json")
    Traceback (most recent call last):
    segcal.errors.FileError: nowhere.json must be a calibrator; No such file or directory. Check the path.
    """


class GridError(SegcalError):
    """Probabilities and labels that do not lie on one grid of voxels.

    `segcal.evaluate` does not raise it: it records the case as a failure and continues with the others.

    >>> issubclass(GridError, SegcalError)
    True
    """


def is_number(value: object) -> bool:
    """Whether it is a finite real number, of Python or of numpy; a truth value is none.

    >>> is_number(0.5), is_number("0.5"), is_number(True), is_number(math.nan)
    (True, False, False, False)
    """
    if isinstance(value, bool) or not isinstance(value, Real):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # a whole number beyond all floats
        return False


def check_integer(name: str, value: object, *, least: int = 1, most: int | None = None) -> int:
    """Return a whole number, of Python or of numpy, as an int; ConfigError for anything else or out of range.

    >>> check_integer("bins", 20)
    20
    """
    number = int(value) if isinstance(value, Integral) and not isinstance(value, bool) else None
    if number is None or number < least or (most is not None and number > most):
        limits = f"of at least {least}" if most is None else f"from {least} to {most}"
        raise ConfigError(f"{name} must be a whole number {limits}; got {value!r}.")
    return number


def check_seed(seed: int) -> int:
    """The seed of random numbers; ConfigError unless it is a whole number that every generator takes.

    >>> check_seed(3)
    3
    """
    return check_integer("seed", seed, least=0, most=LARGEST_SEED - 1)


def one_of(name: str, value: object, allowed: tuple[object, ...], *, hint: str = "") -> None:
    """Refuse a word that is not among the allowed ones."""
    if value not in allowed:
        words = ", ".join(repr(word) for word in allowed)
        raise ConfigError(f"{name} must be one of {words}; got {value!r}.{hint and ' ' + hint}")


def distinct(what: str, names: Iterable[str]) -> None:
    """Refuse names that are empty, or that a reader could not tell apart from each other or from all of them.

    >>> distinct("class names", ["liver", "spleen"])
    """
    seen: set[str] = set()
    for name in names:
        plain = unicodedata.normalize("NFC", name).strip()
        if not plain:
            raise ConfigError(f"{what} must not be empty; one of them is.")
        if plain.lower() == ALL_CLASSES:
            raise ConfigError(f"{what} must not be {plain!r}, as tables call all of them; rename that one.")
        if plain in seen:
            raise ConfigError(f"{what} must differ; {plain!r} came more than once.")
        seen.add(plain)
