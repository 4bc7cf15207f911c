"""Public datasets on disk: their cases, classes, regions, protocol and splits.

Reading order: `dataset` (what a dataset is), one module for each dataset, `splits` (which case is for what), `check`
(what is wrong with the files), `phantom` (a dataset made on the spot whose true probabilities are known).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from difflib import get_close_matches
from pathlib import Path
from typing import NamedTuple

from segcal.datasets import acdc, amos, brats, decathlon, folder, kits, nnunet, phantom
from segcal.datasets.check import Check, check_dataset
from segcal.datasets.dataset import DataCase, Dataset, Problem, Recipe
from segcal.datasets.phantom import make_phantom
from segcal.datasets.splits import Split, make_split, read_split, write_split
from segcal.errors import ConfigError
from segcal.volumes.regions import BUILT_IN

__all__ = [
    "Check",
    "DataCase",
    "Dataset",
    "DatasetRow",
    "Problem",
    "Recipe",
    "Split",
    "check_dataset",
    "dataset_groups",
    "dataset_names",
    "describe",
    "known_dataset",
    "make_phantom",
    "make_split",
    "open_dataset",
    "read_split",
    "write_split",
]

FROM_JSON = ("as dataset.json says",)


class DatasetRow(NamedTuple):
    """One line of the list of datasets; `classes` without the background."""

    name: str
    title: str
    layout: str
    classes: tuple[str, ...]
    regions: tuple[str, ...] = ()


_ROWS = (
    DatasetRow("acdc", acdc.TITLE, acdc.LAYOUT, acdc.CLASSES[1:]),
    DatasetRow("amos", amos.TITLE, amos.LAYOUT, amos.CLASSES[1:]),
    DatasetRow("brats", brats.TITLE, brats.LAYOUT, brats.CLASSES[1:], tuple(BUILT_IN["brats"].members)),
    DatasetRow("kits", kits.TITLE, kits.LAYOUT, kits.CLASSES[1:], tuple(BUILT_IN["kits"].members)),
    DatasetRow("decathlon", decathlon.TITLE, decathlon.LAYOUT, FROM_JSON),
    DatasetRow("nnunet", nnunet.TITLE, nnunet.LAYOUT, FROM_JSON, FROM_JSON),
    DatasetRow("folder", folder.TITLE, folder.LAYOUT, FROM_JSON, FROM_JSON),
    DatasetRow("phantom", phantom.TITLE, phantom.LAYOUT, phantom.CLASSES[1:]),
)
_OPENERS: dict[str, Callable[[Path], Dataset]] = {
    "acdc": acdc.open_acdc,
    "amos": amos.open_amos,
    "brats": brats.open_brats,
    "kits": kits.open_kits,
    "decathlon": decathlon.open_decathlon,
    "nnunet": nnunet.open_nnunet,
    "folder": folder.open_folder,
    "phantom": phantom.open_phantom,
}
_GROUPS = {"acdc": acdc.groups_of}
_KNOWN = {known.name: known for known in (acdc.KNOWN, amos.KNOWN, brats.KNOWN, kits.KNOWN)}


def dataset_names() -> tuple[str, ...]:
    """Names that `open_dataset` knows.

    >>> dataset_names()
    ('acdc', 'amos', 'brats', 'kits', 'decathlon', 'nnunet', 'folder', 'phantom')
    """
    return tuple(_OPENERS)


def describe() -> list[DatasetRow]:
    """What can be opened: a row for each dataset with its layout on disk, its classes and its regions."""
    return list(_ROWS)


def known_dataset(name: str) -> Dataset | None:
    """What is known of a dataset of the paper without its files; None for others, which say themselves what they are.

    >>> known_dataset("acdc").paper_cases
    (180, 20, 100)
    """
    return _KNOWN.get(name)


def open_dataset(name: str, root: str | os.PathLike[str]) -> Dataset:
    """The dataset of this name in a folder; no image is read beyond some headers.

    The folder may also be one level above the dataset's own, or one of its parts. FileError says which layout was
    expected and what was found. Faults of single cases do not stop it: they are in `problems`.
    """
    if name not in _OPENERS:
        close = get_close_matches(name.lower(), _OPENERS, n=1)
        hint = f" Did you mean {close[0]!r}?" if close else ""
        raise ConfigError(f"dataset must be one of {', '.join(_OPENERS)}; got {name!r}.{hint}")
    return _OPENERS[name](Path(root))


def dataset_groups(dataset: Dataset) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Groups of the cases of a dataset whose files tell some: names of columns, the first case, and a row for each.

    ConfigError for a dataset that tells none.
    """
    if dataset.name not in _GROUPS:
        raise ConfigError(
            f"the dataset must have files that define groups, as {', '.join(_GROUPS)}; {dataset.name} has none. Write "
            f"groups.csv yourself."
        )
    return _GROUPS[dataset.name](dataset)
