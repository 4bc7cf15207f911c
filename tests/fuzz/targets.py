"""What is spoilt, and who reads it: every kind of file that segcal opens.

A target writes a sound file, with whatever else its reader needs, spoils its bytes, and reads it as the commands do.
"""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from random import Random
from typing import Any

import mutate
import numpy as np

LONGEST = 1500  # signs of a message


@dataclass(frozen=True)
class Target:
    """A file that is spoilt, and who reads it."""

    write: Callable[[Path], Path]
    """Writes what the reader needs to a folder; the file that is spoilt."""
    spoil: Callable[[Random, bytes], bytes]
    read: Callable[[Path], object]
    """Reads the spoilt file, given its path."""


def check_message(text: str) -> None:
    if "\n" in text or "Traceback" in text or len(text) > LONGEST or len(text) < 10:
        raise AssertionError(f"a message must be a sentence; got {len(text)} signs: {text[:200]!r}")
    if text.startswith("unexpected error"):
        raise AssertionError(f"an error must be one of segcal's; got {text}")


# Volumes: labels and a prediction of two classes; either may be the spoilt one.

SHAPE = (6, 5, 4)


def _labels() -> np.ndarray[Any, Any]:
    return np.random.default_rng(0).integers(0, 2, SHAPE).astype(np.uint8)


def _maps() -> np.ndarray[Any, Any]:
    first = np.random.default_rng(1).random(SHAPE).astype(np.float32)
    return np.stack([first, 1 - first], -1)


def _volume(path: Path, array: np.ndarray[Any, Any]) -> Path:
    import nibabel

    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".npy":
        np.save(path, np.moveaxis(array, -1, 0) if array.ndim == 4 else array)
    elif path.suffix == ".npz":
        key, kept = ("probabilities", array.transpose(3, 2, 1, 0)) if array.ndim == 4 else ("labels", array)
        np.savez_compressed(path, **{key: kept})
    else:
        kind = nibabel.Nifti2Image if path.name.startswith("two") else nibabel.Nifti1Image
        kind(array, np.diag([1.5, 1.5, 5, 1])).to_filename(path)
    return path


def _case(prediction: str, label: str, *, spoilt: str) -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        files = {
            "maps": _volume(folder / "maps" / prediction, _maps()),
            "labels": _volume(folder / "labels" / label, _labels()),
        }
        return files[spoilt]

    return write


def _picture_case(prediction: str, label: str, *, spoilt: str) -> Callable[[Path], Path]:
    """The first slice as pictures (y, x)."""

    def write(folder: Path) -> Path:
        arrays = {"maps": (prediction, _maps()[:, :, 0].transpose(2, 1, 0)), "labels": (label, _labels()[:, :, 0].T)}
        for part, (name, array) in arrays.items():
            path = folder / part / name
            path.parent.mkdir(parents=True, exist_ok=True)
            if path.suffix == ".tif":
                import tifffile

                tifffile.imwrite(path, array, photometric="minisblack", compression="zlib")
            elif path.suffix == ".png":
                from PIL import Image

                Image.fromarray(np.ascontiguousarray(array) if array.ndim == 2 else _bytes(array[0])).save(path)
            else:
                np.save(path, array)
        return folder / spoilt / arrays[spoilt][0]

    return write


def _bytes(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return np.rint(array * 255).astype(np.uint8)


def _itk_case(prediction: str, label: str, *, spoilt: str, compressed: bool) -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        import SimpleITK as itk  # noqa: N813

        images = {
            "maps": (prediction, itk.GetImageFromArray(_maps().transpose(2, 1, 0, 3), isVector=True)),
            "labels": (label, itk.GetImageFromArray(_labels().T)),
        }
        for part, (name, image) in images.items():
            (folder / part).mkdir(parents=True)
            image.SetSpacing((1.5, 1.5, 5))
            itk.WriteImage(image, str(folder / part / name), compressed)
        return folder / spoilt / images[spoilt][0]

    return write


def _dicom_case(folder: Path) -> Path:
    """Labels of two segments, by the made-up CT of their tests."""
    import sys

    import nibabel

    sys.path.insert(0, str(Path(__file__).parents[1] / "volumes"))
    import test_dicom

    random = np.random.default_rng(0)
    shape = (test_dicom.COLUMNS, test_dicom.ROWS, test_dicom.SLICES)
    for part in ("maps", "labels"):
        (folder / part).mkdir()
    maps = random.dirichlet(np.ones(3), shape).astype(np.float32)
    nibabel.Nifti1Image(maps, test_dicom.affine()).to_filename(folder / "maps" / "case.nii")
    labels = random.integers(0, 3, shape).astype(np.uint8)
    return test_dicom.write(folder / "labels" / "case.dcm", labels, "BINARY", segments=2)


def _measure(path: Path) -> None:
    """As `evaluate` measures the case; where it is a prediction, also as `calibrate` reads it."""
    from segcal.evaluation.measure import measure_case
    from segcal.evaluation.options import Options
    from segcal.volumes import find_predictions, open_prediction, pair_cases

    root = path.parent.parent
    (case,) = pair_cases(root / "maps", root / "labels").cases
    try:
        measure_case(case, Options(), threads=1)
    finally:
        if path.parent.name == "maps":
            for files in find_predictions(path.parent):
                prediction = open_prediction(files)
                prediction.rewrite(lambda values: values, root / "out", path.parent, most_voxels=40)


def _evaluate(path: Path) -> None:
    """Through the whole command: a broken case is a failure with a sentence, not an exception."""
    import segcal

    root = path.parent.parent
    shutil.rmtree(root / "out", ignore_errors=True)
    outcome = segcal.evaluate(root / "maps", root / "labels", root / "out")
    for failure in outcome.failures:
        check_message(failure[-1])


# Files of settings.


def _file(name: str, text: str) -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        path = folder / name
        path.write_text(text, encoding="utf-8")
        return path

    return write


def _write_config(folder: Path) -> Path:
    from segcal.training.config import make_config

    path = folder / "run.toml"
    make_config(dataset="phantom", root="data", method="soft-ace").save(path)
    return path


def _read_config(path: Path) -> None:
    from segcal.training.config import make_config, read_config

    config = read_config(path)
    again = path.with_name("again.toml")
    config.save(again)
    assert read_config(again) == config  # what is accepted can be written, and reads back as the same
    assert config.hash
    make_config(file=path, changes=["training.epochs=2"])


STUDY = """\
title = "A study"
preset = "small"
seeds = [0, 1]
methods = ["dice-ce", "dice-ce + temperature", "mine"]
maps = 1
[set.training]
epochs = 2
[datasets."The phantom"]
dataset = "phantom"
set = { data = { patch = [16, 16, 16] } }
[variants.mine]
method = "soft-ace"
calibrator = "temperature"
calibrator_options = { voxels = 1000 }
set = { loss = { ace = { bins = 10 } } }
[sweep]
methods = ["mine"]
bins = [5, 10]
weights = [0.5, 1.0]
"""


def _read_study(path: Path) -> None:
    from segcal.study.plan import read_study

    study = read_study(path)
    study.config.save(path.with_name("again.toml"))
    for name in study.config.methods:
        study.config.variant(name)


REGIONS = """\
values = [0, 1, 2, 4]
[regions]
"tumour core" = [1, 4]
whole = [1, 2, 4]
"""
CLASSES = """\
[classes]
background = 0
edema = 2
ignore = 9
"""


def _read_regions(path: Path) -> None:
    from segcal.volumes.regions import read_regions

    regions = read_regions(str(path))
    for name in regions.members:
        regions.channels(name)


def _read_classes(path: Path) -> None:
    from segcal.volumes.regions import read_class_names, read_ignored

    read_class_names(str(path))
    read_ignored(str(path))


# Datasets: only the text is spoilt, the images are spoilt as volumes.


def _write_layout(layout: str, file: str) -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        import layouts

        root = getattr(layouts, f"write_{layout}")(folder)
        found = next(root.rglob(file)) if file != "split.txt" else root / file
        if file == "split.txt":
            from segcal.datasets import make_split, open_dataset, write_split

            write_split(make_split(open_dataset(layout, root)), found)
        return found

    return write


def _open(layout: str) -> Callable[[Path], None]:
    def read(path: Path) -> None:
        from segcal.datasets import make_split, open_dataset, write_split
        from segcal.errors import SegcalError
        from segcal.volumes.regions import read_class_names, read_ignored

        dataset = open_dataset(layout, path.parent)
        for problem in dataset.problems:
            check_message(problem.what)
        write_split(make_split(dataset), path.with_name("out.txt"))
        for read in (read_class_names, read_ignored):
            try:
                read(str(path))
            except SegcalError as error:
                check_message(str(error))

    return read


def _read_split(path: Path) -> None:
    from segcal.datasets import open_dataset, read_split

    read_split(path, open_dataset("decathlon", path.parent))


def _open_image(path: Path) -> None:
    from segcal.datasets import check_dataset, open_dataset
    from segcal.training.config import DataConfig
    from segcal.training.preprocessing import prepare_case

    dataset = open_dataset("decathlon", path.parent.parent)
    for problem in check_dataset(dataset).problems:
        check_message(problem.what)
    config = DataConfig(dataset="decathlon", root="x", spacing_mm="keep", intensity="zscore", crop_foreground=True)
    for case in dataset.cases:
        if path in case.files:
            prepare_case(case, dataset, config)


# What segcal wrote itself.


def _write_calibrator(method: str) -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        import torch

        from segcal.calibrators import make_calibrator

        torch.manual_seed(0)
        logits = torch.randn(2, 3, 6, 6, 6)
        labels = logits.add(torch.randn_like(logits)).argmax(1)
        settings = {"steps": 2, "width": 2, "dilations": [1]} if method == "local-temperature" else {}
        path = folder / "calibrator.json"
        make_calibrator(method, **settings).fit(list(zip(logits, labels, strict=True))).save(path)
        return path

    return write


def _load_calibrator(path: Path) -> None:
    import torch

    from segcal.calibrators import load_calibrator

    calibrator = load_calibrator(path)
    calibrator.save(path.with_name("again.json"))
    repr(calibrator)
    if calibrator.classes in (None, 3):
        calibrator.transform(torch.zeros(3, 4, 4, 4))


def _write_evaluation(folder: Path) -> Path:
    import segcal

    _volume(folder / "maps" / "case.nii.gz", _maps())
    _volume(folder / "labels" / "case.nii.gz", _labels())
    segcal.evaluate(folder / "maps", folder / "labels", folder / "results")
    return folder / "results" / "evaluation.npz"


def _load_evaluation(path: Path) -> None:
    from segcal.evaluation.evaluation import Evaluation
    from segcal.evaluation.tables import summary_table, to_html

    evaluation = Evaluation.load(path)
    repr(evaluation)
    to_html(summary_table(evaluation))
    evaluation.save(path.with_name("again.npz"))


def _write_statistics(folder: Path) -> Path:
    import torch

    from segcal import Binning, bin_statistics

    path = folder / "statistics.npz"
    bin_statistics(torch.rand(2, 2, 9), torch.ones(2, 9).long(), binning=Binning(8, kernel="triangular")).save(path)
    return path


def _load_statistics(path: Path) -> None:
    from segcal import ace
    from segcal.statistics import BinStatistics

    stats = BinStatistics.load(path)
    ace(stats)
    stats.pool("case").save(path.with_name("again.npz"))


def _write_checkpoint(folder: Path) -> Path:
    import torch

    from segcal.training.checkpoint import save_checkpoint

    path = folder / "best.pt"
    save_checkpoint(path, {"network": torch.nn.Conv3d(1, 2, 3).state_dict(), "epoch": 3, "notes": [1.5, "a"]})
    return path


def _load_checkpoint(path: Path) -> None:
    from segcal.training.checkpoint import load_checkpoint

    load_checkpoint(path)


def _write_run(file: str) -> Callable[[Path], Path]:
    """A run, and an image to predict."""

    def write(folder: Path) -> Path:
        import tiny

        run = tiny.untrained_run(folder)
        _volume(folder / "images" / "case.nii.gz", _maps()[..., 0])
        return run / file

    return write


def _predict(path: Path) -> None:
    """As `predict --images` does, and again: what is there stays."""
    from segcal.training.runs import image_cases, load_run, predict

    root = path.parent.parent
    shutil.rmtree(root / "out", ignore_errors=True)
    run = load_run(path.parent, with_data=False)
    for _ in range(2):
        done = predict(run, root / "out", cases=image_cases(root / "images", len(run.dataset.channels)))
        for failure in done.failures:
            check_message(failure.message)


def _write_part(folder: Path) -> Path:
    return next((_write_evaluation(folder).parent / ".parts").glob("*.npz"))


def _evaluate_again(path: Path) -> None:
    """Sums that were kept and spoilt are measured again."""
    import segcal

    root = path.parents[2]
    outcome = segcal.evaluate(root / "maps", root / "labels", root / "results")
    assert outcome.evaluation is not None


def _write_ledger(folder: Path) -> Path:
    _apply_to(folder, _write_calibrator("temperature")(folder))
    return folder / "out" / "calibrated.json"


def _apply_to(folder: Path, calibrator: Path) -> None:
    from segcal.calibration.applying import apply_calibrator

    maps = np.random.default_rng(0).dirichlet(np.ones(3), SHAPE).astype(np.float32)
    done = apply_calibrator(calibrator, _volume(folder / "maps" / "case.nii.gz", maps).parent, folder / "out")
    assert not done.failures


def _write_plans(folder: Path) -> Path:
    _volume(folder / "maps" / "case.npz", _maps())
    _volume(folder / "labels" / "case.nii.gz", _labels())
    path = folder / "maps" / "plans.json"
    path.write_text(json.dumps({"dataset_name": "x", "image_reader_writer": "NibabelIOWithReorient", "more": [1, 2]}))
    return path


def _spoil_evaluation(random: Random, content: bytes) -> bytes:
    """Every other time the header says something else, in an archive that is whole."""

    if random.random() < 0.5:
        return mutate.spoil_zip(mutate.spoil_bytes)(random, content)
    with np.load(io.BytesIO(content)) as archive:
        arrays = {name: archive[name] for name in archive.files}
    header = str(arrays.pop("header"))
    if random.random() < 0.3:
        name = random.choice(list(arrays))
        how = random.choice(("type", "shape", "value"))
        if how == "type":
            arrays[name] = arrays[name].astype(random.choice(("?", "i1", "u2", "f2", "f4", ">f8", "c16", "S3", "U5")))
        elif how == "shape":
            arrays[name] = random.choice(
                (arrays[name].ravel(), arrays[name][..., :1], arrays[name][:0], arrays[name].T)
            )
        else:
            arrays[name] = np.full_like(arrays[name], random.choice((np.nan, np.inf, -1, 1e308)))
    else:
        header = mutate.spoil_json(random, header.encode()).decode("utf-8", "replace")
    into = io.BytesIO()
    np.savez_compressed(into, header=np.array(header), **arrays)
    return into.getvalue()


def _spoil_npy(random: Random, content: bytes) -> bytes:
    """Bytes, or the dictionary of the header with another type or shape."""
    if random.random() < 0.5 or content[:6] != b"\x93NUMPY":
        return mutate.spoil_bytes(random, content)
    size = int.from_bytes(content[8:10], "little")
    kinds = ("|O", "<f8", ">f4", "<c8", "<f2", "|b1", "<M8[ns]", "<U9", "|V4", "<i8", "<u8", "|S0", "<f16")
    shapes = ((), (0,), (10**12,), (2, 10**6, 10**6), (2**63,), (-1, 4), (1,) * 40, (6, 5, 4), (2, 6, 5, 4), (0, 2, 3))
    text = {"descr": random.choice(kinds), "fortran_order": random.random() < 0.5, "shape": random.choice(shapes)}
    header = random.choice((repr(text), repr(text), "(" * 1000, "{" * 300, "__import__('os').system('true')")).encode()
    header = header[:60000].ljust(64) + b"\n"
    return content[:8] + len(header).to_bytes(2, "little") + header + content[10 + size :]


NIFTI = mutate.spoil_start(560)
TARGETS: dict[str, Target] = {
    "nifti": Target(_case("case.nii", "case.nii", spoilt="maps"), NIFTI, _measure),
    "nifti2": Target(_case("two.nii", "two.nii", spoilt="maps"), NIFTI, _measure),
    "nifti-gz": Target(_case("case.nii.gz", "case.nii.gz", spoilt="maps"), mutate.spoil_gzip(NIFTI), _measure),
    "labels": Target(_case("case.nii", "case.nii", spoilt="labels"), NIFTI, _measure),
    "labels-gz": Target(_case("c.nii.gz", "c.nii.gz", spoilt="labels"), mutate.spoil_gzip(NIFTI), _evaluate),
    "npz": Target(_case("case.npz", "case.nii", spoilt="maps"), mutate.spoil_zip(_spoil_npy), _measure),
    "labels-npz": Target(_case("case.npy", "case.npz", spoilt="labels"), mutate.spoil_zip(_spoil_npy), _measure),
    "npy": Target(_case("case.npy", "case.nii", spoilt="maps"), _spoil_npy, _measure),
    "labels-npy": Target(_case("case.npy", "case.npy", spoilt="labels"), _spoil_npy, _evaluate),
    "png": Target(_picture_case("case.png", "case.png", spoilt="maps"), mutate.spoil_bytes, _measure),
    "labels-png": Target(_picture_case("case.npy", "case.png", spoilt="labels"), mutate.spoil_start(60), _measure),
    "plans": Target(_write_plans, mutate.spoil_json, _measure),
    "config": Target(_write_config, mutate.spoil_toml, _read_config),
    "study": Target(_file("study.toml", STUDY), mutate.spoil_toml, _read_study),
    "regions": Target(_file("regions.toml", REGIONS), mutate.spoil_toml, _read_regions),
    "classes": Target(_file("classes.toml", CLASSES), mutate.spoil_toml, _read_classes),
    "decathlon": Target(_write_layout("decathlon", "dataset.json"), mutate.spoil_json, _open("decathlon")),
    "nnunet": Target(_write_layout("nnunet", "dataset.json"), mutate.spoil_json, _open("nnunet")),
    "acdc": Target(_write_layout("acdc", "Info.cfg"), mutate.spoil_lines, lambda path: _open("acdc")(path.parents[2])),
    "image": Target(_write_layout("decathlon", "test_001.nii.gz"), mutate.spoil_gzip(NIFTI), _open_image),
    "split": Target(_write_layout("decathlon", "split.txt"), mutate.spoil_lines, _read_split),
    "temperature": Target(_write_calibrator("temperature"), mutate.spoil_json, _load_calibrator),
    "dirichlet": Target(_write_calibrator("dirichlet"), mutate.spoil_json, _load_calibrator),
    "isotonic": Target(_write_calibrator("isotonic"), mutate.spoil_json, _load_calibrator),
    "local": Target(_write_calibrator("local-temperature"), mutate.spoil_json, _load_calibrator),
    "evaluation": Target(_write_evaluation, _spoil_evaluation, _load_evaluation),
    "statistics": Target(_write_statistics, _spoil_evaluation, _load_statistics),
    "part": Target(_write_part, _spoil_evaluation, _evaluate_again),
    "ledger": Target(
        _write_ledger,
        mutate.spoil_json,
        lambda path: _apply_to(path.parents[1], path.parents[1] / "calibrator.json"),
    ),
    "run-config": Target(_write_run("config.toml"), mutate.spoil_toml, _predict),
    "run-classes": Target(_write_run("classes.json"), mutate.spoil_json, _predict),
    "checkpoint": Target(_write_checkpoint, mutate.spoil_zip(mutate.spoil_bytes), _load_checkpoint),
}
if find_spec("tifffile"):
    TARGETS["tiff"] = Target(_picture_case("case.tif", "case.png", spoilt="maps"), mutate.spoil_bytes, _measure)
    TARGETS["labels-tiff"] = Target(
        _picture_case("case.npy", "case.tif", spoilt="labels"), mutate.spoil_bytes, _measure
    )
if find_spec("SimpleITK"):
    for ending in ("nrrd", "mha"):
        write = _itk_case(f"case.{ending}", f"case.{ending}", spoilt="maps", compressed=True)
        TARGETS[ending] = Target(write, mutate.spoil_bytes, _measure)
        write = _itk_case(f"case.{ending}", f"case.{ending}", spoilt="labels", compressed=False)
        TARGETS[f"labels-{ending}"] = Target(write, mutate.spoil_start(400), _measure)
if find_spec("highdicom"):
    TARGETS["labels-dicom"] = Target(_dicom_case, mutate.spoil_bytes, _measure)
