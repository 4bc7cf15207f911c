"""Calibrators whose logits are linear in their parameters, so that the likelihood has one optimum, which is reached.

Calibrated logits are o_k = sum over f of theta_kf x_kf for class k and features x of the logits:

    temperature        x = z_k                    one theta for all classes
    class-temperature  x = z_k                    one each
    vector             x = (z_k, 1)
    dirichlet          x = (log p_1, ..., log p_K, 1)
    platt              x = (log-odds of k, 1)           each class against the rest
    beta               x = (log p_k, -log(1 - p_k), 1)  each class against the rest

Classes are exclusive (a softmax over o), or each stands for itself (a sigmoid): for outputs that overlap, and for Platt
and beta, whose probabilities are divided by their sum afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any, ClassVar, Literal, Self

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from segcal.calibrators.calibrator import (
    Activation,
    Calibrator,
    FitReport,
    Inputs,
    check_inputs,
    need_all_classes,
    not_separable,
)
from segcal.calibrators.likelihood import (
    Sums,
    each_by_itself,
    exclusive,
    output,
    residual_of,
    truth_of,
)
from segcal.calibrators.newton import Minimum, Quadratic, minimize
from segcal.calibrators.objective import average_error, soft_statistics
from segcal.calibrators.stream import (
    CaseStream,
    Piece,
    Sample,
    check_stream,
    draw_sample,
    flatten,
    no_voxels,
    pieces_of,
    slabs_of,
)
from segcal.errors import ConfigError, SegcalError, check_integer, check_seed, one_of

WIDEST = 1e4  # bound of a weight or bias that is not a temperature
START_VOXELS = 1 << 17  # to start from, which halves the passes of most methods; the fit itself sees all voxels
Objective = Literal["nll", "ace", "ece"]


class LinearCalibrator(Calibrator):
    """A calibrator of this family.

    activation: "softmax" for exclusive classes, "sigmoid" for classes that overlap.
    objective: "nll", or the calibration error itself: "ace" or "ece", soft-binned, averaged over cases and classes and
        followed downhill to a local optimum, from the likeliest parameters or from the logits as they were, whichever
        has the smaller one; each case is then held in memory.
    voxels: fit on about so many voxels, drawn from all cases, classes and levels of sureness; the error that adds is
        in the report. None: on all.
    seed: of that draw.
    """

    tied: ClassVar[bool] = False
    against_rest: ClassVar[bool] = False
    by_class: ClassVar[bool] = True
    """Whether a class without voxels leaves parameters without a best value."""

    def __init__(
        self,
        *,
        activation: Activation = "softmax",
        objective: Objective = "nll",
        voxels: int | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__(activation=activation)
        one_of("objective", objective, ("nll", "ace", "ece"))
        voxels = None if voxels is None else check_integer("voxels", voxels)
        if voxels is not None and objective != "nll":
            raise ConfigError(f"objective {objective!r} needs every voxel of a case; leave out voxels={voxels}.")
        self.objective, self.voxels, self.seed = objective, voxels, check_seed(seed)
        self.parameters: Tensor | None = None
        """What the fit found, float64."""

    def features(self, logits: Tensor) -> Tensor:
        """(class, feature, voxel) of (class, voxel) logits."""
        return logits[:, None]

    def start(self, classes: int) -> Tensor:
        """(class, feature) that change nothing; tied ones have a single row."""
        return torch.ones(1 if self.tied else classes, 1, dtype=torch.float64)

    def bounds(self, start: Tensor) -> tuple[Tensor, Tensor]:
        return torch.full_like(start, -WIDEST), torch.full_like(start, WIDEST)

    def penalty(self, parameters: Tensor) -> Quadratic | None:
        """Added to the likelihood; none."""
        return None

    @property
    def fitted(self) -> bool:
        return self.parameters is not None

    @property
    def each(self) -> bool:
        """Whether the likelihood takes every class by itself."""
        return self.against_rest or self.activation == "sigmoid"

    @property
    def likelihood(self) -> str:
        """Which one is reported: that of the true class, or the mean over classes of each against the rest."""
        return "binary nll" if self.each else "nll"

    def settings(self) -> dict[str, Any]:
        own = {"objective": self.objective, "voxels": self.voxels, "seed": self.seed}
        return super().settings() | own

    def state(self) -> dict[str, Any]:
        assert self.parameters is not None  # `save` has looked
        return {"parameters": self.parameters.tolist()}

    def set_state(self, state: dict[str, Any]) -> None:
        parameters = torch.tensor(state["parameters"], dtype=torch.float64)
        if self.classes is None and not self.tied:
            raise ValueError("it must say how many classes it has")
        expected = self.start(self.classes or len(parameters))
        if parameters.shape != expected.shape or not bool(parameters.isfinite().all()):
            raise ValueError(f"its parameters must be {tuple(expected.shape)} finite numbers")
        low, high = self.bounds(expected)
        if bool(((parameters < low) | (parameters > high)).any()):
            raise ValueError(f"its parameters must lie within the bounds of {self.method}")
        self.parameters = parameters

    def draw(self, cases: CaseStream) -> Sample:
        """Voxels to begin a fit from, or to fit on."""
        return draw_sample(cases, voxels=self.voxels or START_VOXELS, activation=self.activation, seed=self.seed)

    def fit(self, cases: CaseStream, *, inputs: Inputs = "logits", sample: Sample | None = None) -> Self:
        """Itself, fitted, as `Calibrator.fit` says; a `sample` that was drawn from these cases is not drawn again."""
        number = check_stream(cases)
        check_inputs(inputs)
        sample = sample or self.draw(cases)
        if self.by_class:
            need_all_classes(self.method, sample.true_voxels)
        start, bounds = self.start(sample.classes), self.bounds(self.start(sample.classes))
        shape = start.shape

        def best(pieces: Callable[[], Iterable[Piece]], start: Tensor) -> Minimum:
            return minimize(
                lambda parameters: self._likelihood(pieces(), parameters.reshape(shape)),
                start.flatten(), *(bound.flatten() for bound in bounds),
            )  # fmt: skip

        def everything() -> Iterator[Piece]:
            width = 2 * self.features(torch.zeros(sample.classes, 1, dtype=torch.float64)).shape[1]
            for case in cases:
                yield from pieces_of(case, self.activation, width=width)

        errors: tuple[float, ...] = ()
        if self.voxels is not None:
            found, passes = best(sample.pieces, start), 1
            before = self._likelihood(sample.pieces(), start).value
            errors = self._sampling_errors(sample, found)
        else:
            begin = start
            if sample.drawn < sample.voxels:
                try:
                    begin = best(sample.pieces, start).parameters
                except SegcalError:
                    begin = start  # the draw had no mistake; all voxels may
            before = self._likelihood(everything(), start).value
            found = best(everything, begin)
            passes = found.passes + 2
        self.parameters = found.parameters.reshape(shape)
        report = FitReport(
            number, sample.voxels, passes, self.likelihood, before, found.value, found.gradient,
            sample.drawn if self.voxels is not None else None, errors, self._notes(found),
        )  # fmt: skip
        self._end_fit(sample.classes, inputs, report)
        if self.objective != "nll":
            self._follow_error(cases)
        return self

    def _notes(self, found: Minimum) -> tuple[str, ...]:
        return ()

    def _likelihood(self, pieces: Iterable[Piece], parameters: Tensor, *, separable: bool = False) -> Quadratic:
        """Mean negative log-likelihood of a voxel (of a voxel and class, where each stands for itself)."""
        voxels, total = 0.0, None
        for piece in pieces:
            sums = self._sums(piece, parameters)
            total = sums if total is None else total.plus(sums)
            voxels += piece.voxels
        if total is None:
            raise no_voxels()
        if not separable and bool((total.wrong == 0).any()):
            which = int((total.wrong == 0).nonzero()[0])
            raise not_separable(f"class {which} against the rest" if self.each and not self.tied else "the prediction")
        size = parameters.numel()
        near = Quadratic(
            total.value / voxels, total.gradient.reshape(size) / voxels, total.curvature.reshape(size, size) / voxels
        )
        added = self.penalty(parameters)
        return near if added is None else near.plus(added)

    def _sums(self, piece: Piece, parameters: Tensor) -> Sums:
        x = self.features(piece.logits.double())
        return each_by_itself(piece, x, parameters) if self.each else exclusive(piece, x, parameters)

    def _sampling_errors(self, sample: Sample, found: Minimum) -> tuple[float, ...]:
        """Standard error that the draw adds to each parameter, from how the voxels of a stratum differ."""
        parameters = found.parameters.reshape(self.start(sample.classes).shape)
        spread = torch.zeros_like(found.curvature)
        for piece in sample.pieces():
            drawn = piece.logits.shape[1]
            seen = piece.voxels
            if drawn < 2 or drawn >= seen:
                continue
            x = self.features(piece.logits.double())
            out = output(parameters, x)
            residual = (
                (out.sigmoid() - truth_of(piece, len(out))) / len(out) if self.each else residual_of(out, piece.labels)
            )
            slopes = residual[:, None] * x
            slopes = slopes.sum(0) if self.tied else slopes.flatten(0, 1)
            covariance = torch.cov(slopes).reshape(len(slopes), len(slopes))
            spread += covariance * seen**2 / drawn * (1 - drawn / seen)
        inverse = torch.linalg.pinv(found.curvature, hermitian=True)
        variance = (inverse @ (spread / sample.voxels**2) @ inverse).diagonal()
        return tuple(variance.clamp(min=0).sqrt().tolist())

    def _apply(self, logits: Tensor) -> Tensor:
        assert self.parameters is not None  # `check` has looked
        return self._calibrated(self.parameters.to(logits), logits)

    def _calibrated(self, parameters: Tensor, logits: Tensor) -> Tensor:
        out = output(parameters, self.features(logits))
        return logsigmoid(out) if self.against_rest and self.activation == "softmax" else out

    def _follow_error(self, cases: CaseStream) -> None:
        """Go on downhill in the calibration error, averaged over cases."""
        from scipy.optimize import minimize

        assert self.parameters is not None  # the likelihood has been fitted
        assert self._report is not None
        shape, passes = self.parameters.shape, 0

        def error(flat: np.ndarray[Any, Any]) -> tuple[float, np.ndarray[Any, Any]]:
            nonlocal passes
            passes += 1
            parameters = torch.from_numpy(flat.copy()).reshape(shape).requires_grad_()
            errors = []
            for case in cases:
                one = self._case_error(case, parameters)
                one.backward()  # type: ignore[no-untyped-call]
                errors.append(one.item())
            assert parameters.grad is not None
            return float(np.mean(errors)), parameters.grad.flatten().numpy() / len(errors)

        low, high = (bound.flatten().numpy() for bound in self.bounds(self.parameters))
        start, nothing = (each.flatten().numpy() for each in (self.parameters, self.start(self.classes or 1)))
        unchanged, _ = error(nothing)
        if unchanged < error(start)[0]:  # downhill from there, it does not get worse
            start = nothing
        found = minimize(error, start, jac=True, method="L-BFGS-B", bounds=list(zip(low, high, strict=True)))
        self.parameters = torch.from_numpy(found.x.copy()).reshape(shape)
        self._report = replace(
            self._report,
            passes=self._report.passes + passes,
            objective=self.objective,
            before=unchanged,
            after=float(found.fun),
            gradient=float(np.abs(found.jac).max()),
            notes=(*self._report.notes, "a local optimum of the calibration error, near where it was followed from"),
        )

    def _case_error(self, case: Any, parameters: Tensor) -> Tensor:
        """Soft calibration error of one case, with its gradient."""
        parts = [flatten(logits, labels, self.activation) for logits, labels in slabs_of(case)]
        logits, labels = (torch.cat(side, dim=-1) for side in zip(*parts, strict=True))
        stats = soft_statistics(self._calibrated(parameters, logits.double()), labels, self.activation)
        return average_error(stats, "ace" if self.objective == "ace" else "ece")
