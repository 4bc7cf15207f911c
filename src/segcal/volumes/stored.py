"""What a file holds once it is opened, and the care that every reader takes with files that are broken or lie."""

from __future__ import annotations

import math
import mmap
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, BinaryIO, Literal, NoReturn

import numpy as np
from numpy.typing import DTypeLike, NDArray

from segcal.errors import FileError

MOST_INFLATION = 1032  # deflate cannot expand further than this
_KINDS = {
    ".npz": "an .npz file",
    ".npy": "an .npy file",
    ".png": "a PNG image",
    ".tif": "a TIFF image",
    ".tiff": "a TIFF image",
    ".nrrd": "an NRRD image",
    ".nhdr": "an NRRD image",
    ".mha": "a MetaImage",
    ".mhd": "a MetaImage",
    ".dcm": "a DICOM segmentation",
}


@dataclass(frozen=True, eq=False)
class Geometry:
    """What a header says about the place of its voxels.

    NIfTI headers contradict themselves: each of `affines` is one reading, the best first. `zooms` are the voxel sizes
    as stored, one per axis. `bare`: the header says nothing about directions and origin, or only what a tool without
    geometry writes (an identity, or its flipped form from ITK).
    """

    affines: tuple[NDArray[np.float64], ...]
    zooms: tuple[float, ...]
    bare: bool

    @staticmethod
    def of_lps(affine: NDArray[np.float64]) -> Geometry:
        """From an affine that leads to left, posterior and head, as ITK and DICOM have it."""
        turned = np.diag([-1.0, -1.0, 1.0, 1.0]) @ affine
        zooms = tuple(float(length) for length in np.linalg.norm(affine[:3, :3], axis=0))
        bare = not invertible(turned) or bool(np.array_equal(np.abs(turned), np.eye(4)))
        return Geometry((turned,) if invertible(turned) else (), zooms, bare)

    @staticmethod
    def of_steps(path: Path, steps: NDArray[np.float64], origin: NDArray[np.float64]) -> Geometry:
        """From the vector between neighboring voxels of each axis, and the first voxel; both in LPS.

        There may be two axes; those after the third are not in space.
        """
        if len(steps) < 2:
            refuse(path, "it must have at least 2 axes in space; it has one")
        axes = min(len(steps), 3)
        affine = np.eye(4)
        affine[:axes, :axes] = steps[:axes, :axes].T
        affine[:axes, 3] = origin[:axes]
        with np.errstate(all="ignore"):
            directions = affine[:3, :3] / np.linalg.norm(affine[:3, :3], axis=0)
            valid = np.isfinite(affine).all() and abs(np.linalg.det(directions)) > 1e-6
        if not valid:
            refuse(path, "its voxel sizes, directions and origin must be finite, and directions independent")
        return Geometry.of_lps(affine)


@dataclass(frozen=True, eq=False)
class StoredArray:
    """An array with its axes and values as stored; the values meant are `values * slope + inter`."""

    values: NDArray[Any]
    slope: float = 1.0
    inter: float = 0.0
    geometry: Geometry | None = None  # NIfTI, ITK and DICOM only
    key: str | None = None  # its name inside an .npz file
    order: Literal["C", "F"] = "C"  # in which the file has the values: last axis fastest, or first
    mapping: mmap.mmap | None = None  # None: in memory
    turned: bool = False  # nnU-Net turned the image to right, front and head, and left the array like that
    picture: bool = False  # the axes are (y, x), or (channel or page, y, x)
    color: bool = False  # a picture whose channels are red, green and blue
    empty: NDArray[Any] | None = None  # what a voxel holds, one number or one per channel, in slices that are left out

    @property
    def scaled(self) -> bool:
        return (self.slope, self.inter) != (1.0, 0.0)

    def release(self) -> None:
        """Let go of the mapped pages; they are read again when needed."""
        if sys.platform != "win32" and self.mapping is not None:
            self.mapping.madvise(mmap.MADV_DONTNEED)


def invertible(affine: NDArray[np.float64]) -> bool:
    """Whether an affine says where voxels lie."""
    return bool(np.isfinite(affine).all()) and bool(np.linalg.cond(affine[:3, :3]) < 1e6)


@contextmanager
def reading(path: Path) -> Iterator[BinaryIO]:
    """The file, opened; whatever goes wrong with it is a `FileError`."""
    try:
        check_regular_file(path)
        with path.open("rb") as file:
            if path.stat().st_size == 0:
                raise FileError(f"{path.name} must hold an array; the file is empty. Create the file again.")
            yield file
    except FileError:
        raise
    except EOFError as error:
        raise FileError(f"{path.name} must be complete; it ends too early (a broken copy?). Copy it again.") from error
    except Exception as error:  # whatever a parser trips over in a broken file
        kind = _KINDS.get(path.suffix.lower(), "a NIfTI image")
        reason = (str(error) or type(error).__name__).splitlines()[0].rstrip(".")
        raise FileError(f"{path.name} must be {kind}; it cannot be read ({reason}). Create the file again.") from error


def check_regular_file(path: Path) -> None:
    """Refuse pipes, devices, folders and broken links before they are opened: opening a pipe would wait forever."""
    if not path.is_file():
        raise FileError(f"{path.name} must be a file; {_no_file(path)}. Check the path.")


def _no_file(path: Path) -> str:
    if path.exists():
        return "it is a folder, a pipe or a device"
    return "it is a link to what does not exist" if path.is_symlink() else "it does not exist"


def needed(module: str, extra: str, path: Path) -> Any:
    """A package that only some formats need; `FileError` says how to get it."""
    try:
        return import_module(module)
    except ImportError as error:
        raise FileError(
            f"{path.name} cannot be read without {module}, which is not installed. Type: pip install 'segcal[{extra}]'."
        ) from error


def no_values(shape: tuple[int, ...], dtype: DTypeLike) -> NDArray[Any]:
    """Zeros that take no memory."""
    return np.broadcast_to(np.zeros((), dtype), shape)


def byte_size(path: Path, shape: tuple[int, ...], dtype: DTypeLike) -> int:
    """How many bytes the voxels take, once shape and type are ones that volumes have."""
    kind = np.dtype(dtype)
    if not 2 <= len(shape) <= 7 or min(shape) < 1:
        refuse(path, f"its shape {shape} is not that of an image")
    if kind.kind not in "buif":
        refuse(path, f"its values are {kind}, not real numbers")
    return math.prod(shape) * kind.itemsize


def check_size(path: Path, announced: int, *, compressed: bool) -> None:
    """Refuse a header that announces more than the file can hold, before memory is taken for it."""
    size = path.stat().st_size
    if announced > (size * MOST_INFLATION if compressed else size):
        refuse(path, f"its header announces {announced:,} bytes and the file has {size:,}: broken or cut off")


def check_exact_size(path: Path, announced: int) -> None:
    """Reject a file without compression that is not as long as its header announces."""
    size = path.stat().st_size
    if announced != size:
        damage = "broken or cut off" if announced > size else "it has bytes that belong to no voxel"
        refuse(path, f"its header announces {announced:,} bytes and the file has {size:,}: {damage}")


def refuse(path: Path, reason: str) -> NoReturn:
    """Say why a file is not read."""
    raise FileError(f"{path.name} must be a readable image; {reason}. Create the file again.")
