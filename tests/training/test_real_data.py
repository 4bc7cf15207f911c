"""The whole command on real data: labels of the Decathlon's hippocampus task, predictions of a small network."""

import csv
import os
from pathlib import Path

import nibabel
import numpy as np
import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from segcal import SegmentationLoss
from segcal.cli import app

DATA = Path(os.environ.get("SEGCAL_DATA", "nowhere")) / "Task04_Hippocampus"
pytestmark = pytest.mark.skipif(not DATA.is_dir(), reason="SEGCAL_DATA does not hold Task04_Hippocampus")


def read(path):
    return torch.from_numpy(nibabel.load(path).get_fdata(dtype=np.float32))


def test_predictions_of_a_small_network_on_the_hippocampus(tmp_path):
    names = sorted(path.name for path in (DATA / "labelsTr").glob("hippocampus_*.nii.gz"))[:10]
    torch.manual_seed(0)
    network = nn.Sequential(nn.Conv3d(1, 8, 5, padding=2), nn.ReLU(), nn.Conv3d(8, 3, 5, padding=2))
    optimizer = torch.optim.Adam(network.parameters(), lr=1e-2)
    loss = SegmentationLoss(ace=1)
    for _ in range(5):
        for name in names[:5]:
            image, labels = (read(DATA / kind / name)[None] for kind in ("imagesTr", "labelsTr"))
            optimizer.zero_grad()
            loss(network((image[None] - image.mean()) / image.std()), labels).backward()
            optimizer.step()
    (tmp_path / "predictions").mkdir()
    for name in names[5:]:
        volume = nibabel.load(DATA / "imagesTr" / name)
        image = read(DATA / "imagesTr" / name)
        with torch.no_grad():
            probabilities = network(((image - image.mean()) / image.std())[None, None]).softmax(1)[0]
        array = probabilities.movedim(0, -1).numpy()
        nibabel.save(nibabel.Nifti1Image(array, volume.affine), tmp_path / "predictions" / name)
    out = tmp_path / "out"
    arguments = ["evaluate", str(tmp_path / "predictions"), str(DATA / "labelsTr"), "--out", str(out), "--workers", "2"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    with (out / "cases.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert {row["class"] for row in rows} == {"Anterior", "Posterior", ""}  # from dataset.json
    assert {row["case"] for row in rows} == {name.removesuffix(".nii.gz") for name in names[5:]}
    errors = [float(row["value"]) for row in rows if row["metric"] == "ace"]
    assert len(errors) == 10
    assert all(0 < error < 0.6 for error in errors)
