"""Colors that color-blind readers can tell apart, and the one of each method, the same on paper and on a page."""

from __future__ import annotations

import re
from collections.abc import Iterable
from itertools import cycle

# Okabe and Ito's colors; their yellow is left out, since it cannot be seen on white.
BLUE, ORANGE, GREEN, VERMILION = "#0072B2", "#E69F00", "#009E73", "#D55E00"
PURPLE, SKY, BLACK, GRAY = "#CC79A7", "#56B4E9", "#000000", "#8C8C8C"

METHODS = {"dice-ce": BLUE, "ce": PURPLE, "hard-ace": ORANGE, "soft-ace": GREEN, "temperature": VERMILION}
# For any other method; from the third on Paul Tol's muted colors, which suit Okabe and Ito's.
_FREE = (SKY, BLACK, "#332288", "#882255", "#999933", "#661100", "#44AA99", "#AA4499")

_SILENT = "baseline|binned|binning|entropy|loss|only|ours|plus|with|and|ml1|l1"
_WORDS = re.compile(f"temperature|scaling|scaled|temp|hard|soft|hl1|sl1|dice|dsc|cross|ace|ce|ts|{_SILENT}")


def method_colors(names: Iterable[str]) -> dict[str, str]:
    """The color of each method: the same in every figure for the paper's five, however spelt.

    Other names, and a second spelling of the same method, get further colors in the order they come.

    >>> method_colors(["DSC+CE", "hL1-ACE", "mine"])
    {'DSC+CE': '#0072B2', 'hL1-ACE': '#E69F00', 'mine': '#56B4E9'}
    """
    free, colors = cycle(_FREE), dict[str, str]()
    for name in dict.fromkeys(names):
        fixed = METHODS.get(_known_method(name) or "")
        colors[name] = next(free) if fixed is None or fixed in colors.values() else fixed
    return colors


def _known_method(name: str) -> str | None:
    """Which of the paper's methods a name means; None where it says more than that, or something else."""
    words = set(_WORDS.findall(name.lower()))
    if re.search(r"\w", _WORDS.sub("", name.lower()).replace("_", "")):
        return None
    if words & {"temperature", "temp", "ts"}:
        return "temperature"
    if "ace" in words:
        hard, soft = bool(words & {"hard", "hl1"}), bool(words & {"soft", "sl1"})
        return None if hard == soft else "hard-ace" if hard else "soft-ace"
    if words & {"dice", "dsc"}:
        return "dice-ce" if words & {"ce", "cross"} else None
    if words & {"ce", "cross"}:
        return "ce"
    return "dice-ce" if words == {"baseline"} else None
