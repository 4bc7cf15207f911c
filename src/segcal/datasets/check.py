"""Read every file of a dataset and say what is wrong with it, before a training does.

Faults are problems, one sentence each. What merely differs from the paper, such as fewer cases, is a note.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from nibabel.orientations import aff2axcodes

from segcal._io.jobs import failure_of
from segcal.datasets.dataset import DataCase, Dataset, Problem
from segcal.errors import FileError, GridError
from segcal.volumes.arrays import Geometry, StoredArray, read_array
from segcal.volumes.cases import whole_numbers as whole_numbers
from segcal.volumes.grids import fit
from segcal.volumes.images import one_channel

Box = tuple[tuple[float, ...], tuple[float, ...]]
_TIMES = "\N{MULTIPLICATION SIGN}"
_codes: Any = aff2axcodes
_PIECE_VOXELS = 1 << 22
_MOST_THREADS = 4  # each holds a case in memory


@dataclass(frozen=True)
class Check:
    """What is wrong with a dataset, and what it holds."""

    problems: tuple[Problem, ...]
    notes: tuple[str, ...]
    cases: int
    patients: int
    unlabelled: int
    spacing_mm: Box | None
    """Smallest and largest voxel size along each axis, as the files have them; None: no image could be read."""
    shapes: Box | None
    """The same of the number of voxels."""
    present: dict[str, int]
    """Cases that hold each class, background left out."""
    missing: dict[str, tuple[str, ...]]
    """Classes that a case does not hold, for each case that lacks one."""
    read: int
    """Cases whose labels could be read."""

    @property
    def missing_share(self) -> float:
        """Share of the cases read that lack at least one class; NaN where none was read."""
        return len(self.missing) / self.read if self.read else float("nan")

    def facts(self) -> list[tuple[str, str]]:
        """The numbers as rows of a name and a value, for people."""
        rows = [("cases", str(self.cases)), ("patients", str(self.patients)), ("without labels", str(self.unlabelled))]
        if self.spacing_mm is not None:
            rows.append(("voxel size, mm", _range(self.spacing_mm)))
        if self.shapes is not None:
            rows.append(("voxels", _range(self.shapes)))
        rows += [(f"cases with {name}", str(count)) for name, count in self.present.items()]
        rows.append(("cases that lack a class", f"{len(self.missing)} ({self.missing_share:.1%})"))
        return rows


@dataclass(frozen=True)
class _Found:
    """What the files of one case tell."""

    problems: list[Problem]
    shape: tuple[int, ...] | None = None
    zooms: tuple[float, ...] | None = None
    contradicts: bool = False  # its header has two voxel sizes
    values: frozenset[int] | None = None  # None: the labels could not be read
    doubtful: bool = False  # its headers leave open where the voxels lie


def check_dataset(
    dataset: Dataset, *, strict_grid: bool = False, progress: Callable[[int, int], None] = lambda done, total: None
) -> Check:
    """Every file read whole: is it complete, on the grid of its case, and of known label values?

    Cases whose headers leave open where their voxels lie are a note; with `strict_grid`, each is a problem.
    """
    cases = (*dataset.cases, *dataset.unlabelled)
    found = []
    pool = ThreadPoolExecutor(min(_MOST_THREADS, os.cpu_count() or 1))
    try:
        for one in pool.map(partial(_check_case, dataset), cases):
            found.append(one)
            progress(len(found), len(cases))
    finally:
        pool.shutdown(cancel_futures=True)  # Ctrl-C does not wait for the cases left
    doubtful = [case.name for case, one in zip(cases, found, strict=True) if one.doubtful]
    doubts = [Problem(name, "headers must say where the voxels lie; one is bare, or they differ.") for name in doubtful]
    known = _known_values(dataset)
    names = dict(zip(dataset.values, dataset.classes, strict=True))
    held = {
        case.name: {names[known[value]] for value in one.values if value in known}
        for case, one in zip(cases, found, strict=True)
        if one.values is not None
    }
    foreground = [name for value, name in names.items() if value != 0]
    present = {name: sum(name in classes for classes in held.values()) for name in foreground}
    missing = {case: tuple(name for name in foreground if name not in classes) for case, classes in held.items()}
    return Check(
        problems=(
            *dataset.problems,
            *(problem for one in found for problem in one.problems),
            *(doubts if strict_grid else ()),
        ),
        notes=(*dataset.notes, *_notes(dataset, present, found), *_doubt_notes(() if strict_grid else doubtful)),
        cases=len(dataset.cases),
        patients=len(dataset.patients),
        unlabelled=len(dataset.unlabelled),
        spacing_mm=_box([one.zooms for one in found if one.zooms is not None]),
        shapes=_box([one.shape for one in found if one.shape is not None]),
        present=present,
        missing={case: classes for case, classes in missing.items() if classes},
        read=len(held),
    )


def _check_case(dataset: Dataset, case: DataCase) -> _Found:
    """Check the files of one case; an error that nobody expected is a problem of the case."""
    try:
        return _read_case(dataset, case)
    except Exception as error:
        return _Found([Problem(case.name, failure_of(case.name, error).message)])


def _read_case(dataset: Dataset, case: DataCase) -> _Found:
    problems: list[Problem] = []
    images = [_read(case, path, problems) for path in case.images]
    label = None if case.label is None else _read(case, case.label, problems)
    for path, image in zip(case.images, images, strict=True):
        if image is not None:
            problems += [Problem(case.name, what) for what in _image_faults(path, image, dataset, case)]
    whole = [(path, stored) for path, stored in zip(case.images, images, strict=True) if stored is not None]
    if label is not None and case.label is not None:
        whole.insert(0, (case.label, label))
    doubtful = not problems and _off_grid(case, whole, problems)
    values = None if label is None or case.label is None else _values(case, case.label, label, problems)
    if values is not None:
        unknown = sorted(values - _known_values(dataset).keys())
        if unknown:
            allowed = ", ".join(map(str, dataset.values))
            problems.append(Problem(case.name, f"labels must be among {allowed}; they hold {_some(unknown)}."))
    first = next((image for image in images if image is not None), None)
    if first is None or first.geometry is None:
        space = None if first is None else one_channel(first, len(dataset.channels)).values.shape
        return _Found(problems, space and (*space, 1)[:3], values=values)
    shape, zooms = first.values.shape[:3], first.geometry.zooms[:3]
    return _Found(problems, shape, zooms, _contradicts(first.geometry), values, doubtful)


def _read(case: DataCase, path: Path, problems: list[Problem]) -> StoredArray | None:
    """The array in a file; where it cannot be read, None and a problem."""
    try:
        return read_array(path)
    except FileError as error:
        problems.append(Problem(case.name, str(error)))
    except (OSError, MemoryError) as error:
        problems.append(Problem(case.name, f"{path.name} must be readable; {error}."))
    return None


def _image_faults(path: Path, image: StoredArray, dataset: Dataset, case: DataCase) -> list[str]:
    faults = []
    wanted = 1 if len(case.images) > 1 else len(dataset.channels)
    shape = image.values.shape
    if image.picture:
        space = one_channel(image, wanted).values.ndim
        channels = len(image.values) if space < len(shape) else 1
        return [f"{path.name} must have {wanted} channels; it is {_size(shape)}."] if channels != wanted else []
    channels = shape[3] if len(shape) == 4 else 1
    if len(shape) not in (3, 4) or channels != wanted:
        must = f"three axes{f' and a last one of {wanted} channels' if wanted > 1 else ''}"
        faults.append(f"{path.name} must have {must}; it is {_size(shape)}.")
    zooms = () if image.geometry is None else image.geometry.zooms[:3]
    if not all(np.isfinite(zoom) and zoom > 0 for zoom in zooms):
        faults.append(f"{path.name} must have voxel sizes above zero; its header has {_size(zooms)} mm.")
    return faults


def _off_grid(case: DataCase, files: Sequence[tuple[Path, StoredArray]], problems: list[Problem]) -> bool:
    """Whether it is doubtful that the files lie on the grid of the first, the label where there is one.

    Those that do not are problems.
    """
    doubtful = False
    for path, stored in files[1:]:
        first_path, first = files[0]
        try:
            doubtful |= bool(fit(case.name, first, [stored])[2].doubts)
        except GridError:
            problems.append(Problem(case.name, off_grid(path, stored, first_path, first)))
    return doubtful


def off_grid(path: Path, stored: StoredArray, first_path: Path, first: StoredArray) -> str:
    """The sentence on two files of a case that lie on two grids."""
    return (
        f"{path.name} and {first_path.name} must lie on one grid; they are {_place(stored)} and "
        f"{_place(first)}. Resample one of them, or correct its header."
    )


def _values(case: DataCase, path: Path, label: StoredArray, problems: list[Problem]) -> frozenset[int] | None:
    """Every value that the labels hold, read in pieces; None and a problem where they are no whole numbers."""
    pieces = min(label.values.shape[-1], 1 + label.values.size // _PIECE_VOXELS)
    values: set[int] = set()
    try:
        for piece in np.array_split(label.values, pieces, axis=-1):
            values.update(np.unique(whole_numbers(path.name, piece[np.newaxis], label)).tolist())
    except FileError as error:
        problems.append(Problem(case.name, str(error)))
        return None
    return frozenset(values)


def _known_values(dataset: Dataset) -> dict[int, int]:
    """Values that label files may hold, and what they mean."""
    aliases = dataset.regions.aliases if dataset.regions is not None else ()
    return {value: value for value in dataset.values} | dict(aliases)


def _notes(dataset: Dataset, present: dict[str, int], found: Sequence[_Found]) -> list[str]:
    notes = []
    number = len(dataset.patients)
    if len(dataset.paper) == 2:
        number -= len({case.patient for case in dataset.cases if case.name in dataset.official_test})
    if dataset.paper and number != sum(dataset.paper):
        beside = " beside its test set" if len(dataset.paper) == 2 else ""
        notes.append(f"The paper has {sum(dataset.paper)} patients{beside}; {number} are here.")
    if dataset.split_note:
        notes.append(dataset.split_note)
    notes += [f"No case holds {name}." for name, count in present.items() if count == 0]
    contradicting = sum(one.contradicts for one in found)
    if contradicting:
        notes.append(
            f"Headers whose affine has other voxel sizes than those stored beside it: {contradicting}. "
            f"The latter count."
        )
    return notes


def _doubt_notes(cases: Sequence[str]) -> list[str]:
    if not cases:
        return []
    more = f" and {len(cases) - 5} more" if len(cases) > 5 else ""
    return [
        f"Headers of image and label that leave open whether they lie in one place: {', '.join(cases[:5])}{more}. "
        f"--strict-grid makes them problems."
    ]


def _contradicts(geometry: Geometry) -> bool:
    if not geometry.affines:
        return False
    lengths = np.linalg.norm(geometry.affines[0][:3, :3], axis=0)
    return not np.allclose(lengths, geometry.zooms[:3], rtol=1e-3)


def _box(rows: Sequence[tuple[float, ...]]) -> Box | None:
    columns = list(zip(*(row for row in rows if len(row) == 3), strict=True))
    if not columns:
        return None
    return tuple(map(min, columns)), tuple(map(max, columns))


def _range(box: Box) -> str:
    return " to ".join(_size(end) for end in box) if box[0] != box[1] else _size(box[0])


def _size(lengths: Sequence[float]) -> str:
    return _TIMES.join(f"{length:.4g}" for length in lengths)


def _some(values: Sequence[int]) -> str:
    return ", ".join(map(str, values[:5])) + (f" and {len(values) - 5} more" if len(values) > 5 else "")


def _place(stored: StoredArray) -> str:
    """Size, voxel size, directions and origin."""
    geometry = stored.geometry
    if geometry is None:
        return _size(stored.values.shape)
    place = f"{_size(stored.values.shape)} at {_size(geometry.zooms[:3])} mm"
    if geometry.affines:
        affine = geometry.affines[0]
        codes = "".join(code or "?" for code in _codes(affine))
        place += f", {codes} from ({', '.join(f'{x:.5g}' for x in affine[:3, 3])})"
    return place
