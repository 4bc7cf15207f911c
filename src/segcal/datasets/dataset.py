"""What a dataset is: its cases on disk, its classes, and how the paper treats it, all as plain values."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, NamedTuple

from segcal.errors import ConfigError, distinct
from segcal.volumes.regions import Regions
from segcal.volumes.text_header import with_detached_data


class Problem(NamedTuple):
    """One fault of one case, in a sentence."""

    case: str
    what: str


@dataclass(frozen=True)
class DataCase:
    """One image with its labels: a file for each channel, or one file that may hold the channels on its last axis."""

    name: str
    patient: str
    """Whom the image shows; equals the name where each case is a patient."""
    images: tuple[Path, ...]
    label: Path | None
    """None: an image without labels."""
    more_labels: tuple[Path, ...] = ()
    """Label maps of further raters; `label` is that of the first."""

    @property
    def files(self) -> tuple[Path, ...]:
        """All of them: what a result of this case was made from."""
        labels = () if self.label is None else (self.label, *self.more_labels)
        return with_detached_data((*self.images, *labels))


@dataclass(frozen=True)
class Recipe:
    """How images are prepared and networks trained; sizes in voxels, after resampling.

    Defaults are the paper's for ACDC, which asks for nothing in particular.
    """

    spacing_mm: tuple[float, float, float] | None
    """None: keep the spacing of the files."""
    patch: tuple[int, int, int]
    inference_patch: tuple[int, int, int]
    intensity: Literal["zscore", "window"] = "zscore"
    """zscore: of the non-zero voxels, per channel; window: clipped and scaled to 0..1."""
    window: tuple[float, float] | None = None
    augmentation: Literal["affine", "brats", "none"] = "affine"
    sampling: Literal["foreground", "random"] = "foreground"
    """foreground: half of the patches around a labeled voxel; random: anywhere."""
    crop_foreground: bool = True
    epochs: int = 600
    learning_rate: float = 1e-4


DEFAULT_SHARES = (60, 10, 30)


@dataclass(frozen=True)
class Dataset:
    """Cases, classes and protocol of a dataset on disk, as `open_dataset` finds them."""

    name: str
    title: str
    root: Path
    channels: tuple[str, ...]
    classes: tuple[str, ...]
    """Trained classes in order; the first is the background."""
    values: tuple[int, ...]
    """What the label files hold for each class."""
    cases: tuple[DataCase, ...]
    """Cases with labels, by name."""
    recipe: Recipe
    regions: Regions | None = None
    """What is evaluated; None: the classes. Its aliases are label values that mean another one."""
    unlabelled: tuple[DataCase, ...] = ()
    official_test: tuple[str, ...] = ()
    """Cases that the dataset itself sets aside and the paper tests on."""
    shares: tuple[int, int, int] = DEFAULT_SHARES
    """Parts of the patients for training, validation and test; the last does not count beside an official test."""
    split_note: str = ""
    """Why the split is not the paper's, where it is not."""
    paper: tuple[int, ...] = ()
    """Patients of the paper for training, validation and, where it says so, test."""
    cases_per_patient: int = 1
    """In the paper."""
    notes: tuple[str, ...] = ()
    """Facts that are no faults, such as files left out on purpose."""
    problems: tuple[Problem, ...] = ()
    """What opening found wrong. The cases concerned are left out."""

    def __post_init__(self) -> None:
        distinct(f"{self.root}: names of classes", self.classes)
        if len(self.classes) < 2:
            raise ConfigError(
                f"{self.root}: there must be at least one class besides the background; got "
                f"{', '.join(self.classes)}. Add a class to the labels."
            )

    @property
    def patients(self) -> tuple[str, ...]:
        """Patients with at least one labeled case."""
        return tuple(sorted({case.patient for case in self.cases}))

    @property
    def paper_cases(self) -> tuple[int, ...]:
        """Cases of the paper, on the sides that `paper` counts."""
        return tuple(patients * self.cases_per_patient for patients in self.paper)

    def without_official_test(self, reason: str) -> Dataset:
        """The same, with a test share of its own and the reason for it."""
        train, validation, test = DEFAULT_SHARES
        note = (
            f"{reason}, so the labeled patients are divided {train}:{validation}:{test}; the paper's test set differs."
        )
        return replace(self, official_test=(), shares=DEFAULT_SHARES, split_note=note)
