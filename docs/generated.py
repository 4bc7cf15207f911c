"""Pages that MkDocs generates during the build: commands from their help texts, stored notebooks, docstrings.

A notebook becomes a Markdown page with its cells and stored outputs. It needs no external scripts, and search finds
it. Nothing is executed.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

from griffe import Attribute, Class, Docstring, Extension, Object
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from typer import Context
from typer.main import get_command

from segcal.cli import app

OPTION = r"^([a-z_]+(?:, [a-z_]+)*): "  # what begins a line on an option of a class


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """MkDocs calls this after it has collected the pages."""
    files.append(File.generated(config, "cli.md", content=commands_page()))
    for path in sorted(Path(config.docs_dir).glob("notebooks/*.ipynb")):
        files.remove(files.src_uris[f"notebooks/{path.name}"])
        text, pictures = notebook_page(path)
        files.append(File.generated(config, f"notebooks/{path.stem}.md", content=text))
        for name, content in pictures.items():
            files.append(File.generated(config, f"notebooks/{name}", content=content))
    return files


def commands_page() -> str:
    """Every command with an example, its arguments and its options by group."""
    codes = "0: success, 1: something failed, 2: wrong usage, 128 + number: stopped by this signal"
    parts = ["# Commands", f"The output of `segcal COMMAND --help`. Exit codes: {codes}."]
    return "\n\n".join([*parts, *_commands(get_command(app), "segcal")]) + "\n"


def _commands(command: Any, name: str) -> Iterator[str]:
    """The sections of a command, or of a group and its commands."""
    context = Context(command, info_name=name)
    inner = getattr(command, "commands", {})
    shown = [each for each in command.get_params(context) if each.name != "help" and each.get_help_record(context)]
    yield f"{'#' * (1 + max(1, name.count(' ')))} `{name}`"
    yield " ".join(command.help.split())
    if command.epilog:
        yield f"```text\n{command.epilog.removeprefix('Example: ')}\n```"
    for panel, parameters in groupby(shown, key=lambda each: getattr(each, "rich_help_panel", None) or "Arguments"):
        records = [each.get_help_record(context) for each in parameters]
        table = [f"| `{key.strip()}` | {' '.join(text.replace('|', '&#124;').split())} |" for key, text in records]
        yield "\n".join([f"| {panel} | |", "| --- | --- |", *table])
    for key, each in inner.items():
        yield from _commands(each, f"{name} {key}")


def notebook_page(path: Path) -> tuple[str, dict[str, bytes]]:
    """A stored notebook as Markdown, and its pictures by the names that it gives them."""
    pictures: dict[str, bytes] = {}

    def shown(output: dict[str, Any]) -> str:
        data = output.get("data", {"text/plain": output.get("text", "")})
        if "image/png" in data:
            name = f"{path.stem}-{len(pictures) + 1}.png"
            pictures[name] = base64.b64decode("".join(data["image/png"]))
            return f"![What the cell above shows]({name})"
        if "text/html" in data:
            return "".join(data["text/html"])
        return "```text\n" + "".join(data["text/plain"]).rstrip() + "\n```"

    parts = []
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        source = "".join(cell["source"])
        parts.append(source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```")
        parts += map(shown, cell.get("outputs", ()))
    return "\n\n".join(parts) + "\n", pictures


class Docstrings(Extension):
    """Docstrings, which are written to be read as plain text, as Markdown, and the fields of a class as a table."""

    def on_object(self, *, obj: Object, **kwargs: Any) -> None:
        if obj.docstring:
            obj.docstring.value = to_markdown(obj.docstring.value)

    def on_class(self, *, cls: Class, **kwargs: Any) -> None:
        unsigned = any(str(base).endswith(("NamedTuple", "Section")) for base in cls.bases)  # no signature lists fields
        if not unsigned and not any("dataclass" in str(each.value) for each in cls.decorators):
            return
        fields = [each for each in cls.attributes.values() if each.annotation and "property" not in each.labels]
        shown = [each for each in fields if unsigned or each.docstring]
        rows = [f"| `{each.name}` | `{_declared(each)}` | {_words(each.docstring)} |" for each in shown]
        if rows and cls.docstring:
            cls.docstring.value += "\n\n| field | | |\n| --- | --- | --- |\n" + "\n".join(rows)
            for each in shown:
                each.docstring = None  # said in the table


def _declared(field: Attribute) -> str:
    """Type and default of a field."""
    default = "" if field.value is None else f" = {field.value}"
    return " ".join(f"{field.annotation or ''}{default}".split())


def _words(docstring: Docstring | None) -> str:
    return "" if docstring is None else " ".join(docstring.value.replace("|", "&#124;").split())


def to_markdown(docstring: str) -> str:
    """Doctests as code, and lines that begin with the name of an option, as `bins: how many`, as a list."""
    parts = []
    for part in re.split(r"\n\s*\n", docstring):
        if part.startswith(">>>"):
            part = f"```pycon\n{part}\n```"
        elif re.match(OPTION, part):
            part = re.sub(OPTION, r"- `\1`: ", part, flags=re.MULTILINE)
        parts.append(part)
    return "\n\n".join(parts)
