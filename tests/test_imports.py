"""Imports point one way, and nothing heavy is loaded before it is needed."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import segcal

PACKAGE = Path(segcal.__file__).parent

# Each layer may import itself and the layers before it; layers of one line stand side by side.
LAYERS: list[dict[str, set[str]]] = [
    {"spine": {"errors", "ending", "parsing", "files", "words", "binning", "statistics", "collect", "kernels"}},
    {"numbers": {"metrics", "overlap", "regions", "intervals", "diagrams"}},
    {
        "learning": {"losses", "scaling"},
        "showing": {"colours", "evaluation", "matching", "comparison", "remarks", "tables", "plots", "report"},
    },
    {
        "doing": {
            "volumes",
            "doubts",
            "measure",
            "naming",
            "results",
            "cohort",
            "maps",
            "calibrated",
            "calibration",
            "demo",
            "datasets",
            "config",
            "prepare",
            "checkpoint",
            "distributed",
            "inference",
            "runs",
            "training",
            "study",
        }
    },
    {"adapters": {"adapters"}},
    {"command line": {"cli", "__main__"}},
]
HEIGHT = {name: height for height, layers in enumerate(LAYERS) for layer in layers for name in layers[layer]}
LAYER = {name: layer for layers in LAYERS for layer, names in layers.items() for name in names}
SCIPY = {("intervals", "scipy"), ("scaling", "scipy")}
SPINE_NEEDS = {"torch", "numpy", "numba", "triton"}  # beyond the standard library

MODULES = sorted(path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py")


def part_of(path: Path) -> str:
    """The module or folder of the package that a file belongs to."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported(path: Path) -> Iterator[str]:
    """Every module that a file imports, at its top or inside functions."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name}: imports are absolute"
            if node.module == "segcal":
                yield from (f"segcal.{alias.name}" for alias in node.names)
            else:
                yield node.module or ""


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_a_module_imports_only_its_own_layer_and_those_below(path):
    own = part_of(path)
    assert own in HEIGHT, f"give {own} a layer in this test"
    for name in imported(path):
        root, _, rest = name.partition(".")
        if root == "segcal":
            other = rest.partition(".")[0]
            if other not in HEIGHT:  # the package itself, which offers everything
                assert other == "__version__" or HEIGHT[own] >= HEIGHT["cohort"], f"{own} imports the whole package"
                continue
            assert HEIGHT[other] <= HEIGHT[own], f"{own} ({LAYER[own]}) imports {other} ({LAYER[other]})"
            side_by_side = HEIGHT[other] == HEIGHT[own] and LAYER[other] != LAYER[own]
            assert not side_by_side, f"{own} ({LAYER[own]}) imports {other} ({LAYER[other]})"
        elif LAYER[own] in ("spine", "numbers", "learning") and (own, root) not in SCIPY:
            assert root in SPINE_NEEDS | set(sys.stdlib_module_names), f"{own} ({LAYER[own]}) imports {root}"


def test_the_rule_finds_a_wrong_import(tmp_path):
    wrong = tmp_path / "wrong.py"
    wrong.write_text("def f():\n    from segcal.losses import ACELoss\n    import monai.losses\n")
    assert list(imported(wrong)) == ["segcal.losses", "monai.losses"]


@pytest.mark.parametrize("name", segcal.__all__)
def test_every_public_name_is_there(name):
    assert getattr(segcal, name) is not None
    assert name in dir(segcal)


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
