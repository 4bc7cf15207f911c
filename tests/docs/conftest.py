"""Small real files under the names that pages use: maps, labels, a trained run, evaluations, a calibrator."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import nibabel
import numpy as np
import pytest
import torch
from tiny import tiny_config

from segcal import evaluate, fit_calibrator
from segcal.datasets import make_phantom
from segcal.datasets.phantom import CLASSES
from segcal.training import train

FROM_NOTHING = {"docs/tutorial.md"}  # makes its own
ALIASES = {
    "PREDICTIONS": "maps",
    "MAPS": "maps",
    "OTHER_MAPS": "other-maps",
    "LABELS": "labels",
    "RUN": "runs/soft-ace",
}


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twelve cases of the phantom; predictions that are too sure (maps) and less so (other-maps); a run of an epoch."""
    folder = tmp_path_factory.mktemp("made")
    task = make_phantom(folder / "data", cases=12, size=(40, 40, 26))
    shutil.copytree(task / "labelsTr", folder / "labels")
    names = dict(enumerate(CLASSES))
    (folder / "labels" / "dataset.json").write_text(json.dumps({"labels": {str(key): names[key] for key in names}}))
    for name, factor in (("maps", 3.0), ("other-maps", 1.5)):
        (folder / name).mkdir()
        for path in sorted((task / "probabilitiesTr").iterdir()):
            _write_surer(path, folder / name / path.name, factor)
    for method, maps in (("dice-ce", "maps"), ("soft-ace", "other-maps")):
        evaluate(folder / maps, folder / "labels", folder / "results" / method)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    train(tiny_config("phantom", folder / "data", patch=(16, 16, 16)), folder / "runs" / "soft-ace")
    torch.set_num_threads(threads)
    fit_calibrator(folder / "maps", folder / "labels", folder / "calibrator.json", method="temperature", folds=0)
    for alias, name in ALIASES.items():
        (folder / alias).symlink_to(name)
    return folder


def _write_surer(source: Path, target: Path, factor: float) -> None:
    """Probabilities whose logits are multiplied, with some noise, so that decisions go wrong, too."""
    image = nibabel.load(source)
    logits = np.log(np.asarray(image.dataobj).clip(1e-4)) * factor
    logits += np.random.default_rng(0).standard_normal(logits.shape)
    powers = np.exp(logits - logits.max(-1, keepdims=True))
    nibabel.save(nibabel.Nifti1Image((powers / powers.sum(-1, keepdims=True)).astype(np.float32), image.affine), target)


@pytest.fixture
def files(page: str, tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """The folder in which a page runs."""
    folder = tmp_path / "page"
    if page in FROM_NOTHING:
        folder.mkdir()
    else:
        shutil.copytree(request.getfixturevalue("made"), folder, symlinks=True)
    return folder
