"""Training on the labels of several raters: one drawn for each patch, or their mean."""

import csv
import json

import numpy as np
import pytest
import tiny
import torch

import segcal
from segcal.datasets import make_phantom, open_dataset
from segcal.errors import FileError
from segcal.training import train
from segcal.training.data import Patches
from segcal.training.preprocessing import PreparedStore
from segcal.training.runs import load_run, predict

pytestmark = pytest.mark.usefixtures("one_thread")
SIZE = (40, 40, 26)


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return make_phantom(tmp_path_factory.mktemp("phantom"), cases=6, size=SIZE, raters=3)


def patches(root, tmp_path, raters, patch=SIZE):
    dataset = open_dataset("phantom", root)
    config = tiny.tiny_config("phantom", root, patch=patch, more=(f"data.raters={raters!r}",)).resolved(dataset)
    return Patches(dataset.cases, PreparedStore(tmp_path, dataset, config.data), config)


def test_the_first_rater_is_the_one_of_a_phantom_with_one(root, tmp_path):
    alone = make_phantom(tmp_path, cases=2, size=SIZE)
    for name in ("imagesTr", "labelsTr", "probabilitiesTr"):
        for path in sorted((alone / name).iterdir()):
            assert path.read_bytes() == (root / name / path.name).read_bytes()
    assert (root / "labelsTr_2" / "phantom_000.nii.gz").read_bytes() != (
        root / "labelsTr" / "phantom_000.nii.gz"
    ).read_bytes()


def test_the_true_probabilities_are_calibrated_against_the_mean_of_the_raters(root, tmp_path):
    raters = [root / name for name in ("labelsTr", "labelsTr_2", "labelsTr_3")]
    several = segcal.evaluate(root / "probabilitiesTr", raters, tmp_path / "out").evaluation
    alone = segcal.evaluate(root / "probabilitiesTr", raters[0], tmp_path / "alone").evaluation
    errors = [each.foreground().case_metrics()["ece"].nanmean().item() for each in (several, alone)]
    assert errors[0] < 0.75 * errors[1]  # chance shrinks by the root of three


def test_one_rater_is_drawn_for_each_patch(root, tmp_path):
    items = patches(root, tmp_path, "draw")
    drawn = np.asarray(items.store.get(items.cases[0]).labels)
    assert drawn.shape == (3, *SIZE)
    seen = set()
    for epoch in range(12):
        labels = items[epoch, 0][1].numpy()
        matching = [i for i, rater in enumerate(drawn) if np.array_equal(labels, rater)]
        assert len(matching) == 1
        seen.add(matching[0])
        assert torch.equal(items[epoch, 0][1], items[epoch, 0][1])
    assert seen == {0, 1, 2}


def test_the_mean_is_the_share_of_raters(root, tmp_path):
    items = patches(root, tmp_path, "mean")
    drawn = np.asarray(items.store.get(items.cases[1]).labels)
    expected = np.stack([(drawn == c).mean(0) for c in range(4)])
    np.testing.assert_allclose(items[0, 1][1].numpy(), expected, rtol=1e-6)


@pytest.mark.parametrize("raters", ["draw", "mean"])
def test_a_network_learns_from_several_raters(root, tmp_path, raters):
    config = tiny.tiny_config(
        "phantom", root, patch=(24, 24, 16), epochs=3, more=(f"data.raters={raters!r}", "data.augmentation='affine'")
    )
    run = load_run(train(config, tmp_path / "run").folder)
    with (tmp_path / "run" / "log.csv").open() as file:
        losses = [float(row["loss"]) for row in csv.DictReader(file)]
    assert losses[-1] < losses[0]
    predict(run, tmp_path / "maps")
    labels = [root / name for name in ("labelsTr", "labelsTr_2", "labelsTr_3")]
    found = segcal.evaluate(tmp_path / "maps", labels, tmp_path / "out")
    assert not found.failures
    assert len(found.facets) == 3


def test_labels_of_a_rater_that_are_not_there_are_told(root, tmp_path):
    content = json.loads((root / "dataset.json").read_text())
    content["training"][0]["label"].append("./labelsTr_9/phantom_000.nii.gz")
    content["training"][1]["label"] = [3]
    other = tmp_path / "Task01_Other"
    other.mkdir()
    for name in ("imagesTr", "labelsTr", "labelsTr_2", "labelsTr_3"):
        (other / name).symlink_to(root / name)
    (other / "dataset.json").write_text(json.dumps(content))
    with pytest.raises(FileError, match="several raters"):
        open_dataset("decathlon", other)
    content["training"][1]["label"] = "./labelsTr/phantom_001.nii.gz"
    (other / "dataset.json").write_text(json.dumps(content))
    dataset = open_dataset("decathlon", other)
    assert "labelsTr_9" in dataset.problems[0].what
    assert [len(case.more_labels) for case in dataset.cases] == [0, 2, 2, 2, 2]
