"""The three sums of a case in fine bins as few bytes, and back, exactly. All in numpy, as the workers are.

Most fine bins of most cases are empty; only the others are kept. Of these, the count is a whole number, the label sum
is near count times center, and so is the confidence sum, a whole number of the smallest steps between float32 numbers
in the bin away: three small whole numbers, whose bytes of equal weight stand together and deflate well. A sum that is
none (labels that are shares, probabilities that are float64) is kept as it is. A bin that holds voxels takes about 3.4
bytes, where float64 sums deflate to 8.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
from isal import isal_zlib
from numpy.typing import NDArray

Array = NDArray[Any]

COUNT, CONFIDENCE = 0, 1  # places of the sums; labels are the third
ODD = 2**32 - 1  # marks a sum that is kept as it is
LARGEST = 2.0**30
FLOAT32_DIGITS = 23
HEADER = 7  # whole numbers: occupied bins, then of each kind of sum how many bytes a code takes, and how many are odd


def pack(sums: Array) -> bytes:
    """(3, class, bin) float64 counts, confidence sums and label sums, in bytes; the same for the same sums."""
    _, classes, bins = sums.shape
    occupied = (np.ascontiguousarray(sums, np.float64).view(np.int64) != 0).any(0)
    kept = sums[:, occupied]
    center, step = (np.broadcast_to(each, (classes, bins))[occupied] for each in _grid(bins))
    codes, odd = np.empty(kept.shape, np.uint32), []
    with np.errstate(all="ignore"):
        for i, values in enumerate(kept):
            guess, unit = _guess(i, kept[COUNT], center, step)
            away = values / unit - guess
            whole = np.where(np.abs(away) < LARGEST, away, 0.5).astype(np.int64)
            codes[i] = (whole << 1) ^ (whole >> 63)
            is_odd = (whole + guess) * unit != values
            codes[i][is_odd] = ODD
            odd.append(values[is_odd])
    planes: Array = np.moveaxis(codes.astype("<u4").view(np.uint8).reshape(*codes.shape, 4), 2, 1)
    widths = [(int(each.max(initial=0)).bit_length() + 7) // 8 for each in codes]
    header = np.array([kept.shape[1], *widths, *map(len, odd)], "<u4")
    content = [header, np.packbits(occupied), *(planes[i, :width] for i, width in enumerate(widths))]
    content += [each.astype("<f8") for each in odd]
    # Run lengths and small blocks: planes are noise or all alike, and each has its own frequencies.
    squeeze = zlib.compressobj(1, zlib.DEFLATED, -15, 5, zlib.Z_RLE)
    return b"".join([*(squeeze.compress(part.tobytes()) for part in content), squeeze.flush()])


def unpack(packed: Sequence[bytes], classes: int, bins: int) -> Array:
    """What `pack` took, of several cases: (3, case, class, bin). ValueError where they are not of these sizes."""
    sums = np.zeros((3, len(packed), classes * bins))
    if not packed:
        return sums.reshape(3, 0, classes, bins)
    cases = [_Case(content, classes * bins) for content in packed]
    bits = np.frombuffer(b"".join(case.occupied for case in cases), np.uint8).reshape(len(cases), -1)
    occupied = np.unpackbits(bits, axis=1)[:, : classes * bins]
    if occupied.sum(1, dtype=np.int64).tolist() != [case.number for case in cases]:
        raise ValueError("its occupied bins are not as many as it says")
    where = np.flatnonzero(occupied)
    center, step = (np.tile(each, len(cases) * classes)[where] for each in _grid(bins))
    count = np.zeros(0)
    for i in range(3):
        codes = np.zeros(len(where), np.uint32)
        for place in range(max(case.widths[i] for case in cases)):
            plane = np.frombuffer(b"".join([case.plane(i, place) for case in cases]), np.uint8)
            codes |= plane.astype(np.uint32) << np.uint32(8 * place) if place else plane
        guess, unit = _guess(i, count, center, step)
        values = ((codes >> 1) ^ (0 - (codes & 1))).view(np.int32).astype(np.float64)
        values += guess
        values *= unit
        _put_odd(values, codes, [case.odd[i] for case in cases])
        sums[i].reshape(-1)[where] = values
        count = values if i == COUNT else count
    return sums.reshape(3, len(packed), classes, bins)


def _guess(kind: int, count: Array, center: Array, step: Array) -> tuple[Array | float, Array | float]:
    """What a sum of a bin is likely to be, as a whole number of units, and the unit."""
    if kind == COUNT:
        return 0.0, 1.0
    middle = count * center
    return (np.rint(middle / step), step) if kind == CONFIDENCE else (np.rint(middle), 1.0)


@lru_cache(maxsize=4)
def _grid(bins: int) -> tuple[Array, Array]:
    """The center of each bin, and the smallest step between float32 numbers in it; in the first there is no such."""
    lower = np.arange(bins) / bins
    lower[0] = 2.0**-20
    return (np.arange(bins) + 0.5) / bins, np.exp2(np.floor(np.log2(lower)) - FLOAT32_DIGITS)


def _put_odd(values: Array, codes: Array, odd: Sequence[bytes]) -> None:
    where = codes == ODD
    kept = np.frombuffer(b"".join(odd), "<f8")
    if where.sum() != len(kept):
        raise ValueError("its odd sums are not as many as it says")
    values[where] = kept


class _Case:
    """The parts of one packed case."""

    def __init__(self, content: bytes, cells: int) -> None:
        try:
            self._content = isal_zlib.decompress(content, -15)
        except isal_zlib.error as error:  # type: ignore[misc]  # of modules without types
            raise ValueError(f"its sums cannot be unpacked: {error}") from error
        sizes = np.frombuffer(self._content[: 4 * HEADER].ljust(4 * HEADER, b"\0"), "<u4").tolist()
        self.number, self.widths, odd = sizes[0], sizes[1:4], sizes[4:]
        start = 4 * HEADER + (cells + 7) // 8
        self.occupied = self._content[4 * HEADER : start]
        self._starts = []
        for width in self.widths:
            self._starts.append(start)
            start += width * self.number
        self.odd = []
        for number in odd:
            self.odd.append(self._content[start : start + 8 * number])
            start += 8 * number
        if start != len(self._content) or max(self.widths) > 4:
            raise ValueError(f"its sums take {len(self._content)} bytes where {start} were told")

    def plane(self, kind: int, place: int) -> bytes:
        """A byte of each code of this kind of sum, the least first."""
        if place >= self.widths[kind]:
            return bytes(self.number)
        start = self._starts[kind] + place * self.number
        return self._content[start : start + self.number]
