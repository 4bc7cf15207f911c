"""Which prediction belongs to which label, from the names of files and folders alone."""

from __future__ import annotations

import re
import unicodedata
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

from segcal.errors import FileError
from segcal.volumes.arrays import DICOM, NUMPY, PICTURES, stem_of
from segcal.volumes.averaging import PLAIN, Averaging
from segcal.volumes.text_header import with_detached_data

_LABEL_WORDS = "gt|seg|label|labels|mask|segmentation"
_PROBABILITY_WORDS = "prob|probs|proba|probability|probabilities|softmax|sigmoid|logits"
_DECISION_WORDS = "seg|pred|preds|prediction|predictions|trans|segmentation|mask"
_NUMBERED = rf"(?:class|channel|ch|c|label|{_PROBABILITY_WORDS}|{_DECISION_WORDS})?[_-]?(?P<number>\d{{1,4}})"
_CLASS_FILES = [
    re.compile(form, re.IGNORECASE) for form in (rf"(?P<case>){_NUMBERED}", rf"(?P<case>.+?)[_-]{_NUMBERED}")
]

_RATER_WORDS = f"rater|reader|annotator|annotation|expert|observer|r|{_LABEL_WORDS}"
_RATER_FILES = re.compile(rf"(?:(?P<case>.+?)[_-])?(?P<rater>(?:{_RATER_WORDS})[_-]?(?:\d+|[a-z]))", re.IGNORECASE)

_FOLD = re.compile(r"fold_\d+")
_LEFT_OUT = (".", "crossval_results_folds_")  # hidden; label maps that nnU-Net gathers from its folds

Numbered = tuple[int, Path]  # a file after the number in its name
Rule = Callable[[Sequence[Numbered]], bool]


@dataclass(frozen=True)
class MemberFiles:
    """The files of one more prediction of a case, and where they were looked for; none where there are none."""

    folder: Path
    predictions: tuple[Path, ...]


@dataclass(frozen=True)
class RaterFile:
    """The label map that one rater drew of a case."""

    rater: str
    label: Path


@dataclass(frozen=True)
class CaseFiles:
    """The files of one case: one prediction, or one per class in class order, and its label.

    With `members`, what is predicted is the mean of the first and of these. With `raters`, each has a label map of its
    own, and `label` is that of the first. With `rater_channels`, the raters are the channels of the label file.
    """

    name: str
    predictions: tuple[Path, ...]
    label: Path
    members: tuple[MemberFiles, ...] = ()
    averaging: Averaging = PLAIN
    raters: tuple[RaterFile, ...] = ()
    rater_channels: bool = False

    @property
    def all(self) -> tuple[Path, ...]:
        """Every file that is read."""
        members = (path for member in self.members for path in member.predictions)
        return with_detached_data(
            (*self.predictions, self.label, *(rater.label for rater in self.raters[1:]), *members)
        )

    def absolute(self) -> CaseFiles:
        """The same for those who have another current folder."""
        members = tuple(MemberFiles(each.folder, _absolute(each.predictions)) for each in self.members)
        raters = tuple(RaterFile(each.rater, each.label.absolute()) for each in self.raters)
        return replace(
            self,
            predictions=_absolute(self.predictions),
            label=self.label.absolute(),
            members=members,
            raters=raters,
        )


@dataclass(frozen=True)
class Pairing:
    """Cases sorted by name, and the files that found no partner, relative to their folders and sorted."""

    cases: tuple[CaseFiles, ...]
    unpaired_predictions: tuple[str, ...] = ()
    unpaired_labels: tuple[str, ...] = ()

    def averaged(self, members: Mapping[Path, Pairing], averaging: Averaging) -> Pairing:
        """The same cases, each the mean of its prediction and of those that other folders have for its label."""
        found = {folder: {case.label: case.predictions for case in own.cases} for folder, own in members.items()}
        cases = (
            replace(
                case,
                members=tuple(MemberFiles(folder, files.get(case.label, ())) for folder, files in found.items()),
                averaging=averaging,
            )
            for case in self.cases
        )
        return replace(self, cases=tuple(cases))


def rated(pairings: Mapping[str, Pairing]) -> Pairing:
    """The cases of all raters, each with the label maps of those who drew it; a rater may miss cases.

    pairings: Of each rater, the same predictions paired with the rater's label maps.
    """
    found: dict[tuple[Path, ...], list[tuple[RaterFile, CaseFiles]]] = defaultdict(list)
    for rater, pairing in pairings.items():
        for case in pairing.cases:
            found[case.predictions].append((RaterFile(rater, case.label), case))
    cases = [replace(drawn[0][1], raters=tuple(file for file, _ in drawn)) for drawn in found.values()]
    alone = set.intersection(*(set(pairing.unpaired_predictions) for pairing in pairings.values()))
    labels = [f"{rater}: {path}" for rater, pairing in pairings.items() for path in pairing.unpaired_labels]
    return Pairing(tuple(sorted(cases, key=lambda case: case.name)), tuple(sorted(alone)), tuple(labels))


def _absolute(paths: Iterable[Path]) -> tuple[Path, ...]:
    return tuple(path.absolute() for path in paths)


@dataclass(frozen=True, eq=False)
class Claim:
    """Files of one side that belong together, and the case names they may go by, the best first."""

    files: tuple[Path, ...]
    names: tuple[str | None, ...]


def pair_cases(predictions: Path, labels: Path) -> Pairing:
    """Cases that both folders have, and what could not be paired.

    A file's name is its stem (the name without .nii.gz or another ending), or its stem without one known ending:
    `_gt`, `_seg`, `_label`, `_labels`, `_mask`, `_segmentation` for labels; `_prob`, `_softmax`, `_logits` and the
    like, then `_seg`, `_pred`, `_trans` and the like for predictions; `-` serves as well as `_`. A file that is
    nothing but such a word, or alone in a case folder, goes by the folder's name. Whole stems are matched first, then
    shortened ones, then folders. Where a folder holds files with a label ending, only those are labels (the others
    are images). Files numbered by class (`case_0`, `case_class1`, `case_prob2`, `0` in a folder `case`) are one
    prediction, where the numbers are consecutive and `case` is a label's name. An .npz or .npy file, or files per
    class, win over a NIfTI file of the case's plain name beside them (the label map that nnU-Net writes). Folders are
    searched with their subfolders, and two levels deep only where nothing lies above. Two files that claim one case
    alike are a `FileError`. One file on either side is one case, whatever the names.
    """
    if predictions.is_file() and labels.is_file():
        return Pairing((CaseFiles(_name_of_single(labels, _LABEL_WORDS), (predictions,), labels),))
    for what, folder in (("predictions", predictions), ("labels", labels)):
        if not folder.is_dir():
            found = "is a file and the other is not" if folder.is_file() else "does not exist"
            raise FileError(
                f"{what} must be a folder, or predictions and labels a file each; {folder} {found}."
                " Give two folders or two files."
            )
    label_claims = _label_claims(labels)
    known = {name for claim in label_claims for name in claim.names if name is not None}
    prediction_claims = claims_of_predictions(predictions, known=known)
    matches = _match(prediction_claims, label_claims)
    cases = tuple(
        CaseFiles(name, prediction.files, label.files[0]) for name, (prediction, label) in sorted(matches.items())
    )
    paired = {path for case in cases for path in (*case.predictions, case.label)}
    chosen_as_probable = {name for name, (prediction, _) in matches.items() if prediction.names[1] == name}
    left = [
        claim
        for claim in prediction_claims
        if claim.files[0] not in paired and claim.names[2] not in chosen_as_probable
    ]
    return Pairing(
        cases,
        _relative((path for claim in left for path in claim.files), predictions),
        _relative((claim.files[0] for claim in label_claims if claim.files[0] not in paired), labels),
    )


def pair_raters(predictions: Path, labels: Path) -> Pairing:
    """The cases of a folder in which each label map is named by its case and a rater.

    The rater is the end of the name, after `_` or `-`: a word for raters and a number, or a letter (`case_1_rater2`,
    `case_1-reader_a`, `case_1_seg03`); in a folder of the case the same without the case's name.
    """
    found: dict[str, dict[str, list[Claim]]] = defaultdict(lambda: defaultdict(list))
    unknown = []
    for folder, stems in _image_files(labels).items():
        inside = None if folder == labels else folder.name
        for path, stem in stems.items():
            match = _RATER_FILES.fullmatch(stem)
            case = match and (match["case"] or inside)
            if match and case:
                found[match["rater"].lower()][case].append(Claim((path,), (case, None, None)))
            else:
                unknown.append(path)
    if not found:
        raise FileError(
            f"label maps of several raters in one folder must be named by case and rater, as case_1_rater1.nii.gz; "
            f"{labels} has none. Rename them, or give a folder for each rater."
        )
    known = {case for drawn in found.values() for case in drawn}
    claims = claims_of_predictions(predictions, known=known)
    pairings = {}
    for rater, drawn in sorted(found.items()):
        matches = _match(claims, [claim for each in drawn.values() for claim in each])
        cases = tuple(CaseFiles(name, one.files, other.files[0]) for name, (one, other) in sorted(matches.items()))
        paired = {path for case in cases for path in (*case.predictions, case.label)}
        alone = (path for claim in claims for path in claim.files if path not in paired)
        own = (claim.files[0] for each in drawn.values() for claim in each if claim.files[0] not in paired)
        pairings[rater] = Pairing(cases, _relative(alone, predictions), _relative(own, labels))
    pairing = rated(pairings)
    return replace(pairing, unpaired_labels=(*pairing.unpaired_labels, *_relative(unknown, labels)))


def _match(predictions: Sequence[Claim], labels: Sequence[Claim]) -> dict[str, tuple[Claim, Claim]]:
    """Prediction and label per case name, better names first."""
    matches: dict[str, tuple[Claim, Claim]] = {}
    taken: set[Claim] = set()
    ranks = [(i, j) for i in range(3) for j in range(4)]
    for label_rank, prediction_rank in sorted(ranks, key=lambda pair: (sum(pair), pair)):
        wanted = _by_name(labels, label_rank, taken)
        offered = _by_name(predictions, prediction_rank, taken)
        for name in sorted((wanted.keys() & offered.keys()) - matches.keys()):
            for what, claims in (("predictions", offered[name]), ("labels", wanted[name])):
                if len(claims) > 1:
                    one, other = sorted(str(claim.files[0]) for claim in claims)[:2]
                    raise FileError(
                        f"{what} of case {name} must be one; {one} and {other} both claim it. Remove one of them."
                    )
            matches[name] = offered[name][0], wanted[name][0]
            taken.update(matches[name])
    return matches


def _by_name(claims: Sequence[Claim], rank: int, taken: set[Claim]) -> dict[str, list[Claim]]:
    named = defaultdict(list)
    for claim in claims:
        name = claim.names[rank]
        if name is not None and claim not in taken:
            named[name].append(claim)
    return named


def _label_claims(root: Path) -> list[Claim]:
    """Labels with the names: stem, stem without ending, folder."""
    claims = []
    for folder, stems in _image_files(root).items():
        case = None if folder == root else folder.name
        short = {path: _shortened(stem, case, _LABEL_WORDS) for path, stem in stems.items()}
        if any(short.values()):
            stems = {path: stem for path, stem in stems.items() if short[path]}
        for path, stem in stems.items():
            plain = None if case and _is_word(stem, _LABEL_WORDS) else stem
            claims.append(Claim((path,), (plain, short[path], case if len(stems) == 1 else None)))
    return claims


def claims_of_predictions(
    root: Path, *, known: set[str] | None = None, together: Rule = lambda files: True
) -> list[Claim]:
    """Predictions with the names: stem, stem without a word of probability, without one of decision, folder.

    Numbered files may be the classes of a case that is `known` by its label, of any case where there are no labels;
    `together` says whether they are.
    """
    claims = []
    for folder, stems in _image_files(root).items():
        case = None if folder == root else folder.name
        groups = _class_groups(stems, case, known, together)
        grouped = {path for paths in groups.values() for path in paths}
        better = set(groups) | {stem for path, stem in stems.items() if is_array(path)}
        claims += [Claim(paths, (name, None, None, None)) for name, paths in groups.items()]
        single = {
            path: stem for path, stem in stems.items() if path not in grouped and (is_array(path) or stem not in better)
        }
        for path, stem in single.items():
            probable, decided = (_shortened(stem, case, words) for words in (_PROBABILITY_WORDS, _DECISION_WORDS))
            plain = None if case and _is_word(stem, f"{_PROBABILITY_WORDS}|{_DECISION_WORDS}") else stem
            claims.append(Claim((path,), (plain, probable, decided, case if len(single) == 1 else None)))
    return claims


def _class_groups(
    stems: dict[Path, str], case: str | None, known: set[str] | None, together: Rule
) -> dict[str, tuple[Path, ...]]:
    """Case name and files in class order, for files of one folder that are numbered by class."""
    numbered: dict[tuple[str, str], list[Numbered]] = defaultdict(list)
    arrays = {stem for path, stem in stems.items() if is_array(path)}
    for path, stem in stems.items():
        match = next(filter(None, (form.fullmatch(stem) for form in _CLASS_FILES)), None)
        name = match and (match["case"] or case)
        possible = is_array(path) or stem not in arrays if known is None else name in known and stem not in known
        if match and name and possible:
            numbered[name, stem[: match.start("number")]].append((int(match["number"]), path))
    groups: dict[str, tuple[Path, ...]] = {}
    for (name, _), files in sorted(numbered.items()):
        files.sort()
        if not together(files):
            continue
        numbers = [number for number, _ in files]
        for (number, one), (next_number, other) in pairwise(files):
            if number == next_number:
                raise FileError(
                    f"class {number} of case {name} must be one file; {one} and {other} both claim it."
                    " Remove one of them."
                )
        if len(files) < 2 or numbers != list(range(numbers[0], numbers[0] + len(numbers))):
            continue
        paths = tuple(path for _, path in files)
        if name in groups:
            raise FileError(
                f"predictions of case {name} must be one; {groups[name][0]} and {paths[0]} both claim it."
                " Remove one of them."
            )
        groups[name] = paths
    return groups


def _shortened(stem: str, case: str | None, words: str) -> str | None:
    """The stem without an ending that is one of the words; for the bare word the name of its case folder."""
    match = re.fullmatch(rf"(?:(.+)[_-])?(?:{words})", stem, re.IGNORECASE)
    return match and (match[1] or case)


def _is_word(stem: str, words: str) -> bool:
    return re.fullmatch(words, stem, re.IGNORECASE) is not None


def is_array(path: Path) -> bool:
    """Whether the file is of numpy, which does not say where the voxels lie."""
    return path.suffix.lower() in NUMPY


def is_picture(path: Path) -> bool:
    """Whether the file is a PNG or TIFF image, which does not say where its pixels lie either."""
    return path.suffix.lower() in PICTURES


def name_of_prediction(path: Path) -> str:
    """What a prediction given as a single file goes by: its stem without an ending, or its folder's name."""
    return _name_of_single(path, f"{_PROBABILITY_WORDS}|{_DECISION_WORDS}")


def _name_of_single(path: Path, words: str) -> str:
    stem = stem_of(path) or path.name
    return _shortened(stem, path.absolute().parent.name, words) or stem


def _image_files(root: Path) -> dict[Path, dict[Path, str]]:
    """Files in our formats with their stems, by folder: the root and its subfolders, or what lies one level deeper.

    Hidden ones are left out, and copies of label maps that nnU-Net makes beside its folds. Links are followed, but no
    folder is entered twice. A link to nothing is a file here, so that whoever opens it fails. Pictures and DICOM files
    count where there is nothing else: beside volumes they are figures, and the images that were segmented. So is
    progress.png, which nnU-Net draws above the maps of a fold.
    """
    found: dict[Path, dict[Path, str]] = {}
    above: dict[Path, dict[Path, str]] = {}
    level, seen = [root], set()
    try:
        for depth in range(3):
            deeper = []
            above = dict(found)
            for folder in level if depth < 2 or not _volumes(found) else []:
                place = folder.stat()
                if (place.st_dev, place.st_ino) in seen:
                    continue
                seen.add((place.st_dev, place.st_ino))
                entries = _looked_at(folder)
                stems = {path: stem for path in entries if (stem := stem_of(path)) and not path.is_dir()}
                for path in stems:
                    _need_text(path)
                if stems:
                    found[folder] = stems
                deeper += [path for path in entries if path.is_dir()]
            level = deeper
    except OSError as error:
        raise FileError(f"{root} and the folders in it must be readable; {error}. Check their permissions.") from error
    return _volumes(found) or above or found


def _volumes(found: Mapping[Path, Mapping[Path, str]]) -> dict[Path, dict[Path, str]]:
    """The files that hold labels or predictions, whatever lies beside them."""
    kept = {
        folder: {path: stem for path, stem in stems.items() if not _may_be_else(path)}
        for folder, stems in found.items()
    }
    return {folder: stems for folder, stems in kept.items() if stems}


def _may_be_else(path: Path) -> bool:
    """Whether files of this format are often neither labels nor predictions."""
    return path.suffix.lower() in (*PICTURES, *DICOM)


def _looked_at(folder: Path) -> list[Path]:
    """What is in a folder, sorted, without what is left out: beside folds of nnU-Net fold_all, too, which saw all."""
    entries = sorted(path for path in folder.iterdir() if not path.name.startswith(_LEFT_OUT))
    if any(_FOLD.fullmatch(path.name) for path in entries):
        return [path for path in entries if path.name != "fold_all"]
    return entries


def _need_text(path: Path) -> None:
    """Refuse a name that is not UTF-8 or holds control characters, such as a line break: it would spoil every table."""
    if any(unicodedata.category(sign) in ("Cc", "Cs") for sign in path.name):
        raise FileError(f"{path} must have a name of plain text, without control characters; it has not. Rename it.")


def _relative(paths: Iterable[Path], folder: Path) -> tuple[str, ...]:
    return tuple(sorted(path.relative_to(folder).as_posix() for path in paths))
