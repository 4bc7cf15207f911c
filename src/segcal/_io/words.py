"""Numbers and names in sentences."""

from __future__ import annotations

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
