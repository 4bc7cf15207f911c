"""The compiled passes over a segment of voxels: one forward, one back.

Each takes a block of voxels that fits in the cache, applies the activation there and adds up every sum
wanted; probabilities are never stored for the whole image, and the backward pass computes them again.
A block is looked at in tiles. Most tiles lie in one cell, as most background does: their sums run in vector lanes.
Elsewhere each voxel looks for its own cell, and four copies of the sums take turns, because an addition has to wait for
the one before it. Labels with a channel per class become class indices in every block where they are one-hot; labels
that are soft, or of classes that overlap, take the general way. The block after this one is asked for early.

In the code, x are the inputs of a block, p their probabilities, y labels, true class indices (NOTHING: of no class),
n the block's voxels, a and m a tile's first voxel and their number, k a cell and u the position in it. What indexes is
unsigned: then numba need not ask whether it counts from the end, and LLVM turns the loops into vector instructions.
Arrays are handed on whole, with places in them: numba counts the references to every slice. Nearly all is in one file
because numba's cache on disk looks only at the file that a compiled function stands in: a change elsewhere would not be
noticed.
"""

from __future__ import annotations

import math

import numpy as np

from segcal.kernels.numba_math import (
    LANES,
    bits,
    exact,
    exp_double,
    exp_single,
    from_bits,
    inner,
    jit,
    log_of,
    multiply,
    prefetch,
    read,
)
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

BLOCK = np.uint64(1024)  # voxels; a block of 16 classes takes 64 KiB
TILE = np.uint64(64)  # voxels that are looked at together
LINE = np.uint64(64)  # bytes that memory gives at once
COPIES = np.uint64(4)  # a power of two
ZERO, ONE = np.uint64(0), np.uint64(1)
NONE, SOFTMAX, SIGMOID = range(3)
NOTHING, MIXED = np.int32(-1), np.int32(-2)
LABEL_KINDS = ("uint8", "int16", "int64", "float32", "float64")
SIZES = np.array([np.dtype(kind).itemsize for kind in LABEL_KINDS], np.uint64)


@jit
def forward(
    inputs, labels, kind, mask, start, stop, activation, scale, shift, cells, degree, right, classes_wanted,
    moments, label_moments, class_sums, found,
):  # fmt: skip
    classes, exclusive, masked = np.uint64(inputs.shape[0]), labels.shape[0] != inputs.shape[0], mask.shape[0] > 0
    packed, p, low, high, top, total, inverse, position, true, owner, cell, u, y = _scratch(inputs, masked)
    room, products, where = np.empty(BLOCK), np.zeros(LANES), (scale, shift, cells, right)
    sums = np.zeros((inputs.shape[0], COPIES, cells, degree + 2))
    label_sums = np.zeros((inputs.shape[0], COPIES, cells, degree + 1))
    x = packed if masked else inputs
    for first in range(np.uint64(start), np.uint64(stop), BLOCK):
        n = _load(inputs, labels, kind, mask, first, min(BLOCK, np.uint64(stop) - first), packed, position)
        at = ZERO if masked else first
        found[1] += _activate(x, at, n, activation, p, low, high, top, total, inverse)
        if exclusive:
            wrong = _load_classes(labels, kind, masked, position, first, n, classes, true)
            if wrong >= 0 and found[0] < 0:
                found[0] = np.int64(position[wrong] if masked else first + np.uint64(wrong))
        indexed = exclusive or _load_one_hot(labels, kind, masked, position, first, n, true, owner)
        _find_owners(true, n, owner, indexed)
        if classes_wanted and activation == SOFTMAX and not indexed:
            for v in range(n):
                room[v] = math.log(total[v])
        for c in range(classes):
            if classes_wanted:
                class_sums[c, PROBABILITY_SQUARED] += _sum_of_squares(p, c, n)
                class_sums[c, VOXELS] += n
                if indexed and activation == SIGMOID:
                    class_sums[c, CROSS_ENTROPY] += _binary_cross_entropy(x, c, at, n, true, room, products)
            if cells > 0:
                _add_row(p, c, n, low, high, owner, where, degree, cell, u, sums, label_sums)
            if not indexed:
                _load_labels(labels, c, kind, masked, position, first, n, y)
                wrong = _first_wrong(y, n)
                if wrong >= 0 and found[0] < 0:
                    place = position[wrong] if masked else first + np.uint64(wrong)
                    found[0] = np.int64(c * np.uint64(inputs.shape[1]) + place)
                if cells > 0:
                    _add_weighted(p, c, n, y, where, degree, cell, u, label_sums)
                if classes_wanted:
                    _add_class(x, p, c, at, n, y, activation, top, room, class_sums, products)
        if indexed and cells > 0:
            _add_mixed(p, true, owner, n, where, degree, cell, u, label_sums)
        if indexed and classes_wanted:
            a = ZERO
            while a < n:
                b = _run_end(true, owner, a, n)
                if true[a] != NOTHING:
                    _add_run(x, p, np.uint64(true[a]), at, a, b, activation, top, total, class_sums)
                a = b
    for c in range(classes):
        for copy in range(COPIES):
            for k in range(cells):
                for d in range(degree + 2):
                    moments[c, k, d] += sums[c, copy, k, d]
                for d in range(degree + 1):
                    label_moments[c, k, d] += label_sums[c, copy, k, d]


@jit
def backward(
    inputs, labels, kind, mask, start, stop, activation, scale, shift, cells, right,
    slopes, extra_slopes, own_slopes, of_class, gradient,
):  # fmt: skip
    """Slopes are those of any voxel, what a label of 1 adds, and both together."""
    classes, exclusive, masked = np.uint64(inputs.shape[0]), labels.shape[0] != inputs.shape[0], mask.shape[0] > 0
    packed, p, low, high, top, total, inverse, position, true, owner, cell, u, y = _scratch(inputs, masked)
    g, where = np.empty_like(p), (scale, shift, cells, right)
    extra = np.empty_like(p) if not exclusive else p
    common = np.empty(BLOCK, inputs.dtype)  # of the softmax: sum of p g over classes, less the cross-entropy's weight
    x, out = (packed, g) if masked else (inputs, gradient)
    for first in range(np.uint64(start), np.uint64(stop), BLOCK):
        n = _load(inputs, labels, kind, mask, first, min(BLOCK, np.uint64(stop) - first), packed, position)
        at = ZERO if masked else first
        _activate(x, at, n, activation, p, low, high, top, total, inverse)
        if exclusive:
            _load_classes(labels, kind, masked, position, first, n, classes, true)
        indexed = exclusive or _load_one_hot(labels, kind, masked, position, first, n, true, owner)
        _find_owners(true, n, owner, indexed)
        for v in range(n):
            common[v] = 0
        if indexed:
            _take_entropy(true, owner, n, of_class, common)
        for c in range(classes):
            twice, entropy = 2 * of_class[c, PROBABILITY_SQUARED], of_class[c, CROSS_ENTROPY]
            _fill_row(p, c, n, low, high, owner, true, where, twice, slopes, own_slopes, cell, u, g)
            if not indexed:
                _load_labels(labels, c, kind, masked, position, first, n, y)
                none = twice * 0
                _fill_row(p, c, n, low, high, owner, true, where, none, extra_slopes, extra_slopes, cell, u, extra)
                for v in range(n):
                    g[c, v] += p.dtype.type(y[v]) * extra[c, v]
                    common[v] -= p.dtype.type(y[v]) * entropy
            if activation == SOFTMAX:
                for v in range(n):
                    common[v] += p[c, v] * g[c, v]
        for c in range(classes):
            _through_activation(p, g, c, at, n, activation, common, of_class[c, CROSS_ENTROPY], out)
            if not indexed:
                _load_labels(labels, c, kind, masked, position, first, n, y)
                _subtract_entropy(out, p, c, at, ZERO, n, y, activation, of_class[c, CROSS_ENTROPY])
        if indexed:
            for v in range(n):
                y[v] = 1
            a = ZERO
            while a < n:
                b = _run_end(true, owner, a, n)
                if true[a] != NOTHING:
                    own = np.uint64(true[a])
                    _subtract_entropy(out, p, own, at, a, b, y, activation, of_class[own, CROSS_ENTROPY])
                a = b
        for c in range(classes):
            if activation == NONE:  # probabilities that were clipped have no gradient
                for v in range(n):
                    out[c, at + v] = 0 if x[c, at + v] < 0 or x[c, at + v] > 1 else out[c, at + v]
            if masked:
                for v in range(n):
                    gradient[c, position[v]] = g[c, v]


@jit
def _scratch(inputs, masked):
    """Room for a block: masked x, p, its least and largest of each tile, largest logit, total, its inverse, positions,
    classes, those of whole tiles, cells, u, y."""
    classes, tiles = inputs.shape[0], BLOCK // TILE
    return (
        np.empty((classes if masked else 0, BLOCK), inputs.dtype),
        np.empty((classes, BLOCK), inputs.dtype),
        np.empty((classes, tiles), inputs.dtype),
        np.empty((classes, tiles), inputs.dtype),
        np.empty(BLOCK, inputs.dtype),
        np.empty(BLOCK, inputs.dtype),
        np.empty(BLOCK, inputs.dtype),
        np.empty(BLOCK if masked else ZERO, np.uint64),
        np.empty(BLOCK, np.int32),
        np.empty(BLOCK, np.int32),
        np.empty(TILE, np.uint32),
        np.empty(TILE),
        np.empty(BLOCK),
    )


@inner
def _load(inputs, labels, kind, mask, first, length, packed, position):
    """The number of the block's valid voxels; where there is a mask, find them and copy their inputs."""
    for byte in range(ZERO, length * SIZES[kind], LINE):
        prefetch(labels, (first + BLOCK) * SIZES[kind] + byte)
    if mask.shape[0] == 0:
        return length
    n = ZERO
    for v in range(length):
        if mask[first + v]:
            position[n] = first + v
            n += ONE
    for c in range(np.uint64(inputs.shape[0])):
        for v in range(n):
            packed[c, v] = inputs[c, position[v]]
    return n


@inner
def _tiles(n):
    return (n + TILE - ONE) // TILE


@inner
def _tile(tile, n):
    """Where a tile begins, and its number of voxels."""
    return tile * TILE, min(TILE, n - tile * TILE)


@inner
def _load_labels(labels, c, kind, masked, position, first, n, y):
    """Read the block's labels, which come as bytes of the type `kind`: the passes are compiled once for all types."""
    if kind == 0:
        _copy(labels, np.uint8(0), c, kind, masked, position, first, n, y)
    elif kind == 1:
        _copy(labels, np.int16(0), c, kind, masked, position, first, n, y)
    elif kind == 2:
        _copy(labels, np.int64(0), c, kind, masked, position, first, n, y)
    elif kind == 3:
        _copy(labels, np.float32(0), c, kind, masked, position, first, n, y)
    else:
        _copy(labels, np.float64(0), c, kind, masked, position, first, n, y)


@inner
def _copy(labels, like, c, kind, masked, position, first, n, y):
    row = c * np.uint64(labels.shape[1]) // SIZES[kind]
    for v in range(n):
        y[v] = read(labels, row + (position[v] if masked else first + v), like)


@inner
def _load_classes(labels, kind, masked, position, first, n, classes, true):
    """Read the block's class indices; the first place with a label that is none, which becomes NOTHING, or -1."""
    if kind == 0:
        wrong = _classes_of(labels, np.uint8(0), masked, position, first, n, classes, true)
    elif kind == 1:
        wrong = _classes_of(labels, np.int16(0), masked, position, first, n, classes, true)
    elif kind == 2:
        wrong = _classes_of(labels, np.int64(0), masked, position, first, n, classes, true)
    elif kind == 3:
        wrong = _classes_of(labels, np.float32(0), masked, position, first, n, classes, true)
    else:
        wrong = _classes_of(labels, np.float64(0), masked, position, first, n, classes, true)
    if wrong == 0:
        return -1
    for v in range(n):
        if true[v] == NOTHING:
            return np.int64(v)
    return -1


@inner
def _classes_of(labels, like, masked, position, first, n, classes, true):
    wrong, most = 0, np.int64(classes)
    for v in range(n):
        label = read(labels, position[v] if masked else first + v, like)
        c = np.int32(label)
        right = (label >= 0) & (label < most) & (label == c)
        true[v] = c if right else NOTHING
        wrong += not right
    return wrong


@inner
def _load_one_hot(labels, kind, masked, position, first, n, true, number):
    """Whether the block's labels are zeros and, in each voxel, at most one 1; then read their class indices."""
    for v in range(n):
        true[v] = NOTHING
        number[v] = 0
    for c in range(np.uint64(labels.shape[0])):
        if kind == 0:
            other = _mark(labels, np.uint8(0), c, kind, masked, position, first, n, true, number)
        elif kind == 1:
            other = _mark(labels, np.int16(0), c, kind, masked, position, first, n, true, number)
        elif kind == 2:
            other = _mark(labels, np.int64(0), c, kind, masked, position, first, n, true, number)
        elif kind == 3:
            other = _mark(labels, np.float32(0), c, kind, masked, position, first, n, true, number)
        else:
            other = _mark(labels, np.float64(0), c, kind, masked, position, first, n, true, number)
        if other > 0:
            return False
    several = 0
    for v in range(n):
        several += number[v] > 1
    return several == 0


@inner
def _mark(labels, like, c, kind, masked, position, first, n, true, number):
    """Give the voxels with a 1 the class c; how many have neither 0 nor 1."""
    size, other, own = SIZES[kind], 0, np.int32(c)
    row = c * np.uint64(labels.shape[1])
    for byte in range(ZERO, n * size, LINE):
        prefetch(labels, row + (first + BLOCK) * size + byte)
    for v in range(n):
        label = read(labels, row // size + (position[v] if masked else first + v), like)
        hot = label == 1
        other += not (hot | (label == 0))
        true[v] = own if hot else true[v]
        number[v] += hot
    return other


@inner
def _find_owners(true, n, owner, indexed):
    """Of each tile the class that all its voxels are of, or MIXED; NOTHING where there are no class indices."""
    for tile in range(_tiles(n)):
        a, m = _tile(tile, n)
        different = np.int32(0)
        for v in range(m):
            different |= true[a + v] ^ true[a]
        owner[tile] = NOTHING if not indexed else true[a] if different == 0 else MIXED


@inner
def _run_end(true, owner, a, n):
    """Where the run of one class that starts at a voxel ends."""
    c = true[a]
    while a < n:
        if a % TILE == ZERO and owner[a // TILE] == c:
            a += TILE
        elif true[a] == c:
            a += ONE
        else:
            break
    return min(a, n)


@inner
def _first_wrong(y, n):
    number = 0
    for v in range(n):
        number += not (y[v] >= 0.0 and y[v] <= 1.0)
    if number == 0:
        return -1
    for v in range(n):
        if not (y[v] >= 0.0 and y[v] <= 1.0):
            return np.int64(v)
    return -1


@inner
def _activate(x, at, n, activation, p, low, high, top, total, inverse):
    """Turn inputs into probabilities; how many inputs without activation cannot be probabilities.

    Of each class and tile, keep the least and the largest; for the softmax, the largest logit and the sum of
    exponentials.
    """
    outside, voxels = 0, np.uint64(x.shape[1])
    if activation == SOFTMAX:
        _softmax(x, at, n, p, top, total, inverse)
    for c in range(np.uint64(p.shape[0])):
        for v in range(ZERO, BLOCK, LINE // np.uint64(x.itemsize)):
            prefetch(x, c * voxels + at + BLOCK + v)
        if activation == SOFTMAX:
            for v in range(n):
                p[c, v] *= inverse[v]
        elif activation == SIGMOID:
            _sigmoid(x, c, at, n, p)
        else:
            outside += _clip(x, c, at, n, p)
        _find_range(p, c, n, low, high)
    return outside


@inner
def _softmax(x, at, n, p, top, total, inverse):
    """Exponentials of logits less the largest, their sum, and its inverse."""
    for v in range(n):
        p[0, v] = x[0, at + v]
        top[v] = x[0, at + v]
        total[v] = 0
    for c in range(ONE, np.uint64(p.shape[0])):
        for v in range(n):
            p[c, v] = x[c, at + v]
            top[v] = max(top[v], x[c, at + v])
    for c in range(np.uint64(p.shape[0])):
        if p.itemsize == 4:
            for v in range(n):
                p[c, v] = exp_single(p[c, v] - top[v])
                total[v] += p[c, v]
        else:
            for v in range(n):
                p[c, v] = exp_double(p[c, v] - top[v])
                total[v] += p[c, v]
    for v in range(n):
        inverse[v] = p.dtype.type(1) / total[v]


@inner
def _clip(x, c, at, n, p):
    zero, one = p.dtype.type(0), p.dtype.type(1)
    outside, bottom, top = np.int32(0), p.dtype.type(-TOLERANCE), p.dtype.type(1 + TOLERANCE)
    for v in range(n):
        value = x[c, at + v]
        outside = np.int32(outside + ((value < bottom) | (value > top)))
        value = zero if value <= zero else value  # nor is there a -0, whose bits are not in order
        p[c, v] = one if value > one else value
    return outside


@inner
def _sigmoid(x, c, at, n, p):
    """From exp(-|x|), which never overflows."""
    zero, one = p.dtype.type(0), p.dtype.type(1)
    for v in range(n):
        value = x[c, at + v]
        small = exp_single(-abs(value)) if p.itemsize == 4 else p.dtype.type(exp_double(-abs(value)))
        inverse = one / (one + small)
        p[c, v] = small * inverse if value < zero else inverse


@inner
def _find_range(p, c, n, low, high):
    """The least and the largest of each tile of numbers that are not negative; NaN if one is.

    Their bits are in the same order, and those of NaN lie outside: so the loop runs in vector lanes.
    """
    for tile in range(_tiles(n)):
        a, m = _tile(tile, n)
        least = most = bits(p[c, a])
        for v in range(m):
            least = min(least, bits(p[c, a + v]))
            most = max(most, bits(p[c, a + v]))
        low[c, tile], high[c, tile] = from_bits(least), from_bits(most)


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


@inner
def _locate(p, c, a, m, where, cell, u):
    scale, shift, cells, right = where
    if p.itemsize == 8 or right:
        for v in range(m):
            k, w = _locate_one(np.float64(p[c, a + v]), scale, shift, cells, right)
            cell[v] = np.uint32(np.int32(k))
            u[v] = w
        return
    last = cells - 1.0
    for v in range(m):  # a float32 times scale is exact: no second part
        t = np.float64(p[c, a + v]) * scale + shift
        k = t if t > 0.0 else 0.0
        k = np.floor(k if k < last else last)
        cell[v] = np.uint32(np.int32(k))
        u[v] = t - k


@inner
def _cell_of_all(low, high, where):
    """The cell that all numbers in this range lie in, or -1."""
    if not (low >= 0 and high <= 2):  # one is NaN
        return -1.0
    first, _ = _locate_one(np.float64(low), *where)
    last, _ = _locate_one(np.float64(high), *where)
    return first if first == last else -1.0


@inner
def _add_row(p, c, n, low, high, owner, where, degree, cell, u, sums, label_sums):
    """Add 1, u, u**2, ... of each voxel to its cell's sums, and to those of its label in tiles of the class c."""
    scale, shift, _, _ = where
    for tile in range(_tiles(n)):
        a, m = _tile(tile, n)
        own = owner[tile] == np.int32(c)
        start = _cell_of_all(low[c, tile], high[c, tile], where)
        if start < 0:
            _locate(p, c, a, m, where, cell, u)
            _scatter(cell, u, m, degree + 2, sums, c)
            if own:
                _scatter(cell, u, m, degree + 1, label_sums, c)
            continue
        k, s1, s2 = np.uint64(start), 0.0, 0.0
        if degree == 0:
            for v in range(m):
                s1 += np.float64(p[c, a + v]) * scale + shift - start
        else:
            for v in range(m):
                w = np.float64(p[c, a + v]) * scale + shift - start
                s1 += w
                s2 += w * w
            sums[c, 0, k, 2] += s2
        sums[c, 0, k, 0] += m
        sums[c, 0, k, 1] += s1
        if own:
            label_sums[c, 0, k, 0] += m
            if degree > 0:
                label_sums[c, 0, k, 1] += s1
            if degree > 1:
                label_sums[c, 0, k, 2] += s2
        for d in range(3, degree + 2):
            s = 0.0
            for v in range(m):
                w = np.float64(p[c, a + v]) * scale + shift - start
                s += w * w * w if d == 3 else w * w * w * w if d == 4 else w**d
            sums[c, 0, k, d] += s
            if own and d <= degree:
                label_sums[c, 0, k, d] += s


@inner
def _scatter(cell, u, m, powers, sums, c):
    """Add 1, u, u**2, ... to each voxel's cell; four copies of the sums take turns."""
    last = COPIES - ONE
    if powers == 1:
        for v in range(m):
            sums[c, v & last, cell[v], 0] += 1.0
    elif powers == 2:
        for v in range(m):
            sums[c, v & last, cell[v], 0] += 1.0
            sums[c, v & last, cell[v], 1] += u[v]
    elif powers == 3:
        for v in range(m):
            sums[c, v & last, cell[v], 0] += 1.0
            sums[c, v & last, cell[v], 1] += u[v]
            sums[c, v & last, cell[v], 2] += u[v] * u[v]
    else:
        for v in range(m):
            power = 1.0
            for d in range(powers):
                sums[c, v & last, cell[v], d] += power
                power *= u[v]


@inner
def _add_mixed(p, true, owner, n, where, degree, cell, u, label_sums):
    """Add the powers of u of voxels in mixed tiles to the sums of their labels, run by run."""
    for tile in range(_tiles(n)):
        if owner[tile] != MIXED:
            continue
        a, m = _tile(tile, n)
        stop = a + m
        while a < stop:
            first = a
            while a < stop and true[a] == true[first]:
                a += ONE
            if true[first] != NOTHING:
                c = np.uint64(true[first])
                _locate(p, c, first, a - first, where, cell, u)
                _scatter(cell, u, a - first, degree + 1, label_sums, c)


@inner
def _add_weighted(p, c, n, y, where, degree, cell, u, sums):
    """Add y, y u, y u**2, ...; few voxels belong to a class."""
    for tile in range(_tiles(n)):
        a, m = _tile(tile, n)
        some = False
        for v in range(m):
            some |= y[a + v] != 0.0
        if some:
            _locate(p, c, a, m, where, cell, u)
            for v in range(m):
                if y[a + v] != 0.0:
                    power = y[a + v]
                    for d in range(degree + 1):
                        sums[c, 0, cell[v], d] += power
                        power *= u[v]


@inner
def _fill_row(p, c, n, low, high, owner, true, where, twice, slopes, own_slopes, cell, u, g):
    """Write the gradient by p: twice p, and the polynomial of the voxel's cell at its position u.

    Voxels of the class c have slopes of their own.
    """
    scale, shift, _, _ = where
    degree = slopes.shape[2] - 1
    for tile in range(_tiles(n)):
        a, m = _tile(tile, n)
        own, start = owner[tile] == np.int32(c), _cell_of_all(low[c, tile], high[c, tile], where)
        if start >= 0 and degree <= 1 and owner[tile] != MIXED:
            k = np.uint64(start)
            level = own_slopes[c, k, 0] if own else slopes[c, k, 0]
            if degree == 0:
                for v in range(m):
                    g[c, a + v] = twice * p[c, a + v] + level
            else:
                rise = own_slopes[c, k, 1] if own else slopes[c, k, 1]
                narrow, offset = p.dtype.type(scale), p.dtype.type(shift - start)
                for v in range(m):
                    g[c, a + v] = twice * p[c, a + v] + (level + rise * (narrow * p[c, a + v] + offset))
        elif own:
            _fill(p, c, a, m, where, twice, own_slopes, cell, u, g)
        else:
            _fill(p, c, a, m, where, twice, slopes, cell, u, g)
            stop = a + m if owner[tile] == MIXED and _holds(true, a, m, c) else a
            while a < stop:
                b = a
                while b < stop and true[b] == np.int32(c):
                    b += ONE
                if b > a:
                    _fill(p, c, a, b - a, where, twice, own_slopes, cell, u, g)
                a = b + ONE


@inner
def _holds(true, a, m, c):
    """Whether a tile has voxels of a class."""
    some = False
    for v in range(m):
        some |= true[a + v] == np.int32(c)
    return some


@inner
def _fill(p, c, a, m, where, twice, slopes, cell, u, g):
    """The same where each voxel looks for its cell."""
    degree = slopes.shape[2] - 1
    _locate(p, c, a, m, where, cell, u)
    if degree == 0:
        for v in range(m):
            g[c, a + v] = twice * p[c, a + v] + slopes[c, cell[v], 0]
    elif degree == 1:
        for v in range(m):
            rise = slopes[c, cell[v], 1] * p.dtype.type(u[v])
            g[c, a + v] = twice * p[c, a + v] + (slopes[c, cell[v], 0] + rise)
    else:
        for v in range(m):
            value = slopes[c, cell[v], degree]
            for d in range(degree - 1, -1, -1):
                value = value * p.dtype.type(u[v]) + slopes[c, cell[v], d]
            g[c, a + v] = twice * p[c, a + v] + value


@inner
def _take_entropy(true, owner, n, of_class, common):
    """The weight of the cross-entropy in each voxel, with the sign that it has in `common`."""
    a = ZERO
    while a < n:
        b = _run_end(true, owner, a, n)
        if true[a] != NOTHING:
            weight = of_class[np.uint64(true[a]), CROSS_ENTROPY]
            for v in range(b - a):
                common[a + v] = -weight
        a = b


@inner
def _through_activation(p, g, c, at, n, activation, common, entropy, out):
    """The gradient by the inputs, but for the labels' own part of the cross-entropy's."""
    if activation == SOFTMAX:
        for v in range(n):
            out[c, at + v] = p[c, v] * (g[c, v] - common[v])
    elif activation == SIGMOID:
        for v in range(n):
            out[c, at + v] = p[c, v] * (g[c, v] * (1 - p[c, v]) + entropy)
    else:
        for v in range(n):
            out[c, at + v] = g[c, v]


@inner
def _subtract_entropy(out, p, c, at, a, b, y, activation, weight):
    """That part: y by logits, y / p by probabilities that were not clipped."""
    if activation != NONE:
        for v in range(b - a):
            out[c, at + a + v] -= weight * p.dtype.type(y[a + v])
        return
    for v in range(b - a):
        q = p[c, a + v]
        out[c, at + a + v] -= weight * p.dtype.type(y[a + v]) / q if q >= SMALLEST else weight * 0


@inner
def _sum_of_squares(p, c, n):
    total = 0.0
    for v in range(n):
        total += np.float64(p[c, v]) * np.float64(p[c, v])
    return total


@inner
def _add_run(x, p, c, at, a, b, activation, top, total, class_sums):
    """Overlap, voxels and cross-entropy of a run of voxels of this class.

    Logarithms of many voxels are that of their product. The softmax's totals do not overflow in 64 below 60,000
    classes; probabilities, which count as 2**-24 at least, do not underflow in 32.
    """
    overlap, entropy = 0.0, 0.0
    for v in range(b - a):
        overlap += np.float64(p[c, a + v])
    if activation == SOFTMAX:
        for v in range(b - a):
            entropy += np.float64(top[a + v]) - np.float64(x[c, at + a + v])
        for first in range(a, b, np.uint64(64)):
            product = 1.0
            for v in range(min(np.uint64(64), b - first)):
                product *= np.float64(total[first + v])
            entropy += math.log(product)
    elif activation == NONE:
        for first in range(a, b, np.uint64(32)):
            product = 1.0
            for v in range(min(np.uint64(32), b - first)):
                q = np.float64(p[c, first + v])
                product *= SMALLEST if q < SMALLEST else q
            entropy -= math.log(product)
    class_sums[c, INTERSECTION] += overlap
    class_sums[c, CROSS_ENTROPY] += entropy
    class_sums[c, LABEL] += b - a
    class_sums[c, LABEL_SQUARED] += b - a


@inner
def _add_class(x, p, c, at, n, y, activation, top, logs, class_sums, products):
    """The same for labels with a channel per class; `logs` are those of the softmax's totals, or room for numbers."""
    overlap = label = squared = entropy = 0.0
    for v in range(n):
        overlap += y[v] * np.float64(p[c, v])
        label += y[v]
        squared += y[v] * y[v]
    if activation == SOFTMAX:
        for v in range(n):
            away = logs[v] + (np.float64(top[v]) - np.float64(x[c, at + v]))
            entropy += y[v] * away if y[v] > 0.0 else 0.0
    elif activation == NONE:
        for v in range(n):
            if y[v] > 0.0:
                q = p[c, v]
                entropy -= y[v] * (math.log(max(q, SMALLEST)) if q == q else q)
    else:
        for v in range(n):
            t = np.float64(x[c, at + v])
            entropy += (t if t > 0.0 else 0.0) - t * y[v]
        entropy += _soft_signs(x, c, at, n, logs, products)
    class_sums[c, CROSS_ENTROPY] += entropy
    class_sums[c, INTERSECTION] += overlap
    class_sums[c, LABEL] += label
    class_sums[c, LABEL_SQUARED] += squared


@inner
def _binary_cross_entropy(x, c, at, n, true, room, products):
    """Sum over voxels, whose labels are whether `true` is the class c."""
    total = 0.0
    for v in range(n):
        t = np.float64(x[c, at + v])
        label = 1.0 if true[v] == np.int32(c) else 0.0
        total += (t if t > 0.0 else 0.0) - t * label
    return total + _soft_signs(x, c, at, n, room, products)


@inner
def _soft_signs(x, c, at, n, room, products):
    """Sum of log(1 + exp(-|x|)), by few logarithms."""
    if x.itemsize == 4:
        for v in range(n):
            room[v] = exp_single(-abs(x[c, at + v]))
    else:
        for v in range(n):
            room[v] = exp_double(-abs(x[c, at + v]))
    multiply(room, n, products)
    return log_of(products)
