"""The compiled passes over a segment of voxels: one forward, one back.

Each takes a block of voxels that fits in the cache, applies the activation there and adds up every sum
wanted; probabilities are never stored for the whole image, and the backward pass computes them again.
Four copies of the cell sums take turns, because background voxels all fall in one cell and an addition
has to wait for the one before it.

In the code, x are the inputs of a block, p their probabilities, y labels, n the block's voxels, k a cell and
u the position in it. Loops start at 0 on slices: then numba knows that indices are not negative, and LLVM
turns the loops into vector instructions. All is in one file because numba's cache on disk looks only at the
file that a compiled function stands in: a change elsewhere would not be noticed.
"""

from __future__ import annotations

import math

import numpy as np
from numba import njit

from segcal.kernels.spec import (
    CROSS_ENTROPY,
    INTERSECTION,
    LABEL,
    LABEL_SQUARED,
    PROBABILITY_SQUARED,
    SMALLEST,
    TOLERANCE,
    VOXELS,
)

BLOCK = 1024  # voxels; a block of 16 classes takes 64 KiB
COPIES = 4  # a power of two
TILE = 64  # voxels that are looked at together
NONE, SOFTMAX, SIGMOID = range(3)
LABEL_KINDS = ("uint8", "int16", "int64", "float32", "float64")

# Reordering lets sums run in vector lanes. NaN and infinity keep their meaning.
jit = njit(nogil=True, cache=True, error_model="numpy", fastmath={"reassoc", "contract", "nsz"})
# Every operation as written. Said aloud: left out, the setting would be taken from whichever function calls first.
exact = njit(nogil=True, cache=True, error_model="numpy", fastmath=False)


@jit
def forward(
    inputs, labels, kind, mask, start, stop, activation, scale, shift, cells, degree, right, classes_wanted,
    moments, label_moments, class_sums, found,
):  # fmt: skip
    classes, exclusive = inputs.shape[0], labels.shape[0] != inputs.shape[0]
    x, p, top, total, bits, position, cell, u, y, true, run = _scratch(inputs)
    sums = np.zeros((classes, COPIES, cells, degree + 2))
    label_sums = np.zeros((classes, COPIES, cells, degree + 1))
    for first in range(start, stop, BLOCK):
        n = _load(inputs, mask, first, min(first + BLOCK, stop), x, position)
        found[1] += _activate(x, p, n, activation, top, total, bits)
        for c in range(classes):
            if classes_wanted:
                class_sums[c, PROBABILITY_SQUARED] += _sum_of_squares(p[c], n)
                class_sums[c, VOXELS] += n
            if cells > 0:
                _locate(p[c], n, scale, shift, cells, right, cell, u)
                _add_powers(cell, u, n, degree + 2, sums[c])
            if not exclusive:
                _load_labels(labels[c], kind, position, n, y)
                wrong = _first_wrong(y, n)
                if wrong >= 0 and found[0] < 0:
                    found[0] = c * inputs.shape[1] + np.int64(position[wrong])
                if cells > 0:
                    _add_weighted_powers(cell, u, y, n, degree + 1, label_sums[c, 0])
                if classes_wanted:
                    _add_class(x[c], p[c], y, n, activation, top, total, class_sums[c])
        if exclusive:
            _load_labels(labels[0], kind, position, n, y)
            for r in range(_find_runs(y, n, true, run)):
                a, b, c = run[r], run[r + 1], true[r]
                if c < 0 or c >= classes or c != y[a]:
                    if found[0] < 0:
                        found[0] = np.int64(position[a])
                    continue
                if cells > 0:
                    _locate(p[c, a:b], b - a, scale, shift, cells, right, cell, u)
                    _add_powers(cell, u, b - a, degree + 1, label_sums[c])
                if classes_wanted:
                    _add_run(x[c, a:b], p[c, a:b], b - a, activation, top[a:b], total[a:b], class_sums[c])
            if classes_wanted and activation == SIGMOID:
                for c in range(classes):
                    class_sums[c, CROSS_ENTROPY] += _binary_cross_entropy(x[c], y, c, n)
    for c in range(classes):
        for copy in range(COPIES):
            moments[c] += sums[c, copy]
            label_moments[c] += label_sums[c, copy]


@jit
def backward(
    inputs, labels, kind, mask, start, stop, activation, scale, shift, cells, degree, right,
    slopes, label_slopes, of_class, gradient,
):  # fmt: skip
    classes, exclusive = inputs.shape[0], labels.shape[0] != inputs.shape[0]
    x, p, top, total, bits, position, cell, u, y, true, run = _scratch(inputs)
    g, extra = np.empty_like(p), np.zeros(BLOCK, inputs.dtype)
    common = np.empty(BLOCK, inputs.dtype)  # of the softmax: sum of p g over classes, less the cross-entropy's weight
    for first in range(start, stop, BLOCK):
        n = _load(inputs, mask, first, min(first + BLOCK, stop), x, position)
        _activate(x, p, n, activation, top, total, bits)
        runs = 0
        if exclusive:
            _load_labels(labels[0], kind, position, n, y)
            runs = _find_runs(y, n, true, run)
        common[:n] = 0
        for c in range(classes):
            pc, gc = p[c], g[c]
            twice, overlap, entropy = _of_class(of_class[c])
            for v in range(n):
                gc[v] = twice * pc[v]
            if cells > 0:
                _locate(pc, n, scale, shift, cells, right, cell, u)
                _add_slopes(cell, u, n, slopes[c], gc)
            if not exclusive:
                _load_labels(labels[c], kind, position, n, y)
                if cells > 0 and degree > 0:
                    extra[:n] = 0
                    _add_slopes(cell, u, n, label_slopes[c], extra)
                for v in range(n):
                    gc[v] += pc.dtype.type(y[v]) * (extra[v] + overlap)
                    common[v] -= pc.dtype.type(y[v]) * entropy
        for r in range(runs):
            a, b, c = run[r], run[r + 1], true[r]
            _, overlap, entropy = _of_class(of_class[c])
            gc, rest = g[c, a:b], common[a:b]
            for v in range(b - a):
                gc[v] += overlap
                rest[v] -= entropy
            if cells > 0 and degree > 0:
                _locate(p[c, a:b], b - a, scale, shift, cells, right, cell, u)
                _add_slopes(cell, u, b - a, label_slopes[c], gc)
        if activation == SOFTMAX:
            for c in range(classes):
                pc, gc = p[c], g[c]
                for v in range(n):
                    common[v] += pc[v] * gc[v]
        for c in range(classes):
            pc, gc = p[c], g[c]
            _, _, entropy = _of_class(of_class[c])
            if activation == SOFTMAX:
                for v in range(n):
                    gc[v] = pc[v] * (gc[v] - common[v])
            elif activation == SIGMOID:
                for v in range(n):
                    gc[v] = pc[v] * (gc[v] * (1 - pc[v]) + entropy)
            if not exclusive:
                _load_labels(labels[c], kind, position, n, y)
                _subtract_entropy(gc, pc, entropy, y, n, activation)
        y[:n] = 1
        for r in range(runs):
            a, b, c = run[r], run[r + 1], true[r]
            _subtract_entropy(g[c, a:b], p[c, a:b], of_class[c, CROSS_ENTROPY], y, b - a, activation)
        for c in range(classes):
            _store(g[c], x[c], n, activation, position, gradient[c])


@jit
def _scratch(inputs):
    """Room for a block: x, p, largest logit, total, exponent bits, positions, cells, u, y, and runs of one label.

    Positions and cells are unsigned, so that numba need not ask whether they count from the end.
    """
    return (
        np.empty((inputs.shape[0], BLOCK), inputs.dtype),
        np.empty((inputs.shape[0], BLOCK), inputs.dtype),
        np.empty(BLOCK, inputs.dtype),
        np.empty(BLOCK, inputs.dtype),
        np.empty(BLOCK, np.int32),
        np.empty(BLOCK, np.uint64),
        np.empty(BLOCK, np.uint32),
        np.empty(BLOCK),
        np.empty(BLOCK),
        np.empty(BLOCK, np.int64),
        np.empty(BLOCK + 1, np.int64),
    )


@jit
def _load(inputs, mask, first, last, x, position):
    """Copy the block's valid voxels to the front of x; their number."""
    n = 0
    if mask.shape[0] == 0:
        n = last - first
        for v in range(n):
            position[v] = first + v
        for c in range(inputs.shape[0]):
            source, target = inputs[c, first:last], x[c]
            for v in range(n):
                target[v] = source[v]
        return n
    for v in range(first, last):
        if mask[v]:
            position[n] = v
            n += 1
    for c in range(inputs.shape[0]):
        source, target = inputs[c], x[c]
        for v in range(n):
            target[v] = source[position[v]]
    return n


@jit
def _load_labels(row, kind, position, n, y):
    """Read the block's labels, which come as bytes of the type `kind`: the passes are compiled once for all types."""
    if kind == 0:
        _copy(row, position, n, y)
    elif kind == 1:
        _copy(row.view(np.int16), position, n, y)
    elif kind == 2:
        _copy(row.view(np.int64), position, n, y)
    elif kind == 3:
        _copy(row.view(np.float32), position, n, y)
    else:
        _copy(row.view(np.float64), position, n, y)


@jit
def _copy(labels, position, n, y):
    if n > 0 and position[n - 1] - position[0] == np.uint64(n - 1):
        source = labels[position[0] : position[n - 1] + np.uint64(1)]
        for v in range(n):
            y[v] = source[v]
        return
    for v in range(n):
        y[v] = labels[position[v]]


@jit
def _store(g, x, n, activation, position, gradient):
    """Write the block's gradient; probabilities that were clipped have none."""
    if activation == NONE:
        for v in range(n):
            g[v] = 0 if x[v] < 0 or x[v] > 1 else g[v]
    if n > 0 and position[n - 1] - position[0] == np.uint64(n - 1):
        target = gradient[position[0] : position[n - 1] + np.uint64(1)]
        for v in range(n):
            target[v] = g[v]
        return
    for v in range(n):
        gradient[position[v]] = g[v]


@jit
def _find_runs(y, n, true, run):
    """Runs of one label along the block: their labels, their starts (with n behind the last), their number."""
    runs = 0
    for a in range(0, n, TILE):
        tile = y[a : min(a + TILE, n)]
        changes, before = 0, y[a - 1] if a > 0 else np.nan
        for v in range(len(tile)):
            changes += tile[v] != before
        if changes == 0:
            continue
        for v in range(len(tile)):
            if tile[v] != before or (a == 0 and v == 0):
                before = tile[v]
                true[runs] = np.int64(before)
                run[runs] = a + v
                runs += 1
    run[runs] = n
    return runs


@jit
def _first_wrong(y, n):
    number = 0
    for v in range(n):
        number += not (y[v] >= 0.0 and y[v] <= 1.0)
    if number == 0:
        return -1
    for v in range(n):
        if not (y[v] >= 0.0 and y[v] <= 1.0):
            return v
    return -1


@jit
def _activate(x, p, n, activation, top, total, bits):
    """Turn inputs into probabilities; how many inputs without activation cannot be probabilities.

    For the softmax, keep the largest logit and the sum of exponentials.
    """
    zero, one = p.dtype.type(0), p.dtype.type(1)
    if activation == NONE:
        outside = 0
        for c in range(p.shape[0]):
            xc, pc = x[c], p[c]
            for v in range(n):
                outside += (xc[v] < -TOLERANCE) | (xc[v] > 1 + TOLERANCE)
                t = zero if xc[v] < zero else xc[v]
                pc[v] = one if t > one else t
        return outside
    if activation == SIGMOID:  # from exp(-|x|), which never overflows
        for c in range(p.shape[0]):
            xc, pc = x[c], p[c]
            for v in range(n):
                pc[v] = -abs(xc[v])
            _exponentiate(pc, n, bits)
            for v in range(n):
                inverse = one / (one + pc[v])
                pc[v] = pc[v] * inverse if xc[v] < zero else inverse
        return 0
    xc = x[0]
    for v in range(n):
        top[v] = xc[v]
        total[v] = 0
    for c in range(1, p.shape[0]):
        xc = x[c]
        for v in range(n):
            top[v] = max(top[v], xc[v])
    for c in range(p.shape[0]):
        xc, pc = x[c], p[c]
        for v in range(n):
            pc[v] = xc[v] - top[v]
        _exponentiate(pc, n, bits)
        for v in range(n):
            total[v] += pc[v]
    for c in range(p.shape[0]):
        pc = p[c]
        for v in range(n):
            pc[v] /= total[v]
    return 0


@jit
def _exponentiate(x, n, bits):
    """exp of numbers not above 0, in place.

    Single precision: x = k ln 2 + r, a polynomial for exp(r) (Cephes' coefficients, two units in the last
    place), and 2**k written into the exponent bits, so that the loop runs in vector lanes.
    """
    if x.itemsize == 8:
        for v in range(n):
            x[v] = math.exp(x[v])
        return
    f = np.float32
    for v in range(n):
        t = f(-87.5) if x[v] < f(-87.5) else x[v]
        k = np.floor(t * f(1.44269504) + f(0.5))
        r = t - k * f(0.693359375)  # ln 2 in two parts, the first exact times k
        r -= k * f(-2.12194440e-4)
        y = f(1.9875691500e-4)
        y = y * r + f(1.3981999507e-3)
        y = y * r + f(8.3334519073e-3)
        y = y * r + f(4.1665795894e-2)
        y = y * r + f(1.6666665459e-1)
        y = y * r + f(5.0000001201e-1)
        bits[v] = (np.int32(k) + np.int32(127)) << np.int32(23)
        y = y * r * r + r + f(1)
        x[v] = f(0) if x[v] < f(-87.0) else y
    power = bits.view(np.float32)
    for v in range(n):
        x[v] *= power[v]


@exact
def _locate_one(x, scale, shift, cells, right):
    """Cell and position in it; as `segcal.binning.locate`, for one float64.

    Exact: reordered, upper + lower would be x * scale again, and its rounding would decide on the edges.
    """
    high = np.float64(np.float32(x))
    upper = high * scale + shift
    lower = (x - high) * scale
    t = x * scale + shift
    if right:
        k = np.ceil(t) - 1.0
        k = k + 1.0 if (upper - (k + 1.0)) + lower > 0.0 else k
    else:
        k = np.floor(t)
        k = k - 1.0 if (upper - k) + lower < 0.0 else k
    k = k if k > 0.0 else 0.0  # NaN goes to the first cell
    k = k if k < cells - 1.0 else cells - 1.0
    return k, t - k


@jit
def _locate(p, n, scale, shift, cells, right, cell, u):
    if p.itemsize == 8 or right:
        for v in range(n):
            k, w = _locate_one(np.float64(p[v]), scale, shift, cells, right)
            cell[v] = np.uint32(np.int32(k))
            u[v] = w
        return
    last = cells - 1.0
    for v in range(n):  # a float32 times scale is exact: no second part
        t = np.float64(p[v]) * scale + shift
        k = t if t > 0.0 else 0.0
        k = np.floor(k if k < last else last)
        cell[v] = np.uint32(np.int32(k))
        u[v] = t - k


@jit
def _uniform(cell):
    """Whether these voxels share a cell, as most background does: then sums run in vector lanes."""
    different, k = np.uint32(0), cell[0]
    for v in range(len(cell)):
        different |= cell[v] ^ k
    return different == 0


@jit
def _add_powers(cell, u, n, powers, sums):
    """Add 1, u, u**2, ... to each voxel's cell; four copies of the sums take turns."""
    for a in range(0, n, TILE):
        b = min(a + TILE, n)
        k, w = cell[a:b], u[a:b]
        if _uniform(k):
            target, s1, s2 = sums[0, k[0]], 0.0, 0.0
            target[0] += b - a
            if powers > 1:
                for v in range(len(w)):
                    s1 += w[v]
                target[1] += s1
            if powers > 2:
                for v in range(len(w)):
                    s2 += w[v] * w[v]
                target[2] += s2
            for d in range(3, powers):
                s2 = 0.0
                for v in range(len(w)):
                    s2 += w[v] ** d
                target[d] += s2
        elif powers == 1:
            for v in range(len(w)):
                sums[v & (COPIES - 1), k[v], 0] += 1.0
        elif powers == 2:
            for v in range(len(w)):
                target = sums[v & (COPIES - 1), k[v]]
                target[0] += 1.0
                target[1] += w[v]
        elif powers == 3:
            for v in range(len(w)):
                target = sums[v & (COPIES - 1), k[v]]
                target[0] += 1.0
                target[1] += w[v]
                target[2] += w[v] * w[v]
        else:
            for v in range(len(w)):
                target, power = sums[v & (COPIES - 1), k[v]], 1.0
                for d in range(powers):
                    target[d] += power
                    power *= w[v]


@jit
def _add_weighted_powers(cell, u, y, n, powers, sums):
    for v in range(n):
        if y[v] != 0.0:
            target, power = sums[cell[v]], y[v]
            for d in range(powers):
                target[d] += power
                power *= u[v]


@jit
def _add_slopes(cell, u, n, slopes, g):
    """Add the cell's polynomial at u to each voxel's gradient."""
    degree = slopes.shape[1] - 1
    for a in range(0, n, TILE):
        b = min(a + TILE, n)
        k, w, target = cell[a:b], u[a:b], g[a:b]
        if degree < 2 and _uniform(k):
            level = slopes[k[0], 0]
            rise = slopes[k[0], 1] if degree == 1 else level * 0
            for v in range(len(w)):
                target[v] += level + rise * g.dtype.type(w[v])
        elif degree == 0:
            for v in range(len(w)):
                target[v] += slopes[k[v], 0]
        elif degree == 1:
            for v in range(len(w)):
                target[v] += slopes[k[v], 0] + slopes[k[v], 1] * g.dtype.type(w[v])
        else:
            for v in range(len(w)):
                row, value = slopes[k[v]], slopes[k[v], degree]
                for d in range(degree - 1, -1, -1):
                    value = value * g.dtype.type(w[v]) + row[d]
                target[v] += value


@jit
def _of_class(gradient):
    """Gradients by the class sums: 2 d/d(sum of p squared), d/d(overlap), d/d(cross-entropy)."""
    return 2 * gradient[PROBABILITY_SQUARED], gradient[INTERSECTION], gradient[CROSS_ENTROPY]


@jit
def _subtract_entropy(g, p, weight, y, n, activation):
    """The cross-entropy's own part of the gradient: y by logits, y / p by probabilities that were not clipped."""
    if activation != NONE:
        for v in range(n):
            g[v] -= weight * p.dtype.type(y[v])
        return
    for v in range(n):
        g[v] -= weight * p.dtype.type(y[v]) / p[v] if p[v] >= SMALLEST else weight * 0


@jit
def _sum_of_squares(p, n):
    total = 0.0
    for v in range(n):
        total += np.float64(p[v]) * np.float64(p[v])
    return total


@jit
def _add_run(x, p, n, activation, top, total, class_sums):
    """Overlap, voxels and cross-entropy of a run of voxels of this class.

    Logarithms of many voxels are that of their product. The softmax's totals do not overflow in 64 below 60,000
    classes; probabilities, which count as 2**-24 at least, do not underflow in 32.
    """
    overlap, entropy = 0.0, 0.0
    for v in range(n):
        overlap += np.float64(p[v])
    if activation == SOFTMAX:
        for v in range(n):
            entropy += np.float64(top[v]) - np.float64(x[v])
        for a in range(0, n, TILE):
            tile, product = total[a : min(a + TILE, n)], 1.0
            for v in range(len(tile)):
                product *= np.float64(tile[v])
            entropy += math.log(product)
    elif activation == NONE:
        for a in range(0, n, TILE // 2):
            tile, product = p[a : min(a + TILE // 2, n)], 1.0
            for v in range(len(tile)):
                q = np.float64(tile[v])
                product *= SMALLEST if q < SMALLEST else q
            entropy -= math.log(product)
    class_sums[INTERSECTION] += overlap
    class_sums[CROSS_ENTROPY] += entropy
    class_sums[LABEL] += n
    class_sums[LABEL_SQUARED] += n


@jit
def _add_class(x, p, y, n, activation, top, total, class_sums):
    """The same for labels with a channel per class."""
    for v in range(n):
        class_sums[INTERSECTION] += y[v] * p[v]
        class_sums[LABEL] += y[v]
        class_sums[LABEL_SQUARED] += y[v] * y[v]
        if y[v] > 0.0:
            if activation == SOFTMAX:
                away = np.float64(top[v]) - np.float64(x[v])
                class_sums[CROSS_ENTROPY] += y[v] * (math.log(total[v]) + away)
            elif activation == NONE:
                class_sums[CROSS_ENTROPY] -= y[v] * (math.log(max(p[v], SMALLEST)) if p[v] == p[v] else p[v])
    if activation == SIGMOID:
        class_sums[CROSS_ENTROPY] += _binary_cross_entropy(x, y, -1, n)


@jit
def _binary_cross_entropy(x, y, true, n):
    """Sum over voxels; labels are y, or whether y is the class `true` where that is not negative."""
    total = 0.0
    for v in range(n):
        t = np.float64(x[v])
        label = y[v] if true < 0 else 1.0 if y[v] == true else 0.0
        total += max(t, 0.0) - t * label + math.log1p(math.exp(-abs(t)))
    return total
