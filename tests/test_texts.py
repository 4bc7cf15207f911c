"""Texts: the form of error messages (one line, requirement, value, remedy), terms, and links between pages.

The messages are collected from the source, so that none is missed: every call of an error of segcal, with its
formatted values as `{...}`.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from segcal import errors

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "segcal"
KINDS = {name for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, ValueError)}
REQUIREMENT = re.compile(
    r"\b(must|needs?|cannot|can be|may be|may not|is for|are hard|belongs to|takes?|no such|not installed|does? not|"
    r"died|was learned|was fitted|has regions|holds (a|another) run|no entry|no prediction|no step|no finite|"
    r"no method may|works on)\b|^(the study )?(\{\.\.\.\}: ?)?\{\.\.\.\}(;| Give|$)"  # or another function says it
)
REMEDY = re.compile(  # a second sentence, or a second half that says what to do
    r"\. [A-Z`0-9'{]|\} Give|\{hint|; \{\.\.\.\}$|; (add|allow|call|choose|fit|for classes|give|"
    r"leave|look|name|pip|rename|take|use|with)\b"
)
VALUE = re.compile(r"; (got|one|it|there|its|this|they|these|those|some|all|both|several|more|\{)")
CIRCUMLOCUTIONS = (
    "goes on from there", "there and back", "mean what they say", "to mend", "started again, it goes on",
    "betters the", "what is promised",
)  # fmt: skip


def text_of(node: ast.expr) -> str:
    """A message as far as the source tells it."""
    match node:
        case ast.Constant():
            return str(node.value)
        case ast.JoinedStr():
            return "".join(str(v.value) if isinstance(v, ast.Constant) else _placeholder(v) for v in node.values)
        case ast.BinOp():
            return text_of(node.left) + text_of(node.right)
    return "{...}"


def _placeholder(node: ast.expr) -> str:
    return "{hint}" if "hint" in ast.unparse(node) else "{...}"


def messages() -> Iterator[tuple[str, str, str]]:
    """Where each error is made, its kind, and its message; those that are handed on whole are left out."""
    for path in sorted(SOURCE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            name = getattr(getattr(node, "func", None), "id", None)
            if isinstance(node, ast.Call) and name in KINDS and node.args:
                text = text_of(node.args[0])
                if not re.fullmatch(r"(\{\.\.\.\}[:,]? ?)+(loss: \{\.\.\.\})?|the study \{\.\.\.\}: \{\.\.\.\}", text):
                    yield f"{path.relative_to(SOURCE).as_posix()}:{node.lineno}", name, text


FOUND = list(messages())


def test_messages_are_found():
    assert len(FOUND) > 400
    assert {name for _, name, _ in FOUND} >= {"ConfigError", "FileError", "GridError", "LabelError", "ShapeError"}


def faults(name: str, text: str) -> list[str]:
    """What a message lacks."""
    found = []
    if "\n" in text:
        found.append("more than one line")
    if not re.search(r"([.?)]|\{[^}]*\})$", text):
        found.append("no full stop")
    if not REQUIREMENT.search(text):
        found.append("no requirement")
    if not REMEDY.search(text) and not (name == "ConfigError" and VALUE.search(text)):
        found.append("no remedy")  # of an option, the values that it takes are one
    return found


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("FileError", "{...} must be a calibrator; {...}. Check the path.", []),
        ("ConfigError", "bins must be at least 1; got {...}.", []),
        ("FileError", "bins must be at least 1; got {...}.", ["no remedy"]),
        ("ConfigError", "wrong bins", ["no full stop", "no requirement", "no remedy"]),
        ("ShapeError", "bins must\nbe one. Use one.", ["more than one line"]),
    ],
)
def test_faults_are_seen(name, text, expected):
    assert faults(name, text) == expected


def test_every_message_has_the_form():
    lacking = [(where, text, told) for where, name, text in FOUND if (told := faults(name, text))]
    assert lacking == []


def test_texts_use_the_terms_of_the_field():
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *SOURCE.glob("cli/*.py"), *SOURCE.rglob("*.j2")]
    assert len(pages) > 60
    found = [
        (page.name, phrase)
        for page in pages
        for phrase in CIRCUMLOCUTIONS
        if phrase in " ".join(page.read_text(encoding="utf-8").split())
    ]
    assert found == []


def anchors(page: Path) -> set[str]:
    """Places of a page that a link can name."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"\s+", "-", re.sub(r"[^\w\- ]", "", heading.lower()).strip()) for heading in headings}


def test_links_of_pages_lead_somewhere():
    """Those to pages that MkDocs makes are left to its strict build."""
    lost = []
    for page in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]:
        prose = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
        for link in re.findall(r"\]\(([^)\s]+)\)", prose):
            file, _, place = link.partition("#")
            target = page.parent / file if file else page
            if link.startswith("http") or re.search(r"cli\.md|notebooks/\w+\.md", file):
                continue
            if not target.exists() or (place and place not in anchors(target)):
                lost.append((page.name, link))
    assert lost == []


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 150
