"""What every page is made with: templates that escape, style and script as text, and a policy that lets in no more."""

from __future__ import annotations

import base64
import hashlib
import json
import math
from collections.abc import Iterable, Mapping
from importlib import resources
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from segcal import __version__
from segcal._io.words import counted

STYLE = "page.css"
SCRIPT = "page.js"
"""What every page runs: light, dark and printing."""


def render_page(
    template: str,
    *,
    colors: Mapping[str, str] | None = None,
    styles: Iterable[str] = (),
    scripts: Iterable[str] = (),
    later_scripts: Iterable[str] = (),
    data: object = None,
    allow: str = "",
    **content: Any,
) -> str:
    """A page of a template that extends base.html.j2, as one file that needs nothing else.

    colors: of each method, for the classes m0, m1, ...
    styles, scripts: templates that this page has beyond those of all pages.
    later_scripts: texts of further scripts that the page's own may run.
    data: what the script reads as JSON from the element "data".
    allow: directives of the policy beyond those of all pages, as "connect-src 'self'".
    content: what the template shows; `title` must be among it.
    """
    style = "".join(map(template_text, (STYLE, *styles))) + method_style(colors or {})
    script = "\n".join(map(template_text, (SCRIPT, *scripts)))
    if data is not None:
        content["data"] = embedded_json(data)
    return (
        environment()
        .get_template(template)
        .render(
            **content,
            counted=counted,
            version=__version__,
            # Neither holds anything from outside but colors, so they need no escaping.
            style=Markup(style),
            script=Markup(script),
            policy=policy(style, script, allow, later_scripts),
        )
    )


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


def method_style(colors: Mapping[str, str]) -> str:
    """The color of each method as a class m0, m1, ...; on dark paper a dark one is lifted to be seen."""
    return "".join(
        f".m{i} {{ --method: light-dark({color}, oklch(from {color} max(l, 0.58) c h)); }}\n"
        for i, color in enumerate(colors.values())
    )


def policy(style: str, script: str, allow: str = "", later_scripts: Iterable[str] = ()) -> str:
    """Nothing from elsewhere, and of what is here only these scripts and this style; and what else is allowed."""
    hashes = " ".join(f"'{_hash(text)}'" for text in (script, *later_scripts))
    return "; ".join(
        filter(
            None,
            (
                "default-src 'none'",
                "img-src data:",
                f"script-src {hashes}",
                f"style-src '{_hash(style)}'",
                "base-uri 'none'",
                "form-action 'none'",
                allow,
            ),
        )
    )


def embedded_json(data: object) -> Markup:
    """JSON that is safe inside a script element: nothing in it can end the element or open a comment.

    >>> embedded_json(["</script>"])
    Markup('["\\\\u003c/script\\\\u003e"]')
    """
    text = json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return Markup(text)


def _hash(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


def base64_text(picture: bytes) -> str:
    """A picture as a data: address holds it."""
    return base64.b64encode(picture).decode()
