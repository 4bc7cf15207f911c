"""A model folder of nnU-Net, made by hand in its layout: the audit finds the rest, or says what to do."""

from __future__ import annotations

import json
import shutil

import cohorts
import numpy as np
import pytest
from typer.testing import CliRunner

from segcal import ConfigError, ReadOptions, audit_predictions
from segcal.audit.nnunet import find_sources, open_model
from segcal.calibration import planning
from segcal.calibration.choosing import Candidate
from segcal.cli import app
from segcal.evaluation.cohort import open_cohort
from segcal.volumes import pair_cases

DATASET = "Dataset004_Hippocampus"
CLASSES = {"background": 0, "anterior": 1, "posterior": 2}
REGIONS = {"background": 0, "whole": [1, 2], "posterior": [2], "ignore": 3}


@pytest.fixture(autouse=True)
def plain(monkeypatch):
    """No folders of nnU-Net but those of a test, and calibrators that take no training."""
    for name in ("nnUNet_raw", "nnUNet_preprocessed", "nnUNet_results"):
        monkeypatch.delenv(name, raising=False)
    quick = (Candidate("temperature", "temperature", {}, (1.0,)), Candidate("vector", "vector", {}))
    monkeypatch.setattr(planning, "CANDIDATES", quick)


def write_model(root, labels=CLASSES, *, name="nnUNetTrainer__nnUNetPlans__3d_fullres", cases=6, maps=True):
    """`nnUNet_results/DATASET/NAME` with two folds, as nnU-Net writes it; arrays have the axes class, z, y, x."""
    model = root / "nnUNet_results" / DATASET / name
    regions = any(isinstance(value, list) for value in labels.values())
    for i in range(cases):
        folder = model / f"fold_{i % 2}" / "validation"
        folder.mkdir(parents=True, exist_ok=True)
        probabilities, label = cohorts.make_case(i)
        cohorts.save(folder / f"hip_{i}.nii.gz", probabilities.argmax(-1).astype(np.uint8))
        if regions:
            probabilities = np.stack([probabilities[..., 1:].sum(-1), probabilities[..., 2]], -1)
            label[:, :, :2] = 3
        if maps:
            np.savez_compressed(folder / f"hip_{i}.npz", probabilities=probabilities.T)
        (folder / "summary.json").write_text("{}")
        truth = root / "truth"
        cohorts.save(truth / f"hip_{i}.nii.gz", label)
    dataset = {"channel_names": {"0": "MRI"}, "labels": labels, "numTraining": cases, "file_ending": ".nii.gz"}
    (model / "dataset.json").write_text(json.dumps(dataset))
    plans = {"dataset_name": DATASET, "plans_name": "nnUNetPlans", "image_reader_writer": "SimpleITKIO"}
    (model / "plans.json").write_text(json.dumps(plans))
    shutil.copytree(model / "fold_0" / "validation", model / "crossval_results_folds_0_1")
    return model


def place(root, where, monkeypatch):
    """Put the labels where nnU-Net may have them."""
    environment = root / "elsewhere"
    target = {
        "beside": root / "nnUNet_results" / DATASET / "gt_segmentations",
        "preprocessed": root / "nnUNet_preprocessed" / DATASET / "gt_segmentations",
        "raw": root / "nnUNet_raw" / DATASET / "labelsTr",
        "nnUNet_raw": environment / DATASET / "labelsTr",
        "nnUNet_preprocessed": environment / DATASET / "gt_segmentations",
    }[where]
    if where.startswith("nnUNet"):
        monkeypatch.setenv(where, str(environment))
    shutil.copytree(root / "truth", target)
    return target


@pytest.mark.parametrize("where", ["beside", "preprocessed", "raw", "nnUNet_raw", "nnUNet_preprocessed"])
def test_labels_are_found_where_nnunet_has_them(tmp_path, monkeypatch, where):
    model = write_model(tmp_path)
    labels = place(tmp_path, where, monkeypatch)
    assert find_sources(model, None, None, ReadOptions()).labels == labels


def test_a_model_folder_is_audited_by_its_name_alone(tmp_path, monkeypatch):
    """Class names are those of dataset.json; numbers are those of the same maps and labels given by hand."""
    model = write_model(tmp_path)
    labels = place(tmp_path, "raw", monkeypatch)
    done = CliRunner().invoke(app, ["audit", str(model), "--out", str(tmp_path / "audit"), "--cases", "2"])
    said = " ".join(done.output.split())
    assert done.exit_code == 0, done.output
    assert f"{DATASET}: validation maps of folds 0, 1" in said
    assert f"labels: {labels}" in said
    assert "6 cases audited, 0 failed" in said
    found = audit_predictions(model, labels, tmp_path / "by-hand", cases=0)
    assert found.outcome.evaluation.classes == ("background", "anterior", "posterior")
    rows = [(tmp_path / name / "before" / "cases.csv").read_text() for name in ("audit", "by-hand")]
    assert rows[0] == rows[1]
    told = (tmp_path / "audit" / "NEXT.md").read_text()
    assert "nnUNetv2_predict -d 4 -c 3d_fullres -i NEW_IMAGES -o NEW_MAPS --save_probabilities" in told


def test_regions_and_the_label_to_ignore_come_from_dataset_json(tmp_path, monkeypatch):
    model = write_model(tmp_path, REGIONS)
    place(tmp_path, "preprocessed", monkeypatch)
    sources = find_sources(model, None, None, ReadOptions())
    options, pairing = open_cohort(sources.predictions, sources.labels, sources.options, bins=20)
    assert len(pairing.cases) == 6
    assert options.sigmoid
    assert options.ignore_index == 3
    assert options.regions.members == {"whole": (1, 2), "posterior": (2,)}
    found = audit_predictions(model, None, tmp_path / "audit", cases=1)
    assert found.outcome.failures == []
    assert found.outcome.evaluation.classes == ("whole", "posterior")
    voxels = np.prod(cohorts.SHAPE) * (cohorts.SHAPE[2] - 2) / cohorts.SHAPE[2]  # two slices are left out
    assert found.outcome.evaluation.statistics.count.sum(2).unique().tolist() == [voxels]
    assert f"--sigmoid --regions {model / 'dataset.json'}" in found.advice.read_text()


def test_images_are_found_beside_the_raw_labels(tmp_path, monkeypatch):
    model = write_model(tmp_path)
    place(tmp_path, "raw", monkeypatch)
    images = tmp_path / "nnUNet_raw" / DATASET / "imagesTr"
    for i in range(6):
        images.mkdir(exist_ok=True)
        cohorts.save(images / f"hip_{i}_0000.nii.gz", cohorts.make_case(i)[1].astype(np.float32))
    sentences = []
    found = audit_predictions(model, None, tmp_path / "audit", cases=1, say=sentences.append)
    assert found.sources.images == images
    assert not [sentence for sentence in sentences if "cannot be shown" in sentence]


def test_without_labels_it_says_where_it_looked(tmp_path):
    model = write_model(tmp_path)
    with pytest.raises(ConfigError, match=r"(?s)gt_segmentations.*nnUNet_raw.*or give LABELS after the model folder"):
        audit_predictions(model, None, tmp_path / "audit")
    assert not (tmp_path / "audit").exists()
    assert audit_predictions(model, tmp_path / "truth", tmp_path / "audit", cases=0).outcome.failures == []


@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("nnUNetTrainer__nnUNetPlans__3d_fullres", ""),
        (
            "nnUNetTrainerSoftACE__nnUNetResEncUNetMPlans__3d_fullres",
            " -tr nnUNetTrainerSoftACE -p nnUNetResEncUNetMPlans",
        ),
    ],
)
def test_where_there_are_no_maps_it_says_which_commands_make_them(tmp_path, name, more):
    model = write_model(tmp_path, name=name, maps=False)
    with pytest.raises(ConfigError) as refused:
        audit_predictions(model, None, tmp_path / "audit")
    said = str(refused.value)
    assert "must have probability maps" in said
    each = [f"`nnUNetv2_train 4 3d_fullres {fold}{more} --val --npz`" for fold in (0, 1)]
    assert said.endswith(f"without training again: {each[0]}, {each[1]}.")


def test_folds_without_maps_are_told_beside_those_with(tmp_path):
    model = write_model(tmp_path)
    for path in (model / "fold_1" / "validation").glob("*.npz"):
        path.unlink()
    sources = find_sources(model, tmp_path / "truth", None, ReadOptions())
    assert "validation maps of fold 0; no maps of fold_1" in sources.found[0]
    assert "nnUNetv2_train 4 3d_fullres 1 --val --npz" in sources.found[0]


def test_maps_of_cases_that_were_trained_on_do_not_count(tmp_path):
    model = write_model(tmp_path)
    shutil.copytree(model / "fold_0", model / "fold_all")
    cases = pair_cases(model, tmp_path / "truth").cases
    assert len(cases) == 6
    assert not [case for case in cases if "fold_all" in case.predictions[0].parts]
    for fold in (0, 1):
        shutil.rmtree(model / f"fold_{fold}")
    with pytest.raises(ConfigError, match="it has fold_all alone, which was trained on all cases"):
        find_sources(model, tmp_path / "truth", None, ReadOptions())


def test_a_folder_above_or_below_the_model_is_named(tmp_path):
    model = write_model(tmp_path)
    with pytest.raises(ConfigError, match=f"one model folder of nnU-Net must be given; .* has: {model}"):
        find_sources(model.parent, None, None, ReadOptions())
    for below in (model / "fold_0", model / "fold_0" / "validation"):
        with pytest.raises(ConfigError, match=f"must be given as a whole, with its folds: {model}"):
            find_sources(below, None, None, ReadOptions())


@pytest.mark.parametrize("plans", ["[]", "{", '{"dataset_name": "../../etc"}'])
def test_plans_that_say_nothing_leave_the_name_to_the_folder(tmp_path, plans):
    model = write_model(tmp_path)
    (model / "plans.json").write_text(plans)
    assert open_model(model).dataset == DATASET
