"""The page of a review: markup, style and script in one answer, which holds no case; the script asks for them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from markupsafe import Markup

from segcal import __version__
from segcal._io.words import counted
from segcal.report.page import embedded_json
from segcal.report.rendering import environment, policy, template_text
from segcal.review.decisions import LONGEST_COMMENT, LONGEST_REVIEWER
from segcal.review.results import Result
from segcal.viewer.embedding import niivue_script

STYLES = ("report.css", "queue.css", "review.css")
SCRIPTS = ("page.js", "review-list.js", "review.js")


class Page(NamedTuple):
    """The page, and the policy that a browser keeps it to."""

    text: str
    policy: str


def review_page(
    results: Sequence[Result], *, token: str, reviewer: str, volumes: bool, notes: Sequence[str], file: Path
) -> Page:
    """The page of these results; `volumes` says whether there are any to show."""
    style = "".join(map(template_text, (*STYLES, *["viewer.css"] * volumes)))
    script = "\n".join(map(template_text, (*["viewer.js"] * volumes, *SCRIPTS)))
    text = (
        environment()
        .get_template("review.html.j2")
        .render(
            results=results,
            reviewer=reviewer,
            volumes=volumes,
            notes=notes,
            file=file.name,
            counted=counted,
            version=__version__,
            longest_comment=LONGEST_COMMENT,
            longest_reviewer=LONGEST_REVIEWER,
            style=Markup(style),  # neither holds anything from outside
            script=Markup(script),
            data=embedded_json({"token": token, "volumes": volumes}),
        )
    )
    scripts = (script, niivue_script()) if volumes else (script,)
    return Page(text, f"{policy(style, *scripts)}; connect-src 'self'; frame-ancestors 'none'")
