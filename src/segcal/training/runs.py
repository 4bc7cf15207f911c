"""A trained run put to work: probability maps on the grid of the images, or measured on the spot and never stored."""

from __future__ import annotations

import hashlib
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, Protocol, get_args

import nibabel
import numpy as np
import torch
from torch import Tensor, nn

from segcal import __version__
from segcal._io.files import new_file, real_path, reject_pipe
from segcal._io.jobs import Executor, MapJob, Maps, in_turn, key_of, make_maps, stamp, unchanged
from segcal._io.parsing import parse_json
from segcal.calibrators import Calibrator
from segcal.datasets import DataCase, Dataset, Split, open_dataset, read_split
from segcal.datasets.layout import image_files
from segcal.datasets.recipes import PLAIN
from segcal.errors import ConfigError, FileError, one_of
from segcal.evaluation.calibrated import transform_volume, turn
from segcal.evaluation.cohort import CaseJob, measure_cohort
from segcal.evaluation.naming import BESIDE_MAPS, write_own
from segcal.evaluation.options import Options
from segcal.evaluation.outcome import Outcome
from segcal.training.checkpoint import BEST, load_checkpoint
from segcal.training.config import RunConfig, read_config
from segcal.training.inference import build_network, measure_logits, measuring_options, predict_logits, soften
from segcal.training.preprocessing import prepare_case, read_labels, restore
from segcal.volumes.arrays import gzip_into
from segcal.volumes.images import place_of
from segcal.volumes.orientation import orientation_of
from segcal.volumes.pairing import is_picture
from segcal.volumes.pictures import write_png
from segcal.volumes.regions import Regions
from segcal.volumes.steps import STEPS, StoredAs, in_steps
from segcal.volumes.writing import header_like, write_npy

_Image: Any = nibabel.Nifti1Image  # nibabel has no types
Side = Literal["train", "validation", "test", "all"]
CLASSES = "classes.json"
Look = Callable[[nn.Module, Tensor, RunConfig, torch.device], Tensor]
_CHANNEL_FILE = re.compile(r"(?P<case>.+)_(?P<channel>\d{4})")


class Source(Protocol):
    """Where a process elsewhere finds what predicts here; names it, too."""

    def load(self) -> Predictor: ...

    def __hash__(self) -> int: ...


@dataclass(frozen=True, eq=False)
class Predictor(ABC):
    """What was trained, ready to predict: a run, or several runs together."""

    folder: Path
    config: RunConfig
    dataset: Dataset
    split: Split
    fingerprint: str
    """Of the weights, so that results of another training are not taken for this one's."""

    @abstractmethod
    def uncalibrated(self, case: DataCase) -> Tensor:
        """(class, x, y, z) logits on the grid of the original image."""

    @property
    @abstractmethod
    def source(self) -> Source:
        """Where a process elsewhere finds it."""

    @property
    def about(self) -> dict[str, Any]:
        """What is told of it beside the results."""
        return {"config": self.config.model_dump(mode="json"), "weights": self.fingerprint}

    def cases(self, side: Side) -> list[DataCase]:
        """The cases of a side of the split; "all" has those without labels, too."""
        if side == "all":
            return [*self.dataset.cases, *self.dataset.unlabelled]
        names = set(getattr(self.split, side))
        if not names:
            raise ConfigError(self._without(side))
        return [case for case in self.dataset.cases if case.name in names]

    def _without(self, side: str) -> str:
        """The sentence on a side that has no cases."""
        return f"{self.folder / 'split.txt'} must have {side} cases; it has none."

    def logits(self, case: DataCase, calibrator: Calibrator | None = None) -> Tensor:
        """(class, x, y, z) on the grid of the original image, calibrated if asked for."""
        logits = self.uncalibrated(case)
        return logits if calibrator is None else transform_volume(calibrator, logits, _orientation(case))

    def logits_and_labels(self, side: Side) -> Iterator[tuple[Tensor, Tensor]]:
        """(class, x, y, z) logits and (x, y, z) class indices of each case, turned as calibrators take them."""
        for case in self.cases(side):
            orientation = _orientation(case)
            labels = torch.from_numpy(read_labels(case, self.dataset))
            yield turn(self.logits(case), orientation), turn(labels[None], orientation)[0]


def _orientation(case: DataCase) -> Any:
    return orientation_of(place_of(case.images[0]).affine)


@dataclass(frozen=True, eq=False)
class Run(Predictor):
    """A trained run, ready to predict."""

    network: nn.Module
    device: torch.device
    checkpoint: str = BEST

    def uncalibrated(self, case: DataCase, look: Look = predict_logits) -> Tensor:
        """(class, x, y, z) logits on the grid of the original image; `look` slides the network over a prepared one."""
        prepared = prepare_case(case, self.dataset, self.config.data, labels=False)
        logits = look(self.network, torch.from_numpy(prepared.image), self.config, self.device)
        return restore(logits, prepared.geometry)

    @property
    def source(self) -> RunSource:
        """Where a process elsewhere finds it."""
        folder, root = self.folder.absolute(), self.dataset.root.absolute()
        return RunSource(str(folder), str(root), self.checkpoint, self.fingerprint)


@dataclass(frozen=True)
class RunSource:
    """A run for a process elsewhere, which must see the same files."""

    folder: str
    root: str
    checkpoint: str
    fingerprint: str

    def load(self) -> Run:
        """The run; FileError where its weights are others there."""
        run = load_run(self.folder, root=self.root, checkpoint=self.checkpoint)
        if run.fingerprint != self.fingerprint:
            raise FileError(
                f"{run.folder / self.checkpoint} must be the same file everywhere; another is seen here."
                " Copy the checkpoint to all machines."
            )
        return run


def load_run(
    folder: str | os.PathLike[str],
    *,
    root: str | os.PathLike[str] | None = None,
    checkpoint: str = BEST,
    with_data: bool = True,
) -> Run:
    """A run that `train` wrote; `root` says where its data lie now, if they have moved.

    A file in the folder, as RUN/last.pt, is the run with that checkpoint. Without its data a run predicts other images,
    and has no cases of its own.
    """
    folder = Path(folder)
    if folder.is_file():
        folder, checkpoint = folder.parent, folder.name
    if not (folder / "config.toml").is_file():
        raise FileError(
            f"{folder} must be the folder of a run; it has no config.toml. Give a folder of `segcal train`."
        )
    config = read_config(folder / "config.toml")
    dataset = open_dataset(config.data.dataset, root or config.data.root) if with_data else _remembered(folder, config)
    filled = config.resolved(dataset).data
    if left := [f"data.{name}" for name, value in config.data if value is None and getattr(filled, name) is not None]:
        raise FileError(
            f"{folder / 'config.toml'} must say {left[0]}; the one that train writes leaves nothing open."
            " Train the run again."
        )
    network = build_network(config, dataset)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    path = folder / checkpoint
    if not path.is_file():
        raise FileError(f"{folder} must hold a trained network; it has no {checkpoint} yet. Train it first.")
    weights = load_checkpoint(path, device)["network"]
    try:
        network.load_state_dict(weights)
    except RuntimeError as error:
        raise FileError(f"{path} must fit the network of config.toml; {str(error).splitlines()[0]}") from error
    split = read_split(folder / "split.txt", dataset) if with_data else Split((), (), ())
    fingerprint = hashlib.sha256(path.read_bytes()).hexdigest()[:16]
    return Run(folder, config, dataset, split, fingerprint, network.to(device).eval(), device, checkpoint)


def remember(folder: Path, dataset: Dataset) -> None:
    """Write what a network must know of its dataset to predict without it."""
    write_own(folder / CLASSES, dataset.classes, dataset.values, dataset.regions, channels=list(dataset.channels))


def _remembered(folder: Path, config: RunConfig) -> Dataset:
    reject_pipe(folder / CLASSES)
    try:
        known = parse_json((folder / CLASSES).read_text(encoding="utf-8"))
        channels, classes, values = (tuple(known[name]) for name in ("channels", "classes", "values"))
        regions = Regions.from_json(known.get("regions"))
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise FileError(
            f"{folder / CLASSES} must hold channels, classes and values; {error}. Train the run again."
        ) from error
    return Dataset(config.data.dataset, "", folder, channels, classes, values, cases=(), recipe=PLAIN, regions=regions)


def image_cases(folder: str | os.PathLike[str], channels: int) -> list[DataCase]:
    """Images in a folder as cases without labels: NAME.nii.gz, or NAME_0000.nii.gz and so on for several channels.

    Other formats have their own endings; where there are several formats, volumes count before pictures.

    A number is one of a channel where it can be: amos_0001 and amos_0002 of one channel are two cases, and so are
    scan_0000 and scan_0001; where all files of one channel end in _0000, as nnU-Net names them, that is left out.
    """
    files = image_files(Path(folder))
    files = {stem: path for stem, path in files.items() if not is_picture(path)} or files
    if not files:
        raise FileError(
            f"{folder} must hold images, as NAME.nii.gz; it holds none. Check the path, and the file formats."
        )
    if channels == 1 and not all(stem.endswith("_0000") for stem in files):
        return [DataCase(stem, stem, (path,), None) for stem, path in files.items()]
    cases: dict[str, dict[str, Path]] = {}
    for stem, path in files.items():
        match = _CHANNEL_FILE.fullmatch(stem)
        numbered = match is not None and int(match["channel"]) < channels
        cases.setdefault(match["case"] if match and numbered else stem, {})[stem] = path
    for name, paths in cases.items():
        alone = len(paths) == 1 and (name in paths or is_picture(next(iter(paths.values()))))
        if len(paths) != channels and not alone:  # one file by the plain name, or in color, holds all channels
            raise FileError(
                f"{folder}: {name} must have {channels} files, one for each channel; it has {', '.join(paths)}."
                " Add the missing files."
            )
    return [DataCase(name, name, tuple(paths.values()), None) for name, paths in cases.items()]


def predict(
    run: Predictor,
    out: str | os.PathLike[str],
    *,
    side: Side = "test",
    cases: Sequence[DataCase] | None = None,
    content: Literal["probabilities", "logits"] = "probabilities",
    dtype: StoredAs = "float32",
    calibrator: Calibrator | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Maps:
    """Write a map (x, y, z, class) for each case, NAME.nii.gz on the grid of its image; those that are there stay.

    Maps of pictures are NAME.npy (class, y, x); as integers they are gray PNG images, NAME_class0.png and so on.

    The cases are those of a side of the split, or the ones given. One that fails does not stop the others. A file
    beside the maps has the names of classes and regions, which `segcal.evaluate` reads.
    NIfTI has no half precision: float16 is stored as 16-bit integers with a scale, in steps of 1/65535, and uint8 as
    8-bit integers, in steps of 1/255. Those of a voxel sum to 1, and the most probable class stays.
    """
    one_of("content", content, ("probabilities", "logits"))
    one_of("dtype", dtype, get_args(StoredAs))
    if content == "logits" and dtype != "float32":
        raise ConfigError(f"logits must be written as float32; {dtype} is for probabilities.")
    out = Path(out)
    mark = None if calibrator is None else calibrator.fingerprint

    def job(case: DataCase) -> MapJob:
        paths = _map_paths(out, case, len(run.dataset.classes), dtype)

        def make() -> None:
            logits = run.logits(case, calibrator)
            values = soften(logits) if content == "probabilities" else logits
            if is_picture(case.images[0]):
                _write_pictures(paths, values, case, dtype)
            else:
                _write_map(paths[0], values, case, dtype)

        return MapJob(case.name, _key(run, case, mark, content, dtype), paths, make)

    def begin() -> None:
        write_own(out / BESIDE_MAPS, run.dataset.classes, run.dataset.values, run.dataset.regions)

    asked = run.cases(side) if cases is None else cases
    if real_path(out) in {real_path(path.parent) for case in asked for path in case.files}:
        raise ConfigError(f"--out must be another folder than that of the images, which stay as they are; got {out}.")
    jobs = [job(case) for case in asked]
    return make_maps(out, "predictions.json", jobs, lambda done, total, name: progress(done, total), begin=begin)


def evaluate_run(
    run: Predictor,
    out: str | os.PathLike[str],
    *,
    side: Side = "test",
    calibrator: Calibrator | Mapping[str, Calibrator] | None = None,
    executor: Executor | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Outcome:
    """Evaluate a run on the original grid, one case in memory, no map stored; writes what `segcal evaluate` writes.

    The calibrator is the same for all cases, or given by the name of each, as in a cross-validation. Stopped and
    started again, cases that are done are not predicted again. An `executor` does them elsewhere, as
    `segcal.adapters.dask.DaskCluster`; the run's folder and its data must be seen there.
    """
    options = measuring_options(run.dataset, run.config)
    cases = [case for case in run.cases(side) if case.label is not None]
    fitted = {case.name: calibrator[case.name] if isinstance(calibrator, Mapping) else calibrator for case in cases}
    there = None if executor is None else run.source

    def job(case: DataCase) -> CaseJob:
        own = fitted[case.name]
        key = _key(run, case, None if own is None else own.fingerprint, "sums", str(options))
        if there is None:
            return CaseJob(case.name, key, _measure_case, (run, case, own, options))
        return CaseJob(case.name, key, _measure_there, (there, own, options))

    about = {**run.about, "side": side, "calibrator": _told(calibrator), "split_note": run.split.note}
    jobs = [job(case) for case in cases]
    as_maps = replace(options, logits=False)  # how maps are read that `predict` writes of other cases
    return measure_cohort(
        jobs, options, Path(out), executor=executor or in_turn,
        provenance={"run": about, "options": asdict(as_maps)}, progress=progress,
    )  # fmt: skip


def _told(calibrator: Calibrator | Mapping[str, Calibrator] | None) -> str | None:
    """Of several, that each case had one fitted without it."""
    if isinstance(calibrator, Mapping):
        each = {fitted.fingerprint: fitted for fitted in calibrator.values()}
        return f"{next(iter(each.values()))!r}, cross-fitted: {len(each)} of them" if each else None
    return None if calibrator is None else f"{calibrator!r} {calibrator.fingerprint}"


def _measure_case(
    run: Predictor, case: DataCase, calibrator: Calibrator | None, options: Options, name: str, part: Path
) -> None:
    with unchanged(case.files):
        labels = read_labels(case, run.dataset)
        voxel_ml = place_of(case.images[0]).voxel_ml
        sums = measure_logits(run.logits(case, calibrator), labels, run.dataset, options, voxel_ml=voxel_ml)
    sums.save(part, name, case.files)


def _measure_there(source: Source, calibrator: Calibrator | None, options: Options, name: str, part: Path) -> None:
    """Elsewhere, where what predicts is loaded once by each process."""
    run = _loaded(source)
    (case,) = (case for case in run.dataset.cases if case.name == name)
    _measure_case(run, case, calibrator, options, name, part)


@lru_cache(maxsize=1)
def _loaded(source: Source) -> Predictor:
    return source.load()


def _key(run: Predictor, case: DataCase, calibrator: str | None, *what: str) -> str:
    """Names a result: other weights, files, settings or another calibrator give another key."""
    files = [stamp(path) for path in case.files]
    return key_of(__version__, run.fingerprint, run.config.hash, case.name, files, what, calibrator)


def _map_paths(out: Path, case: DataCase, classes: int, dtype: StoredAs) -> list[Path]:
    """Where the maps of a case go."""
    if not is_picture(case.images[0]):
        return [out / f"{case.name}.nii.gz"]
    if dtype in STEPS:
        return [out / f"{case.name}_class{index}.png" for index in range(classes)]
    return [out / f"{case.name}.npy"]


def _write_pictures(paths: Sequence[Path], values: Tensor, case: DataCase, dtype: StoredAs) -> None:
    """(class, y, x, 1) as one array (class, y, x), or as gray pictures of each class; (class, z, y, x) of stacks."""
    numbers = values.numpy()[..., 0] if values.shape[-1] == 1 else values.numpy()
    if len(paths) == 1:
        with new_file(paths[0]) as file:
            write_npy(file, np.ascontiguousarray(numbers))
        return
    if numbers.ndim > 3:
        raise FileError(
            f"{case.name}: maps of a stack must be written as float32; {dtype} is written as PNG images."
            " Leave out --dtype."
        )
    with ExitStack() as stack:  # all files appear together
        for path, row in zip(paths, in_steps(numbers, STEPS[dtype]), strict=True):
            write_png(stack.enter_context(new_file(path)), row)


def _write_map(path: Path, values: Tensor, case: DataCase, dtype: StoredAs) -> None:
    """(class, x, y, z) as a NIfTI file (x, y, z, class) with the header of the case's image.

    It is written class by class, for beside the values of a large image there may be no room for all of them again.
    """
    source = header_like(case.images[0])
    steps = STEPS.get(dtype)
    numbers = values.numpy() if steps is None else in_steps(values.numpy(), steps)
    stored = numbers.dtype
    affine = place_of(case.images[0]).affine
    image = _Image(np.broadcast_to(np.zeros((), stored), (*values.shape[1:], len(values))), affine)
    image.header.set_slope_inter(1 / (steps or 1), 0)
    image.header.set_zooms((*source.get_zooms()[:3], 1))
    image.header.set_xyzt_units(*source.get_xyzt_units())
    for code in ("qform", "sform"):
        image.header[f"{code}_code"] = int(source[f"{code}_code"])
    with new_file(path) as file, gzip_into(file) as stream:
        image.header.write_to(stream)
        stream.write(bytes(image.header.get_data_offset() - stream.tell()))
        for row in numbers:
            stream.write(np.ascontiguousarray(row.T).data)  # the first axis fastest
