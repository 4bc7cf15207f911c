"""ACDC 2017: cine MRI of the heart, two frames of each patient (end of diastole and of systole)."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

from segcal._io.files import reject_pipe
from segcal.datasets.dataset import Dataset, Problem, Recipe
from segcal.datasets.layout import find_root, nifti_files, pair, unlabelled, visible, wrong_layout
from segcal.errors import FileError

TITLE = "ACDC 2017, cine MRI of the heart"
LAYOUT = "database/{training,testing}/patient001/patient001_frame01.nii.gz and ..._frame01_gt.nii.gz"
CLASSES = ("background", "right ventricle", "myocardium", "left ventricle")
RECIPE = Recipe(
    spacing_mm=(1.0, 1.0, 5.0),
    patch=(256, 256, 16),
    inference_patch=(256, 256, 16),
)
PATIENTS = (90, 10, 50)
KNOWN = Dataset(
    name="acdc",
    title=TITLE,
    root=Path(),
    channels=("MRI",),
    classes=CLASSES,
    values=(0, 1, 2, 3),
    cases=(),
    shares=PATIENTS,
    paper=PATIENTS,
    cases_per_patient=2,
    recipe=RECIPE,
)
_PATIENT = re.compile(r"patient\d+")
_FRAME = re.compile(r"(?P<name>(?P<patient>patient\d+)_frame\d+)(?P<label>_gt)?")


def open_acdc(root: Path) -> Dataset:
    """The dataset in this folder, in `database` or in `training`; the 4-D files are not used."""
    root = find_root(root, _fits, layout=LAYOUT, parts=("training", "testing"))
    images, labels = _frames(root / "training")
    test_images, test_labels = _frames(root / "testing")
    cases, problems = pair(images, labels, patient=_patient)
    tests, _ = pair(test_images, test_labels, patient=_patient)
    if not cases:
        raise wrong_layout(root, LAYOUT)
    counts = {patient: sum(case.patient == patient for case in cases) for patient in {case.patient for case in cases}}
    problems += [
        Problem(patient, f"two labeled frames must be there, ED and ES; found {count}.")
        for patient, count in sorted(counts.items())
        if count != 2
    ]
    dataset = replace(
        KNOWN,
        root=root,
        cases=tuple(sorted((*cases, *tests), key=lambda case: case.name)),
        unlabelled=unlabelled(
            {name: files for name, files in test_images.items() if name not in test_labels}, patient=_patient
        ),
        official_test=tuple(case.name for case in tests),
        problems=tuple(problems),
    )
    return dataset if tests else dataset.without_official_test("testing/ has no labeled patients here")


PATHOLOGIES = {
    "NOR": "normal",
    "MINF": "infarction",
    "DCM": "dilated cardiomyopathy",
    "HCM": "hypertrophic cardiomyopathy",
    "RV": "abnormal right ventricle",
}


def groups_of(dataset: Dataset) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Of each case its pathology and its phase, end of diastole or of systole, as Info.cfg beside the images says.

    The names of the columns, and the rows; a value that is not told is empty. FileError where no patient has the file.
    """
    rows: list[tuple[str, ...]] = []
    known = 0
    for case in dataset.cases:
        info = read_info(case.images[0].parent / "Info.cfg")
        known += bool(info)
        frame = int(case.name.rpartition("_frame")[2])
        phase = next((name for name in ("ED", "ES") if info.get(name) == str(frame)), "")
        group = info.get("Group", "")
        rows.append((case.name, PATHOLOGIES.get(group, group), phase))
    if not known:
        raise FileError(
            f"every patient of ACDC must have Info.cfg beside its images; {dataset.root} has none. Download it again."
        )
    return ("case", "pathology", "phase"), rows


def read_info(path: Path) -> dict[str, str]:
    """What a file of lines such as "Group: DCM" says; nothing where it cannot be read."""
    reject_pipe(path)
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        return {}
    return {key.strip(): value.strip() for key, colon, value in (line.partition(":") for line in lines) if colon}


def _fits(folder: Path) -> bool:
    return any(_PATIENT.fullmatch(path.name) for path in visible(folder / "training"))


def _frames(folder: Path) -> tuple[dict[str, tuple[Path, ...]], dict[str, Path]]:
    images: dict[str, tuple[Path, ...]] = {}
    labels: dict[str, Path] = {}
    for patient in visible(folder):
        for stem, path in nifti_files(patient).items():
            match = _FRAME.fullmatch(stem)
            if match and match["label"]:
                labels[match["name"]] = path
            elif match:
                images[match["name"]] = (path,)
    return images, labels


def _patient(name: str) -> str:
    return name.partition("_")[0]
