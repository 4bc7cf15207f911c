"""Which classes and regions an evaluation speaks of, and which label values and channels belong to them.

A region is a union of trained classes that is evaluated as one; regions may overlap. Its probability is
the sum of its members'.
"""

from __future__ import annotations

import json
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from segcal.errors import ConfigError


@dataclass(frozen=True)
class Regions:
    """Named unions of label values, and the label values in the order of the prediction's channels."""

    members: dict[str, tuple[int, ...]]
    values: tuple[int, ...] | None = None
    """Label value of each channel; None: channel i is label i. Without 0, the background has no channel."""
    aliases: tuple[tuple[int, int], ...] = ()
    """Label values that mean another one."""

    def __post_init__(self) -> None:
        if not self.members:
            raise ConfigError("there must be at least one region; got none.")
        known = None if self.values is None else set(self.values)
        for name, members in self.members.items():
            if not members:
                raise ConfigError(f"region {name!r} must have at least one class; it has none.")
            unknown = [] if known is None else [value for value in members if value not in known]
            if unknown:
                raise ConfigError(f"region {name!r} must consist of label values {self.values}; it names {unknown}.")

    def channels(self, name: str) -> list[int]:
        """Channels whose probabilities make up the region."""
        return [value if self.values is None else self.values.index(value) for value in self.members[name]]


BUILT_IN = {
    # 4 is enhancing tumour in BraTS up to 2021, 3 from 2023 on.
    "brats": Regions({"ET": (4,), "TC": (1, 4), "WT": (1, 2, 4)}, values=(0, 1, 2, 4), aliases=((3, 4),)),
    "kits": Regions({"tumour": (2,), "mass": (2, 3), "kidney and masses": (1, 2, 3)}, values=(0, 1, 2, 3)),
}


def read_regions(source: str) -> Regions:
    """Regions by name ("brats", "kits") or from a TOML file.

    The file has a table `regions` with a list of label values for each name, and may have `values`, the label
    value of each of the prediction's channels:

        values = [0, 1, 2, 4]
        [regions]
        "tumour core" = [1, 4]
    """
    if source in BUILT_IN:
        return BUILT_IN[source]
    path = Path(source)
    if path.suffix != ".toml":
        names = ", ".join(BUILT_IN)
        raise ConfigError(f"regions must be one of {names}, or a .toml file; got {source!r}.")
    content = _read_toml(path)
    unknown = set(content) - {"regions", "values"}
    table, values = content.get("regions"), content.get("values")
    if unknown or not isinstance(table, dict):
        raise ConfigError(f"{path} must have a table [regions] and may have values; it has {sorted(content)}.")
    for name, members in table.items():
        if not _whole_numbers(members):
            raise ConfigError(f"{path}: region {name!r} must be a list of label values, as [1, 4]; got {members!r}.")
    if values is not None and not _whole_numbers(values):
        raise ConfigError(f"{path}: values must be a list of label values such as [0, 1, 2, 4]; got {values!r}.")
    return Regions({name: tuple(members) for name, members in table.items()}, values and tuple(values))


def read_class_names(source: str) -> dict[int, str]:
    """Names by label value, from `a,b,c` (values 0, 1, 2), a dataset.json (Decathlon or nnU-Net) or a TOML file.

    The TOML file holds `classes`, a list of names or a table of label values by name.
    """
    path = Path(source)
    if path.suffix == ".json":
        try:
            labels: Any = json.loads(path.read_text(encoding="utf-8")).get("labels")
        except (OSError, ValueError, AttributeError) as error:
            raise ConfigError(f"{path} must be a dataset.json that can be read; {error}.") from error
    elif path.suffix == ".toml":
        labels = _read_toml(path).get("classes")
    else:
        labels = [name.strip() for name in source.split(",")]
    if isinstance(labels, list) and all(isinstance(name, str) and name for name in labels) and labels:
        return dict(enumerate(labels))
    if isinstance(labels, dict) and labels:
        if all(str(key).isdigit() and isinstance(name, str) for key, name in labels.items()):
            return {int(key): name for key, name in labels.items()}  # Decathlon: {"1": "kidney"}
        if all(isinstance(value, int | list) for value in labels.values()):
            return {value: name for name, value in labels.items() if isinstance(value, int)}  # nnU-Net: {"kidney": 1}
    raise ConfigError(f"class names must be a,b,c or stand under labels (.json) or classes (.toml); got {source!r}.")


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} must be a TOML file that can be read; {error}.") from error


def _whole_numbers(values: object) -> bool:
    return isinstance(values, list) and all(type(value) is int for value in values)
