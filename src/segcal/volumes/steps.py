"""Probabilities as whole steps of a scale, such as 255ths, which take a quarter of the room of float32.

Rounding each class by itself would leave voxels whose probabilities do not sum to 1, and classes that seem equally
probable. Here the steps of a voxel always sum to the whole scale, and its decision stays.
"""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from segcal.errors import RangeError

Array = NDArray[Any]
StoredAs = Literal["float32", "float16", "uint8"]
"""How maps of probabilities are stored; the latter two as integers, since NIfTI has no half precision."""
STEPS: dict[StoredAs, int] = {"float16": 65535, "uint8": 255}
"""The integer that stands for 1."""
_BLOCK = 1 << 15  # voxels rounded together, in the cache
_NEAR = 1e-3  # that probabilities may lie outside of [0, 1]
_TIE = 1e-9  # of a step: the leader comes first among remainders that differ by rounding alone


def in_steps(probabilities: Array, steps: int) -> Array:
    """Probabilities (class, ...) as numbers of steps, `steps` for 1, in the smallest type that holds them.

    The numbers of exclusive classes sum to `steps` in each voxel: probabilities are divided by their sum, all are
    rounded down, and what is missing goes one by one to the largest remainders. The first of the most probable classes
    has the first of the largest numbers. A single channel is a foreground by itself; it is rounded, and reaches the
    upper half of the scale from 1/2 on.

    >>> in_steps(np.array([[0.3341], [0.3339], [0.332]]), 255).ravel().tolist()
    [85, 85, 85]
    >>> in_steps(np.array([[0.332], [0.3339], [0.3341]]), 255).ravel().tolist()  # the last one leads
    [84, 85, 86]
    """
    flat = probabilities.reshape(len(probabilities), -1)
    numbers = np.empty(flat.shape, np.min_scalar_type(steps))
    for start in range(0, flat.shape[1], _BLOCK):
        block = flat[:, start : start + _BLOCK].astype(np.float64)
        inside = (block >= -_NEAR) & (block <= 1 + _NEAR)
        if not inside.all():
            raise RangeError(
                f"probabilities that are stored as integers must lie in [0, 1]; one is {block[~inside][0]:.6g}."
                " Check the scale of the file."
            )
        np.clip(block, 0, 1, out=block)
        numbers[:, start : start + _BLOCK] = _shared(block, steps) if len(block) > 1 else np.floor(block * steps + 0.5)
    return numbers.reshape(probabilities.shape)


def _shared(block: Array, steps: int) -> Array:
    """The steps of (class, voxel) probabilities of exclusive classes, which may not sum to 1 exactly."""
    leader = block.argmax(0)
    total = block.sum(0)
    rest = np.divide(steps * block, total, out=np.full(block.shape, steps / len(block)), where=total > 0)
    whole: Array = np.floor(rest)
    rest -= whole
    rest[leader, np.arange(len(leader))] += _TIE
    missing = steps - whole.sum(0)
    short = np.flatnonzero(missing > 0)
    while len(short):
        most = rest[:, short].argmax(0)
        whole[most, short] += 1
        rest[most, short] -= 1
        missing[short] -= 1
        short = short[missing[short] > 0]
    # Larger probabilities have at least as many steps, so that a leader can only be met by a class before it.
    seeming = whole.argmax(0)
    met = np.flatnonzero(leader != seeming)
    whole[leader[met], met] += 1
    whole[seeming[met], met] -= 1
    return whole
