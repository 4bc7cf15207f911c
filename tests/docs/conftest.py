"""What readers of a page have: small real files under the names that it uses, Python names, programs on their path."""

from __future__ import annotations

import json
import os
import shutil
import sys
import warnings
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import nibabel
import numpy as np
import pytest
import torch
from nnunet_home import CLASSES, IGNORE, REGIONS, Home
from tiny import tiny_config

from segcal import evaluate, fit_calibrator
from segcal.datasets import make_phantom, phantom
from segcal.training import train

NEEDS = {
    "docs/clusters.md": "distributed",
    "docs/lightning.md": "lightning",
    "docs/logging.md": "mlflow",
    "docs/nnunet.md": "nnunetv2",
}
FROM_NOTHING = {"docs/tutorial.md", "docs/lightning.md", "docs/nnunet.md"}  # without the files below
ALIASES = {
    "PREDICTIONS": "maps",
    "MAPS": "maps",
    "OTHER_MAPS": "other-maps",
    "LABELS": "labels",
    "IMAGES": "data/Task00_Phantom/imagesTr",
    "RUN": "runs/soft-ace",
}


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twelve cases of the phantom; predictions that are too sure (maps) and less so (other-maps); a run of an epoch."""
    folder = tmp_path_factory.mktemp("made")
    task = make_phantom(folder / "data", cases=12, size=(40, 40, 26))
    shutil.copytree(task / "labelsTr", folder / "labels")
    names = dict(enumerate(phantom.CLASSES))
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
    tiny_config("phantom", Path("data"), epochs=2, patch=(16, 16, 16)).save(folder / "run.toml")
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


def _loaders(folder: Path, patch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A network and its data."""
    generator = torch.Generator().manual_seed(0)
    labels = [torch.randint(0, 3, (8, 8, 8), generator=generator) for _ in range(6)]
    cases = [
        {"image": label[None] + torch.randn(1, 8, 8, 8, generator=generator), "labels": label, "name": f"case_{i}"}
        for i, label in enumerate(labels)
    ]
    return {
        "network": torch.nn.Conv3d(1, 3, 3, padding=1),
        "train_loader": torch.utils.data.DataLoader(cases[:4], batch_size=2),
        "validation_loader": torch.utils.data.DataLoader(cases[4:]),
    }


def _nnunet(folder: Path, patch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A dataset of classes, with five folds of the same weights, and one of regions, with maps of validation cases."""
    classes, regions = "Dataset004_Hippocampus", "Dataset001_BrainTumour"
    home = Home(folder.with_name("nnunet"), {classes: CLASSES, regions: REGIONS | IGNORE})
    home.write_short_programs(folder.with_name("programs"))
    for name, value in home.environment.items():
        patch.setenv(name, value)
    home.run("nnUNetv2_train 4 3d_fullres 0")
    home.run("nnUNetv2_train 1 3d_fullres 0 --npz")
    model = home.model(4, "nnUNetTrainer")
    shutil.rmtree(model / "fold_0" / "validation")
    for fold in range(1, 5):
        shutil.copytree(model / "fold_0", model / f"fold_{fold}")
    for name in ("imagesTs", "labelsTs"):
        shutil.copytree(home.raw / classes / name, folder / name)
    return {}


GIVEN = {"docs/lightning.md": _loaders, "docs/nnunet.md": _nnunet}


@pytest.fixture
def files(page: str, tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """The folder in which a page runs."""
    if page in NEEDS and find_spec(NEEDS[page]) is None:
        pytest.skip(f"needs {NEEDS[page]}, which another environment has")
    folder = tmp_path / "page"
    if page in FROM_NOTHING:
        folder.mkdir()
    else:
        shutil.copytree(request.getfixturevalue("made"), folder, symlinks=True)
    return folder


@pytest.fixture
def given(page: str, files: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Names that the page's Python finds; the folder and the environment are set for its commands."""
    monkeypatch.chdir(files)
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("DASK_TEMPORARY_DIRECTORY", str(files.parent))
    monkeypatch.setenv("DO_NOT_TRACK", "1")
    for name, few in {"CASES": "20", "EPOCHS": "2", "STEPS": "20"}.items():  # as the tutorial's page says
        monkeypatch.setenv(name, few)
    if page in NEEDS:  # packages of others warn of others
        warnings.simplefilter("ignore")
        warnings.filterwarnings("error", module=r"(page|segcal)\b")
    return GIVEN[page](files, monkeypatch) if page in GIVEN else {}
