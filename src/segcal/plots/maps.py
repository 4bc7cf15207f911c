"""Probability maps of cases on disk: which slice to show, which cases are worst, and their figures.

Planes are read one at a time through `volumes`, so that a case of any size needs the memory of its files at most.
They are turned for the eye as radiologists see them: the patient's left is on the right, front and head are up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
from matplotlib.figure import Figure
from nibabel.orientations import aff2axcodes
from numpy.typing import NDArray

from segcal._io.jobs import Failure, failure_of
from segcal.comparison.matching import match_cases
from segcal.errors import ConfigError, FileError, ShapeError
from segcal.evaluation.evaluation import Evaluation
from segcal.evaluation.options import Options
from segcal.evaluation.results import class_names
from segcal.evaluation.voxels import places_of, regions_of
from segcal.plots.probability import probability_row, row_height_in
from segcal.plots.style import PAGE_IN, default_settings, new_figure
from segcal.scores import dice
from segcal.volumes import Case, CaseFiles, Grid, open_case, pair_cases
from segcal.volumes.arrays import read_array, stem_of
from segcal.volumes.averaging import not_probabilities, sigmoid, softmax
from segcal.volumes.cases import LABEL_KEYS
from segcal.volumes.images import find_image, read_channel

Array = NDArray[Any]
Files = Path | Sequence[Path]
T = TypeVar("T")

SAME_SPACING = 0.01  # relative; voxels this alike have no coarsest side
MARGIN = 0.25  # of the extent of what is shown, on each side of it
LEAST_MM = 40.0  # shown at least, so that a small lesion keeps its surroundings


class Plane(NamedTuple):
    """One class in one slice, in voxel order: probabilities, and 0/1 labels and prediction."""

    probability: Array
    labels: Array
    prediction: Array


def case_maps(
    predictions: Mapping[str, Files],
    labels: Path,
    class_name: str | int,
    *,
    image: Path | None = None,
    case: str | None = None,
    options: Options | Mapping[str, Options] | None = None,
    axis: int | None = None,
    index: int | None = None,
) -> Figure:
    """A row of maps of one case and class: the image with its labels, then each method's probabilities.

    `predictions` holds the files of each method: one, or one for each class. The class goes by name or by its place
    among those evaluated. Of the slices along `axis` (that of the coarsest spacing, if not given) it shows `index`,
    or the one in which all methods together disagree most with the labels. `options` say how to read the files, as
    for an evaluation, alike or by method. The maps are cut to what there is to see; of an image, the first channel is
    shown.
    """
    if not predictions:
        raise ConfigError("there must be predictions of at least one method; got none.")
    name = case or stem_of(labels) or labels.name
    sources = {
        method: _Source(
            CaseFiles(name, (paths,) if isinstance(paths, Path) else tuple(paths), labels),
            options[method] if isinstance(options, Mapping) else options or Options(),
        )
        for method, paths in predictions.items()
    }
    place = _place(list(sources.values()), class_name, axis, index)
    planes = {}
    for method, (files, told) in sources.items():
        with open_case(files) as opened:
            planes[method] = _plane(opened, place, place.index, told)
    shown = None if image is None else _image_plane(name, image, labels, place)
    slice_told = "" if place.flat else f", slice {place.index}"
    return _draw(f"{name}\n{place.class_name}{slice_told}", planes, shown, _View.of(place))


def worst_cases(*evaluations: Evaluation, number: int = 10) -> list[str]:
    """Names of the cases of lowest Dice, the worst first: mean over classes but the background, then over methods.

    Only cases that every evaluation has, and that have a Dice in each.
    """
    scores = [_case_dice(evaluation) for evaluation in evaluations]
    shared = [case for case in scores[0] if all(case in each for each in scores)] if scores else []
    return sorted(shared, key=lambda case: (sum(each[case] for each in scores), case))[:number]


class CaseFigure(NamedTuple):
    """The maps of one case and class."""

    case: str
    class_name: str | int
    figure: Figure
    flat: bool = False
    """Whether the case is one plane, not the slice of a volume."""


def worst_case_figures(
    evaluations: Mapping[str, Evaluation],
    predictions: Mapping[str, Path],
    labels: Path,
    *,
    images: Path | None = None,
    class_name: str | int | None = None,
    number: int = 10,
    on_failure: Callable[[Failure], None] | None = None,
    **how: Any,
) -> Iterator[CaseFigure]:
    """Draw the maps of the worst cases of all methods together, the worst first.

    `predictions` names each method's folder, `labels` and `images` those of the cases. The class is the one with
    the lowest Dice of the case, if not given. How to read the files is what the evaluations were told. A case that
    cannot be drawn is left out if `on_failure` is given, which is called with its failure; else its error is raised.
    Further options are those of `case_maps`.
    """
    if set(predictions) != set(evaluations):
        raise ConfigError(f"predictions must be of the methods {list(evaluations)}; got {list(predictions)}.")
    files = {
        method: {case.name: case for case in pair_cases(predictions[method], labels).cases} for method in evaluations
    }
    match_cases(evaluations)  # refuses evaluations that do not belong together
    if len({evaluation.foreground().classes for evaluation in evaluations.values()}) != 1:
        raise ConfigError("evaluations must have their classes in the same order; these have not.")
    how = {"options": {method: options_of(evaluation) for method, evaluation in evaluations.items()}} | how
    for case in worst_cases(*evaluations.values(), number=number):
        wanted = class_name if class_name is not None else _worst_class(evaluations.values(), case)
        try:
            own = {method: files_of(case, known, predictions[method]) for method, known in files.items()}
            first = next(iter(own.values()))
            image = None if images is None else find_image(images, case)
            maps = {method: each.predictions for method, each in own.items()}
            figure = case_maps(maps, first.label, wanted, image=image, case=case, **how)
            with open_case(first) as opened:
                flat = _first_place(opened, 0, Options(), how.get("axis")).flat
        except Exception as error:
            if on_failure is None:
                raise
            on_failure(failure_of(case, error))
        else:
            yield CaseFigure(case, wanted, figure, flat)


def files_of(case: str, files: Mapping[str, T], folder: Path) -> T:
    """Return the files of a case; FileError if the folder has none."""
    if case not in files:
        raise FileError(
            f"{case} must be in {folder}; there is no prediction that goes by it. Check the name of the file."
        )
    return files[case]


def options_of(evaluation: Evaluation) -> Options:
    """How the evaluation was told to read its predictions; as by default, where it does not say."""
    told = evaluation.provenance.get("options")
    if told is None:
        names = evaluation.foreground().classes
        if not evaluation.has_background:
            return Options(class_names=tuple(enumerate(names, start=1)))
        return Options(class_names=tuple(enumerate((evaluation.classes[evaluation.background_index], *names))))
    return Options.from_json(told)


@dataclass(frozen=True)
class _Place:
    """Which class and which slice of a case, and the grid that it lies on."""

    class_index: int
    class_name: str
    axis: int
    index: int
    shape: tuple[int, ...]
    spacing_mm: tuple[float, ...]
    codes: tuple[str, ...] | None
    """Where each axis points, such as L, P, S."""

    @property
    def flat(self) -> bool:
        """Whether there is but one plane."""
        return self.shape[self.axis] == 1


class _Source(NamedTuple):
    """The files of a case by one method, and how to read them."""

    files: CaseFiles
    options: Options


def _place(sources: Sequence[_Source], class_name: str | int, axis: int | None, index: int | None) -> _Place:
    """The place to show; where no index is given, that of the largest disagreement, summed over all methods."""
    with open_case(sources[0].files) as case:
        place = _first_place(case, class_name, sources[0].options, axis)
    if index is None:
        difference, area = np.zeros(place.shape[place.axis]), np.zeros(place.shape[place.axis])
        for files, options in sources:
            with open_case(files) as case:
                for k in range(len(difference)):
                    plane = _plane(case, place, k, options)
                    difference[k] += np.abs(plane.probability - plane.labels).sum()
                    area[k] += plane.labels.sum()
        index = _largest(difference, area)
    if not 0 <= index < place.shape[place.axis]:
        raise ConfigError(f"index must lie in 0..{place.shape[place.axis] - 1} along axis {place.axis}; got {index}.")
    return replace(place, index=index)


def _first_place(case: Case, class_name: str | int, options: Options, axis: int | None) -> _Place:
    number = case.classes if options.regions is None else len(options.regions.members)
    names = class_names(number, options)
    if class_name not in names and not (isinstance(class_name, int) and 0 <= class_name < number):
        raise ConfigError(f"the class must be one of {', '.join(names)}, or its place; got {class_name!r}.")
    c = class_name if isinstance(class_name, int) else names.index(class_name)
    flat = len(case.grid.shape) == 2
    if axis is not None and axis not in ((2,) if flat else (0, 1, 2)):
        raise ConfigError(f"axis must be 0, 1 or 2, and 2 for an image that has no third; got {axis}.")
    spacing = (*(case.grid.spacing_mm or ()), 1.0, 1.0, 1.0)[:3]
    codes = _codes(case.grid)
    if axis is None:
        axis = 2 if flat else _coarsest(spacing, codes)
    return _Place(c, names[c], axis, 0, (*case.grid.shape, 1)[:3], spacing, codes)


def _codes(grid: Grid) -> tuple[str, ...] | None:
    if grid.affine is None:
        return None
    to_codes: Any = aff2axcodes
    codes = to_codes(grid.affine)
    return None if None in codes else tuple(codes)


def _coarsest(spacing_mm: Sequence[float], codes: Sequence[str] | None) -> int:
    """The axis of the coarsest spacing; of several the one from foot to head, else the last."""
    spacing = np.array(spacing_mm)
    coarse = [int(i) for i in np.flatnonzero(spacing >= spacing.max() * (1 - SAME_SPACING))]
    upright = [i for i in coarse if codes is not None and codes[i] in "SI"]
    return (upright or coarse)[-1]


def _largest(difference: Array, area: Array) -> int:
    return int((difference if difference.any() else area).argmax())


def _plane(case: Case, place: _Place, index: int, options: Options) -> Plane:
    """One class in one slice of a case; predicted as Dice has it: the most probable class, or at least 0.5."""
    box = tuple(slice(index, index + 1) if i == place.axis else slice(None) for i in range(3))
    shape = tuple(length for i, length in enumerate(place.shape) if i != place.axis)
    values, labels = case.voxels(box)
    labels = places_of(labels, len(values), options)
    overlapping = options.sigmoid or len(values) == 1
    if options.logits:
        values = sigmoid(values) if overlapping else softmax(values)
    elif not (values.min() >= 0 and values.max() <= 1):
        raise not_probabilities(values)
    c = place.class_index
    if overlapping or options.regions is not None:
        together, truth = regions_of(values, labels, options)
        probability, true, predicted = together[c], truth[c], together[c] >= 0.5
    elif labels.ndim == 1:
        probability, true, predicted = values[c], labels == c, values.argmax(0) == c
    else:
        raise ShapeError(
            f"{case.name}: labels must be one map of exclusive classes; got {len(labels)} channels."
            " Use label maps with one channel."
        )
    return Plane(*(array.reshape(shape) for array in (probability, true.astype(np.uint8), predicted.astype(np.uint8))))


def _image_plane(case: str, path: Path, labels: Path, place: _Place) -> Array:
    """The slice of an image, on the grid of the labels and turned as they are."""
    try:
        like = read_array(labels, keys=LABEL_KEYS)
    except FileError as error:
        raise FileError(f"{case}: {error}") from error
    image = read_channel(case, path, like=like)
    plane: Array = image.stored.take(place.index, place.axis) * image.slope + image.inter
    return plane


@dataclass(frozen=True)
class _View:
    """How a plane is turned for the eye."""

    swapped: bool
    flipped: tuple[bool, bool]
    spacing_mm: tuple[float, float]
    """To the right and up."""

    @staticmethod
    def of(place: _Place) -> _View:
        first, second = (i for i in range(3) if i != place.axis)
        spacing = place.spacing_mm[first], place.spacing_mm[second]
        if place.codes is None and place.flat:  # rows from the top, columns from the left, as pictures are stored
            return _View(True, (False, True), spacing[::-1])
        if place.codes is None:
            return _View(False, (False, False), spacing)
        order = ["LR", "AP", "SI"]  # of two directions, the earlier runs across
        rank = [next(i for i, pair in enumerate(order) if place.codes[axis] in pair) for axis in (first, second)]
        swapped = rank[0] > rank[1]
        across, up = (place.codes[axis] for axis in ((second, first) if swapped else (first, second)))
        return _View(swapped, (across not in "LP", up not in "AS"), spacing[::-1] if swapped else spacing)

    def turn(self, plane: Array) -> Array:
        turned = plane.T if self.swapped else plane
        return turned[tuple(slice(None, None, -1 if flip else 1) for flip in self.flipped)]


def _draw(title: str, planes: Mapping[str, Plane], image: Array | None, view: _View) -> Figure:
    turned = {method: Plane(*(view.turn(array) for array in plane)) for method, plane in planes.items()}
    labels = next(iter(turned.values())).labels
    box = _interesting(turned.values(), view.spacing_mm)
    with default_settings():
        titles = (title, *planes)
        height = row_height_in(labels[box].shape, titles, spacing_mm=view.spacing_mm, width_in=PAGE_IN)
        figure = new_figure(PAGE_IN, height)
        probability_row(
            figure,
            None if image is None else view.turn(image)[box],
            {method: plane.probability[box] for method, plane in turned.items()},
            labels[box],
            {method: plane.prediction[box] for method, plane in turned.items()},
            spacing_mm=view.spacing_mm,
            title=title,
        )
    return figure


def _interesting(planes: Iterable[Plane], spacing_mm: tuple[float, float]) -> tuple[slice, slice]:
    """The part with labels or probabilities that count, and a margin around it."""
    there = np.logical_or.reduce([(plane.labels > 0) | (plane.probability > 0.1) for plane in planes])
    box = []
    for axis, step in enumerate(spacing_mm):
        length = there.shape[axis]
        places = np.flatnonzero(there.any(1 - axis)) if there.any() else np.arange(length)
        first, last = int(places[0]), int(places[-1]) + 1
        margin = max(round(MARGIN * (last - first)), round((LEAST_MM / step - (last - first)) / 2))
        box.append(slice(max(0, first - margin), min(length, last + margin)))
    return box[0], box[1]


def _case_dice(evaluation: Evaluation) -> dict[str, float]:
    scores = dice(evaluation.foreground().overlap).nanmean(1).tolist()
    return {case: score for case, score in zip(evaluation.cases, scores, strict=True) if score == score}


def _worst_class(evaluations: Iterable[Evaluation], case: str) -> str:
    shown = [evaluation.foreground() for evaluation in evaluations]
    scores = np.array([dice(each.overlap)[each.cases.index(case)].tolist() for each in shown])
    known = np.isfinite(scores)
    mean = np.where(known, scores, 0).sum(0) / np.maximum(known.sum(0), 1)
    return shown[0].classes[int(np.where(known.any(0), mean, np.inf).argmin())]
