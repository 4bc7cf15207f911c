"""Losses, metric and handler under the names and arguments of MONAI: change one import.

Meant to behave as MONAI's own do, with four differences: sums are exact at any size, `right` does what its
documentation says (bins are [left, right) unless it is set; MONAI 1.6 stretches its edges a little, so that
0.5 falls in the bin below either way), classes are not looped over, and a softmax of one channel is an error (MONAI's
losses warn and apply no activation).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import monai.metrics
import torch
from monai.handlers.ignite_metric import IgniteMetricHandler
from monai.metrics import CalibrationReduction
from monai.utils import LossReduction, MetricReduction
from torch import Tensor
from torch.nn.modules.loss import _Loss

from segcal.binning import Binning
from segcal.collect import bin_statistics
from segcal.errors import ConfigError, ShapeError
from segcal.losses import AbsentClasses, ACELoss, Activation
from segcal.metrics import ace, ece, mce


class _L1ACELoss(_Loss):
    """What the hard and the soft loss share; they differ in the binning."""

    def __init__(
        self,
        binning: Binning,
        *,
        include_background: bool,
        to_onehot_y: bool,
        sigmoid: bool,
        softmax: bool,
        other_act: Callable[[Tensor], Tensor] | None,
        reduction: LossReduction | str,
        weight: Sequence[float] | float | Tensor | None,
        ignore_empty_classes: bool,
    ) -> None:
        super().__init__(reduction=LossReduction(reduction).value)
        if other_act is not None and not callable(other_act):
            raise TypeError(f"other_act must be None or callable; got {type(other_act).__name__}.")
        if int(sigmoid) + int(softmax) + (other_act is not None) > 1:
            raise ConfigError("at most one of sigmoid, softmax and other_act may be given; choose one.")
        self.include_background = include_background
        self.to_onehot_y = to_onehot_y
        self.other_act = other_act
        self.softmax = softmax
        self.weight = None if weight is None else torch.as_tensor(weight, dtype=torch.float64)
        if self.weight is not None and (
            self.weight.ndim > 1 or not bool((self.weight.isfinite() & (self.weight >= 0)).all())
        ):
            raise ConfigError(f"weight must be a number of at least 0, or one for each class; got {weight!r}.")
        absent: AbsentClasses = "zero" if ignore_empty_classes else "include"
        single: Activation = "sigmoid" if sigmoid else "none"
        several: Activation = "softmax" if softmax else single
        self._by_class = ACELoss(binning, activation=several, absent_classes=absent, reduction="none")
        self._one_channel = ACELoss(binning, activation=single, absent_classes=absent, reduction="none")

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        """Loss of BNH[WD] logits or probabilities; the target is BNH[WD], or B1H[WD] with to_onehot_y."""
        channels = input.shape[1]
        if channels == 1:
            if self.softmax:
                raise ShapeError(
                    "softmax=True needs an input of at least 2 channels; got one channel. Use sigmoid=True, or neither "
                    "for probabilities."
                )
            for name, given in (
                ("to_onehot_y=True", self.to_onehot_y),
                ("include_background=False", not self.include_background),
            ):
                if given:
                    warnings.warn(f"single channel prediction, `{name}` ignored.", stacklevel=2)
        elif (target.shape[1] == 1) != self.to_onehot_y:
            raise ShapeError(
                f"the target must be {'B1' if self.to_onehot_y else 'BN'}HW[D] with to_onehot_y={self.to_onehot_y}; "
                f"got {tuple(target.shape)} for an input of {tuple(input.shape)}."
                " Check the order of axes and to_onehot_y."
            )
        loss = self._one_channel if channels == 1 else self._by_class
        errors: Tensor = loss(input if self.other_act is None else self.other_act(input), target)
        if not self.include_background and channels > 1:
            errors = errors[:, 1:]
        if self.weight is not None:
            if self.weight.ndim and len(self.weight) != errors.shape[1]:
                raise ShapeError(
                    f"weight must have one entry per class counted (without the background, if that is off); "
                    f"got {len(self.weight)} for {errors.shape[1]}."
                    " Give one weight per counted class."
                )
            errors = errors * self.weight.to(errors)
        if self.reduction == "none":
            return errors.reshape(*errors.shape, *[1] * (input.ndim - 2))
        return errors.mean() if self.reduction == "mean" else errors.sum()


class HardL1ACELoss(_L1ACELoss):
    """Hard-binned L1 average calibration error, with the signature that MONAI proposes.

    num_bins: how many bins.
    include_background: whether channel 0 counts. It does by default, as in MONAI.
    to_onehot_y: whether the target is a label map, B1HW[D], rather than one-hot, BNHW[D].
    sigmoid: applies a sigmoid to the input.
    softmax: applies a softmax to the input, which must have several channels (ShapeError). At most one of these two
        and `other_act` may be given (ConfigError).
    other_act: a function to apply to the input instead.
    reduction: "mean", "sum" or "none", over cases and classes.
    weight: a factor, or one for each class that counts.
    right: closes bins on the right rather than on the left.
    ignore_empty_classes: makes the error of a class without ground truth zero.

    >>> loss = HardL1ACELoss(num_bins=5, include_background=False, to_onehot_y=True)
    >>> loss(torch.tensor([[[0.9, 0.7], [0.1, 0.3]]]), torch.tensor([[[1, 0]]]))  # gaps of 0.9 and 0.3
    tensor(0.6000)
    """

    def __init__(
        self,
        num_bins: int = 20,
        include_background: bool = True,
        to_onehot_y: bool = False,
        sigmoid: bool = False,
        softmax: bool = False,
        other_act: Callable[[Tensor], Tensor] | None = None,
        reduction: LossReduction | str = LossReduction.MEAN,
        weight: Sequence[float] | float | Tensor | None = None,
        right: bool = False,
        ignore_empty_classes: bool = True,
    ) -> None:
        super().__init__(
            Binning(num_bins, closed="right" if right else "left"),
            include_background=include_background,
            to_onehot_y=to_onehot_y,
            sigmoid=sigmoid,
            softmax=softmax,
            other_act=other_act,
            reduction=reduction,
            weight=weight,
            ignore_empty_classes=ignore_empty_classes,
        )


class SoftL1ACELoss(_L1ACELoss):
    """Soft-binned L1 average calibration error (triangular kernel), with the signature that MONAI proposes.

    num_bins, include_background, to_onehot_y, sigmoid, softmax, other_act, reduction, weight: as in `HardL1ACELoss`.
    empty_weight: a bin whose summed weight is below this is empty.
    right: accepted for its place in the signature. A voxel on an edge belongs to both bins alike, so it has nothing
        to decide.
    ignore_empty_classes: makes the error of a class without ground truth zero.

    >>> loss = SoftL1ACELoss(num_bins=2, to_onehot_y=True)
    >>> loss(torch.tensor([[[1.0, 0.0], [0.0, 1.0]]]), torch.tensor([[[0, 1]]]))
    tensor(0.)
    """

    def __init__(
        self,
        num_bins: int = 20,
        include_background: bool = True,
        to_onehot_y: bool = False,
        sigmoid: bool = False,
        softmax: bool = False,
        other_act: Callable[[Tensor], Tensor] | None = None,
        reduction: LossReduction | str = LossReduction.MEAN,
        weight: Sequence[float] | float | Tensor | None = None,
        empty_weight: float = 0.01,
        right: bool = False,
        ignore_empty_classes: bool = True,
    ) -> None:
        super().__init__(
            Binning(num_bins, kernel="triangular", empty_below=empty_weight),
            include_background=include_background,
            to_onehot_y=to_onehot_y,
            sigmoid=sigmoid,
            softmax=softmax,
            other_act=other_act,
            reduction=reduction,
            weight=weight,
            ignore_empty_classes=ignore_empty_classes,
        )


class CalibrationErrorMetric(monai.metrics.CalibrationErrorMetric):
    """MONAI's metric, with its arguments, defaults and reductions, on exact sums; y may also be an integer label map.

    Its values are of each case and class; MONAI's own default counts the background (include_background=True).

    >>> metric = CalibrationErrorMetric(num_bins=5, include_background=False, calibration_reduction="average")
    >>> _ = metric(torch.tensor([[[0.9, 0.7], [0.1, 0.3]]]), torch.tensor([[[1, 0]]]))  # gaps of 0.9 and 0.3
    >>> metric.aggregate()
    tensor([0.6000])
    """

    def _compute_tensor(self, y_pred: Tensor, y: Tensor, **kwargs: Any) -> Tensor:
        binning = Binning(self.num_bins, closed="right" if self.right else "left")
        error = {"expected": ece, "average": ace, "maximum": mce}[self.calibration_reduction.value]
        errors = error(bin_statistics(y_pred, y, binning=binning))
        return (errors if self.include_background or errors.shape[1] == 1 else errors[:, 1:]).to(torch.float32)


class CalibrationError(IgniteMetricHandler):
    """MONAI's Ignite handler around the metric above.

    num_bins: how many bins.
    include_background: whether channel 0 counts. It does by default, as in MONAI.
    calibration_reduction: "expected" (ECE), "average" (ACE) or "maximum" (MCE).
    metric_reduction: over cases and classes, by the words of MONAI.
    output_transform: makes (probabilities, labels) of what the engine puts out.
    save_details: whether values of each case and class go to `engine.state.metric_details`.
    """

    def __init__(
        self,
        num_bins: int = 20,
        include_background: bool = True,
        calibration_reduction: CalibrationReduction | str = CalibrationReduction.EXPECTED,
        metric_reduction: MetricReduction | str = MetricReduction.MEAN,
        output_transform: Callable[..., Any] = lambda output: output,
        save_details: bool = True,
    ) -> None:
        metric = CalibrationErrorMetric(
            num_bins=num_bins,
            include_background=include_background,
            calibration_reduction=calibration_reduction,
            metric_reduction=metric_reduction,
        )
        super().__init__(metric_fn=metric, output_transform=output_transform, save_details=save_details)
