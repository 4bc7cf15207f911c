"""A torchmetrics metric whose state is a few sums per class and bin, however many voxels it has seen."""

from __future__ import annotations

from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torchmetrics import Metric

from segcal.binning import Binning
from segcal.collect import bin_statistics
from segcal.errors import one_of
from segcal.metrics import ERRORS, MicroReading, confidences_by_case, paper_micro
from segcal.statistics import BinStatistics


class CalibrationError(Metric):
    """Micro-averaged calibration error over all voxels seen: the mean over classes, or one per class.

    Under distributed training the sums of all processes are added, so the result is that of one process.

    num_classes: channels of the predictions, the background's included.
    error: "ece", "ace" or "mce".
    bins: number of hard bins.
    background: whether the first class counts. It does not unless this is set, as in all means of segcal; a single
        class always counts. Set it for classes that overlap, which have no background.
    average: "macro" is the mean over the classes that count; "none" gives one value for each of them.
    micro: "pooled" adds the voxels of all cases; "paper" takes the mean over cases as the confidence of a bin. For
        "paper" a case must not be split between updates.
    ignore_index: voxels with this label are left out.
    kwargs: what every torchmetrics metric takes.

    >>> metric = CalibrationError(2, error="ace", bins=5)
    >>> metric.update(torch.tensor([[[0.9, 0.7], [0.1, 0.3]]]), torch.tensor([[0, 0]]))  # one case, two classes
    >>> metric.compute()  # of class 1 alone: gaps of 0.1 and 0.3
    tensor(0.2000, dtype=torch.float64)
    """

    is_differentiable = False
    higher_is_better = False
    full_state_update = False
    count: Tensor
    confidence_sum: Tensor
    label_sum: Tensor
    case_confidence: Tensor
    case_occupied: Tensor

    def __init__(
        self,
        num_classes: int,
        *,
        error: Literal["ece", "ace", "mce"] = "ece",
        bins: int = 20,
        background: bool = False,
        average: Literal["macro", "none"] = "macro",
        micro: MicroReading = "pooled",
        ignore_index: int | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        one_of("error", error, tuple(ERRORS))
        one_of("average", average, ("macro", "none"))
        one_of("micro", micro, get_args(MicroReading))
        self.error, self.binning, self.average, self.micro = error, Binning(bins), average, micro
        self.background, self.ignore_index = background, ignore_index
        of_paper = ("case_confidence", "case_occupied") if micro == "paper" else ()
        for name in ("count", "confidence_sum", "label_sum", *of_paper):
            self.add_state(name, torch.zeros(num_classes, bins, dtype=torch.float64), dist_reduce_fx="sum")

    def update(self, preds: Tensor, target: Tensor) -> None:
        """Add a batch.

        preds: (case, class, ...) probabilities.
        target: labels, as `segcal.bin_statistics` takes them.
        """
        stats = bin_statistics(preds.detach(), target, binning=self.binning, ignore_index=self.ignore_index)
        self.count = self.count + stats.count.sum(0)
        self.confidence_sum = self.confidence_sum + stats.confidence_sum.sum(0)
        self.label_sum = self.label_sum + stats.label_sum.sum(0)
        if self.micro == "paper":
            confidence, occupied = confidences_by_case(stats)
            self.case_confidence = self.case_confidence + confidence.sum(0)
            self.case_occupied = self.case_occupied + occupied.sum(0)

    @property
    def statistics(self) -> BinStatistics:
        """The pooled sums so far, as one case."""
        return BinStatistics(self.count[None], self.confidence_sum[None], self.label_sum[None], self.binning)

    def compute(self) -> Tensor:
        """The error so far: one number, or one per class that counts; NaN where no voxel was seen."""
        stats = self.statistics
        if self.micro == "paper":
            by_case = (self.case_confidence[None], self.case_occupied[None])
            stats = paper_micro(stats.count, stats.label_sum, *by_case, self.binning)
        errors = ERRORS[self.error](stats)[0]
        if not self.background and len(errors) > 1:
            errors = errors[1:]
        return errors.nanmean() if self.average == "macro" else errors
