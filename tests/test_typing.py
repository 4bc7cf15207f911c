"""Public names have types that a type checker knows: right use passes, a wrong argument or name is reported."""

from __future__ import annotations

import ast
import importlib
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import segcal
import segcal.training

pytest.importorskip("mypy")

RIGHT = """
import torch
from segcal import Binning, Evaluation, SegmentationLoss, ace, bin_statistics, brier, compare, evaluate

loss = SegmentationLoss(dice=1, ce=1, ace=1, binning=Binning(bins=20, kernel="triangular"), backend="torch")
logits, labels = torch.randn(1, 2, 4, 4, requires_grad=True), torch.randint(0, 2, (1, 4, 4))
total: torch.Tensor = loss(logits, labels) + loss.terms(logits, labels).total
stats = bin_statistics(logits.softmax(1), labels, bins=20)
error: torch.Tensor = ace(stats.pool("case"))
before: Evaluation = Evaluation.load("before.npz")
print(compare({"before": before}), evaluate("maps", "labels", "out"), error, total)
"""
WRONG = {
    'segcal.Binning(bins="twenty")': "arg-type",
    'segcal.SegmentationLoss(backend="cuda")': "arg-type",
    "segcal.SegmentationLoss(dice=1, lambda_ace=2)": "call-arg",
    'segcal.SegmentationLoss()("logits", None)': "arg-type",
    'segcal.ace("statistics")': "arg-type",
    "segcal.bin_statistics([0.5], [1])": "arg-type",
    "segcal.Evaluation.load()": "call-arg",
    "segcal.evaluate(1, 2, 3)": "arg-type",
    "segcal.compare([1, 2])": "arg-type",
    "segcal.SegmentationLos()": "attr-defined",
    "segcal.training.trian()": "attr-defined",
}
MODULES = (segcal, segcal.training)
CACHE = Path(__file__).parents[1] / ".mypy_cache" / "users"  # half a minute without


def names_of(module: ModuleType) -> list[str]:
    return [f"{module.__name__}.{name}" for name in module.__all__]


@pytest.fixture(scope="module")
def told(tmp_path_factory) -> dict[str, list[str]]:
    """What `mypy --strict` says of a user's scripts, line by line."""
    folder = tmp_path_factory.mktemp("typing")
    imports = "import segcal\nimport segcal.training\n"
    revealed = [f"reveal_type({name})" for module in MODULES for name in names_of(module)]
    scripts = {"right": RIGHT, "wrong": imports + "\n".join(WRONG), "names": imports + "\n".join(revealed)}
    for name, code in scripts.items():
        (folder / f"{name}.py").write_text(code)
    options = ("--strict", "--config-file=", "--follow-imports=silent", "--no-error-summary", f"--cache-dir={CACHE}")
    done = subprocess.run(
        [sys.executable, "-m", "mypy", *options, *(f"{name}.py" for name in scripts)],
        cwd=folder,
        env=os.environ | {"MYPYPATH": str(Path(segcal.__file__).parents[1])},
        capture_output=True,
        text=True,
        check=False,
        timeout=500,
    )
    assert done.returncode in (0, 1), done.stdout + done.stderr
    lines = done.stdout.splitlines()
    return {name: [line for line in lines if line.startswith(f"{name}.py:")] for name in scripts}


def test_right_use_passes(told):
    assert told["right"] == []


@pytest.mark.parametrize(("line", "kind"), [(3 + i, kind) for i, kind in enumerate(WRONG.values())], ids=list(WRONG))
def test_wrong_arguments_and_names_are_reported(told, line, kind):
    said = [text for text in told["wrong"] if text.startswith(f"wrong.py:{line}: error:")]
    assert said, told["wrong"]
    assert said[0].endswith(f"[{kind}]")


def test_every_public_name_has_a_type(told):
    types = [re.fullmatch(r'names\.py:\d+: note: Revealed type is "(.*)"', line) for line in told["names"]]
    names = [name for module in MODULES for name in names_of(module)]
    found = dict(zip(names, (match[1] if match else None for match in types), strict=True))
    assert [name for name, shown in found.items() if shown is None or shown == "Any" or "-> Any" in shown] == []
    assert found["segcal.SegmentationLoss"].endswith("-> segcal.losses.SegmentationLoss")
    assert found["segcal.ace"].endswith("-> torch._tensor.Tensor")


def imported_for_checkers(module: ModuleType) -> dict[str, str]:
    """The names that a package imports for type checkers alone, and from where."""
    tree = ast.parse(Path(module.__file__).read_text(encoding="utf-8"))
    blocks = [node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"]
    imports = [node for block in blocks for node in block.body if isinstance(node, ast.ImportFrom)]
    return {alias.asname or alias.name: str(node.module) for node in imports for alias in node.names}


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__)
def test_what_checkers_see_is_what_is_there(module):
    """The imports for type checkers, `__all__`, and the names that are loaded on first use are the same."""
    public = {name for name in module.__all__ if not name.startswith("__")}
    seen = imported_for_checkers(module)
    assert set(seen) == public == set(dir(module)) - {"__version__"}
    for name, home in seen.items():
        assert getattr(module, name) is getattr(importlib.import_module(home), name)
