"""The sums in plain torch: short, always right, on any device.

Works through the voxels in chunks, so memory does not grow with the image or the number of bins. Most
voxels of a medical image are background and fall in one cell, where a GPU's atomic additions would queue
up, and on the CPU each has to wait for the one before it: voxels are dealt out to private copies of the sums,
which are added at the end.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from segcal.binning import Cells, locate
from segcal.kernels.spec import (
    CLASS_SUMS,
    CROSS_ENTROPY,
    INTERSECTION,
    PROBABILITY_SQUARED,
    SMALLEST,
    TOLERANCE,
    Gradients,
    Spec,
    Sums,
)

CHUNK, DEVICE_CHUNK = 1 << 18, 1 << 23  # elements (case x class x voxel) at a time, on the CPU and elsewhere
COPIES, DEVICE_COPIES = 4, 256  # private copies of the sums, on the CPU and elsewhere
MOST_COPIES = 1 << 21  # entries in all private copies of one sum together


def forward(inputs: Tensor, labels: Tensor, mask: Tensor | None, spec: Spec) -> Sums:
    """Sums over the voxels of (case, class, voxel) inputs; labels are (case, 1 or class, voxel)."""
    cases, classes, _ = inputs.shape
    wrong = _wrong_label(labels, mask, classes)
    shapes = ((spec.cells, spec.degree + 2), (spec.cells, spec.degree + 1), (CLASS_SUMS,))
    totals = [inputs.new_zeros((cases, classes, *shape), dtype=torch.float64) for shape in shapes]
    outside = False
    if wrong < 0:
        for part in _chunks(inputs):
            chunk = inputs[..., part]
            for total, sums in zip(totals, _chunk_sums(chunk, *_cut(labels, mask, part), spec), strict=True):
                total += sums
            if spec.activation == "none":
                outside |= _reach_outside(chunk, None if mask is None else mask[:, None, part])
    return Sums(totals[0], totals[1], totals[2], wrong, outside)


def backward(inputs: Tensor, labels: Tensor, mask: Tensor | None, spec: Spec, gradients: Gradients) -> Tensor:
    """Gradient with respect to the inputs."""
    gradient = torch.empty_like(inputs)
    for part in _chunks(inputs):
        gradient[..., part] = _chunk_gradient(inputs[..., part], *_cut(labels, mask, part), spec, gradients)
    return gradient


def _chunks(inputs: Tensor) -> list[slice]:
    cases, classes, voxels = inputs.shape
    chunk = CHUNK if inputs.device.type == "cpu" else DEVICE_CHUNK
    if cases == 0:
        return []
    step = max(1, chunk // (cases * classes))
    return [slice(start, start + step) for start in range(0, voxels, step)]


def _cut(labels: Tensor, mask: Tensor | None, part: slice) -> tuple[Tensor, Tensor | None]:
    return labels[..., part], None if mask is None else mask[:, None, part]


def _valid(values: Tensor, mask: Tensor | None) -> Tensor:
    """Values with 0 where the mask is off (even where they were NaN)."""
    return values if mask is None else torch.where(mask, values, 0)


def _wrong_label(labels: Tensor, mask: Tensor | None, classes: int) -> int:
    exclusive = labels.shape[1] != classes
    wrong = ~((labels >= 0) & (labels < classes if exclusive else labels <= 1))  # NaN is wrong, too
    if exclusive and labels.is_floating_point():
        wrong |= labels != labels.floor()
    if mask is not None:
        wrong &= mask[:, None]
    return int(wrong.flatten().int().argmax()) if wrong.numel() and bool(wrong.any()) else -1


def _reach_outside(inputs: Tensor, mask: Tensor | None) -> bool:
    """Whether one lies outside [0, 1] by more than the tolerance; NaN does not."""
    low, high = inputs.aminmax()
    if bool((low >= -TOLERANCE) & (high <= 1 + TOLERANCE)):  # nearly always; not with NaN
        return False
    beyond = (inputs < -TOLERANCE) | (inputs > 1 + TOLERANCE)
    return bool((beyond if mask is None else beyond & mask).any())


def _activate(inputs: Tensor, activation: str) -> Tensor:
    if activation == "softmax":
        return inputs.softmax(1)
    return inputs.sigmoid() if activation == "sigmoid" else inputs.clamp(0, 1)


def _chunk_sums(inputs: Tensor, labels: Tensor, mask: Tensor | None, spec: Spec) -> tuple[Tensor, Tensor, Tensor]:
    cases, classes, _ = inputs.shape
    exclusive = labels.shape[1] != classes
    probabilities = _activate(inputs, spec.activation)
    if exclusive:
        labels = _valid(labels, mask).long()
        present = torch.ones_like(labels, dtype=torch.float64)
    else:
        present = labels.to(torch.float64)

    # What labels touch: for exclusive classes only the true class of each voxel, otherwise all.
    def of_label(values: Tensor) -> Tensor:
        return values.gather(1, labels) if exclusive else values

    moments, label_moments = (
        inputs.new_zeros((cases, classes, 0, spec.degree + more), dtype=torch.float64) for more in (2, 1)
    )
    if spec.cells:
        cell, u = locate(probabilities, _cells(spec), closed=spec.closed)
        shape = (cases, classes, spec.cells)
        moments = _power_sums(cell, u, None, mask, spec.cells, spec.degree + 2).view(*shape, -1)
        if exclusive:
            cell, u = labels * spec.cells + of_label(cell), of_label(u)
        size = classes * spec.cells if exclusive else spec.cells
        label_moments = _power_sums(cell, u, present, mask, size, spec.degree + 1).view(*shape, -1)
    class_sums = inputs.new_zeros((cases, classes, CLASS_SUMS), dtype=torch.float64)
    if spec.classes:
        entropy = _cross_entropy(inputs, probabilities, labels, exclusive, spec.activation)
        squared = _valid(probabilities.to(torch.float64).square(), mask).sum(-1)
        voxels_used = _valid(torch.ones_like(inputs, dtype=torch.float64), mask).sum(-1)
        parts = [entropy, of_label(probabilities).to(torch.float64) * present, present.square(), present]
        entropy, overlap, label_squared, label = (_class_sums(labels, x, mask, classes) for x in parts)
        class_sums = torch.stack([entropy, overlap, squared, label_squared, label, voxels_used], dim=-1)
    return moments, label_moments, class_sums


def _chunk_gradient(inputs: Tensor, labels: Tensor, mask: Tensor | None, spec: Spec, gradients: Gradients) -> Tensor:
    classes = inputs.shape[1]
    exclusive = labels.shape[1] != classes
    narrow = _activate(inputs, spec.activation)
    p, of_class = narrow.to(torch.float64), gradients.class_sums[..., None]
    if exclusive:
        labels = _valid(labels, mask).long()
        y = torch.zeros_like(p).scatter_(1, labels, 1.0)
    else:
        y = labels.to(torch.float64)
    by_p = 2 * of_class[:, :, PROBABILITY_SQUARED] * p + of_class[:, :, INTERSECTION] * y
    if spec.cells:
        cell, u = locate(narrow, _cells(spec), closed=spec.closed)
        by_p += _polynomial(gradients.slopes, cell, u) + y * _polynomial(gradients.label_slopes, cell, u)
    entropy = of_class[:, :, CROSS_ENTROPY]
    if spec.activation == "softmax":
        common = (p * by_p).sum(1, keepdim=True) - (entropy * y).sum(1, keepdim=True)
        result = p * (by_p - common) - entropy * y
    elif spec.activation == "sigmoid":
        result = p * (1 - p) * by_p + entropy * (p - y)
    else:
        result = by_p - torch.where(p >= SMALLEST, entropy * y / p.clamp(min=SMALLEST), 0)
        result = torch.where((inputs < 0) | (inputs > 1), 0, result)
    return _valid(result, mask)


def _cells(spec: Spec) -> Cells:
    return Cells(spec.scale, spec.shift, spec.cells, 1, 0, ())


def _polynomial(coefficients: Tensor, cell: Tensor, u: Tensor) -> Tensor:
    value = torch.zeros_like(u)
    for column in reversed(coefficients.unbind(-1)):
        value = value * u + column.gather(2, cell)
    return value


def _cross_entropy(inputs: Tensor, probabilities: Tensor, labels: Tensor, exclusive: bool, activation: str) -> Tensor:
    """Per voxel, for the true class (exclusive) or for every class."""
    if activation == "sigmoid":
        wide = inputs.to(torch.float64)
        if exclusive:
            labels = functional.one_hot(labels[:, 0], inputs.shape[1]).movedim(-1, 1)
        return functional.binary_cross_entropy_with_logits(wide, labels.to(torch.float64), reduction="none")
    logs = inputs.log_softmax(1) if activation == "softmax" else probabilities.clamp(min=SMALLEST).log()
    if exclusive:
        return -logs.gather(1, labels).to(torch.float64)
    return -labels.to(torch.float64) * torch.where(labels > 0, logs, 0)


def _power_sums(cell: Tensor, u: Tensor, weight: Tensor | None, mask: Tensor | None, size: int, powers: int) -> Tensor:
    """Sums of weight * u**power per row and cell, over private copies that take turns along the voxels."""
    rows, voxels = cell.shape[0] * cell.shape[1], cell.shape[2]
    copies = max(1, min(COPIES if u.device.type == "cpu" else DEVICE_COPIES, MOST_COPIES // (rows * size)))
    if copies > 1:
        cell = cell + size * (torch.arange(voxels, device=u.device) % copies)
    values = torch.ones_like(u) if weight is None else weight
    sums = []
    for power in range(powers):
        values = values * u if power else values
        target = values.new_zeros(rows, copies * size)
        sums.append(target.scatter_add(1, cell.view(rows, -1), _valid(values, mask).view(rows, -1)))
    return torch.stack(sums, dim=-1).view(rows, copies, size, powers).sum(1)


def _class_sums(labels: Tensor, values: Tensor, mask: Tensor | None, classes: int) -> Tensor:
    """Sums per case and class of values given per class, or per voxel for its true class."""
    if values.shape[1] == classes:
        return _valid(values, mask).sum(-1)
    return _power_sums(labels, values, values, mask, classes, 1)[..., 0]
