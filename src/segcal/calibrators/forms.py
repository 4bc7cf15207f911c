"""The calibrators of the linear family: which features they take, where they start, within which bounds."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, Literal, Self

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from segcal.calibrators.calibrator import Activation, FitReport, Inputs, check_inputs
from segcal.calibrators.likelihood import Sums, log_odds, of_temperature
from segcal.calibrators.linear import LinearCalibrator, Objective
from segcal.calibrators.newton import Minimum, Quadratic
from segcal.calibrators.stream import CaseStream, Piece, Sample, check_stream, pieces_of
from segcal.errors import ConfigError, one_of

COLDEST, HOTTEST = 0.01, 100.0


class Temperature(LinearCalibrator):
    """One number that all logits are divided by; the most probable class stays.

    temperature: one that is known already; None: to be fitted.
    protocol: "optimum" is the likeliest temperature; "one-epoch" what the paper's code does: from 1.5, one step of
        Adam (learning rate 0.001) for each case.
    activation, objective, voxels, seed: as for all linear calibrators (`LinearCalibrator`).

    >>> Temperature(2.0).transform(torch.tensor([3.0, 1.0])).tolist()
    [1.5, 0.5]
    """

    method = "temperature"
    summary = "One number that all logits are divided by; the most probable class stays."
    tied = True
    by_class = False

    def __init__(
        self,
        temperature: float | None = None,
        *,
        activation: Activation = "softmax",
        objective: Objective = "nll",
        protocol: Literal["optimum", "one-epoch"] = "optimum",
        voxels: int | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__(activation=activation, objective=objective, voxels=voxels, seed=seed)
        one_of("protocol", protocol, ("optimum", "one-epoch"))
        if protocol == "one-epoch" and (objective != "nll" or voxels is not None):
            raise ConfigError(
                "the protocol 'one-epoch' takes every voxel and the objective 'nll'. Leave out voxels and objective."
            )
        self.protocol = protocol
        if temperature is not None:
            if not COLDEST <= temperature <= HOTTEST:
                raise ConfigError(f"the temperature must lie in [{COLDEST}, {HOTTEST}]; got {temperature}.")
            self.parameters = torch.tensor([[1 / temperature]], dtype=torch.float64)

    @property
    def temperature(self) -> float:
        if self.parameters is None:
            raise ConfigError("the temperature must be fitted first; call fit(cases).")
        return 1 / self.parameters.item()

    @property
    def keeps_decisions(self) -> bool:
        return True

    def settings(self) -> dict[str, Any]:
        return super().settings() | {"protocol": self.protocol}

    def _sums(self, piece: Piece, parameters: Tensor) -> Sums:
        return of_temperature(piece, parameters.item())

    def bounds(self, start: Tensor) -> tuple[Tensor, Tensor]:
        return _of_temperatures(start)

    def _notes(self, found: Minimum) -> tuple[str, ...]:
        if not found.at_bound:
            return ()
        end = f"{COLDEST}, the coldest" if found.parameters.max() > 1 else f"{HOTTEST}, the hottest"
        return (f"the likeliest temperature lies beyond {end} that is allowed: look at the scale of the logits",)

    def fit(self, cases: CaseStream, *, inputs: Inputs = "logits", sample: Sample | None = None) -> Self:
        if self.protocol == "optimum":
            return super().fit(cases, inputs=inputs, sample=sample)
        return self._one_epoch(cases, check_inputs(inputs))

    def _one_epoch(self, cases: CaseStream, inputs: Inputs) -> Self:
        number = check_stream(cases)
        temperature = torch.tensor(1.5, dtype=torch.float64, requires_grad=True)
        optimizer = torch.optim.Adam([temperature], lr=1e-3)

        def likelihood(case_pieces: Iterable[Piece], at: float) -> tuple[float, float, float]:
            near = self._likelihood(
                pieces := list(case_pieces), torch.tensor([[1 / at]], dtype=torch.float64), separable=True
            )
            return near.value, near.gradient.item() * -1 / at**2, sum(piece.voxels for piece in pieces)

        for case in cases:
            _, slope, _ = likelihood(pieces_of(case, self.activation), temperature.item())
            temperature.grad = torch.tensor(slope, dtype=torch.float64)
            optimizer.step()
        ends = []
        for at in (1.0, temperature.item()):
            found = [likelihood(pieces_of(case, self.activation), at) for case in cases]
            voxels = sum(found[i][2] for i in range(number))
            ends.append(tuple(sum(each[j] * each[2] for each in found) / voxels for j in range(2)))
        self.parameters = torch.tensor([[1 / temperature.item()]], dtype=torch.float64)
        report = FitReport(
            number, round(voxels), 3, self.likelihood, ends[0][0], ends[1][0], abs(ends[1][1]),
            notes=("one epoch of Adam from 1.5, as published: not the optimum",),
        )  # fmt: skip
        self._end_fit(None, inputs, report)
        return self


class ClassTemperature(LinearCalibrator):
    """A temperature for each class.

    Its settings are those of all linear calibrators (`LinearCalibrator`).
    """

    method = "class-temperature"
    summary = "A temperature for each class."
    any_shift = False

    @property
    def keeps_decisions(self) -> bool:
        return self.activation == "sigmoid"

    def bounds(self, start: Tensor) -> tuple[Tensor, Tensor]:
        return _of_temperatures(start)


class VectorScaling(LinearCalibrator):
    """A factor and a bias for each class.

    Its settings are those of all linear calibrators (`LinearCalibrator`).
    """

    method = "vector"
    summary = "A factor and a bias for each class."
    any_shift = False

    def features(self, logits: Tensor) -> Tensor:
        return torch.stack([logits, torch.ones_like(logits)], 1)

    def start(self, classes: int) -> Tensor:
        return torch.tensor([[1.0, 0.0]], dtype=torch.float64).repeat(classes, 1)


class Dirichlet(LinearCalibrator):
    """A linear map of all log-probabilities, and a bias for each class (Kull and others, 2019).

    off_diagonal, intercept: weights of the squared coefficients off the diagonal (their mean) and of the biases (their
        mean), which keep the map near a vector scaling.
    activation, objective, voxels, seed: as for all linear calibrators (`LinearCalibrator`); classes are exclusive.
    """

    method = "dirichlet"
    summary = "A linear map of all log-probabilities, and a bias for each class (Kull and others, 2019)."

    def __init__(
        self,
        *,
        activation: Activation = "softmax",
        off_diagonal: float = 1e-3,
        intercept: float = 1e-3,
        objective: Objective = "nll",
        voxels: int | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__(activation=activation, objective=objective, voxels=voxels, seed=seed)
        if activation != "softmax":
            raise ConfigError("dirichlet is for exclusive classes; for classes that overlap use 'beta'.")
        for name, weight in (("off_diagonal", off_diagonal), ("intercept", intercept)):
            if not (math.isfinite(weight) and weight >= 0):
                raise ConfigError(f"{name} must be a number of at least 0; got {weight!r}.")
        self.off_diagonal, self.intercept = off_diagonal, intercept

    def settings(self) -> dict[str, Any]:
        return super().settings() | {"off_diagonal": self.off_diagonal, "intercept": self.intercept}

    def features(self, logits: Tensor) -> Tensor:
        rows = torch.cat([logits.log_softmax(0), torch.ones_like(logits[:1])])
        return rows[None].expand(len(logits), *rows.shape)

    def start(self, classes: int) -> Tensor:
        return torch.eye(classes, classes + 1, dtype=torch.float64)

    def penalty(self, parameters: Tensor) -> Quadratic:
        classes = len(parameters)
        weights = torch.full_like(parameters, self.off_diagonal / (classes * (classes - 1)))
        weights[:, -1] = self.intercept / classes
        weights[:, :-1].fill_diagonal_(0)
        slopes = 2 * weights * parameters
        return Quadratic(float((weights * parameters**2).sum()), slopes.flatten(), torch.diag(2 * weights.flatten()))


class Platt(VectorScaling):
    """Logistic regression on the log-odds of each class against the rest.

    Its settings are those of all linear calibrators (`LinearCalibrator`).
    """

    method = "platt"
    summary = "Logistic regression on the log-odds of each class against the rest."
    any_shift = True
    against_rest = True

    def features(self, logits: Tensor) -> Tensor:
        return super().features(log_odds(logits, self.activation))


class Beta(LinearCalibrator):
    """Beta calibration (Kull and others, 2017) of each class against the rest: rising in the probability.

    Its settings are those of all linear calibrators (`LinearCalibrator`).
    """

    method = "beta"
    summary = "Beta calibration (Kull and others, 2017) of each class against the rest: rising in the probability."
    against_rest = True

    def features(self, logits: Tensor) -> Tensor:
        odds = log_odds(logits, self.activation)
        return torch.stack([logsigmoid(odds), -logsigmoid(-odds), torch.ones_like(odds)], 1)

    def start(self, classes: int) -> Tensor:
        return torch.tensor([[1.0, 1.0, 0.0]], dtype=torch.float64).repeat(classes, 1)

    def bounds(self, start: Tensor) -> tuple[Tensor, Tensor]:
        low, high = super().bounds(start)
        low[:, :2] = 0
        return low, high


def _of_temperatures(start: Tensor) -> tuple[Tensor, Tensor]:
    """Bounds of inverse temperatures."""
    return torch.full_like(start, 1 / HOTTEST), torch.full_like(start, 1 / COLDEST)
