"""Several trained runs as one: the mean of what they say of a case, one member after the other, one case in memory."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, combinations
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from segcal._io.files import real_path
from segcal._io.jobs import key_of
from segcal._io.words import listed
from segcal.datasets import DataCase, Split
from segcal.errors import ConfigError, one_of
from segcal.evaluation.options import slabs_of
from segcal.training.config import RunConfig
from segcal.training.inference import predict_logits
from segcal.training.runs import Predictor, Run, RunSource, load_run
from segcal.volumes.averaging import MEANS, Mean

_ALIKE = ("channels", "classes", "values", "regions")


class RunningMean:
    """The mean of (class, x, y, z) predictions that come one after the other, as logits.

    Of probabilities, it is the logarithm of their mean, without a detour by probabilities that round to 0. What is
    added is written over.
    """

    def __init__(self, mean: Mean) -> None:
        self.mean, self.number = mean, 0
        self._total: Tensor | None = None

    def add(self, logits: Tensor) -> None:
        """The next one."""
        new = logits.contiguous()
        flat, total = _flat(new), None if self._total is None else _flat(self._total)
        for slab in slabs_of(flat):
            part = flat[:, slab]
            if self.mean == "probabilities":
                part[...] = torch.from_numpy(part).log_softmax(0).numpy()
            if total is not None and self.mean == "probabilities":
                np.logaddexp(total[:, slab], part, out=total[:, slab])
            elif total is not None:
                total[:, slab] += part
        self._total = new if self._total is None else self._total
        self.number += 1

    def logits(self) -> Tensor:
        """Of all that came; nothing can be added afterwards."""
        if self._total is None:
            raise ConfigError("there must be predictions to take the mean of; got none. Give at least one run.")
        flat = _flat(self._total)
        if self.mean == "probabilities":
            flat -= math.log(self.number)
        else:
            flat /= self.number
        return self._total


def _flat(values: Tensor) -> Any:
    """(class, voxel) to write to: torch itself lets nobody write to what was made in its inference mode."""
    return values.flatten(1).numpy()


def mirrored_logits(
    network: nn.Module, image: Tensor, config: RunConfig, device: torch.device, *, mean: Mean
) -> Tensor:
    """The mean over a prepared image and its mirror images along every set of axes, mirrored back: 8 of a volume."""
    axes = [axis for axis in (1, 2, 3) if image.shape[axis] > 1]
    total = RunningMean(mean)
    for flipped in chain.from_iterable(combinations(axes, n) for n in range(len(axes) + 1)):
        total.add(predict_logits(network, image.flip(flipped), config, device).flip(flipped))
    return total.logits()


@dataclass(frozen=True, eq=False)
class Ensemble(Predictor):
    """Several runs, or one with flips, that predict together.

    Configuration and dataset are those of the first. The cases of a side are those on that side in every member's
    split; the split's note names what is left out.
    """

    members: tuple[Run, ...]
    mean: Mean = "probabilities"
    flips: bool = False

    def uncalibrated(self, case: DataCase) -> Tensor:
        """(class, x, y, z) on the grid of the original image: mean logits, or the logarithm of mean probabilities."""
        total = RunningMean(self.mean)
        look = partial(mirrored_logits, mean=self.mean) if self.flips else predict_logits
        for member in self.members:
            total.add(member.uncalibrated(case, look))
        return total.logits()

    @property
    def source(self) -> EnsembleSource:
        """Where a process elsewhere finds it."""
        return EnsembleSource(tuple(member.source for member in self.members), self.mean, self.flips)

    @property
    def about(self) -> dict[str, Any]:
        """What is told of it beside the results."""
        members = [member.about for member in self.members]
        return {**super().about, "members": members, "mean": self.mean, "flips": self.flips}

    def _without(self, side: str) -> str:
        names = ", ".join(str(member.folder) for member in self.members)
        return f"members of an ensemble must share {side} cases; {names} have none in common. {self.split.note}".strip()


@dataclass(frozen=True)
class EnsembleSource:
    """An ensemble for a process elsewhere, which must see the same files."""

    members: tuple[RunSource, ...]
    mean: Mean
    flips: bool

    def load(self) -> Ensemble:
        """The ensemble; FileError where weights are others there."""
        return _together([member.load() for member in self.members], self.mean, self.flips, with_data=True)


def load_ensemble(
    members: Iterable[str | os.PathLike[str]],
    *,
    mean: Mean = "probabilities",
    flips: bool = False,
    root: str | os.PathLike[str] | None = None,
    with_data: bool = True,
) -> Ensemble:
    """Runs that `train` wrote, as one that predicts and is evaluated as a run is.

    Raises ConfigError where members differ in channels, classes, label values or regions, or lie on other data.

    members: folders of runs; a file in one, as RUN/last.pt, is the run with that checkpoint.
    mean: of their probabilities, or of their logits.
    flips: each member sees every image mirrored, too, along every set of axes; its predictions are mirrored back.
    root: where the data of all members lie now, if they have moved.
    with_data: without its data an ensemble predicts other images, and has no cases of its own.
    """
    one_of("mean", mean, MEANS)
    runs = [load_run(member, root=root, with_data=with_data) for member in members]
    if not runs:
        raise ConfigError("an ensemble must have members; got none. Give at least one run.")
    return _together(runs, mean, flips, with_data=with_data)


def _together(runs: Sequence[Run], mean: Mean, flips: bool, *, with_data: bool) -> Ensemble:
    first = runs[0]
    for i, run in enumerate(runs):
        _check_pair(first, run, with_data=with_data)
        if twin := next((other for other in runs[:i] if other.fingerprint == run.fingerprint), None):
            places = " and ".join(str(each.folder / each.checkpoint) for each in (twin, run))
            raise ConfigError(f"members of an ensemble must differ; {places} hold the same. Give each once.")
    marks = [(run.fingerprint, run.config.hash) for run in runs]
    return Ensemble(
        first.folder, first.config, first.dataset, common_split([run.split for run in runs]),
        key_of("ensemble", marks, mean, flips), tuple(runs), mean, flips,
    )  # fmt: skip


def _check_pair(first: Run, other: Run, *, with_data: bool) -> None:
    names = f"{first.folder} and {other.folder}"
    for what in _ALIKE:
        one, another = getattr(first.dataset, what), getattr(other.dataset, what)
        if one != another:
            raise ConfigError(
                f"members of an ensemble must have the same {', '.join(_ALIKE[:-1])} and {_ALIKE[-1]}; those of "
                f"{names} differ in {what}: {one} and {another}."
            )
    roots = [real_path(run.dataset.root) for run in (first, other)]
    if with_data and roots[0] != roots[1]:
        raise ConfigError(
            f"members of an ensemble must have the same data; {names} have {roots[0]} and {roots[1]}. If they are the "
            f"same, say where they lie: --data FOLDER."
        )


def common_split(splits: Sequence[Split]) -> Split:
    """Cases on the same side for all; the note names those for validation and test that are left out.

    >>> common_split([Split(("a",), ("b",), ("c", "d")), Split(("c",), ("b",), ("a", "d"))]).test
    ('d',)
    """
    sides = {side: [set(getattr(split, side)) for split in splits] for side in ("train", "validation", "test")}
    kept = {side: set.intersection(*named) for side, named in sides.items()}
    notes = list(dict.fromkeys(split.note for split in splits if split.note))
    trained = set.union(*sides["train"])
    for side in ("validation", "test"):
        left = sorted(set.union(*sides[side]) - kept[side])
        learned = sum(name in trained for name in left)
        told = f"; members were trained on {learned} of them" if learned else ""
        if left:
            notes.append(f"Left out, for they are not {side} cases of every member{told}: {listed(left)}.")
    train, validation, test = (tuple(sorted(kept[side])) for side in sides)
    return Split(train, validation, test, " ".join(notes))
