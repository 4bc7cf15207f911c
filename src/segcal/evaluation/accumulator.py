"""An evaluation from a validation loop of one's own: predictions and labels in memory, batch by batch, no files."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, distributed

from segcal.errors import ConfigError, LabelError, SegcalError, ShapeError
from segcal.evaluation.doubts import Watch
from segcal.evaluation.evaluation import Evaluation
from segcal.evaluation.naming import name_channels
from segcal.evaluation.options import Options, ReadOptions
from segcal.evaluation.results import stack_cases
from segcal.evaluation.sums import CaseSums
from segcal.evaluation.voxels import check_voxels, measure_voxels, sums_of_case


class EvaluationAccumulator:
    """Collects cases in memory and returns an `Evaluation`, as `segcal.evaluate` does for files.

    The numbers are those of `segcal.evaluate`: both use the same code. Only sums are kept, 29 kB for each class of a
    case, so that a cohort of any size fits. Under `torch.distributed` each process adds its own cases, and `compute`
    returns the evaluation of all of them in every process.

    options: How to read the predictions: probabilities or logits, exclusive or overlapping classes, names, regions,
        the label to ignore.
    bins: Bins of the calibration errors that are reported.
    parts: Whether a case may come in several parts, such as slices, whose sums add up. By default a case comes
        once; again with the same values, as a distributed sampler repeats cases, it counts once.

    >>> import torch
    >>> from segcal import EvaluationAccumulator, ReadOptions
    >>> accumulator = EvaluationAccumulator(options=ReadOptions(class_names=["background", "liver"]))
    >>> probabilities = torch.tensor([[[0.9, 0.9, 0.2, 0.2], [0.1, 0.1, 0.8, 0.8]]])  # case, class, space
    >>> accumulator.update(probabilities, torch.tensor([[0, 1, 1, 1]]), ["case_1"])
    >>> evaluation = accumulator.compute()
    >>> evaluation
    Evaluation(1 case; background, liver; 20 bins)
    >>> evaluation.case_metrics()["dice"]
    tensor([[0.6667, 0.8000]], dtype=torch.float64)
    """

    def __init__(self, *, options: ReadOptions | None = None, bins: int = 20, parts: bool = False) -> None:
        self.parts = parts
        self._options = name_channels(options or ReadOptions()).into(
            Options.of(options or ReadOptions(), bins=bins, background=False)
        )
        self._sums: dict[str, CaseSums] = {}

    def update(self, predictions: Tensor, labels: Tensor, cases: Sequence[str]) -> None:
        """Add the cases of a batch.

        predictions: Probabilities or logits, (case, class, ...), on any device.
        labels: Class indices, (case, ...) or (case, 1, ...); of overlapping classes also zeros and ones of the
            shape of the predictions.
        cases: A name for each case of the batch.

        ShapeError: Predictions, labels and names do not belong together, or every voxel of a case is ignored.
        RangeError: A probability lies outside [0, 1], or is not a number; or logits are probabilities.
        LabelError: A label is not one of the classes.
        ConfigError: A case came before with other values, and `parts` is not set.
        """
        if predictions.ndim < 3 or labels.shape[0] != predictions.shape[0] or labels.numel() == 0:
            raise ShapeError(
                f"predictions must be (case, class, ...) and labels (case, ...) of the same cases; got "
                f"{tuple(predictions.shape)} and {tuple(labels.shape)}."
                " Check the order of axes."
            )
        if isinstance(cases, str) or len(cases) != len(predictions):
            raise ShapeError(
                f"cases must be a list with a name for each of {len(predictions)} cases; got {cases!r}."
                " Pass one name per case."
            )
        for name, values, truth in zip(cases, predictions, labels, strict=True):
            self._add(str(name), self._measure(str(name), values, truth))

    def _measure(self, name: str, values: Tensor, truth: Tensor) -> CaseSums:
        space = values.shape[1:]
        if truth.shape in (space, (1, *space)):
            voxels: NDArray[Any] = _class_indices(name, truth).reshape(-1)
        elif truth.shape == values.shape:
            voxels = truth.detach().cpu().numpy().reshape(len(truth), -1)
        else:
            raise ShapeError(
                f"{name}: labels must have the shape {tuple(space)} of the predictions; got {tuple(truth.shape)}."
                " Resample the labels to the predictions."
            )
        rows = values.detach().float().cpu().numpy().reshape(len(values), -1)
        with _naming(name):
            Watch(logits=self._options.logits, overlapping=self._options.sigmoid).see(rows)
            slab = measure_voxels(rows, voxels, self._options)
            return slab.sums if self.parts else check_voxels(sums_of_case([slab], space), self._options)

    def _add(self, name: str, sums: CaseSums) -> None:
        known = self._sums.get(name)
        if known is None:
            self._sums[name] = sums
        elif self.parts:
            self._sums[name] = known + sums
        elif not _equal(known, sums):
            raise ConfigError(
                f"each case must come once; {name!r} came again with other values. Give cases names of their own, or "
                "set parts=True where a case comes in parts."
            )

    def compute(self) -> Evaluation:
        """The evaluation of all cases so far, in the order of their names; of those of all processes, where there are.

        SegcalError: No case has come, or all parts of a case have ignored labels alone.
        """
        everything = self._gather()
        if not everything:
            raise SegcalError("there must be at least one case to evaluate; none has come. Call update first.")
        for name, sums in everything.items():
            with _naming(name):
                check_voxels(sums, self._options)
        return stack_cases(sorted(everything), lambda name: (everything[name], {}), self._options)

    def _gather(self) -> dict[str, CaseSums]:
        """The sums of this process, or of all processes."""
        if not (distributed.is_available() and distributed.is_initialized()):
            return dict(self._sums)
        came: list[dict[str, CaseSums] | None] = [None] * distributed.get_world_size()
        distributed.all_gather_object(came, self._sums)
        whole = EvaluationAccumulator(parts=self.parts)
        for sums in came:
            for name, each in (sums or {}).items():
                whole._add(name, each)
        return whole._sums

    def reset(self) -> None:
        """Forget all cases."""
        self._sums.clear()

    def __len__(self) -> int:
        """How many cases have come in this process."""
        return len(self._sums)

    def __repr__(self) -> str:
        return f"EvaluationAccumulator({len(self)} cases, {self._options.bins} bins)"


@contextmanager
def _naming(case: str) -> Iterator[None]:
    """Begin errors with the name of the case."""
    try:
        yield
    except SegcalError as error:
        raise type(error)(f"{case}: {error}") from error


def _class_indices(name: str, labels: Tensor) -> NDArray[Any]:
    """Labels as whole numbers; many loaders give them as floats."""
    values = labels.detach().cpu().numpy()
    if values.dtype.kind not in "fb":
        return np.asarray(values)
    whole = values.astype(np.int64)
    if not np.array_equal(whole, values):
        raise LabelError(
            f"{name}: labels must be whole numbers, one of the classes each; some are fractions. Pass class indices."
        )
    return whole


def _equal(one: CaseSums, other: CaseSums) -> bool:
    pairs = ((getattr(one, field.name), getattr(other, field.name)) for field in fields(one))
    return all(a.shape == b.shape and np.array_equal(a, b, equal_nan=True) for a, b in pairs)
