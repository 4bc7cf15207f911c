"""One case against the labels of several raters, in one pass over its probabilities. All in numpy, as the workers are.

Raters agree about most voxels. The case is measured against the first rater; for the others only the voxels matter
about which somebody disagrees. The sums of every other rater differ from those of the first by what these voxels add.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from segcal._io.files import read_npz, write_npz
from segcal.errors import ConfigError, SegcalError
from segcal.evaluation.options import Options
from segcal.evaluation.sums import CaseSums
from segcal.evaluation.voxels import Slab, measure_voxels, places_of, region_labels

Array = NDArray[Any]
FORMAT = "segcal votes 2"
MOST_RATERS = 30  # a pattern is a whole number with a bit for each
LABELS = 2  # the place of labels among the sums of bins


@dataclass(frozen=True, eq=False)
class Votes:
    """How the raters of one case voted, and what was decided.

    raters: their names.
    classes: how many classes there are.
    place, pattern: of each row of `voxels`, the class and who chose it: a bit for each rater, the first is 1.
    voxels: (row, 2): how many there are, and how many of them are decided for the class.
    """

    raters: tuple[str, ...]
    classes: int
    place: Array
    pattern: Array
    voxels: Array

    def of_class(self, c: int) -> tuple[Array, Array, Array]:
        """Return the patterns of votes for a class (pattern, rater), their voxels, and the voxels decided for it."""
        rows = self.place == c
        chosen = (self.pattern[rows][:, None] >> np.arange(len(self.raters))) & 1
        counts, decided = self.voxels[rows].T
        return chosen.astype(np.float64), counts, decided

    def save(self, path: Path) -> None:
        """Write them to a file."""
        header = {"format": FORMAT, "raters": list(self.raters), "classes": self.classes}
        write_npz(path, header, {"place": self.place, "pattern": self.pattern, "voxels": self.voxels})

    @staticmethod
    def load(path: Path) -> Votes:
        """What `save` wrote."""
        header, arrays = read_npz(path, kind=FORMAT)
        try:
            raters, classes = tuple(map(str, header["raters"])), int(header["classes"])
            return Votes(raters, classes, arrays["place"], arrays["pattern"], arrays["voxels"])
        except (LookupError, TypeError, ValueError) as error:
            raise SegcalError(f"{path} must hold the votes of raters; {error}. Run `segcal evaluate` again.") from error


class RaterSums:
    """Adds up a case slab by slab: the sums against each rater, and how they voted."""

    def __init__(self, raters: Sequence[str], options: Options, *, threads: int | None) -> None:
        if len(raters) > MOST_RATERS:
            raise ConfigError(f"a case must have at most {MOST_RATERS} raters; it has {len(raters)}.")
        self.raters, self._options, self._threads = tuple(raters), options, threads
        self._sums: list[CaseSums] = []
        self._rows: dict[tuple[int, int], Array] = {}

    def slab(self, values: Array, labels: Array, ranked: Array | None) -> Slab:
        """Of (class, voxel) values and (rater, ..., voxel) labels: the sums against the first rater."""
        labels = self._without_ignored(labels)
        slab = measure_voxels(values, labels[0], self._options, ranked=ranked, threads=self._threads)
        axes = tuple(range(labels.ndim - 1))
        split = np.flatnonzero((labels[1:] != labels[:1]).any(axes))
        apart = self._apart(values, labels, ranked, split) if split.size else [_nothing(slab.sums)] * len(labels)
        self._add([slab.sums, *(_relabeled(slab.sums, apart[0], other) for other in apart[1:])])
        self._count(slab, apart[0], len(values), labels[..., split], split)
        return slab

    def _apart(self, values: Array, labels: Array, ranked: Array | None, split: Array) -> list[CaseSums]:
        """Of some voxels the sums against each rater."""
        some, score = values[:, split], None if ranked is None else ranked[:, split]
        return [
            measure_voxels(some, each[..., split], self._options, ranked=score, threads=self._threads).sums
            for each in labels
        ]

    def of_case(self, total: CaseSums) -> tuple[CaseSums, dict[str, CaseSums], Votes]:
        """Sums against a rater drawn at random, the mean over raters; against each; and the votes.

        total: The sums of the whole case against the first rater.
        """
        whole = [replace(sums, decided=total.decided, voxel_ml=total.voxel_ml) for sums in self._sums]
        mean = CaseSums(**{f.name: np.mean([getattr(sums, f.name) for sums in whole], 0) for f in fields(CaseSums)})
        mean = _relabeled(total, total, mean)
        keys = sorted(self._rows)
        rows = np.array([self._rows[key] for key in keys]).reshape(-1, 2)
        place, pattern = (np.array([key[i] for key in keys], np.int64) for i in range(2))
        votes = Votes(self.raters, total.bins.shape[1], place, pattern, rows)
        return mean, dict(zip(self.raters, whole, strict=True)), votes

    def _without_ignored(self, labels: Array) -> Array:
        """A voxel that one rater leaves out is left out for all, so that all are measured on the same voxels."""
        if self._options.ignore_index is None:
            return labels
        ignored = (labels == self._options.ignore_index).any(0)
        return np.where(ignored, self._options.ignore_index, labels) if ignored.any() else labels

    def _add(self, sums: list[CaseSums]) -> None:
        self._sums = [one + other for one, other in zip(self._sums, sums, strict=True)] if self._sums else sums

    def _count(self, slab: Slab, apart: CaseSums, channels: int, labels: Array, split: Array) -> None:
        """Count the votes: of the voxels `split`, about which somebody disagrees, and of all others.

        apart: The sums of the voxels `split` against the first rater.
        labels: (rater, ..., voxel), of the voxels `split`.
        """
        number, classes = len(self.raters), slab.sums.bins.shape[1]
        like = np.empty((classes, 0), np.float32)  # as many rows as there are classes
        truth = [region_labels(places_of(each, channels, self._options), like, self._options) for each in labels]
        codes = np.tensordot(1 << np.arange(number), np.array(truth, np.int64), 1)
        decided = _decided(slab.decided[..., split], classes)
        for c in range(classes):
            patterns, rows, counts = np.unique(codes[c], return_inverse=True, return_counts=True)
            yes = np.bincount(rows, decided[c], minlength=len(patterns))
            for code, row in zip(patterns.tolist(), np.array([counts, yes]).T, strict=True):
                self._row(c, code, row)
            # All others: the sums against the first rater without the voxels that were looked at.
            predicted, true, both = slab.sums.overlap[:, c] - apart.overlap[:, c]
            voxels = slab.sums.bins[0, c].sum() - apart.bins[0, c].sum()
            self._row(c, (1 << number) - 1, np.array([true, both]))
            self._row(c, 0, np.array([voxels - true, predicted - both]))

    def _row(self, place: int, code: int, counts: Array) -> None:
        self._rows[place, code] = self._rows.get((place, code), 0.0) + counts


def _nothing(sums: CaseSums) -> CaseSums:
    """The sums of no voxel, in the shapes of these."""
    return CaseSums(**{f.name: np.zeros_like(getattr(sums, f.name)) for f in fields(CaseSums)})


def _decided(decided: Array, classes: int) -> Array:
    """Whether each voxel was decided for each class, (class, voxel), as numbers."""
    chosen = decided if decided.ndim == 2 else decided == np.arange(classes)[:, None]
    return chosen.astype(np.float64)


def _relabeled(total: CaseSums, before: CaseSums, after: CaseSums) -> CaseSums:
    """The sums once some voxels, whose sums were `before`, have other labels and so the sums `after`.

    Counts and confidences do not depend on labels: they stay as they are, to the last bit.
    """
    bins, top, overlap = total.bins.copy(), total.top_label.copy(), total.overlap.copy()
    bins[LABELS] += after.bins[LABELS] - before.bins[LABELS]
    top[LABELS] += after.top_label[LABELS] - before.top_label[LABELS]
    overlap[1:] += after.overlap[1:] - before.overlap[1:]
    scores, joint = total.scores.copy(), total.joint.copy()
    for whole, minus, plus in ((scores, before.scores, after.scores), (joint, before.joint, after.joint)):
        whole[:2] += plus[:2] - minus[:2]
    labels = total.labels + (after.labels - before.labels)
    return replace(total, bins=bins, top_label=top, overlap=overlap, scores=scores, joint=joint, labels=labels)
