"""A torchmetrics metric whose state is three sums, however many voxels it has seen."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor
from torchmetrics import Metric

from segcal.binning import Binning
from segcal.collect import bin_statistics
from segcal.errors import one_of
from segcal.metrics import ERRORS
from segcal.statistics import BinStatistics


class CalibrationError(Metric):
    """Micro-averaged calibration error over all voxels seen: the mean over classes, or one per class.

    Update with (case, class, ...) probabilities and labels, as `segcal.bin_statistics` takes them. Under
    distributed training the sums of all processes are added, so the result is that of one process.
    """

    is_differentiable = False
    higher_is_better = False
    full_state_update = False
    count: Tensor
    confidence_sum: Tensor
    label_sum: Tensor

    def __init__(
        self,
        num_classes: int,
        *,
        error: Literal["ece", "ace", "mce"] = "ece",
        bins: int = 20,
        background: bool = True,
        average: Literal["macro", "none"] = "macro",
        ignore_index: int | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        one_of("error", error, tuple(ERRORS))
        one_of("average", average, ("macro", "none"))
        self.error, self.binning, self.average = error, Binning(bins), average
        self.background, self.ignore_index = background, ignore_index
        for name in ("count", "confidence_sum", "label_sum"):
            self.add_state(name, torch.zeros(num_classes, bins, dtype=torch.float64), dist_reduce_fx="sum")

    def update(self, preds: Tensor, target: Tensor) -> None:
        """Add a batch."""
        stats = bin_statistics(preds.detach(), target, binning=self.binning, ignore_index=self.ignore_index).pool(
            "case"
        )
        self.count = self.count + stats.count[0]
        self.confidence_sum = self.confidence_sum + stats.confidence_sum[0]
        self.label_sum = self.label_sum + stats.label_sum[0]

    @property
    def statistics(self) -> BinStatistics:
        """The sums so far, as one case."""
        return BinStatistics(self.count[None], self.confidence_sum[None], self.label_sum[None], self.binning)

    def compute(self) -> Tensor:
        errors = ERRORS[self.error](self.statistics)[0]
        if not self.background:
            errors = errors[1:]
        return errors.nanmean() if self.average == "macro" else errors
