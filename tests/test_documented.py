"""Every public name says what it takes, and shows it in an example that `pytest --doctest-modules` runs."""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from contextlib import suppress
from importlib import import_module

import pytest

import segcal
from segcal.calibrators import CALIBRATORS

PUBLIC = {name: getattr(segcal, name) for name in segcal.__all__ if not name.startswith("__")}
SPINE = ("binning", "statistics", "collect", "metrics", "scores", "losses", "calibrators")
METHODS = {
    f"{name}.{attribute}": inspect.unwrap(getattr(kind, attribute))
    for name, kind in PUBLIC.items()
    if inspect.isclass(kind) and kind.__module__.split(".")[1] in SPINE
    for attribute, value in vars(kind).items()
    if not attribute.startswith("_") and callable(getattr(value, "__func__", value))
}


CONCRETE = dict(CALIBRATORS)
for module, names in {
    "monai": ("HardL1ACELoss", "SoftL1ACELoss", "CalibrationErrorMetric", "CalibrationError"),
    "torchmetrics": ("CalibrationError",),
    "lightning": ("CalibrationMonitor",),
}.items():
    with suppress(ImportError):  # an extra that is not installed here
        adapter = import_module(f"segcal.adapters.{module}")
        CONCRETE |= {f"{module} {name}": getattr(adapter, name) for name in names}


def parameters_of(thing: object) -> list[str]:
    """What a call takes; of a class that inherits its constructor, nothing."""
    if inspect.isclass(thing) and not {"__init__", "__new__"} & set(vars(thing)):
        return []
    return [name for name in inspect.signature(thing).parameters if name != "self"]  # type: ignore[arg-type]


def fields_explained(thing: object) -> set[str]:
    """Fields of a class with a docstring of their own below them."""
    if not inspect.isclass(thing):
        return set()
    (tree,) = ast.parse(textwrap.dedent(inspect.getsource(thing))).body
    assert isinstance(tree, ast.ClassDef)
    return {
        field.target.id
        for field, after in zip(tree.body, tree.body[1:], strict=False)
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
        if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
    }


def not_explained(thing: object) -> list[str]:
    """Parameters without a line that begins with their name, as `bins: how many`."""
    lines = re.findall(r"^((?:[a-z_]+, )*[a-z_]+): ", inspect.getdoc(thing) or "", re.MULTILINE)
    named = {name for line in lines for name in line.split(", ")}
    return [name for name in parameters_of(thing) if name not in named | fields_explained(thing)]


@pytest.mark.parametrize("name", PUBLIC)
def test_every_parameter_is_explained(name):
    assert not_explained(PUBLIC[name]) == []


@pytest.mark.parametrize("name", PUBLIC)
def test_every_name_has_an_example(name):
    assert ">>> " in (inspect.getdoc(PUBLIC[name]) or "")


@pytest.mark.parametrize("name", CONCRETE)
def test_calibrators_and_adapters_explain_their_parameters(name):
    assert inspect.getdoc(CONCRETE[name])
    assert not_explained(CONCRETE[name]) == []


@pytest.mark.parametrize("name", METHODS)
def test_every_method_is_explained(name):
    documented = inspect.getdoc(METHODS[name])
    assert documented
    for parameter in parameters_of(METHODS[name]):
        assert re.search(rf"\b{parameter}\b", documented), f"{name} does not say what {parameter} is"


def test_a_parameter_without_a_word_is_found():
    def half(stats, bins):
        """Something.

        stats: the statistics.
        """

    assert not_explained(half) == ["bins"]
