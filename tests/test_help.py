"""Help texts: every option is in a group and explained, every command ends with an example that parses."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from typing import Any

import pytest
from typer import Context
from typer.main import get_command
from typer.testing import CliRunner

from segcal.cli import app
from segcal.cli.panels import OTHER, PANELS


def commands(command: Any, name: str = "segcal") -> Iterator[tuple[str, Any]]:
    """Every command below this one, by its full name."""
    inner = getattr(command, "commands", {})
    if not inner:
        yield name, command
    for key, each in inner.items():
        yield from commands(each, f"{name} {key}")


COMMANDS = dict(commands(get_command(app)))


@pytest.mark.parametrize("name", COMMANDS)
def test_options_are_in_groups_and_explained_in_sentences(name):
    context = Context(COMMANDS[name], info_name=name)
    panels = []
    for each in COMMANDS[name].get_params(context):
        if getattr(each, "hidden", False) or each.name == "help":
            continue
        assert each.help, f"{each.name} needs a help text"
        assert each.help[0].isupper() or each.help.startswith(("argmax", "auto")), each.help
        assert each.help.endswith("."), each.help
        if each.param_type_name == "option":
            assert each.rich_help_panel in PANELS, f"give {each.name} a group in segcal/cli/panels.py"
            panels.append(each.rich_help_panel)
    order = list(PANELS)
    assert panels == sorted(panels, key=order.index)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_ends_with_an_example_of_it(name):
    shown = CliRunner().invoke(app, [*name.split()[1:], "--help"], env={"COLUMNS": "80"}, terminal_width=80)
    assert COMMANDS[name].epilog.startswith(f"Example: {name}")
    assert " ".join(shown.stdout.split()).endswith(" ".join(COMMANDS[name].epilog.split()))
    words = shlex.split(COMMANDS[name].epilog.removeprefix(f"Example: {name}"), posix=True)
    words = words[: words.index(">")] if ">" in words else words
    COMMANDS[name].make_context(name, words)  # refuses options that do not exist and arguments that are missing


def test_without_a_command_the_three_most_useful_ones_are_shown():
    shown = CliRunner().invoke(app, [])
    assert shown.exit_code == 0
    for start in ("segcal audit MAPS", "segcal evaluate MAPS", "segcal calibrate fit MAPS"):
        assert start in shown.stdout
    assert max(map(len, shown.stdout.splitlines())) <= 80


def test_groups_hold_each_option_once():
    names = [name for panel in PANELS.values() for name in panel]
    assert len(names) == len(set(names))
    assert OTHER not in PANELS
