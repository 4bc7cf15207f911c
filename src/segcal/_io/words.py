"""Numbers and names in sentences."""

from __future__ import annotations

import math
from collections.abc import Sequence


def counted(number: int, noun: str, plural: str | None = None) -> str:
    """So many of a thing.

    >>> counted(1, "case"), counted(2, "case"), counted(2, "class", "classes")
    ('1 case', '2 cases', '2 classes')
    """
    return f"{number} {noun if number == 1 else plural or f'{noun}s'}"


def listed(names: Sequence[str], most: int = 5, *, joint: str = ", ") -> str:
    """The first names, and how many more there are.

    >>> listed(["a", "b", "c"], 2)
    'a, b and 1 more'
    """
    return joint.join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def joined(names: Sequence[str]) -> str:
    """All names, as a sentence has them.

    >>> joined(["a"]), joined(["a", "b"]), joined(["a", "b", "c"])
    ('a', 'a and b', 'a, b and c')
    """
    return f"{', '.join(names[:-1])} and {names[-1]}" if len(names) > 1 else "".join(names)


def duration(seconds: float) -> str:
    """For people.

    >>> duration(42), duration(125), duration(2 * 3600 + 59), duration(50 * 3600)
    ('42 s', '2 min', '2 h 1 min', '2 d 2 h')
    """
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes = math.ceil(seconds / 60) if seconds > 3600 else round(seconds / 60)
    if minutes < 60:
        return f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours < 24 else f"{hours // 24} d {hours % 24} h"
