"""Which classes and regions an evaluation speaks of, and which label values and channels belong to them.

A region is a union of trained classes that is evaluated as one; regions may overlap. Its probability is
the sum of its members'.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from segcal._io.files import reject_pipe
from segcal._io.parsing import parse_json, parse_toml
from segcal.errors import ConfigError, distinct


@dataclass(frozen=True)
class Regions:
    """Named unions of label values, and the label values in the order of the prediction's channels.

    Values without a region are a remap alone: each value is a class. ConfigError where there is neither, where a name
    or a value comes twice, or where a region has members that are not among the values.

    members: the label values of each region, by its name.

    >>> Regions({"tumor core": (1, 4), "whole tumor": (1, 2, 4)}, values=(0, 1, 2, 4)).channels("tumor core")
    [1, 3]
    """

    members: dict[str, tuple[int, ...]]
    values: tuple[int, ...] | None = None
    """Label value of each channel; None: channel i is label i. Without 0, the background has no channel."""
    aliases: tuple[tuple[int, int], ...] = ()
    """Label values that mean another one."""

    def __post_init__(self) -> None:
        if not self.members and not self.values:
            raise ConfigError("there must be at least one region, or values; got none.")
        distinct("names of regions", self.members)
        _once("values", self.values or ())
        known = None if self.values is None else set(self.values)
        for name, members in self.members.items():
            if not members:
                raise ConfigError(f"region {name!r} must have at least one class; it has none.")
            _once(f"region {name!r}", members)
            unknown = [] if known is None else [value for value in members if value not in known]
            if unknown:
                raise ConfigError(f"region {name!r} must consist of label values {self.values}; it names {unknown}.")

    @staticmethod
    def from_json(content: dict[str, Any] | None) -> Regions | None:
        """Regions of their fields as JSON has them; None for null."""
        if content is None:
            return None
        members = {str(name): label_values(values) for name, values in content["members"].items()}
        aliases = tuple((value, meaning) for value, meaning in map(label_values, content["aliases"]))
        return Regions(members, content["values"] and label_values(content["values"]), aliases)

    def channels(self, name: str) -> list[int]:
        """Channels whose probabilities make up the region."""
        return [value if self.values is None else self.values.index(value) for value in self.members[name]]


def _once(what: str, values: Iterable[int]) -> None:
    """Refuse a label value that is there twice: it would count twice."""
    twice = [value for value, number in Counter(values).items() if number > 1]
    if twice:
        raise ConfigError(f"{what} must name each label value once; {twice[0]} came more than once.")


ClassNames = str | os.PathLike[str] | Sequence[str] | Mapping[int, str]
"""Names of classes: a file, a text a,b,c, a list in the order of the labels, or by label."""

IGNORE = "ignore"  # nnU-Net's name of the label whose voxels are left out

BUILT_IN = {
    # 4 is enhancing tumour in BraTS up to 2021, 3 from 2023 on.
    "brats": Regions({"ET": (4,), "TC": (1, 4), "WT": (1, 2, 4)}, values=(0, 1, 2, 4), aliases=((3, 4),)),
    "kits": Regions({"tumour": (2,), "mass": (2, 3), "kidney and masses": (1, 2, 3)}, values=(0, 1, 2, 3)),
}


def read_regions(source: str | os.PathLike[str] | Regions) -> Regions:
    """Regions as they are, by name ("brats", "kits"), from a TOML file, or from the dataset.json of nnU-Net.

    The TOML file has a table `regions` with a list of label values for each name, or `values`, the label value of each
    of the prediction's channels, or both:

        values = [0, 1, 2, 4]
        [regions]
        "tumour core" = [1, 4]

    Those of a dataset.json are in the order of the channels of a network that nnU-Net trained on them.
    """
    if isinstance(source, Regions):
        return source
    path = Path(source)
    if isinstance(source, str) and source in BUILT_IN:
        return BUILT_IN[source]
    if path.suffix == ".json":
        return _nnunet_regions(path)
    if path.suffix != ".toml":
        names = ", ".join(BUILT_IN)
        raise ConfigError(
            f"regions must be one of {names}, a .toml file or nnU-Net's dataset.json; got {str(source)!r}."
        )
    content = _read_toml(path)
    unknown = set(content) - {"regions", "values"}
    values = content.get("values")
    table = content.get("regions", {} if values else None)
    if unknown or not isinstance(table, dict):
        came = ", ".join(sorted(content)) or "nothing"
        raise ConfigError(f"{path} must have a table [regions], values such as [0, 1, 2, 4], or both; it has {came}.")
    for name, members in table.items():
        if not _whole_numbers(members):
            raise ConfigError(f"{path}: region {name!r} must be a list of label values, as [1, 4]; got {members!r}.")
    if values is not None and not _whole_numbers(values):
        raise ConfigError(f"{path}: values must be a list of label values such as [0, 1, 2, 4]; got {values!r}.")
    return Regions({name: tuple(members) for name, members in table.items()}, values and tuple(values))


def _nnunet_regions(path: Path) -> Regions:
    """As nnU-Net's LabelManager has them: in the order of the labels, without background and ignore label.

    `regions_class_order` says which value a region gets in label maps, in the same order; channels do not depend on it.
    """
    members = label_members(_labels_in(str(path))) or {}
    members.pop(IGNORE, None)
    if not any(len(values) > 1 for values in members.values()):
        raise ConfigError(
            f"{path} must have regions, labels of several values as [1, 2]; it has none. Classes need no --regions."
        )
    known = sorted({0}.union(*members.values()))
    regions = {name: values for name, values in members.items() if set(values) != {0}}
    return Regions(regions, values=tuple(known))


def read_class_names(source: ClassNames) -> dict[int, str]:
    """Names by label value, from names (values 0, 1, 2), a dataset.json (Decathlon or nnU-Net) or a TOML file.

    The TOML file holds `classes`, a list of names or a table of label values by name. A value named "ignore" is no
    class (see `read_ignored`).
    """
    labels = _labels_in(source)
    if isinstance(labels, list) and all(isinstance(name, str) for name in labels) and labels:
        distinct(f"{source}: class names", labels)
        return dict(enumerate(labels))
    if isinstance(labels, dict) and labels:
        if all(is_value(key) and isinstance(name, str) for key, name in labels.items()):  # Decathlon: {"1": "kidney"}
            return names_by_value(source, ((int(key), name) for key, name in labels.items()))
        members = label_members(labels)
        if members is not None:
            single = [(values[0], name) for name, values in members.items() if len(values) == 1 and name != IGNORE]
            if any(len(values) > 1 for values in members.values()):
                return dict(single)  # of regions, two may be the same
            return names_by_value(source, single)
    raise ConfigError(f"class names must be a,b,c or stand under labels (.json) or classes (.toml); got {source!r}.")


def is_list(source: ClassNames) -> bool:
    """Whether names come as a list, a,b,c or that of a TOML file, so that each is of the next label."""
    return isinstance(_labels_in(source), list)


def has_regions(source: ClassNames) -> bool:
    """Whether a dataset.json has labels of several values, which nnU-Net trains as regions."""
    return any(len(values) > 1 for values in (label_members(_labels_in(source)) or {}).values())


def names_by_value(source: object, pairs: Iterable[tuple[int, str]]) -> dict[int, str]:
    """Names by label value; refused where two values have one name, or two names one value."""
    pairs = list(pairs)
    distinct(f"{source}: class names", (name for _, name in pairs))
    _once(f"{source}: class names", (value for value, _ in pairs))
    return dict(pairs)


def read_ignored(source: ClassNames) -> int | None:
    """The label value that a dataset.json of nnU-Net, or a table of classes, names "ignore"; None: it names none."""
    values = (label_members(_labels_in(source)) or {}).get(IGNORE)
    if values is not None and len(values) != 1:
        raise ConfigError(f"{source}: the label 'ignore' must be one value; got {list(values)}.")
    return None if values is None else values[0]


def _labels_in(source: ClassNames) -> Any:
    """What stands for class names: a list of them, a table, or whatever else the file has there."""
    if isinstance(source, Mapping):
        return {str(value): name for value, name in source.items()}
    if not isinstance(source, str | os.PathLike):
        return list(source)
    path = Path(source)
    if path.suffix == ".json":
        reject_pipe(path)
        try:
            return parse_json(path.read_text(encoding="utf-8")).get("labels")
        except (OSError, ValueError, AttributeError) as error:
            raise ConfigError(f"{path} must be a dataset.json that can be read; {error}. Correct the file.") from error
    if path.suffix == ".toml":
        return _read_toml(path).get("classes")
    return [name.strip() for name in os.fspath(source).split(",")]


def label_members(labels: Any) -> dict[str, tuple[int, ...]] | None:
    """Label values by name, as nnU-Net has them, {"kidney": 1, "mass": [2, 3]}; None: these labels are different."""
    if not isinstance(labels, dict):
        return None
    members = {name: value if isinstance(value, list) else [value] for name, value in labels.items()}
    if not all(values and _whole_numbers(values) for values in members.values()):
        return None
    return {name: tuple(values) for name, values in members.items()}


def _read_toml(path: Path) -> dict[str, Any]:
    reject_pipe(path)
    try:
        return parse_toml(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} must be a TOML file that can be read; {error}. Correct the file.") from error


def is_value(text: object) -> bool:
    """Whether it is a label value as text, as Decathlon has them.

    >>> is_value("12"), is_value("a"), is_value("9" * 5000)
    (True, False, False)
    """
    return isinstance(text, str) and text.isdecimal() and len(text) < 10


def label_values(values: Iterable[Any]) -> tuple[int, ...]:
    """The values, if they are ones of labels; ConfigError otherwise."""
    listed = list(values)
    if not _whole_numbers(listed):
        raise ConfigError(f"label values must be whole numbers; got {listed}.")
    return tuple(listed)


def _whole_numbers(values: object) -> bool:
    """Whether these are label values: whole numbers that any label map can hold."""
    return isinstance(values, list) and all(type(value) is int and abs(value) < 2**31 for value in values)
