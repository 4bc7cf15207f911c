"""Local temperatures on the CPU by numba: the network on the logits of single voxels, and the mean with neighbors.

Blocks of voxels stay in the cache from the logits to the result, in single precision. All that a voxel needs is
polynomials and fractions, so that the loops run in vector lanes: exp as in the other passes, log by the bits of the
exponent, the normal distribution's integral in GELU by a fraction (fitted for this; GELU is right to 3e-6).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from segcal.kernels.numba_cpu import run_segments, segments_of
from segcal.kernels.numba_math import exponentiate, jit

Array = NDArray[Any]

BLOCK = 256  # voxels: 16 values of each take 16 KiB


class Dense(NamedTuple):
    """Two hidden layers and the last: weights (output, input) and biases, float32."""

    first: Array
    first_bias: Array
    second: Array
    second_bias: Array
    last: Array
    last_bias: Array


def divide(
    logits: Array, layers: Dense, *, softmax: bool, clip: float, coldest: float, hottest: float, threads: int
) -> Array:
    """Logits (class, voxel) by the temperatures of the voxels; float32.

    coldest, hottest: the largest that the network's logarithm of a temperature can be below and above zero.
    """
    result = np.empty_like(logits)
    segments = segments_of(logits.shape[1])
    limits = np.array([clip, coldest, hottest], np.float32)

    def segment(_: int, s: int) -> None:
        _divide(logits, layers, softmax, limits, *segments[s], result)

    run_segments(segment, 1, len(segments), threads)
    return result


def smooth(
    logits: Array, shape: tuple[int, ...], shares: Array, *, softmax: bool, least: float, ahead: float, threads: int
) -> Array:
    """Logits (class, voxel) of a grid of this shape, as `segcal.calibrators.smoothing.smoothed` gives them; float32."""
    values, result = np.empty_like(logits), np.empty_like(logits)
    segments = segments_of(logits.shape[1])
    sizes, parts = np.array(shape, dtype=np.int64), shares.astype(np.float32)

    def activate(_: int, s: int) -> None:
        _probabilities(logits, softmax, *segments[s], values)

    def mix(_: int, s: int) -> None:
        _smooth(logits, values, sizes, parts, softmax, np.float32(least), np.float32(ahead), *segments[s], result)

    for pass_ in (activate, mix):
        run_segments(pass_, 1, len(segments), threads)
    return result


@jit
def _divide(logits, layers, softmax, limits, start, stop, result):
    classes, f = logits.shape[0], np.float32
    clip, coldest, hottest = limits
    seen = np.zeros((layers.first.shape[1], BLOCK), f)
    one, two = np.empty((layers.second.shape[1], BLOCK), f), np.empty((layers.last.shape[1], BLOCK), f)
    raw = np.empty((layers.last.shape[0], BLOCK), f)
    sums, rest, bits = np.empty(BLOCK, f), np.empty(BLOCK, f), np.empty(BLOCK, np.int32)
    for first in range(start, stop, BLOCK):
        n = min(BLOCK, stop - first)
        x = logits[:, first : first + n]
        if softmax:
            _see_softmax(x, n, clip, seen, sums, rest, raw[0], bits)
        else:
            for c in range(classes):
                xc, signed, size = x[c], seen[c], seen[classes + c]
                for v in range(n):
                    t = f(-clip) if xc[v] < -clip else clip if xc[v] > clip else xc[v]
                    signed[v] = t * f(0.25)
                    size[v] = abs(t) * f(0.25) - f(1)
        np.dot(layers.first, seen, one)
        _gelu(one, layers.first_bias)
        np.dot(layers.second, one, two)
        _gelu(two, layers.second_bias)
        np.dot(layers.last, two, raw)
        for k in range(len(raw)):
            _inverse(raw[k], layers.last_bias[k], n, coldest, hottest, rest)
        for c in range(classes):
            xc, row, out = x[c], raw[0 if softmax else c], result[c, first : first + n]
            for v in range(n):
                out[v] = xc[v] * row[v]


@jit
def _see_softmax(x, n, clip, seen, sums, rest, power, bits):
    """As `segcal.calibrators.local.features_of`: distances to the largest, the margin, the entropy."""
    classes, f = x.shape[0], np.float32
    best, second = seen[classes], seen[classes + 1]  # the margin's and the entropy's rows serve first
    for v in range(n):
        best[v] = x[0, v]
        second[v] = f(-np.inf)
    for c in range(1, classes):
        xc = x[c]
        for v in range(n):
            lower = min(best[v], xc[v])
            second[v] = max(second[v], lower)
            best[v] = max(best[v], xc[v])
    for v in range(n):
        sums[v] = 0
        rest[v] = best[v] - second[v]
    entropy = second
    for v in range(n):
        entropy[v] = 0
    for c in range(classes):
        xc, row = x[c], seen[c]
        for v in range(n):
            t = xc[v] - best[v]
            power[v] = f(-87) if t < f(-87) else t
            row[v] = power[v]
        exponentiate(power, n)
        for v in range(n):
            sums[v] += power[v]
            entropy[v] -= power[v] * row[v]
            row[v] = (f(-clip) if row[v] < -clip else row[v]) * f(0.25) + f(1)
    margin = best
    for v in range(n):
        margin[v] = (clip if rest[v] > clip else rest[v]) * f(0.25) - f(1)
        entropy[v] /= sums[v]
    _logarithm(sums, n, bits)
    for v in range(n):
        entropy[v] += sums[v]


@jit
def _gelu(rows, bias):
    f = np.float32
    for o in range(rows.shape[0]):
        row, added = rows[o], bias[o]
        for v in range(BLOCK):
            x = row[v] + added
            t = f(-5) if x < f(-5) else f(5) if x > f(5) else x
            s = t * t
            above = f(-2.8232764e-08)
            above = above * s + f(8.822267e-06)
            above = above * s + f(6.609989e-04)
            above = above * s + f(1.1099012e-02)
            above = above * s + f(1.0517424e-01)
            above = above * s + f(7.978839e-01)
            below = f(1.10785346e-04)
            below = below * s + f(2.7781876e-03)
            below = below * s + f(3.8667243e-02)
            below = below * s + f(2.9847756e-01)
            below = below * s + f(1)
            row[v] = x * (f(0.5) + f(0.5) * t * above / below)


@jit
def _inverse(raw, bias, n, coldest, hottest, rest):
    """1 / temperature of what the network says: exp(-limit tanh(raw / limit)), the limit that of its side."""
    f = np.float32
    for v in range(n):
        raw[v] += bias
        limit = coldest if raw[v] < f(0) else hottest
        rest[v] = f(-2) * abs(raw[v]) / limit
    exponentiate(rest, n)
    for v in range(n):
        size = (f(1) - rest[v]) / (f(1) + rest[v])
        raw[v] = coldest * size if raw[v] < f(0) else -hottest * size
    exponentiate(raw, n)


@jit
def _logarithm(x, n, bits):
    """log of positive numbers, in place: the exponent's bits, and for the fraction m near 1 the series of
    artanh((m - 1) / (m + 1)) times two.
    """
    f = np.float32
    words = x.view(np.int32)
    for v in range(n):
        bits[v] = ((words[v] - np.int32(0x3F3504F3)) >> np.int32(23)) << np.int32(23)  # m from sqrt(1/2) to sqrt(2)
        words[v] -= bits[v]
    for v in range(n):
        q = (x[v] - f(1)) / (x[v] + f(1))
        s = q * q
        series = f(1) + s * (f(1 / 3) + s * (f(1 / 5) + s * (f(1 / 7) + s * f(1 / 9))))
        x[v] = f(2) * q * series + f(bits[v] >> np.int32(23)) * f(0.69314718)


@jit
def _probabilities(logits, softmax, start, stop, values):
    classes, f = logits.shape[0], np.float32
    top, total = np.empty(BLOCK, f), np.empty(BLOCK, f)
    for first in range(start, stop, BLOCK):
        n = min(BLOCK, stop - first)
        x, p = logits[:, first : first + n], values[:, first : first + n]
        if not softmax:
            for c in range(classes):
                xc, pc = x[c], p[c]
                for v in range(n):
                    top[v] = -abs(xc[v])
                exponentiate(top, n)
                for v in range(n):
                    inverse = f(1) / (f(1) + top[v])
                    pc[v] = top[v] * inverse if xc[v] < f(0) else inverse
            continue
        for v in range(n):
            top[v] = x[0, v]
            total[v] = 0
        for c in range(1, classes):
            xc = x[c]
            for v in range(n):
                top[v] = max(top[v], xc[v])
        for c in range(classes):
            xc, pc = x[c], p[c]
            for v in range(n):
                pc[v] = xc[v] - top[v]
            exponentiate(pc, n)
            for v in range(n):
                total[v] += pc[v]
        for c in range(classes):
            pc = p[c]
            for v in range(n):
                pc[v] /= total[v]


@jit
def _smooth(logits, values, sizes, shares, softmax, least, ahead, start, stop, result):
    classes, f = logits.shape[0], np.float32
    mean, other, bits = np.empty((classes, BLOCK), f), np.empty(BLOCK, f), np.empty(BLOCK, np.int32)
    best, largest = np.empty(BLOCK, f), np.empty(BLOCK, np.int32)
    own = f(1) - shares.sum()
    for first in range(start, stop, BLOCK):
        n = min(BLOCK, stop - first)
        x = logits[:, first : first + n]
        for c in range(classes):
            row, value = mean[c], values[c, first : first + n]
            for v in range(n):
                row[v] = own * value[v]
            stride = np.int64(1)
            for axis in range(len(sizes) - 1, -1, -1):
                _add_neighbors(values[c], first, first + n, stride, sizes[axis], shares[axis] * f(0.5), row)
                stride *= sizes[axis]
        if not softmax:
            for c in range(classes):
                _keep_side(x[c], mean[c], n, least, ahead, other, bits, result[c, first : first + n])
            continue
        for v in range(n):
            best[v] = x[0, v]
            largest[v] = 0
            other[v] = f(-np.inf)
        for c in range(1, classes):
            xc = x[c]
            for v in range(n):
                largest[v] = np.int32(c) if xc[v] > best[v] else largest[v]
                best[v] = max(best[v], xc[v])
        for c in range(classes):
            row = mean[c]
            for v in range(n):
                row[v] = least if row[v] < least else row[v]
            _logarithm(row, n, bits)
            for v in range(n):
                other[v] = other[v] if largest[v] == c else max(other[v], row[v])
        for c in range(classes):
            row, out = mean[c], result[c, first : first + n]
            for v in range(n):
                out[v] = max(row[v], other[v] + ahead) if largest[v] == c else row[v]


@jit
def _add_neighbors(values, first, last, stride, size, weight, mean):
    """Add the two neighbors along an axis; the edges of the grid are neighbors of themselves."""
    v = first
    while v < last:
        place, begun = v // stride % size, v % stride
        inside = 0 < place < size - 1
        stop = min(last, v - begun + stride * (size - 1 - place if inside else 1))
        low, high = v - (stride if place > 0 else 0), v + (stride if place < size - 1 else 0)
        before, after, out = (
            values[low : low + stop - v],
            values[high : high + stop - v],
            mean[v - first : stop - first],
        )
        for i in range(stop - v):
            out[i] += weight * (before[i] + after[i])
        v = stop


@jit
def _keep_side(x, mean, n, least, ahead, other, bits, out):
    """Log-odds of a mean probability, on the side of zero that x is on."""
    f = np.float32
    for v in range(n):
        rest = f(1) - mean[v]
        other[v] = least if rest < least else rest
        mean[v] = least if mean[v] < least else mean[v]
    _logarithm(mean, n, bits)
    _logarithm(other, n, bits)
    for v in range(n):
        t = mean[v] - other[v]
        side = max(t, ahead) if x[v] > f(0) else min(t, -ahead)
        out[v] = t if x[v] == f(0) else side
