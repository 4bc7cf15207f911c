"""From the values and labels of voxels to the sums of a case.

All in numpy: torch takes seconds to import, and a worker process that only reads and counts need not wait for it.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from segcal.errors import LabelError, RangeError, ShapeError
from segcal.evaluation.doubts import SAVE_PROBABILITIES
from segcal.evaluation.options import Options
from segcal.evaluation.sums import CaseSums
from segcal.kernels.spec import (
    CROSS_ENTROPY,
    HAS_NUMBA,
    SMALLEST,
    SUM_TOLERANCE,
    VOXELS,
    Spec,
    squared_error,
)

Array = NDArray[Any]

BLOCK = 1 << 15  # voxels that are classified together, in the cache


def measure_voxels(
    values: Array, labels: Array, options: Options, *, ranked: Array | None = None, threads: int | None = None
) -> CaseSums:
    """The sums of (class, voxel) values and of their labels: (voxel), or (region, voxel) for classes that overlap.

    Decisions are taken on `ranked`, values in the same order that tell apart what rounding joined; or on the values.
    """
    counted, threads = counted_voxels(labels, options), threads or os.cpu_count() or 1
    values, labels = values[:, counted], places_of(labels[..., counted], len(values), options)
    overlapping, ranked = options.sigmoid or len(values) == 1, values if ranked is None else ranked[:, counted]
    if options.logits:
        values = sigmoid(values) if overlapping else softmax(values)
    collect = partial(_collect, fine_bins=options.fine_bins, threads=threads)
    if overlapping or options.regions is not None:
        probabilities, truth = regions_of(values, labels, options)
        bins, scores = collect(probabilities, truth)
        scores[1] += _absent_log_loss(probabilities, truth, threads)
        own = overlapping and len(ranked) == len(probabilities)  # each region has its channel
        predicted = ranked >= (0.0 if options.logits else 0.5) if own else probabilities >= 0.5
        true = truth == 1
        overlap = np.array([where.sum(1) for where in (predicted, true, predicted & true)], dtype=np.float64)
        joint = scores.mean(1, keepdims=True)
        return CaseSums(bins, np.zeros((3, 0)), overlap, scores, joint, _trained_labels(labels, options))
    if labels.ndim != 1:
        raise ShapeError(
            f"labels must be one map of exclusive classes; got {len(labels)} channels. "
            f"For classes that overlap use --sigmoid."
        )
    bins, scores = collect(values, labels[None])
    joint = scores.sum(1, keepdims=True) / (1 if len(values) > 2 else np.array([[2], [1], [1]]))
    joint[2] = scores[2, 0]
    scores[1] += _absent_log_loss(values, labels, threads)
    top, right, overlap = _classify(values, labels, ranked)
    of_top = collect(top[None], right[None], scores=False)[0][:, 0]
    return CaseSums(bins, of_top, overlap, scores, joint, np.zeros((1, 0)))


def _absent_log_loss(probabilities: Array, labels: Array, threads: int) -> Array:
    """For each class, the sum of -log(1 - p) over the voxels that are not of it; labels (voxel) or (class, voxel)."""
    if HAS_NUMBA:
        from segcal.kernels.numba_likelihood import absent_log_loss

        return absent_log_loss(probabilities, labels, threads=threads)
    absent = [labels != c for c in range(len(probabilities))] if labels.ndim == 1 else labels != 1
    rows = (1 - p[where].astype(np.float64) for p, where in zip(probabilities, absent, strict=True))
    return np.array([-np.log(np.maximum(row, SMALLEST)).sum() for row in rows])


def _trained_labels(labels: Array, options: Options) -> Array:
    """(1, label): voxels of each label that the regions are unions of; none where label maps are of regions."""
    regions = options.regions
    if regions is None or labels.ndim == 2:
        return np.zeros((1, 0))
    trained = sorted(set(regions.values or ()).union(*regions.members.values()) - {0})
    aliases = dict(regions.aliases)
    found, counts = np.unique(labels, return_counts=True)
    number = dict.fromkeys(trained, 0)
    for value, count in zip(found.tolist(), counts.tolist(), strict=True):
        meaning = aliases.get(value, value)
        if meaning in number:
            number[meaning] += count
    return np.array([list(number.values())], dtype=np.float64)


def counted_voxels(labels: Array, options: Options) -> Array | slice:
    """Which voxels have another label than the ignored one; a slice where all of them count."""
    if options.ignore_index is None:
        return slice(None)
    if labels.ndim != 1:
        raise ShapeError(f"labels must be one map for a label to be ignored; got {len(labels)} channels.")
    keep: Array = labels != options.ignore_index
    return slice(None) if keep.all() else keep


def places_of(labels: Array, channels: int, options: Options) -> Array:
    """Labels as places among the options' values; as they are where there are none."""
    if options.values is None:
        return labels
    if labels.ndim != 1:
        raise ShapeError(f"labels must be one map for their values to be told; got {len(labels)} channels.")
    if len(options.values) != (2 if channels == 1 else channels):
        raise ShapeError(
            f"predictions must have a channel for each label value {list(options.values)}; they have {channels}."
        )
    order = np.argsort(options.values)
    known = np.array(options.values)[order]
    where = np.searchsorted(known, labels).clip(max=len(known) - 1)
    if not np.array_equal(known[where], labels):
        raise _unknown_label(labels, options.values)
    places: Array = order.astype(np.uint8 if len(order) < 256 else np.int64)[where]
    return places


def _collect(
    probabilities: Array, labels: Array, *, fine_bins: int, threads: int, scores: bool = True
) -> tuple[Array, Array]:
    """Sums per bin (3, class, bin) and scores (3, class; zeros if not asked for) of (class, voxel) probabilities."""
    spec = Spec("none", float(fine_bins), 0.0, fine_bins, 0, "left", scores)
    moments, label_moments, class_sums, wrong, outside = _sums(
        np.ascontiguousarray(probabilities), np.ascontiguousarray(labels), spec, threads
    )
    if wrong >= 0:
        raise _unknown_label(labels, range(len(probabilities)))
    if outside:
        raise not_probabilities(probabilities)
    counts, above = moments[..., 0], moments[..., 1]
    confidences = (above + np.arange(fine_bins) * counts) / fine_bins
    if not np.isfinite(confidences).all():
        bad = int(np.argwhere(~np.isfinite(confidences))[0][0])
        raise RangeError(f"probabilities must be numbers; class {bad} contains NaN.")
    bins = np.array([counts, confidences, label_moments[..., 0]])
    return bins, np.array([squared_error(class_sums), class_sums[:, CROSS_ENTROPY], class_sums[:, VOXELS]])


def _sums(values: Array, labels: Array, spec: Spec, threads: int) -> tuple[Array, Array, Array, int, bool]:
    if HAS_NUMBA:
        from segcal.kernels.numba_cpu import NO_MASK, array_sums

        *sums, wrong, outside = array_sums(values[None], labels[None], NO_MASK, spec, threads=threads)
    else:
        import torch

        from segcal.kernels import reference

        *tensors, wrong, outside = reference.forward(
            torch.from_numpy(values)[None], torch.from_numpy(labels)[None], None, spec
        )
        sums = [tensor.numpy() for tensor in tensors]
    moments, label_moments, class_sums = (array[0] for array in sums)
    return moments, label_moments, class_sums, wrong, outside


def _classify(probabilities: Array, labels: Array, ranked: Array | None = None) -> tuple[Array, Array, Array]:
    """Largest probability of each voxel, whether its class is the true one, and (3, class) overlap counts.

    `ranked` are the logits, if there are any: they tell classes apart whose probabilities round to the same number, so
    that a temperature changes no decision.
    """
    ranked = probabilities if ranked is None else ranked
    classes, voxels = probabilities.shape
    top, right = np.empty(voxels, probabilities.dtype), np.empty(voxels, np.uint8)
    confusion = np.zeros(classes**2, np.int64)
    for start in range(0, voxels, BLOCK):
        block = slice(start, min(start + BLOCK, voxels))
        rows, scores, true = probabilities[:, block], ranked[:, block], labels[block].astype(np.int64)
        best, predicted, total = scores[0].copy(), np.zeros_like(true), rows[0].copy()
        for c in range(1, classes):
            better = scores[c] > best
            np.copyto(best, scores[c], where=better)
            predicted[better] = c
            total += rows[c]
        if ranked is not probabilities:
            best = np.take_along_axis(rows, predicted[None], 0)[0]
        off = np.abs(total - 1)
        if (off > SUM_TOLERANCE).any():
            raise RangeError(
                f"the probabilities of a voxel must sum to 1; one has {total[off.argmax()]:.4g}. "
                f"For logits use --logits, for classes that overlap --sigmoid."
            )
        top[block], right[block] = best, predicted == true
        confusion += np.bincount(true * classes + predicted, minlength=classes**2)
    square = confusion.reshape(classes, classes).astype(np.float64)
    return top, right, np.array([square.sum(0), square.sum(1), square.diagonal()])


def regions_of(values: Array, labels: Array, options: Options) -> tuple[Array, Array]:
    """Probabilities and 0/1 labels of each region, both (region, voxel)."""
    channels, regions = len(values), options.regions
    if regions is None:
        if labels.ndim == 2:
            return values, _matching(labels, channels)
        first = 1 if channels == 1 else 0  # a single channel is the foreground
        if labels.size and not 0 <= labels.min() <= labels.max() < first + channels:
            raise _unknown_label(labels, range(first + channels), single=channels == 1)
        return values, _members(labels, [(value,) for value in range(first, first + channels)])
    names = list(regions.members)
    if options.sigmoid and channels == len(names):
        together = values
    else:
        expected = channels if regions.values is None else len(regions.values)
        if channels != expected or max(max(regions.channels(name)) for name in names) >= channels:
            needed = regions.values or range(1 + max(max(members) for members in regions.members.values()))
            raise ShapeError(
                f"predictions must have a channel for each label value {list(needed)}; they have {channels}. "
                f"Predictions of the regions themselves need --sigmoid and a channel for each of "
                f"{', '.join(names)}, in that order."
            )
        if not options.sigmoid and 0 in (regions.values or (0,)):
            _classify(values, np.zeros(values.shape[1], np.uint8))  # refuses probabilities that do not sum to 1
        together = np.stack([values[regions.channels(name)].sum(0, dtype=values.dtype) for name in names])
    if labels.ndim == 2:
        return together, _matching(labels, len(names))
    for value, meaning in regions.aliases:
        labels = np.where(labels == value, meaning, labels)
    if regions.values is not None:
        known = sorted({0, *regions.values})  # the background may have no channel
        if not np.isin(labels, known).all():
            raise _unknown_label(labels, known)
    return together, _members(labels, [regions.members[name] for name in names])


def _members(labels: Array, members: Sequence[Sequence[int]]) -> Array:
    return np.stack([np.isin(labels, values) for values in members]).astype(np.uint8)


def _matching(labels: Array, channels: int) -> Array:
    if len(labels) != channels:
        raise ShapeError(f"labels must have a channel for each of {channels} predicted ones; they have {len(labels)}.")
    if not np.isin(labels, (0, 1)).all():
        raise _unknown_label(labels, (0, 1))
    return labels.astype(np.uint8)


def _unknown_label(labels: Array, allowed: Sequence[int], *, single: bool = False) -> LabelError:
    found = set(np.unique(labels).tolist())
    unknown = sorted(found - set(allowed))
    remedy = "Tell their values or regions with --regions, or leave one out with --ignore-index."
    if single:
        remedy = f"A single channel is one class; if it is a label map, {SAVE_PROBABILITIES}."
    elif 4 in unknown and found <= {0, 1, 2, 4}:
        remedy = "For those of BraTS use --regions brats."
    return LabelError(f"labels must be among {list(allowed)}; they hold {unknown[:5]}. {remedy}")


def not_probabilities(values: Array) -> RangeError:
    known = np.nan_to_num(values, nan=0.0)
    worst = known.flat[np.maximum(-known, known - 1).argmax()]
    return RangeError(
        f"probabilities must lie in [0, 1]; one is {worst:.6g}. If these are logits, use --logits; if scaled integers, "
        f"store the scale in the file."
    )


def softmax(logits: Array) -> Array:
    exponentials: Array = np.exp(logits - logits.max(0))
    exponentials /= exponentials.sum(0)
    return exponentials


def sigmoid(logits: Array) -> Array:
    with np.errstate(over="ignore"):
        probabilities: Array = 1 / (1 + np.exp(-logits))
    return probabilities
