"""What a lower ACE cost: it also falls where probabilities say less, or lie in fewer bins."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from segcal._io.words import joined

if TYPE_CHECKING:
    from segcal.comparison.comparison import Comparison

SCORES = {"nll": "NLL", "brier": "Brier score"}
RISE = 0.01  # of a proper score, relative to the baseline's; below, it is not told
FALL = 0.02  # of the occupied bins


class Cost(NamedTuple):
    """What a lower macro-ACE came with."""

    gain: str
    """"macro-ACE fell by 24 %"."""
    price: str
    """"NLL rose by 7.0 % and occupied bins fell by 3.1 %"."""
    doubt: str
    """"part of the gain may come from less informative probabilities"."""


def costs(comparison: Comparison) -> dict[str, str]:
    """A sentence for each method whose macro-ACE is lower than the baseline's, at a price: of all classes and cases.

    The price is an NLL or a Brier score that rose by more than 1 %, or occupied bins that fell by more than 2 %.
    """
    found = {method: cost_of(method, comparison) for method in comparison.methods[1:]}
    return {
        method: f"{method}: {cost.gain}, but {cost.price}: {cost.doubt} (see How ACE can be gamed)."
        for method, cost in found.items()
        if cost
    }


def cost_of(method: str, comparison: Comparison) -> Cost | None:
    """None where the ACE is no lower, or had no price."""

    def change(metric: str) -> float:
        return comparison.find(method, metric=metric).change

    if not change("ace") < 0:
        return None
    risen = [f"{name} rose by {_share(change(metric))}" for metric, name in SCORES.items() if change(metric) > RISE]
    emptied = [f"occupied bins fell by {_share(change('occupied'))}"] if change("occupied") < -FALL else []
    if not risen and not emptied:
        return None
    why = "less informative probabilities" if risen else "bins that are empty now"
    return Cost(
        f"macro-ACE fell by {_share(change('ace'))}", joined(risen + emptied), f"part of the gain may come from {why}"
    )


def _share(change: float) -> str:
    percent = 100 * abs(change)
    return f"{percent:.{0 if percent >= 10 else 1}f} %"
