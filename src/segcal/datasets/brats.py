"""BraTS 2021: four MRI sequences of brain tumours, evaluated by three regions that contain one another.

The names of 2023 (`BraTS-GLI-00000-000-t1c`, enhancing tumour 3) are read as well. The paper's own list of test cases
is not part of the dataset: where it matters, give a split file.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

from segcal.datasets.dataset import Dataset, Problem, Recipe
from segcal.datasets.layout import find_root, nifti_files, pair, visible, wrong_layout
from segcal.volumes.regions import BUILT_IN

TITLE = "BraTS 2021, MRI of brain tumours"
LAYOUT = "BraTS2021_00000/BraTS2021_00000_{t1,t1ce,t2,flair,seg}.nii.gz"
CLASSES = ("background", "necrotic core", "oedema", "enhancing tumour")
RECIPE = Recipe(
    spacing_mm=(1.0, 1.0, 1.0),
    patch=(224, 224, 144),
    inference_patch=(240, 240, 160),
    augmentation="brats",
    sampling="random",
    epochs=1250,
)
PATIENTS = (1000, 51, 200)
CHANNELS = ("t1", "t1ce", "t2", "flair")
KNOWN = Dataset(
    name="brats",
    title=TITLE,
    root=Path(),
    channels=CHANNELS,
    classes=CLASSES,
    values=(0, 1, 2, 4),
    regions=BUILT_IN["brats"],
    cases=(),
    shares=PATIENTS,
    paper=PATIENTS,
    recipe=RECIPE,
)
_NAMES_2023 = {"t1n": "t1", "t1c": "t1ce", "t2w": "t2", "t2f": "flair"}
_CASE = re.compile(r"BraTS\d+_(?:\w+_)?\d+|(?P<patient>BraTS-[A-Za-z]+-\d+)-\d+")


def open_brats(root: Path) -> Dataset:
    """The dataset in this folder, or in the only one in it that holds cases."""
    root = find_root(root, _fits, layout=LAYOUT)
    images: dict[str, tuple[Path, ...]] = {}
    labels: dict[str, Path] = {}
    problems: list[Problem] = []
    for folder in filter(_is_case, visible(root)):
        files = _files(folder)
        missing = [channel for channel in CHANNELS if channel not in files]
        if missing:
            what = f"a file for each of {', '.join(CHANNELS)} must be there; {', '.join(missing)} is missing."
            problems.append(Problem(folder.name, what))
            continue
        images[folder.name] = tuple(files[channel] for channel in CHANNELS)
        if "seg" in files:
            labels[folder.name] = files["seg"]
    cases, alone = pair(images, labels, patient=_patient)
    if not cases:
        raise wrong_layout(root, LAYOUT)
    return replace(KNOWN, root=root, cases=cases, problems=tuple(sorted(problems + alone)))


def _fits(folder: Path) -> bool:
    return any(_is_case(path) for path in visible(folder))


def _is_case(folder: Path) -> bool:
    return _CASE.fullmatch(folder.name) is not None and folder.is_dir()


def _files(folder: Path) -> dict[str, Path]:
    """Files of a case by channel; `seg` are the labels."""
    found = {}
    for stem, path in nifti_files(folder).items():
        if stem.startswith(folder.name):
            ending = stem[len(folder.name) :].lstrip("_-").lower()
            found[_NAMES_2023.get(ending, ending)] = path
    return found


def _patient(name: str) -> str:
    """From 2023 on, the last number counts the visits of a patient."""
    match = _CASE.fullmatch(name)
    return (match and match["patient"]) or name
