"""Predictions of a trained run: on the exact grid of the image, the same numbers with and without a file between."""

from __future__ import annotations

import csv
import shutil
from dataclasses import replace
from pathlib import Path

import layouts
import nibabel
import numpy as np
import pytest
import tiny
import torch
from typer.testing import CliRunner

from segcal._io.files import locked
from segcal.calibrators import Temperature, load_calibrator
from segcal.cli import app
from segcal.errors import ConfigError, FileError
from segcal.quality.applying import apply_quality
from segcal.quality.fitting import fit_quality
from segcal.training import runs, train
from segcal.training.checkpoint import load_checkpoint
from segcal.training.runs import evaluate_run, image_cases, load_run, predict

METRICS = ("dice", "ace", "ece", "mce", "brier", "nll")
pytestmark = pytest.mark.usefixtures("one_thread")


def turn_headers(root: Path) -> None:
    """Store every file as scanners do: oblique, flipped, moved; the voxel sizes stay."""
    oblique = nibabel.eulerangles.euler2mat(0.1, -0.05, 0.2) @ np.diag([-1, -1, 1])
    for path in root.rglob("*.nii.gz"):
        image = nibabel.load(path)
        affine = np.eye(4)
        affine[:3, :3] = oblique @ np.diag(image.header.get_zooms()[:3])
        affine[:3, 3] = -31.5, 12.25, 80
        turned = nibabel.Nifti1Image(np.asanyarray(image.dataobj), None, image.header)
        turned.set_sform(affine, code=1)
        turned.set_qform(affine, code=1)
        turned.header.set_xyzt_units("mm", "sec")
        nibabel.save(turned, path)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """ACDC: one channel, exclusive classes, resampled for the network, stored oblique."""
    folder = tmp_path_factory.mktemp("acdc")
    root = layouts.write_acdc(folder / "data")
    turn_headers(root)
    train(tiny.tiny_config("acdc", root, epochs=3), folder / "run")
    return folder / "run"


@pytest.fixture(scope="module")
def brats(tmp_path_factory):
    """Four channels, a file each; regions."""
    folder = tmp_path_factory.mktemp("brats")
    root = layouts.write_brats(folder / "data")
    train(tiny.tiny_config("brats", root, patch=(12, 8, 4)), folder / "run")
    return folder / "run"


@pytest.fixture(scope="module")
def run(trained):
    return load_run(trained)


@pytest.fixture(scope="module")
def outcome(run, tmp_path_factory):
    return evaluate_run(run, tmp_path_factory.mktemp("evaluation"))


def labels_of(run, side, folder: Path) -> Path:
    folder.mkdir()
    for case in run.cases(side):
        shutil.copy(case.label, folder / f"{case.name}.nii.gz")
    return folder


def table(folder: Path) -> dict[tuple[str, str, str], float]:
    with (folder / "cases.csv").open(encoding="utf-8") as file:
        return {(row["case"], row["class"], row["metric"]): float(row["value"]) for row in csv.DictReader(file)}


def run_cli(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def counting(monkeypatch) -> list[str]:
    """Names of the cases that go through the network from now on."""
    seen: list[str] = []
    logits = runs.Run.logits

    def counted(self, case, calibrator=None):
        seen.append(case.name)
        return logits(self, case, calibrator)

    monkeypatch.setattr(runs.Run, "logits", counted)
    return seen


@pytest.mark.parametrize(("dtype", "stored"), [("float32", np.float32), ("float16", np.uint16), ("uint8", np.uint8)])
def test_a_map_lies_on_the_exact_grid_of_its_image(run, tmp_path, dtype, stored):
    paths, failures = predict(run, tmp_path, dtype=dtype)
    assert failures == []
    assert [path.name for path in paths] == [f"{case.name}.nii.gz" for case in run.cases("test")]
    for case, path in zip(run.cases("test"), paths, strict=True):
        image, found = nibabel.load(case.images[0]), nibabel.load(path)
        assert found.shape == (*image.shape, 4)
        np.testing.assert_array_equal(found.affine, image.affine)
        assert found.header.get_zooms()[:3] == image.header.get_zooms()
        assert found.header.get_xyzt_units() == image.header.get_xyzt_units()
        for form in ("qform", "sform"):
            there, here = (getattr(each, f"get_{form}")(coded=True) for each in (image, found))
            np.testing.assert_allclose(there[0], here[0], atol=1e-6)
            assert there[1] == here[1]
        values = found.get_fdata()
        assert 0 <= values.min() <= values.max() <= 1 + 1e-6
        np.testing.assert_allclose(values.sum(3), 1, atol=1e-4)
        assert found.get_data_dtype() == stored


@pytest.mark.parametrize("codes", [(0, 1), (1, 0), (0, 0), (2, 1)])
def test_headers_of_every_code_and_of_two_voxel_sizes_are_kept(run, tmp_path, codes):
    """An affine of 1 mm beside voxel sizes of 1.5 mm, as ACDC has it."""
    image = nibabel.Nifti1Image(np.random.default_rng(0).normal(100, 9, layouts.SIZE).astype(np.float32), None)
    affine = np.array([[0, -1, 0, 5], [1, 0, 0, -7], [0, 0, 1, 3], [0, 0, 0, 1.0]])
    image.set_qform(affine, code=codes[0])
    image.set_sform(affine, code=codes[1])
    image.header.set_zooms(layouts.SPACING_MM)
    image.header["qform_code"], image.header["sform_code"] = codes
    raw = nibabel.Nifti1Image(image.get_fdata(dtype=np.float32), image.header.get_best_affine(), image.header)
    (tmp_path / "images").mkdir()
    nibabel.save(raw, tmp_path / "images" / "a.nii.gz")
    source = nibabel.load(tmp_path / "images" / "a.nii.gz")
    paths, failures = predict(run, tmp_path / "out", cases=image_cases(tmp_path / "images", 1))
    assert failures == []
    found = nibabel.load(paths[0])
    np.testing.assert_allclose(found.affine, source.affine, atol=1e-6)
    assert found.header.get_zooms()[:3] == source.header.get_zooms()
    assert [int(found.header[f"{form}_code"]) for form in ("qform", "sform")] == [
        int(source.header[f"{form}_code"]) for form in ("qform", "sform")
    ]


def check_same_numbers(out: Path, expected, *, tolerance: float, metrics=METRICS) -> None:
    found = table(out)
    shown = expected.foreground()
    values = shown.case_metrics()
    for i, case in enumerate(shown.cases):
        for j, name in enumerate(shown.classes):
            for metric in metrics:
                assert found[case, name, metric] == pytest.approx(
                    values[metric][i, j].item(), abs=tolerance, nan_ok=True
                ), (case, name, metric)


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-6), ("float16", 1e-3), ("uint8", 5e-3)])
def test_evaluate_reads_the_maps_and_finds_the_numbers_of_the_run(run, outcome, tmp_path, dtype, tolerance):
    predict(run, tmp_path / "maps", dtype=dtype)
    labels = labels_of(run, "test", tmp_path / "labels")
    done = run_cli("evaluate", tmp_path / "maps", labels, "--out", tmp_path / "out")
    assert done.exit_code == 0, done.output
    # One voxel that changes its bin moves ACE and MCE by more than the rounding did.
    rounded = {"float16": ("dice", "ece", "brier", "nll"), "uint8": ("dice", "brier", "nll")}
    metrics = rounded.get(dtype, METRICS)
    check_same_numbers(tmp_path / "out", outcome.evaluation, tolerance=tolerance, metrics=metrics)


def test_what_was_learned_from_an_evaluation_of_a_run_reads_the_maps_of_the_run(run, tmp_path):
    outcome = evaluate_run(run, tmp_path / "evaluation", side="all")
    quality = fit_quality(outcome.evaluation, level=0.5)
    predict(run, tmp_path / "maps", side="all")
    queue = apply_quality(quality, tmp_path / "maps", tmp_path / "queue")
    assert queue.failures == ()
    assert {row.case for row in queue.rows} == set(outcome.evaluation.cases)


def test_regions_of_maps_and_of_the_run_agree(brats, tmp_path):
    run = load_run(brats)
    paths, _ = predict(run, tmp_path / "maps", side="all")
    assert len(paths) == 4
    outcome = evaluate_run(run, tmp_path / "direct", side="all")
    labels = labels_of(run, "all", tmp_path / "labels")
    for name, option in (("told", ("--regions", "brats")), ("found", ())):
        done = run_cli("evaluate", tmp_path / "maps", labels, *option, "--out", tmp_path / name)
        assert done.exit_code == 0, done.output
        check_same_numbers(tmp_path / name, outcome.evaluation, tolerance=1e-6)
    assert run_cli("compare", tmp_path / "direct", tmp_path / "found", "--out", tmp_path / "both").exit_code == 0


def test_logits_of_a_run_with_regions_can_be_calibrated(brats, tmp_path):
    """With the temperature that their probabilities have, up to the rounding of these."""
    run = load_run(brats)
    labels = labels_of(run, "all", tmp_path / "labels")
    temperatures = []
    for content in ("logits", "probabilities"):
        predict(run, tmp_path / content, side="all", content=content)
        options = ("--logits",) if content == "logits" else ()
        done = run_cli(
            "calibrate", "fit", tmp_path / content, labels, "--out", tmp_path / f"{content}.json",
            "--method", "temperature", "--folds", 2, *options,
        )  # fmt: skip
        assert done.exit_code == 0, done.output
        temperatures.append(load_calibrator(tmp_path / f"{content}.json").temperature)
    assert temperatures[0] == pytest.approx(temperatures[1], rel=1e-3)


def test_label_values_that_are_not_in_order_are_told_beside_the_maps(tmp_path):
    """Values 0, 1, 3 of an nnU-Net dataset are channels 0, 1, 2."""
    root = layouts.write_nnunet(tmp_path / "data", labels={"background": 0, "liver": 1, "lesion": 3})
    for path in (root / "labelsTr").iterdir():
        image = nibabel.load(path)
        labels = np.asanyarray(image.dataobj)
        nibabel.save(nibabel.Nifti1Image(np.where(labels == 2, 0, labels), image.affine), path)
    train(tiny.tiny_config("nnunet", root, epochs=2), tmp_path / "run")
    run = load_run(tmp_path / "run")
    direct = evaluate_run(run, tmp_path / "direct", side="validation")
    predict(run, tmp_path / "maps", side="validation")
    labels = labels_of(run, "validation", tmp_path / "labels")
    done = run_cli("evaluate", tmp_path / "maps", labels, "--out", tmp_path / "out")
    assert done.exit_code == 0, done.output
    check_same_numbers(tmp_path / "out", direct.evaluation, tolerance=1e-6)
    assert direct.evaluation.classes == ("background", "liver", "lesion")


def test_maps_that_are_calibrated_keep_the_names_of_their_classes(run, tmp_path):
    predict(run, tmp_path / "maps")
    Temperature(2.0).save(tmp_path / "c.json")
    assert (
        run_cli("calibrate", "apply", tmp_path / "c.json", tmp_path / "maps", "--out", tmp_path / "new").exit_code == 0
    )
    labels = labels_of(run, "test", tmp_path / "labels")
    assert run_cli("evaluate", tmp_path / "new", labels, "--out", tmp_path / "out").exit_code == 0
    assert {name for _, name, _ in table(tmp_path / "out")} == {*run.dataset.classes[1:], ""}


def test_images_are_never_written_over(trained, tmp_path):
    case = load_run(trained).cases("test")[0]
    (tmp_path / "images").mkdir()
    image = shutil.copy(case.images[0], tmp_path / "images" / "new.nii.gz")
    before = Path(image).read_bytes()
    done = run_cli("predict", trained, "--images", tmp_path / "images", "--out", tmp_path / "images")
    assert done.exit_code == 2
    assert "--out must be another folder than that of the images" in " ".join(done.output.split())
    assert Path(image).read_bytes() == before


def test_regions_are_known_where_the_data_are_gone(brats):
    assert load_run(brats, with_data=False).dataset.regions == load_run(brats).dataset.regions


def test_probabilities_stored_in_16_bits_reach_1_and_no_further(run, tmp_path):
    (case, *_) = run.cases("test")
    certain = torch.zeros(4, *layouts.SIZE)
    certain[2] = 1
    runs._write_map(tmp_path / "a.nii.gz", certain, case, "float16")
    done = run_cli("evaluate", tmp_path / "a.nii.gz", case.label, "--out", tmp_path / "out")
    assert done.exit_code == 0, done.output
    (found,) = (
        value for (_, name, metric), value in table(tmp_path / "out").items() if (name, metric) == ("class 2", "mce")
    )
    assert found <= 1


def test_started_again_nothing_is_predicted_again(run, tmp_path, monkeypatch):
    predict(run, tmp_path)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.glob("*.nii.gz")}
    seen = counting(monkeypatch)
    paths, _ = predict(load_run(run.folder), tmp_path)
    assert seen == []
    assert {path: path.stat().st_mtime_ns for path in paths} == before


def test_a_stopped_prediction_goes_on_with_the_cases_that_are_left(run, tmp_path, monkeypatch):
    class KilledError(Exception):
        pass

    def stop(done: int, total: int) -> None:
        if done == 1:
            raise KilledError

    with pytest.raises(KilledError):
        predict(run, tmp_path, progress=stop)
    seen = counting(monkeypatch)
    predict(run, tmp_path)
    assert seen == [run.cases("test")[1].name]


def test_a_map_that_is_gone_and_a_broken_ledger_are_made_again(run, tmp_path, monkeypatch):
    paths, _ = predict(run, tmp_path)
    paths[0].unlink()
    seen = counting(monkeypatch)
    predict(run, tmp_path)
    assert seen == [run.cases("test")[0].name]
    for text in ("{", "[3]"):
        seen.clear()
        (tmp_path / "predictions.json").write_text(text)
        predict(run, tmp_path)
        assert len(seen) == 2


def test_other_weights_settings_or_calibrators_are_predicted_anew(run, trained, tmp_path, monkeypatch):
    predict(run, tmp_path / "out")
    seen = counting(monkeypatch)
    shutil.copytree(trained, tmp_path / "run")
    content = load_checkpoint(trained / "best.pt")
    for values in content["network"].values():
        values += 1
    torch.save(content, tmp_path / "run" / "best.pt")
    predict(load_run(tmp_path / "run"), tmp_path / "out")
    predict(run, tmp_path / "out")
    predict(run, tmp_path / "out", dtype="float16")
    predict(run, tmp_path / "out", calibrator=Temperature(2.0))
    predict(run, tmp_path / "out", content="logits")
    assert len(seen) == 5 * 2


def test_logits_are_those_whose_softmax_is_the_probabilities(run, tmp_path):
    (probabilities, *_), _ = predict(run, tmp_path / "probabilities")
    (logits, *_), _ = predict(run, tmp_path / "logits", content="logits")
    values = torch.from_numpy(nibabel.load(logits).get_fdata())
    np.testing.assert_allclose(values.softmax(3), nibabel.load(probabilities).get_fdata(), atol=1e-6)
    with pytest.raises(ConfigError, match="logits must be written as float32"):
        predict(run, tmp_path / "half", content="logits", dtype="float16")
    with pytest.raises(ConfigError, match="content must be one of"):
        predict(run, tmp_path / "other", content="labels")


def test_a_calibrator_divides_the_logits_in_maps_and_in_evaluations(run, outcome, tmp_path):
    half = Temperature(2.0)
    (plain, *_), _ = predict(run, tmp_path / "logits", content="logits")
    (scaled, *_), _ = predict(run, tmp_path / "scaled", calibrator=half)
    expected = (torch.from_numpy(nibabel.load(plain).get_fdata()) / 2).softmax(3)
    np.testing.assert_allclose(nibabel.load(scaled).get_fdata(), expected, atol=1e-6)
    found = evaluate_run(run, tmp_path / "evaluation", calibrator=half).evaluation
    before, after = outcome.evaluation.case_metrics(), found.case_metrics()
    assert torch.equal(before["dice"], after["dice"])  # no voxel changes its class
    assert not torch.allclose(before["ece"], after["ece"])
    assert half.fingerprint in found.provenance["run"]["calibrator"]


def test_a_temperature_fitted_on_validation_cases_lowers_their_log_loss(run, tmp_path):
    fitted = Temperature().fit(list(run.logits_and_labels("validation")))
    before, after = fitted.report.before, fitted.report.after
    assert after <= before
    plain, scaled = (
        evaluate_run(run, tmp_path / str(i), side="validation", calibrator=calibrator).evaluation
        for i, calibrator in enumerate((None, fitted))
    )
    for evaluation, expected in ((plain, before), (scaled, after)):
        total = evaluation.joint.log_loss.sum() / evaluation.joint.voxels.sum()
        assert total.item() == pytest.approx(expected, rel=1e-4)


def test_an_evaluation_goes_on_where_it_stopped(run, outcome, tmp_path, monkeypatch):
    class KilledError(Exception):
        pass

    def stop(done: int, total: int) -> None:
        if done == 1:
            raise KilledError

    with pytest.raises(KilledError):
        evaluate_run(run, tmp_path, progress=stop)
    assert not (tmp_path / "evaluation.npz").exists()
    seen = counting(monkeypatch)
    again = evaluate_run(run, tmp_path)
    assert seen == [run.cases("test")[1].name]
    for metric, values in outcome.evaluation.case_metrics().items():
        torch.testing.assert_close(again.evaluation.case_metrics()[metric], values, rtol=0, atol=0, equal_nan=True)
    assert evaluate_run(run, tmp_path).evaluation.cases == outcome.evaluation.cases
    assert len(seen) == 1


def own_data(trained, folder: Path):
    """The run with a copy of its data that may be broken."""
    data = load_run(trained).dataset.root.parent
    shutil.copytree(data, folder / "data")
    return load_run(trained, root=folder / "data")


@pytest.mark.parametrize("broken", ["image", "label"])
def test_a_case_that_fails_does_not_stop_the_others(trained, tmp_path, broken):
    run = own_data(trained, tmp_path)
    bad, good = run.cases("test")
    path = bad.images[0] if broken == "image" else bad.label
    path.write_bytes(b"broken")
    outcome = evaluate_run(run, tmp_path / "evaluation")
    assert [(failure.case, failure.kind) for failure in outcome.failures] == [(bad.name, "FileError")]
    assert outcome.evaluation.cases == (good.name,)
    assert bad.name in (tmp_path / "evaluation" / "failures.csv").read_text()
    paths, failures = predict(run, tmp_path / "maps")
    if broken == "image":
        assert [path.name for path in paths] == [f"{good.name}.nii.gz"]
        assert [failure.case for failure in failures] == [bad.name]


def test_the_command_reports_failures_with_code_1(trained, tmp_path):
    run = own_data(trained, tmp_path)
    bad, _ = run.cases("test")
    bad.images[0].write_bytes(b"broken")
    done = run_cli("predict", trained, "--data", tmp_path / "data", "--out", tmp_path / "maps")
    assert done.exit_code == 1
    assert f"{bad.name}: FileError: {bad.name}: {bad.images[0].name} must be" in done.stderr
    assert f"1 map: {tmp_path / 'maps'}; 1 case failed" in done.stderr
    done = run_cli("predict", trained, "--data", tmp_path / "data", "--evaluate", "--out", tmp_path / "evaluation")
    assert done.exit_code == 1
    assert "1 case evaluated, 1 failed" in done.stderr


def test_labels_on_another_grid_than_the_image_fail_by_name(trained, tmp_path):
    run = own_data(trained, tmp_path)
    case, _ = run.cases("test")
    label = nibabel.load(case.label)
    nibabel.save(nibabel.Nifti1Image(np.asanyarray(label.dataobj)[1:], label.affine), case.label)
    (failure,) = evaluate_run(run, tmp_path / "evaluation").failures
    assert (failure.case, failure.kind) == (case.name, "GridError")
    assert "must lie on one grid" in failure.message


def test_a_changed_label_is_measured_again(trained, tmp_path, monkeypatch):
    run = own_data(trained, tmp_path)
    before = evaluate_run(run, tmp_path / "evaluation").evaluation
    case, _ = run.cases("test")
    label = nibabel.load(case.label)
    changed = np.roll(np.asanyarray(label.dataobj), 2, axis=1)
    nibabel.save(nibabel.Nifti1Image(changed, label.affine, label.header), case.label)
    seen = counting(monkeypatch)
    after = evaluate_run(run, tmp_path / "evaluation").evaluation
    assert seen == [case.name]
    assert not torch.equal(before.statistics.label_sum[0], after.statistics.label_sum[0])
    assert torch.equal(before.statistics.label_sum[1], after.statistics.label_sum[1])
    assert len(list((tmp_path / "evaluation" / ".parts").glob("*.npz"))) == 2  # the old one is gone


def test_the_command_predicts_and_evaluates(trained, tmp_path):
    done = run_cli("predict", trained, "--split", "validation", "--out", tmp_path / "maps")
    assert done.exit_code == 0, done.output
    assert f"2 maps: {tmp_path / 'maps'}" in done.stderr
    Temperature(1.5).save(tmp_path / "t.json")
    done = run_cli("predict", trained, "--evaluate", "--calibrator", tmp_path / "t.json", "--out", tmp_path / "results")
    assert done.exit_code == 0, done.output
    assert "2 cases evaluated, 0 failed" in done.stderr
    assert {"cases.csv", "summary.csv", "summary.json", "evaluation.npz"} <= {
        path.name for path in (tmp_path / "results").iterdir()
    }


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--evaluate", "--logits"], "--evaluate must not be used with"),
        (["--evaluate", "--images", "."], "--evaluate must not be used with"),
        (["--evaluate", "--dtype", "float16"], "--evaluate must not be used with"),
        (["--images", ".", "--split", "test"], "--images must not be used with"),
        (["--calibrator", "none.json"], "none.json must be a calibrator"),
        (["--logits", "--dtype", "float16"], "logits must be written as float32"),
        (["--images", "nowhere"], "nowhere must hold images"),
        (["--data", "nowhere"], "nowhere must have the layout"),
    ],
)
def test_a_command_that_cannot_be_followed_ends_with_a_sentence_and_code_2(trained, tmp_path, arguments, message):
    done = run_cli("predict", trained, "--out", tmp_path / "out", *arguments)
    assert done.exit_code == 2
    assert message in done.stderr
    assert "Traceback" not in done.output


def test_a_folder_that_is_no_run_or_not_trained_yet_is_refused(trained, tmp_path):
    with pytest.raises(FileError, match=r"must be the folder of a run; it has no config\.toml"):
        load_run(tmp_path)
    shutil.copy(trained / "config.toml", tmp_path)
    with pytest.raises(FileError, match=r"it has no best\.pt yet\. Train it first"):
        load_run(tmp_path)


def test_weights_of_another_network_are_refused(trained, tmp_path):
    shutil.copytree(trained, tmp_path / "run")
    path = tmp_path / "run" / "config.toml"
    path.write_text(path.read_text().replace("init_filters = 4", "init_filters = 8"))
    with pytest.raises(FileError, match=r"best\.pt must fit the network of config\.toml"):
        load_run(tmp_path / "run")


def test_a_side_without_cases_is_refused(run):
    empty = replace(run, split=replace(run.split, test=()))
    with pytest.raises(ConfigError, match=r"split\.txt must have test cases; it has none"):
        empty.cases("test")


def test_two_predictions_into_one_folder_are_refused(run, tmp_path):
    with locked(tmp_path / ".lock", tmp_path), pytest.raises(ConfigError, match="another process"):
        predict(run, tmp_path)


def touch(folder: Path, *names: str) -> Path:
    folder.mkdir(exist_ok=True)
    for name in names:
        (folder / name).touch()
    return folder


@pytest.mark.parametrize(
    ("channels", "files", "cases"),
    [
        (1, ["a.nii.gz", "b.nii"], {"a": 1, "b": 1}),
        (1, ["amos_0001.nii.gz", "amos_0002.nii.gz"], {"amos_0001": 1, "amos_0002": 1}),
        (1, ["amos_0007.nii.gz"], {"amos_0007": 1}),
        (1, ["a_0000.nii.gz", "b_0000.nii.gz"], {"a": 1, "b": 1}),  # nnU-Net
        (2, ["a_0000.nii.gz", "a_0001.nii.gz", "b_0000.nii.gz", "b_0001.nii.gz"], {"a": 2, "b": 2}),
        (2, ["a.nii.gz", "scan_0007.nii.gz"], {"a": 1, "scan_0007": 1}),  # all channels in one file
        (1, ["a.nii.gz", "._a.nii.gz", ".hidden.nii.gz", "notes.txt"], {"a": 1}),
    ],
)
def test_images_in_a_folder_are_cases_by_their_names(tmp_path, channels, files, cases):
    found = image_cases(touch(tmp_path / "images", *files), channels)
    assert {case.name: len(case.images) for case in found} == cases


def test_an_image_of_two_axes_fails_by_itself_and_a_slice_of_three_does_not(trained, tmp_path):
    images, out = tmp_path / "images", tmp_path / "out"
    images.mkdir()
    values = np.random.default_rng(0).normal(100, 20, (24, 20)).astype(np.float32)
    for name, array in {"a": values[..., None].repeat(4, 2), "flat": values, "slice": values[..., None]}.items():
        nibabel.save(nibabel.Nifti1Image(array, np.eye(4)), images / f"{name}.nii.gz")
    done = CliRunner().invoke(app, ["predict", str(trained), "--images", str(images), "--out", str(out)])
    assert done.exit_code == 1, done.output
    assert "flat: GridError: flat: the image must have three axes; flat.nii.gz has 2." in done.stderr
    assert "2 maps" in done.stderr
    assert nibabel.load(out / "a.nii.gz").shape == (24, 20, 4, 4)
    assert nibabel.load(out / "slice.nii.gz").shape == (24, 20, 1, 4)


def test_images_that_lack_a_channel_are_refused(tmp_path):
    folder = touch(tmp_path / "images", "a_0000.nii.gz", "a_0001.nii.gz", "b_0001.nii.gz")
    with pytest.raises(FileError, match="b must have 2 files, one for each channel; it has b_0001"):
        image_cases(folder, 2)
    with pytest.raises(FileError, match=r"must hold images, as NAME\.nii\.gz; it holds none"):
        image_cases(touch(tmp_path / "empty"), 2)


@pytest.mark.parametrize("stored", ["several files", "one file"])
def test_a_folder_of_images_with_several_channels_is_predicted(brats, tmp_path, stored):
    run = load_run(brats)
    (case,) = run.cases("test")
    images = tmp_path / "images"
    images.mkdir()
    if stored == "one file":
        volumes = [nibabel.load(path) for path in case.images]
        array = np.stack([np.asanyarray(volume.dataobj) for volume in volumes], axis=3)
        nibabel.save(nibabel.Nifti1Image(array, volumes[0].affine), images / "new.nii.gz")
    else:
        for number, path in enumerate(case.images):
            shutil.copy(path, images / f"new_{number:04d}.nii.gz")
    done = run_cli("predict", brats, "--images", images, "--out", tmp_path / "out")
    assert done.exit_code == 0, done.output
    (expected,), _ = predict(run, tmp_path / "expected")
    found = nibabel.load(tmp_path / "out" / "new.nii.gz")
    assert found.shape == (*layouts.SIZE, 4)
    np.testing.assert_array_equal(found.get_fdata(), nibabel.load(expected).get_fdata())


def test_a_run_predicts_images_where_its_own_data_are_gone(trained, tmp_path):
    case = load_run(trained).cases("test")[0]
    (tmp_path / "images").mkdir()
    shutil.copy(case.images[0], tmp_path / "images" / "new.nii.gz")
    (expected, *_), _ = predict(load_run(trained), tmp_path / "expected", cases=[case])
    moved = tmp_path / "run"
    shutil.copytree(trained, moved)
    config = (moved / "config.toml").read_text()
    (moved / "config.toml").write_text(config.replace(str(load_run(trained).config.data.root), "/gone"))
    done = run_cli("predict", moved, "--images", tmp_path / "images", "--out", tmp_path / "out")
    assert done.exit_code == 0, done.output
    found = nibabel.load(tmp_path / "out" / "new.nii.gz").get_fdata()
    np.testing.assert_array_equal(found, nibabel.load(expected).get_fdata())
    assert run_cli("predict", moved, "--out", tmp_path / "own").exit_code == 2  # its own cases are not there
