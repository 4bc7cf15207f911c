"""Ensemble temperature scaling: a mixture of scaled, original and uniform probabilities (Zhang and others, 2020)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Self

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from segcal.calibrators.calibrator import Activation, Calibrator, FitReport, Inputs, check_inputs
from segcal.calibrators.forms import Temperature
from segcal.calibrators.newton import Minimum, Quadratic, minimize
from segcal.calibrators.stream import CaseStream, Piece, Sample, pieces_of


class EnsembleTemperature(Calibrator):
    """w1 softmax(z / T) + w2 softmax(z) + w3 / K; the most probable class stays.

    The temperature is fitted first, then the weights, for the likelihood: three numbers of a convex problem.

    activation: "softmax" for exclusive classes, "sigmoid" for classes that overlap.
    voxels: fit on about so many drawn voxels; None: on all.
    seed: of that draw.
    """

    method = "ensemble-temperature"
    summary = "w1 softmax(z / T) + w2 softmax(z) + w3 / K; the most probable class stays."

    def __init__(self, *, activation: Activation = "softmax", voxels: int | None = None, seed: int = 0) -> None:
        super().__init__(activation=activation)
        self.base = Temperature(activation=activation, voxels=voxels, seed=seed)
        self.weights: Tensor | None = None

    @property
    def fitted(self) -> bool:
        return self.weights is not None

    @property
    def keeps_decisions(self) -> bool:
        return True

    def settings(self) -> dict[str, Any]:
        return super().settings() | {"voxels": self.base.voxels, "seed": self.base.seed}

    def draw(self, cases: CaseStream) -> Sample:
        """Voxels to begin a fit from, or to fit on."""
        return self.base.draw(cases)

    def fit(self, cases: CaseStream, *, inputs: Inputs = "logits", sample: Sample | None = None) -> Self:
        """Itself, fitted, as `Calibrator.fit` says; a `sample` that was drawn from these cases is not drawn again."""
        check_inputs(inputs)
        sample = sample or self.draw(cases)
        self.base.fit(cases, inputs=inputs, sample=sample)
        report = self.base.report
        assert report is not None  # it has just been fitted

        def everything() -> Iterator[Piece]:
            for case in cases:
                yield from pieces_of(case, self.activation, width=6)

        def best(pieces: Callable[[], Iterable[Piece]], start: Tensor) -> Minimum:
            low, high = torch.zeros_like(start), torch.full_like(start, 2.0)
            return minimize(lambda weights: self._mixture(pieces(), weights), start, low, high)

        # With a free sum and the sum added to the objective, the optimum sums to one by itself: bounds suffice.
        found = best(sample.pieces, torch.tensor([0.98, 0.01, 0.01], dtype=torch.float64))
        passes = 0
        if self.base.voxels is None:
            found = best(everything, found.parameters)
            passes = found.passes
        self.weights = found.parameters / found.parameters.sum()
        mixed = FitReport(
            report.cases, report.voxels, report.passes + passes, report.objective, report.before, found.value - 1,
            found.gradient, report.sampled, (), report.notes,
        )  # fmt: skip
        self._end_fit(self.base.classes, inputs, mixed)
        return self

    def _mixture(self, pieces: Iterable[Piece], weights: Tensor) -> Quadratic:
        """Mean of -log(w . q) for the shares q of what is true, plus the sum of the weights."""
        value, gradient, curvature, number = 0.0, torch.zeros(3).double(), torch.zeros(3, 3).double(), 0.0
        for piece in pieces:
            shares = self._members(piece.logits.double())  # (member, class, voxel)
            if self.activation == "softmax":
                true = shares.gather(1, piece.labels.expand(3, 1, -1))
            else:
                other = self._members(-piece.logits.double())
                true = torch.where(piece.labels > 0, shares, other)
            true = true.exp()
            classes = true.shape[1]
            voxel_weights = torch.ones(1).double() if piece.weights is None else piece.weights
            mixed = torch.einsum("m,mkn->kn", weights, true).clamp(min=1e-300)
            ratio = true / mixed
            value += float(-(mixed.log() * voxel_weights).sum()) / classes
            gradient -= (ratio * voxel_weights).sum((1, 2)) / classes
            flat = (ratio * voxel_weights).flatten(1)
            curvature += flat @ ratio.flatten(1).T / classes
            number += piece.voxels
        ones = torch.ones_like(gradient)
        return Quadratic(value / number + float(weights.sum()), gradient / number + ones, curvature / number)

    def _members(self, logits: Tensor) -> Tensor:
        """(member, class, voxel) log-probabilities: scaled, as they are, all the same."""
        scaled = logits / self.base.temperature
        if self.activation == "sigmoid":
            return torch.stack([logsigmoid(scaled), logsigmoid(logits), torch.full_like(logits, 0.5).log()])
        same = torch.full_like(logits, 1 / len(logits)).log()
        return torch.stack([scaled.log_softmax(0), logits.log_softmax(0), same])

    def _apply(self, logits: Tensor) -> Tensor:
        assert self.weights is not None  # `check` has looked
        wide = logits.double()
        weights = self.weights.log()[:, None, None]
        mixed = (self._members(wide) + weights).logsumexp(0)
        if self.activation == "sigmoid":
            mixed = mixed - (self._members(-wide) + weights).logsumexp(0)
        return mixed.to(logits)

    def state(self) -> dict[str, Any]:
        assert self.weights is not None  # `save` has looked
        return {"temperature": self.base.temperature, "weights": self.weights.tolist()}

    def set_state(self, state: dict[str, Any]) -> None:
        weights = torch.tensor(state["weights"], dtype=torch.float64)
        if weights.shape != (3,) or not bool((weights >= 0).all()) or abs(float(weights.sum()) - 1) > 1e-9:
            raise ValueError("its three weights must sum to 1")
        self.base = Temperature(float(state["temperature"]), **self.settings())
        self.weights = weights
