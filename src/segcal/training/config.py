"""One run, one file, one frozen object, one hash.

Values come from the defaults here (the paper's), then the method, then the dataset's recipe for what is left open,
then a TOML file, then `--set key=value`. The resolved configuration is written into the run's folder; it runs again
from there.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import tomli_w
from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from segcal._io.files import reject_pipe, write_whole
from segcal._io.parsing import parse_setting, parse_toml
from segcal.binning import MOST_BINS, Binning, Kernel
from segcal.datasets import Dataset
from segcal.errors import LARGEST_SEED, ConfigError, FileError, is_number, one_of
from segcal.losses import AbsentClasses, EmptyBins, SegmentationLoss

Voxels = Annotated[int, Field(ge=1, le=1 << 14)]
Triple = tuple[Voxels, Voxels, Voxels]
Millimeters = Annotated[float, Field(gt=0)]


def _ordered(window: tuple[float, float]) -> tuple[float, float]:
    if window[0] >= window[1]:
        raise ValueError("must be the lower end and the upper one")
    return window


Window = Annotated[tuple[float, float], AfterValidator(_ordered)]


def _plain(content: Any) -> Any:
    """The content, if it reads back as the same once it is written: no NaN, no dates."""
    if isinstance(content, dict):
        return {key: _plain(value) for key, value in content.items()}
    if isinstance(content, (list, tuple)):
        return [_plain(value) for value in content]
    if not (isinstance(content, (str, bool, int)) or is_number(content)):
        raise ValueError(f"must consist of words, finite numbers and lists of them, not of {content!r}")
    return content


Settings = Annotated[dict[str, Any], AfterValidator(_plain)]


class Section(BaseModel):
    """A part of a file: frozen, and without keys that it does not know."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _numbers_are_no_truth_values(cls, value: Any, info: ValidationInfo) -> Any:
        """Refuse true and false, which pydantic takes for 1 and 0."""
        annotation = cls.model_fields[str(info.field_name)].annotation
        values = value if isinstance(value, (list, tuple)) else (value,)
        if any(isinstance(each, bool) for each in values) and bool not in (annotation, *get_args(annotation)):
            raise ValueError("must not be true or false")
        return value

    def to_toml(self) -> str:
        """As text that reads back as the same; what is None is left out."""
        return tomli_w.dumps(_without_none(self.model_dump(mode="json")))

    def save(self, path: Path) -> None:
        write_whole(path, self.to_toml().encode())


class DataConfig(Section):
    """Which images, and how they are prepared. What is None is taken from the dataset's recipe."""

    dataset: str
    root: str
    split: str | None = None
    """A split file; None: the dataset's own split, drawn with `split_seed`."""
    split_seed: int = Field(default=0, ge=0, lt=LARGEST_SEED)
    spacing_mm: tuple[Millimeters, Millimeters, Millimeters] | Literal["keep"] | None = None
    intensity: Literal["zscore", "window"] | None = None
    window: Window | None = None
    crop_foreground: bool | None = None
    patch: Triple | None = None
    inference_patch: Triple | None = None
    inference_overlap: float = Field(default=0.25, ge=0, lt=1)
    sampling: Literal["foreground", "random"] | None = None
    augmentation: Literal["affine", "brats", "none"] | None = None
    raters: Literal["draw", "mean"] = "draw"
    """Where several raters labeled a case: labels of one of them, drawn anew for every patch, or the mean of all."""


PAPER_NETWORK: dict[str, Any] = {
    "init_filters": 32,
    "blocks_down": [1, 2, 2, 4, 4],
    "norm": "INSTANCE",
    "dsdepth": 4,
}


FETCHING = ("weights", "path_or_repo_id", "filename")
"""Arguments by which networks of MONAI load files from elsewhere, beside those that begin with pretrained."""


class NetworkConfig(Section):
    """A network of `monai.networks.nets` by name, and its arguments; those of the paper's network are its defaults."""

    name: str = "SegResNetDS"
    options: Settings = Field(default_factory=lambda: dict(PAPER_NETWORK))

    @field_validator("options")
    @classmethod
    def _fetches_nothing(cls, options: dict[str, Any]) -> dict[str, Any]:
        for key in options:
            if key.startswith("pretrained") or key in FETCHING:
                raise ValueError(f"must not fetch weights, as {key!r} does")
        return options

    @model_validator(mode="before")
    @classmethod
    def _another_network_has_other_options(cls, content: Any) -> Any:
        if isinstance(content, dict) and content.get("name", "SegResNetDS") != "SegResNetDS":
            return {"options": {}} | content
        return content


class AceConfig(Section):
    """The calibration term."""

    weight: float = Field(default=0.0, ge=0)
    bins: int = Field(default=20, ge=1, le=MOST_BINS)
    kernel: Kernel = "hard"
    bandwidth: float | None = None
    empty_bins: EmptyBins = "skip"
    absent_classes: AbsentClasses = "zero"

    @model_validator(mode="before")
    @classmethod
    def _drop_begin(cls, content: Any) -> Any:
        """Accept `begin = 0.0`, which version 0.3.0 wrote into every run's config.toml."""
        if isinstance(content, dict) and content.get("begin") == 0:
            return {key: value for key, value in content.items() if key != "begin"}
        return content


class LossConfig(Section):
    """Weights of the three terms."""

    dice: float = Field(default=1.0, ge=0)
    ce: float = Field(default=1.0, ge=0)
    ace: AceConfig = AceConfig()

    def build(self) -> SegmentationLoss:
        ace = self.ace
        return SegmentationLoss(
            self.dice,
            self.ce,
            ace.weight,
            Binning(ace.bins, kernel=ace.kernel, bandwidth=ace.bandwidth),
            empty_bins=ace.empty_bins,
            absent_classes=ace.absent_classes,
        )


class TrainingConfig(Section):
    """The paper's protocol. What is None is taken from the dataset's recipe."""

    epochs: int | None = Field(default=None, ge=1)
    batch_size: int = Field(default=2, ge=1)
    patches_per_case: int = Field(default=1, ge=1)
    learning_rate: float | None = Field(default=None, gt=0)
    weight_decay: float = Field(default=1e-5, ge=0)
    warmup_epochs: float = Field(default=2.0, ge=0)
    warmup_start: float = Field(default=0.5, gt=0, le=1)
    validate_every: int = Field(default=10, ge=1)
    mixed_precision: bool = True
    """On a GPU; the CPU computes in float32."""
    loader_workers: int = Field(default=0, ge=0)
    """Processes that cut and augment patches; 0: the training process itself."""


class EvaluationConfig(Section):
    """How validation, and later the test, is measured."""

    bins: int = Field(default=20, ge=1, le=12_000)


NO_MATTER = ("data.root", "training.loader_workers")  # to what a run learns


class RunConfig(Section):
    """Everything that decides what a run learns."""

    method: str = "dice-ce"
    seed: int = Field(default=0, ge=0, lt=LARGEST_SEED)
    data: DataConfig
    network: NetworkConfig = NetworkConfig()
    loss: LossConfig = LossConfig()
    training: TrainingConfig = TrainingConfig()
    evaluation: EvaluationConfig = EvaluationConfig()

    @property
    def hash(self) -> str:
        """Differs where anything differs that could change the result: not where the data lie on this machine."""
        content = self.model_dump(mode="json")
        for key in NO_MATTER:
            section, name = key.split(".")
            content[section].pop(name)
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]

    def resolved(self, dataset: Dataset) -> RunConfig:
        """With what was left open filled in from the dataset's recipe."""
        recipe = dataset.recipe
        data = self.data
        filled = {
            "spacing_mm": recipe.spacing_mm or "keep",
            "intensity": recipe.intensity,
            "window": recipe.window,
            "crop_foreground": recipe.crop_foreground,
            "patch": recipe.patch,
            "inference_patch": data.patch or recipe.inference_patch,
            "sampling": recipe.sampling,
            "augmentation": recipe.augmentation,
        }
        open_data = {name: value for name, value in filled.items() if getattr(data, name) is None}
        training = {
            name: value
            for name, value in {"epochs": recipe.epochs, "learning_rate": recipe.learning_rate}.items()
            if getattr(self.training, name) is None
        }
        paths = {key: os.path.abspath(path) for key in ("root", "split") if (path := getattr(data, key))}
        whole = self.model_copy(
            update={
                "data": data.model_copy(update=open_data | paths),
                "training": self.training.model_copy(update=training),
            }
        )
        if whole.data.intensity == "window" and whole.data.window is None:
            raise ConfigError(
                "data.window must be two numbers for data.intensity = 'window'. Set the ends of the window."
            )
        return whole


METHODS: dict[str, dict[str, Any]] = {
    "dice-ce": {"dice": 1.0, "ce": 1.0, "ace": {"weight": 0.0}},
    "ce": {"dice": 0.0, "ce": 1.0, "ace": {"weight": 0.0}},
    "hard-ace": {"dice": 1.0, "ce": 1.0, "ace": {"weight": 1.0, "kernel": "hard"}},
    "soft-ace": {"dice": 1.0, "ce": 1.0, "ace": {"weight": 1.0, "kernel": "triangular"}},
    "balanced": {"dice": 1.0, "ce": 1.0, "ace": {"weight": 0.3, "kernel": "triangular"}},
}
"""Four of the paper's five methods as settings of the loss; the fifth, temperature scaling, follows a trained one.

"balanced" is soft-ace at a weight that costs less Dice and likelihood. It is meant for members of an ensemble that are
trained to the end: on the hippocampus two of them match dice-ce at a lower ACE, after short trainings on ACDC they do
not (docs/results.md).
"""

PRESETS: dict[str, dict[str, Any]] = {
    "paper": {},
    # What two CPU cores train in minutes. Batch norm: the statistics of instance norm differ between small patches and
    # whole images, which ruins calibration.
    "small": {
        "network": {
            "name": "UNet",
            "options": {"channels": [16, 32, 64], "strides": [2, 2], "num_res_units": 1, "norm": "BATCH"},
        },
        "training": {"epochs": 25, "learning_rate": 2e-3, "warmup_epochs": 1.0, "validate_every": 5},
    },
}


def make_config(
    *,
    file: str | os.PathLike[str] | None = None,
    dataset: str | None = None,
    root: str | os.PathLike[str] | None = None,
    method: str | None = None,
    preset: str = "paper",
    settings: Mapping[str, Any] | None = None,
    changes: Iterable[str] = (),
) -> RunConfig:
    """A configuration from a file, or from a dataset, a method and a preset.

    `settings` and `changes` override all of these: nested as in a file, or each as key=value.
    An unknown key or a wrong value is a ConfigError that names it.
    """
    one_of("preset", preset, tuple(PRESETS))
    content: dict[str, Any] = {}
    if file is not None:
        reject_pipe(file)
        content = read_toml(Path(file))
    name = method or content.get("method", "dice-ce")
    one_of("method", name, tuple(METHODS))
    loss = {"method": name, "loss": METHODS[name]}
    given = {"dataset": dataset, "root": None if root is None else os.fspath(root)}
    changed = merge_changes(settings or {}, changes)
    layers = [
        {"network": {"name": "SegResNetDS", "options": PAPER_NETWORK}},
        PRESETS[preset],
        loss,
        content,
        loss if method else {},
        {"data": {key: value for key, value in given.items() if value is not None}},
        changed,
    ]
    merged: dict[str, Any] = {}
    for layer in layers:
        if _network_name(layer) not in (None, _network_name(merged)):
            merged.pop("network", None)  # the options of one network mean nothing to another
        merged = merge(merged, layer)
    return _validated(merged, "the configuration" if file is None else os.fspath(file))


def read_config(path: str | os.PathLike[str]) -> RunConfig:
    """A configuration from a TOML file alone."""
    return make_config(file=path)


def read_toml(path: Traversable) -> dict[str, Any]:
    """The content of a file of settings."""
    try:
        return parse_toml(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise FileError(f"{path} must be a configuration file; {error.strerror or error}. Check the path.") from error
    except ValueError as error:
        raise ConfigError(f"{path} must be TOML; {error}. Correct the file.") from error


def merge_changes(below: Mapping[str, Any], changes: Iterable[str]) -> dict[str, Any]:
    """Settings with changes, each key=value, on top."""
    for change in changes:
        below = merge(below, _change(change))
    return dict(below)


def _change(text: str) -> dict[str, Any]:
    """`loss.ace.weight=0.3` as nested dictionaries."""
    key, value = parse_setting(text)
    if key == "method":
        raise ConfigError("the method must be given with --method, which sets the loss, too; got --set method.")
    for part in reversed(key.split(".")):
        value = {part: value}
    return dict(value)


def _network_name(content: Mapping[str, Any]) -> Any:
    network = content.get("network")
    return network.get("name") if isinstance(network, Mapping) else None


def merge(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Nested settings, those above winning."""
    merged = dict(below)
    for key, value in above.items():
        both = isinstance(value, Mapping) and isinstance(merged.get(key), Mapping)
        merged[key] = merge(merged[key], value) if both else value
    return merged


def _validated(content: dict[str, Any], source: str) -> RunConfig:
    data = content.get("data")
    for key in ("dataset", "root"):
        if isinstance(data, Mapping) and not data.get(key):
            raise ConfigError(
                f"{source}: data.{key} must be given; got none."
                f" Add --{'data-' * (key == 'root')}{key} or set it in a file."
            )
    try:
        config = RunConfig.model_validate(content)
        config.loss.build()  # refuses settings that do not go together
    except ValidationError as error:
        raise ConfigError(f"{source}: {first_fault(error, RunConfig)}") from None
    except ConfigError as error:
        raise ConfigError(f"{source}: loss: {error}") from None
    return config


def first_fault(error: ValidationError, model: type[BaseModel]) -> str:
    """The first of pydantic's findings, in our words."""
    first = error.errors()[0]
    key = ".".join(part for part in map(str, first["loc"]) if "[" not in part)  # pydantic's names of types
    if first["type"] == "extra_forbidden":
        known = list(_keys(model))
        near = get_close_matches(key, known, 1, 0.6) or [k for k in known if k.rsplit(".")[-1] == key.rsplit(".")[-1]]
        return f"unknown key {key!r}." + (f" Did you mean {near[0]!r}?" if near else "")
    what = first["msg"].removeprefix("Input ").removeprefix("Value error, ")
    return f"{key}: {what[:1].lower()}{what[1:]}; got {first['input']!r}."


def _keys(model: type[BaseModel], prefix: str = "") -> Iterable[str]:
    for name, field in model.model_fields.items():
        yield prefix + name
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from _keys(field.annotation, f"{prefix}{name}.")


def _without_none(content: Any) -> Any:
    if isinstance(content, dict):
        return {key: _without_none(value) for key, value in content.items() if value is not None}
    return content
