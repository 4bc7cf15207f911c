"""Colors that color-blind readers can tell apart, and the one of each method, the same on paper and on a page."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import cycle

# Okabe and Ito's colors; their yellow is left out, since it cannot be seen on white.
BLUE, ORANGE, GREEN, VERMILION = "#0072B2", "#E69F00", "#009E73", "#D55E00"
PURPLE, SKY, BLACK, GRAY = "#CC79A7", "#56B4E9", "#000000", "#8C8C8C"

METHODS = {
    "dice-ce": BLUE, "ce": PURPLE, "hard-ace": ORANGE, "soft-ace": GREEN, "temperature": VERMILION,
    "dice-ce + temperature": VERMILION,
}  # fmt: skip
# For any other method; from the third on Paul Tol's muted colors, which suit Okabe and Ito's.
_FREE = (SKY, BLACK, "#332288", "#882255", "#999933", "#661100", "#44AA99", "#AA4499")


def method_colors(names: Iterable[str]) -> dict[str, str]:
    """The color of each method: the same in every figure for the paper's five, by their names in `segcal train`.

    Other names get further colors in the order they come.

    >>> method_colors(["dice-ce", "hard-ace", "mine"])
    {'dice-ce': '#0072B2', 'hard-ace': '#E69F00', 'mine': '#56B4E9'}
    """
    free, colors = cycle(_FREE), dict[str, str]()
    for name in dict.fromkeys(names):
        fixed = METHODS.get(name)
        colors[name] = next(free) if fixed is None or fixed in colors.values() else fixed
    return colors
