"""Predictions without labels: find them in a folder, read them whole, write other values in their place.

What is written has the format, layout, type, header and compression of what was read, so that whatever read the one
reads the other; or, if that is wanted, arrays become NIfTI images in the place of the label map beside them. Only where
the type cannot express the values (integers that would have to reach beyond their scale) is it float32 instead. Opening
reads headers only; reading and writing a case takes the memory of its values and of the arrays in its files.
"""

from __future__ import annotations

import shutil
import zipfile
import zlib
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO, cast

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from segcal.errors import ConfigError, FileError, ShapeError
from segcal.files import new_file
from segcal.volumes.arrays import (
    EXTENSIONS,
    StoredArray,
    gzip_into,
    read_array,
    read_nifti_start,
    refuse_objects,
    stem_of,
)
from segcal.volumes.cases import PROBABILITY_KEYS, Source, with_full_scale
from segcal.volumes.grids import Grid, arrange, space_of_one_class
from segcal.volumes.pairing import Claim, Numbered, claims_of_predictions, is_array, name_of_prediction

_PIECE_BYTES = 1 << 20


@dataclass(frozen=True)
class PredictionFiles:
    """The files of one prediction: one, or one per class in class order.

    `reference` is the NIfTI file of the same stem beside an array (the label map that nnU-Net writes), which says
    where the voxels lie.
    """

    name: str
    predictions: tuple[Path, ...]
    reference: Path | None = None


def find_predictions(path: Path, *, classes: int | None = None) -> list[PredictionFiles]:
    """Predictions in a folder and its subfolders, or the one file given, sorted by name.

    Folders are searched, files named and class numbers read as by `pair_cases`. Endings such as `_prob` are left off,
    unless two predictions would then go by one name; then whole stems count, and then the folder of a file that is
    alone in it. Files numbered from 0 or 1 are the classes of one prediction where each is a single class, all have
    one shape, and there are as many as `classes`, if that is given. A file with a word of decision (`case_seg`) is
    left out beside the probabilities of its case, and so is a NIfTI file beside an array of the same stem.
    """
    if path.is_file():
        return [PredictionFiles(name_of_prediction(path), (path,), _reference((path,), ""))]
    if not path.is_dir():
        raise FileError(
            f"predictions must be a folder or a file; {path} {'is none' if path.exists() else 'is not there'}."
        )
    claims = claims_of_predictions(path, together=lambda files: _are_classes(files, classes))
    if not claims:
        raise FileError(f"{path} must hold predictions, as {', '.join(EXTENSIONS)} files; there are none.")
    named = _by_name(_without_decisions(claims))
    return [PredictionFiles(name, files, _reference(files, name)) for name, files in sorted(named.items())]


def _are_classes(files: Sequence[Numbered], classes: int | None) -> bool:
    """Whether numbered files are the classes of one case, and not a case each; their headers tell."""
    numbers = sorted({number for number, _ in files})
    if len(numbers) < 2 or numbers[0] > 1 or numbers != list(range(numbers[0], numbers[0] + len(numbers))):
        return False
    if classes not in (None, len(numbers)):
        return False
    shapes = set()
    for _, path in files:
        try:
            shapes.add(space_of_one_class(read_array(path, keys=PROBABILITY_KEYS, peek=True), classes=classes))
        except FileError:
            continue  # who opens it will say why
        if None in shapes or len(shapes) > 1:
            return False
    return len(shapes) == 1


def _without_decisions(claims: Sequence[Claim]) -> list[Claim]:
    """Without files named as decisions whose probabilities lie beside them: the label maps that MONAI writes."""
    probabilities = set()
    for claim in claims:
        plain, probable, *_ = claim.names
        certain = plain if len(claim.files) > 1 or is_array(claim.files[0]) else None
        probabilities |= {(claim.files[0].parent, name) for name in (certain, probable) if name}
    return [claim for claim in claims if (claim.files[0].parent, claim.names[2]) not in probabilities]


def _by_name(claims: Sequence[Claim]) -> dict[str, tuple[Path, ...]]:
    """Files by the shortest name that nobody else goes by; `FileError` where two have no other name left."""
    names = {}
    for claim in claims:
        plain, probable, decided, folder = claim.names
        names[claim] = [name for name in (probable, decided, plain, folder) if name]
    while True:
        found = defaultdict(list)
        for claim in claims:
            found[names[claim][0]].append(claim)
        crowded = [claim for same in found.values() if len(same) > 1 for claim in same if len(names[claim]) > 1]
        if not crowded:
            break
        for claim in crowded:
            del names[claim][0]
    for name, same in found.items():
        if len(same) > 1:
            one, other = sorted(str(claim.files[0]) for claim in same)[:2]
            raise FileError(f"predictions of case {name} must be one; {one} and {other} both claim it.")
    return {name: claim.files for name, (claim,) in found.items()}


def _reference(files: tuple[Path, ...], case: str) -> Path | None:
    if not is_array(files[0]):
        return None
    stem = case if len(files) > 1 else stem_of(files[0])
    return next((path for end in EXTENSIONS[:2] if (path := files[0].with_name(f"{stem}{end}")).is_file()), None)


def places(files: PredictionFiles, root: Path, *, nifti: bool = False) -> list[Path]:
    """Where a prediction's files lie under `root`; `nifti`: with arrays as .nii.gz."""
    found = [path.relative_to(root) for path in files.predictions]
    return [path.with_name(f"{stem_of(path)}.nii.gz") if nifti and is_array(path) else path for path in found]


def open_prediction(files: PredictionFiles, *, classes: int | None = None) -> Prediction:
    """The prediction in these files; `ShapeError` where it has not as many `classes` as are asked for.

    Only headers are read. Without `classes` the last axis of a NIfTI image of four, and the first of another array
    is that of classes.
    """
    with _naming(files.name):
        stored = [read_array(path, keys=PROBABILITY_KEYS, peek=True) for path in files.predictions]
        reference = None if files.reference is None else read_array(files.reference, peek=True)
        for path, array in zip(files.predictions, stored, strict=True):
            if array.key is not None:
                refuse_objects(path)
    return Prediction(files, stored, reference, classes)


class Prediction:
    """A prediction on disk, to be read whole, and to be written elsewhere with other values."""

    def __init__(
        self, files: PredictionFiles, stored: list[StoredArray], reference: StoredArray | None, classes: int | None
    ):
        self.name = files.name
        self._given, self._files = files, files.predictions
        self._stored = stored  # without values
        self._reference, self._wanted = reference, classes
        views, self.grid = self._arrange(stored)
        self.classes = sum(len(view) for view in views)
        self._shape = (self.classes, *views[0].shape[1:])
        self._full_scales: list[int] | None = None

    def read(self) -> NDArray[Any]:
        """The values (class, x, y, z) as meant, float32, or float64 where a file is; yours to write to.

        An image of two axes gets a third of length one. Integers are read as by `open_case`.
        """
        sources = self._sources()
        values = np.empty(self._shape, np.result_type(*(source.type for source in sources)))
        row = 0
        for source in sources:
            source.read(source.view, values[row : row + len(source.view)])
            source.stored.release()
            row += len(source.view)
        return values

    def write(self, values: NDArray[Any], folder: Path, root: Path, *, nifti: bool = False) -> tuple[Path, ...]:
        """Write values (class, x, y, z) to `folder`, at the same place as under `root`; the paths.

        Integers are rounded to the steps of their scale; where that cannot express a value, the file becomes float32.
        `nifti`: arrays become NIfTI images (x, y, z, class) of float32, with the header of the reference. Nobody ever
        sees a part of a file.
        """
        targets = self._targets(folder, root, nifti=nifti)
        if values.shape != self._shape:
            raise ShapeError(f"{self.name}: values must have the shape {self._shape}; got {values.shape}.")
        parts = np.split(values, len(targets))
        if nifti and is_array(self._files[0]):
            self._write_on_reference(parts, targets)
            return targets
        own = self._own_forms()
        forms = _forms(own, parts)
        new = [
            replace(stored, values=np.empty(stored.values.shape, form.dtype, order=stored.order))
            for stored, form in zip(self._stored, forms, strict=True)
        ]
        views, _ = self._arrange(new)
        with _naming(self.name), ExitStack() as stack:  # all files appear together, at its end
            for i, target in enumerate(targets):
                _fill(views[i], parts[i], forms[i])
                target.parent.mkdir(parents=True, exist_ok=True)
                file = stack.enter_context(new_file(target))
                _write(file, self._files[i], new[i], None if forms[i] == own[i] else forms[i])
        return targets

    def _write_on_reference(self, parts: Sequence[NDArray[Any]], targets: Sequence[Path]) -> None:
        reference = self._given.reference
        if reference is None or self.grid.spacing_mm is None:
            came = "there is none" if reference is None else f"{reference.name} has another shape"
            raise FileError(
                f"{self.name}: a NIfTI image needs a label map of the same name and shape beside the array, which says "
                f"where the voxels lie, as nnU-Net writes it; {came}."
            )
        with _naming(self.name), ExitStack() as stack:
            for part, target in zip(parts, targets, strict=True):
                target.parent.mkdir(parents=True, exist_ok=True)
                _write_maps(stack.enter_context(new_file(target)), reference, part)

    def _arrange(self, stored: Sequence[StoredArray]) -> tuple[list[NDArray[Any]], Grid]:
        """Views (class, x, y, z) of arrays that are laid out as those in the files."""
        return arrange(self.name, stored, classes=self._wanted, reference=self._reference)

    def _sources(self) -> list[Source]:
        with _naming(self.name):
            stored = [read_array(path, keys=PROBABILITY_KEYS) for path in self._files]
        views, _ = self._arrange(stored)
        sources = with_full_scale(self.name, [Source(*each) for each in zip(views, stored, strict=True)])
        self._full_scales = [source.full_scale for source in sources]
        return sources

    def _own_forms(self) -> list[_Form]:
        if self._full_scales is None:
            self._sources()
        return [
            _Form(stored.values.dtype, stored.slope if stored.scaled else 1 / full_scale, stored.inter, full_scale)
            for stored, full_scale in zip(self._stored, self._full_scales or [], strict=True)
        ]

    def _targets(self, folder: Path, root: Path, *, nifti: bool) -> tuple[Path, ...]:
        base = root.parent if root.is_file() else root
        for path in self._files:
            if not path.is_relative_to(base):
                raise ConfigError(f"{self.name}: predictions must lie under {base}; {path} does not.")
            target = folder / path.relative_to(base)
            if target.exists() and target.samefile(path):
                raise ConfigError(f"--out must be another folder than the predictions; it would overwrite {path}.")
        return tuple(folder / place for place in places(self._given, base, nifti=nifti))


@dataclass(frozen=True)
class _Form:
    """How numbers are stored: a value is `number * slope + inter`. `full_scale`: no header says that slope."""

    dtype: np.dtype[Any]
    slope: float = 1.0
    inter: float = 0.0
    full_scale: int = 1

    @property
    def limits(self) -> tuple[float, float]:
        """The least and the largest number, as floats that do not lie beyond them."""
        if self.dtype.kind == "b":
            return 0.0, 1.0
        info = np.iinfo(self.dtype)
        top = float(info.max)
        return float(info.min), top if int(top) <= info.max else float(np.nextafter(top, 0))

    def expresses(self, values: NDArray[Any]) -> bool:
        """Whether the numbers reach as far as the values, up to half a step."""
        if self.dtype.kind == "f":
            most = np.finfo(np.float16).max  # other floats hold whatever was read from them, and more
            return self.dtype.itemsize > 2 or not any((np.abs(row[np.isfinite(row)]) > most).any() for row in values)
        if (self.slope, self.inter) == (1.0, 0.0):  # zeros and ones that mean just that; a two would mean two steps
            return all(bool(((row == 0) | (row == 1)).all()) for row in values)
        with np.errstate(invalid="ignore"):
            first, last = sorted((float(end) - self.inter) / self.slope for end in (values.min(), values.max()))
        low, high = self.limits
        return low - 0.5 <= first and last <= high + 0.5  # false for NaN


_FLOAT32 = _Form(np.dtype(np.float32))


def _forms(own: Sequence[_Form], parts: Sequence[NDArray[Any]]) -> list[_Form]:
    """The form of each file: its own, where that expresses the values, or else float32; floats need no scale."""
    forms = [form if form.expresses(part) else _FLOAT32 for form, part in zip(own, parts, strict=True)]
    whole = [i for i, form in enumerate(forms) if form.full_scale != 1]
    if whole and not any(parts[i].max() * forms[i].full_scale >= 1.5 for i in whole):
        return [_FLOAT32 if i in whole else form for i, form in enumerate(forms)]  # zeros and ones would mean 0 and 1
    return [_Form(form.dtype) if form.dtype.kind == "f" else form for form in forms]


def _fill(view: NDArray[Any], values: NDArray[Any], form: _Form) -> None:
    """Write the numbers that stand for the values to the view, class by class."""
    for numbers, row in zip(view, values, strict=True):
        with np.errstate(over="ignore", under="ignore", invalid="ignore"):
            if form.dtype.kind == "f":
                np.copyto(numbers, row, casting="same_kind")
            else:
                steps = np.subtract(row, form.inter, dtype=np.float64)
                steps /= form.slope
                np.clip(np.rint(steps, out=steps), *form.limits, out=steps)
                np.copyto(numbers, steps, casting="unsafe")


def _write(file: BinaryIO, source: Path, new: StoredArray, form: _Form | None) -> None:
    """Write the new array as the source has its own; `form`, if the header must tell another one."""
    if new.geometry is not None:
        _write_nifti(file, source, new.values, form)
    elif new.key is not None:
        _write_npz(file, source, f"{new.key}.npy", new.values)
    else:
        _write_npy(file, new.values)


def _write_nifti(file: BinaryIO, source: Path, values: NDArray[Any], form: _Form | None) -> None:
    """The source's header and extensions, byte for byte where its type and scale stay, then the values."""
    header, start, compressed = read_nifti_start(source)
    if form is not None:
        size = len(header.binaryblock)
        header = type(header)(start[:size], check=False)
        header.set_data_dtype(form.dtype)
        header["scl_slope"], header["scl_inter"] = form.slope, form.inter
        start = header.binaryblock + start[size:]
        values = values.astype(header.get_data_dtype(), copy=False)  # in the header's byte order
    with gzip_into(file) if compressed else nullcontext(file) as stream:
        stream.write(start)
        _write_numbers(stream, values.T)


def _write_maps(file: BinaryIO, reference: Path, values: NDArray[Any]) -> None:
    """Values (class, x, y, z) as a compressed image (x, y, z, class) in the place of the reference."""
    header, _, _ = read_nifti_start(reference)
    header.set_data_shape(np.moveaxis(values, 0, -1).shape)
    header.set_data_dtype(np.float32)
    header["pixdim"][4], header["scl_slope"], header["scl_inter"] = 1, 1, 0
    header["vox_offset"] = len(header.binaryblock) + 4
    for name in ("cal_min", "cal_max", "intent_code"):  # of labels
        header[name] = 0
    with gzip_into(file) as stream:
        stream.write(header.binaryblock + bytes(4))  # no extensions
        _write_numbers(stream, np.ascontiguousarray(values.transpose(0, 3, 2, 1), header.get_data_dtype()))


def _write_npy(file: BinaryIO, values: NDArray[Any]) -> None:
    layout = npy.header_data_from_array_1_0(values)
    npy.write_array_header_1_0(file, layout)
    _write_numbers(file, values.T if layout["fortran_order"] else values)


def _write_numbers(file: BinaryIO, values: NDArray[Any]) -> None:
    """All bytes of a contiguous array, piece by piece: whoever compresses them takes no second copy."""
    numbers = values.reshape(-1).view(np.uint8)
    for first in range(0, len(numbers), _PIECE_BYTES):
        file.write(numbers[first : first + _PIECE_BYTES].data)


def _write_npz(file: BinaryIO, source: Path, name: str, values: NDArray[Any]) -> None:
    """The source's archive with one array exchanged; level 1, since more effort gains little on such maps."""
    try:
        with zipfile.ZipFile(source) as old:
            kind = old.getinfo(name).compress_type
            with zipfile.ZipFile(file, "w", kind, compresslevel=1) as new:
                for member in old.infolist():
                    with new.open(member.filename, "w", force_zip64=True) as stream:
                        if member.filename == name:
                            _write_npy(cast(BinaryIO, stream), values)
                        else:
                            with old.open(member) as other:
                                shutil.copyfileobj(other, stream)
    except (zipfile.BadZipFile, zlib.error, EOFError, LookupError) as error:
        raise FileError(f"{source.name} must be an .npz file; it cannot be read ({error}).") from error


@contextmanager
def _naming(case: str) -> Iterator[None]:
    """What is wrong with a file is told with its case."""
    try:
        yield
    except FileError as error:
        raise FileError(f"{case}: {error}") from error
