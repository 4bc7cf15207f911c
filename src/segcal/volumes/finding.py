"""Which files of a folder are predictions, and where others of the same cases are written."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from segcal.errors import FileError
from segcal.volumes.arrays import DICOM, EXTENSIONS, ITK, NIFTI, PICTURES, read_array, stem_of
from segcal.volumes.averaging import PLAIN, Averaging
from segcal.volumes.cases import PROBABILITY_KEYS
from segcal.volumes.grids import space_of_one_class
from segcal.volumes.mismatch import files_in
from segcal.volumes.pairing import Claim, Numbered, claims_of_predictions, is_array, is_picture, name_of_prediction
from segcal.volumes.text_header import with_detached_data


@dataclass(frozen=True)
class PredictionFiles:
    """The files of one prediction: one, or one per class in class order.

    `reference` is the NIfTI file of the same stem beside an array (the label map that nnU-Net writes), which says
    where the voxels lie; or a picture, which says that they are pixels.
    """

    name: str
    predictions: tuple[Path, ...]
    reference: Path | None = None
    members: tuple[PredictionFiles, ...] = ()
    """Further predictions of the case: what `Prediction.rewrite` changes is the mean of all."""
    averaging: Averaging = PLAIN
    lacking: tuple[Path, ...] = ()
    """Folders in which a member was looked for, and is not."""

    @property
    def all(self) -> tuple[Path, ...]:
        """Every file that is read."""
        own = self.predictions if self.reference is None else (*self.predictions, self.reference)
        return with_detached_data((*own, *(path for member in self.members for path in member.all)))

    def absolute(self) -> PredictionFiles:
        """The same for those who have another current folder."""
        reference = None if self.reference is None else self.reference.absolute()
        predictions = tuple(path.absolute() for path in self.predictions)
        return replace(
            self, predictions=predictions, reference=reference, members=tuple(each.absolute() for each in self.members)
        )


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
            " Check the path."
        )
    claims = claims_of_predictions(path, together=lambda files: _are_classes(files, classes))
    if not claims:
        raise FileError(
            f"{path} must hold predictions, as {', '.join(EXTENSIONS)} files; it holds {files_in(path)}."
            " Check the path."
        )
    named = _by_name(_without_decisions(claims))
    return [PredictionFiles(name, files, _reference(files, name)) for name, files in sorted(named.items())]


def with_members(
    first: Sequence[PredictionFiles], others: Mapping[Path, Sequence[PredictionFiles]], averaging: Averaging
) -> list[PredictionFiles]:
    """Predictions, each with those of the same name in other folders; one that a folder lacks fails when it is opened.

    Where both are a single file, they belong together whatever their names.
    """
    named = {folder: {files.name: files for files in found} for folder, found in others.items()}

    def joined(files: PredictionFiles) -> PredictionFiles:
        alone = len(first) == 1
        found = {
            path: own[0] if alone and path.is_file() else named[path].get(files.name) for path, own in others.items()
        }
        members = tuple(member for member in found.values() if member is not None)
        lacking = tuple(path for path, member in found.items() if member is None)
        return replace(files, members=members, averaging=averaging, lacking=lacking)

    return [joined(files) for files in first]


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
            raise FileError(
                f"predictions of case {name} must be one; {one} and {other} both claim it. Remove one of them."
            )
    return {name: claim.files for name, (claim,) in found.items()}


def _reference(files: tuple[Path, ...], case: str) -> Path | None:
    if not is_array(files[0]):
        return None
    stem = case if len(files) > 1 else stem_of(files[0])
    ends = (*NIFTI, *PICTURES)
    return next((path for end in ends if (path := files[0].with_name(f"{stem}{end}")).is_file()), None)


def places(files: PredictionFiles, root: Path, *, nifti: bool = False) -> list[Path]:
    """Where a prediction is written again under `root`: in the place of its files; `nifti`: with arrays as .nii.gz.

    Formats that cannot hold what comes have another ending: a PNG has no fractions of its steps and becomes .npy; NRRD,
    MetaImage and DICOM files become .nii.gz.
    """

    def ending(path: Path) -> str | None:
        own = path.suffix.lower()
        if own == ".png":
            return ".npy"
        return ".nii.gz" if own in (*ITK, *DICOM) or (nifti and is_array(path)) else None

    found = [path.relative_to(root) for path in files.predictions]
    return [path.with_name(f"{stem_of(path)}{end}") if (end := ending(path)) else path for path in found]


def place_of_labels(files: PredictionFiles, root: Path) -> Path:
    """Where the label map of a prediction goes, under the place of `root`: an image, or an array where there is none.

    That of an array with a label map beside it, as nnU-Net has them, is an image in the place of that. Labels of
    pictures are pictures.
    """
    first = files.predictions[0].relative_to(root)
    like = files.reference if is_array(first) and files.reference is not None else first
    ending = ".nii.gz"
    if is_array(like) or is_picture(like) or (like is first and like.suffix.lower() == ".nii"):
        ending = ".npy" if is_array(like) else like.suffix.lower()
    return first.with_name(f"{files.name}{ending}")
