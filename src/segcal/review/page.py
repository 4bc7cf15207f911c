"""The page of a review: markup, style and script in one answer, which holds no case; the script asks for them."""

from __future__ import annotations

import html
import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from segcal.report.rendering import render_page
from segcal.review.decisions import LONGEST_COMMENT, LONGEST_REVIEWER
from segcal.review.results import Result
from segcal.viewer.embedding import niivue_script

_POLICY = re.compile(r'<meta http-equiv="Content-Security-Policy" content="([^"]*)">')


class Page(NamedTuple):
    """The page, and the policy that a browser keeps it to."""

    text: str
    policy: str


def review_page(
    results: Sequence[Result], *, token: str, reviewer: str, volumes: bool, notes: Sequence[str], file: Path
) -> Page:
    """The page of these results; `volumes` says whether there are any to show."""
    text = render_page(
        "review.html.j2",
        title="Review",
        styles=("viewer.css", "review.css") if volumes else ("review.css",),
        scripts=(*(("viewer.js",) if volumes else ()), "review-list.js", "review.js"),
        later_scripts=(niivue_script(),) if volumes else (),
        data={"token": token, "volumes": volumes},
        allow="connect-src 'self'",
        results=results,
        reviewer=reviewer,
        volumes=volumes,
        notes=notes,
        file=file.name,
        longest_comment=LONGEST_COMMENT,
        longest_reviewer=LONGEST_REVIEWER,
    )
    told = _POLICY.search(text)
    assert told is not None  # every page has one
    return Page(text, f"{html.unescape(told[1])}; frame-ancestors 'none'")  # which the page itself cannot say
