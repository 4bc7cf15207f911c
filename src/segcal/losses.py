"""Losses: average calibration error alone, and the weighted sum with Dice and cross-entropy.

All terms follow from sums over voxels that one forward pass collects (see `segcal.collect`); the gradient takes one
backward pass. The rest is arithmetic on a few numbers per case and class, in float64.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple, cast, get_args

import torch
from torch import Tensor, nn

from segcal.binning import Binning
from segcal.collect import BACKENDS, Backend, Voxels, check_binning, check_ignored, plain, read_voxels, sums_of
from segcal.collect import Activation as Activation
from segcal.errors import ConfigError, ShapeError, is_number, one_of
from segcal.kernels.spec import CROSS_ENTROPY, INTERSECTION, LABEL, LABEL_SQUARED, PROBABILITY_SQUARED, VOXELS
from segcal.metrics import ace as average_calibration_error
from segcal.statistics import BinStatistics

EmptyBins = Literal["skip", "zero"]
AbsentClasses = Literal["zero", "skip", "include"]
Reduction = Literal["mean", "sum", "none"]
Logits = Tensor | Sequence[Tensor]


class LossTerms(NamedTuple):
    """What `SegmentationLoss.terms` returns: the weighted sum, and for the log each term without its weight.

    total: the weighted sum, with its gradient.
    dice: the Dice loss; it has no gradient, as the two below, and is zero if its weight is zero.
    ce: the cross-entropy.
    ace: the average calibration error.

    >>> terms = SegmentationLoss(dice=0, ace=0).terms(torch.zeros(1, 2, 4), torch.tensor([[0, 1, 0, 1]]))
    >>> terms._asdict()
    {'total': tensor(0.6931), 'dice': tensor(0.), 'ce': tensor(0.6931), 'ace': tensor(0.)}
    """

    total: Tensor
    dice: Tensor
    ce: Tensor
    ace: Tensor


class ACELoss(nn.Module):
    """Average calibration error of each case and class, as a loss: hard or soft mL1-ACE, after the binning's kernel.

    Options that cannot be used are a ConfigError. Calls raise what `bin_statistics` raises, except that NaN reaches the
    loss, so that a gradient scaler skips the step; ShapeError, too, for a batch without cases, and for a softmax of one
    channel.

    binning: bins and kernel; 20 hard bins if not given. The paper's soft loss is Binning(20, kernel="triangular").
    activation: "softmax" (two or more exclusive classes), "sigmoid" (each class by itself) or "none" (these are
        probabilities).
    empty_bins: "skip" averages over occupied bins, "zero" over all of them.
    absent_classes: a class without ground truth in a case counts as "zero" (as published), is left out of the
        case's average ("skip"), or is measured like any other ("include").
    class_weights: a factor for each class of the logits.
    background: whether class 0 counts. It does unless this is False: the paper trains on the background, too, and
        leaves it out of results.
    reduction: "mean" over classes and cases, "sum", or "none": (case, class), with NaN for what "skip" left out.
    ignore_index: voxels with this label are left out.
    backend: as `bin_statistics` takes it.

    Logits may be a list at several scales with labels at full size (deep supervision): the losses of the
    outputs are summed with the weights 1, 1/2, 1/4, ...

    >>> loss = ACELoss(Binning(5), activation="none")
    >>> loss(torch.tensor([[[0.1, 0.3, 0.7, 0.9]]]), torch.tensor([[[0, 0, 1, 1]]]))
    tensor(0.2000)
    """

    class_weights: Tensor | None

    def __init__(
        self,
        binning: Binning | None = None,
        *,
        activation: Activation = "softmax",
        empty_bins: EmptyBins = "skip",
        absent_classes: AbsentClasses = "zero",
        class_weights: Sequence[float] | Tensor | None = None,
        background: bool = True,
        reduction: Reduction = "mean",
        ignore_index: int | None = None,
        backend: Backend | None = None,
    ) -> None:
        super().__init__()
        one_of("activation", activation, get_args(Activation))
        one_of("empty_bins", empty_bins, get_args(EmptyBins))
        one_of("absent_classes", absent_classes, get_args(AbsentClasses))
        one_of("reduction", reduction, get_args(Reduction))
        if backend is not None:
            one_of("backend", backend, BACKENDS)
        self.binning = check_binning(binning) or Binning()
        self.activation = activation
        self.empty_bins = empty_bins
        self.absent_classes = absent_classes
        self.background = background
        self.reduction = reduction
        self.ignore_index = check_ignored(ignore_index)
        self.backend = backend
        self.register_buffer("class_weights", _read_weights(class_weights), persistent=False)

    def extra_repr(self) -> str:
        shown = ("binning", "activation", "empty_bins", "absent_classes", "background", "reduction", "ignore_index")
        return ", ".join([f"{name}={getattr(self, name)!r}" for name in shown] + _shown(self.class_weights))

    def forward(self, logits: Logits, labels: Tensor, *, mask: Tensor | None = None) -> Tensor:
        """The loss, in the precision of the logits (float32 for half).

        logits: (case, class, ...), or a list of them at several scales.
        labels: as `bin_statistics` takes them.
        mask: (case, ...) or (case, 1, ...); voxels where it is 0 are left out.
        """

        def one_scale(logits: Tensor, labels: Tensor, mask: Tensor | None) -> Tensor:
            voxels = _need_cases(read_voxels(logits, labels, mask=mask, ignore_index=self.ignore_index))
            stats, _ = sums_of(
                voxels, binning=self.binning, activation=self.activation, classes=False, backend=self.backend
            )
            assert stats is not None  # there is always a binning
            return self.of(stats).to(voxels.inputs.dtype)

        return _over_scales(one_scale, logits, labels, mask)

    if TYPE_CHECKING:  # torch's own takes and gives anything

        def __call__(self, logits: Logits, labels: Tensor, *, mask: Tensor | None = None) -> Tensor: ...

    def of(self, stats: BinStatistics) -> Tensor:
        """The loss of statistics that were collected elsewhere, in float64.

        stats: bin statistics, such as `bin_statistics` collects them; their own binning holds.
        """
        errors = average_calibration_error(stats, empty_bins=self.empty_bins)
        counted = stats.occupied.any(-1)
        if self.absent_classes != "include":
            # NaN is not absent: it must reach the loss, so that a gradient scaler skips the step.
            counted = counted & ((stats.label_sum.sum(-1) > 0) | stats.confidence_sum.sum(-1).isnan())
        errors = torch.where(counted, errors, 0)
        if self.class_weights is not None:
            errors = errors * _fitting(self.class_weights, errors)
        if not self.background and errors.shape[1] > 1:
            errors, counted = errors[:, 1:], counted[:, 1:]
        if self.reduction == "sum":
            return errors.sum()
        if self.absent_classes != "skip":
            return errors.mean() if self.reduction == "mean" else errors
        if self.reduction == "mean":
            return (errors.sum(1) / counted.sum(1).clamp(min=1)).mean()
        return torch.where(counted, errors, torch.nan)


class SegmentationLoss(nn.Module):
    """Dice + cross-entropy + average calibration error, weighted, in one pass over the logits and one back.

    The paper's methods are settings: `ace=0` is its baseline, `dice=0, ace=0` cross-entropy alone, and the
    binning's kernel chooses between hard and soft ACE. Options and calls raise what those of `ACELoss` raise.

    dice: weight of the Dice term. A weight of zero switches a term off; one below zero is a ConfigError.
    ce: weight of the cross-entropy.
    ace: weight of the average calibration error.
    binning: bins and kernel of the ACE; 20 hard bins if not given.
    activation: "softmax" for two or more exclusive classes, "sigmoid" for classes that overlap and for one class.
    empty_bins, absent_classes: of the ACE, as in `ACELoss`.
    class_weights: a factor for each class of the logits, in all three terms.
    background: whether class 0 counts in Dice and ACE. It always counts in the cross-entropy.
    ignore_index: voxels with this label are left out.
    backend: as `bin_statistics` takes it.

    Dice has squared denominators: 1 - 2 sum(p y) / (sum(p^2) + sum(y^2) + 1e-5) per case and class, averaged.
    Cross-entropy is that of the softmax, averaged over voxels, or the binary one of each class for
    activation="sigmoid", averaged over voxels and classes. Lists of logits for deep supervision are taken as by
    `ACELoss`.

    Class weights act on all three terms, as in torch and MONAI: they multiply the Dice and ACE of their class, while
    cross-entropy is torch's weighted mean, which is divided by the weights of the voxels. So twice the weights double
    Dice and ACE, and leave cross-entropy as it is (of soft labels or a sigmoid it is not divided, and doubles, too).
    Weights of mean 1 keep the balance between the terms.

    >>> loss = SegmentationLoss(dice=1, ce=1, ace=1, binning=Binning(bins=20, kernel="triangular"))
    >>> logits = torch.zeros(1, 2, 4, requires_grad=True)
    >>> terms = loss.terms(logits, torch.tensor([[0, 1, 0, 1]]))
    >>> terms.total.backward()
    >>> [round(term.item(), 3) for term in terms]
    [1.026, 0.333, 0.693, 0.0]
    """

    def __init__(
        self,
        dice: float = 1.0,
        ce: float = 1.0,
        ace: float = 1.0,
        binning: Binning | None = None,
        *,
        activation: Activation = "softmax",
        empty_bins: EmptyBins = "skip",
        absent_classes: AbsentClasses = "zero",
        class_weights: Sequence[float] | Tensor | None = None,
        background: bool = True,
        ignore_index: int | None = None,
        backend: Backend | None = None,
    ) -> None:
        super().__init__()
        for name, weight in (("dice", dice), ("ce", ce), ("ace", ace)):
            if not (is_number(weight) and weight >= 0):
                raise ConfigError(f"the weight {name} must be a number of at least 0; got {weight!r}.")
        if activation == "none":
            raise ConfigError("SegmentationLoss needs logits: activation must be 'softmax' or 'sigmoid'; got 'none'.")
        self.dice, self.ce, self.ace = dice, ce, ace
        self.calibration = ACELoss(
            binning,
            activation=activation,
            empty_bins=empty_bins,
            absent_classes=absent_classes,
            class_weights=class_weights,
            background=background,
            ignore_index=ignore_index,
            backend=backend,
        )

    def extra_repr(self) -> str:
        return f"dice={self.dice!r}, ce={self.ce!r}, ace={self.ace!r}"

    def forward(self, logits: Logits, labels: Tensor, *, mask: Tensor | None = None) -> Tensor:
        """The weighted sum, in the precision of the logits (float32 for half).

        logits: (case, class, ...), or a list of them at several scales.
        labels: as `bin_statistics` takes them.
        mask: (case, ...) or (case, 1, ...); voxels where it is 0 are left out.
        """
        return self.terms(logits, labels, mask=mask).total

    if TYPE_CHECKING:  # torch's own takes and gives anything

        def __call__(self, logits: Logits, labels: Tensor, *, mask: Tensor | None = None) -> Tensor: ...

    def terms(self, logits: Logits, labels: Tensor, *, mask: Tensor | None = None) -> LossTerms:
        """The weighted sum and each term by itself, for a log.

        logits, labels, mask: as in a call of the loss.
        """
        total, *terms = _over_scales(self._one_scale, logits, labels, mask).unbind()
        return LossTerms(total, *(term.detach() for term in terms))

    def _one_scale(self, logits: Tensor, labels: Tensor, mask: Tensor | None) -> Tensor:
        calibration = self.calibration
        voxels = _need_cases(read_voxels(logits, labels, mask=mask, ignore_index=calibration.ignore_index))
        stats, sums = sums_of(
            voxels,
            binning=calibration.binning if self.ace else None,
            activation=calibration.activation,
            classes=bool(self.dice or self.ce),
            backend=calibration.backend,
        )
        zero = sums.new_zeros(())
        dice = self._dice(sums) if self.dice else zero
        ce = self._cross_entropy(sums, exclusive=voxels.labels.shape[1] != sums.shape[1]) if self.ce else zero
        ace = calibration.of(stats) if stats is not None else zero
        terms = torch.stack([self.dice * dice + self.ce * ce + self.ace * ace, dice, ce, ace])
        return terms.to(voxels.inputs.dtype)

    def _dice(self, sums: Tensor) -> Tensor:
        weights = self.calibration.class_weights
        ratio = 2 * sums[..., INTERSECTION] / (sums[..., PROBABILITY_SQUARED] + sums[..., LABEL_SQUARED] + 1e-5)
        loss = (1 - ratio) if weights is None else (1 - ratio) * _fitting(weights, sums[..., 0])
        return loss.mean() if self.calibration.background or loss.shape[1] == 1 else loss[:, 1:].mean()

    def _cross_entropy(self, sums: Tensor, *, exclusive: bool) -> Tensor:
        entropy, voxels = sums[..., CROSS_ENTROPY], sums[:, 0, VOXELS].sum()
        if self.calibration.class_weights is not None:
            weights = _fitting(self.calibration.class_weights, entropy)
            entropy = entropy * weights
            if exclusive and self.calibration.activation == "softmax":  # a weighted mean, as in torch
                voxels = (weights * sums[..., LABEL]).sum()
        if self.calibration.activation == "sigmoid":
            voxels = voxels * sums.shape[1]
        return entropy.sum() / torch.where(voxels > 0, voxels, 1)


def _over_scales(
    loss: Callable[[Tensor, Tensor, Tensor | None], Tensor], logits: Logits, labels: Tensor, mask: Tensor | None
) -> Tensor:
    """The loss of one output, or the sum over deep-supervision outputs, each half as heavy as the one before."""
    if not isinstance(logits, (list, tuple)):
        return loss(plain("logits", cast(Tensor, logits)), labels, mask)
    if not logits:
        raise ShapeError(
            "deep supervision needs at least one output; got an empty list of logits. Pass at least one output."
        )
    total = None
    for level, output in enumerate(logits):
        size = plain("logits", output).shape[2:]
        term = loss(output, _shrink(labels, size), None if mask is None else _shrink(mask, size)) * 0.5**level
        total = term if total is None else total + term
    assert total is not None  # the list is not empty
    return total


def _shrink(labels: Tensor, size: Sequence[int]) -> Tensor:
    """Labels on a coarser grid: of each coarse voxel the one at its middle, whatever the type."""
    first = plain("labels or mask", labels).ndim - len(size)
    if first not in (1, 2):  # not on this grid at all: refused where the labels are read
        return labels
    for axis, (old, new) in enumerate(zip(labels.shape[first:], size, strict=True), start=first):
        if new != old:
            middle = (torch.arange(new, device=labels.device, dtype=torch.float64) + 0.5) * (old / new)
            labels = labels.index_select(axis, middle.floor().long().clamp_(max=old - 1))
    return labels


def _need_cases(voxels: Voxels) -> Voxels:
    """The same; ShapeError for an empty batch, whose mean loss would be NaN."""
    if not voxels.inputs.shape[0]:
        raise ShapeError(
            f"a batch must have at least one case; got logits {tuple(voxels.inputs.shape)}. Skip empty batches."
        )
    return voxels


def _shown(weights: Tensor | None) -> list[str]:
    """Class weights as they are given, if they are."""
    return [] if weights is None else [f"class_weights={weights.tolist()}"]


def _read_weights(weights: Sequence[float] | Tensor | None) -> Tensor | None:
    if weights is None:
        return None
    try:
        read = torch.as_tensor(weights, dtype=torch.float64).detach().clone()
    except (TypeError, ValueError, RuntimeError, OverflowError):
        read = torch.empty(0)
    if read.ndim != 1 or not read.numel() or not bool((read.isfinite() & (read >= 0)).all()):
        raise ConfigError(f"class_weights must be a list of numbers of at least 0, one per class; got {weights!r}.")
    return read


def _fitting(weights: Tensor, per_class: Tensor) -> Tensor:
    if len(weights) != per_class.shape[1]:
        raise ShapeError(
            f"class_weights must have one entry per class of the logits; got {len(weights)} for {per_class.shape[1]}."
            " Give one weight per class."
        )
    return weights.to(per_class)
