"""What a study is: datasets, methods and seeds in one TOML file, and the runs that follow from it.

A run is known by the hash of its resolved configuration. Two methods that need the same network (Dice + CE, and the
same with a temperature) share a run, and so do the points of a sweep that repeat a method's own settings.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import Field, ValidationError

from segcal._io.jobs import key_of
from segcal.calibrators import CALIBRATORS, Calibrator, make_calibrator
from segcal.datasets import Dataset, dataset_names, known_dataset, make_phantom, make_split, open_dataset
from segcal.datasets.recipes import PLAIN
from segcal.errors import ConfigError, FileError, SegcalError, one_of
from segcal.plots.pareto import FRONT
from segcal.training.config import (
    METHODS,
    PRESETS,
    RunConfig,
    Section,
    Settings,
    first_fault,
    make_config,
    merge,
    merge_changes,
    read_toml,
)

AFTER = " + "  # METHOD + CALIBRATOR
OVER_SEEDS = " over seeds"
_ENSEMBLE = re.compile(r"(?P<method>ensemble\((?P<members>.*)\))(?: \+ (?P<calibrator>.+))?")
DATA_VARIABLE = "SEGCAL_DATA"
PHANTOM = "phantom"
SHIPPED = resources.files("segcal.study") / "shipped"


class DatasetPlan(Section):
    """A dataset of the study; `set` are settings of its runs."""

    dataset: str
    root: str | None = None
    """None: the phantom, which is made on the spot."""
    set: Settings = Field(default_factory=dict)


class Variant(Section):
    """A method of one's own: one of segcal's with other settings, perhaps calibrated afterwards."""

    method: str
    calibrator: str | None = None
    calibrator_options: Settings = Field(default_factory=dict)
    set: Settings = Field(default_factory=dict)


class Sweep(Section):
    """Methods trained with each number of bins, and with each weight of the calibration term."""

    methods: tuple[str, ...]
    bins: tuple[int, ...] = ()
    weights: tuple[float, ...] = ()


class StudyConfig(Section):
    """A study's file. The first method is the baseline."""

    title: str
    about: str = ""
    preset: str = "paper"
    seeds: tuple[int, ...] = Field(default=(0,), min_length=1)
    methods: tuple[str, ...] = Field(min_length=1)
    """One of segcal's, the name of a variant, an ensemble of such, METHOD + CALIBRATOR."""
    variants: dict[str, Variant] = Field(default_factory=dict)
    datasets: dict[str, DatasetPlan] = Field(min_length=1)
    sweep: Sweep | None = None
    set: Settings = Field(default_factory=dict)
    """Settings of every run."""
    maps: int = Field(default=2, ge=0)
    """Test cases of each dataset that are shown as probability maps."""

    @property
    def baseline(self) -> str:
        return self.methods[0]

    def variant(self, name: str) -> Variant:
        """What a method of the study stands for."""
        if name in self.variants:
            return self.variants[name]
        if ensemble := _ENSEMBLE.fullmatch(name):
            return Variant(method=ensemble["method"], calibrator=ensemble["calibrator"])
        method, plus, calibrator = name.partition(AFTER)
        return Variant(method=method, calibrator=calibrator if plus else None)


class Mixture(NamedTuple):
    """What an ensemble is of: methods, trained with the same seed; or one method, trained with all seeds."""

    methods: tuple[str, ...]
    over_seeds: bool

    @staticmethod
    def of(method: str) -> Mixture | None:
        """What a name spells; None where it is not that of an ensemble.

        >>> Mixture.of("ensemble(dice-ce, soft-ace)")
        Mixture(methods=('dice-ce', 'soft-ace'), over_seeds=False)
        >>> Mixture.of("ensemble(dice-ce over seeds)")
        Mixture(methods=('dice-ce',), over_seeds=True)
        """
        found = _ENSEMBLE.fullmatch(method)
        if found is None:
            return None
        inside = found["members"].strip()
        methods = (name.strip() for name in inside.removesuffix(OVER_SEEDS).split(","))
        return Mixture(tuple(methods), inside.endswith(OVER_SEEDS))


@dataclass(frozen=True)
class Study:
    """A study that was read: its content, and the folder that its relative paths start from."""

    name: str
    config: StudyConfig
    folder: Path | None


class Fitting(NamedTuple):
    """A calibrator that is fitted to a run's validation cases."""

    method: str
    options: tuple[tuple[str, str], ...] = ()
    """Names and values, the latter as JSON."""

    @property
    def folder(self) -> str:
        """Where in the run's folder it is kept."""
        mark = hashlib.sha256(json.dumps(self.options).encode()).hexdigest()[:8]
        return f"calibrated/{self.method}" + (f"-{mark}" if self.options else "")

    def make(self) -> Calibrator:
        return make_calibrator(self.method, **{name: json.loads(value) for name, value in self.options})


@dataclass(frozen=True)
class PlannedRun:
    """One training, or the mean of several, and what is fitted to it afterwards."""

    dataset: str
    """As the study calls it."""
    config: RunConfig
    opened: Dataset | None
    """None where its data are missing; then the configuration is not resolved."""
    fittings: tuple[Fitting, ...]
    members: tuple[PlannedRun, ...] = ()
    """Of an ensemble, which trains nothing: the runs it is the mean of. Its configuration is that of the first."""

    @property
    def hash(self) -> str:
        """Differs where anything differs that could change the result."""
        return key_of([member.hash for member in self.members])[:16] if self.members else self.config.hash

    @property
    def name(self) -> str:
        """Of its folder: another configuration is another folder."""
        dataset = self.dataset.replace(" ", "_")  # what the hash does not know: its root may move
        method = "ensemble" if self.members else self.config.method
        seeds = dict.fromkeys(run.config.seed for run in self.members or (self,))
        return f"{dataset}-{method}-seed{'-'.join(map(str, seeds))}-{self.hash}"

    def without_data(self) -> PlannedRun:
        """For another process, which opens its own."""
        return replace(self, opened=None, members=tuple(member.without_data() for member in self.members))


class Arm(NamedTuple):
    """A method on a dataset with a seed: a run, and the calibrator that is applied to it, if any."""

    dataset: str
    method: str
    seed: int
    run: str
    fitting: Fitting | None

    def results(self, runs: Path, side: str) -> Path:
        """The folder of its evaluation."""
        run = runs / self.run
        return run / side if self.fitting is None else run / self.fitting.folder / side


class SweepPoint(NamedTuple):
    """A place on a sensitivity curve of a dataset: the arms of `label` are its results."""

    dataset: str
    method: str
    against: str  # "bins" or "lambda"
    setting: float
    label: str


@dataclass(frozen=True)
class Plan:
    """All runs of a study, the arms that its tables compare, and the points of its curves."""

    study: Study
    runs: dict[str, PlannedRun]
    arms: tuple[Arm, ...]
    points: tuple[SweepPoint, ...]
    missing: dict[str, str]
    """Datasets whose files are not there, and what was looked for."""

    @property
    def file(self) -> StudyConfig:
        """The study's file with roots where they were found, so that it says the same from anywhere."""
        found = {run.dataset: run.config.data.root for run in self.runs.values() if run.opened is not None}
        datasets = {
            name: part.model_copy(update={"root": found[name]}) if name in found else part
            for name, part in self.study.config.datasets.items()
        }
        return self.study.config.model_copy(update={"datasets": datasets})


class PlanRow(NamedTuple):
    """A run in the table of `segcal study plan`."""

    run: str
    """Its name; without the hash if data are missing, which may change it."""
    dataset: str
    methods: tuple[str, ...]
    """The methods of the study that use this run."""
    seed: int
    epochs: int
    """0 for an ensemble, which trains nothing."""
    steps: int | None
    """Of the optimizer, on one GPU; None if the number of training cases is not known."""


def describe_plan(plan: Plan) -> list[PlanRow]:
    """Return a row for every run of the study. If data are missing, the paper's number of training cases counts."""
    methods: dict[str, list[str]] = {name: [] for name in plan.runs}
    for arm in plan.arms:
        for name in (arm.run, *(member.name for member in plan.runs[arm.run].members)):
            methods[name].append(arm.method)
    return [
        PlanRow(
            name if run.opened else name.removesuffix(f"-{run.hash}"),
            run.dataset, tuple(methods[name]), run.config.seed, *_epochs_and_steps(run),
        )
        for name, run in plan.runs.items()
    ]  # fmt: skip


def _epochs_and_steps(run: PlannedRun) -> tuple[int, int | None]:
    if run.members:
        return 0, 0
    dataset = run.opened or known_dataset(run.config.data.dataset)
    if dataset is None:
        return run.config.training.epochs or PLAIN.epochs, None
    config = run.config.resolved(dataset)
    epochs = config.training.epochs
    assert epochs is not None  # resolved
    if dataset.cases:
        cases = len(make_split(dataset, seed=config.data.split_seed, file=config.data.split).train)
    else:
        cases = dataset.paper_cases[0]
    return epochs, epochs * steps_per_epoch(cases, config)


def steps_per_epoch(cases: int, config: RunConfig) -> int:
    """Return the number of batches of an epoch on one GPU; the last one is filled up."""
    return -(-cases * config.training.patches_per_case // config.training.batch_size)


def shipped_studies() -> dict[str, Study]:
    """The studies that come with the package, by name."""
    return {name: _study(name, read_toml(file), None) for name, file in _shipped().items()}


def _shipped() -> dict[str, Traversable]:
    """Their files, by name."""
    files = {file.name.removesuffix(".toml"): file for file in SHIPPED.iterdir() if file.name.endswith(".toml")}
    return dict(sorted(files.items()))


def read_study(source: str | os.PathLike[str], *, changes: Iterable[str] = ()) -> Study:
    """A study from a .toml file, or one that ships with segcal by its name; `changes` are key=value of its runs."""
    path, shipped = Path(source), _shipped()
    if str(source) in shipped:
        study = _study(str(source), read_toml(shipped[str(source)]), None)
    elif path.is_file():
        study = _study(path.stem, read_toml(path), path.absolute().parent)
    else:
        raise FileError(
            f"a study must be a .toml file, or one of {', '.join(shipped)}; {source} is neither."
            " Check the path or the name."
        )
    together = merge_changes(study.config.set, changes)
    return Study(study.name, study.config.model_copy(update={"set": together}), study.folder)


def _study(name: str, content: Mapping[str, Any], folder: Path | None) -> Study:
    try:
        config = StudyConfig.model_validate(content)
    except ValidationError as error:
        raise ConfigError(f"the study {name}: {first_fault(error, StudyConfig)}") from None
    one_of("preset", config.preset, tuple(PRESETS))
    swept = config.sweep.methods if config.sweep else ()
    for method in (*config.methods, *swept):
        _check_method(config, method)
    if twice := {method for method in config.methods if config.methods.count(method) > 1}:
        raise ConfigError(f"the study {name}: methods must differ; {twice.pop()!r} came twice.")
    if unknown := [method for method in swept if method not in config.methods]:
        raise ConfigError(
            f"the study {name}: methods of the sweep must be methods of the study; {unknown[0]!r} is not."
        )
    if mixed := [method for method in swept if Mixture.of(config.variant(method).method)]:
        raise ConfigError(f"the study {name}: methods of the sweep must be trained; {mixed[0]!r} is an ensemble.")
    for label, dataset in config.datasets.items():
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9 .-]*", label):
            raise ConfigError(
                f"the study {name}: names of datasets must be of letters, digits, spaces, '.' and '-'; got {label!r}."
            )
        one_of(f"the study {name}: datasets.{label}.dataset", dataset.dataset, dataset_names())
        if dataset.root is None and dataset.dataset != PHANTOM:
            raise ConfigError(
                f"the study {name}: datasets.{label}.root must be given; only the phantom needs none."
                " Add it to the file."
            )
    return Study(name, _with_split_files(config, folder) if folder else config, folder)


def _with_split_files(config: StudyConfig, folder: Path) -> StudyConfig:
    """With split files, which lie beside the study's own, by their whole paths."""

    def whole(settings: dict[str, Any]) -> dict[str, Any]:
        data = settings.get("data")
        split = data.get("split") if isinstance(data, dict) else None
        return merge(settings, {"data": {"split": os.fspath(folder / split)}}) if isinstance(split, str) else settings

    def changed(parts: Mapping[str, Any]) -> dict[str, Any]:
        return {name: part.model_copy(update={"set": whole(part.set)}) for name, part in parts.items()}

    parts = {"datasets": changed(config.datasets), "variants": changed(config.variants), "set": whole(config.set)}
    return config.model_copy(update=parts)


def _check_method(config: StudyConfig, name: str) -> None:
    known = config.variant(name)
    if name == FRONT:
        raise ConfigError(f"a variant must have a name that figures do not use themselves; got {name!r}.")
    mixed = Mixture.of(known.method)
    trained = mixed is not None or known.method in METHODS
    if not trained or (known.calibrator is not None and known.calibrator not in CALIBRATORS):
        raise ConfigError(
            f"a method of a study must be one of {', '.join(METHODS)}, one of them with a calibrator, as "
            f"'dice-ce + temperature' ({', '.join(CALIBRATORS)}), the name of a variant, or an ensemble, as "
            f"'ensemble(dice-ce, soft-ace)'; got {name!r}."
        )
    if mixed is not None:
        _check_ensemble(config, name, mixed)
    for key in ("method", "seed"):
        if key in known.set:
            raise ConfigError(f"variants.{name}.set must leave {key} to the study; it sets it.")


def _check_ensemble(config: StudyConfig, name: str, mixed: Mixture) -> None:
    for member in mixed.methods:
        known = config.variant(member)
        if known.method not in METHODS or known.calibrator is not None:
            raise ConfigError(
                f"members of an ensemble must be trained: {', '.join(METHODS)}, or variants of them without a "
                f"calibrator, as in 'ensemble(dice-ce, soft-ace) + temperature'; got {member!r} in {name!r}."
            )
    number = len(config.seeds) if mixed.over_seeds else len(set(mixed.methods))
    if number < 2 or len(set(mixed.methods)) < len(mixed.methods) or (mixed.over_seeds and len(mixed.methods) > 1):
        raise ConfigError(
            f"an ensemble must be of several methods, or of one over several seeds, as 'ensemble(dice-ce over seeds)'; "
            f"got {name!r} and {len(config.seeds)} seeds."
        )
    if config.variant(name).set:
        raise ConfigError(f"variants.{name}.set must be left to the members of the ensemble; it sets something.")


def make_plan(study: Study, out: str | os.PathLike[str], *, data: Iterable[str] = ()) -> Plan:
    """The runs of a study. `data` says where datasets lie: NAME=FOLDER for one, or a FOLDER that holds them.

    Data that are missing stop nothing here; their runs are planned without a folder of their own.
    """
    roots = dict(item.split("=", 1) for item in data if "=" in item)
    folders = [Path(item) for item in data if "=" not in item]
    folders += [Path(found)] if (found := os.environ.get(DATA_VARIABLE)) else []
    if unknown := sorted(set(roots) - set(study.config.datasets)):
        names = ", ".join(study.config.datasets)
        raise ConfigError(f"--data NAME=FOLDER must name a dataset of the study ({names}); got {unknown[0]!r}.")
    planner = _Planner(study)
    missing: dict[str, str] = {}
    for label, wanted in study.config.datasets.items():
        try:
            root = roots.get(label) or _find_root(wanted, study, folders, Path(out))
            opened = open_dataset(wanted.dataset, root)
        except SegcalError as error:
            root, opened, missing[label] = wanted.root or "", None, str(error)
        planner.add_dataset(_Place(label, wanted, root, opened))
    return Plan(study, planner.runs, tuple(planner.arms), tuple(planner.points), missing)


def _find_root(wanted: DatasetPlan, study: Study, folders: Iterable[Path], out: Path) -> str | Path:
    """Where a dataset is: made on the spot, absolute, beside the study's file, or in one of the folders."""
    if wanted.root is None:
        return make_phantom(out / "data")
    places = [*([study.folder] if study.folder else []), *folders]
    for place in places:
        if (place / wanted.root).exists():
            return place / wanted.root
    if Path(wanted.root).is_absolute():
        return wanted.root
    where = f"in {', '.join(map(str, places))}" if places else "anywhere: no folder of data was given"
    raise FileError(f"the folder {wanted.root} must be there; it is not {where}. Give --data FOLDER, or NAME=FOLDER.")


class _Place(NamedTuple):
    """A dataset of the study and where it was found."""

    label: str
    wanted: DatasetPlan
    root: str | Path
    opened: Dataset | None


class _Planner:
    """Collects runs and arms; what is the same run is one."""

    def __init__(self, study: Study) -> None:
        self.study = study
        self.runs: dict[str, PlannedRun] = {}
        self.arms: list[Arm] = []
        self.points: list[SweepPoint] = []

    def add_dataset(self, place: _Place) -> None:
        config = self.study.config
        own = {method: self._arms(place, method, method) for method in config.methods}
        self.arms += [arm for arms in own.values() for arm in arms]
        if config.sweep is None:
            return
        for method in config.sweep.methods:
            for against, key, settings in (
                ("bins", "bins", config.sweep.bins),
                ("lambda", "weight", config.sweep.weights),
            ):
                for setting in settings:
                    name = f"{method}, {setting} bins" if against == "bins" else f"{method}, λ {setting:g}"
                    arms = self._arms(place, name, method, {"loss": {"ace": {key: setting}}})
                    if [arm.run for arm in arms] == [arm.run for arm in own[method]]:
                        name = method
                    else:
                        self.arms += arms
                    self.points.append(SweepPoint(place.label, method, against, setting, name))

    def _arms(self, place: _Place, name: str, method: str, changed: Mapping[str, Any] | None = None) -> list[Arm]:
        """The arms of a method, one for each seed; their runs are noted."""
        config = self.study.config
        variant = config.variant(method)
        fitting = variant.calibrator and Fitting(
            variant.calibrator,
            tuple((key, json.dumps(value)) for key, value in sorted(variant.calibrator_options.items())),
        )
        arms = []
        for seed, run in self._runs(place, variant, changed or {}).items():
            there = self.runs.get(run.name, run)
            fittings = (*there.fittings, *([fitting] if fitting else []))
            self.runs[run.name] = replace(there, fittings=tuple(dict.fromkeys(fittings)))
            arms.append(Arm(place.label, name, seed, run.name, fitting or None))
        return arms

    def _runs(self, place: _Place, variant: Variant, changed: Mapping[str, Any]) -> dict[int, PlannedRun]:
        """By seed, the run that a method needs; the members of an ensemble are noted before it."""
        config, mixed = self.study.config, Mixture.of(variant.method)
        if mixed is None:
            return {seed: self._trained(place, variant, seed, changed) for seed in config.seeds}
        each = [config.variant(method) for method in mixed.methods]
        found = {seed: [self._trained(place, member, seed, {}) for member in each] for seed in config.seeds}
        if mixed.over_seeds:
            found = {config.seeds[0]: [run for runs in found.values() for run in runs]}
        for run in (run for runs in found.values() for run in runs):
            self.runs.setdefault(run.name, run)
        return {seed: replace(runs[0], members=tuple(runs)) for seed, runs in found.items()}

    def _trained(self, place: _Place, variant: Variant, seed: int, changed: Mapping[str, Any]) -> PlannedRun:
        config = self.study.config
        settings = merge(merge(merge(config.set, place.wanted.set), variant.set), changed)
        made = make_config(
            dataset=place.wanted.dataset, root=place.root, method=variant.method, preset=config.preset,
            settings=merge(settings, {"seed": seed}),
        )  # fmt: skip
        return PlannedRun(place.label, made.resolved(place.opened) if place.opened else made, place.opened, ())
