"""Decide one case without labels: read it slab by slab, through a calibrator if there is one, add up, then decide."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from segcal.evaluation.doubts import Watch
from segcal.evaluation.naming import labels_of
from segcal.evaluation.options import Options
from segcal.evaluation.results import class_names
from segcal.evaluation.rules import Chosen, Cuts, choose_classes, choose_masks, probabilities_of
from segcal.evaluation.sums import CaseSums
from segcal.evaluation.unlabelled import Values
from segcal.evaluation.voxels import measure_voxels
from segcal.volumes import Prediction

Array = NDArray[Any]
Cutting = Callable[[Array, Array], Cuts]
"""From the counts and confidences (class, bin) of a case, without the background, to what voxels must reach."""
_TYPES = (np.uint8, np.int16, np.uint16, np.int32)


class CaseDecision(NamedTuple):
    """What was decided of a case.

    labels: label values (x, y, z); or zeros and ones (channel, x, y, z) of classes that overlap, or where masks are
        asked for.
    lowest: of each class but the background, what a voxel had to reach, times the number of bins; None: no threshold.
    voxels, confidence, expected: of the same, the voxels decided, the sum of their probabilities, and of all voxels'.
    contested: voxels that several exclusive classes wanted.
    """

    labels: Array
    lowest: Array | None
    voxels: Array
    confidence: Array
    expected: Array
    contested: int

    @property
    def expected_dice(self) -> Array:
        """As `segcal.decisions.expected_dice`: 0 where nothing was decided, NaN where there is no probability."""
        whole = self.voxels + self.expected
        return np.where(whole > 0, 2 * self.confidence / np.maximum(whole, np.finfo(float).tiny), np.nan)


def foreground_names(channels: int, options: Options) -> tuple[str, ...]:
    """Of regions or classes, without the background of exclusive ones."""
    names = class_names(channels, options)
    return names[1:] if options.regions is None and not options.sigmoid and channels > 1 else names


def decide_case(
    prediction: Prediction,
    options: Options,
    cutting: Cutting | None,
    *,
    masks: bool = False,
    threads: int = 1,
) -> CaseDecision:
    """The labels of a prediction: what reaches the cuts, or, without any, its most probable classes."""
    with prediction.held():
        values = Values(prediction, options)
        watch = Watch(logits=options.logits, overlapping=options.sigmoid)
        total: CaseSums | None = None
        parts: list[Array] = []
        for slab, ranked in values.slabs(watch):
            found = measure_voxels(slab, None, options, ranked=ranked, threads=threads)
            total = found.sums if total is None else total + found.sums
            if cutting is None:
                parts.append(found.decided)
        assert total is not None  # arrays without voxels are refused when they are read
        first = 1 if total.top_label.shape[1] else 0  # after the background of exclusive classes
        count, confidence = total.bins[:2, first:]
        lowest, contested = None, 0
        if cutting is None:
            sums = np.array([total.overlap[0, first:], total.decided[0, first:]])
        else:
            cuts = cutting(count, confidence)
            lowest, sums = cuts.lowest, np.zeros((2, len(count)))
            for slab, _ in values.slabs():
                chosen = _choose(slab, cuts, options, exclusive=first == 1 and not masks, threads=threads)
                parts.append(chosen.decided)
                sums, contested = sums + chosen.sums, contested + chosen.contested
        decided = np.concatenate(parts, -1)
        del parts
        rows = _as_labels(decided, prediction.classes, options, masks=masks)
        labels = values.on_grid(np.atleast_2d(rows))
        labels = labels[0] if rows.ndim == 1 else labels
    return CaseDecision(labels, lowest, sums[0], sums[1], confidence.sum(1), contested)


def _choose(slab: Array, cuts: Cuts, options: Options, *, exclusive: bool, threads: int) -> Chosen:
    probabilities = probabilities_of(slab, options)
    if exclusive:
        return choose_classes(probabilities, cuts, options.fine_bins, threads=threads)
    foreground = probabilities[len(probabilities) - len(cuts.lowest) :]
    return choose_masks(foreground, cuts, options.fine_bins)


def _as_labels(decided: Array, channels: int, options: Options, *, masks: bool) -> Array:
    """Label values (voxel), or zeros and ones (channel, voxel), of the smallest integer type."""
    if decided.ndim == 1 and masks:
        return np.stack([decided == c for c in range(1, channels)]).view(np.uint8)
    if decided.ndim == 2 and (masks or options.regions is not None or len(decided) > 1):
        return decided.view(np.uint8)
    values = labels_of(channels, options)
    kind = next(kind for kind in _TYPES if np.iinfo(kind).min <= min(values) <= max(values) <= np.iinfo(kind).max)
    places = decided.reshape(-1).astype(np.uint8 if decided.dtype == bool else decided.dtype, copy=False)
    plain = values == tuple(range(len(values)))
    return places.astype(kind, copy=False) if plain else np.array(values, kind)[places]
