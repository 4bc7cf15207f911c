"""A dataset made on the spot whose true probabilities are known, in the layout of the Decathlon.

Each case shows an organ with a core inside and a vessel beside it: faint, in noise and texture, under an uneven
field. Boundaries are not sharp: they give each voxel a probability of each class, and the label is drawn from it. So a
network can be no surer than these probabilities, which are written too and make a perfectly calibrated prediction:

    segcal evaluate Task00_Phantom/probabilitiesTr Task00_Phantom/labelsTr --out truth

Several raters draw several labels from the same probabilities; those of the others are in labelsTr_2 and so on.
"""

from __future__ import annotations

import gzip
import json
import math
import os
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from nibabel.nifti1 import Nifti1Image
from numpy.typing import NDArray

from segcal.datasets.dataset import Dataset
from segcal.datasets.decathlon import open_decathlon
from segcal.datasets.layout import find_root, read_json
from segcal.errors import ConfigError, FileError, check_integer, check_seed

Array = NDArray[Any]

TITLE = "Phantom, made on the spot with known probabilities"
FOLDER = "Task00_Phantom"
LAYOUT = f"{FOLDER}/{{imagesTr,labelsTr,probabilitiesTr}}/phantom_000.nii.gz with dataset.json (make_phantom writes it)"
CLASSES = ("background", "organ", "core", "vessel")
SPACING_MM = (1.0, 1.0, 1.5)
SMALLEST_SIZE = (40, 40, 26)  # voxels: every structure finds room
SHARES = (20, 15, 65)  # few to learn from, so that networks grow too sure, and many to see it on
VERSION = 1  # of the images: another one means that the same seed gives others
STEPS = 1 << 16  # probabilities are multiples of 1 / STEPS: float32 holds them exactly, and they sum to 1 exactly
DRAW_SIGMA_MM = 1.0  # neighboring voxels are drawn alike, as one hand draws a contour
LACKS_CORE, LACKS_VESSEL = 3, 7  # last digit of the number of a case: one in five lacks a class
_BRIGHTNESS = (0.0, 1.8, 4.0, 2.7)  # of each class, in units of the noise
_erf: Any = np.frompyfunc(math.erf, 1, 1)


class PhantomCase(NamedTuple):
    """Image (int16), label (uint8) and true probabilities (float32, classes last) on one grid; labels of others."""

    image: Array
    label: Array
    probabilities: Array
    others: tuple[Array, ...] = ()


def make_phantom(
    root: str | os.PathLike[str],
    *,
    cases: int = 60,
    size: tuple[int, int, int] = (48, 48, 32),
    seed: int = 0,
    raters: int = 1,
) -> Path:
    """Write the phantom to `Task00_Phantom` in this folder, and return that folder; the same one there is kept.

    A case depends on seed, size and its own number, not on how many there are. Several raters are labels drawn anew.
    """
    for what, number in (("cases", cases), ("raters", raters)):
        check_integer(what, number)
    if len(size) != 3 or any(length < least for length, least in zip(size, SMALLEST_SIZE, strict=True)):
        raise ConfigError(f"size must be three lengths of at least {SMALLEST_SIZE} voxels; got {tuple(size)}.")
    check_seed(seed)
    folder = Path(root) / FOLDER
    made_of: dict[str, Any] = {"version": VERSION, "cases": cases, "size": list(size), "seed": seed}
    made_of |= {"raters": raters} if raters > 1 else {}
    if folder.exists():
        return _same(folder, made_of)
    Path(root).mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".phantom-", dir=root) as partial:
        _write(Path(partial) / FOLDER, made_of)
        try:
            os.rename(Path(partial) / FOLDER, folder)  # nobody ever sees a part of it
        except OSError:  # another process was faster
            return _same(folder, made_of)
    return folder


def open_phantom(root: Path) -> Dataset:
    """The phantom in this folder, or in `Task00_Phantom`; it must have been made."""
    root = find_root(root, _fits, layout=LAYOUT, parts=("imagesTr", "labelsTr", "probabilitiesTr"))
    dataset = open_decathlon(root)
    recipe = replace(dataset.recipe, augmentation="none", crop_foreground=False, epochs=60, learning_rate=1e-3)
    return replace(dataset, name="phantom", title=TITLE, recipe=recipe, shares=SHARES)


def phantom_case(
    number: int, *, size: tuple[int, int, int] = (48, 48, 32), seed: int = 0, raters: int = 1
) -> PhantomCase:
    """One case, as `make_phantom` writes it."""
    random = np.random.default_rng([seed, number])
    probabilities = _probabilities(random, size, number % 10)
    texture = 0.5 * _smooth_noise(random, size, sigma_mm=2.0)
    field = np.exp(0.15 * _smooth_noise(random, size, sigma_mm=16.0))
    noise = random.standard_normal(size)
    brightness = probabilities @ np.array(_BRIGHTNESS)
    image = np.rint((4 + brightness + texture) * field * 100 + 100 * noise)
    label, *others = (_label(_draw(random, size), probabilities) for _ in range(raters))
    stored = image.clip(1, 32767).astype(np.int16), label, probabilities.astype(np.float32)
    return PhantomCase(*stored, tuple(others))


def _label(uniform: Array, probabilities: Array) -> Array:
    edges = np.moveaxis(probabilities.cumsum(-1), -1, 0)[:-1]
    return np.asarray(sum((uniform >= edge).astype(np.uint8) for edge in edges))


def _probabilities(random: np.random.Generator, size: tuple[int, int, int], digit: int) -> Array:
    """True probabilities (x, y, z, class) in float64, multiples of 1 / STEPS that sum to 1."""
    space = np.stack(np.meshgrid(*(_axis(*pair) for pair in zip(size, SPACING_MM, strict=True)), indexing="ij"))
    width_mm = random.uniform(0.2, 0.5)
    center = random.uniform(-4, 4, 3)
    organ = _ellipsoid(space, center, random.uniform(10, 14, 3)) + _smooth_noise(random, size, sigma_mm=4.0)
    core_center = center + random.uniform(-2, 2, 3)
    core = _ellipsoid(space, core_center, random.uniform(5, 7.5, 3)) + 0.5 * _smooth_noise(random, size, sigma_mm=3.0)
    vessel = _tube(space, random)
    in_organ, in_core, in_vessel = (_sigmoid(distance / width_mm) for distance in (organ, core, vessel))
    core_share = in_organ * in_core * (digit != LACKS_CORE)
    vessel_share = (1 - in_organ) * in_vessel * (digit != LACKS_VESSEL)
    shares = np.floor(np.stack([in_organ - core_share, core_share, vessel_share], -1) * STEPS) / STEPS
    return np.concatenate([1 - shares.sum(-1, keepdims=True), shares], -1)


def _axis(length: int, spacing_mm: float) -> Array:
    """Places of the voxels along an axis, in mm from its middle."""
    return (np.arange(length) - (length - 1) / 2) * spacing_mm


def _ellipsoid(space: Array, center: Array, radii: Array) -> Array:
    """Distance from the surface in mm, nearly: positive inside."""
    away = np.sqrt((((space - center[:, None, None, None]) / radii[:, None, None, None]) ** 2).sum(0))
    return np.asarray((1 - away) * radii.mean())


def _tube(space: Array, random: np.random.Generator) -> Array:
    """Distance from the wall of a winding tube along z at the rim of the image, positive inside."""
    angle, phase, radius = random.uniform(0, 2 * np.pi), random.uniform(0, 2 * np.pi), random.uniform(3, 4)
    turn = angle + 0.3 * np.sin(space[2] / 8 + phase)
    away = np.hypot(space[0] - 17 * np.cos(turn), space[1] - 17 * np.sin(turn))
    return np.asarray(radius - away)


def _smooth_noise(random: np.random.Generator, size: tuple[int, ...], *, sigma_mm: float) -> Array:
    """A Gaussian field whose every voxel has mean 0 and variance 1, smooth over sigma_mm; it goes round the edges."""
    spectrum = np.fft.fftn(random.standard_normal(size))
    power = 1.0
    for axis, (length, spacing_mm) in enumerate(zip(size, SPACING_MM, strict=True)):
        gain = np.exp(-2 * (np.pi * np.fft.fftfreq(length) * sigma_mm / spacing_mm) ** 2)
        spectrum *= np.expand_dims(gain, tuple(other for other in range(3) if other != axis))
        power *= (gain**2).mean()
    return np.asarray(np.fft.ifftn(spectrum).real / math.sqrt(power))


def _draw(random: np.random.Generator, size: tuple[int, ...]) -> Array:
    """Smooth numbers, each of them uniform in [0, 1): the normal distribution function of a Gaussian field."""
    field = _smooth_noise(random, size, sigma_mm=DRAW_SIGMA_MM)
    uniform = (1 + _erf(field / math.sqrt(2)).astype(np.float64)) / 2
    return np.asarray(uniform.clip(0, np.nextafter(1, 0)))


def _sigmoid(values: Array) -> Array:
    return np.asarray(1 / (1 + np.exp(-values.clip(-30, 30))))


def _write(folder: Path, made_of: dict[str, Any]) -> None:
    names = [f"phantom_{number:03d}.nii.gz" for number in range(made_of["cases"])]
    raters = made_of.get("raters", 1)
    drawn = ["labelsTr", *(f"labelsTr_{rater}" for rater in range(2, raters + 1))]
    parts = ("imagesTr", "labelsTr", "probabilitiesTr", *drawn[1:])
    for part in parts:
        (folder / part).mkdir(parents=True)
    for number, name in enumerate(names):
        *arrays, others = phantom_case(number, size=tuple(made_of["size"]), seed=made_of["seed"], raters=raters)
        for part, array in zip(parts, (*arrays, *others), strict=True):
            (folder / part / name).write_bytes(_nifti(array))

    def labels(name: str) -> str | list[str]:
        paths = [f"./{part}/{name}" for part in drawn]
        return paths if raters > 1 else paths[0]

    content = {
        "name": "Phantom",
        "description": "Made by segcal: labels are drawn from the probabilities in probabilitiesTr",
        "tensorImageSize": "3D",
        "modality": {"0": "phantom"},
        "labels": {str(value): name for value, name in enumerate(CLASSES)},
        "numTraining": len(names),
        "numTest": 0,
        "training": [{"image": f"./imagesTr/{name}", "label": labels(name)} for name in names],
        "test": [],
        "phantom": made_of,
    }
    (folder / "dataset.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def _nifti(array: Array) -> bytes:
    """A compressed file, the same bytes each time."""
    image: Any = Nifti1Image
    content = image(array, np.diag([*SPACING_MM, 1.0])).to_bytes()
    return gzip.compress(content, 3, mtime=0)  # noise gains little from more effort


def _fits(folder: Path) -> bool:
    path = folder / "dataset.json"
    return path.is_file() and "phantom" in read_json(path)


def _same(folder: Path, made_of: dict[str, Any]) -> Path:
    """The folder, if it holds the phantom asked for."""
    if not (folder / "dataset.json").is_file():
        raise FileError(f"{folder} must be free for the phantom, or hold it; it holds something else. Move it away.")
    there = read_json(folder / "dataset.json").get("phantom")
    if there != made_of:
        raise FileError(
            f"{folder} must hold the phantom asked for, {_words(made_of)}; it holds "
            f"{_words(there) if isinstance(there, dict) else 'another dataset'}. Choose another folder."
        )
    return folder


def _words(made_of: dict[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in made_of.items())
