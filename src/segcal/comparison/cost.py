"""What a lower ACE cost: it also falls where probabilities say less, or lie in fewer bins."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from segcal.comparison.comparison import Comparison

SCORES = {"nll": "NLL", "brier": "Brier score"}
RISE = 0.01  # of a proper score, relative to the baseline's; below, it is not told
FALL = 0.02  # of the occupied bins


def costs(comparison: Comparison) -> dict[str, str]:
    """A sentence for each method whose macro-ACE is lower than the baseline's, at a price: of all classes and cases.

    The price is an NLL or a Brier score that rose by more than 1 %, or occupied bins that fell by more than 2 %.
    """
    found = {method: _cost(method, comparison) for method in comparison.methods[1:]}
    return {method: sentence for method, sentence in found.items() if sentence}


def _cost(method: str, comparison: Comparison) -> str:
    def change(metric: str) -> float:
        return comparison.find(method, metric=metric).change

    if not change("ace") < 0:
        return ""
    risen = [f"{name} rose by {_share(change(metric))}" for metric, name in SCORES.items() if change(metric) > RISE]
    emptied = [f"occupied bins fell by {_share(change('occupied'))}"] if change("occupied") < -FALL else []
    if not risen and not emptied:
        return ""
    *first, last = risen + emptied
    price = f"{', '.join(first)} and {last}" if first else last
    why = "less informative probabilities" if risen else "bins that are empty now"
    return (
        f"{method}: macro-ACE fell by {_share(change('ace'))}, but {price}: part of the gain may come from {why} (see "
        "How ACE can be gamed)."
    )


def _share(change: float) -> str:
    percent = 100 * abs(change)
    return f"{percent:.{0 if percent >= 10 else 1}f} %"
