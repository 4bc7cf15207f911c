"""What segcal raises: every message says what must hold, what came, where, and what to do."""

from __future__ import annotations


class SegcalError(ValueError):
    """Any refusal of segcal; catch this to catch them all."""


class ConfigError(SegcalError):
    """An option that does not exist or cannot be used as it was."""


class ShapeError(SegcalError):
    """Arrays whose shapes do not belong together."""


class LabelError(SegcalError):
    """A label that is not one of the classes, or not a share in [0, 1]."""


class RangeError(SegcalError):
    """A probability outside [0, 1], or not a number."""


class FileError(SegcalError):
    """A file that is missing, broken, or not what it must be."""


class GridError(SegcalError):
    """Probabilities and labels that do not lie on one grid of voxels."""


def one_of(name: str, value: object, allowed: tuple[str, ...], *, hint: str = "") -> None:
    """Refuse a word that is not among the allowed ones."""
    if value not in allowed:
        words = ", ".join(repr(word) for word in allowed)
        raise ConfigError(f"{name} must be one of {words}; got {value!r}.{hint and ' ' + hint}")
