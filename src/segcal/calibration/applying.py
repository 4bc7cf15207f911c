"""Apply a calibrator to a folder of predictions."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, get_args

from numpy.typing import NDArray

from segcal._io.files import stay_outside
from segcal._io.jobs import MapJob, Maps, key_of, make_maps, stamp
from segcal.calibrators import Calibrator, load_calibrator
from segcal.errors import ConfigError, one_of
from segcal.evaluation.calibrated import calibrated, check_fits
from segcal.evaluation.cohort import averaging_of
from segcal.evaluation.doubts import Watch
from segcal.evaluation.naming import copy_description
from segcal.evaluation.options import Options, ReadOptions, slab_voxels
from segcal.volumes import PredictionFiles, find_predictions, open_prediction, places
from segcal.volumes.averaging import Mean
from segcal.volumes.finding import with_members
from segcal.volumes.orientation import orientation_of
from segcal.volumes.steps import STEPS, StoredAs
from segcal.volumes.text_header import with_detached_data

Progress = Callable[[int, int, str], None]


def apply_calibrator(
    calibrator: str | os.PathLike[str] | Calibrator,
    predictions: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    members: Sequence[str | os.PathLike[str]] = (),
    mean: Mean = "probabilities",
    options: ReadOptions | None = None,
    nifti: bool = False,
    dtype: StoredAs | None = None,
    progress: Progress = lambda done, total, text: None,
) -> Maps:
    """Write calibrated maps of all predictions in a folder, in their own format and on their own grid.

    Logits become logits, probabilities probabilities. Maps that are there already, of the same file and calibrator,
    stay; a case that fails does not stop the others. Files beside the predictions that name classes are copied.
    ConfigError where the calibrator does not fit the predictions.

    calibrator: one that was fitted, or its file.
    predictions: folder of probability maps or logits, or one file.
    out: folder for the calibrated maps, outside of the predictions.
    members: further folders of maps of the same cases, or files: what is calibrated is the mean of all, and it is
        written as the first are.
    mean: of the members' probabilities, or of their logits.
    options: how to read the predictions: whether they are logits. Names, regions and an ignored label do not matter.
    nifti: makes NIfTI images of arrays, as the .npz files of nnU-Net, in the place of the label map beside them.
    dtype: of the maps, if it is to be another one than theirs. "uint8" stores probabilities as 255ths, in a quarter
        of the room of float32 or less, and "float16" as 65535ths.
    progress: is called with steps done, all steps and a text.

    >>> import tempfile
    >>> import nibabel, numpy as np
    >>> from segcal.calibrators import Temperature
    >>> probabilities = np.tile(np.array([0.1, 0.9], np.float32), (2, 2, 2, 1))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     Path(folder, "predictions").mkdir()
    ...     nibabel.save(nibabel.Nifti1Image(probabilities, np.eye(4)), f"{folder}/predictions/case_0.nii.gz")
    ...     maps = apply_calibrator(Temperature(2.0), f"{folder}/predictions", f"{folder}/calibrated")
    ...     calibrated_map = nibabel.load(f"{folder}/calibrated/case_0.nii.gz").get_fdata()
    >>> calibrated_map[0, 0, 0].round(2).tolist()
    [0.25, 0.75]
    """
    fitted = calibrator if isinstance(calibrator, Calibrator) else load_calibrator(calibrator)
    logits = options is not None and options.logits
    if dtype is not None:
        one_of("dtype", dtype, get_args(StoredAs))
    meant = Options(logits=logits, sigmoid=fitted.activation == "sigmoid")
    source, out, others = Path(predictions), Path(out), [Path(member) for member in members]
    averaging = averaging_of(source, others, mean, meant)
    if averaging is not None:
        meant = replace(meant, logits=averaging.yields_logits)
    check_fits(fitted, meant)
    if meant.logits and dtype in STEPS:
        raise ConfigError(f"logits must stay floating point; {dtype} is for probabilities. Leave out --dtype.")
    root = source if source.is_dir() else source.parent
    for maps in (source, *others):
        stay_outside(out, maps, "predictions")
    found = find_predictions(source, classes=fitted.classes)
    if averaging is not None:
        found = with_members(
            found, {other: find_predictions(other, classes=fitted.classes) for other in others}, averaging
        )
    mark = fitted.fingerprint

    def job(files: PredictionFiles) -> MapJob:
        def make() -> None:
            prediction = open_prediction(files, classes=fitted.classes)
            orientation = orientation_of(prediction.grid.affine)
            most_voxels = None if fitted.spatial else slab_voxels(prediction.classes)
            prediction.watch = Watch(logits=logits, overlapping=meant.sigmoid).see

            def change(values: NDArray[Any]) -> NDArray[Any]:
                return calibrated(fitted, values, meant, orientation)

            exclusive = not (meant.logits or meant.sigmoid)
            prediction.rewrite(
                change, out, root, nifti=nifti, dtype=dtype, exclusive=exclusive, most_voxels=most_voxels
            )

        read = [stamp(path) for each in (files, *files.members) for path in with_detached_data(each.predictions)]
        how = asdict(files.averaging) if files.members else logits
        key = key_of(mark, how, read, dtype)
        return MapJob(files.name, key, [out / place for place in places(files, root, nifti=nifti)], make)

    jobs = [job(files) for files in found]
    return make_maps(out, "calibrated.json", jobs, progress, begin=lambda: copy_description(root, out))
