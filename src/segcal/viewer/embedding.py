"""Cases as a page holds them: facts as JSON, volumes and NiiVue compressed and as text."""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
from collections.abc import Iterator, Sequence
from functools import cache
from importlib import resources
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from segcal.errors import FileError
from segcal.viewer.cases import ViewedCase
from segcal.viewer.volumes import CaseVolumes

KEPT_BITS = np.uint8(0b1111_1100)  # of an image, 64 shades: the rest is mostly noise, which cannot be seen
DIFFERENCED = {"image": 1, "probability": 2, "label": 0}  # along how many axes; as in embedded.js
VENDOR = resources.files("segcal.viewer") / "vendor"


class Volume(NamedTuple):
    """A volume as text: which one, as the page's script asks for it, and its bytes, compressed, as base64."""

    key: str
    text: str


def embedded_facts(cases: Sequence[ViewedCase]) -> list[dict[str, Any]]:
    """Of each case, what the page's script needs besides volumes."""
    return [each.volumes.facts() | {"caption": each.caption, "curves": each.curves} for each in cases]


def embedded_volumes(cases: Sequence[ViewedCase]) -> Iterator[Volume]:
    """All volumes of all cases."""
    for i, (volumes, *_) in enumerate(cases):
        for kind, method, cls in _asked(volumes):
            values = np.frombuffer(volumes.bytes_of(kind, method, cls), np.uint8).reshape(volumes.shape, order="F")
            if kind == "image":
                values = values & KEPT_BITS
            words = (str(i), kind, *("null" if number is None else str(number) for number in (method, cls)))
            yield Volume(" ".join(words), packed(differenced(values, DIFFERENCED[kind]).tobytes(order="F")))


def _asked(volumes: CaseVolumes) -> Iterator[tuple[str, int | None, int | None]]:
    """Kind, method and class of each volume that is there."""
    if volumes.image is not None:
        yield "image", None, None
    for c in range(len(volumes.classes)):
        if volumes.labels is not None:
            yield "label", None, c
        for m in range(len(volumes.methods)):
            yield "probability", m, c


def differenced(values: NDArray[np.uint8], axes: int) -> NDArray[np.uint8]:
    """Each byte less the one before it, along the first axes in turn, modulo 256: smooth volumes become mostly zeros.

    >>> differenced(np.array([[3, 5, 9], [4, 6, 9]], np.uint8), 1)
    array([[3, 5, 9],
           [1, 1, 0]], dtype=uint8)
    """
    for axis in range(axes):
        values = np.diff(values, axis=axis, prepend=np.uint8(0))
    return values


def packed(content: bytes) -> str:
    """Compressed, the same each time, as base64."""
    return base64.b64encode(gzip.compress(content, 9, mtime=0)).decode()


@cache
def niivue_script() -> str:
    """NiiVue's script as published, checked against its hash."""
    told = json.loads((VENDOR / "niivue.json").read_text(encoding="utf-8"))
    content: bytes = (VENDOR / told["file"]).read_bytes()
    found = hashlib.sha256(content).hexdigest()
    if found != told["sha256"]:
        raise FileError(
            f"{told['file']} must be that of NiiVue {told['version']}, with the SHA-256 {told['sha256']}; it has "
            f"{found}. Install segcal again."
        )
    return content.decode()


def niivue_license() -> str:
    """Of NiiVue and what it contains, which goes wherever its script goes."""
    return (VENDOR / "LICENSE.niivue.txt").read_text(encoding="utf-8")
