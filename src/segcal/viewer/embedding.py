"""Cases as a page holds them: facts as JSON, volumes and NiiVue compressed and as text."""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from importlib import resources
from typing import Any, NamedTuple

import numpy as np

from segcal.errors import FileError
from segcal.viewer.cases import ViewedCase
from segcal.viewer.volumes import CaseVolumes

KEPT_BITS = np.uint8(0b1111_1100)  # of an image, 64 shades: the rest is mostly noise, which cannot be seen
VENDOR = resources.files("segcal.viewer") / "vendor"


class Volume(NamedTuple):
    """A volume as text: which one, as the page's script asks for it, and its NIfTI file, compressed, as base64."""

    key: str
    text: str


def embedded_facts(cases: Sequence[ViewedCase]) -> list[dict[str, Any]]:
    """Of each case, what the page's script needs besides volumes."""
    return [each.volumes.facts() | {"caption": each.caption, "curves": each.curves} for each in cases]


def embedded_volumes(cases: Sequence[ViewedCase]) -> Iterator[Volume]:
    """All volumes of all cases."""
    for i, (volumes, *_) in enumerate(cases):
        if volumes.image is not None:
            volumes = replace(volumes, image=volumes.image & KEPT_BITS)
        for kind, method, cls in _asked(volumes):
            words = (str(i), kind, *("null" if number is None else str(number) for number in (method, cls)))
            yield Volume(" ".join(words), packed(volumes.nifti(kind, method, cls)))


def _asked(volumes: CaseVolumes) -> Iterator[tuple[str, int | None, int | None]]:
    """Kind, method and class of each volume that is there."""
    if volumes.image is not None:
        yield "image", None, None
    for c in range(len(volumes.classes)):
        if volumes.labels is not None:
            yield "label", None, c
        for m in range(len(volumes.methods)):
            yield "probability", m, c


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
