"""The exponentials and logarithms that run in vector lanes, against those of numpy."""

from __future__ import annotations

import numpy as np
import pytest
from numba import njit

from segcal.kernels import numba_math


@njit
def single(x, to):
    for v in range(len(x)):
        to[v] = numba_math.exp_single(x[v])


@njit
def double(x, to):
    for v in range(len(x)):
        to[v] = numba_math.exp_double(x[v])


@njit
def log_of_product(q):
    products = np.zeros(numba_math.LANES)
    numba_math.multiply(q, np.uint64(len(q)), products)
    return numba_math.log_of(products)


@pytest.mark.parametrize(("exp", "dtype", "lowest"), [(single, np.float32, -87), (double, np.float64, -708)])
def test_exponentials_are_right_to_two_units_in_the_last_place(exp, dtype, lowest):
    random = np.random.default_rng(0)
    x = np.concatenate([random.uniform(lowest, 80, 20_000), random.normal(0, 1e-3, 5000)]).astype(dtype)
    found = np.empty_like(x)
    exp(x, found)
    np.testing.assert_allclose(found, np.exp(x.astype(np.longdouble)), rtol=2 * np.finfo(dtype).eps)


@pytest.mark.parametrize(("exp", "dtype"), [(single, np.float32), (double, np.float64)])
def test_exponentials_of_special_numbers(exp, dtype):
    x = np.array([0, -0.0, -1e4, -np.inf, np.nan], dtype)
    found = np.empty_like(x)
    exp(x, found)
    np.testing.assert_array_equal(found, np.array([1, 1, 0, 0, np.nan], dtype))


@pytest.mark.parametrize("number", [0, 1, 15, 16, 17, 512])
@pytest.mark.parametrize("size", [1e-30, 1e-9, 1.0, 100.0])
def test_logarithms_of_products_round_nothing_away(number, size):
    q = size * np.random.default_rng(number).random(number)
    assert log_of_product(q) == pytest.approx(np.log1p(q).sum(), rel=1e-14)
