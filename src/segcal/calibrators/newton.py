"""Newton's method for convex sums over a stream: a pass gives value, gradient and curvature at once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from segcal.errors import SegcalError

RIDGE = 1e-12  # of the largest curvature or slope; directions without a bend (a constant added to all logits) need some
NOISE = 1e-12  # of a gradient, from rounding
HALVINGS = 60


class Quadratic(NamedTuple):
    """A function near one point."""

    value: float
    gradient: Tensor
    curvature: Tensor

    def plus(self, other: Quadratic) -> Quadratic:
        """Of the sum of two functions."""
        return Quadratic(self.value + other.value, self.gradient + other.gradient, self.curvature + other.curvature)


@dataclass(frozen=True, eq=False)
class Minimum:
    parameters: Tensor
    value: float
    gradient: float
    """Largest slope in a direction that the bounds leave open."""
    curvature: Tensor
    passes: int
    at_bound: tuple[int, ...]


def minimize(
    evaluate: Callable[[Tensor], Quadratic],
    start: Tensor,
    low: Tensor,
    high: Tensor,
    *,
    tolerance: float = 1e-6,
    most_passes: int = 200,
) -> Minimum:
    """The minimum of a convex function within bounds, to a relative `tolerance` of its parameters."""
    parameters = start.clamp(low, high)
    now = evaluate(parameters)
    passes = 1
    while True:
        free = ~(((parameters <= low) & (now.gradient > 0)) | ((parameters >= high) & (now.gradient < 0)))
        target = _newton_target(now, parameters, low, high)
        step = target - parameters
        slope = float(torch.where(free, now.gradient, 0).abs().max())
        small = bool((step.abs() <= tolerance * parameters.abs() + 1e-3 * tolerance).all())
        # The decrease that is still to be had drowns in the rounding of the sums.
        drowned = float(-(now.gradient @ step)) <= 1e-15 * abs(now.value)
        if small or drowned or slope == 0:
            bound = tuple(((parameters <= low) | (parameters >= high)).nonzero()[:, 0].tolist())
            return Minimum(parameters, now.value, slope, now.curvature, passes, bound)
        for halvings in range(HALVINGS):
            trial = (parameters + 0.5**halvings * step).clamp(low, high) if halvings else target
            if passes == most_passes:
                raise SegcalError(
                    f"the fit must settle within {most_passes} passes; the gradient is still {slope:.2g}."
                    " Add cases or use fewer parameters, such as 'temperature'."
                )
            following = evaluate(trial)
            passes += 1
            if following.value <= now.value + 1e-4 * float(now.gradient @ (trial - parameters)) + 1e-15 * abs(
                now.value
            ):
                break
        else:
            raise SegcalError(f"no step lowers the objective, though its gradient is {slope:.2g}; look at the logits.")
        parameters, now = trial, following


def _newton_target(now: Quadratic, parameters: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """Where the quadratic is least within the bounds."""
    steepest = max(float(now.curvature.diagonal().max()), float(now.gradient.abs().max()), 1e-290)
    ridge = RIDGE * steepest
    values, vectors = torch.linalg.eigh(now.curvature)
    along = vectors.T @ now.gradient
    along[(values < ridge) & (along.abs() < NOISE)] = 0
    root = values.clamp(min=ridge).sqrt()
    step, down, up = -(vectors @ (along / root**2)), low - parameters, high - parameters
    if bool(((step < down) | (step > up)).any()):  # cut off at the bounds it could lead uphill
        from scipy.optimize import lsq_linear

        matrix, goal = (root[:, None] * vectors.T).numpy(), (-along / root).numpy()
        found = lsq_linear(matrix, goal, (down.numpy(), up.numpy()), method="bvls", tol=1e-15, max_iter=1000)
        step = torch.from_numpy(found.x)
    near = 1e-14 * (up - down)  # rounding
    return torch.where(step <= down + near, low, torch.where(step >= up - near, high, parameters + step))
