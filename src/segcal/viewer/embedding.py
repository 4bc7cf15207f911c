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

from segcal.errors import FileError
from segcal.viewer.cases import ViewedCase

KEPT_BITS = 0b1111_1100  # of an image inside a page
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
        if volumes.image is not None:
            yield Volume(f"{i} image null null", packed(_coarser(volumes.bytes_of("image"))))
        for c in range(len(volumes.classes)):
            if volumes.labels is not None:
                yield Volume(f"{i} label null {c}", packed(volumes.bytes_of("label", None, c)))
            for m in range(len(volumes.methods)):
                yield Volume(f"{i} probability {m} {c}", packed(volumes.bytes_of("probability", m, c)))


def _coarser(image: bytes) -> bytes:
    """With 64 shades of gray: what is left out is mostly noise, which does not compress and cannot be seen."""
    return (np.frombuffer(image, np.uint8) & KEPT_BITS).tobytes()


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
