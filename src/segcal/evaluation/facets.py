"""Further sums of a case beside its own, as those against each of its raters: how they are kept and put together.

A facet has a name such as "raters/anna", which is also the folder of its results. Its sums are those of any case, so
that whatever works on an evaluation works on a facet. All in numpy, as the workers are.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

from segcal.errors import SegcalError
from segcal.evaluation.measure import Measured
from segcal.evaluation.options import Options
from segcal.evaluation.rated import Votes
from segcal.evaluation.sums import CaseSums

KINDS = ("raters", "bands")
"""Folders of results that hold facets."""


def save_measured(measured: Measured, path: Path, case: str, sources: Sequence[Path]) -> None:
    """Write the sums of a case, those of its facets before: who finds the first finds all."""
    for i, sums in enumerate(measured.facets.values()):
        sums.save(_place(path, str(i)), case, sources)
    if measured.votes is not None:
        measured.votes.save(votes_place(path))
    measured.sums.save(path, case, sources, doubts=measured.doubts, facets=tuple(measured.facets))


def facet_files(path: Path) -> dict[str, Path]:
    """By name, the files of the facets of a case whose own sums are in `path`."""
    return {name: _place(path, str(i)) for i, name in enumerate(CaseSums.facets_in(path))}


def votes_place(path: Path) -> Path:
    """Where the votes of a case are whose sums are in `path`."""
    return _place(path, "votes")


def are_whole(path: Path, options: Options) -> bool:
    """Whether the sums of a case and of all its facets are there, unspoilt."""
    if not CaseSums.are_in(path, options):
        return False
    with suppress(SegcalError, OSError):
        facets = facet_files(path)
        if any(name.startswith("raters/") for name in facets):
            Votes.load(votes_place(path))
        return all(CaseSums.are_in(each, options) for each in facets.values())
    return False


def all_files(path: Path) -> list[Path]:
    """The files of a case and of its facets."""
    return [path, votes_place(path), *facet_files(path).values()]


def remove_facets(out: Path, kept: Iterable[str] = ()) -> None:
    """Remove facets of earlier results, which nothing else tells from new ones; folders of others stay."""
    stay = set(kept)
    for kind in KINDS:
        for folder in (out / kind).glob("*") if (out / kind).is_dir() else ():
            if f"{kind}/{folder.name}" not in stay and (folder / "evaluation.json").is_file():
                shutil.rmtree(folder)
        with suppress(OSError):
            (out / kind).rmdir()  # where nothing is left


def _place(path: Path, which: str) -> Path:
    return path.with_name(f"{path.stem}.{which}.npz")
