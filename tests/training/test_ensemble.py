"""Ensembles of runs against numpy: means of the members' own predictions, and never of a case that one learned from."""

from __future__ import annotations

import csv
import shutil
from dataclasses import replace
from itertools import product
from pathlib import Path

import layouts
import nibabel
import numpy as np
import pytest
import tiny
import torch
from torch import nn
from typer.testing import CliRunner

from segcal.calibrators import Temperature
from segcal.cli import app
from segcal.errors import ConfigError, FileError
from segcal.training import runs, train
from segcal.training.checkpoint import load_checkpoint, save_checkpoint
from segcal.training.ensemble import RunningMean, load_ensemble, mirrored_logits
from segcal.training.inference import build_network
from segcal.training.runs import evaluate_run, load_run, predict

pytestmark = pytest.mark.usefixtures("one_thread")


def softmax(logits):
    exponentials = np.exp(logits.astype(np.float64) - logits.max(0))
    return exponentials / exponentials.sum(0)


def twin(folder: Path, other: Path, seed: int) -> Path:
    """The same run with other weights."""
    shutil.copytree(folder, other)
    run = load_run(folder)
    torch.manual_seed(seed)
    save_checkpoint(other / "best.pt", {"network": build_network(run.config, run.dataset).state_dict()})
    return other


@pytest.fixture(scope="module")
def members(tmp_path_factory):
    """A trained run, and two of other weights."""
    folder = tmp_path_factory.mktemp("acdc")
    train(tiny.tiny_config("acdc", layouts.write_acdc(folder / "data", test_patients=2)), folder / "a")
    return [folder / "a", *(twin(folder / "a", folder / name, i) for i, name in enumerate("bc"))]


def own_members(members, folder: Path) -> list[Path]:
    """Copies to change."""
    return [Path(shutil.copytree(member, folder / member.name)) for member in members]


def run_cli(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_the_mean_is_of_probabilities_or_of_logits(members):
    case = load_run(members[0]).cases("test")[0]
    each = [load_run(member).logits(case).numpy() for member in members]
    mean = sum(map(softmax, each)) / 3
    ensemble = load_ensemble(members)
    np.testing.assert_allclose(softmax(ensemble.logits(case).numpy()), mean, atol=1e-6)
    np.testing.assert_allclose(np.exp(ensemble.logits(case).numpy()), mean, atol=1e-6)  # the logarithm of the mean
    np.testing.assert_allclose(load_ensemble(members, mean="logits").logits(case).numpy(), sum(each) / 3, atol=1e-5)
    halved = softmax(np.log(mean) / 2)
    np.testing.assert_allclose(softmax(ensemble.logits(case, Temperature(2.0)).numpy()), halved, atol=1e-6)


def test_probabilities_that_round_to_nothing_keep_their_logarithm():
    total = RunningMean("probabilities")
    for height in (300.0, 200.0):
        total.add(torch.tensor([[0.0], [height]]).reshape(2, 1, 1, 1))
    # log((e^-300 + e^-200) / 2) of the first class
    assert total.logits().flatten().tolist() == pytest.approx([-200 - np.log(2), 0.0])


class Pointwise(nn.Module):
    """What it says of a voxel depends on that voxel alone, so that mirror images change nothing."""

    def forward(self, image):
        return torch.cat([image, -image, image**2], 1)


class Aside(nn.Module):
    """Says of a voxel what is in the one before it along the first axis."""

    def forward(self, image):
        return torch.cat([image.roll(1, 2), -image], 1)


def test_flips_are_mirrored_back(members):
    config = load_run(members[0]).config
    image = torch.randn(1, 6, 5, 4)
    config = config.model_copy(update={"data": config.data.model_copy(update={"inference_patch": (6, 5, 4)})})
    for mean in ("probabilities", "logits"):
        same = mirrored_logits(Pointwise(), image, config, torch.device("cpu"), mean=mean)
        plain = Pointwise()(image[None])[0]
        torch.testing.assert_close(same.softmax(0), plain.softmax(0))
    found = mirrored_logits(Aside(), image, config, torch.device("cpu"), mean="logits")
    values = image[0].numpy()
    there_and_back = (np.roll(values, 1, 0) + np.roll(values, -1, 0)) / 2  # mirrored, the one before is the one behind
    np.testing.assert_allclose(found.numpy(), [there_and_back, -values], atol=1e-6)


def test_flips_are_the_mean_over_eight_mirror_images_of_the_file(members, tmp_path):
    """On a grid that is kept as it is, mirroring the prepared image is mirroring the stored one."""
    config = (members[0] / "config.toml").read_text()
    (member,) = own_members(members[:1], tmp_path)
    start = config.index("spacing_mm")
    end = config.index("]", start) + 1
    (member / "config.toml").write_text(config[:start] + 'spacing_mm = "keep"' + config[end:])
    run = load_run(member)
    case = run.cases("test")[0]
    image = nibabel.load(case.images[0])
    total = 0
    for axes in product((False, True), repeat=3):
        flipped = tuple(axis for axis in range(3) if axes[axis])
        path = tmp_path / f"mirrored{''.join(map(str, flipped))}.nii.gz"
        nibabel.save(nibabel.Nifti1Image(np.flip(image.get_fdata(), flipped), image.affine), path)
        logits = run.logits(replace(case, images=(path,))).numpy()
        total = total + softmax(np.flip(logits, [1 + axis for axis in flipped]))
    found = softmax(load_ensemble([member], flips=True).logits(case).numpy())
    np.testing.assert_allclose(found, total / 8, atol=1e-5)


def test_maps_and_sums_are_those_of_the_mean(members, tmp_path):
    ensemble = load_ensemble(members)
    done = run_cli("predict", *members, "--out", tmp_path / "maps")
    assert done.exit_code == 0, done.output
    case = ensemble.cases("test")[0]
    mean = sum(softmax(load_run(member).logits(case).numpy()) for member in members) / 3
    found = nibabel.load(tmp_path / "maps" / f"{case.name}.nii.gz").get_fdata()
    np.testing.assert_allclose(np.moveaxis(found, -1, 0), mean, atol=1e-6)
    assert run_cli("predict", *members, "--logits", "--out", tmp_path / "logits").exit_code == 0
    logits = nibabel.load(tmp_path / "logits" / f"{case.name}.nii.gz").get_fdata()
    np.testing.assert_allclose(np.moveaxis(logits, -1, 0), np.log(mean), atol=1e-5)
    assert run_cli("predict", *members, "--evaluate", "--out", tmp_path / "sums").exit_code == 0
    labels = tmp_path / "labels"
    labels.mkdir()
    for each in ensemble.cases("test"):
        shutil.copy(each.label, labels / f"{each.name}.nii.gz")
    assert run_cli("evaluate", tmp_path / "maps", labels, "--out", tmp_path / "out").exit_code == 0
    tables = []
    for name in ("sums", "out"):
        with (tmp_path / name / "cases.csv").open(encoding="utf-8") as file:
            tables.append({(r["case"], r["class"], r["metric"]): float(r["value"]) for r in csv.DictReader(file)})
    assert tables[0] == pytest.approx(tables[1], abs=2e-4, nan_ok=True)


def test_checkpoints_of_one_training_are_members(members, tmp_path):
    run = members[0]
    assert load_run(run / "last.pt").checkpoint == "last.pt"
    with pytest.raises(FileError, match=r"has no config\.toml"):
        load_run(tmp_path / "gone.pt")
    weights = load_checkpoint(run / "last.pt")["network"]
    shutil.copytree(run, tmp_path / "two")
    save_checkpoint(
        tmp_path / "two" / "earlier.pt",
        {"network": {k: v * 1.1 if v.is_floating_point() else v for k, v in weights.items()}},
    )
    both = load_ensemble([tmp_path / "two" / "last.pt", tmp_path / "two" / "earlier.pt"])
    assert [member.checkpoint for member in both.members] == ["last.pt", "earlier.pt"]
    case = both.cases("test")[0]
    one, other = (softmax(member.logits(case).numpy()) for member in both.members)
    assert not np.allclose(one, other)
    np.testing.assert_allclose(softmax(both.logits(case).numpy()), (one + other) / 2, atol=1e-6)


def test_no_member_is_tested_on_what_another_was_trained_on(members, tmp_path):
    one, other = own_members(members[:2], tmp_path)
    split = load_run(one).split
    lost, kept = split.test[:2], split.test[2:]  # of one patient each
    assert kept
    text = (other / "split.txt").read_text()
    learned = text
    for name in lost:
        learned = learned.replace(f"test {name}\n", f"train {name}\n")
    (other / "split.txt").write_text(learned)
    ensemble = load_ensemble([one, other])
    assert [case.name for case in ensemble.cases("test")] == list(kept)
    assert ensemble.split.train == split.train
    told = (
        f"Left out, for they are not test cases of every member; members were trained on 2 of them: {', '.join(lost)}."
    )
    assert told in ensemble.split.note
    done = run_cli("predict", one, other, "--evaluate", "--out", tmp_path / "out")
    assert done.exit_code == 0
    assert told in done.stderr
    (other / "split.txt").write_text(text.replace("\ntest ", "\ntrain "))
    with pytest.raises(ConfigError, match=r"must share test cases; .* have none in common\. Left out"):
        load_ensemble([one, other]).cases("test")


def test_members_that_do_not_belong_together_are_refused(members, tmp_path):
    folder = tmp_path / "other"
    folder.mkdir()
    other = tiny.untrained_run(folder)
    with pytest.raises(ConfigError, match=r"must have the same channels, .* differ in classes: \('background', "):
        load_ensemble([members[0], other], with_data=False)
    with pytest.raises(ConfigError, match=r"members of an ensemble must differ; .* hold the same"):
        load_ensemble([members[0], members[0]])
    with pytest.raises(ConfigError, match="an ensemble must have members; got none"):
        load_ensemble([])
    with pytest.raises(ConfigError, match="mean must be one of 'probabilities', 'logits'; got 'votes'"):
        load_ensemble(members, mean="votes")
    data = Path(load_run(members[0]).config.data.root)
    moved = Path(shutil.copytree(data, tmp_path / "moved" / data.name))
    (copy,) = own_members(members[1:2], tmp_path)
    (copy / "config.toml").write_text((copy / "config.toml").read_text().replace(str(data), str(moved)))
    with pytest.raises(ConfigError, match=r"must have the same data; .* say where they lie: --data FOLDER"):
        load_ensemble([members[0], copy])
    assert len(load_ensemble([members[0], copy], root=data).members) == 2
    refused = run_cli("predict", members[0], "--mean", "logits", "--out", tmp_path / "out")
    assert refused.exit_code == 2
    assert "--mean must be used with several runs or --flips" in refused.stderr


def test_results_of_another_ensemble_are_not_taken_for_this_ones(members, tmp_path, monkeypatch):
    looked = []
    own = runs.Run.uncalibrated

    def counted(self, *arguments):
        looked.append(self.folder.name)
        return own(self, *arguments)

    monkeypatch.setattr(runs.Run, "uncalibrated", counted)

    class StopError(Exception):
        pass

    def stop(done: int, total: int) -> None:
        raise StopError

    def looks(*given, **options) -> int:
        looked.clear()
        evaluate_run(load_ensemble(*given, **options), tmp_path / "out")
        return len(looked)

    cases = len(load_ensemble(members).cases("test"))
    assert cases > 1
    with pytest.raises(StopError):
        evaluate_run(load_ensemble(members), tmp_path / "out", progress=stop)
    assert looks(members) == 3 * (cases - 1)  # one case was done
    assert looks(members) == 0
    assert looks(members[:2]) == 2 * cases
    assert looks(members[:2], mean="logits") == 2 * cases
    assert looks(members[:2], mean="logits", flips=True) == 2 * cases
    marks = {
        load_ensemble(members[:n], mean=mean, flips=flips).fingerprint
        for n, mean, flips in product((1, 2, 3), ("probabilities", "logits"), (False, True))
    }
    assert len(marks) == 12


def test_an_ensemble_goes_elsewhere_by_its_source(members, tmp_path):
    ensemble = load_ensemble(members, mean="logits", flips=True)

    def elsewhere(function, jobs):
        for i, arguments in enumerate(jobs):
            yield i, function(*arguments)

    there = evaluate_run(ensemble, tmp_path / "there", executor=elsewhere)
    here = evaluate_run(ensemble, tmp_path / "here")
    assert there.failures == here.failures == []
    assert torch.equal(there.evaluation.statistics.confidence_sum, here.evaluation.statistics.confidence_sum)
    told = here.evaluation.provenance["run"]
    assert [told["mean"], told["flips"], len(told["members"])] == ["logits", True, 3]


def test_images_without_data_are_predicted(members, tmp_path):
    case = load_run(members[0]).cases("test")[0]
    (tmp_path / "images").mkdir()
    shutil.copy(case.images[0], tmp_path / "images" / "one.nii.gz")
    done = run_cli("predict", *members, "--flips", "--images", tmp_path / "images", "--out", tmp_path / "maps")
    assert done.exit_code == 0, done.output
    (expected,), _ = predict(load_ensemble(members, flips=True), tmp_path / "expected", cases=[case])
    found = nibabel.load(tmp_path / "maps" / "one.nii.gz").get_fdata()
    np.testing.assert_array_equal(found, nibabel.load(expected).get_fdata())
