"""Exponentials that run in vector lanes, and sums of log(1 + q) by few logarithms; for the passes compiled by numba.

numba's cache on disk does not notice a change here: empty `__pycache__` after one.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from llvmlite import ir
from numba import extending, types
from numba.core import cgutils
from numba.np.arrayobj import make_array

from segcal.kernels.numba_cache import cached_njit

LANES = np.uint64(16)  # products that are carried side by side

intrinsic: Any = extending.intrinsic  # whose types would ask callers for the typing context, too

# Reordering lets sums run in vector lanes. NaN and infinity keep their meaning.
FAST = {"reassoc", "contract", "nsz"}
OPTIONS = {"nogil": True, "error_model": "numpy"}
# Called by compiled code alone: without what Python would need, and without counting references to arrays.
INNER = OPTIONS | {"no_cpython_wrapper": True, "no_cfunc_wrapper": True, "_nrt": False}
jit = cached_njit(fastmath=FAST, **OPTIONS)
inner = cached_njit(fastmath=FAST, **INNER)
# A product and a sum may be rounded as one; nothing is reordered.
fused = cached_njit(fastmath={"contract"}, **INNER)
# Every operation as written. Said aloud: left out, the setting would be taken from whichever function calls first.
exact = cached_njit(fastmath=False, **INNER)


@intrinsic
def bits(_: Any, x: Any) -> Any:
    """The bits of a floating-point number, as an integer of its size."""
    to = types.int32 if x == types.float32 else types.int64
    return to(x), lambda context, builder, _, args: builder.bitcast(args[0], context.get_value_type(to))


@intrinsic
def from_bits(_: Any, x: Any) -> Any:
    """The floating-point number of these bits."""
    to = types.float32 if x == types.int32 else types.float64
    return to(x), lambda context, builder, _, args: builder.bitcast(args[0], context.get_value_type(to))


@intrinsic
def read(_: Any, data: Any, place: Any, like: Any) -> Any:
    """A number at a place of an array of bytes, whose numbers are of the type that `like` has.

    Compiled in no time, unlike a view of the array, which drags the making of error messages along.
    """

    def generate(context: Any, builder: Any, _: Any, args: Any) -> Any:
        first = make_array(data)(context, builder, args[0]).data
        numbers = builder.bitcast(first, context.get_value_type(like).as_pointer())
        return builder.load(builder.gep(numbers, [args[1]]), align=like.bitwidth // 8)

    return like(data, place, like), generate


@intrinsic
def prefetch(_: Any, array: Any, place: Any) -> Any:
    """Ask for the cache line of an element that will be needed soon; a place beyond the array does no harm."""

    def generate(context: Any, builder: Any, _: Any, args: Any) -> Any:
        first = make_array(array)(context, builder, args[0]).data
        byte, word = ir.IntType(8).as_pointer(), ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [byte, word, word, word])
        function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0i8")
        address = builder.bitcast(builder.gep(first, [args[1]]), byte)
        builder.call(function, [address, word(0), word(2), word(1)])  # to read, into the second cache, data
        return context.get_dummy_value()

    return types.none(array, place), generate


@fused
def exp_single(x):
    """exp of a float32 below 88, to two units in the last place; 0 below -87.

    x = k ln 2 + r, a polynomial for exp(r) (Cephes' coefficients), and 2**k written into the exponent bits.
    """
    f = np.float32
    k = np.floor(x * f(1.44269504) + f(0.5))
    r = x - k * f(0.693359375)  # ln 2 in two parts, the first exact times k
    r -= k * f(-2.12194440e-4)
    y = f(1.9875691500e-4)
    y = y * r + f(1.3981999507e-3)
    y = y * r + f(8.3334519073e-3)
    y = y * r + f(4.1665795894e-2)
    y = y * r + f(1.6666665459e-1)
    y = y * r + f(5.0000001201e-1)
    y = y * r * r + r + f(1)
    y = from_bits(np.int32(bits(y) + (np.int32(k) << np.int32(23))))
    return f(0) if x < f(-87.0) else y


@inner
def exponentiate(x, n):
    """exp of the first n of these float32, in place."""
    for v in range(n):
        x[v] = exp_single(x[v])


@fused
def exp_double(x):
    """exp of a float64 below 709, to two units in the last place; 0 below -708. The same, by Taylor's series."""
    k = np.floor(x * 1.4426950408889634 + 0.5)
    r = x - k * 0.693145751953125
    r -= k * 1.42860682030941723212e-6
    y = 1.0 / 6227020800
    y = y * r + 1.0 / 479001600
    y = y * r + 1.0 / 39916800
    y = y * r + 1.0 / 3628800
    y = y * r + 1.0 / 362880
    y = y * r + 1.0 / 40320
    y = y * r + 1.0 / 5040
    y = y * r + 1.0 / 720
    y = y * r + 1.0 / 120
    y = y * r + 1.0 / 24
    y = y * r + 1.0 / 6
    y = y * r + 0.5
    y = y * r * r + r + 1.0
    y = from_bits(bits(y) + (np.int64(np.int32(k)) << 52))
    return 0.0 if x < -708.0 else y


@fused
def multiply(q, n, products):
    """Multiply LANES products by 1 + q, in turn. What is kept is each less 1, so that no small q is rounded away."""
    whole = n - n % LANES
    for a in range(np.uint64(0), whole, LANES):
        for lane in range(LANES):
            products[lane] += q[a + lane] + products[lane] * q[a + lane]
    for v in range(n - whole):
        products[v] += q[whole + v] + products[v] * q[whole + v]


@inner
def log_of(products):
    """Sum of their logarithms; they are 1 again."""
    total = 0.0
    for lane in range(LANES):
        total += math.log1p(products[lane])
        products[lane] = 0.0
    return total
