"""Every code block of the documentation runs as it is printed, or says in its source why it cannot.

The blocks of a page run in order: Python in one namespace, shell by bash, all in one temporary folder that holds small
real files under the names that pages use (see `conftest.py` beside this file). A block that cannot run here has a
comment on the line above it, which readers do not see: `<!-- not run: needs a GPU -->`.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import pytest

pytestmark = pytest.mark.peers

ROOT = Path(__file__).parents[2]
PAGES = {path.relative_to(ROOT).as_posix(): path for path in [ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md"))]}
NEEDS = {"docs/lightning.md": "lightning", "docs/nnunet.md": "nnunetv2", "docs/logging.md": "mlflow"}
BLOCK = re.compile(r"(?P<above>[^\n]*)\n```(?P<language>[^\n]*)\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL)
NOT_RUN = re.compile(r"<!-- not run: (.+) -->")
RUN = {"python", "sh"}
READ = {"bibtex", "text", "toml"}  # shown to be read


class Block(NamedTuple):
    line: int
    language: str
    code: str
    reason: str | None
    """Why it is not run, if so."""


def blocks_of(text: str) -> list[Block]:
    """The fenced blocks of a page, in order."""
    text = "\n" + text
    found = []
    for match in BLOCK.finditer(text):
        marked = NOT_RUN.fullmatch(match["above"].strip())
        line = text.count("\n", 0, match.start("language"))
        found.append(Block(line, match["language"], match["code"], marked and marked[1]))
    return found


@pytest.fixture(params=PAGES)
def page(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_blocks_of_a_page_run_in_order(page, files, monkeypatch):
    blocks = [block for block in blocks_of(PAGES[page].read_text(encoding="utf-8")) if block.language in RUN]
    todo = [block for block in blocks if block.reason is None]
    if not todo:
        pytest.skip("nothing to run")
    if page in NEEDS and find_spec(NEEDS[page]) is None:
        pytest.skip(f"needs {NEEDS[page]}, which another environment has")
    monkeypatch.chdir(files)
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    for name, few in {"CASES": "20", "EPOCHS": "2", "STEPS": "20"}.items():  # of the tutorial, as its page says
        monkeypatch.setenv(name, few)
    namespace = {"__name__": "page"}
    for block in todo:
        where = f"{page}:{block.line}"
        if block.language == "python":
            exec(compile("\n" * block.line + block.code, where, "exec"), namespace)
        else:
            done = subprocess.run(["bash", "-eu", "-c", block.code], capture_output=True, text=True, check=False)
            assert done.returncode == 0, f"{where} ended with {done.returncode}:\n{done.stdout}\n{done.stderr}"


def test_every_block_says_what_it_is(page):
    text = PAGES[page].read_text(encoding="utf-8")
    blocks = blocks_of(text)
    assert 2 * len(blocks) == len(re.findall(r"^\s*```", text, re.MULTILINE)), "a fence that no block has"
    for block in blocks:
        assert block.language in RUN | READ, f"{page}:{block.line}: {block.language!r} must be one of {RUN | READ}"
        if block.language == "toml":
            tomllib.loads(block.code)


def test_blocks_that_are_not_run_are_listed_with_reasons(capsys):
    with capsys.disabled():
        for page, path in PAGES.items():
            for block in blocks_of(path.read_text(encoding="utf-8")):
                if block.reason:
                    print(f"\n  not run: {page}:{block.line}: {block.reason}", end="")


def test_a_reason_is_read_from_the_line_above_alone():
    text = "<!-- not run: too long -->\n```sh\nsleep 9\n```\ntext\n```python\n1 / 0\n```\n"
    assert blocks_of(text) == [Block(2, "sh", "sleep 9\n", "too long"), Block(6, "python", "1 / 0\n", None)]
