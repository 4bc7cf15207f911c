"""Any folder of images and one of labels, pictures or volumes: the layout of those who have no other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from segcal.datasets.dataset import DataCase, Dataset
from segcal.datasets.layout import channel_names, find_root, image_files, pair, read_json, unlabelled, wrong_layout
from segcal.datasets.nnunet import classes_of
from segcal.datasets.recipes import fitted_recipe
from segcal.errors import FileError
from segcal.volumes.arrays import read_array

TITLE = "A folder of images and one of labels, any format"
LAYOUT = "{images,labels,test}/NAME.png (or .tif, .nii.gz, .nrrd, .mha) with dataset.json that names the labels"
_COLORS = ("red", "green", "blue")


def open_folder(root: Path) -> Dataset:
    """The dataset in this folder: images and labels of one name belong together; images in `test` have no labels.

    dataset.json has {"labels": {"background": 0, "vessel": 1}}, and may name channels as nnU-Net's does.
    """
    root = find_root(root, _fits, layout=LAYOUT, parts=("images", "labels", "test"))
    content = read_json(root / "dataset.json")
    classes, values, regions = classes_of(root / "dataset.json", content.get("labels"))
    images, tests = ({name: (path,) for name, path in image_files(root / part).items()} for part in ("images", "test"))
    cases, problems = pair(images, image_files(root / "labels"))
    if not cases:
        raise wrong_layout(root, LAYOUT)
    channels = _channels(root / "dataset.json", content, cases)
    return Dataset(
        name="folder",
        title=str(content.get("name", root.name)),
        root=root,
        channels=channels,
        classes=classes,
        values=values,
        regions=regions,
        cases=cases,
        unlabelled=unlabelled(tests),
        recipe=fitted_recipe(cases, channels),
        problems=tuple(problems),
    )


def _fits(folder: Path) -> bool:
    return (folder / "dataset.json").is_file() and all((folder / part).is_dir() for part in ("images", "labels"))


def _channels(path: Path, content: dict[str, Any], cases: tuple[DataCase, ...]) -> tuple[str, ...]:
    """As dataset.json names them; else three colors where the first image that can be read has them, or one channel."""
    if "channel_names" in content:
        return channel_names(path, content, "channel_names")
    for case in cases:
        try:
            return _COLORS if read_array(case.images[0], peek=True).color else ("image",)
        except FileError:  # the check names it
            continue
    return ("image",)
