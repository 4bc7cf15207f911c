"""What the channels of predictions are: classes, label values or regions and their names, from options and files.

A file of ours beside maps that `segcal predict` wrote says all of it; a dataset.json says names, and which label is
left out.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeGuard, cast

from segcal._io.files import write_whole
from segcal._io.parsing import parse_json
from segcal.errors import ConfigError, SegcalError
from segcal.evaluation.doubts import SAVE_PROBABILITIES
from segcal.evaluation.options import Options, ReadOptions
from segcal.volumes import count_channels
from segcal.volumes.regions import (
    Regions,
    has_regions,
    is_list,
    label_values,
    names_by_value,
    read_class_names,
    read_ignored,
    read_regions,
)

BESIDE_MAPS = "segcal-classes.json"
_FORMAT = "segcal classes 1"
_BACKGROUND = ("background", "bg")


@dataclass(frozen=True)
class Naming:
    """Names by label value, and where they are from; `whole`: they must be as many as there are labels."""

    names: dict[int, str]
    source: str
    whole: bool = False
    regions: Regions | None = None
    values: tuple[int, ...] | None = None
    ignore_index: int | None = None

    def into(self, options: Options) -> Options:
        """The options with all that is told here; what they ignore already counts."""
        return replace(
            options,
            regions=self.regions,
            values=self.values,
            class_names=tuple(sorted(self.names.items())) or None,
            ignore_index=self.ignore_index if options.ignore_index is None else options.ignore_index,
        )


def read_naming(predictions: Path, labels: Path, options: ReadOptions) -> Naming:
    """What the options say, else the files beside predictions and labels, else nothing."""
    own = (predictions.parent if predictions.is_file() else predictions) / BESIDE_MAPS
    if options.class_names is None and options.regions is None and own.is_file():
        return read_own(own)
    described = _find_dataset_json(predictions, labels) if options.class_names is None else None
    if options.regions is None and described is not None and options.sigmoid and has_regions(described):
        raise ConfigError(f"{described} has regions, which --sigmoid predictions are of; add --regions {described}.")
    return name_channels(options, described)


def read_shared_naming(predictions: Path, labels: Sequence[Path], options: ReadOptions) -> Naming:
    """Return what `read_naming` finds with the label folders of all raters, whatever their order.

    Raises:
        ConfigError: If files in two of the folders name different classes, or different labels to ignore.
    """
    namings = [read_naming(predictions, folder, options) for folder in labels]
    first, *others = [naming for naming in namings if naming.names or naming.ignore_index is not None] or namings[:1]
    for other in others:
        same_ignored = options.ignore_index is not None or other.ignore_index == first.ignore_index
        if other.names != first.names or not same_ignored:
            raise ConfigError(
                f"raters must have the same class names and ignored label; {first.source} and {other.source} differ. "
                f"Keep one of the files, or give --class-names and --ignore-index."
            )
    return first


def name_channels(options: ReadOptions, described: str | None = None) -> Naming:
    """What the options say of classes and regions; names that they do not give are those of the dataset.json."""
    given = options.class_names
    told = None if options.regions is None else read_regions(options.regions)
    listed = given is not None and is_list(given)
    if told is not None and told.members and listed:
        raise ConfigError(
            f"with --regions, names must be those of the regions; leave out --class-names {_text(given)}."
        )
    source = described if given is None else given
    names = {} if source is None else read_class_names(source)
    files = [each for each in (source, options.regions) if _is_file(each)]
    ignored = [value for each in files if (value := read_ignored(each)) is not None]
    naming = Naming(names, _text(source), listed, told, ignore_index=next(iter(ignored), None))
    if told is None or told.members:
        return naming
    return _of_values(naming, told.values or (), sigmoid=options.sigmoid)


def _is_file(source: object) -> TypeGuard[str | os.PathLike[str]]:
    return isinstance(source, str | os.PathLike) and os.fspath(source).endswith((".json", ".toml"))


def _text(source: object) -> str:
    """Where names are from, in a message."""
    if source is None or isinstance(source, str | os.PathLike):
        return "" if source is None else os.fspath(source)
    return ",".join(map(str, source.values() if isinstance(source, Mapping) else cast(Sequence[object], source)))


def _of_values(naming: Naming, values: tuple[int, ...], *, sigmoid: bool) -> Naming:
    """Classes of these label values, exclusive or, for a sigmoid, each a region by itself."""
    names = naming.names
    if naming.whole:
        if len(names) != len(values):
            raise ConfigError(
                f"--class-names must name a class for each of the values {list(values)}, in their order; got "
                f"{', '.join(names.values())}."
            )
        names = dict(zip(values, names.values(), strict=True))
    if not sigmoid:
        return replace(naming, names=names, values=values, regions=None)
    each: dict[str, tuple[int, ...]] = {names.get(value, f"class {value}"): (value,) for value in values}
    return replace(naming, names={}, whole=False, regions=Regions(each, values))


def _find_dataset_json(predictions: Path, labels: Path) -> str | None:
    """The dataset.json in either folder, or beside the labels."""
    paths = (folder / "dataset.json" for folder in (predictions, labels, labels.parent))
    return next((str(path) for path in paths if path.is_file()), None)


def check_names(
    naming: Naming, cases: Sequence[Any], options: Options, *, count: Callable[[Any], int] = count_channels
) -> None:
    """Refuse names that are not those of the predictions' channels; headers tell, of the first case if it agrees."""
    if not naming.names or options.regions is not None:
        return
    numbers: Counter[int] = Counter()
    for files in cases:
        try:
            numbers[count(files)] += 1
        except (SegcalError, OSError):
            continue  # whoever measures it says why
        if sum(numbers.values()) == 1 and not _fault(naming, next(iter(numbers)), options):
            return
    if numbers:
        usual = min(numbers, key=lambda number: (-numbers[number], number))
        if fault := _fault(naming, usual, options):
            raise ConfigError(fault)


def check_same_names(first: Naming, other: Naming) -> None:
    """Refuse members of an ensemble whose files name other classes, label values or regions."""
    told = [(naming.names, naming.values, naming.regions) for naming in (first, other)]
    if first.names and other.names and told[0] != told[1]:
        names = [", ".join(naming.names.values()) for naming in (first, other)]
        raise ConfigError(
            f"members must have the same classes, label values and regions; {first.source} and {other.source} differ: "
            f"{names[0]} and {names[1]}."
        )


def _fault(naming: Naming, channels: int, options: Options) -> str:
    """What is wrong with the names for so many channels; empty where nothing is."""
    labels = labels_of(channels, options)
    seen = f"predictions have {channels} channel{'s' * (channels > 1)}"
    seen += f", so labels are {', '.join(map(str, labels))}" if len(labels) < 10 else f" and {len(labels)} labels"
    if naming.whole and len(naming.names) != len(labels):
        given = ",".join(naming.names.values())
        without = len(naming.names) == len(labels) - 1 and next(iter(naming.names.values())).lower() not in _BACKGROUND
        remedy = ""
        if without and not (options.sigmoid and channels > 1):
            remedy = f" If the background is missing, give --class-names background,{given}."
        return f"--class-names must name every label from 0 on: {seen}; got {len(naming.names)} names, {given}.{remedy}"
    unknown = [(value, name) for value, name in naming.names.items() if value not in labels]
    if unknown:
        value, name = unknown[0]
        maps = f" If the predictions are label maps, {SAVE_PROBABILITIES}." if channels == 1 else ""
        return (
            f"class names must be those of the predictions: {seen}; {naming.source} names label {value}, {name!r}. "
            f"Give the names with --class-names.{maps}"
        )
    return ""


def labels_of(channels: int, options: Options) -> tuple[int, ...]:
    """Label values of so many channels; a single one has two, its background's and its own."""
    return options.values or tuple(range(max(channels, 2)))


def write_own(
    path: Path, classes: Sequence[str], values: Sequence[int], regions: Regions | None, **more: object
) -> None:
    """Write what a reader of maps must know of their channels."""
    told = None
    if regions is not None:
        told = {"members": regions.members, "values": regions.values, "aliases": regions.aliases}
    content = {"format": _FORMAT, "classes": list(classes), "values": list(values), "regions": told} | more
    write_whole(path, json.dumps(content, indent=2, ensure_ascii=False).encode())


def copy_description(source: Path, out: Path) -> None:
    """Copy what says what the maps in a folder are, so that others made of them are read alike."""
    places = [source / name for name in (BESIDE_MAPS, "dataset.json", "plans.json")]
    if not places[-1].is_file():
        places[-1] = source.parent.parent / "plans.json"  # above a fold that nnU-Net validates
    for path in places:
        if path.is_file():
            write_whole(out / path.name, path.read_bytes())


def read_own(path: Path) -> Naming:
    """What `write_own` wrote."""
    try:
        content = parse_json(path.read_text(encoding="utf-8"))
        if content["format"] != _FORMAT:
            raise ValueError(f"its format is {content['format']!r}")
        values = label_values(content["values"])
        names = names_by_value(path, zip(values, map(str, content["classes"]), strict=True))
        regions = Regions.from_json(content["regions"])
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise ConfigError(f"{path} must hold the classes of maps, as segcal writes them; {error}.") from error
    plain = values == tuple(range(len(values)))
    return Naming(names, str(path), regions=regions, values=None if plain or regions is not None else values)
