"""A case beside code: by ipyniivue where it is installed, else as a picture of one slice."""

from __future__ import annotations

import math
import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import nibabel
import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray

from segcal.errors import ConfigError
from segcal.evaluation.evaluation import Evaluation
from segcal.plots.probability import probability_row, row_height_in
from segcal.plots.style import PAGE_IN, default_settings, new_figure
from segcal.viewer.cases import Choice, view_cases
from segcal.viewer.volumes import FULL, SEEN, CaseVolumes

Array = NDArray[Any]

METHOD = "prediction"  # what the only one is called
HEIGHT = 480  # of the widget, in pixels


def view(
    evaluation: Evaluation,
    case: str,
    predictions: str | os.PathLike[str],
    *,
    labels: str | os.PathLike[str] | None = None,
    images: str | os.PathLike[str] | None = None,
    class_name: str | None = None,
) -> Any:
    """What `Evaluation.view` shows: an ipyniivue widget, or a matplotlib figure."""
    shown = evaluation.foreground()
    if case not in shown.cases:
        raise ConfigError(f"the case must be one of the evaluation's {len(shown.cases)}; got {case!r}.")
    if class_name is not None and class_name not in shown.classes:
        raise ConfigError(f"the class must be one of {', '.join(shown.classes)}; got {class_name!r}.")
    (viewed,) = view_cases(
        {METHOD: evaluation},
        {METHOD: Path(predictions)},
        labels=None if labels is None else Path(labels),
        images=None if images is None else Path(images),
        choices=[Choice(case, "")],
    )
    place = 0 if class_name is None else shown.classes.index(class_name)
    return _picture(viewed.volumes, place) if find_spec("ipyniivue") is None else _widget(viewed.volumes, place)


def _widget(volumes: CaseVolumes, place: int) -> Any:
    """Image, probability of the class and its label, one above the other."""
    from ipyniivue import NiiVue, Volume

    image = np.zeros(volumes.shape, np.uint8) if volumes.image is None else volumes.image
    name = volumes.classes[place]
    layers = [
        Volume(name="image.nii", data=_nifti(volumes, image), colormap="gray", cal_min=0, cal_max=FULL),
        Volume(
            name=f"probability of {name}.nii",
            data=_nifti(volumes, volumes.probabilities[0, place]),
            colormap="viridis",
            opacity=0.5,
            cal_min=SEEN,
            cal_max=FULL,
        ),
    ]
    if volumes.labels is not None:
        label = _nifti(volumes, volumes.labels[place])
        layers.append(
            Volume(name=f"label of {name}.nii", data=label, colormap="red", opacity=0.3, cal_min=0.5, cal_max=1)
        )
    widget = NiiVue(height=HEIGHT, is_radiological_convention=volumes.oriented)
    widget.load_volumes(layers)
    return widget


def _nifti(volumes: CaseVolumes, array: Array) -> bytes:
    kind: Any = nibabel.Nifti1Image  # nibabel has no types
    written: bytes = kind(np.ascontiguousarray(array), volumes.affine).to_bytes()
    return written


def _picture(volumes: CaseVolumes, place: int) -> Figure:
    """The slice of the largest error, or of the most probability without labels, across the coarsest spacing."""
    probability = volumes.probabilities[0, place] / FULL
    label = np.zeros(volumes.shape, np.uint8) if volumes.labels is None else volumes.labels[place]
    flat = math.prod(volumes.shape[2:]) == 1
    axis = 2 if flat else max(range(3), key=lambda i: (round(volumes.spacing_mm[i], 2), i))
    others = tuple(i for i in range(3) if i != axis)
    index = int(np.abs(probability - label).sum(others).argmax())
    right, up = (volumes.spacing_mm[i] for i in others)

    def plane(array: Array) -> Array:
        cut: Array = array.take(index, axis)
        return cut[::-1] if volumes.oriented and axis > 0 else cut  # the patient's left is on the right

    told = "" if flat else f", slice {volumes.start[axis] + index}"
    title = f"{volumes.case}\n{volumes.classes[place]}{told}"
    truth = plane(label)
    with default_settings():
        height = row_height_in(truth.shape, (title, METHOD), spacing_mm=(right, up), width_in=PAGE_IN)
        figure = new_figure(PAGE_IN, height)
        probability_row(
            figure,
            None if volumes.image is None else plane(volumes.image),
            {METHOD: plane(probability)},
            truth,
            {METHOD: plane(probability >= 0.5).astype(np.uint8)},
            spacing_mm=(right, up),
            title=title,
        )
    return figure
