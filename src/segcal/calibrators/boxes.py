"""What a local temperature learns from: doubtful voxels and some of the others, or boxes of voxels side by side."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from segcal.calibrators.calibrator import Activation, decided
from segcal.calibrators.smoothing import around, probabilities
from segcal.calibrators.stream import (
    CaseStream,
    flat_labels,
    flatten,
    need_finite,
    need_same_classes,
    slabs_of,
    volume_of,
    voxels_of,
)
from segcal.errors import ConfigError

SURE = 0.99  # voxels surer than this stay in the outermost bins: ACE must not steer them, the likelihood does
MOST_BOXES = 8  # of a case
KEPT_BYTES = 1 << 30  # of all boxes


class Box(NamedTuple):
    """A case, or a part of it: logits and labels; the neighbors where they are wanted."""

    logits: Tensor
    labels: Tensor
    neighbors: Tensor | None = None
    """(axis, class, ...): their mean probabilities, as `smoothing.around` gives them."""
    weights: Tensor | None = None
    """(voxel): how many voxels each stands for; None: one."""
    largest: Tensor | None = None
    """(1, ...): the class that the logits of a softmax decide for, once `lessons` has looked."""
    sure: Tensor | None = None
    """(1 or class, ...): whether they are sure, likewise."""

    @property
    def voxels(self) -> int:
        return self.logits[0].numel()

    @property
    def bytes_of_voxel(self) -> float:
        return sum(part.nbytes for part in self if part is not None) / self.voxels

    def at(self, where: Any) -> Box:
        """Some of it: an index of the axes of space."""
        return Box(*(None if part is None else part[(..., *where)] for part in self))  # type: ignore[arg-type]


@dataclass(frozen=True)
class Drawing:
    """How cases are drawn from.

    side_by_side: whether voxels stay beside their neighbors, in boxes.
    neighbors: whether each voxel brings the mean probabilities of its neighbors.
    """

    activation: Activation
    box_voxels: int
    side_by_side: bool
    neighbors: bool

    def draw(self, cases: CaseStream, number: int, seed: int) -> tuple[list[list[Box]], int]:
        """Boxes of each case, in one pass, and the voxels of all cases."""
        random = torch.Generator().manual_seed(seed)
        boxes: list[list[Box]] = []
        voxels = 0
        for i, case in enumerate(cases):
            draw = self._cut_boxes if self.side_by_side else self._draw_voxels
            found, seen = draw(i, case, KEPT_BYTES / number, random)
            if boxes:
                need_same_classes(len(boxes[0][0].logits), len(found[0].logits), i)
            boxes.append(found)
            voxels += seen
        return boxes, voxels

    def _cut_boxes(self, place: int, case: Any, most_bytes: float, random: torch.Generator) -> tuple[list[Box], int]:
        """Boxes of a case whose voxels stand side by side, or all of a small one; and how many voxels it has."""
        whole = self._checked(place, *volume_of(case))
        near = self._neighbors_of(whole, torch.arange(whole.voxels))
        if near is not None:
            whole = whole._replace(neighbors=near.reshape(-1, *whole.logits.shape))
        share = max(1, int(most_bytes / whole.bytes_of_voxel))
        size = box_size(whole.logits.shape[1:], min(self.box_voxels, share))
        often = 1 if size == whole.logits.shape[1:] else min(MOST_BOXES, max(1, share // math.prod(size)))
        return [self.cut(whole, size, random) for _ in range(often)], whole.voxels

    def _draw_voxels(self, place: int, case: Any, most_bytes: float, random: torch.Generator) -> tuple[list[Box], int]:
        """Some voxels of a case, as many from each of its parts as that is large; and how many it has."""
        found: list[Box] = []
        seen = total = 0
        for logits, labels in [volume_of(case)] if self.neighbors else slabs_of(case):
            if not logits[0].numel():
                continue
            part = self._checked(place, logits, labels)
            total = total or voxels_of(case, len(logits))
            most = min(MOST_BOXES * self.box_voxels, max(1, int(most_bytes / part.bytes_of_voxel)))
            found.append(self._thin(part, most * part.voxels / total, random))
            seen += part.voxels
        if not found:
            raise ConfigError(f"there must be voxels to fit a calibrator on; case {place} has none. Remove the case.")
        parts = zip(*found, strict=True)
        return [Box(*(None if part[0] is None else torch.cat(part, -1) for part in parts))], seen  # type: ignore[arg-type]

    def _checked(self, place: int, logits: Tensor, labels: Tensor) -> Box:
        """A case or a part of it, if it can be learned from."""
        flat, truth = flatten(logits, labels, self.activation)
        if not flat.shape[1]:
            raise ConfigError(f"there must be voxels to fit a calibrator on; case {place} has none. Remove the case.")
        need_finite(flat)
        truth = truth.reshape(*truth.shape[:-1], *logits.shape[1:]).to(torch.uint8)
        return Box(flat.float().reshape(logits.shape), truth)

    def _neighbors_of(self, whole: Box, places: Tensor) -> Tensor | None:
        """(axis, class, voxel) of the voxels at these places of a whole case, if they are wanted."""
        if not self.neighbors:
            return None
        values = probabilities(whole.logits, self.activation).flatten(1)
        return around(values, whole.logits.shape[1:], places)

    def _thin(self, whole: Box, most_voxels: float, random: torch.Generator) -> Box:
        """The voxels (class, voxel) that are not sure, and a draw of one in ten of the others; fewer of too many."""
        logits = whole.logits.flatten(1)
        labels = flat_labels(whole.labels, whole.logits)
        sure = sureness(logits, self.activation).amin(0) > SURE
        places, weights = [], []
        for group, share in ((~sure, 1.0), (sure, 0.1)):
            there = group.nonzero()[:, 0]
            taken = math.ceil(min(len(there) * share, most_voxels * (0.8 if share == 1 else 0.2)))
            drawn = there[torch.randperm(len(there), generator=random)[:taken]]
            places.append(drawn)
            weights.append(torch.full((taken,), len(there) / max(taken, 1)))
        chosen = torch.cat(places)
        near = self._neighbors_of(whole, chosen)
        return Box(logits[:, chosen], labels[..., chosen], neighbors=near, weights=torch.cat(weights))

    def cut(self, whole: Box, size: tuple[int, ...], random: torch.Generator) -> Box:
        """A box of this size around a voxel that is not sure; all of a small case."""
        shape = whole.logits.shape[1:]
        if size == shape:
            return whole
        doubtful = (sureness(whole.logits, self.activation).amin(0) < SURE).nonzero()
        chosen = int(torch.randint(max(len(doubtful), 1), (), generator=random))
        center = doubtful[chosen].tolist() if len(doubtful) else [length // 2 for length in shape]
        starts = [min(max(c - s // 2, 0), w - s) for c, s, w in zip(center, size, shape, strict=True)]
        box = whole.at(tuple(slice(a, a + s) for a, s in zip(starts, size, strict=True)))
        return Box(*(None if part is None else part.clone() for part in box))  # type: ignore[arg-type]


def lessons(box: Box, activation: Activation, most_voxels: float) -> list[Box]:
    """The box with all that the steps of a fit would look for again and again; in parts, where it has more voxels.

    The parts are alike: each has its share of every label and of every level of sureness. In a part the voxels of a
    label stand together, surest last, which the sums of a step go through faster.
    """
    logits, parts = box.logits, math.ceil(box.voxels / most_voxels)
    known = box._replace(
        largest=decided(logits) if activation == "softmax" else None, sure=sureness(logits, activation) > SURE
    )
    if logits.ndim > 2:  # voxels side by side stay so
        return [known]
    labels = box.labels if box.labels.ndim == 1 else box.labels.sum(0)
    order = (2 * labels + sureness(logits, activation).amin(0)).argsort(stable=True)
    return [known.at((order[part::parts],)) for part in range(parts)]


def box_size(shape: Sequence[int], most_voxels: int) -> tuple[int, ...]:
    """As large as allowed, the longest sides cut first.

    >>> box_size((100, 100, 10), 10_000)
    (31, 32, 10)
    """
    size = list(shape)
    while math.prod(size) > most_voxels:
        longest = size.index(max(size))
        size[longest] -= max(1, size[longest] // 20)
    return tuple(size)


def sureness(logits: Tensor, activation: Activation) -> Tensor:
    """Probability of what is decided, (1 or class, ...)."""
    return logits.softmax(0).amax(0, keepdim=True) if activation == "softmax" else logits.abs().sigmoid()
