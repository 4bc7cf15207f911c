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
from segcal.evaluation.voxels import Slab, measure_voxels, places_of, region_labels, region_values
from segcal.volumes.averaging import sigmoid, softmax

Array = NDArray[Any]
FORMAT = "segcal votes 1"
MOST_RATERS = 30  # a pattern is a whole number with a bit for each
LABELS = 2  # the place of labels among the sums of bins


@dataclass(frozen=True, eq=False)
class Votes:
    """How the raters of one case voted, and what the network made of it.

    raters: their names.
    place, pattern: of each row of `voxels`, the class and who chose it: a bit for each rater, the first is 1.
    voxels: (row, 3): how many there are, how many of them are decided for the class, and the sum of their
        probabilities.
    joint: (class, votes, fine bin): voxels by the number of raters who chose the class, from 0 to all, and by the
        probability of the class.
    """

    raters: tuple[str, ...]
    place: Array
    pattern: Array
    voxels: Array
    joint: Array

    def save(self, path: Path) -> None:
        """Write them to a file; of the joint counts only those above 0."""
        where = np.flatnonzero(self.joint)
        header = {"format": FORMAT, "raters": list(self.raters), "shape": list(self.joint.shape)}
        arrays = {"place": self.place, "pattern": self.pattern, "voxels": self.voxels}
        write_npz(path, header, arrays | {"where": where, "joint": self.joint.ravel()[where]})

    @staticmethod
    def load(path: Path) -> Votes:
        """What `save` wrote."""
        header, arrays = read_npz(path, kind=FORMAT)
        try:
            joint = np.zeros([int(length) for length in header["shape"]])
            joint.ravel()[arrays["where"]] = arrays["joint"]
            raters, place, pattern = tuple(map(str, header["raters"])), arrays["place"], arrays["pattern"]
            return Votes(raters, place, pattern, arrays["voxels"], joint)
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
        self._joint: Array | None = None

    def slab(self, values: Array, labels: Array, ranked: Array | None) -> Slab:
        """Of (class, voxel) values and (rater, ..., voxel) labels: the sums against the first rater."""
        labels = self._without_ignored(labels)
        slab = measure_voxels(values, labels[0], self._options, ranked=ranked, threads=self._threads)
        axes = tuple(range(labels.ndim - 1))
        split = np.flatnonzero((labels[1:] != labels[:1]).any(axes))
        apart = self._apart(values, labels, ranked, split) if split.size else [_nothing(slab.sums)] * len(labels)
        self._add([slab.sums, *(_relabeled(slab.sums, apart[0], other) for other in apart[1:])])
        self._count(slab, apart[0], values, labels, split)
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
        rows = np.array([self._rows[key] for key in keys]).reshape(-1, 3)
        place, pattern = (np.array([key[i] for key in keys], np.int64) for i in range(2))
        joint = np.zeros((0, 0, 0)) if self._joint is None else self._joint
        return mean, dict(zip(self.raters, whole, strict=True)), Votes(self.raters, place, pattern, rows, joint)

    def _without_ignored(self, labels: Array) -> Array:
        """A voxel that one rater leaves out is left out for all, so that all are measured on the same voxels."""
        if self._options.ignore_index is None:
            return labels
        ignored = (labels == self._options.ignore_index).any(0)
        return np.where(ignored, self._options.ignore_index, labels) if ignored.any() else labels

    def _add(self, sums: list[CaseSums]) -> None:
        self._sums = [one + other for one, other in zip(self._sums, sums, strict=True)] if self._sums else sums

    def _count(self, slab: Slab, apart: CaseSums, values: Array, labels: Array, split: Array) -> None:
        """Count the votes: of voxels about which somebody disagrees, and of all others."""
        number = len(self.raters)
        chances, truth = self._meant(values[:, split], labels[..., split])
        chances = chances.astype(np.float64)  # what is summed up
        codes = np.tensordot(1 << np.arange(number), truth.astype(np.int64), 1)
        votes = truth.sum(0)
        bins = slab.sums.bins.shape[2]
        cells = np.minimum((chances * bins).astype(np.int64), bins - 1)
        joint = np.zeros((len(chances), number + 1, bins))
        decided = _decided(slab.decided[..., split], len(chances))
        sure = self._sure(values, labels[0], slab.sums, split)
        for c in range(len(chances)):
            joint[c] = np.bincount(votes[c] * bins + cells[c], minlength=(number + 1) * bins).reshape(-1, bins)
            found, rows = np.unique(codes[c], return_inverse=True)
            columns = [np.ones(len(split)), decided[c], chances[c]]
            counts = np.array([np.bincount(rows, column, minlength=len(found)) for column in columns]).T
            for code, row in zip(found.tolist(), counts, strict=True):
                self._row(c, code, row)
            # All others: the sums against the first rater without the voxels that were looked at.
            predicted, true, both = slab.sums.overlap[:, c] - apart.overlap[:, c]
            total = slab.sums.bins[:, c] - apart.bins[:, c]
            self._row(c, (1 << number) - 1, np.array([true, both, sure[c]]))
            rest = total[0].sum() - true, predicted - both, slab.sums.bins[1, c].sum() - chances[c].sum() - sure[c]
            self._row(c, 0, np.array(rest))
            joint[c, number] += total[LABELS]
            joint[c, 0] += total[0] - total[LABELS]
        self._joint = joint if self._joint is None else self._joint + joint

    def _row(self, place: int, code: int, counts: Array) -> None:
        self._rows[place, code] = self._rows.get((place, code), 0.0) + counts

    def _sure(self, values: Array, labels: Array, sums: CaseSums, split: Array) -> Array:
        """Of each class, the probabilities summed over the voxels that all raters gave to it."""
        agreed = np.ones(values.shape[1], bool)
        agreed[split] = False
        if self._options.ignore_index is not None:
            agreed &= labels != self._options.ignore_index
        marked = agreed & ((labels != 0).any(0) if labels.ndim == 2 else labels != 0)
        chances, truth = self._meant(values[:, marked], labels[None, ..., marked])
        found: Array = np.where(truth[0], chances, 0).sum(1, dtype=np.float64)
        if sums.top_label.size and (self._options.values or (0,))[0] == 0:  # the background: nothing is marked
            apart = self._meant(values[:, split], labels[None, ..., split])[0][0]
            found[0] = sums.bins[1, 0].sum() - chances[0].sum(dtype=np.float64) - apart.sum(dtype=np.float64)
        return found

    def _meant(self, values: Array, labels: Array) -> tuple[Array, Array]:
        """Probabilities (class, voxel) and, of each rater, whether the voxel is of the class, (rater, class, voxel)."""
        options = self._options
        places = [places_of(each, len(values), options) for each in labels]
        overlapping = options.sigmoid or len(values) == 1
        if options.logits:
            values = sigmoid(values) if overlapping else softmax(values)
        if overlapping or options.regions is not None:
            chances = region_values(values, options)
            return chances, np.array([region_labels(each, chances, options) == 1 for each in places])
        classes = np.arange(len(values))[:, None]
        return values, np.array([each == classes for each in places])


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
