"""The sums on a GPU by Triton: one pass over the voxels forward, one back, probabilities never stored.

A program takes blocks of voxels in turn and adds each block's sums to sums of its own, which no other program
touches; these are added at the end, in float64 and in a fixed order. Within a block, voxels are compared with all
cells between the lowest and the highest that occur: a block of background, as most are, has one. Only many
cells, unless `torch.use_deterministic_algorithms(True)` is set, are added up by atomic operations, whose order
varies.

In the code, x are inputs, p their probabilities, y labels, u the position in a cell, and `on` says which voxels of a
block count. The first use of each configuration is compared with the plain torch path, which takes over where
the kernel cannot be built or disagrees.
"""

from __future__ import annotations

import warnings
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from segcal.kernels import reference, spec
from segcal.kernels.spec import CLASS_SUMS, Gradients, Spec, Sums

# Voxels and cells at a time, and warps: the largest that ptxas keeps in registers, but for a few bytes.
BLOCK, TILE, WARPS = 256, 16, 8
BACKWARD_BLOCK, BACKWARD_WARPS = 512, 4
PROGRAMS = 1024  # a fixed number, so that sums do not depend on the GPU
MOST_SUMS = 1 << 24  # entries in the programs' own sums together
MANY_CELLS = 256  # from here on atomic operations are taken to cost less than comparing; not measured
MOST_VOXELS = 1 << 30  # in a case: positions are counted in 32 bits

CROSS_ENTROPY = tl.constexpr(spec.CROSS_ENTROPY)
INTERSECTION = tl.constexpr(spec.INTERSECTION)
PROBABILITY_SQUARED = tl.constexpr(spec.PROBABILITY_SQUARED)
LABEL_SQUARED = tl.constexpr(spec.LABEL_SQUARED)
LABEL = tl.constexpr(spec.LABEL)
VOXELS = tl.constexpr(spec.VOXELS)
COLUMNS = tl.constexpr(spec.CLASS_SUMS)
SMALLEST = tl.constexpr(spec.SMALLEST)
TOLERANCE = tl.constexpr(spec.TOLERANCE)
NOWHERE = tl.constexpr(1 << 62)


def forward(inputs: Tensor, labels: Tensor, mask: Tensor | None, spec: Spec) -> Sums:
    """See `segcal.kernels.reference.forward`."""
    if inputs.shape[2] > MOST_VOXELS or not _trusted(inputs, labels, mask, spec):
        return reference.forward(inputs, labels, mask, spec)
    return _forward(inputs, labels, mask, spec)


def backward(inputs: Tensor, labels: Tensor, mask: Tensor | None, spec: Spec, gradients: Gradients) -> Tensor:
    """See `segcal.kernels.reference.backward`."""
    if inputs.shape[2] > MOST_VOXELS or not _trusted(inputs, labels, mask, spec):
        return reference.backward(inputs, labels, mask, spec, gradients)
    return _backward(inputs, labels, mask, spec, gradients)


def _forward(inputs: Tensor, labels: Tensor, mask: Tensor | None, spec: Spec) -> Sums:
    cases, classes, voxels = inputs.shape
    columns = 2 * spec.degree + 3  # powers of u, and label times powers of u
    room = MOST_SUMS // max(1, cases * classes * (spec.cells * columns + CLASS_SUMS))
    programs = max(1, min(-(-voxels // BLOCK), PROGRAMS // max(1, cases), room))
    cell_sums = inputs.new_zeros((cases, programs, classes, spec.cells, columns), dtype=torch.float64)
    class_sums = inputs.new_zeros((cases, programs, classes, CLASS_SUMS), dtype=torch.float64)
    wrong = torch.full((cases, programs), NOWHERE.value, dtype=torch.int64, device=inputs.device)
    outside = torch.zeros((cases, programs), dtype=torch.int32, device=inputs.device)
    if inputs.numel():
        scatter = spec.cells > MANY_CELLS and not torch.are_deterministic_algorithms_enabled()
        _forward_pass[(cases * programs,)](
            *_pointers(inputs, labels, mask), cell_sums, class_sums, wrong, outside,
            voxels, classes, programs, spec.cells, *_strides(inputs, labels, mask),
            **_constants(inputs, labels, mask, spec), CLASSES=spec.classes, SCATTER=scatter, BLOCK=BLOCK, TILE=TILE,
            num_warps=WARPS, enable_fp_fusion=False,
        )  # fmt: skip
    sums = cell_sums.sum(1)
    # Positions within a case become positions among all; both answers cross to the CPU together.
    wrong += labels[0].numel() * torch.arange(cases, device=wrong.device)[:, None] if cases else 0
    first, beyond = torch.stack([wrong.min(), outside.max().long()]).tolist() if cases else (NOWHERE.value, 0)
    powers = spec.degree + 2
    return Sums(
        sums[..., :powers], sums[..., powers:], class_sums.sum(1), first if first < NOWHERE.value else -1, bool(beyond)
    )


def _backward(inputs: Tensor, labels: Tensor, mask: Tensor | None, spec: Spec, gradients: Gradients) -> Tensor:
    gradient = torch.empty_like(inputs)
    cases, classes, voxels = inputs.shape
    if not inputs.numel():
        return gradient
    blocks = -(-voxels // BACKWARD_BLOCK)
    _backward_pass[(cases * blocks,)](
        *_pointers(inputs, labels, mask), *(part.contiguous() for part in gradients), gradient,
        voxels, classes, blocks, spec.cells, *_strides(inputs, labels, mask), *gradient.stride(),
        **_constants(inputs, labels, mask, spec), BLOCK=BACKWARD_BLOCK,
        num_warps=BACKWARD_WARPS, enable_fp_fusion=False,
    )  # fmt: skip
    return gradient


def _pointers(inputs: Tensor, labels: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """What the passes read; without a mask its place is taken by anything."""
    return inputs.detach(), labels, labels if mask is None else mask.view(torch.uint8)


def _strides(inputs: Tensor, labels: Tensor, mask: Tensor | None) -> tuple[int, ...]:
    return (*inputs.stride(), *labels.stride(), *((0, 0) if mask is None else mask.stride()))


def _constants(inputs: Tensor, labels: Tensor, mask: Tensor | None, spec: Spec) -> dict[str, Any]:
    """What the passes are compiled for."""
    return {
        "ACTIVATION": spec.activation,
        "SCALE": float(spec.scale),
        "SHIFT": float(spec.shift),
        "CELLS": spec.cells > 0,
        "DEGREE": spec.degree,
        "RIGHT": spec.closed == "right",
        "EXCLUSIVE": labels.shape[1] != inputs.shape[1],
        "MASKED": mask is not None,
    }


def _trusted(inputs: Tensor, labels: Tensor, mask: Tensor | None, spec: Spec) -> bool:
    if inputs.device.type == "cpu":  # Triton's interpreter, which tests ask for
        return True
    exclusive = labels.shape[1] != inputs.shape[1]
    return _agrees(inputs.device, inputs.dtype, labels.dtype, exclusive, mask is not None, spec)


@cache
def _agrees(
    device: torch.device, dtype: torch.dtype, label_dtype: torch.dtype, exclusive: bool, masked: bool, spec: Spec
) -> bool:
    """Whether the kernels give what plain torch gives, on a few random voxels; says so if not.

    The last bit of an activation may carry a voxel over an edge, so a few entries in a hundred may differ.
    """
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(2, 3, 1000, generator=generator, dtype=torch.float64)
    inputs = (logits if spec.activation != "none" else logits.softmax(1)).to(device, dtype)
    labels = torch.randint(0, 2, (2, 1 if exclusive else 3, 1000), generator=generator).to(device, label_dtype)
    mask = (torch.rand(2, 1000, generator=generator) < 0.7).to(device) if masked else None
    shapes = ((2, 3, spec.cells, spec.degree + 1), (2, 3, spec.cells, spec.degree), (2, 3, CLASS_SUMS))
    upstream = Gradients(*(torch.randn(shape, generator=generator, dtype=torch.float64).to(device) for shape in shapes))
    try:
        got = [*_forward(inputs, labels, mask, spec)[:3], _backward(inputs, labels, mask, spec, upstream)]
    except Exception as error:  # whatever stops Triton: no compiler, an old GPU, a driver
        why = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    else:
        expected = [
            *reference.forward(inputs, labels, mask, spec)[:3],
            reference.backward(inputs, labels, mask, spec, upstream),
        ]
        if all(map(_alike, got, expected)):
            return True
        why = "its sums differ"
    warnings.warn(
        f"segcal's Triton kernels must give what plain torch gives; on {device}, {why}. Plain torch is used.",
        RuntimeWarning,
        stacklevel=2,
    )
    return False


def _alike(got: Tensor, expected: Tensor) -> bool:
    if not expected.numel():
        return got.shape == expected.shape
    far = (got - expected).abs() > 1e-4 * (expected.abs() + expected.abs().mean())
    return bool(far.double().mean() <= 0.02)  # NaN is near nothing, but neither is it far: inputs here have none


@triton.jit
def _forward_pass(
    x_ptr, y_ptr, mask_ptr, cell_ptr, class_ptr, wrong_ptr, outside_ptr,
    voxels, classes, programs, cells, x_case, x_class, x_voxel, y_case, y_class, y_voxel, mask_case, mask_voxel,
    ACTIVATION: tl.constexpr, SCALE: tl.constexpr, SHIFT: tl.constexpr, CELLS: tl.constexpr, DEGREE: tl.constexpr,
    RIGHT: tl.constexpr, EXCLUSIVE: tl.constexpr, MASKED: tl.constexpr, CLASSES: tl.constexpr, SCATTER: tl.constexpr,
    BLOCK: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    powers: tl.constexpr = DEGREE + 2
    columns: tl.constexpr = 2 * DEGREE + 3
    own = tl.program_id(0).to(tl.int64)
    case = own // programs
    start = (own % programs).to(tl.int32) * BLOCK
    voxel = start.to(tl.int64) + tl.arange(0, BLOCK)
    one = tl.full((BLOCK,), 1.0, tl.float64)
    wrong = tl.full((BLOCK,), NOWHERE, tl.int64)
    outside = tl.zeros((BLOCK,), tl.int32)
    for _ in range(start, voxels, programs * BLOCK):
        on = voxel < voxels
        if MASKED:
            on = on & (tl.load(mask_ptr + case * mask_case + voxel * mask_voxel, mask=on, other=0) != 0)
        x_at = x_ptr + case * x_case + voxel * x_voxel
        y_at = y_ptr + case * y_case + voxel * y_voxel
        cells_at = cell_ptr + own * classes * cells * columns
        class_at = class_ptr + own * classes * COLUMNS
        place = voxel  # among the labels of the case
        top, total = _normalizer(x_at, on, classes, x_class, ACTIVATION)
        if EXCLUSIVE:
            y = tl.load(y_at, mask=on, other=0)
            strange = on & ~((y >= 0) & (y < classes) & (y.to(tl.int64) == y))
            wrong = tl.minimum(wrong, tl.where(strange, place, NOWHERE))
        for c in range(classes):
            x = tl.load(x_at, mask=on, other=0.0)
            p = _probability(x, top, total, ACTIVATION)
            weight = _label(y_at, c, on, EXCLUSIVE)
            if ACTIVATION == "none":
                outside = outside | (on & ((x < -TOLERANCE) | (x > 1 + TOLERANCE))).to(tl.int32)
            if not EXCLUSIVE:
                strange = on & ~((weight >= 0) & (weight <= 1))
                wrong = tl.minimum(wrong, tl.where(strange, place, NOWHERE))
                y_at += y_class
                place += voxels
            labeled = on & ~(weight == 0)  # not 0, or NaN
            if CELLS:
                cell, u = _locate(p, cells, SCALE, SHIFT, RIGHT)
                _add_powers(cells_at, cell, u, one, on, cells, p.dtype, powers, columns, SCATTER, TILE)
                labels_at = cells_at + powers
                _add_powers(labels_at, cell, u, weight, labeled, cells, p.dtype, powers - 1, columns, SCATTER, TILE)
                cells_at += cells * columns
            if CLASSES:
                entropy = _cross_entropy(x, p, top, total, weight, ACTIVATION)
                wide = p.to(tl.float64)
                tl.atomic_add(class_at + CROSS_ENTROPY, tl.sum(tl.where(on, entropy, 0.0)))
                tl.atomic_add(class_at + INTERSECTION, tl.sum(tl.where(labeled, wide * weight, 0.0)))
                tl.atomic_add(class_at + PROBABILITY_SQUARED, tl.sum(tl.where(on, wide * wide, 0.0)))
                tl.atomic_add(class_at + LABEL_SQUARED, tl.sum(tl.where(on, weight * weight, 0.0)))
                tl.atomic_add(class_at + LABEL, tl.sum(tl.where(on, weight, 0.0)))
                tl.atomic_add(class_at + VOXELS, tl.sum(on.to(tl.float64)))
                class_at += COLUMNS
            x_at += x_class
        voxel += programs * BLOCK
    tl.store(wrong_ptr + own, tl.min(wrong))
    tl.store(outside_ptr + own, tl.max(outside))


@triton.jit
def _backward_pass(
    x_ptr, y_ptr, mask_ptr, slope_ptr, label_slope_ptr, class_ptr, gradient_ptr,
    voxels, classes, blocks, cells, x_case, x_class, x_voxel, y_case, y_class, y_voxel, mask_case, mask_voxel,
    gradient_case, gradient_class, gradient_voxel,
    ACTIVATION: tl.constexpr, SCALE: tl.constexpr, SHIFT: tl.constexpr, CELLS: tl.constexpr, DEGREE: tl.constexpr,
    RIGHT: tl.constexpr, EXCLUSIVE: tl.constexpr, MASKED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    own = tl.program_id(0).to(tl.int64)
    case = own // blocks
    voxel = (own % blocks) * BLOCK + tl.arange(0, BLOCK)
    inside = voxel < voxels
    on = inside
    if MASKED:
        on = on & (tl.load(mask_ptr + case * mask_case + voxel * mask_voxel, mask=on, other=0) != 0)
    first_x = x_ptr + case * x_case + voxel * x_voxel
    first_y = y_ptr + case * y_case + voxel * y_voxel
    top, total = _normalizer(first_x, on, classes, x_class, ACTIVATION)
    common = tl.zeros((BLOCK,), tl.float64)  # of the softmax: sum of p g over classes, less the cross-entropy's weight
    # The softmax needs `common` of all classes before the gradient of the first.
    for store in tl.static_range(0 if ACTIVATION == "softmax" else 1, 2):
        x_at, y_at = first_x, first_y
        slopes_at = slope_ptr + case * classes * cells * (DEGREE + 1)
        label_slopes_at = label_slope_ptr + case * classes * cells * DEGREE
        class_at = class_ptr + case * classes * COLUMNS
        gradient_at = gradient_ptr + case * gradient_case + voxel * gradient_voxel
        for c in range(classes):
            x = tl.load(x_at, mask=on, other=0.0)
            narrow = _probability(x, top, total, ACTIVATION)
            p = narrow.to(tl.float64)
            y = _label(y_at, c, on, EXCLUSIVE)
            entropy = tl.load(class_at + CROSS_ENTROPY)
            slope = 2 * tl.load(class_at + PROBABILITY_SQUARED) * p + tl.load(class_at + INTERSECTION) * y
            if CELLS:
                cell, u = _locate(narrow, cells, SCALE, SHIFT, RIGHT)
                slope += _polynomial(slopes_at, cell, u, DEGREE + 1)
                slope += y * _polynomial(label_slopes_at, cell, u, DEGREE)
            if store == 0:
                common += p * slope - entropy * y
            else:
                if ACTIVATION == "softmax":
                    result = p * (slope - common) - entropy * y
                elif ACTIVATION == "sigmoid":
                    result = p * (1 - p) * slope + entropy * (p - y)
                else:
                    result = slope - tl.where(p >= SMALLEST, entropy * y / tl.maximum(p, SMALLEST), 0.0)
                    result = tl.where((x < 0) | (x > 1), 0.0, result)
                tl.store(gradient_at, tl.where(on, result, 0.0).to(x.dtype), mask=inside)
            x_at += x_class
            if not EXCLUSIVE:
                y_at += y_class
            slopes_at += cells * (DEGREE + 1)
            label_slopes_at += cells * DEGREE
            class_at += COLUMNS
            gradient_at += gradient_class


@triton.jit
def _normalizer(first_x, on, classes, x_class, ACTIVATION: tl.constexpr):
    """Of the softmax, each voxel's largest logit and the sum of exponentials relative to it."""
    top = tl.load(first_x, mask=on, other=0.0)
    total = tl.zeros_like(top)
    if ACTIVATION == "softmax":
        x_at = first_x
        for _ in range(1, classes):
            x_at += x_class
            top = tl.maximum(top, tl.load(x_at, mask=on, other=0.0))
        x_at = first_x
        for _ in range(classes):
            total += tl.exp(tl.load(x_at, mask=on, other=0.0) - top)
            x_at += x_class
    return top, total


@triton.jit
def _probability(x, top, total, ACTIVATION: tl.constexpr):
    if ACTIVATION == "softmax":
        p = tl.exp(x - top) / total
    elif ACTIVATION == "sigmoid":
        p = 1 / (1 + tl.exp(-x))
    else:
        p = tl.where(x < 0, 0.0, tl.where(x > 1, 1.0, x)).to(x.dtype)
    return p


@triton.jit
def _cross_entropy(x, p, top, total, y, ACTIVATION: tl.constexpr):
    if ACTIVATION == "softmax":
        entropy = tl.where(y == 0, 0.0, y * (top + tl.log(total) - x).to(tl.float64))
    elif ACTIVATION == "sigmoid":
        wide = x.to(tl.float64)
        entropy = tl.where(wide > 0, wide, 0.0) - wide * y + tl.log(1 + tl.exp(-tl.abs(wide)))
    else:
        entropy = tl.where(y == 0, 0.0, -y * tl.log(tl.where(p < SMALLEST, SMALLEST, p)).to(tl.float64))
    return entropy


@triton.jit
def _locate(p, cells, SCALE: tl.constexpr, SHIFT: tl.constexpr, RIGHT: tl.constexpr):
    """Cell and position in it, as `segcal.binning.locate` has them."""
    wide = p.to(tl.float64)
    t = wide * SCALE + SHIFT
    cell = tl.ceil(t) - 1 if RIGHT else tl.floor(t)
    if p.dtype == tl.float64:
        high = wide.to(tl.float32).to(tl.float64)
        edge = cell + 1 if RIGHT else cell
        rest = (high * SCALE + SHIFT - edge) + (wide - high) * SCALE
        cell += tl.where(rest > 0, 1.0, 0.0) if RIGHT else tl.where(rest < 0, -1.0, 0.0)
    cell = tl.where(cell > 0, tl.where(cell < cells, cell, cells - 1), 0)
    return cell.to(tl.int32), t - cell


@triton.jit
def _add_powers(
    to, cell, u, weight, on, cells,
    NARROW: tl.constexpr, POWERS: tl.constexpr, COLUMNS: tl.constexpr, SCATTER: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Add weight * u**power to the sums of each cell; within a block in the inputs' precision."""
    low, high = tl.min(tl.where(on, cell, cells)), tl.max(tl.where(on, cell, -1))
    if low == high:
        value = tl.where(on, weight, 0.0)
        for power in tl.static_range(POWERS):
            tl.atomic_add(to + low.to(tl.int64) * COLUMNS + power, tl.sum(value))
            value = tl.where(on, value * u, 0.0)
    elif low < high:
        if SCATTER:
            value = weight
            for power in tl.static_range(POWERS):
                tl.atomic_add(to + cell.to(tl.int64) * COLUMNS + power, value, mask=on)
                value = value * u
        else:
            for tile in range(low // TILE, high // TILE + 1):
                here = tile * TILE + tl.arange(0, TILE)
                chosen = on[:, None] & (cell[:, None] == here[None, :])
                value = weight
                for power in tl.static_range(POWERS):
                    sums = tl.sum(tl.where(chosen, value.to(NARROW)[:, None], 0.0), 0)
                    tl.atomic_add(to + here.to(tl.int64) * COLUMNS + power, sums.to(tl.float64), mask=here < cells)
                    value = value * u


@triton.jit
def _label(at, c, on, EXCLUSIVE: tl.constexpr):
    """How much each voxel belongs to a class."""
    y = tl.load(at, mask=on, other=0)
    if EXCLUSIVE:
        y = tl.where(on & (y == c), 1.0, 0.0)
    return y.to(tl.float64)


@triton.jit
def _polynomial(at, cell, u, TERMS: tl.constexpr):
    """The polynomial of each voxel's cell, at its position there."""
    value = tl.zeros_like(u)
    for power in tl.static_range(TERMS - 1, -1, -1):
        value = value * u + tl.load(at + cell.to(tl.int64) * TERMS + power)
    return value
