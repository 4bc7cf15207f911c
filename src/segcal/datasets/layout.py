"""Find a dataset's folder and its files by their names; shared by the modules of the single datasets."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from segcal._io.files import reject_pipe
from segcal._io.parsing import parse_json
from segcal.datasets.dataset import DataCase, Problem
from segcal.errors import FileError
from segcal.volumes.arrays import NIFTI as NIFTI
from segcal.volumes.arrays import PICTURES

IMAGES = (*NIFTI, *PICTURES, ".nrrd", ".nhdr", ".mha", ".mhd")
"""Endings of formats that images come in."""


def find_root(root: Path, fits: Callable[[Path], bool], *, layout: str, parts: Sequence[str] = ()) -> Path:
    """The folder that has the layout: the one given, the only one in it that does, or the one above one of its `parts`.

    FileError says which layout was expected and what was found.
    """
    root = root.absolute()
    if root.is_dir():
        if fits(root):
            return root
        inside = [path for path in visible(root) if path.is_dir() and fits(path)]
        if len(inside) == 1:
            return inside[0]
        if inside:
            names = ", ".join(path.name for path in inside)
            raise FileError(f"{root} must hold one dataset; it holds {names}. Name one of them.")
        if root.name in parts and fits(root.parent):
            return root.parent
    raise wrong_layout(root, layout)


def wrong_layout(root: Path, layout: str) -> FileError:
    """What to raise where a folder does not have the layout."""
    return FileError(
        f"{root} must have the layout {layout}; {_found(root)}. Download the dataset again or correct the path."
    )


def _found(root: Path) -> str:
    if not root.is_dir():
        return "it is a file" if root.exists() else "it does not exist"
    names = [path.name + "/" * path.is_dir() for path in visible(root)]
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return f"found {', '.join(names[:5])}{more}" if names else "it is empty"


def visible(folder: Path) -> list[Path]:
    """What is in a folder, sorted, without hidden files (macOS leaves ._ files in archives); empty where it is none."""
    try:
        return sorted(path for path in folder.iterdir() if not path.name.startswith("."))
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise FileError(f"{folder} must be a folder that can be read; {error}. Check its permissions.") from error


def nifti_files(folder: Path) -> dict[str, Path]:
    """NIfTI files of a folder by name without extension; of .nii and .nii.gz alike the former."""
    return image_files(folder, NIFTI)


def image_files(folder: Path, endings: Sequence[str] = IMAGES) -> dict[str, Path]:
    """Images of a folder by name without extension; of several of one name the first in the order of names."""
    found: dict[str, Path] = {}
    for path in visible(folder):
        extension = next((end for end in endings if path.name.endswith(end)), None)
        if extension is not None:
            found.setdefault(path.name.removesuffix(extension), path)
    return found


def pair(
    images: Mapping[str, tuple[Path, ...]],
    labels: Mapping[str, Path],
    *,
    patient: Callable[[str], str] = lambda name: name,
) -> tuple[tuple[DataCase, ...], list[Problem]]:
    """Cases that have both images and labels, by name, and a problem for each that has only one of them."""
    cases = tuple(
        DataCase(name, patient(name), images[name], labels[name]) for name in sorted(images.keys() & labels.keys())
    )
    alone = [
        Problem(name, f"{images[name][0].name} must have labels; there are none.")
        for name in images.keys() - labels.keys()
    ]
    alone += [
        Problem(name, f"{labels[name].name} must have an image; there is none.")
        for name in labels.keys() - images.keys()
    ]
    return cases, sorted(alone)


def unlabelled(
    images: Mapping[str, tuple[Path, ...]], *, patient: Callable[[str], str] = lambda name: name
) -> tuple[DataCase, ...]:
    """Cases without labels, by name."""
    return tuple(DataCase(name, patient(name), images[name], None) for name in sorted(images))


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; FileError where there is none."""
    reject_pipe(path)
    try:
        content = parse_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise FileError(f"{path} must be a JSON file that can be read; {error}. Correct the file.") from error
    if not isinstance(content, dict):
        raise FileError(f"{path} must hold a JSON object; it holds {type(content).__name__}. Correct the file.")
    return content


def channel_names(path: Path, content: dict[str, Any], *keys: str) -> tuple[str, ...]:
    """Names in the order of the channels, from {"0": "FLAIR", "1": "T1w"} under the first of the keys that is there."""
    names = next((content[key] for key in keys if key in content), None)
    if not isinstance(names, dict) or not names or {str(key) for key in names} != set(map(str, range(len(names)))):
        raise FileError(
            f"{path}: {keys[0]} must name the channels from 0 on, as {{'0': 'MRI'}}; got {names!r}. Correct the file."
        )
    return tuple(str(names[str(number)]) for number in range(len(names)))
