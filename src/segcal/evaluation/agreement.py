"""How far the Dice that probabilities promise agrees with the true one, over the cases of an evaluation.

A promise is of use in two ways: it may be right on average and case by case (bias, mean absolute error, against that of
the best constant), and it may put cases in the right order (rank correlation). One does not follow from the other.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from segcal.errors import ALL_CLASSES

if TYPE_CHECKING:
    from segcal.evaluation.columns import Label
    from segcal.evaluation.evaluation import Evaluation

Array = NDArray[Any]

FEWEST_CASES = 5  # below, a rank correlation says nothing


@dataclass(frozen=True)
class DiceAgreement:
    """Expected against actual Dice over the cases that have an actual one; NaN where there is none.

    cases: how many have one.
    expected, actual: means over them.
    bias: mean of expected less actual; positive where too much is promised.
    mean_absolute_error: mean distance of both.
    constant_guess: that of the best constant, the median of the actual Dice, which nobody knows beforehand.
    rank_correlation: Spearman's; NaN where all cases have the same Dice, and of one case.
    """

    cases: int
    expected: float
    actual: float
    bias: float
    mean_absolute_error: float
    constant_guess: float
    rank_correlation: float

    def sentence(self) -> str:
        """The same in a line, for the terminal."""
        rank = "n/a" if math.isnan(self.rank_correlation) else f"{self.rank_correlation:.2f}"
        return (
            f"expected DSC {self.expected:.3f}, actual {self.actual:.3f}; mean absolute error "
            f"{self.mean_absolute_error:.3f} (constant guess {self.constant_guess:.3f}); rank correlation {rank}"
        )


def dice_agreement(expected: Array, actual: Array) -> DiceAgreement:
    """Of one class, from a number for each case; cases without an actual Dice (NaN) are left out.

    >>> import numpy as np
    >>> found = dice_agreement(np.array([0.8, 0.9, 0.7, 0.5]), np.array([0.9, 0.8, 0.6, np.nan]))
    >>> found.cases, round(found.bias, 4), round(found.mean_absolute_error, 4), round(found.constant_guess, 4)
    (3, 0.0333, 0.1, 0.1)
    >>> found.rank_correlation
    0.5
    """
    known = ~np.isnan(actual)
    expected, actual = expected[known], actual[known]
    if not len(actual):
        return DiceAgreement(0, *[math.nan] * 6)
    return DiceAgreement(
        cases=len(actual),
        expected=float(expected.mean()),
        actual=float(actual.mean()),
        bias=float((expected - actual).mean()),
        mean_absolute_error=float(np.abs(expected - actual).mean()),
        constant_guess=float(np.abs(actual - np.median(actual)).mean()),
        rank_correlation=rank_correlation(expected, actual),
    )


def rank_correlation(a: Array, b: Array) -> float:
    """Spearman's; equal values share their mean rank. NaN where either never changes."""
    first, second = (_ranks(values) - (len(values) + 1) / 2 for values in (a, b))
    spread = math.sqrt(float(first @ first) * float(second @ second))
    return float(first @ second) / spread if spread else math.nan


def _ranks(values: Array) -> Array:
    _, place, number = np.unique(values, return_inverse=True, return_counts=True)
    mean_rank: Array = (np.cumsum(number) - (number - 1) / 2)[place]
    return mean_rank


def case_dices(evaluation: Evaluation) -> dict[Label, tuple[Array, Array]]:
    """Expected and actual Dice of every case: of each class and, where there are several, of their mean (None).

    Both means are over the classes that the case has. Empty where the sums of decisions are not known. A class that is
    there, and was given no probability at all, has an expected Dice of 0.
    """
    found = evaluation.decision_metrics()
    if not found:
        return {}
    from segcal.scores import dice

    actual = dice(evaluation.overlap)
    expected = found["expected_dice"].nan_to_num(0.0)
    columns: dict[Label, tuple[Array, Array]] = {
        name: (expected[:, i].numpy(), actual[:, i].numpy()) for i, name in enumerate(evaluation.classes)
    }
    if len(evaluation.classes) > 1:
        present = expected.where(~actual.isnan(), np.nan)
        columns[None] = (present.nanmean(1).numpy(), actual.nanmean(1).numpy())
    return columns


def dice_agreements(evaluation: Evaluation) -> dict[Label, DiceAgreement]:
    """Of each class and, where there are several, of their mean (None); empty where decisions are not known."""
    return {label: dice_agreement(*pair) for label, pair in case_dices(evaluation).items()}


def agreement_lines(evaluation: Evaluation) -> list[str]:
    """A line for each class that at least 5 cases have."""
    return [
        f"{name}: {found.sentence()}"
        for name, found in dice_agreements(evaluation).items()
        if name is not None and found.cases >= FEWEST_CASES
    ]


def agreement_content(evaluation: Evaluation) -> dict[str, dict[str, Any]]:
    """The same numbers by class as JSON has them; their mean under "all classes", which no class may be called."""
    return {
        label or ALL_CLASSES: {
            name: None if isinstance(x, float) and math.isnan(x) else x for name, x in asdict(found).items()
        }
        for label, found in dice_agreements(evaluation).items()
    }
