"""Micro averages of many draws of cases: sums over cases, made once for each draw, and all that is worked out of them.

A draw says how often each case is taken: its sums are weights times those of the cases. Sums add, so that what two
methods would have, had they swapped some of their cases, follows from the sums of their differences.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from segcal.evaluation.columns import JOINT, Label
from segcal.metrics import ERRORS, confidences_by_case, occupied, paper_micro, signed_gap
from segcal.scores import OverlapCounts, ScoreSums, brier, dice, nll
from segcal.statistics import SUMS, BinStatistics

if TYPE_CHECKING:
    from segcal.evaluation.evaluation import Evaluation

Key = tuple[str, Label, str]  # average, label, metric


Sums = tuple[Tensor, ...]
"""(draw, class, ...): in the bins that are reported count, confidence, labels, and both of `confidences_by_case`; then
overlap, scores and, where they are known, joint scores."""


@dataclass(frozen=True, eq=False)
class MicroSums:
    """Of the cases of an evaluation all that micro averages add up."""

    evaluation: Evaluation

    @cached_property
    def of_cases(self) -> Sums:
        """Of each case."""
        part = self.evaluation
        stats = part.binned
        sums = [*(getattr(stats, name) for name in SUMS), *confidences_by_case(stats)]
        sums += [getattr(part.overlap, name) for name in OverlapCounts.names()]
        for scores in (part.scores, part.joint):
            if scores is not None:
                sums += [getattr(scores, name) for name in ScoreSums.names()]
        return tuple(sums)

    @cached_property
    def total(self) -> Sums:
        """Of all cases, as the only draw."""
        return drawn(self.of_cases[0].new_ones(1, len(self.of_cases[0])), self.of_cases)

    def values(self, parts: Sums) -> dict[Key, Tensor]:
        """Micro averages by (average, label, metric), one for each draw."""
        found: dict[Key, Tensor] = {}
        for average, stats in self._readings(parts).items():
            metrics = {name: error(stats) for name, error in ERRORS.items()}
            if average == "micro pooled":
                metrics |= {"dice": dice(OverlapCounts(*parts[5:8])), "signed_gap": signed_gap(stats)}
                metrics |= {"occupied": occupied(stats)}
                metrics |= proper(ScoreSums(*parts[8:11]))
            for metric, values in metrics.items():
                found |= self._by_label(average, metric, values)
        for metric in JOINT:
            found["micro pooled", None, metric] = parts[0].new_full((len(parts[0]),), torch.nan)
        if self.evaluation.joint is not None:
            pooled = proper(ScoreSums(*parts[11:14]))
            found |= {("micro pooled", None, metric): values[:, 0] for metric, values in pooled.items()}
        return found

    def distances(self, parts: Sums) -> dict[Key, Tensor]:
        """For each draw, how far its gaps lie from those of all cases, averaged as each error does."""
        whole = self._readings(self.total)
        found: dict[Key, Tensor] = {}
        for average, stats in self._readings(parts).items():
            moved = stats.confidence_sum - stats.count * whole[average].signed_gap.nan_to_num(0.0)
            apart = replace(stats, confidence_sum=moved)  # its gaps are the differences of gaps
            for metric, error in ERRORS.items():
                found |= self._by_label(average, metric, error(apart))
        return found

    def _readings(self, parts: Sums) -> dict[str, BinStatistics]:
        """The bins of all cases of a draw as one case, in both readings; see `metrics.micro`."""
        count, confidence_sum, label_sum, confidences, filled = parts[:5]
        binning = replace(self.evaluation.statistics.binning, bins=self.evaluation.bins)
        return {
            "micro paper": paper_micro(count, label_sum, confidences, filled, binning),
            "micro pooled": BinStatistics(count, confidence_sum, label_sum, binning),
        }

    def _by_label(self, average: str, metric: str, values: Tensor) -> dict[Key, Tensor]:
        """The columns of (draw, class) values by their names, and their mean over classes."""
        columns = zip((*self.evaluation.classes, None), (*values.unbind(1), values.nanmean(1)), strict=True)
        return {(average, name, metric): column for name, column in columns}


def drawn(weights: Tensor, of_cases: Sums) -> Sums:
    """The sums of each draw; weights are (draw, case)."""
    return tuple((weights @ sums.flatten(1)).reshape(-1, *sums.shape[1:]) for sums in of_cases)


def proper(scores: ScoreSums) -> dict[str, Tensor]:
    """Both proper scores."""
    return {"brier": brier(scores), "nll": nll(scores)}
