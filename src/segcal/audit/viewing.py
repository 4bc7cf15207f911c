"""The cases that an audit's report shows: each method as it was measured, a case through its own fold's calibrator."""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from segcal._io.files import csv_text, make_folder, write_whole
from segcal._io.jobs import failure_of
from segcal.calibration.cross_fitting import HeldOut
from segcal.calibrators import load_calibrator
from segcal.evaluation.evaluation import Evaluation
from segcal.viewer import ViewedCase, choose_cases
from segcal.viewer.cases import view_case
from segcal.volumes import CaseFiles
from segcal.volumes.images import find_image

CALIBRATED = "calibrated"


def keep_folds(folder: Path, held_out: tuple[HeldOut, ...]) -> None:
    """Write folds/N.json, the calibrators that were fitted without some of the cases, and folds.csv, which cases."""
    make_folder(folder / "folds")
    rows = []
    for number, (cases, calibrator) in enumerate(held_out):
        calibrator.save(folder / "folds" / f"{number}.json")
        rows += [(case, number) for case in cases]
    write_whole(folder / "folds.csv", csv_text(("case", "fold"), sorted(rows)).encode())


def view(
    evaluations: Mapping[str, Evaluation],
    files: Mapping[str, CaseFiles],
    folder: Path,
    *,
    images: Path | None,
    number: int,
    say: Callable[[str], None],
    progress: Callable[[int, int, str], None],
) -> Iterator[ViewedCase]:
    """So many cases, cropped: the worst, around the median, and the best by Dice.

    A case that cannot be shown upon its image is shown without, and one that cannot be shown at all left out; a
    sentence says so. `folder` is where `keep_folds` wrote.
    """
    choices = choose_cases(evaluations, number=number) if number else []
    fold_of = _folds(folder) if CALIBRATED in evaluations else {}
    for i, (case, caption) in enumerate(choices):
        progress(i, len(choices), f"reading {case} to show it")
        own = dict(evaluations)
        if case in fold_of:
            own[CALIBRATED] = _through(own[CALIBRATED], fold_of[case])
        for with_images in [images, None] if images is not None else [None]:
            try:
                image = None if with_images is None else find_image(with_images, case)
                viewed = view_case(own, case, dict.fromkeys(own, files[case]), image=image)
            except Exception as error:  # no case may end the others
                why = failure_of(case, error).message
                say(f"{case} cannot be shown{'' if with_images is None else ' upon its image'}: {why}")
            else:
                yield viewed._replace(volumes=viewed.volumes.cropped(), caption=caption)
                break


def _folds(folder: Path) -> dict[str, Path]:
    """The calibrator that was fitted without each case."""
    with (folder / "folds.csv").open(newline="", encoding="utf-8") as file:
        return {row["case"]: folder / "folds" / f"{row['fold']}.json" for row in csv.DictReader(file)}


def _through(evaluation: Evaluation, calibrator: Path) -> Evaluation:
    """The same, told that its cases are read through this calibrator."""
    options = evaluation.provenance["options"] | {
        "calibrator": str(calibrator.absolute()),
        "calibrator_fingerprint": load_calibrator(calibrator).fingerprint,
    }
    return replace(evaluation, provenance=evaluation.provenance | {"options": options})
