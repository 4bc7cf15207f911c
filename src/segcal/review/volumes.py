"""Volumes of the cases under review: found once by the names in the folders, read when somebody wants to see them.

A case is looked up in what the folders hold; its name is never made a path.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

from segcal.errors import ConfigError, FileError, SegcalError
from segcal.evaluation.evaluation import Evaluation
from segcal.review.results import EVALUATION, Result
from segcal.viewer.curves import case_curves
from segcal.viewer.volumes import CaseVolumes, Files, case_volumes
from segcal.volumes import find_predictions, pair_cases
from segcal.volumes.averaging import Averaging
from segcal.volumes.finding import with_members
from segcal.volumes.images import find_image

KEPT = 4  # cases in memory: whoever goes back and forth waits once


class Volumes:
    """The volumes of all results; `notes` are sentences on what cannot be shown."""

    def __init__(
        self,
        results: list[Result],
        *,
        predictions: Mapping[str, Path],
        labels: Path | None = None,
        images: Path | None = None,
    ) -> None:
        self._results = results
        self._images = images
        self.notes: list[str] = []
        self._files = [self._found(result, predictions.get(result.name), labels) for result in results]
        self._mutex = threading.Lock()
        self._kept: OrderedDict[tuple[int, str], Future[CaseVolumes]] = OrderedDict()
        self._evaluation = lru_cache(maxsize=4)(lambda path: Evaluation.load(path).foreground())

    def _found(self, result: Result, given: Path | None, labels: Path | None) -> dict[str, Files]:
        """By the names of cases under review, their files."""
        told = result.folders.get("predictions")
        maps = given or _existing(told)
        members = [Path(folder) for folder in result.members] if given is None else []
        if maps is not None and (missing := [folder for folder in members if not folder.exists()]):
            maps, told = None, str(missing[0])
        if maps is None:
            why = f"their folder {told} is not there any more" if told else "the results do not tell where they are"
            self.notes.append(f"{result.name} has no predictions to show: {why}. Give it with --predictions.")
            return {}
        truth = labels or (_existing(result.folders.get("labels")) if given is None else None)
        try:
            found = _files_of(maps, truth, members, result.averaging)
        except SegcalError as error:
            if given is not None or labels is not None:
                raise
            self.notes.append(f"{result.name} has no predictions to show: {error}")
            return {}
        own = {result.prefix + name: files for name, files in found.items()}
        shown = {case: own[case] for case in result.cases if case in own}
        if len(shown) < len(result.cases):
            self.notes.append(f"{result.name}: {maps} has no prediction of {len(result.cases) - len(shown)} cases.")
        return shown

    @property
    def any(self) -> bool:
        """Whether there is something to show at all."""
        return any(self._files)

    def methods(self, case: str, result: int) -> list[int]:
        """The results that a case can be shown of, the given one first: those with its classes."""
        others = [i for i in range(len(self._results)) if i != result]
        return [
            i
            for i in (result, *others)
            if case in self._files[i] and self._results[i].classes == self._results[result].classes
        ]

    def facts(self, case: str, result: int) -> dict[str, Any]:
        """What the viewer must know before it asks for volumes; `results` says which results its methods are."""
        methods = self.methods(case, result)
        if not methods or methods[0] != result:
            raise FileError(
                f"{case}: there is no prediction to show of {self._results[result].name}. Give --predictions."
            )
        curves = {
            place: dict(enumerate(case_curves(self._evaluation(own.file), case.removeprefix(own.prefix))))
            for place, own in enumerate(self._results[i] for i in methods)
            if own.file.suffix == Path(EVALUATION).suffix and case in own.cases
        }
        return {
            **self._get(case, result).facts(),
            "case": case,
            "methods": [self._results[i].name for i in methods],
            "results": methods,
            "curves": curves or None,
        }

    def nifti(self, case: str, result: int, kind: str, class_index: int | None) -> bytes:
        """One volume of a case as a NIfTI file."""
        if kind not in ("image", "label", "probability"):
            raise ConfigError(f"kind must be image, label or probability; got {kind!r}.")
        volumes = self._get(case, result)
        if kind != "image" and (class_index is None or not 0 <= class_index < len(volumes.classes)):
            raise ConfigError(f"class must lie in 0..{len(volumes.classes) - 1}; got {class_index}.")
        return volumes.nifti(kind, 0, class_index)

    def _get(self, case: str, result: int) -> CaseVolumes:
        """Read once, however many ask for it at a time."""
        if not 0 <= result < len(self._files) or case not in self._files[result]:
            raise FileError(f"{case}: there is no prediction to show. Give --predictions.")
        key = (result, case)
        with self._mutex:
            future = self._kept.get(key)
            ours = future is None
            if future is None:
                future = self._kept[key] = Future()
            self._kept.move_to_end(key)
            while len(self._kept) > KEPT:
                self._kept.popitem(last=False)
        if ours:
            try:
                future.set_result(self._read(case, result))
            except BaseException as error:
                with self._mutex:
                    self._kept.pop(key, None)
                future.set_exception(error)
        return future.result()

    def _read(self, case: str, result: int) -> CaseVolumes:
        own, files, image = self._results[result], self._files[result][case], None
        if self._images is not None:
            with suppress(FileError):  # without an image of its own, a case is shown without
                image = find_image(self._images, files.name)  # a name that a folder holds
        return case_volumes(case, {own.name: files}, options=own.options, classes=own.classes, image=image)


def _files_of(maps: Path, truth: Path | None, members: Sequence[Path], averaging: Averaging) -> dict[str, Files]:
    """By the names of cases, the files in these folders; with members, each case is the mean of all."""
    predictions = find_predictions(maps)
    if members:
        predictions = with_members(predictions, {folder: find_predictions(folder) for folder in members}, averaging)
    found: dict[str, Files] = {files.name: files for files in predictions}
    if truth is not None:
        pairing = pair_cases(maps, truth)
        if members:
            pairing = pairing.averaged({folder: pair_cases(folder, truth) for folder in members}, averaging)
        found |= {files.name: files for files in pairing.cases}
    return found


def _existing(told: str | None) -> Path | None:
    return Path(told) if told and Path(told).exists() else None
