"""Imports point one way, and nothing heavy is loaded before it is needed."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import typer

import segcal

sys.path.insert(0, str(Path(__file__).parents[1] / "docs"))

import import_graph

ROOT = Path(__file__).parents[1]
HEIGHT = {name: height for height, layer in enumerate(import_graph.LAYERS) for name in layer}
SPINE = {name for name in HEIGHT if HEIGHT[name] <= HEIGHT["losses"]} - {"volumes"}
SPINE_NEEDS = {"torch", "numpy", "numba", "llvmlite", "filelock"}  # beyond the standard library


def test_no_modules_import_each_other_in_a_circle():
    assert import_graph.cycle() == []


def test_imports_between_packages_point_one_way():
    parts = {import_graph.part_of(name) for name in import_graph.modules()} - {""}
    assert parts == set(HEIGHT), "give each package its row in docs/import_graph.py"
    wrong = [(one, other) for one, other in import_graph.package_edges() if HEIGHT[other] >= HEIGHT[one]]
    assert wrong == []


def test_the_spine_takes_nothing_from_the_package_itself():
    for name, path in import_graph.modules().items():
        if "segcal" in import_graph.imported(path):
            assert import_graph.part_of(name) not in SPINE | {"_io"}, name


@pytest.mark.parametrize("part", sorted(SPINE))
def test_the_spine_needs_torch_and_no_more(part):
    for name, path in import_graph.modules().items():
        if import_graph.part_of(name) == part:
            roots = {other.partition(".")[0] for other in import_graph.imported(path)}
            assert roots <= SPINE_NEEDS | {"segcal"} | set(sys.stdlib_module_names), name


def test_the_rules_see_imports_inside_functions_and_circles(tmp_path, monkeypatch):
    wrong = tmp_path / "wrong.py"
    wrong.write_text(
        "from typing import TYPE_CHECKING\n"
        "if TYPE_CHECKING:\n    from segcal.cli import app\n"
        "def f():\n    from segcal.losses import ACELoss\n    import monai.losses\n    from segcal import metrics\n"
    )
    assert list(import_graph.imported(wrong)) == ["typing", "segcal.losses", "monai.losses", "segcal.metrics"]
    made_up = {"a": frozenset({"b"}), "b": frozenset({"c"}), "c": frozenset({"b"})}
    monkeypatch.setattr(import_graph, "graph", lambda: made_up)
    assert import_graph.cycle() == ["b", "c", "b"]


def test_the_picture_of_imports_is_current():
    told = "run python docs/import_graph.py"
    assert import_graph.PICTURE.read_text(encoding="utf-8") == import_graph.draw(), told


def test_the_command_line_has_a_module_for_each_package_with_commands():
    packages = {path.parent.name for path in (ROOT / "src" / "segcal").glob("*/__init__.py")} - {"cli"}
    with_commands = {
        path.stem for path in (ROOT / "src" / "segcal" / "cli").glob("*.py") if "command(cls" in path.read_text()
    }
    assert with_commands <= packages


def test_the_map_of_packages_has_the_commands_in_the_order_of_help():
    from segcal.cli import app

    table = re.findall(
        r"^\| `.* \| (`[^|]+`) \|$", (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8"), re.MULTILINE
    )
    told = [name for cell in table for name in re.findall(r"`([a-z-]+)`", cell)]  # not `calibrate methods`
    group = typer.main.get_command(app)
    assert told == group.list_commands(typer.Context(group))


@pytest.mark.parametrize("name", segcal.__all__)
def test_every_public_name_is_there(name):
    assert getattr(segcal, name) is not None
    assert name in {*dir(segcal), "__version__"}


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'segcal' has no attribute 'nothing'"):
        _ = segcal.nothing


@pytest.mark.parametrize(
    "statement",
    ["import segcal", "from segcal.cli import app; app(['--help'], standalone_mode=False)", "import segcal.errors"],
    ids=["import", "help", "errors"],
)
def test_nothing_heavy_is_imported_before_it_is_needed(statement):
    heavy = ("torch", "numpy", "numba", "monai", "matplotlib", "scipy", "nibabel", "pydantic")
    code = f"import sys; {statement}; print([name for name in {heavy!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
