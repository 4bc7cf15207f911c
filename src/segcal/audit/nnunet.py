"""What belongs to the predictions of an audit; of a model folder of nnU-Net, all that its cross-validation left.

A model folder is what `nnUNetv2_train` writes: TRAINER__PLANS__CONFIGURATION with dataset.json, plans.json and a folder
for each fold, whose validation cases that fold was not trained on. Labels lie where nnU-Net has them.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from segcal._io.parsing import parse_json
from segcal._io.words import listed
from segcal.errors import ConfigError
from segcal.evaluation.options import ReadOptions
from segcal.volumes.regions import has_regions

FOLD = re.compile(r"fold_(\d+)")


class Sources(NamedTuple):
    """Where predictions, labels and images are, how they are read, and what was found out on the way."""

    predictions: Path
    labels: Path
    images: Path | None
    options: ReadOptions
    found: tuple[str, ...] = ()
    predict: str | None = None
    """The command of nnU-Net that makes maps of new cases."""


class Model(NamedTuple):
    """A model folder of nnU-Net, and its folds with validation cases by number."""

    folder: Path
    folds: dict[int, Path]

    @property
    def dataset(self) -> str:
        """The name of its dataset, as Dataset004_Hippocampus: what plans.json says, or the folder above."""
        try:
            told = parse_json((self.folder / "plans.json").read_text(encoding="utf-8"))["dataset_name"]
        except (OSError, ValueError, LookupError, TypeError):
            told = None
        return told if isinstance(told, str) and told == Path(told).name else self.folder.absolute().parent.name

    def command(self, name: str, *, fold: str = "") -> str:
        """The start of a command of nnU-Net for this model: with its dataset, configuration, trainer and plans."""
        number = re.match(r"Dataset0*(\d+)_", self.dataset)
        dataset = number[1] if number else self.dataset
        trainer, plans, configuration = (*self.folder.absolute().name.split("__"), "", "", "")[:3]
        if name == "nnUNetv2_train":
            start = f"{name} {dataset} {configuration or 'CONFIGURATION'} {fold}"
        else:
            start = f"{name} -d {dataset} -c {configuration or 'CONFIGURATION'}"
        other_trainer = f" -tr {trainer}" if trainer and trainer != "nnUNetTrainer" else ""
        other_plans = f" -p {plans}" if plans and plans != "nnUNetPlans" else ""
        return start + other_trainer + other_plans


def find_sources(predictions: Path, labels: Path | None, images: Path | None, options: ReadOptions) -> Sources:
    """What is given; for a model folder of nnU-Net, labels, images and regions that are not given are found.

    ConfigError where there are no labels, and where the model has no maps.
    """
    model = open_model(predictions)
    if model is None:
        if labels is None:
            raise ConfigError(_no_labels(predictions))
        return Sources(predictions, labels, images, options)
    found = [_check_maps(model)]
    if labels is None:
        labels = _existing(model, "gt_segmentations", "labelsTr")
        if labels is None:
            looked = listed([str(path) for path in _places(model, "gt_segmentations", "labelsTr")], 8)
            raise ConfigError(
                f"the labels of {model.dataset} must be where nnU-Net has them; none of these is there: {looked}. Set "
                f"nnUNet_raw or nnUNet_preprocessed, or give LABELS after the model folder."
            )
        found.append(f"labels: {labels}")
    images = images or _existing(model, "imagesTr")
    description = model.folder / "dataset.json"
    if options.regions is None and options.class_names is None and has_regions(description):
        options = replace(options, regions=os.fspath(description), sigmoid=True)
        found.append(f"regions of {description}, which overlap")
    predict = f"{model.command('nnUNetv2_predict')} -i NEW_IMAGES -o NEW_MAPS --save_probabilities"
    return Sources(predictions, labels, images, options, tuple(filter(None, found)), predict)


def open_model(folder: Path) -> Model | None:
    """The model in a folder; None where the folder is none."""
    if not (folder / "dataset.json").is_file() or not (folder / "plans.json").is_file():
        return None
    folds = {int(match[1]): path for path in _folders(folder) if (match := FOLD.fullmatch(path.name))}
    if not folds and not (folder / "fold_all").is_dir():
        return None
    return Model(folder, {number: folds[number] / "validation" for number in sorted(folds)})


def _folders(folder: Path) -> list[Path]:
    try:
        return sorted(path for path in folder.iterdir() if path.is_dir())
    except OSError as error:
        raise ConfigError(f"{folder} must be a folder that can be read; {error}. Check its permissions.") from error


def _check_maps(model: Model) -> str:
    """What is to be known of its folds; ConfigError where none has maps, with the commands that make them."""
    if not model.folds:
        raise ConfigError(
            f"{model.folder} must have folds of a cross-validation, fold_0 and so on; it has fold_all alone, which was "
            f"trained on all cases. Predict other cases with --save_probabilities, and audit these."
        )
    mapped = [number for number, folder in model.folds.items() if any(folder.glob("*.npz"))]
    lacking = [number for number in model.folds if number not in mapped]
    each = [f"`{model.command('nnUNetv2_train', fold=str(number))} --val --npz`" for number in lacking]
    commands = ", ".join(each)
    if not mapped:
        raise ConfigError(
            f"the folds of {model.folder} must have probability maps, fold_0/validation/CASE.npz; they have none. "
            f"These make them, without training again: {commands}."
        )
    folds = "folds" if len(mapped) > 1 else "fold"
    told = f"{model.dataset}: validation maps of {folds} {', '.join(map(str, mapped))}"
    if lacking:
        which = ", ".join(f"fold_{number}" for number in lacking)
        told += f"; no maps of {which}, which these make: {commands}"
    return told


def _existing(model: Model, *names: str) -> Path | None:
    """The first of the places that is there and not empty."""
    return next((path for path in _places(model, *names) if path.is_dir() and any(path.iterdir())), None)


def _places(model: Model, *names: str) -> Iterator[Path]:
    """Where a folder of the dataset may be: beside the model, or where the environment or the layout says.

    nnU-Net copies labels to nnUNet_preprocessed/DATASET/gt_segmentations; nnUNet_raw/DATASET has the original ones.
    """
    folder = model.folder.absolute()
    if names[0] == "gt_segmentations":
        yield from (folder / names[0], folder.parent / names[0])
    home = folder.parent.parent.parent
    for name in names:
        root = "nnUNet_preprocessed" if name == "gt_segmentations" else "nnUNet_raw"
        told = os.environ.get(root)
        roots = [Path(told)] if told else []
        for place in [*roots, home / root]:
            yield place / model.dataset / name


def _no_labels(predictions: Path) -> str:
    if not predictions.exists():
        return f"predictions must be a folder of maps or a model folder of nnU-Net; {predictions} is not there."
    models = [path for path in _folders(predictions) if open_model(path)] if predictions.is_dir() else []
    if models:
        return (
            f"one model folder of nnU-Net must be given; {predictions} has: {listed([str(each) for each in models])}."
        )
    above = [path for path in predictions.absolute().parents[:2] if open_model(path)]
    if above:
        return f"the model folder must be given as a whole, with its folds: {above[0]}."
    return (
        f"LABELS must be given, as `segcal audit MAPS LABELS --out DIR`: {predictions} is no model folder of nnU-Net, "
        f"which has dataset.json, plans.json and fold_0 to fold_4."
    )
