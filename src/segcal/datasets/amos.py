"""AMOS 2022: abdominal CT with 15 organs. Its MR images (id 500 and above) are left out, as in the paper."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

from segcal.datasets.dataset import Dataset, Recipe
from segcal.datasets.layout import find_root, nifti_files, pair, unlabelled, wrong_layout
from segcal.volumes.regions import read_class_names

TITLE = "AMOS 2022, abdominal CT"
LAYOUT = "{imagesTr,labelsTr,imagesVa,labelsVa}/amos_0001.nii.gz, may have dataset.json"
CLASSES = (
    "background",
    "spleen",
    "right kidney",
    "left kidney",
    "gall bladder",
    "esophagus",
    "liver",
    "stomach",
    "aorta",
    "postcava",
    "pancreas",
    "right adrenal gland",
    "left adrenal gland",
    "duodenum",
    "bladder",
    "prostate/uterus",
)
RECIPE = Recipe(
    spacing_mm=(1.0, 1.0, 5.0),
    intensity="window",
    window=(-100.0, 200.0),
    patch=(176, 176, 64),
    inference_patch=(192, 192, 64),
    learning_rate=2e-4,
)
PATIENTS = (216, 24)  # the paper does not count its test images
KNOWN = Dataset(
    name="amos",
    title=TITLE,
    root=Path(),
    channels=("CT",),
    classes=CLASSES,
    values=tuple(range(len(CLASSES))),
    cases=(),
    shares=(*PATIENTS, 0),
    paper=PATIENTS,
    recipe=RECIPE,
)
FIRST_MR = 500
_NAME = re.compile(r"amos_(\d+)")


def open_amos(root: Path) -> Dataset:
    """The dataset in this folder, or in the one below it (`amos22`)."""
    root = find_root(root, _fits, layout=LAYOUT, parts=("imagesTr", "labelsTr", "imagesVa", "labelsVa"))
    folders = {name: _numbered(root / name) for name in ("imagesTr", "labelsTr", "imagesVa", "labelsVa", "imagesTs")}
    ct = {name: {stem: path for stem, path in files.items() if _is_ct(stem)} for name, files in folders.items()}
    images = {name: {stem: (path,) for stem, path in files.items()} for name, files in ct.items()}
    cases, problems = pair(images["imagesTr"], ct["labelsTr"])
    tests, test_problems = pair(images["imagesVa"], ct["labelsVa"])
    if not ct["labelsVa"]:  # not downloaded, rather than lost one by one
        test_problems, images["imagesTs"] = [], images["imagesTs"] | images["imagesVa"]
    if not cases:
        raise wrong_layout(root, LAYOUT)
    left_out = sum(len(files) - len(ct[name]) for name, files in folders.items() if name.startswith("images"))
    dataset = replace(
        KNOWN,
        root=root,
        classes=_classes(root / "dataset.json"),
        cases=tuple(sorted((*cases, *tests), key=lambda case: case.name)),
        unlabelled=unlabelled(images["imagesTs"]),
        official_test=tuple(case.name for case in tests),
        notes=(f"MR images (id {FIRST_MR} and above) are left out: {left_out}.",) if left_out else (),
        problems=tuple(problems + test_problems),
    )
    return dataset if tests else dataset.without_official_test("imagesVa has no labeled images here")


def _fits(folder: Path) -> bool:
    return bool(_numbered(folder / "imagesTr"))


def _numbered(folder: Path) -> dict[str, Path]:
    return {stem: path for stem, path in nifti_files(folder).items() if _NAME.fullmatch(stem)}


def _is_ct(stem: str) -> bool:
    return int(stem.rpartition("_")[2]) < FIRST_MR


def _classes(path: Path) -> tuple[str, ...]:
    """Names as dataset.json has them, or those we know."""
    if not path.is_file():
        return CLASSES
    names = read_class_names(str(path))
    return tuple(names.get(value, name) for value, name in enumerate(CLASSES))
