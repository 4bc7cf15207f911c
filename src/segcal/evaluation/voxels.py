"""From the values and labels of voxels to the sums of a case.

All in numpy: torch takes seconds to import, and a worker process that only reads and counts need not wait for it.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from segcal.errors import LabelError, RangeError, ShapeError
from segcal.evaluation.doubts import SAVE_PROBABILITIES
from segcal.evaluation.options import Options
from segcal.evaluation.sums import CaseSums
from segcal.kernels.numba_cpu import NO_MASK, array_sums
from segcal.kernels.numba_likelihood import absent_log_loss
from segcal.kernels.spec import CROSS_ENTROPY, SUM_TOLERANCE, VOXELS, Spec, squared_error
from segcal.volumes.averaging import not_probabilities, sigmoid, softmax
from segcal.volumes.regions import Regions

Array = NDArray[Any]

BLOCK = 1 << 15  # voxels that are classified together, in the cache
MOST_OF_PIECES = 1 << 26  # voxels of a box in which pieces are looked for: four bytes each


class Slab(NamedTuple):
    """The sums of some voxels, and what was decided of each: its class (voxel), or (region, voxel) yes or no."""

    sums: CaseSums
    decided: Array


def measure_voxels(
    values: Array, labels: Array | None, options: Options, *, ranked: Array | None = None, threads: int | None = None
) -> Slab:
    """The sums of (class, voxel) values and of their labels: (voxel), or (region, voxel) for classes that overlap.

    Decisions are taken on `ranked`, values in the same order that tell apart what rounding joined; or on the values.
    Where labels are ignored, nothing is decided. Without labels (None) all sums that need them are 0.
    """
    if labels is None:
        return _measure(values, None, options, ranked=ranked, threads=threads)
    counted = counted_voxels(labels, options)
    if isinstance(counted, slice):
        return _measure(values, labels, options, ranked=ranked, threads=threads)
    some = None if ranked is None else ranked[:, counted]
    sums, decided = _measure(values[:, counted], labels[counted], options, ranked=some, threads=threads)
    whole = np.zeros((*decided.shape[:-1], len(counted)), decided.dtype)
    whole[..., counted] = decided
    return Slab(sums, whole)


def _measure(
    values: Array, labels: Array | None, options: Options, *, ranked: Array | None, threads: int | None
) -> Slab:
    """Of voxels that all count."""
    threads = threads or os.cpu_count() or 1
    if labels is not None:
        labels = places_of(labels, len(values), options)
    overlapping, ranked = options.sigmoid or len(values) == 1, values if ranked is None else ranked
    if options.logits:
        values = sigmoid(values) if overlapping else softmax(values)
    collect = partial(_collect, fine_bins=options.fine_bins, threads=threads, scores=labels is not None)
    voxel_ml = np.full((1, 1), np.nan)  # who knows the grid tells it
    if overlapping or options.regions is not None:
        probabilities = region_values(values, options)
        truth = region_labels(labels, probabilities, options)
        bins, scores = collect(probabilities, truth)
        if labels is not None:
            scores[1] += absent_log_loss(probabilities, truth, threads=threads)
        own = overlapping and len(ranked) == len(probabilities)  # each region has its channel
        predicted = ranked >= (0.0 if options.logits else 0.5) if own else probabilities >= 0.5
        true = truth == 1
        overlap = np.array([where.sum(1) for where in (predicted, true, predicted & true)], dtype=np.float64)
        joint = scores.mean(1, keepdims=True)
        sums = np.where(predicted, probabilities, 0).sum(1, dtype=np.float64)
        trained = np.zeros((1, 0)) if labels is None else _trained_labels(labels, options)
        return Slab(
            CaseSums(bins, np.zeros((3, 0)), overlap, scores, joint, trained, _decided(sums), voxel_ml), predicted
        )
    if labels is None:
        labels = np.zeros(values.shape[1], np.uint8)
        bins, scores = collect(values, labels[None])
        _, _, overlap, confidence, decided = _classify(values, labels, ranked)
        bins[2] = overlap[1:] = 0
        of_top = np.zeros((3, options.fine_bins))
        sums = CaseSums(
            bins, of_top, overlap, scores, np.zeros((3, 1)), np.zeros((1, 0)), _decided(confidence), voxel_ml
        )
        return Slab(sums, decided)
    if labels.ndim != 1:
        raise ShapeError(
            f"labels must be one map of exclusive classes; got {len(labels)} channels. "
            f"For classes that overlap use --sigmoid."
        )
    bins, scores = collect(values, labels[None])
    joint = scores.sum(1, keepdims=True) / (1 if len(values) > 2 else np.array([[2], [1], [1]]))
    joint[2] = scores[2, 0]
    scores[1] += absent_log_loss(values, labels, threads=threads)
    top, right, overlap, confidence, decided = _classify(values, labels, ranked)
    of_top = collect(top[None], right[None], scores=False)[0][:, 0]
    sums = CaseSums(bins, of_top, overlap, scores, joint, np.zeros((1, 0)), _decided(confidence), voxel_ml)
    return Slab(sums, decided)


def measure_class(
    probabilities: Array, truth: Array, *, fine_bins: int, threads: int | None = None
) -> tuple[Array, Array]:
    """Of one class against the rest, of (voxel) probabilities and 0/1 labels: sums (3, fine bin) and scores (3,)."""
    threads = threads or os.cpu_count() or 1
    rows, labels = probabilities[None], truth[None]
    bins, scores = _collect(rows, labels, fine_bins=fine_bins, threads=threads)
    scores[1] += absent_log_loss(rows, labels, threads=threads)
    return bins[:, 0], scores[:, 0]


def _decided(confidence: Array) -> Array:
    """The sums of decided voxels; only who sees the whole case knows their largest piece."""
    return np.array([confidence, np.full(len(confidence), np.nan)])


def sums_of_case(slabs: Iterable[Slab], shape: Sequence[int], *, voxel_ml: float = np.nan) -> CaseSums | None:
    """The sums of a case from slabs that make up its shape, one after the other; None where there are none."""
    total, decided = None, []
    for slab in slabs:
        total = slab.sums if total is None else total + slab.sums
        decided.append(slab.decided)
    if total is None:
        return None
    largest = largest_pieces(np.concatenate(decided, -1), shape, total.bins.shape[1])
    return replace(total, decided=np.array([total.decided[0], largest]), voxel_ml=np.full((1, 1), voxel_ml))


def check_voxels(sums: CaseSums | None, options: Options) -> CaseSums:
    """Return the sums of a case; ShapeError if it has no voxel, or only ignored ones."""
    if sums is None or not sums.bins[0].any():
        ignored = (
            "" if options.ignore_index is None else f" whose label is not {options.ignore_index}, which is ignored"
        )
        raise ShapeError(f"the volume must have voxels{ignored}; it has none. Check the labels.")
    return sums


def largest_pieces(decided: Array, shape: Sequence[int], classes: int) -> Array:
    """Voxels in the largest piece (connected by faces) of each class's decision; NaN of those too large to look at.

    Of class numbers (voxel), 0 is the background, which has no piece.
    """
    from scipy import ndimage

    found = np.zeros(classes)
    exclusive = decided.ndim == 1
    boxes = ndimage.find_objects(decided.reshape(shape)) if exclusive else []
    for c in range(1 if exclusive else 0, classes):
        if exclusive:
            box = boxes[c - 1] if c <= len(boxes) else None
            mask = None if box is None else decided.reshape(shape)[box] == c
        else:
            where = ndimage.find_objects(decided[c].reshape(shape).view(np.uint8))
            mask = decided[c].reshape(shape)[where[0]] if where else None
        if mask is not None:
            found[c] = np.nan if mask.size > MOST_OF_PIECES else np.bincount(ndimage.label(mask)[0].ravel())[1:].max()
    if exclusive:
        found[0] = np.nan
    return found


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
        raise ShapeError(
            f"labels must be one map for a label to be ignored; got {len(labels)} channels."
            " Use label maps with one channel."
        )
    keep: Array = labels != options.ignore_index
    return slice(None) if keep.all() else keep


def places_of(labels: Array, channels: int, options: Options) -> Array:
    """Labels as places among the options' values; as they are where there are none."""
    if options.values is None:
        return labels
    if labels.ndim != 1:
        raise ShapeError(
            f"labels must be one map for their values to be told; got {len(labels)} channels."
            " Use label maps with one channel."
        )
    if len(options.values) != (2 if channels == 1 else channels):
        raise ShapeError(
            f"predictions must have a channel for each label value {list(options.values)}; they have {channels}."
            " Use the maps of these labels."
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
    rows, truth = np.ascontiguousarray(probabilities)[None], np.ascontiguousarray(labels)[None]
    *sums, wrong, outside = array_sums(rows, truth, NO_MASK, spec, threads=threads)
    moments, label_moments, class_sums = (array[0] for array in sums)
    if wrong >= 0:
        raise _unknown_label(labels, range(len(probabilities)))
    if outside:
        raise not_probabilities(probabilities)
    counts, above = moments[..., 0], moments[..., 1]
    confidences = (above + np.arange(fine_bins) * counts) / fine_bins
    if not np.isfinite(confidences).all():
        bad = int(np.argwhere(~np.isfinite(confidences))[0][0])
        raise RangeError(f"probabilities must be numbers; class {bad} contains NaN. Check the network for overflow.")
    bins = np.array([counts, confidences, label_moments[..., 0]])
    return bins, np.array([squared_error(class_sums), class_sums[:, CROSS_ENTROPY], class_sums[:, VOXELS]])


def _classify(
    probabilities: Array, labels: Array, ranked: Array | None = None
) -> tuple[Array, Array, Array, Array, Array]:
    """Largest probability of each voxel, whether its class is the true one; of each class overlap counts (3, class) and
    the confidence of what is decided (class); the decisions.

    `ranked` are the logits, if there are any: they tell classes apart whose probabilities round to the same number, so
    that a temperature changes no decision.
    """
    ranked = probabilities if ranked is None else ranked
    classes, voxels = probabilities.shape
    top, right = np.empty(voxels, probabilities.dtype), np.empty(voxels, np.uint8)
    confusion, confidence = np.zeros(classes**2, np.int64), np.zeros(classes)
    decided = np.empty(voxels, np.uint8 if classes <= 256 else np.int32)
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
        top[block], right[block], decided[block] = best, predicted == true, predicted
        confidence += np.bincount(predicted, best, minlength=classes)
        confusion += np.bincount(true * classes + predicted, minlength=classes**2)
    square = confusion.reshape(classes, classes).astype(np.float64)
    return top, right, np.array([square.sum(0), square.sum(1), square.diagonal()]), confidence, decided


def regions_of(values: Array, labels: Array, options: Options) -> tuple[Array, Array]:
    """Probabilities and 0/1 labels of each region, both (region, voxel)."""
    probabilities = region_values(values, options)
    return probabilities, region_labels(labels, probabilities, options)


def region_values(values: Array, options: Options) -> Array:
    """Probabilities of each region, (region, voxel): sums of those of its members, or its own channel."""
    channels, regions = len(values), options.regions
    if regions is None or (options.sigmoid and channels == len(regions.members)):
        return values
    names = list(regions.members)
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
    return np.stack([values[regions.channels(name)].sum(0, dtype=values.dtype) for name in names])


def region_labels(labels: Array | None, probabilities: Array, options: Options) -> Array:
    """0/1 labels of each region, (region, voxel); zeros where there are no labels."""
    channels, regions = len(probabilities), options.regions
    if labels is None:
        return np.zeros(probabilities.shape, np.uint8)
    if labels.ndim == 2:
        return _matching(labels, channels)
    if regions is None:
        first = 1 if channels == 1 else 0  # a single channel is the foreground
        if labels.size and not 0 <= labels.min() <= labels.max() < first + channels:
            raise _unknown_label(labels, range(first + channels), single=channels == 1)
        return _members(labels, [(value,) for value in range(first, first + channels)])
    labels = replace_aliases(labels, regions)
    if regions.values is not None:
        known = sorted({0, *regions.values})  # the background may have no channel
        if not np.isin(labels, known).all():
            raise _unknown_label(labels, known)
    return _members(labels, [regions.members[name] for name in regions.members])


def replace_aliases(labels: Array, regions: Regions) -> Array:
    """Return the labels with every alias replaced by the label value that it stands for."""
    for value, meaning in regions.aliases:
        labels = np.where(labels == value, meaning, labels)
    return labels


def _members(labels: Array, members: Sequence[Sequence[int]]) -> Array:
    return np.stack([np.isin(labels, values) for values in members]).astype(np.uint8)


def _matching(labels: Array, channels: int) -> Array:
    if len(labels) != channels:
        raise ShapeError(
            f"labels must have a channel for each of {channels} predicted ones; they have {len(labels)}."
            " Use labels with as many channels."
        )
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
