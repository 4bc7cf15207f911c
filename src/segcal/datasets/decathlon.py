"""Any task of the Medical Segmentation Decathlon, as its dataset.json describes it.

The files that it lists count, not the numbers that it gives.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any
from unicodedata import category

from segcal.datasets.dataset import DataCase, Dataset, Problem
from segcal.datasets.layout import NIFTI, channel_names, find_root, nifti_files, read_json, wrong_layout
from segcal.datasets.recipes import fitted_recipe
from segcal.errors import FileError
from segcal.volumes.regions import read_class_names

TITLE = "Medical Segmentation Decathlon, any task"
LAYOUT = "TaskNN_Name/{imagesTr,labelsTr,imagesTs}/name_001.nii.gz with dataset.json"


def open_decathlon(root: Path) -> Dataset:
    """The task in this folder, or the only one in it."""
    root = find_root(root, _fits, layout=LAYOUT, parts=("imagesTr", "labelsTr", "imagesTs"))
    content = read_json(root / "dataset.json")
    names = read_class_names(str(root / "dataset.json"))
    cases, problems = _labeled(root, content)
    if not cases:
        raise wrong_layout(root, LAYOUT)
    tests = sorted({root / path for path in _listed(root, content, "test") if _is_path(path)})
    faults = {path: _fault(root, path) for path in tests}
    problems += [fault for fault in faults.values() if fault is not None]
    channels = channel_names(root / "dataset.json", content, "modality")
    values = tuple(sorted({0, *names}))
    return Dataset(
        name="decathlon",
        title=f"Medical Segmentation Decathlon, {content.get('name', root.name)}",
        root=root,
        channels=channels,
        classes=tuple(names.get(value, "background") for value in values),
        values=values,
        cases=cases,
        unlabelled=tuple(
            DataCase(_stem(path), _stem(path), (path,), None) for path, fault in faults.items() if fault is None
        ),
        recipe=fitted_recipe(cases, channels),
        notes=_notes(root, content, cases, problems),
        problems=tuple(sorted(problems)),
    )


def _fits(folder: Path) -> bool:
    return (folder / "dataset.json").is_file() and (folder / "imagesTr").is_dir()


def _labeled(root: Path, content: dict[str, Any]) -> tuple[tuple[DataCase, ...], list[Problem]]:
    """Pairs that dataset.json lists and that are there, and what is missing."""
    cases: dict[str, DataCase] = {}
    problems = []
    for entry in _listed(root, content, "training"):
        drawn = entry.get("label") if isinstance(entry, dict) else None
        drawn = drawn if isinstance(drawn, list) and drawn else [drawn]  # of several raters
        if not (isinstance(entry, dict) and all(map(_is_path, (entry.get("image"), *drawn)))):
            raise FileError(
                f"{root / 'dataset.json'}: training must list an image and a label each, or the labels of several "
                f"raters; got {entry!r}. Correct the file."
            )
        image, (label, *others) = root / entry["image"], [root / path for path in drawn]
        name = _stem(image)
        fault = _fault(root, image, label, *others)
        if name in cases:
            problems.append(Problem(name, "the case must be listed once under training; it is listed again."))
        elif fault is not None:
            problems.append(fault)
        else:
            cases[name] = DataCase(name, name, (image,), label, tuple(others))
    return tuple(cases[name] for name in sorted(cases)), problems


def _is_path(text: object) -> bool:
    """Whether it may be the path of a file: text without line breaks and such, of a length that systems allow."""
    return isinstance(text, str) and len(text) <= 1000 and not any(category(sign) == "Cc" for sign in text)


def _fault(root: Path, *paths: Path) -> Problem | None:
    """Why a case of these files is left out; None where they are all there, in the dataset's own folder."""
    folder = os.path.normpath(root)
    outside = [path for path in paths if not Path(os.path.normpath(path)).is_relative_to(folder)]
    if outside:
        return Problem(_stem(paths[0]), f"{outside[0]} must lie in the dataset's folder, {root}; it does not.")
    absent = [path for path in paths if not os.path.isfile(path)]
    if absent:
        files = " and ".join(f"{path.parent.name}/{path.name}" for path in absent)
        return Problem(_stem(paths[0]), f"{files} must be there, as dataset.json lists it; it is missing.")
    return None


def _listed(root: Path, content: dict[str, Any], key: str) -> list[Any]:
    entries = content.get(key, [])
    if not isinstance(entries, list):
        raise FileError(f"{root / 'dataset.json'}: {key} must be a list of files; got {entries!r}. Correct the file.")
    return entries


def _notes(
    root: Path, content: dict[str, Any], cases: tuple[DataCase, ...], problems: list[Problem]
) -> tuple[str, ...]:
    listed = {case.name for case in cases} | {problem.case for problem in problems}
    unlisted = sorted((nifti_files(root / "imagesTr").keys() | nifti_files(root / "labelsTr").keys()) - listed)
    notes = []
    if unlisted:
        notes.append(f"Cases on disk that dataset.json does not list are left out: {len(unlisted)}.")
    number, entries = content.get("numTraining"), len(_listed(root, content, "training"))
    if number is not None and number != entries:
        notes.append(f"dataset.json speaks of {number} training cases and lists {entries}; the list counts.")
    return tuple(notes)


def _stem(path: Path) -> str:
    extension = next((end for end in NIFTI if path.name.endswith(end)), "")
    return path.name.removesuffix(extension)
