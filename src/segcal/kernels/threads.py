"""How many threads a pass over voxels takes, where torch itself must keep to one.

The results of torch's own operations differ in the last bits with the number of its threads, since vector code and its
remainders meet other voxels. Those of our passes do not.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch

_ours: ContextVar[int | None] = ContextVar("threads", default=None)


def pass_threads() -> int:
    """Threads of a pass whose result does not depend on them: as many as torch has, or had."""
    return _ours.get() or torch.get_num_threads()


@contextmanager
def one_torch_thread() -> Iterator[None]:
    """Torch computes with one thread meanwhile, so that its results are the same whatever the machine's cores."""
    threads = torch.get_num_threads()
    token = _ours.set(pass_threads())
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        _ours.reset(token)
