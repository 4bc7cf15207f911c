"""What every page is made with: templates that escape, style and script as text, and a policy that lets in no more."""

from __future__ import annotations

import base64
import hashlib
import math
from collections.abc import Mapping
from importlib import resources

from jinja2 import Environment, PackageLoader, StrictUndefined


def environment() -> Environment:
    """Jinja as all pages use it: whatever is put in is escaped, and what is missing is an error."""
    made = Environment(
        loader=PackageLoader("segcal.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters["number"] = number
    return made


def number(value: float, digits: int = 3) -> str:
    """With this many places; a dash for NaN."""
    return "-" if math.isnan(value) else f"{value:.{digits}f}"


def template_text(name: str) -> str:
    return (resources.files("segcal.report") / "templates" / name).read_text(encoding="utf-8")


def method_style(colours: Mapping[str, str]) -> str:
    """The colour of each method as a class m0, m1, ...; on dark paper a dark one is lifted to be seen."""
    return "".join(
        f".m{i} {{ --method: light-dark({colour}, oklch(from {colour} max(l, 0.58) c h)); }}\n"
        for i, colour in enumerate(colours.values())
    )


def policy(style: str, *scripts: str) -> str:
    """Nothing from elsewhere, and of what is here only these scripts and this style."""
    hashes = " ".join(f"'{_hash(script)}'" for script in scripts if script)
    allowed = f"script-src {hashes}; " if hashes else ""
    return (
        f"default-src 'none'; img-src data:; {allowed}style-src '{_hash(style)}'; base-uri 'none'; form-action 'none'"
    )


def _hash(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


def png_text(png: bytes) -> str:
    """A picture as a data: address holds it."""
    return base64.b64encode(png).decode()
