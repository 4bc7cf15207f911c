"""Newton's method within bounds: against scipy, and by the conditions that only a minimum fulfills."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy.optimize import lsq_linear

from segcal.calibrators.newton import Quadratic, minimize
from segcal.errors import SegcalError


def least_squares(matrix, target):
    """Half the sum of squares, as `minimize` takes it."""
    matrix, target = torch.as_tensor(matrix, dtype=torch.float64), torch.as_tensor(target, dtype=torch.float64)

    def evaluate(x):
        rest = matrix @ x - target
        return Quadratic(float(rest @ rest) / 2, matrix.T @ rest, matrix.T @ matrix)

    return evaluate


def wide(size):
    return torch.full((size,), -1e4, dtype=torch.float64), torch.full((size,), 1e4, dtype=torch.float64)


@pytest.mark.parametrize("seed", range(8))
def test_sums_of_squares_within_bounds_are_as_small_as_scipys(seed):
    random = np.random.default_rng(seed)
    for _ in range(20):
        size = random.integers(1, 7)
        scales = 10 ** random.uniform(-1.5, 1.5, size)  # up to a thousand times as steep in one direction as in another
        matrix, target = random.normal(size=(size + 3, size)) * scales, 3 * random.normal(size=size + 3)
        low = random.normal(size=size) - 0.5
        high = low + 2 * random.exponential(size=size)
        start = torch.from_numpy(3 * random.normal(size=size))  # often outside
        evaluate = least_squares(matrix, target)
        found = minimize(evaluate, start, torch.from_numpy(low), torch.from_numpy(high))
        x, gradient = found.parameters.numpy(), evaluate(found.parameters).gradient.numpy()
        assert ((x >= low) & (x <= high)).all()
        steep = 1e-6 * np.abs(matrix.T @ matrix).max()
        inside = (x > low) & (x < high)
        assert np.abs(gradient[inside]).max(initial=0) <= steep
        assert (gradient[x == low] >= -steep).all()
        assert (gradient[x == high] <= steep).all()
        assert found.at_bound == tuple(np.flatnonzero(~inside))
        theirs = lsq_linear(matrix, target, (low, high), method="trf", tol=1e-14).cost
        assert found.value <= theirs * (1 + 1e-9)


def test_without_active_bounds_one_step_is_enough():
    found = minimize(least_squares(np.diag([1.0, 100.0, 1e-3]), [1.0, 2.0, 3.0]), torch.zeros(3).double(), *wide(3))
    assert found.parameters.tolist() == pytest.approx([1, 0.02, 3000])
    assert found.passes == 2
    assert found.at_bound == ()


def test_directions_that_change_nothing_are_left_where_they_start():
    found = minimize(least_squares([[1.0, 1.0]], [1.0]), torch.tensor([3.0, 1.0]).double(), *wide(2))
    assert found.value == pytest.approx(0, abs=1e-20)
    assert found.parameters.tolist() == pytest.approx([1.5, -0.5])


def test_a_flat_function_stays_at_its_start():
    found = minimize(least_squares(np.zeros((1, 2)), [1.0]), torch.tensor([3.0, 1.0]).double(), *wide(2))
    assert found.parameters.tolist() == [3, 1]
    assert found.gradient == 0


def test_a_start_outside_of_the_bounds_is_taken_to_them():
    low, high = torch.tensor([0.0, 0.0]).double(), torch.tensor([1.0, 1.0]).double()
    found = minimize(least_squares(np.eye(2), [5.0, 0.5]), torch.tensor([-9.0, 9.0]).double(), low, high)
    assert found.parameters.tolist() == [1, 0.5]
    assert found.at_bound == (0,)
    assert found.gradient < 1e-12  # of what the bounds leave open


def slope(x):
    return Quadratic(float(x.sum()), torch.ones_like(x), torch.zeros(len(x), len(x)).double())


def test_a_slope_without_end_leads_exactly_to_the_bound():
    low, high = torch.tensor([0.01, -3.0]).double(), torch.tensor([100.0, 3.0]).double()
    found = minimize(slope, torch.ones(2).double(), low, high)
    assert torch.equal(found.parameters, low)
    assert found.at_bound == (0, 1)


def test_curves_that_are_no_parabola_are_followed_to_their_minimum():
    def evaluate(x):  # cosh(x - 2) + x / 2: far off Newton's steps are too long, or too short
        return Quadratic(
            math.cosh(x.item() - 2) + x.item() / 2, torch.sinh(x - 2) + 0.5, torch.cosh(x - 2).reshape(1, 1)
        )

    for start in (-30.0, 0.0, 25.0):
        found = minimize(evaluate, torch.tensor([start]).double(), *wide(1))
        assert found.parameters.item() == pytest.approx(2 + math.asinh(-0.5), rel=1e-6)
        assert found.gradient < 1e-5

    def flat_outside(x):  # log(cosh(x)): a whole step from beyond 1.09 goes astray
        return Quadratic(float(torch.log(torch.cosh(x))), torch.tanh(x), (1 - torch.tanh(x) ** 2).reshape(1, 1))

    assert minimize(flat_outside, torch.tensor([6.0]).double(), *wide(1)).parameters.item() == pytest.approx(
        0, abs=1e-6
    )


def test_a_fit_that_does_not_settle_says_so():
    def creeping(x):  # a curvature a thousand times too large makes steps a thousand times too short
        return Quadratic(float(x @ x) / 2, x, 1000 * torch.eye(1).double())

    with pytest.raises(SegcalError, match="must settle within 20 passes; the gradient is still"):
        minimize(creeping, torch.ones(1).double(), *wide(1), most_passes=20)


def test_a_gradient_that_is_none_says_so():
    def uphill(x):
        return Quadratic(float(x.sum()), -torch.ones(1).double(), torch.eye(1).double())

    with pytest.raises(SegcalError, match="no step lowers the objective"):
        minimize(uphill, torch.zeros(1).double(), *wide(1))
