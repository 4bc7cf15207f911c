"""From probabilities (or logits) and labels to sums: reads what the caller has, picks a backend, asks it."""

from __future__ import annotations

import math
import os
from numbers import Integral
from typing import Literal, NamedTuple, cast, get_args

import torch
from torch import Tensor

from segcal.binning import Binning, need_common_edges
from segcal.errors import ConfigError, LabelError, RangeError, ShapeError, one_of
from segcal.kernels.operator import sum_voxels, voxel_sums
from segcal.statistics import BinStatistics

Activation = Literal["softmax", "sigmoid", "none"]
Backend = Literal["torch", "numba"]
BACKENDS: tuple[Backend, ...] = get_args(Backend)
BACKEND_VARIABLE = "SEGCAL_BACKEND"


def bin_statistics(
    probabilities: Tensor,
    labels: Tensor,
    *,
    bins: int | None = None,
    binning: Binning | None = None,
    mask: Tensor | None = None,
    ignore_index: int | None = None,
    backend: Backend | None = None,
) -> BinStatistics:
    """Bin statistics of probabilities and labels, exact at any number of voxels, differentiable.

    Raises ShapeError where shapes or devices do not belong together, LabelError for a label that is none of the
    classes, RangeError for a probability that is NaN or outside [0, 1], ConfigError for an option that cannot be used.

    probabilities: (case, class, ...), floating point, after softmax or sigmoid.
    labels: an integer map, (case, ...) or (case, 1, ...), or a channel per class with values in [0, 1] (one-hot or
        soft). With a single class they are that class's own.
    bins: number of hard bins; 20 if neither this nor a binning is given.
    binning: bins and kernel, in place of `bins`.
    mask: (case, ...) or (case, 1, ...); voxels where it is 0 are left out.
    ignore_index: voxels with this label are left out. Needs an integer label map.
    backend: "torch" or "numba" (on the CPU); by default the choice of `pick_backend`.

    >>> probabilities = torch.tensor([[[0.8, 0.3, 0.6], [0.2, 0.7, 0.4]]])  # one case, two classes
    >>> stats = bin_statistics(probabilities, torch.tensor([[0, 1, 1]]), bins=2)
    >>> stats.label_sum
    tensor([[[0., 1.],
             [1., 1.]]], dtype=torch.float64)
    """
    if bins is not None and binning is not None:
        raise ConfigError(
            "bins and binning must not be given together; got both. Use Binning(bins=..., kernel=...) alone."
        )
    binning = check_binning(binning) or Binning(bins=20 if bins is None else bins)
    voxels = read_voxels(probabilities, labels, mask=mask, ignore_index=ignore_index)
    stats, _ = sums_of(voxels, binning=binning, activation="none", classes=False, backend=backend)
    assert stats is not None  # a binning was given
    finite = stats.confidence_sum.detach().isfinite().all(-1)
    if not bool(finite.all()):
        case, channel = (~finite).nonzero()[0].tolist()
        raise RangeError(
            f"probabilities must lie in [0, 1]; case {case}, class {channel} contains NaN. "
            f"Look for overflow in the network (half precision?), or exclude such voxels by mask."
        )
    return stats


def check_binning(binning: Binning | None) -> Binning | None:
    """The binning; ConfigError where it is something else, such as a number of bins, or has equal-mass bins."""
    if binning is not None and not isinstance(binning, Binning):
        raise ConfigError(f"binning must be a Binning, as Binning(bins=20); got {binning!r}.")
    if binning is not None:
        need_common_edges(binning, "filled with probabilities")
    return binning


def check_ignored(ignore_index: int | None) -> int | None:
    """The label that is left out; ConfigError where it is no whole number."""
    if ignore_index is not None and (isinstance(ignore_index, bool) or not isinstance(ignore_index, Integral)):
        raise ConfigError(f"ignore_index must be a whole number; got {ignore_index!r}.")
    return ignore_index


def check_classes(classes: int, activation: str) -> None:
    """ShapeError for a softmax of one channel, which is 1 everywhere, whatever the logits."""
    if activation == "softmax" and classes == 1:
        raise ShapeError(
            'activation="softmax" needs logits of at least 2 classes; got one channel. Use activation="sigmoid".'
        )


def activated(inputs: Tensor, activation: Activation) -> Tensor:
    """Probabilities of (case, class, ...) inputs; half precision is widened first.

    ShapeError for a softmax of one channel.

    >>> activated(torch.zeros(1, 2, 1, dtype=torch.float16), "softmax")
    tensor([[[0.5000],
             [0.5000]]])
    """
    one_of("activation", activation, get_args(Activation))
    check_classes(inputs.shape[1], activation)
    wide = inputs if inputs.dtype == torch.float64 else inputs.float()
    if activation == "none":
        return wide
    return wide.softmax(1) if activation == "softmax" else wide.sigmoid()


class Voxels(NamedTuple):
    """Inputs (case, class, voxel), labels (case, 1 or class, voxel) and mask (case, voxel), as backends want them."""

    inputs: Tensor
    labels: Tensor
    mask: Tensor | None


def read_voxels(
    inputs: Tensor, labels: Tensor, *, mask: Tensor | None = None, ignore_index: int | None = None
) -> Voxels:
    """Check that inputs, labels and mask belong together, and lay them out as one list of voxels per case.

    Half precision is widened to float32 (which is exact). Values are checked later, where they are read anyway.
    """
    inputs, labels = plain("logits or probabilities", inputs), plain("labels", labels)
    _need_values(inputs, labels)
    if not inputs.is_floating_point():
        raise ShapeError(
            f"logits or probabilities must be floating point; got {inputs.dtype}. Convert or rescale them."
        )
    if inputs.ndim < 3:
        raise ShapeError(
            f"logits or probabilities must have the axes (case, class, space, ...); got {tuple(inputs.shape)}."
            " Add the missing axes."
        )
    cases, classes, *space = inputs.shape
    voxels = math.prod(space)
    if classes == 0:
        raise ShapeError(f"there must be at least one class; got {tuple(inputs.shape)}. Check the class axis.")
    per_class = _per_class(inputs, labels)
    check_ignored(ignore_index)
    if ignore_index is not None:
        if per_class and classes > 1:
            raise LabelError(
                "ignore_index needs an integer label map; these labels have a channel per class. Pass a mask instead."
            )
        keep = _differs(labels, ignore_index).reshape(cases, voxels)
    labels = _label_dtype(labels).reshape(cases, classes if per_class else 1, voxels)
    if mask is not None:
        mask = plain("mask", mask)
        if tuple(mask.shape) not in ((cases, *space), (cases, 1, *space)):
            raise ShapeError(
                f"mask must be (case, ...) or (case, 1, ...) on the same grid; got {tuple(mask.shape)} for "
                f"{tuple(inputs.shape)}."
                " Reshape or resample the mask."
            )
        mask = (mask != 0).reshape(cases, voxels)
    if ignore_index is not None:
        mask = keep if mask is None else mask & keep
    wide = inputs if inputs.dtype in (torch.float32, torch.float64) else inputs.float()
    mask = None if mask is None else mask.contiguous()
    return Voxels(wide.reshape(cases, classes, voxels).contiguous(), labels.contiguous(), mask)


def _need_values(inputs: Tensor, labels: Tensor) -> None:
    """Refuse tensors whose values cannot be read here and now, as those of torch.func and of torch.export."""
    if labels.device != inputs.device:
        raise ShapeError(
            f"labels must be on the device of logits or probabilities, which is {inputs.device}; they are on "
            f"{labels.device}."
            " Move them to the same device."
        )
    if getattr(torch.compiler, "is_exporting", bool)():
        raise ConfigError("a loss or its sums cannot be exported; give torch.export the network alone.")
    if not torch.compiler.is_compiling() and torch._C._functorch.is_functorch_wrapped_tensor(inputs):
        raise ConfigError(
            "sums over voxels do not go through torch.func (vmap, grad, jvp, jacrev and others); give the whole batch "
            "at once, and take gradients by backward() or torch.autograd.grad."
        )


def sums_of(
    voxels: Voxels, *, binning: Binning | None, activation: str, classes: bool, backend: Backend | None
) -> tuple[BinStatistics | None, Tensor]:
    """Bin statistics (where a binning asks for them) and class sums, with gradients to the inputs."""
    check_classes(voxels.inputs.shape[1], activation)
    chosen = pick_backend(voxels.inputs, backend)
    if voxels.inputs.device.type == "meta":
        raise ShapeError(
            "logits or probabilities must hold values; these are on the meta device, which has none."
            " Move them to a real device."
        )
    kind = binning or Binning(1)
    bins = 0 if binning is None else binning.bins
    # Without a gradient the function does as well as the operator, whose first use imports the compiler for seconds.
    plain = type(voxels.inputs) is Tensor and not voxels.inputs.requires_grad and not torch.compiler.is_compiling()
    bin_sums, class_sums = (sum_voxels if plain else voxel_sums)(
        *voxels, bins, kind.kernel, kind.bandwidth, kind.closed, activation, classes, chosen
    )
    if binning is None:
        return None, class_sums
    count, confidence_sum, label_sum = bin_sums.unbind(-1)
    return BinStatistics(count, confidence_sum, label_sum, binning), class_sums


def pick_backend(inputs: Tensor, backend: Backend | None) -> Backend:
    """The backend that was asked for; otherwise numba for tensors on the CPU and plain torch elsewhere.

    It is asked for by the argument or, wherever the inputs are on its device, by the variable SEGCAL_BACKEND.
    """
    on_cpu = inputs.device.type == "cpu"
    if backend is not None:
        one_of("backend", backend, BACKENDS)
        if backend == "numba" and not on_cpu:
            raise ConfigError(f"backend='numba' works on the CPU; the inputs are on {inputs.device}. Use 'torch'.")
        return backend
    wanted = cast("Backend | None", os.environ.get(BACKEND_VARIABLE) or None)
    if wanted is not None:
        one_of(BACKEND_VARIABLE, wanted, BACKENDS, hint="Unset it to let segcal pick.")
    return (wanted or "numba") if on_cpu else "torch"


def plain(name: str, tensor: Tensor) -> Tensor:
    """The tensor itself, without a subclass such as MONAI's MetaTensor, which would follow every operation.

    What is no tensor is refused by its name, as its caller knows it.
    """
    if not isinstance(tensor, Tensor):
        kind = type(tensor)
        hint = " Pass torch.from_numpy(array)." if kind.__module__ == "numpy" else ""
        raise ShapeError(f"{name} must be a torch tensor; got {kind.__module__}.{kind.__qualname__}.{hint}")
    if tensor.layout != torch.strided:
        raise ShapeError(f"{name} must be a dense tensor; got {tensor.layout}. Pass {name}.to_dense().")
    return tensor if type(tensor) is Tensor else tensor.as_subclass(Tensor)


def _per_class(inputs: Tensor, labels: Tensor) -> bool:
    """Whether labels have a channel per class; the number of axes decides, never the values."""
    cases, classes, *space = inputs.shape
    shape = tuple(labels.shape)
    if shape == (cases, classes, *space) or (classes == 1 and shape == (cases, *space)):
        return True
    if shape in ((cases, *space), (cases, 1, *space)):
        return False
    raise ShapeError(
        f"labels must be an integer map (case, ...) or (case, 1, ...), or have a channel per class; got {shape} for "
        f"inputs of shape {tuple(inputs.shape)}. Check the order of axes, and resample to one grid if they differ."
    )


def _differs(labels: Tensor, value: int) -> Tensor:
    """Where labels are not this value; torch would wrap a value beyond their type (-1 would mean 255 in uint8)."""
    if not labels.is_floating_point() and labels.dtype != torch.bool:
        limits = torch.iinfo(labels.dtype)
        if not limits.min <= value <= limits.max:
            return torch.ones_like(labels, dtype=torch.bool)
    return labels != value


def _label_dtype(labels: Tensor) -> Tensor:
    """Labels in one of the few types that backends read, values unchanged."""
    if labels.dtype in (torch.float32, torch.float64, torch.uint8, torch.int16, torch.int64):
        return labels
    if labels.dtype == torch.bool:
        return labels.view(torch.uint8)
    if labels.is_floating_point():
        return labels.float()
    if labels.is_complex():
        raise LabelError(f"labels must be real numbers; got {labels.dtype}. Convert them to integers.")
    return labels.to(torch.int16 if labels.dtype == torch.int8 else torch.int64)
