"""The sums on the CPU by numba: cuts the voxels into segments, runs the compiled passes on threads, adds up.

Segments have sums of their own, added in a fixed order: the result does not depend on the number of
threads. The threads are our own and numba runs without its OpenMP layer, which dies in forked children.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from segcal.kernels import numba_passes
from segcal.kernels.spec import CLASS_SUMS, INTERSECTION, Gradients, Spec, Sums

if TYPE_CHECKING:
    from torch import Tensor

Array = NDArray[Any]

SEGMENT = 1 << 16  # voxels at least, so that a task is worth a thread
MOST_SEGMENTS = 16
NO_MASK = np.zeros((1, 0), dtype=np.bool_)
_ACTIVATIONS = {"none": numba_passes.NONE, "softmax": numba_passes.SOFTMAX, "sigmoid": numba_passes.SIGMOID}


def forward(inputs: Tensor, labels: Tensor, mask: Tensor | None, spec: Spec) -> Sums:
    """See `segcal.kernels.reference.forward`."""
    import torch

    *sums, wrong, outside = array_sums(*_arrays(inputs, labels, mask), spec, threads=torch.get_num_threads())
    moments, label_moments, class_sums = (torch.from_numpy(array) for array in sums)
    return Sums(moments, label_moments, class_sums, wrong, outside)


def array_sums(x: Array, y: Array, valid: Array, spec: Spec, *, threads: int) -> tuple[Array, Array, Array, int, bool]:
    """The same of numpy arrays, for those who do without torch; an empty `valid` is no mask."""
    cases, classes, voxels = x.shape
    raw, kind = _bytes(y)
    segments = segments_of(voxels)
    moments = np.zeros((cases, len(segments), classes, spec.cells, spec.degree + 2))
    label_moments = np.zeros((cases, len(segments), classes, spec.cells, spec.degree + 1))
    class_sums = np.zeros((cases, len(segments), classes, CLASS_SUMS))
    found = np.full((cases, len(segments), 2), (-1, 0), dtype=np.int64)

    def segment(b: int, s: int) -> None:
        where = (x[b], raw[b], kind, valid[b % len(valid)], *segments[s])
        numba_passes.forward(
            *where, *_arguments(spec), spec.classes, moments[b, s], label_moments[b, s], class_sums[b, s], found[b, s]
        )

    run_segments(segment, cases, len(segments), threads)
    first = np.argwhere(found[..., 0] >= 0)
    wrong = -1 if not len(first) else int(first[0][0] * y[0].size + found[(*first[0], 0)])
    outside = bool(found[..., 1].any())
    return moments.sum(axis=1), label_moments.sum(axis=1), class_sums.sum(axis=1), wrong, outside


def backward(inputs: Tensor, labels: Tensor, mask: Tensor | None, spec: Spec, gradients: Gradients) -> Tensor:
    """See `segcal.kernels.reference.backward`."""
    import torch

    x, y, valid = _arrays(inputs, labels, mask)
    slopes, of_class = _slopes(spec, gradients), gradients.class_sums
    narrow = [part.to(inputs.dtype).contiguous().numpy() for part in (*slopes, of_class)]
    gradient = torch.zeros_like(inputs) if mask is not None else torch.empty_like(inputs)
    raw, kind = _bytes(y)
    out, segments = gradient.numpy(), segments_of(x.shape[2])
    activation, scale, shift, cells, _, right = _arguments(spec if spec.cells else spec._replace(scale=0.0, cells=1))

    def segment(b: int, s: int) -> None:
        where = (x[b], raw[b], kind, valid[b % len(valid)], *segments[s])
        numba_passes.backward(*where, activation, scale, shift, cells, right, *(part[b] for part in narrow), out[b])

    run_segments(segment, len(x), len(segments), torch.get_num_threads())
    return gradient


def _slopes(spec: Spec, gradients: Gradients) -> tuple[Tensor, Tensor, Tensor]:
    """Polynomials on at least one cell: the slope by any voxel's probability, what a label of 1 adds, and their sum."""
    from torch.nn.functional import pad

    cells = max(spec.cells, 1)
    any_voxel = pad(gradients.slopes, (0, 0, 0, cells - gradients.slopes.shape[2]))
    label = gradients.label_slopes
    label = pad(label, (0, max(spec.degree, 1) - label.shape[3], 0, cells - label.shape[2]))
    label = label + pad(gradients.class_sums[..., None, INTERSECTION, None], (0, label.shape[3] - 1))
    return any_voxel, label, any_voxel + pad(label, (0, any_voxel.shape[3] - label.shape[3]))


def _arrays(inputs: Tensor, labels: Tensor, mask: Tensor | None) -> tuple[Array, Array, Array]:
    """Numpy views; no mask is an empty one, so that numba compiles one form, not two."""
    valid = NO_MASK if mask is None else mask.numpy()
    return inputs.detach().numpy(), labels.numpy(), valid


def _bytes(labels: Array) -> tuple[Array, int]:
    """Labels as bytes, and the number of their type."""
    return labels.view(np.uint8), numba_passes.LABEL_KINDS.index(labels.dtype.name)


def _arguments(spec: Spec) -> tuple[int, float, float, int, int, bool]:
    activation = _ACTIVATIONS[spec.activation]
    return activation, float(spec.scale), float(spec.shift), spec.cells, spec.degree, spec.closed == "right"


def segments_of(voxels: int) -> list[tuple[int, int]]:
    """Where to cut the voxels: always alike, whatever the number of threads."""
    step = max(SEGMENT, -(-voxels // MOST_SEGMENTS))
    return [(start, min(start + step, voxels)) for start in range(0, max(voxels, 1), step)]


_pool: tuple[int, int, ThreadPoolExecutor] | None = None  # process, threads, pool: a forked child makes its own


def run_segments(segment: Callable[[int, int], None], cases: int, segments: int, threads: int) -> None:
    """Call `segment(case, segment)` for all of them, on threads of our own."""
    global _pool
    tasks = [(b, s) for b in range(cases) for s in range(segments)]
    if threads == 1 or len(tasks) == 1:
        for task in tasks:
            segment(*task)
        return
    if _pool is None or _pool[:2] != (os.getpid(), threads):
        _pool = (os.getpid(), threads, ThreadPoolExecutor(threads, thread_name_prefix="segcal"))
    for _ in _pool[2].map(lambda task: segment(*task), tasks):
        pass
