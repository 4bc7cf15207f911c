"""Learn from labeled patients what can be promised of new ones: `segcal quality fit`."""

from __future__ import annotations

import json
import math
import os
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from segcal import __version__
from segcal._io.files import reject_pipe, write_whole
from segcal._io.parsing import parse_json
from segcal.calibrators import load_calibrator
from segcal.errors import ConfigError, FileError, check_seed
from segcal.evaluation.evaluation import Evaluation
from segcal.evaluation.intervals import patients_of
from segcal.evaluation.options import Options
from segcal.quality.conformal import fewest_patients
from segcal.quality.promises import ARRAYS, Promises, Reference, Trial, promise, reference_of, try_promises
from segcal.quality.risk import Guarantee, Learned, learn_thresholds
from segcal.quality.summaries import NAMES, Summaries

Array = NDArray[Any]

FORMAT = "segcal quality 1"
MOST_PATIENTS = 1000  # more make no interval better, and each takes its time


class TooFewPatientsError(ConfigError):
    """There are too few patients for intervals of the wanted level."""


@dataclass(frozen=True, eq=False)
class Quality:
    """What was learned from labeled patients; `fit_quality` makes one, and a file keeps it.

    classes: names, without the background.
    level: of the intervals.
    options: how the predictions were read; others must be read alike.
    reference: the labeled cases, without names.
    trials: how the promises held on patients that were left out, by class.
    guarantee: thresholds that keep a risk within its level, if they were asked for.

    >>> import torch
    >>> from segcal import EvaluationAccumulator
    >>> found = EvaluationAccumulator()
    >>> for case in range(9):
    ...     found.update(torch.tensor([[[0.9, 0.2], [0.1, 0.8]]]), torch.tensor([[0, 1]]), [f"case {case}"])
    >>> fit_quality(found.compute()).reference.dice.shape  # nine cases, one class
    (9, 1)
    """

    classes: tuple[str, ...]
    level: float
    options: Options
    reference: Reference
    trials: tuple[Trial, ...]
    guarantee: Guarantee | None = None

    def promise(self, summaries: Summaries) -> Promises:
        """Dice and volume of new cases, each with its interval."""
        return promise(self.reference, summaries, self.level)

    def thresholds(self, count: Array, confidence: Array) -> Array:
        """Places of the guaranteed thresholds among the edges of bins, by class, for a case's (class, bin) sums."""
        if self.guarantee is None:
            raise ConfigError(
                "the quality file must hold thresholds; it has none. Learn them with `segcal quality fit ... --risk "
                "fnr=0.1`."
            )
        return self.guarantee.bins(count, confidence)

    def reading(self, calibrator: str | os.PathLike[str] | None = None) -> Options:
        """How predictions are read: as those were that it was learned from, through the same calibrator.

        calibrator: its file, where it is no longer in its place. ConfigError where it is another one.
        """
        wanted = self.options.calibrator_fingerprint
        if wanted is None:
            if calibrator is not None:
                raise ConfigError(
                    "the quality file was learned without a calibrator; leave out --calibrator, or evaluate with it "
                    "and learn again."
                )
            return self.options
        path = os.path.abspath(calibrator or self.options.calibrator or "")
        try:
            found = load_calibrator(path).fingerprint
        except (FileError, OSError) as error:
            if calibrator is not None:
                raise
            raise ConfigError(
                f"the calibrator of the quality file must be readable; {path} is not. Give its place with --calibrator."
            ) from error
        if found != wanted:
            raise ConfigError(
                f"the calibrator must be the one that the quality file was learned with; {path} is another one."
            )
        return replace(self.options, calibrator=path)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write it as JSON."""
        content = {
            "format": FORMAT,
            "segcal": __version__,
            "classes": self.classes,
            "level": self.level,
            "options": asdict(self.options),
            "summaries": NAMES,
            "reference": {name: _plain(getattr(self.reference, name)) for name in ARRAYS},
            "trials": [[_plain(np.array(value)) for value in trial] for trial in self.trials],
            "guarantee": None if self.guarantee is None else asdict(self.guarantee),
        }
        write_whole(Path(path), json.dumps(content, allow_nan=False).encode())


def fit_quality(
    results: str | os.PathLike[str] | Evaluation,
    out: str | os.PathLike[str] | None = None,
    *,
    level: float = 0.9,
    risk: str | None = None,
    risk_level: float = 0.1,
    adaptive: bool = True,
    patients: str | None = None,
    seed: int = 0,
) -> Quality:
    """Learn from evaluated cases with labels what can be promised of cases without, and write it to a file.

    The cases must be ones that the network was not trained on. Intervals of Dice and volume are conformal: of new
    patients like these, at least the level lies inside. ConfigError where there are too few patients for that, or for
    the risk asked for; the message says how many are needed.

    results: a folder that `evaluate` wrote, or an evaluation.
    out: the file to write, as quality.json; None: none.
    level: of the intervals.
    risk: "fnr", "fdr" or "dice-loss", to learn thresholds that keep it within `risk_level`; None: no thresholds.
    risk_level: the most that the risk may be, on average over patients.
    adaptive: let each case have a threshold of its own, from its probabilities; else one for all.
    patients: which cases are one patient's, as `compare` takes it.
    seed: of the division into parts for the trial of the promises.

    >>> import torch
    >>> from segcal import EvaluationAccumulator
    >>> found, draw = EvaluationAccumulator(), torch.Generator().manual_seed(0)
    >>> for case in range(30):
    ...     foreground = torch.rand(8, 8, 8, generator=draw)
    ...     labels = (torch.rand(8, 8, 8, generator=draw) < foreground).long()
    ...     found.update(torch.stack([1 - foreground, foreground])[None], labels[None], [f"case {case}"])
    >>> quality = fit_quality(found.compute())
    >>> quality.classes, quality.trials[0].coverage >= 0.8
    (('class 1',), True)
    """
    evaluation = results if isinstance(results, Evaluation) else _read(Path(results))
    shown = evaluation.foreground()
    if not 0.5 <= level < 1:
        raise ConfigError(f"the level of intervals must be at least 0.5 and below 1, as 0.9; got {level!r}.")
    names = patients_of(shown.cases, patients)
    _, numbers = np.unique(names, return_inverse=True)
    if len(set(names)) < fewest_patients(level):
        raise TooFewPatientsError(
            f"intervals that hold {level:.0%} need at least {fewest_patients(level)} patients; got {len(set(names))}. "
            f"Evaluate more, or allow a lower level."
        )
    shown, numbers = _at_most(shown, numbers, seed)
    reference = reference_of(shown, numbers)
    guarantee = None
    if risk is not None:
        guarantee = learn_thresholds(
            shown.statistics, numbers, shown.classes, risk=risk, level=risk_level, adaptive=adaptive
        )
    trials = try_promises(reference, shown.classes, level, seed)
    quality = Quality(shown.classes, level, _options(evaluation), reference, trials, guarantee)
    if out is not None:
        quality.save(out)
    return quality


def _read(path: Path) -> Evaluation:
    file = path / "evaluation.npz" if path.is_dir() else path
    if not file.is_file():
        raise FileError(
            f"results must be a folder that `segcal evaluate` wrote; {file} does not exist."
            " Run `segcal evaluate` first."
        )
    return Evaluation.load(file)


def _options(evaluation: Evaluation) -> Options:
    """As the predictions were read; those of an evaluation made by hand are the usual ones."""
    return Options.from_json(evaluation.provenance.get("options") or {})


def _at_most(evaluation: Evaluation, patients: Array, seed: int) -> tuple[Evaluation, Array]:
    """Of very many patients some, drawn by the seed."""
    names = np.unique(patients)
    if len(names) <= MOST_PATIENTS:
        return evaluation, patients
    drawn = np.random.default_rng(check_seed(seed)).choice(names, MOST_PATIENTS, replace=False)
    kept = np.flatnonzero(np.isin(patients, drawn))
    return evaluation.select(cases=kept.tolist()), patients[kept]


def _plain(array: Array) -> Any:
    """As JSON has it; NaN is null."""
    if array.dtype.kind != "f":
        return array.tolist()
    objects = array.astype(object)
    objects[np.isnan(array)] = None
    return objects.tolist()


def load_quality(path: str | os.PathLike[str]) -> Quality:
    """What `fit_quality` wrote; FileError where it is something else.

    path: the file.

    >>> load_quality("setup.cfg")
    Traceback (most recent call last):
    segcal.errors.FileError: setup.cfg must be a file that `segcal quality fit` wrote; it does not exist. Run ...
    """
    path = Path(path)
    reject_pipe(path)
    if not path.is_file():
        raise FileError(
            f"{path} must be a file that `segcal quality fit` wrote; it does not exist. Run `segcal quality fit` first."
        )
    try:
        told = parse_json(path.read_bytes().decode())
    except (OSError, ValueError) as error:
        why = f"it cannot be read ({error})"
        raise FileError(
            f"{path} must be a file that `segcal quality fit` wrote; {why}. Run `segcal quality fit` again."
        ) from error
    try:
        if told["format"] != FORMAT or tuple(told["summaries"]) != NAMES:
            raise ValueError(f"its format is {told['format']!r}")
        arrays = {name: np.array(told["reference"][name], np.float64) for name in ARRAYS}
        guarantee = told["guarantee"]
        if guarantee is not None:
            guarantee = Guarantee(**guarantee | {"learned": tuple(Learned(*each) for each in guarantee["learned"])})
        quality = Quality(
            tuple(map(str, told["classes"])),
            float(told["level"]),
            Options.from_json(told["options"]),
            Reference(**arrays),
            tuple(Trial._make(math.nan if value is None else value for value in row) for row in told["trials"]),
            guarantee,
        )
        _check(quality)
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise FileError(
            f"{path} must be a file that `segcal quality fit` wrote; {error}. Run `segcal quality fit` again."
        ) from error
    return quality


def _check(quality: Quality) -> None:
    reference, classes = quality.reference, len(quality.classes)
    cases = len(reference.patients)
    for name in ARRAYS:
        array = getattr(reference, name)
        shape = {"features": (cases, classes, len(NAMES)), "patients": (cases,)}.get(name, (cases, classes))
        if array.shape != shape:
            raise ValueError(f"its {name} have the shape {array.shape} for {cases} cases of {classes} classes")
        if name != "dice" and not np.isfinite(array).all():
            raise ValueError(f"its {name} are not numbers")
    if quality.guarantee is not None and len(quality.guarantee.learned) != classes:
        raise ValueError(f"its thresholds are not those of {classes} classes")
