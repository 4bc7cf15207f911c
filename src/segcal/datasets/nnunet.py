"""Any raw dataset of nnU-Net (version 2, and 1 where it looks the same), as its dataset.json describes it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from segcal.datasets.dataset import Dataset, Problem
from segcal.datasets.layout import (
    IMAGES,
    NIFTI,
    channel_names,
    find_root,
    image_files,
    pair,
    read_json,
    unlabelled,
    wrong_layout,
)
from segcal.datasets.recipes import fitted_recipe
from segcal.errors import ConfigError, FileError
from segcal.volumes.pairing import is_picture
from segcal.volumes.regions import IGNORE, Regions, is_value, label_members, names_by_value

TITLE = "nnU-Net raw dataset, any"
LAYOUT = "DatasetNNN_Name/{imagesTr,labelsTr,imagesTs}/case_0000.nii.gz (labels: case.nii.gz) with dataset.json"
_CHANNEL_FILE = re.compile(r"(?P<case>.+)_(?P<channel>\d{4})")


def open_nnunet(root: Path) -> Dataset:
    """The dataset in this folder, or the only one in it."""
    root = find_root(root, _fits, layout=LAYOUT, parts=("imagesTr", "labelsTr", "imagesTs"))
    path = root / "dataset.json"
    content = read_json(path)
    ending = content.get("file_ending", IMAGES[0])
    if ending not in IMAGES:
        raise ConfigError(f"{path}: file_ending must be one of {', '.join(IMAGES)}; got {ending!r}.")
    endings = NIFTI if ending in NIFTI else (ending,)
    channels = channel_names(path, content, "channel_names", "modality")
    classes, values, regions = classes_of(path, content.get("labels"))
    images, problems = _images(root / "imagesTr", endings, len(channels))
    tests, test_problems = _images(root / "imagesTs", endings, len(channels))
    incomplete = {problem.case for problem in problems}
    labels = {name: file for name, file in image_files(root / "labelsTr", endings).items() if name not in incomplete}
    cases, alone = pair(images, labels)
    if not cases:
        raise wrong_layout(root, LAYOUT)
    return Dataset(
        name="nnunet",
        title=f"nnU-Net raw dataset, {content.get('name', root.name)}",
        root=root,
        channels=channels,
        classes=classes,
        values=values,
        regions=regions,
        cases=cases,
        unlabelled=unlabelled(tests),
        recipe=fitted_recipe(cases, channels),
        problems=tuple(sorted(problems + test_problems + alone)),
    )


def _fits(folder: Path) -> bool:
    images = image_files(folder / "imagesTr")
    return (folder / "dataset.json").is_file() and any(_CHANNEL_FILE.fullmatch(stem) for stem in images)


def _images(folder: Path, endings: Sequence[str], channels: int) -> tuple[dict[str, tuple[Path, ...]], list[Problem]]:
    """Files of each case in the order of the channels, and cases that do not have all of them.

    A picture may hold all channels, as those in color do.
    """
    found: dict[str, dict[int, Path]] = {}
    for stem, path in image_files(folder, endings).items():
        if match := _CHANNEL_FILE.fullmatch(stem):
            found.setdefault(match["case"], {})[int(match["channel"])] = path
    whole, problems = {}, []
    for name, files in sorted(found.items()):
        if sorted(files) == list(range(channels)) or (sorted(files) == [0] and is_picture(files[0])):
            whole[name] = tuple(files[number] for number in sorted(files))
        else:
            numbers = ", ".join(f"{number:04d}" for number in sorted(files))
            what = f"channels 0000 to {channels - 1:04d} must be there, as dataset.json says; found {numbers}."
            problems.append(Problem(name, what))
    return whole, problems


def classes_of(path: Path, labels: Any) -> tuple[tuple[str, ...], tuple[int, ...], Regions | None]:
    """Classes, their values, and the regions where labels are lists of values.

    {"background": 0, "kidney": 1}; regions: {"background": 0, "whole tumour": [1, 2], "core": [2]}; version 1 has
    values and names exchanged, {"0": "background"}.
    """
    if not isinstance(labels, dict) or not labels:
        raise FileError(
            f"{path}: labels must give each class its value, as {{'background': 0}}; got {labels!r}. Correct the file."
        )
    if all(is_value(key) and isinstance(name, str) for key, name in labels.items()):
        named = names_by_value(path, ((int(value), name) for value, name in labels.items()))
        labels = {name: value for value, name in named.items()}
    if IGNORE in labels:
        raise ConfigError(
            f"{path}: labels must not contain 'ignore': training cannot ignore voxels yet. Remove the label."
        )
    members = label_members(labels)
    if members is None:
        raise FileError(
            f"{path}: labels must be whole numbers, or lists of them for regions; got {labels!r}. Correct the file."
        )
    values = tuple(sorted({0, *(one for value in members.values() for one in value)}))
    single = {value[0]: name for name, value in members.items() if len(value) == 1}
    if all(len(value) == 1 for value in members.values()):
        names_by_value(path, ((value[0], name) for name, value in members.items()))
        return tuple(single.get(value, "background") for value in values), values, None
    regions = Regions({name: value for name, value in members.items() if set(value) != {0}}, values=values)
    return tuple(single.get(value, f"label {value}" if value else "background") for value in values), values, regions
