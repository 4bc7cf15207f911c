"""nnU-Net itself, by its own commands: trained with our trainers, its predictions measured and calibrated."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
from pathlib import Path

import nibabel
import numpy as np
import pytest
import torch
from nnunet_home import AFFINE, CLASSES, IGNORE, REGIONS, SHAPE, Home, dataset_json, save
from nnunetv2.imageio.nibabel_reader_writer import NibabelIOWithReorient
from nnunetv2.training.nnUNetTrainer.nnUNetTrainer import nnUNetTrainer
from nnunetv2.training.nnUNetTrainer.variants.loss.nnUNetTrainerCELoss import nnUNetTrainerCELoss
from nnunetv2.utilities.find_objects import recursive_find_trainer_class_by_name
from nnunetv2.utilities.label_handling.label_handling import LabelManager
from oracle import ace_loss, activate, one_hot
from typer.testing import CliRunner

from segcal import ConfigError
from segcal.adapters.nnunet import TRAINERS, PlusACE, nnUNetTrainerHardACE, nnUNetTrainerSoftACE
from segcal.calibrators import Temperature
from segcal.cli import app
from segcal.volumes.regions import read_ignored, read_regions

pytestmark = pytest.mark.peers

SETTINGS = {"classes": CLASSES, "ignore": CLASSES | IGNORE, "regions": REGIONS, "both": REGIONS | IGNORE}

TINY = """
import torch
from nnunetv2.training.nnUNetTrainer.nnUNetTrainer import nnUNetTrainer
from segcal.adapters.nnunet import nnUNetTrainerHardACE, nnUNetTrainerSoftACE

class nnUNetTrainerTwoEpochs(nnUNetTrainer):
    def __init__(self, plans, configuration, fold, dataset_json, device=torch.device("cuda")):
        super().__init__(plans, configuration, fold, dataset_json, device)
        self.num_epochs, self.num_iterations_per_epoch, self.num_val_iterations_per_epoch = 2, 4, 1

class nnUNetTrainerSoftACETiny(nnUNetTrainerSoftACE, nnUNetTrainerTwoEpochs):
    pass

class nnUNetTrainerHardACETiny(nnUNetTrainerHardACE, nnUNetTrainerTwoEpochs):
    pass
"""


def load(path):
    return np.asarray(nibabel.load(path).dataobj)


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        root = tmp_path_factory.mktemp("nnunet")
        made = Home(root, {"Dataset901_Classes": CLASSES, "Dataset902_Both": REGIONS | IGNORE})
        (root / "tiny").mkdir()
        (root / "tiny" / "tiny_trainers.py").write_text(TINY)
        done = subprocess.run(
            [sys.executable, "-m", "segcal.adapters.nnunet"], capture_output=True, text=True, check=True
        )
        made.environment["nnUNet_extTrainer"] = os.pathsep.join([done.stdout.strip(), str(root / "tiny")])
        for name, value in made.environment.items():
            patch.setenv(name, value)
        yield made


@pytest.fixture(scope="module")
def soft(home):
    """Classes, with the weight from the environment."""
    return home.train(901, "nnUNetTrainerSoftACETiny", SEGCAL_ACE_WEIGHT="0.5")


@pytest.fixture(scope="module")
def hard(home):
    """Regions, and voxels to ignore."""
    return home.train(902, "nnUNetTrainerHardACETiny")


def make_trainer(home, kind, labels, *, deep=True):
    trainer = kind(home.plans, "3d_fullres", 0, dataset_json(labels), torch.device("cpu"))
    trainer.enable_deep_supervision = deep
    trainer.initialize()
    return trainer


def outputs_and_targets(labels, sizes=(8, 4, 2)):
    """What nnU-Net hands to its loss, at three scales: logits, and labels as an integer map or a channel per region."""
    random = torch.Generator().manual_seed(1)
    regions, ignore = "whole" in labels, "ignore" in labels
    outputs, targets = [], []
    for size in sizes:
        shape = (size,) * 3
        outputs.append((2 * torch.randn(2, 2 if regions else 3, *shape, generator=random)).requires_grad_())
        if regions:
            targets.append(torch.rand(2, 2 + ignore, *shape, generator=random) > 0.6)
        else:
            targets.append(torch.randint(0, 3 + ignore, (2, 1, *shape), generator=random).short())
    return outputs, targets


def expected_ace(logits, target, labels, *, bins=20, kernel="hard"):
    """By the formulas, dense, without segcal."""
    regions, keep = "whole" in labels, torch.ones_like(target[:, :1], dtype=torch.bool)
    if "ignore" in labels:
        keep = ~target[:, -1:] if regions else target != 3
    truth = target[:, :2].double() if regions else one_hot(torch.where(keep, target, 0)[:, 0], 3)
    p = activate(logits.detach().float(), "sigmoid" if regions else "softmax").double()
    return ace_loss(p.flatten(2), truth.flatten(2), keep.flatten(1), bins=bins, kernel=kernel).item()


@pytest.mark.parametrize("deep", [True, False], ids=["deep", "flat"])
@pytest.mark.parametrize(("kind", "kernel"), [(nnUNetTrainerHardACE, "hard"), (nnUNetTrainerSoftACE, "triangular")])
@pytest.mark.parametrize("labels", SETTINGS.values(), ids=SETTINGS)
def test_the_loss_is_that_of_nnunet_plus_ace_at_each_scale(home, labels, kind, kernel, deep):
    outputs, targets = outputs_and_targets(labels)
    aces = [expected_ace(*scale, labels, kernel=kernel) for scale in zip(outputs, targets, strict=True)]
    trainer, plain = (make_trainer(home, each, labels, deep=deep) for each in (kind, nnUNetTrainer))
    if not deep:
        outputs, targets = outputs[0], targets[0]
    added = aces[0] * 2 / 3 + aces[1] / 3 if deep else aces[0]  # nnU-Net's weights: 1, 1/2, 0, over their sum
    loss = trainer.loss(outputs, targets)
    assert added > 0.05
    assert loss.item() == pytest.approx(plain.loss(outputs, targets).item() + added, abs=1e-5)
    loss.backward()
    logits, target = (outputs[0], targets[0]) if deep else (outputs, targets)
    if "ignore" in labels:
        left_out = (target[:, -1:] if "whole" in labels else target == 3).expand_as(logits)
        assert left_out.any()
        assert not logits.grad[left_out].any()
        assert logits.grad[~left_out].any()


@pytest.mark.parametrize("kind", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("labels", [CLASSES, REGIONS | IGNORE], ids=["classes", "both"])
def test_half_precision_costs_the_term_nothing(home, labels, kind):
    """Under autocast logits are halves; the term is as exact as for the same numbers in float32."""
    outputs, targets = outputs_and_targets(labels)
    logits = outputs[0].detach().to(kind).requires_grad_()
    loss = make_trainer(home, nnUNetTrainerSoftACE, labels, deep=False).loss
    with torch.autocast("cpu", dtype=torch.bfloat16):
        term = loss(logits, targets[0]) - loss.own(logits, targets[0])
    assert term.item() == pytest.approx(expected_ace(logits, targets[0], labels, kernel="triangular"), abs=1e-5)
    term.backward()
    assert logits.grad.dtype == kind
    assert logits.grad.isfinite().all()


def test_a_patch_of_nothing_but_ignored_voxels_has_no_gradient(home):
    labels = CLASSES | IGNORE
    outputs, targets = outputs_and_targets(labels)
    loss = make_trainer(home, nnUNetTrainerSoftACE, labels).loss(outputs, [torch.full_like(t, 3) for t in targets])
    loss.backward()
    assert loss.isfinite()
    assert not outputs[0].grad.any()


class nnUNetTrainerLight(nnUNetTrainerHardACE):  # noqa: N801
    ace_weight = 0.3
    bins = 7


@pytest.mark.parametrize("way", ["subclass", "environment"])
def test_a_variant_is_a_subclass_of_two_lines_or_a_variable(home, monkeypatch, way):
    kind = nnUNetTrainerLight
    if way == "environment":
        kind = nnUNetTrainerHardACE
        monkeypatch.setenv("SEGCAL_ACE_WEIGHT", "0.3")
        monkeypatch.setenv("SEGCAL_ACE_BINS", "7")
    outputs, targets = outputs_and_targets(CLASSES)
    trainer = make_trainer(home, kind, CLASSES, deep=False)
    own = make_trainer(home, nnUNetTrainer, CLASSES, deep=False).loss(outputs[0], targets[0]).item()
    expected = own + 0.3 * expected_ace(outputs[0], targets[0], CLASSES, bins=7)
    assert trainer.loss(outputs[0], targets[0]).item() == pytest.approx(expected, abs=1e-5)
    line = "segcal: loss = DC_and_CE_loss(dice_weight=1, ce_weight=1) + 0.3 * ACE(hard, 7 bins)"
    assert line in Path(trainer.log_file).read_text()
    assert (trainer.ace_weight, trainer.bins) == (0.3, 7)  # what nnU-Net's debug.json will say


@pytest.mark.parametrize("labels", [CLASSES, REGIONS], ids=["classes", "regions"])
@pytest.mark.parametrize("off", ["dice", "ce"])
def test_dice_or_cross_entropy_can_be_switched_off(home, monkeypatch, labels, off):
    monkeypatch.setenv(f"SEGCAL_{off.upper()}_WEIGHT", "0")
    outputs, targets = outputs_and_targets(labels)
    logits, target = outputs[0], targets[0]
    loss = make_trainer(home, nnUNetTrainerHardACE, labels, deep=False).loss
    regions = "whole" in labels
    if off == "ce":
        own = loss.own.dc(logits, target).item()
    elif regions:
        own = torch.nn.functional.binary_cross_entropy_with_logits(logits, target.float()).item()
    else:
        own = torch.nn.functional.cross_entropy(logits, target[:, 0].long()).item()
    expected = own + expected_ace(logits, target, labels)
    assert loss(logits, target).item() == pytest.approx(expected, abs=1e-5)


def test_a_weight_of_zero_is_nnunets_own_trainer(home, monkeypatch):
    monkeypatch.setenv("SEGCAL_ACE_WEIGHT", "0")
    outputs, targets = outputs_and_targets(CLASSES)
    trainer, plain = (make_trainer(home, kind, CLASSES) for kind in (nnUNetTrainerSoftACE, nnUNetTrainer))
    assert trainer.loss(outputs, targets).item() == plain.loss(outputs, targets).item()
    assert not any(isinstance(module, PlusACE) for module in trainer.loss.modules())


class nnUNetTrainerCEAndACE(nnUNetTrainerSoftACE, nnUNetTrainerCELoss):  # noqa: N801
    """On top of another trainer of nnU-Net's."""


def test_it_stands_on_other_trainers_of_nnunet(home, monkeypatch):
    outputs, targets = outputs_and_targets(CLASSES)
    loss = make_trainer(home, nnUNetTrainerCEAndACE, CLASSES, deep=False).loss
    own = torch.nn.functional.cross_entropy(outputs[0], targets[0][:, 0].long()).item()
    expected = own + expected_ace(outputs[0], targets[0], CLASSES, kernel="triangular")
    assert loss(outputs[0], targets[0]).item() == pytest.approx(expected, abs=1e-5)
    monkeypatch.setenv("SEGCAL_DICE_WEIGHT", "0")
    with pytest.raises(ConfigError, match="dice_weight must be 1 for RobustCrossEntropyLoss, which has none; got 0"):
        make_trainer(home, nnUNetTrainerCEAndACE, CLASSES)


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        *[("SEGCAL_ACE_WEIGHT", value) for value in ("", "much", "-1", "nan", "inf")],
        *[("SEGCAL_ACE_BINS", value) for value in ("0", "2.5", "1000000", "many")],
        ("SEGCAL_DICE_WEIGHT", "-0.1"),
        ("SEGCAL_CE_WEIGHT", "1,5"),
    ],
)
def test_a_wrong_variable_is_named_before_training(home, monkeypatch, variable, value):
    monkeypatch.setenv(variable, value)
    with pytest.raises(ConfigError, match=f"{variable} must be .*; got '{value}'"):
        make_trainer(home, nnUNetTrainerSoftACE, CLASSES)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"ace_weight": -1}, "ace_weight must be a number of at least 0; got -1"),
        ({"bins": 0}, "bins must be a whole number from 1 to 100000; got 0"),
        ({"kernel": "soft"}, "kernel must be one of .*'triangular'"),
        ({"ace_weight": 0, "dice_weight": 0, "ce_weight": 0}, "must be above 0; all of them are 0"),
    ],
)
def test_wrong_settings_of_a_subclass_are_refused(home, settings, sentence):
    with pytest.raises(ConfigError, match=sentence):
        make_trainer(home, type("nnUNetTrainerWrong", (nnUNetTrainerSoftACE,), settings), CLASSES)


@pytest.mark.filterwarnings("ignore:Failed to load image Python extension")  # torchvision, met on nnU-Net's way
@pytest.mark.parametrize("kind", [nnUNetTrainerHardACE, nnUNetTrainerSoftACE])
def test_nnunet_finds_the_trainers_by_name(home, kind):
    assert home.environment["nnUNet_extTrainer"].split(os.pathsep)[0] == str(TRAINERS)
    assert recursive_find_trainer_class_by_name(kind.__name__) is kind


def test_a_trained_run_says_what_it_was_trained_with(soft):
    fold = soft.model / "fold_0"
    (log,) = fold.glob("training_log*.txt")
    line = "segcal: loss = DC_and_CE_loss(dice_weight=1, ce_weight=1) + 0.5 * ACE(triangular, 20 bins)"
    assert line in log.read_text()
    assert json.loads((fold / "debug.json").read_text())["ace_weight"] == "0.5"


def test_a_checkpoint_loads(home, soft):
    trainer = make_trainer(home, nnUNetTrainerSoftACE, CLASSES)
    path = str(soft.model / "fold_0" / "checkpoint_final.pth")
    trainer.load_checkpoint(path)
    stored = torch.load(path, weights_only=False)["network_weights"]
    assert all(torch.equal(value, stored[name]) for name, value in trainer.network.state_dict().items())
    assert trainer.current_epoch == 2


def segcal(*arguments):
    done = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert done.exit_code == 0, done.output
    return done.output


def values(folder):
    with (folder / "cases.csv").open() as file:
        return {(r["case"], r["class"], r["metric"]): float(r["value"]) for r in csv.DictReader(file)}


def test_predictions_are_measured_as_they_are(soft, tmp_path):
    segcal("evaluate", soft.predictions, soft.raw / "labelsTs", "--out", tmp_path / "out")
    found = values(tmp_path / "out")
    with np.load(soft.predictions / "case_5.npz") as file:
        p = torch.from_numpy(file["probabilities"]).permute(0, 3, 2, 1)[None]  # (class, z, y, x)
    label = torch.from_numpy(load(soft.raw / "labelsTs" / "case_5.nii.gz"))[None]
    truth = one_hot(label, 3)
    for c, name in enumerate(CLASSES):
        if c:
            one = (p[:, c : c + 1].double().flatten(2), truth[:, c : c + 1].flatten(2))
            assert found["case_5", name, "ace"] == pytest.approx(ace_loss(*one, bins=20).item(), abs=1e-6)


def nnunets_dice(model):
    """Dice by case and label as nnU-Net's own evaluation of the validation cases has it."""
    summary = json.loads((model / "fold_0" / "validation" / "summary.json").read_text())
    for case in summary["metric_per_case"]:
        for label, metrics in case["metrics"].items():
            yield Path(case["prediction_file"]).name.removesuffix(".nii.gz"), label, metrics["Dice"]


def test_dice_of_validation_cases_is_nnunets(soft, tmp_path):
    """But for voxels where two classes are equally probable: nnU-Net decides on logits."""
    segcal("evaluate", soft.model, soft.raw / "labelsTr", "--out", tmp_path / "out")
    ours, theirs = values(tmp_path / "out"), list(nnunets_dice(soft.model))
    assert {case for case, *_ in theirs} == {"case_3", "case_4"}
    for case, label, dice in theirs:
        name = {"1": "shell", "2": "core"}[label]
        assert ours[case, name, "dice"] == pytest.approx(dice, abs=0.02, nan_ok=True)


@pytest.mark.parametrize("kind", ["classes", "regions"])
def test_an_audit_of_the_model_folder_finds_labels_names_and_regions(soft, hard, tmp_path, kind):
    run, options = (soft, ()) if kind == "classes" else (hard, ("--sigmoid", "--regions", hard.model / "dataset.json"))
    said = " ".join(segcal("audit", run.model, "--out", tmp_path / "audit").split())
    assert "gt_segmentations" in said
    assert "to fit and check a calibrator takes at least 5 patients; there are 2." in said
    segcal("evaluate", run.model, run.raw / "labelsTr", "--out", tmp_path / "out", *options)
    assert values(tmp_path / "audit" / "before") == pytest.approx(values(tmp_path / "out"), nan_ok=True)


def test_dice_of_a_region_is_nnunets_but_for_a_probability_of_one_half(hard, tmp_path):
    """Of the region that is last in the label map: earlier ones are written over there, as nobody forbids a core
    outside of the whole."""
    regions = ("--sigmoid", "--regions", hard.model / "dataset.json")
    segcal("evaluate", hard.model, hard.raw / "labelsTr", "--out", tmp_path / "out", *regions)
    ours = values(tmp_path / "out")
    theirs = {case: dice for case, label, dice in nnunets_dice(hard.model) if label == "2"}
    assert set(theirs) == {"case_3", "case_4"}
    for case, dice in theirs.items():
        with np.load(hard.model / "fold_0" / "validation" / f"{case}.npz") as file:
            p = file["probabilities"].transpose(0, 3, 2, 1)[1]
        label = load(hard.raw / "labelsTr" / f"{case}.nii.gz")
        for value, predicted in ((dice, p > 0.5), (ours[case, "core", "dice"], p >= 0.5)):
            predicted, true = (predicted & (label != 3)), label == 2
            assert value == pytest.approx(2 * (predicted & true).sum() / (predicted.sum() + true.sum()), abs=1e-6)


def test_maps_are_calibrated_on_validation_cases_and_written_where_the_images_lie(soft, tmp_path):
    calibrator, maps = tmp_path / "calibrator.json", tmp_path / "maps"
    (soft.model / "crossval_results_folds_0").mkdir()  # as nnUNetv2_accumulate_crossval_results makes it
    labels = load(soft.model / "fold_0" / "validation" / "case_3.nii.gz")
    save(soft.model / "crossval_results_folds_0" / "case_3.nii.gz", labels)
    how = ("--method", "local-temperature")  # of two cases "auto" may well take nothing
    said = segcal("calibrate", "fit", soft.model, soft.raw / "labelsTr", "--out", calibrator, *how)
    assert "2 held-out cases" in said
    segcal("calibrate", "apply", calibrator, soft.predictions, "--out", maps, "--nifti")
    made, image = nibabel.load(maps / "case_5.nii.gz"), nibabel.load(soft.raw / "imagesTs" / "case_5_0000.nii.gz")
    np.testing.assert_allclose(made.affine, image.affine, atol=1e-6)
    assert made.shape == (*image.shape, 3)
    probabilities = made.get_fdata()
    np.testing.assert_allclose(probabilities.sum(-1), 1, atol=1e-5)
    with np.load(soft.predictions / "case_5.npz") as file:
        before = file["probabilities"].transpose(3, 2, 1, 0)
    np.testing.assert_array_equal(probabilities.argmax(-1), before.argmax(-1))
    assert np.abs(probabilities - before).max() > 1e-3
    segcal("evaluate", maps, soft.raw / "labelsTs", "--out", tmp_path / "written")
    through = ("--calibrator", calibrator)
    segcal("evaluate", soft.predictions, soft.raw / "labelsTs", "--out", tmp_path / "through", *through)
    for key, value in values(tmp_path / "written").items():
        assert value == pytest.approx(values(tmp_path / "through")[key], abs=1e-4, nan_ok=True), key


def test_regions_and_the_ignored_label_come_from_dataset_json(hard, tmp_path):
    regions = ("--sigmoid", "--regions", hard.predictions / "dataset.json")
    segcal("evaluate", hard.predictions, hard.raw / "labelsTs", "--out", tmp_path / "out", *regions)
    found = values(tmp_path / "out")
    with np.load(hard.predictions / "case_5.npz") as file:
        p = file["probabilities"].transpose(0, 3, 2, 1)
    label = load(hard.raw / "labelsTs" / "case_5.nii.gz")
    counted = label != 3
    assert (~counted).sum() == 20 * 24 * 4
    for channel, (name, members) in enumerate({"whole": (1, 2), "core": (2,)}.items()):
        of_region = torch.from_numpy(p[channel][counted])[None, None].double()
        truth = torch.from_numpy(np.isin(label[counted], members))[None, None].double()
        expected = ace_loss(of_region, truth, bins=20).item()
        assert found["case_5", name, "ace"] == pytest.approx(expected, abs=1e-6)
    calibrator = tmp_path / "calibrator.json"
    how = ("--method", "local-temperature", "--set", "steps=50")
    segcal("calibrate", "fit", hard.model, hard.raw / "labelsTr", "--out", calibrator, *how, *regions)
    assert json.loads(calibrator.read_text())["fit"]["voxels"] == 2 * 20 * 24 * 14
    segcal("calibrate", "apply", calibrator, hard.predictions, "--out", tmp_path / "maps", "--nifti")
    made = nibabel.load(tmp_path / "maps" / "case_5.nii.gz")
    np.testing.assert_allclose(made.affine, AFFINE, atol=1e-6)
    clear = np.abs(p - 0.5) > 1e-5  # nearer than that, rounding decides
    np.testing.assert_array_equal(np.moveaxis(made.get_fdata(), -1, 0)[clear] >= 0.5, p[clear] >= 0.5)


@pytest.mark.parametrize(
    "labels",
    [
        REGIONS,
        REGIONS | IGNORE,
        {"background": 0, "core": [2], "whole": [3, 1, 2], "rim": 1, "ignore": 4},
        {"background": 0, "b": [1, 3], "a": [2, 1]},
    ],
)
def test_regions_are_in_the_order_of_nnunets_channels(tmp_path, labels):
    path = tmp_path / "dataset.json"
    path.write_text(json.dumps(dataset_json(labels)))
    number = sum(name not in ("background", "ignore") for name in labels)
    manager = LabelManager(labels, regions_class_order=list(range(1, 1 + number)))
    regions = read_regions(str(path))
    theirs = [region if isinstance(region, tuple) else (region,) for region in manager.foreground_regions]
    assert list(regions.members.values()) == theirs
    assert list(regions.values) == [int(value) for value in manager.all_labels]
    assert read_ignored(str(path)) == manager.ignore_label


def test_arrays_of_images_that_nnunet_turned_are_turned_back(tmp_path):
    """Its reader NibabelIOWithReorient leaves the arrays, but not the label maps, in axes of the body."""
    random = np.random.default_rng(0)
    label = random.integers(0, 3, SHAPE).astype(np.uint8)
    save(tmp_path / "labels" / "case.nii.gz", label)
    reader = NibabelIOWithReorient()
    turned, properties = reader.read_seg(str(tmp_path / "labels" / "case.nii.gz"))
    assert turned.shape[1:] != SHAPE[::-1]
    folder = tmp_path / "predictions"
    folder.mkdir()
    (folder / "plans.json").write_text(json.dumps({"image_reader_writer": "NibabelIOWithReorient"}))
    probabilities = 0.1 + 0.7 * np.eye(3)[turned[0].astype(int)].transpose(3, 0, 1, 2)
    np.savez_compressed(folder / "case.npz", probabilities=probabilities.astype(np.float32))
    reader.write_seg(turned[0].astype(np.uint8), str(folder / "case.nii.gz"), properties)
    segcal("evaluate", folder, tmp_path / "labels", "--out", tmp_path / "out")
    assert values(tmp_path / "out")["case", "class 2", "dice"] == 1
    Temperature(2.0).save(tmp_path / "c.json")
    segcal("calibrate", "apply", tmp_path / "c.json", folder, "--out", tmp_path / "maps", "--nifti")
    made = nibabel.load(tmp_path / "maps" / "case.nii.gz")
    np.testing.assert_array_equal(made.get_fdata().argmax(-1), label)
    np.testing.assert_allclose(made.affine, AFFINE, atol=1e-6)
