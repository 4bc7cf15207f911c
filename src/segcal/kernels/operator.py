"""One torch operator over all backends, so that autograd, `torch.compile` and fake tensors work."""

from __future__ import annotations

import importlib
from functools import cache
from typing import Any

import torch
from torch import Tensor

from segcal.binning import Binning, bins_to_cells, cells_to_bins
from segcal.errors import LabelError, RangeError, SegcalError
from segcal.kernels.spec import CLASS_SUMS, LABEL, TOLERANCE, VOXELS, Gradients, Spec, Sums

_MODULES = {
    "torch": "segcal.kernels.reference",
    "numba": "segcal.kernels.numba_cpu",
}


@cache
def _backend(name: str) -> Any:
    return importlib.import_module(_MODULES[name])


# The operators' arguments are plain, as torch wants them: the fields of a Binning (bins = 0: no sums per bin),
# the activation, whether sums per class are wanted, and the backend's name.
def sum_voxels(
    inputs: Tensor,
    labels: Tensor,
    mask: Tensor | None,
    bins: int,
    kernel: str,
    bandwidth: float | None,
    closed: str,
    activation: str,
    classes: bool,
    backend: str,
) -> tuple[Tensor, Tensor]:
    """Sums per bin (case, class, bin, 3) and per class (case, class, 6) of (case, class, voxel) inputs.

    The three are count, confidence sum and label sum. Refuses labels that are none of the classes and,
    without activation, inputs outside [0, 1].
    """
    binning, spec = _plan(bins, kernel, bandwidth, closed, activation, classes)
    sums = _backend(backend).forward(inputs, labels, mask, spec)
    if sums.wrong_label >= 0:
        _refuse_label(labels, sums.wrong_label, inputs.shape[1])
    if sums.outside:
        _refuse_range(inputs, mask)
    if labels.shape[1] == inputs.shape[1] > 1 and activation != "sigmoid":
        _need_exclusive(inputs, labels, mask, sums, spec)
    return _bin_sums(sums.moments, sums.label_moments, binning), sums.class_sums


voxel_sums = torch.library.custom_op("segcal::voxel_sums", sum_voxels, mutates_args=())


@voxel_sums.register_fake
def _(inputs: Tensor, labels: Tensor, mask: Tensor | None, bins: int, *_: object) -> tuple[Tensor, Tensor]:
    pair = inputs.shape[:2]
    return (
        inputs.new_empty((*pair, bins, 3), dtype=torch.float64),
        inputs.new_empty((*pair, CLASS_SUMS), dtype=torch.float64),
    )


@torch.library.custom_op("segcal::voxel_sums_backward", mutates_args=())
def voxel_sums_backward(
    inputs: Tensor,
    labels: Tensor,
    mask: Tensor | None,
    bins: int,
    kernel: str,
    bandwidth: float | None,
    closed: str,
    activation: str,
    classes: bool,
    backend: str,
    bin_gradient: Tensor,
    class_gradient: Tensor,
) -> Tensor:
    """Gradient with respect to the inputs, given those of the two sums."""
    binning, spec = _plan(bins, kernel, bandwidth, closed, activation, classes)
    gradients = Gradients(*_slopes(bin_gradient, binning, spec), class_gradient)
    result: Tensor = _backend(backend).backward(inputs, labels, mask, spec, gradients)
    return result


@voxel_sums_backward.register_fake
def _(inputs: Tensor, *_: object) -> Tensor:
    return torch.empty_like(inputs)


def _no_second_derivative(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
    raise SegcalError(
        " "
        "segcal's losses must not be differentiated twice; they have first derivatives only (no create_graph=True, no "
        "gradient penalty). Leave their terms out of the second derivative."
    )


voxel_sums_backward.register_autograd(_no_second_derivative)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(*inputs[:3])
    ctx.rest = inputs[3:]


def _backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
    return (voxel_sums_backward(*ctx.saved_tensors, *ctx.rest, *gradients), *[None] * 9)


voxel_sums.register_autograd(_backward, setup_context=_setup_context)


def _plan(
    bins: int, kernel: str, bandwidth: float | None, closed: str, activation: str, classes: bool
) -> tuple[Binning | None, Spec]:
    if not bins:
        return None, Spec(activation, 1.0, 0.0, 0, 0, closed, classes)
    binning = Binning(bins, kernel, bandwidth, closed=closed)  # type: ignore[arg-type]
    cells = binning.cells
    return binning, Spec(activation, float(cells.scale), cells.shift, cells.number, cells.degree, closed, classes)


def _bin_sums(moments: Tensor, label_moments: Tensor, binning: Binning | None) -> Tensor:
    """Count, confidence sum and label sum per bin, from sums of powers of u per cell."""
    if binning is None:
        return moments.new_zeros((*moments.shape[:2], 0, 3))
    counts, above = moments[..., :-1], moments[..., 1:]
    confidences = (above + _starts(binning, moments) * counts) / binning.cells.scale
    return cells_to_bins(torch.stack([counts, confidences, label_moments]), binning).movedim(0, -1).contiguous()


def _slopes(gradient: Tensor, binning: Binning | None, spec: Spec) -> tuple[Tensor, Tensor]:
    """The loss's derivative by an input, per cell as a polynomial of u: any voxel's, and what a label adds."""
    if binning is None:
        empty = gradient.new_zeros((*gradient.shape[:2], 0, 1))
        return empty, empty
    count, confidence, label = bins_to_cells(gradient.movedim(-1, 0), binning)
    confidence = confidence / spec.scale
    zero = torch.zeros_like(count[..., :1])
    moments = torch.cat([count + _starts(binning, count) * confidence, zero], -1) + torch.cat([zero, confidence], -1)
    rise = spec.scale * torch.arange(1, spec.degree + 2, dtype=count.dtype, device=count.device)  # of u**n, by x
    return moments[..., 1:] * rise, label[..., 1:] * rise[:-1]


def _starts(binning: Binning, like: Tensor) -> Tensor:
    """Where cells begin, in cells: an input is (start + u) / scale."""
    cells = binning.cells
    return torch.arange(cells.number, dtype=like.dtype, device=like.device)[:, None] - cells.shift


def _need_exclusive(inputs: Tensor, labels: Tensor, mask: Tensor | None, sums: Sums, spec: Spec) -> None:
    """Refuse labels of exclusive classes that sum to more than 1, as far as the sums over a case tell.

    Voxels without a label are no mistake. Probabilities are of exclusive classes if they sum to 1 in every voxel, which
    is looked at only where labels sum to more.
    """
    if spec.classes:
        voxels, found = sums.class_sums[:, 0, VOXELS], sums.class_sums[..., LABEL].sum(1)
    else:
        voxels, found = sums.moments[..., 0].sum(2)[:, 0], sums.label_moments[..., 0].sum((1, 2))
    wrong = found - voxels > (TOLERANCE * voxels if labels.is_floating_point() else 0.5)
    if not bool(wrong.any()):
        return
    if spec.activation == "none":
        apart = (inputs.detach().sum(1) - 1).abs() > TOLERANCE
        if bool((apart if mask is None else apart & mask).any()):
            return
    case = int(wrong.nonzero()[0])
    raise LabelError(
        f"labels of exclusive classes must sum to 1 over the classes in every voxel; in case {case} they sum to "
        f"{float(found[case] / voxels[case]):.4g} on average. Use activation='sigmoid' where classes overlap."
    )


def _refuse_label(labels: Tensor, flat: int, classes: int) -> None:
    case, channel, voxel = (int(i) for i in torch.unravel_index(torch.tensor(flat), labels.shape))
    value = labels[case, channel, voxel].item()
    place = f"voxel {voxel} (counted along the flattened image)"
    if labels.shape[1] == classes:
        raise LabelError(
            f"labels with a channel per class must lie in [0, 1]; case {case}, class {channel}, {place} holds {value}. "
            f"Integer label maps have no channel per class: pass them as (case, ...) or (case, 1, ...)."
        )
    raise LabelError(
        f"labels must be one of the classes 0 to {classes - 1}; case {case}, {place} holds {value}. "
        f"Remap the labels, or exclude such voxels by ignore_index or mask; soft labels need a channel per class."
    )


def _refuse_range(inputs: Tensor, mask: Tensor | None) -> None:
    used = ~inputs.isnan() if mask is None else mask[:, None] & ~inputs.isnan()
    values = torch.where(used, inputs, 0)
    distance = torch.maximum(-values, values - 1)
    case, channel, voxel = (int(i) for i in torch.unravel_index(distance.argmax(), distance.shape))
    raise RangeError(
        f"probabilities must lie in [0, 1]; case {case}, class {channel} reaches {values[case, channel, voxel]:.6g}. "
        f"If these are logits, apply softmax or sigmoid first; if scaled integers, divide by the scale."
    )
