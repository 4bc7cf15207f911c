"""The packages of segcal and which of them import which, as a picture: `python docs/import_graph.py` writes it anew.

The picture is in ARCHITECTURE.md. A test fails when it is not the one that the source gives.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "src" / "segcal"
PICTURE = ROOT / "docs" / "images" / "import-graph.svg"

# From the bottom up: each imports only what stands in earlier rows.
LAYERS = (
    ("errors",),
    ("_io",),
    ("binning",),
    ("kernels", "statistics"),
    ("collect", "metrics"),
    ("losses", "scores", "volumes"),
    ("decisions", "calibrators", "datasets", "doctor"),
    ("evaluation",),
    ("comparison", "lesions", "training"),
    ("plots",),
    ("viewer", "calibration"),
    ("report",),
    ("quality",),
    ("study", "adapters", "audit", "review"),
    ("cli",),
    ("__main__",),
)


def module_name(path: Path) -> str:
    """As it is imported; of a package, its own name.

    >>> module_name(PACKAGE / "evaluation" / "__init__.py"), module_name(PACKAGE / "metrics.py")
    ('segcal.evaluation', 'segcal.metrics')
    """
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def part_of(module: str) -> str:
    """The package, or the module of the spine, that a module belongs to; empty for segcal itself."""
    return [*module.split("."), ""][1]


def imported(path: Path) -> Iterator[str]:
    """Every module that a file imports when it runs, at its top or inside functions; not those for type checkers."""
    yield from _imported(ast.parse(path.read_text(encoding="utf-8")))


def _imported(node: ast.AST) -> Iterator[str]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and isinstance(child.test, ast.Name) and child.test.id == "TYPE_CHECKING":
            continue
        if isinstance(child, ast.Import):
            yield from (alias.name for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            assert child.level == 0, "imports are absolute"
            for alias in child.names:
                whole = f"{child.module}.{alias.name}"
                yield whole if whole in modules() else str(child.module)
        else:
            yield from _imported(child)


@cache
def modules() -> dict[str, Path]:
    """Every module of segcal, and its file."""
    return {module_name(path): path for path in sorted(PACKAGE.rglob("*.py"))}


@cache
def graph() -> dict[str, frozenset[str]]:
    """For each module, the modules of segcal that it imports."""
    return {
        name: frozenset(other for other in imported(path) if other in modules() and other != name)
        for name, path in modules().items()
    }


def package_edges() -> set[tuple[str, str]]:
    """(package, package it imports), without segcal itself, whose names are loaded on first use."""
    pairs = {(part_of(name), part_of(other)) for name, others in graph().items() for other in others}
    return {(one, other) for one, other in pairs if one and other and one != other}


def cycle() -> list[str]:
    """Modules that import each other in a circle, the first found; empty if there is none."""
    done: set[str] = set()

    def search(name: str, way: list[str]) -> list[str]:
        if name in way:
            return [*way[way.index(name) :], name]
        if name in done:
            return []
        for other in sorted(graph()[name]):
            if found := search(other, [*way, name]):
                return found
        done.add(name)
        return []

    return next((found for name in sorted(graph()) if (found := search(name, []))), [])


ROW, BOX, GAP, MARGIN = 52, 112, 24, 12


def draw() -> str:
    """The picture as SVG: a row for each layer, the lowest at the bottom, an arrow from importer to imported.

    Arrows that follow from others are left out, as are those to `errors` and `_io`, which all but everything imports.
    """
    width = 2 * MARGIN + max(len(layer) for layer in LAYERS) * (BOX + GAP)
    height = 2 * MARGIN + len(LAYERS) * ROW
    place: dict[str, tuple[float, float]] = {}
    for i, layer in enumerate(LAYERS):
        left = (width - len(layer) * (BOX + GAP) + GAP) / 2
        for j, name in enumerate(layer):
            place[name] = (left + j * (BOX + GAP) + BOX / 2, height - MARGIN - ROW * (i + 0.5))
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif">',
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="6" markerHeight="6" orient="auto">'
        '<path d="M0 0L8 4L0 8z" fill="#777"/></marker></defs>',
        f'<rect width="{width}" height="{height}" fill="#fff"/>',
    ]
    for one, other in sorted(_reduced(package_edges())):
        (x1, y1), (x2, y2) = place[one], place[other]
        lines.append(f'<path d="M{x1:g} {y1 + 16:g}L{x2:g} {y2 - 17:g}" stroke="#777" marker-end="url(#tip)"/>')
    for name, (x, y) in place.items():
        lines.append(
            f'<rect x="{x - BOX / 2:g}" y="{y - 16:g}" width="{BOX}" height="32" rx="5" fill="#eaf1fb" '
            f'stroke="#4a76b8"/><text x="{x:g}" y="{y + 5:g}" font-size="14" text-anchor="middle">{name}</text>'
        )
    return "\n".join([*lines, "</svg>", ""])


def _reduced(edges: set[tuple[str, str]]) -> set[tuple[str, str]]:
    """Without edges that a longer way implies."""
    to: dict[str, set[str]] = {}
    for one, other in edges:
        if other not in ("errors", "_io") or one == "_io":
            to.setdefault(one, set()).add(other)

    def reach(name: str) -> set[str]:
        return set().union(*({other} | reach(other) for other in to.get(name, ())))

    return {(one, other) for one in to for other in to[one] if not any(other in reach(by) for by in to[one] - {other})}


if __name__ == "__main__":
    PICTURE.write_text(draw(), encoding="utf-8")
    print(f"the picture is {PICTURE.relative_to(ROOT)}")
