"""KiTS 2023: CT of kidneys with tumours and cysts, evaluated by three regions that contain one another."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

from segcal.datasets.dataset import Dataset, Recipe
from segcal.datasets.layout import find_root, nifti_files, pair, visible, wrong_layout
from segcal.volumes.regions import BUILT_IN

TITLE = "KiTS 2023, CT of kidney tumours"
LAYOUT = "dataset/case_00000/{imaging,segmentation}.nii.gz"
CLASSES = ("background", "kidney", "tumour", "cyst")
RECIPE = Recipe(
    spacing_mm=(1.0, 1.0, 1.0),
    intensity="window",
    window=(-54.0, 242.0),
    patch=(128, 128, 128),
    inference_patch=(256, 256, 256),
    epochs=1250,
)
PATIENTS = (352, 39, 98)
KNOWN = Dataset(
    name="kits",
    title=TITLE,
    root=Path(),
    channels=("CT",),
    classes=CLASSES,
    values=(0, 1, 2, 3),
    regions=BUILT_IN["kits"],
    cases=(),
    shares=PATIENTS,
    paper=PATIENTS,
    recipe=RECIPE,
)
_CASE = re.compile(r"case_\d+")


def open_kits(root: Path) -> Dataset:
    """The dataset in this folder, or in `dataset`."""
    root = find_root(root, _fits, layout=LAYOUT)
    files = {folder.name: nifti_files(folder) for folder in visible(root) if _CASE.fullmatch(folder.name)}
    images = {name: (found["imaging"],) for name, found in files.items() if "imaging" in found}
    labels = {name: found["segmentation"] for name, found in files.items() if "segmentation" in found}
    cases, problems = pair(images, labels)
    if not cases:
        raise wrong_layout(root, LAYOUT)
    return replace(KNOWN, root=root, cases=cases, problems=tuple(problems))


def _fits(folder: Path) -> bool:
    return any(_CASE.fullmatch(path.name) and path.is_dir() for path in visible(folder))
