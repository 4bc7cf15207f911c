"""What every calibrator is: settings, a fit to a stream of cases, calibrated logits, a JSON file."""

from __future__ import annotations

import hashlib
import json
import math
import os
from abc import ABC, abstractmethod
from copy import copy
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, Self, get_args

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from segcal._io.files import write_whole
from segcal.calibrators.stream import CACHED_ELEMENTS, CaseStream
from segcal.collect import check_classes
from segcal.errors import ConfigError, LabelError, SegcalError, ShapeError, one_of
from segcal.kernels.threads import pass_threads

FORMAT = "segcal calibrator 1"
Activation = Literal["softmax", "sigmoid"]
Inputs = Literal["logits", "probabilities"]
"""What a calibrator is fitted on; for "probabilities" logits are taken as log-probabilities."""


@dataclass(frozen=True)
class FitReport:
    """How a fit went."""

    cases: int
    voxels: int
    passes: int
    """Over all voxels."""
    objective: str
    """As "nll", or "binary nll" where each class stands against the rest, averaged over classes."""
    before: float
    """Objective of the logits as they were, on the cases of the fit."""
    after: float
    gradient: float = math.nan
    """Largest slope of the objective that is left, by a parameter; NaN where there is none to follow."""
    sampled: int | None = None
    """Voxels drawn, where the fit saw only those."""
    sampling_errors: tuple[float, ...] = ()
    """Standard error that the draw adds to each parameter."""
    notes: tuple[str, ...] = ()

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> Self:
        """A report as the JSON of a calibrator has it; LookupError, TypeError or ValueError for anything else."""
        lists = {name: tuple(content[name]) for name in ("sampling_errors", "notes")}
        numbers = {
            name: math.nan if content[name] is None else float(content[name])
            for name in ("before", "after", "gradient")
        }
        return cls(**content | lists | numbers)


class Calibrator(ABC):
    """Maps logits to calibrated logits, after a fit to cases that the network was not trained on.

    `make_calibrator` makes one by the name of its method. What the fit found belongs to the calibrator and is set by
    `fit` alone: `classes` and `inputs`, the parameters of the method, and `report` on how the fit went.

    activation: "softmax" for exclusive classes, "sigmoid" for classes that overlap; ConfigError for another word.

    >>> from segcal import make_calibrator
    >>> logits = torch.tensor([[4.0, 4.0, 4.0, 0.0], [0.0, 0.0, 0.0, 4.0]])  # (class, voxel)
    >>> labels = torch.tensor([0, 0, 1, 1])  # one voxel in four is wrong
    >>> calibrator = make_calibrator("temperature").fit([(logits, labels)])
    >>> calibrator.transform(logits).softmax(0)[0]
    tensor([0.7500, 0.7500, 0.7500, 0.2500])
    """

    method: ClassVar[str]
    summary: ClassVar[str]
    """What it does, in a line for lists; docstrings are missing where Python runs with -OO."""
    any_shift: ClassVar[bool] = True
    """Whether a constant added to all logits of a voxel changes nothing, so that log-probabilities serve as well."""

    def __init__(self, *, activation: Activation = "softmax") -> None:
        one_of("activation", activation, ("softmax", "sigmoid"))
        self.activation = activation
        self._classes: int | None = None
        self._inputs: Inputs = "logits"
        self._report: FitReport | None = None
        self._strength = 1.0
        self._stored_fingerprint: str | None = None

    @property
    def classes(self) -> int | None:
        """How many classes it was fitted on; None: not fitted, or good for any number."""
        return self._classes

    @property
    def inputs(self) -> Inputs:
        """What it was fitted on: "logits" or "probabilities"."""
        return self._inputs

    @property
    def report(self) -> FitReport | None:
        """How the fit went; None: there was none."""
        return self._report

    @property
    def strength(self) -> float:
        """Which share of a calibrated probability is the calibrator's; the rest is what it was before."""
        return self._strength

    def weakened(self, strength: float) -> Self:
        """The same calibrator at a part of its strength, as a safeguard where few cases were there to fit it to.

        strength: from 0, which changes nothing, to 1. Decisions that the calibrator keeps stay at any strength.

        >>> from segcal.calibrators import Temperature
        >>> Temperature(2.0).weakened(0.5).transform(torch.tensor([[4.0], [0.0]])).softmax(0)[0]
        tensor([0.9314])
        """
        if not 0 <= strength <= 1:
            raise ConfigError(f"the strength must be a number from 0 to 1; got {strength!r}.")
        other = copy(self)
        other._strength = float(strength)
        other._stored_fingerprint = None
        return other

    @abstractmethod
    def fit(self, cases: CaseStream, *, inputs: Inputs = "logits") -> Self:
        """Itself, fitted. SegcalError where no fit is best, or where a class has no voxel and each needs its own.

        cases: (logits, labels) of each case, logits (class, ...) and labels (...), in a list or another object that can
            be iterated several times. See `segcal.calibrators.stream` for cases that do not fit in memory.
        inputs: what the logits are. "probabilities" says that they are logarithms of probabilities, which lack the
            constant that softmax removes; `transform` then removes it, too.
        """

    def _end_fit(self, classes: int | None, inputs: Inputs, report: FitReport) -> None:
        """Take over what a fit has in common with those of all methods."""
        self._classes, self._inputs, self._report = classes, inputs, report
        self._stored_fingerprint = None

    @abstractmethod
    def _apply(self, logits: Tensor) -> Tensor:
        """Calibrated logits of (class, voxel) ones."""

    @property
    @abstractmethod
    def fitted(self) -> bool: ...

    @property
    def spatial(self) -> bool:
        """Whether a voxel's result depends on its neighbors: then logits come as whole volumes."""
        return False

    @property
    def keeps_decisions(self) -> bool:
        """Whether the most probable class (of a sigmoid: the side of 1/2) stays what it was, in every voxel.

        That does not hold for regions that are sums of exclusive classes: a sum may cross 1/2 all the same.
        """
        return False

    def settings(self) -> dict[str, Any]:
        """What the constructor takes."""
        return {"activation": self.activation}

    @abstractmethod
    def state(self) -> dict[str, Any]:
        """What the fit found, as numbers and lists."""

    @abstractmethod
    def set_state(self, state: dict[str, Any]) -> None:
        """Take over what `state` gave; ValueError, LookupError or TypeError where it is something else.

        state: numbers and lists, as JSON has them.
        """

    def restore(self, content: dict[str, Any]) -> Self:
        """Itself, as fitted as the one whose `to_json` gave this content; errors as those of `set_state`.

        content: what is in the JSON, whose method and settings are those of this calibrator.
        """
        classes, inputs, report = content["classes"], content["inputs"], content["fit"]
        check_inputs(inputs)
        if classes is not None and not (isinstance(classes, int) and classes >= 1):
            raise ValueError("its classes must be a whole number")
        self._classes, self._inputs = classes, inputs
        self._report = None if report is None else FitReport.from_json(report)
        self._strength = float(content.get("strength", 1.0))
        if not 0 <= self._strength <= 1:
            raise ValueError("its strength must be a number from 0 to 1")
        self.set_state(content["state"])
        self._stored_fingerprint = _fingerprint_of(json.dumps(content, indent=2))
        return self

    def transform(self, logits: Tensor) -> Tensor:
        """Calibrated logits, in the precision of those given (float32 for half).

        ConfigError before the fit, ShapeError for another number of classes than that of the fit.

        logits: (class, ...), of one case.
        """
        self.check(logits)
        values = logits if logits.dtype in (torch.float32, torch.float64) else logits.float()
        if self.inputs == "probabilities" and self.activation == "softmax" and not self.any_shift:
            values = values.log_softmax(0)
        with torch.no_grad():
            calibrated = self._transform(values)
            if self.strength == 0:
                calibrated = values
            elif self.strength < 1:
                calibrated = _between(values, calibrated, self.strength, self.activation)
        if not self.keeps_decisions:
            return calibrated
        return (keep_decisions if self.activation == "softmax" else keep_sides)(logits, calibrated)

    def _transform(self, logits: Tensor) -> Tensor:
        flat = logits.detach().reshape(len(logits), math.prod(logits.shape[1:]))
        calibrated = torch.empty_like(flat)
        for start in range(0, flat.shape[1], step := max(1024, CACHED_ELEMENTS // len(flat))):
            calibrated[:, start : start + step] = self._apply(flat[:, start : start + step])
        return calibrated.reshape(logits.shape)

    def check(self, logits: Tensor) -> None:
        """Refuse logits that this calibrator was not fitted for (ConfigError, ShapeError).

        logits: (class, ...).
        """
        if not self.fitted:
            raise ConfigError(f"the {self.method} calibrator must be fitted before it can transform; call fit(cases).")
        if self.classes is not None and logits.shape[0] != self.classes:
            raise ShapeError(
                f"logits must have the {self.classes} classes of the calibrator on their first axis; got "
                f"{tuple(logits.shape)}."
                " Use the calibrator of these classes."
            )
        check_classes(logits.shape[0], self.activation)

    def to_json(self) -> str:
        """All of it, as `save` writes it."""
        content: dict[str, Any] = {
            "format": FORMAT,
            "method": self.method,
            "settings": self.settings(),
            "classes": self.classes,
            "inputs": self.inputs,
            "state": self.state(),
            "fit": None if self.report is None else asdict(self.report),
        }
        if self.strength < 1:
            content["strength"] = self.strength
        return json.dumps(_without_nan(content), indent=2)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write it as JSON, which `load_calibrator` reads; ConfigError before the fit.

        path: the file, which is replaced if it is there.
        """
        if not self.fitted:
            raise ConfigError(f"the {self.method} calibrator must be fitted before it is saved; call fit(cases).")
        write_whole(Path(path), self.to_json().encode())

    @property
    def fingerprint(self) -> str:
        """A hash of all of it. A file that an older version wrote keeps its hash, to which quality files refer."""
        return self._stored_fingerprint or _fingerprint_of(self.to_json())

    def __repr__(self) -> str:
        settings = ", ".join(f"{name}={value!r}" for name, value in self.settings().items())
        return f"{type(self).__name__}({settings})"


def _fingerprint_of(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _between(before: Tensor, after: Tensor, share: float, activation: Activation) -> Tensor:
    """Logits of probabilities of which a share is that of the logits after, the rest that of those before."""
    if activation == "softmax":
        both = torch.stack([after.log_softmax(0) + math.log(share), before.log_softmax(0) + math.log1p(-share)])
        return both.logsumexp(0)
    yes, no = (
        torch.stack([logsigmoid(sign * after) + math.log(share), logsigmoid(sign * before) + math.log1p(-share)])
        for sign in (1, -1)
    )
    return yes.logsumexp(0) - no.logsumexp(0)


def check_inputs(inputs: Inputs) -> Inputs:
    """What a calibrator is fitted on; ConfigError for another word."""
    one_of("inputs", inputs, get_args(Inputs))
    return inputs


def decided(logits: Tensor) -> Tensor:
    """(1, ...): the class of the largest of (class, ...) logits, the first of equals.

    As argmax(0, keepdim=True), which takes many times as long.

    >>> decided(torch.tensor([[1.0, 3.0], [2.0, 3.0]]))
    tensor([[1, 0]])
    """
    below = (logits != logits.amax(0)).to(torch.int16)
    before = below[0]  # 1 as long as no class was the largest
    found = before.clone()
    for c in range(1, len(logits) - 1):
        before = before * below[c]
        found += before
    return found.long()[None]


def keep_decisions(before: Tensor, after: Tensor) -> Tensor:
    """The values after, where rounding joined two classes with the one that was larger before in front again.

    >>> before = torch.tensor([[1.0], [1.0000001]])
    >>> keep_decisions(before, before / 3).argmax(0)
    tensor([1])
    """
    if len(before) == 1 or _same_decisions(before, after):
        return after
    first = decided(before)
    lost = decided(after) != first
    if bool(lost.any()):
        limit = torch.finfo(after.dtype).max
        top = after.amax(0, keepdim=True).clamp(-limit, limit)
        lower = torch.nextafter(top, torch.full_like(top, -math.inf))
        after = torch.where(lost & (after >= top), lower, after)
        after.scatter_(0, first, torch.where(lost, top, after.gather(0, first)))
    return after


def _same_decisions(before: Tensor, after: Tensor) -> bool:
    """Whether a quick look finds that no decision changed; there is one for the CPU."""
    if before.device.type != "cpu" or before.dtype != after.dtype:
        return False
    from segcal.kernels import numba_decide

    shape = (len(before), math.prod(before.shape[1:]))
    both = (part.detach().reshape(shape).contiguous().numpy() for part in (before, after))
    return numba_decide.same_largest(*both, threads=pass_threads())


def keep_sides(before: Tensor, after: Tensor) -> Tensor:
    """The values after, where rounding took them to zero, a probability of 1/2, on the side of it they were on before.

    >>> keep_sides(torch.tensor([1e-44, -3.0]), torch.tensor([0.0, -1.0])) > 0
    tensor([ True, False])
    """
    side = before.sign().to(after)
    return torch.where(after.sign() == side, after, side * torch.finfo(after.dtype).tiny)


def need_all_classes(method: str, true_voxels: Tensor) -> None:
    """Refuse to fit each class by itself where one has no voxel."""
    missing = (true_voxels == 0).nonzero()[:, 0].tolist()
    if missing:
        raise LabelError(
            f"{method} needs voxels of every class in the labels; class {', '.join(map(str, missing))} has none. "
            f"Add cases that have it, or use 'temperature', which all classes share."
        )


class SeparableError(SegcalError):
    """No finite fit is best, because the predictions are right in every voxel."""


def not_separable(what: str) -> SeparableError:
    return SeparableError(
        f"no finite fit is best: {what} is right in every voxel, so that more confidence is always likelier. "
        f"Fit on cases with mistakes, which the network was not trained on."
    )


def _without_nan(content: Any) -> Any:
    if isinstance(content, dict):
        return {key: _without_nan(value) for key, value in content.items()}
    if isinstance(content, (list, tuple)):
        return [_without_nan(value) for value in content]
    return None if isinstance(content, float) and math.isnan(content) else content
