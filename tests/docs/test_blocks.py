"""Every code block of the documentation runs as it is printed, or says in its source why it cannot.

The blocks of a page run in order: Python in one namespace, shell by bash, all in one temporary folder that holds small
real files under the names that pages use (see `conftest.py` beside this file). Python that begins with the name of a
file, as `# trainers/mine.py`, is written there, too. A block that cannot run here has a comment on the line above it,
which readers do not see: `<!-- not run: needs a GPU -->`.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

pytestmark = pytest.mark.peers

ROOT = Path(__file__).parents[2]
PAGES = {path.relative_to(ROOT).as_posix(): path for path in [ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md"))]}
BLOCK = re.compile(r"(?P<above>[^\n]*)\n```(?P<language>[^\n]*)\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL)
NOT_RUN = re.compile(r"<!-- not run: (.+) -->")
FILE = re.compile(r"# (\S+\.py)\n")
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


class Shell:
    """As a terminal: variables and the folder carry over; what runs in the background lives on until `close`.

    Each block has a bash and a group of processes of its own.
    """

    def __init__(self, folder: Path) -> None:
        self.state, self.said = folder / "state", folder / "said"
        self.state.touch()
        self.started: list[subprocess.Popen[bytes]] = []

    def run(self, code: str, where: str) -> None:
        script = f'. {self.state} 2>/dev/null; cd "$PWD"; set -eu\n{code}\ndeclare -p >{self.state}'
        with self.said.open("wb") as said:  # no pipe: processes in the background would keep it open
            process = subprocess.Popen(
                ["bash", "-c", script], stdin=subprocess.DEVNULL, stdout=said, stderr=said, start_new_session=True
            )
        self.started.append(process)
        ended = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # its group keeps its number until `close`
        assert ended is not None
        assert ended.si_status == 0, f"{where} ended with {ended.si_status}:\n{self.said.read_text(errors='replace')}"

    def close(self) -> None:
        for process in self.started:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[Shell]:
    shell = Shell(tmp_path)
    yield shell
    shell.close()


def test_blocks_of_a_page_run_in_order(page, request):
    blocks = [block for block in blocks_of(PAGES[page].read_text(encoding="utf-8")) if block.language in RUN]
    todo = [block for block in blocks if block.reason is None]
    if not todo:
        pytest.skip("nothing to run")
    namespace = {"__name__": "page"} | request.getfixturevalue("given")
    shell = request.getfixturevalue("shell")
    for block in todo:
        where = f"{page}:{block.line}"
        if block.language == "sh":
            shell.run(block.code, where)
            continue
        if name := FILE.match(block.code):
            Path(name[1]).parent.mkdir(parents=True, exist_ok=True)
            Path(name[1]).write_text(block.code, encoding="utf-8")
        exec(compile("\n" * block.line + block.code, where, "exec"), namespace)


def test_a_shell_is_as_a_terminal(shell, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shell.run("mkdir deep\ncd deep\nWORD='two words'\nexport SEEN=$WORD", "first")
    shell.run("sleep 600 &\necho $! >process", "second")
    shell.run('[ "$WORD" = "two words" ]\nenv | grep -q "^SEEN=two words$"', "third")
    shell.run('if env | grep "^WORD="; then exit 1; fi', "not exported")
    process = (tmp_path / "deep" / "process").read_text().strip()
    shell.run(f"kill -0 {process}", "fourth")
    with pytest.raises(AssertionError, match=r"(?s)fifth ended with 3:.*oh"):
        shell.run("echo oh\nbash -c 'exit 3'\ntrue", "fifth")


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
