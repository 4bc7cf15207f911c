"""Calibrators fitted after training, on logits of cases the network was not trained on.

Each has `fit(cases)`, which goes through a stream of cases as often as it needs, `transform(logits)`, and `save`.
Reading order: `stream` (cases in pieces), `calibrator` (what all have), `linear` with `likelihood` and `newton`, then
`forms` (those with a formula and one optimum), `curves` (isotonic), `local` (a temperature for each
voxel) with `objective`.
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
from segcal.calibrators.curves import Isotonic
from segcal.calibrators.forms import Beta, ClassTemperature, Dirichlet, Platt, Temperature, VectorScaling
from segcal.calibrators.linear import LinearCalibrator
from segcal.calibrators.local import LocalTemperature
from segcal.calibrators.stream import Sample, draw_sample
from segcal.errors import ConfigError, FileError, SegcalError, one_of

CALIBRATORS: dict[str, type[Calibrator]] = {
    kind.method: kind
    for kind in (Temperature, ClassTemperature, VectorScaling, Dirichlet, Platt, Beta, Isotonic, LocalTemperature)
}
"""By the name of the method."""
REMOVED_METHODS = {
    "histogram": "isotonic",
    "matrix": "dirichlet, or vector for classes that overlap",
    "ensemble-temperature": "temperature",
}
"""Methods of version 0.3.0 that this version does not have, and what to use instead."""

__all__ = [
    "CALIBRATORS",
    "Beta",
    "Calibrator",
    "ClassTemperature",
    "Dirichlet",
    "FitReport",
    "Isotonic",
    "LinearCalibrator",
    "LocalTemperature",
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

    method: one of "temperature", "class-temperature", "vector", "dirichlet", "platt", "beta", "isotonic" and
        "local-temperature".
    settings: arguments of the class of that method, such as `activation`.

    >>> make_calibrator("isotonic", activation="sigmoid")
    Isotonic(activation='sigmoid')
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
        method = content["method"]
        if method in REMOVED_METHODS:
            raise ValueError(f"its method {method!r} was removed in this version, use {REMOVED_METHODS[method]}")
        return make_calibrator(method, **_current_settings(content["settings"])).restore(content)
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
