"""Calibrators fitted after training, on logits of cases the network was not trained on.

Each has `fit(cases)`, which goes through a stream of cases as often as it needs, `transform(logits)`, and `save`.
Reading order: `stream` (cases in pieces), `calibrator` (what all have), `linear` with `likelihood` and `newton`, then
`forms` (those with a formula and one optimum), `curves` (those without a formula), `ensemble`, `local` (a temperature
for each voxel) with `objective`.
"""

from __future__ import annotations

import os
from difflib import get_close_matches
from inspect import signature
from pathlib import Path
from typing import Any

from segcal._io.files import reject_pipe
from segcal._io.parsing import parse_json
from segcal.calibrators.calibrator import FORMAT, Calibrator, FitReport
from segcal.calibrators.curves import HistogramBinning, Isotonic
from segcal.calibrators.ensemble import EnsembleTemperature
from segcal.calibrators.forms import Beta, ClassTemperature, Dirichlet, MatrixScaling, Platt, Temperature, VectorScaling
from segcal.calibrators.linear import LinearCalibrator
from segcal.calibrators.local import LocalTemperature
from segcal.calibrators.stream import Sample, draw_sample
from segcal.errors import ConfigError, FileError, SegcalError, one_of

CALIBRATORS: dict[str, type[Calibrator]] = {
    kind.method: kind
    for kind in (
        Temperature, ClassTemperature, VectorScaling, MatrixScaling, Dirichlet, Platt, Beta, Isotonic,
        HistogramBinning, EnsembleTemperature, LocalTemperature,
    )
}  # fmt: skip
"""By the name of the method."""

__all__ = [
    "CALIBRATORS",
    "Beta",
    "Calibrator",
    "ClassTemperature",
    "Dirichlet",
    "EnsembleTemperature",
    "FitReport",
    "HistogramBinning",
    "Isotonic",
    "LinearCalibrator",
    "LocalTemperature",
    "MatrixScaling",
    "Platt",
    "Sample",
    "Temperature",
    "VectorScaling",
    "draw_sample",
    "load_calibrator",
    "make_calibrator",
]


def make_calibrator(method: str, **settings: Any) -> Calibrator:
    """A calibrator by the name of its method, not fitted yet.

    ConfigError for a method or a setting that does not exist, or that is out of range.

    method: one of "temperature", "class-temperature", "vector", "matrix", "dirichlet", "platt", "beta", "isotonic",
        "histogram", "ensemble-temperature" and "local-temperature".
    settings: arguments of the class of that method, such as `activation`.

    >>> make_calibrator("histogram", bins=10, activation="sigmoid")
    HistogramBinning(activation='sigmoid', bins=10, edges='width')
    >>> make_calibrator("vector").fitted
    False
    """
    one_of("method", method, tuple(CALIBRATORS))
    known = tuple(signature(CALIBRATORS[method]).parameters)
    for name in settings:
        if name not in known:
            close = get_close_matches(name, known, n=1)
            hint = f" Did you mean {close[0]!r}?" if close else ""
            raise ConfigError(f"{method} has no such setting as {name!r}; it has {', '.join(known)}.{hint}")
    try:
        return CALIBRATORS[method](**settings)
    except TypeError as error:
        told = ", ".join(f"{name}={value!r}" for name, value in settings.items())
        raise ConfigError(f"settings of {method} must be of the right kind; got {told}: {error}.") from error


def load_calibrator(path: str | os.PathLike[str]) -> Calibrator:
    """A calibrator that `Calibrator.save` wrote. Nothing is unpickled.

    FileError where the file cannot be read, SegcalError where it holds something else.

    path: the JSON file.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     Temperature(2.0).save(f"{folder}/calibrator.json")
    ...     load_calibrator(f"{folder}/calibrator.json").temperature
    2.0
    """
    reject_pipe(path)
    try:
        content = parse_json(Path(path).read_text(encoding="utf-8"))
        if content["format"] != FORMAT:
            raise ValueError(f"its format is {content['format']!r}, not {FORMAT!r}")
        return make_calibrator(content["method"], **_current_settings(content["settings"])).restore(content)
    except OSError as error:
        raise FileError(f"{path} must be a calibrator; {error.strerror or error}. Check the path.") from error
    except (ValueError, LookupError, TypeError, AttributeError, RuntimeError, OverflowError) as error:
        reason = f"it lacks {error}" if isinstance(error, LookupError) else str(error).rstrip(".")
        raise SegcalError(
            f"{path} must be a calibrator that segcal wrote; {reason}. Fit it again with `segcal calibrate fit`."
        ) from error


def _current_settings(settings: dict[str, Any]) -> dict[str, Any]:
    """Drop the settings that version 0.3.0 had beyond those of this version."""
    if settings.get("image"):
        raise ValueError("it was fitted with image=True, which this version does not have")
    return {name: value for name, value in settings.items() if name != "image"}
