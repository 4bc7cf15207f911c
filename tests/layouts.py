"""Small datasets in the exact layouts of the public ones: random images with blobs as labels, some classes missing.

Each function writes under `root` and returns the folder that `open_dataset` takes.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import nibabel
import numpy as np

SIZE = (12, 10, 6)
SPACING_MM = (1.5, 1.5, 5.0)


def save(path: Path, array: np.ndarray, *, spacing_mm: Sequence[float] = SPACING_MM) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    nibabel.Nifti1Image(array, np.diag([*spacing_mm, 1.0])).to_filename(path)
    return path


def image_and_label(
    random: np.random.Generator,
    *,
    values: Sequence[int],
    size: Sequence[int] = SIZE,
    channels: int = 0,
    without: Sequence[int] = (),
) -> tuple[np.ndarray, np.ndarray]:
    """An image brighter where the label is higher, and a label with a box for each value not left out.

    The boxes lie side by side along the first axis, which must have two voxels for each of them.
    """
    label = np.zeros(size, np.uint8)
    width = size[0] // len(values)
    for place, value in enumerate(values):
        if value not in without:
            label[place * width : (place + 1) * width, 1:-1, 1:-1] = value
    shape = (*size, channels) if channels else tuple(size)
    bright = label[..., None] if channels else label
    return (100 + 20 * bright + random.normal(0, 5, shape)).astype(np.int16), label


def write_acdc(root: Path, *, patients: int = 4, test_patients: int = 0, size: Sequence[int] = SIZE) -> Path:
    """`root/database`; patient002 lacks the right ventricle in its second frame."""
    random = np.random.default_rng(0)
    numbers = [("training", 1 + i) for i in range(patients)] + [("testing", 101 + i) for i in range(test_patients)]
    for part, number in numbers:
        folder = root / "database" / part / f"patient{number:03d}"
        folder.mkdir(parents=True)
        (folder / "Info.cfg").write_text("ED: 1\nES: 12\nGroup: NOR\n")
        save(folder / f"{folder.name}_4d.nii.gz", random.integers(0, 9, (*size, 2)).astype(np.int16))
        for frame in (1, 12):
            without = (1,) if (number, frame) == (2, 12) else ()
            image, label = image_and_label(random, values=(1, 2, 3), size=size, without=without)
            save(folder / f"{folder.name}_frame{frame:02d}.nii.gz", image)
            save(folder / f"{folder.name}_frame{frame:02d}_gt.nii.gz", label)
    return root


def write_amos(
    root: Path, *, cases: int = 4, test_cases: int = 2, mr_cases: int = 1, size: Sequence[int] = (30, 8, 6)
) -> Path:
    """`root/amos22`; the first case lacks organs 14 and 15, and two images have no labels."""
    random = np.random.default_rng(0)
    folder = root / "amos22"
    train = [*range(1, 1 + cases), *range(507, 507 + mr_cases)]
    for part, numbers in (("Tr", train), ("Va", range(101, 101 + test_cases)), ("Ts", range(201, 203))):
        for number in numbers:
            without = (14, 15) if number == 1 else ()
            image, label = image_and_label(random, values=range(1, 16), size=size, without=without)
            save(folder / f"images{part}" / f"amos_{number:04d}.nii.gz", image - 100)
            if part != "Ts":
                save(folder / f"labels{part}" / f"amos_{number:04d}.nii.gz", label)
    return root


def write_brats(root: Path, *, cases: int = 4, size: Sequence[int] = SIZE) -> Path:
    """Case folders in `root`; the second case lacks the enhancing tumour."""
    random = np.random.default_rng(0)
    for number in range(cases):
        folder = root / f"BraTS2021_{number:05d}"
        _, label = image_and_label(random, values=(1, 2, 4), size=size, without=(4,) if number == 1 else ())
        for channel in ("t1", "t1ce", "t2", "flair"):
            noise = random.normal(0, 5, size)
            image = (100 + 20 * label + noise).astype(np.int16)
            save(folder / f"{folder.name}_{channel}.nii.gz", image, spacing_mm=(1, 1, 1))
        save(folder / f"{folder.name}_seg.nii.gz", label, spacing_mm=(1, 1, 1))
    return root


def write_kits(root: Path, *, cases: int = 4, size: Sequence[int] = SIZE) -> Path:
    """`root/dataset`; every other case lacks the cyst."""
    random = np.random.default_rng(0)
    for number in range(cases):
        folder = root / "dataset" / f"case_{number:05d}"
        image, label = image_and_label(random, values=(1, 2, 3), size=size, without=(3,) if number % 2 else ())
        save(folder / "imaging.nii.gz", image.astype(np.float32))
        save(folder / "segmentation.nii.gz", label)
    return root


def write_decathlon(
    root: Path, *, cases: int = 4, tests: int = 1, channels: Sequence[str] = ("MRI",), size: Sequence[int] = SIZE
) -> Path:
    """`root/Task09_Test`; classes near and far, of which the second case lacks far."""
    random = np.random.default_rng(0)
    folder = root / "Task09_Test"
    names = [f"test_{number:03d}.nii.gz" for number in range(1, 1 + cases + tests)]
    axis = len(channels) if len(channels) > 1 else 0
    for number, name in enumerate(names):
        without = (2,) if number == 1 else ()
        image, label = image_and_label(random, values=(1, 2), size=size, channels=axis, without=without)
        save(folder / ("imagesTr" if number < cases else "imagesTs") / name, image)
        if number < cases:
            save(folder / "labelsTr" / name, label)
    content = {
        "name": "Test",
        "modality": {str(number): name for number, name in enumerate(channels)},
        "labels": {"0": "background", "1": "near", "2": "far"},
        "numTraining": cases,
        "numTest": tests,
        "training": [{"image": f"./imagesTr/{name}", "label": f"./labelsTr/{name}"} for name in names[:cases]],
        "test": [f"./imagesTs/{name}" for name in names[cases:]],
    }
    (folder / "dataset.json").write_text(json.dumps(content))
    return folder


def write_nnunet(
    root: Path,
    *,
    cases: int = 4,
    channels: Sequence[str] = ("T1", "T2"),
    labels: dict[str, object] | None = None,
    size: Sequence[int] = SIZE,
) -> Path:
    """`root/Dataset009_Test` with label values 1, 2, 3, of which the second case lacks 3; one image has no labels."""
    random = np.random.default_rng(0)
    folder = root / "Dataset009_Test"
    for number in range(cases + 1):
        without = (3,) if number == 1 else ()
        _, label = image_and_label(random, values=(1, 2, 3), size=size, without=without)
        part = "Tr" if number < cases else "Ts"
        for channel in range(len(channels)):
            image = (100 + 20 * label + random.normal(0, 5, size)).astype(np.float32)
            save(folder / f"images{part}" / f"scan-{number:02d}_{channel:04d}.nii.gz", image)
        if number < cases:
            save(folder / "labelsTr" / f"scan-{number:02d}.nii.gz", label)
    content = {
        "channel_names": {str(number): name for number, name in enumerate(channels)},
        "labels": labels or {"background": 0, "liver": 1, "spleen": 2, "lesion": 3},
        "numTraining": cases,
        "file_ending": ".nii.gz",
    }
    (folder / "dataset.json").write_text(json.dumps(content))
    return folder
