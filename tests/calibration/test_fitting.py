"""`segcal calibrate` on folders of real files: cross-validation that never sees what it measures, maps written back."""

import json
import math

import nibabel
import numpy as np
import pytest
import torch
from scipy.special import expit, log_softmax, softmax
from typer.testing import CliRunner

from segcal import ConfigError, ReadOptions, evaluate
from segcal.calibration import cross_fitting
from segcal.calibration.applying import apply_calibrator
from segcal.calibration.effect import reliability_before_and_after
from segcal.calibration.fitting import fit_calibrator
from segcal.calibration.folds import make_folds
from segcal.calibrators import CALIBRATORS, Temperature, VectorScaling, load_calibrator
from segcal.cli import app
from segcal.errors import LabelError, SegcalError
from segcal.evaluation import cohort
from segcal.evaluation.calibrated import LEAST, turn, turn_back
from segcal.evaluation.naming import BESIDE_MAPS, write_own
from segcal.volumes.orientation import orientation_of
from segcal.volumes.regions import read_regions

SHAPE = (10, 9, 8)
AFFINE = np.array([[-1.0, 0, 0, 3], [0, 0, 2.0, -4], [0, 1.5, 0, 5], [0, 0, 0, 1]])  # axes flipped and exchanged


def draw(seed, *, classes=3, factor=2.5):
    """Logits that are too large by a factor, and labels drawn from the probabilities that are right."""
    generator = np.random.default_rng(seed)
    logits = 2 * generator.normal(size=(*SHAPE, classes))
    cumulated = softmax(logits, -1).cumsum(-1)
    labels = (generator.random((*SHAPE, 1)) > cumulated).sum(-1).clip(max=classes - 1).astype(np.uint8)
    return (factor * logits).astype(np.float32), labels


def save(path, array):
    path.parent.mkdir(exist_ok=True, parents=True)
    nibabel.save(nibabel.Nifti1Image(array, AFFINE), path)


@pytest.fixture
def folder(tmp_path):
    """Six cases of three classes: logits, probabilities and labels."""
    for i in range(6):
        logits, labels = draw(i)
        save(tmp_path / "logits" / f"case_{i}.nii.gz", logits)
        save(tmp_path / "probabilities" / f"case_{i}.nii.gz", softmax(logits, -1))
        save(tmp_path / "labels" / f"case_{i}.nii.gz", labels)
    return tmp_path


def fit(folder, *options, kind="probabilities", out="c.json", method="temperature"):
    arguments = ["calibrate", "fit", str(folder / kind), str(folder / "labels"), "--out", str(folder / out)]
    return CliRunner().invoke(app, [*arguments, "--method", method, *options])


def apply(folder, *options, kind="probabilities", out="maps"):
    arguments = ["calibrate", "apply", str(folder / "c.json"), str(folder / kind), "--out", str(folder / out), *options]
    return CliRunner().invoke(app, arguments)


def test_a_fit_without_a_check_leaves_no_diagram_of_another_calibrator(folder):
    assert fit(folder, "--folds", "2").exit_code == 0
    assert (folder / "c.png").exists()
    assert fit(folder, "--folds", "0").exit_code == 0
    assert not (folder / "c.png").exists()


def test_maps_of_another_calibrator_go_where_a_case_fails_now(folder):
    fit(folder, "--folds", "0")
    assert apply(folder).exit_code == 0
    fit(folder, "--folds", "0", method="vector")
    (folder / "probabilities" / "case_1.nii.gz").write_bytes(b"")
    done = apply(folder)
    assert done.exit_code == 1
    assert "5 maps: " in done.output
    assert "1 case failed" in " ".join(done.output.split())
    assert sorted(path.name for path in (folder / "maps").glob("*.nii.gz")) == [
        f"case_{i}.nii.gz" for i in (0, 2, 3, 4, 5)
    ]


def test_evaluations_of_a_fit_tell_which_cases_failed(folder):
    (folder / "probabilities" / "case_1.nii.gz").write_bytes(b"")
    fitted = fit_calibrator(
        folder / "probabilities", folder / "labels", folder / "c.json", method="temperature", folds=2
    )
    for evaluation in (fitted.before, fitted.after):
        assert [failure["case"] for failure in evaluation.provenance["failures"]] == ["case_1"]


def test_fit_finds_the_temperature_of_the_files_and_says_what_it_took(folder):
    done = fit(folder)
    assert done.exit_code == 0, done.output
    assert load_calibrator(folder / "c.json").temperature == pytest.approx(2.5, rel=0.05)
    assert "probabilities (logarithm, clipped at 1e-07)" in done.output
    assert "6 held-out cases, 5 folds" in done.output
    assert "no decision changed" in done.output
    assert (folder / "c.png").stat().st_size > 10_000


def test_logits_and_their_probabilities_give_the_same_temperature(folder):
    fit(folder, "--folds", "0", out="p.json")
    fit(folder, "--folds", "0", "--logits", kind="logits", out="l.json")
    found = [load_calibrator(folder / name).temperature for name in ("p.json", "l.json")]
    assert found[0] == pytest.approx(found[1], rel=5e-3)  # but for the clipping


def test_each_case_is_measured_with_a_calibrator_that_never_saw_its_patient(folder):
    """Recomputed by hand: leave one out, fit, measure."""
    fitted = fit_calibrator(
        folder / "probabilities", folder / "labels", folder / "c.json", method="temperature", folds=6
    )
    names = fitted.before.cases
    for i, name in enumerate(names):
        others = [j for j in range(6) if names[j] != name]
        cases = []
        for j in others:
            logits, labels = draw(j)
            logs = np.log(softmax(logits, -1).clip(LEAST))
            cases.append((torch.from_numpy(np.moveaxis(logs, -1, 0)), torch.from_numpy(labels)))
        temperature = Temperature().fit(cases).temperature
        logits, labels = draw(i)
        logs = np.log(softmax(logits, -1).clip(LEAST)) / temperature
        expected = -np.take_along_axis(log_softmax(logs, -1), labels[..., None].astype(int), -1).mean()
        assert fitted.after.joint_scores()["nll"][i].item() == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("method", ["local-temperature", "vector", "isotonic"])
def test_progress_moves_within_a_fit(folder, method):
    told = []
    settings = {"steps": 20} if method == "local-temperature" else {}
    fit_calibrator(
        folder / "probabilities", folder / "labels", folder / "c.json", method=method, folds=2, settings=settings,
        progress=lambda done, total, text: told.append((done, total, text)),
    )  # fmt: skip
    done = [step for step, _, _ in told]
    assert done == sorted(done)
    assert {total for _, total, _ in told} == {12 + 3 * 10}
    assert done[-1] == 42
    within = [step for step, _, text in told if text.startswith("fitting to all cases, ")]
    assert len(within) >= (25 if method == "local-temperature" else 6)
    assert max(within) > min(within) or method == "isotonic"


def test_frames_of_one_patient_are_held_out_together():
    names = [f"patient{i:03d}_frame{j:02d}" for i in range(7) for j in (1, 12)]
    groups = make_folds(names, None, 3, 0)
    assert sorted(name for group in groups for name in group) == names
    assert len(groups) == 3
    for group in groups:
        assert all((name.replace("frame01", "frame12") in group) for name in group)


def test_evaluating_through_a_calibrator_is_evaluating_the_maps_it_writes(folder):
    fit(folder, "--folds", "0")
    assert apply(folder).exit_code == 0
    through = evaluate(folder / "probabilities", folder / "labels", folder / "a", calibrator=folder / "c.json")
    written = evaluate(folder / "maps", folder / "labels", folder / "b")
    plain = evaluate(folder / "probabilities", folder / "labels", folder / "p")
    for metric in ("ace", "nll", "dice"):
        one, other, before = (
            outcome.evaluation.case_values()[None, metric].numpy() for outcome in (through, written, plain)
        )
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-7)
        if metric == "dice":
            np.testing.assert_array_equal(one, before)
        else:
            assert (one < before).all()


def test_maps_keep_format_grid_and_kind(folder):
    fit(folder, "--folds", "0")
    assert apply(folder).exit_code == 0
    source, made = (nibabel.load(folder / kind / "case_0.nii.gz") for kind in ("probabilities", "maps"))
    assert made.get_data_dtype() == source.get_data_dtype()
    np.testing.assert_array_equal(made.affine, source.affine)
    temperature = load_calibrator(folder / "c.json").temperature
    expected = softmax(np.log(source.get_fdata().clip(LEAST)) / temperature, -1)
    np.testing.assert_allclose(made.get_fdata(), expected, atol=1e-6)
    assert apply(folder, "--logits", kind="logits", out="l").exit_code == 0
    logits = nibabel.load(folder / "l" / "case_0.nii.gz").get_fdata()
    np.testing.assert_allclose(logits, nibabel.load(folder / "logits" / "case_0.nii.gz").get_fdata() / temperature)


def test_arrays_become_maps_in_nifti_beside_which_label_maps_lie(folder):
    """As of nnU-Net: .npz (class, z, y, x), and a label map that says where the voxels are."""
    for i in range(2):
        maps = nibabel.load(folder / "probabilities" / f"case_{i}.nii.gz").get_fdata().astype(np.float32)
        save(folder / "arrays" / f"case_{i}.nii.gz", maps.argmax(-1).astype(np.uint8))
        np.savez_compressed(folder / "arrays" / f"case_{i}.npz", probabilities=maps.transpose(3, 2, 1, 0))
    Temperature(2.0).save(folder / "c.json")
    assert apply(folder, "--nifti", kind="arrays").exit_code == 0
    assert apply(folder, out="images").exit_code == 0
    for i in range(2):
        made, expected = (nibabel.load(folder / kind / f"case_{i}.nii.gz") for kind in ("maps", "images"))
        np.testing.assert_allclose(made.get_fdata(), expected.get_fdata(), atol=1e-6)
        np.testing.assert_array_equal(made.affine, AFFINE)
    assert sorted(path.name for path in (folder / "maps").glob("case*")) == ["case_0.nii.gz", "case_1.nii.gz"]
    before = (folder / "maps" / "case_0.nii.gz").stat().st_mtime_ns
    assert apply(folder, "--nifti", kind="arrays").exit_code == 0
    assert (folder / "maps" / "case_0.nii.gz").stat().st_mtime_ns == before
    (folder / "arrays" / "case_1.nii.gz").unlink()
    done = apply(folder, "--nifti", kind="arrays", out="again")
    assert done.exit_code == 1
    assert "case_1: FileError: case_1: a NIfTI image needs a label map" in done.output


def test_maps_that_are_there_are_not_made_again_unless_something_changed(folder):
    fit(folder, "--folds", "0")
    apply(folder)
    path = folder / "maps" / "case_0.nii.gz"
    before = path.stat().st_mtime_ns
    apply(folder)
    assert path.stat().st_mtime_ns == before
    Temperature(1.7).save(folder / "c.json")
    apply(folder)
    assert path.stat().st_mtime_ns > before


def test_a_calibrator_moves_with_its_folder_and_a_changed_one_is_measured_anew(folder):
    Temperature(2.0).save(folder / "c.json")
    first = evaluate(folder / "probabilities", folder / "labels", folder / "e", calibrator=folder / "c.json")
    Temperature(3.0).save(folder / "c.json")
    second = evaluate(folder / "probabilities", folder / "labels", folder / "e", calibrator=folder / "c.json")
    assert not torch.equal(first.evaluation.scores.log_loss, second.evaluation.scores.log_loss)
    assert second.evaluation.provenance["options"]["calibrator_fingerprint"]


def test_several_workers_measure_the_same(folder):
    Temperature(2.0).save(folder / "c.json")
    one, two = (
        evaluate(folder / "probabilities", folder / "labels", folder / f"w{n}", calibrator=folder / "c.json", workers=n)
        for n in (1, 2)
    )
    assert torch.equal(one.evaluation.statistics.count, two.evaluation.statistics.count)


def test_overlapping_regions_are_calibrated_channel_by_channel(tmp_path):
    for i in range(4):
        generator = np.random.default_rng(i)
        logits = 2 * generator.normal(size=(*SHAPE, 3))
        labels = (generator.random((*SHAPE, 3)) < expit(logits)).astype(np.uint8)
        factors = np.array([1.5, 2.0, 3.0])
        save(tmp_path / "probabilities" / f"case_{i}.nii.gz", expit(factors * logits).astype(np.float32))
        save(tmp_path / "labels" / f"case_{i}.nii.gz", labels)
    done = fit(tmp_path, "--sigmoid", "--method", "class-temperature")
    assert done.exit_code == 0, done.output
    found = 1 / load_calibrator(tmp_path / "c.json").parameters.flatten()
    np.testing.assert_allclose(found, factors, rtol=0.1)
    assert apply(tmp_path).exit_code == 0
    with pytest.raises(ConfigError, match="is for classes that overlap; add --sigmoid"):
        evaluate(tmp_path / "maps", tmp_path / "labels", tmp_path / "o", calibrator=tmp_path / "c.json")
    done = evaluate(tmp_path / "maps", tmp_path / "labels", tmp_path / "out", options=ReadOptions(sigmoid=True))
    assert done.evaluation is not None
    assert not done.failures


def hide_voxels(folder, *, value, share=0.4):
    """Some voxels get a label to ignore; predictions there become sure and wrong, as nobody looked at them."""
    for i in range(6):
        logits, labels = draw(i)
        hidden = np.random.default_rng(100 + i).random(SHAPE) < share
        wrong = np.eye(3)[(labels + 1) % 3] * 0.97 + 0.01
        save(folder / "probabilities" / f"case_{i}.nii.gz", np.where(hidden[..., None], wrong, softmax(logits, -1)))
        save(folder / "labels" / f"case_{i}.nii.gz", np.where(hidden, value, labels).astype(np.uint8))


@pytest.mark.parametrize("method", ["temperature", "local-temperature", "isotonic"])
def test_voxels_with_an_ignored_label_are_left_out_of_fit_and_check(folder, method):
    """Found is what is found where those voxels are cut out of the files."""
    hide_voxels(folder, value=255)
    for i in range(6):
        keep = nibabel.load(folder / "labels" / f"case_{i}.nii.gz").get_fdata() != 255
        for kind in ("probabilities", "labels"):
            array = np.asarray(nibabel.load(folder / kind / f"case_{i}.nii.gz").dataobj)
            save(folder / f"cut_{kind}" / f"case_{i}.nii.gz", array[keep][:, None, None])
    options = {"method": method, "folds": 2, "settings": {"steps": 20} if method == "local-temperature" else {}}
    whole = fit_calibrator(
        folder / "probabilities", folder / "labels", folder / "c.json", options=ReadOptions(ignore_index=255), **options
    )
    cut = fit_calibrator(folder / "cut_probabilities", folder / "cut_labels", folder / "d.json", **options)
    assert whole.calibrator.report.voxels == cut.calibrator.report.voxels < 6 * math.prod(SHAPE)
    if method == "temperature":
        assert whole.calibrator.temperature == pytest.approx(cut.calibrator.temperature, rel=1e-6)
        assert whole.calibrator.temperature == pytest.approx(2.5, rel=0.07)
    assert torch.equal(whole.before.scores.voxels, cut.before.scores.voxels)
    torch.testing.assert_close(whole.after.scores.log_loss, cut.after.scores.log_loss, rtol=0.02, atol=0)


def test_the_ignored_label_is_an_option_and_known_from_nnunets_dataset_json(folder):
    hide_voxels(folder, value=3)
    said = fit(folder, "--folds", "0").output
    assert "labels must be among [0, 1, 2]; they hold [3]" in said
    assert fit(folder, "--folds", "0", "--ignore-index", "3").exit_code == 0
    told = load_calibrator(folder / "c.json").temperature
    labels = {"background": 0, "liver": 1, "tumour": 2, "ignore": 3}
    (folder / "dataset.json").write_text(json.dumps({"labels": labels}))  # beside the folder of labels
    assert fit(folder, "--folds", "0", out="d.json").exit_code == 0
    assert load_calibrator(folder / "d.json").temperature == told
    outcome = evaluate(folder / "probabilities", folder / "labels", folder / "e", calibrator=folder / "d.json")
    assert not outcome.failures
    assert outcome.evaluation.classes == ("background", "liver", "tumour")
    assert outcome.evaluation.provenance["options"]["ignore_index"] == 3


def test_regions_of_nnunets_dataset_json_are_calibrated_without_ignored_voxels(tmp_path):
    """Channels whole and core, label map 0, 1, 2, and 3 for voxels nobody looked at."""
    for i in range(4):
        generator = np.random.default_rng(i)
        logits = 2 * generator.normal(size=(*SHAPE, 2))
        whole, core = np.moveaxis(generator.random((*SHAPE, 2)) < expit(logits), -1, 0)
        labels = np.where(whole, 1 + core, 0)
        hidden = core & ~whole  # a core outside of the whole has no label
        save(tmp_path / "probabilities" / f"case_{i}.nii.gz", expit(2 * logits).astype(np.float32))
        save(tmp_path / "labels" / f"case_{i}.nii.gz", np.where(hidden, 3, labels).astype(np.uint8))
    content = {"labels": {"background": 0, "whole": [1, 2], "core": 2, "ignore": 3}, "regions_class_order": [1, 2]}
    described = tmp_path / "model" / "dataset.json"  # not where it would be found without being named
    described.parent.mkdir()
    described.write_text(json.dumps(content))
    done = fit(tmp_path, "--sigmoid", "--regions", str(described))
    assert done.exit_code == 0, done.output
    kept = sum(int((nibabel.load(path).get_fdata() != 3).sum()) for path in (tmp_path / "labels").iterdir())
    assert load_calibrator(tmp_path / "c.json").report.voxels == kept < 4 * math.prod(SHAPE)


def test_neighbors_that_are_left_out_are_no_neighbors(folder):
    hide_voxels(folder, value=3)
    done = fit(folder, "--ignore-index", "3", "--set", "dilations=[1]", method="local-temperature")
    assert done.exit_code == 2
    assert "voxels must not be left out, as those of label 3, where the calibrator looks at" in done.output


def test_brats_labels_find_their_channels(tmp_path):
    values = np.array([0, 1, 2, 4], np.uint8)
    for i in range(3):
        logits, labels = draw(i, classes=4)
        save(tmp_path / "probabilities" / f"case_{i}.nii.gz", softmax(logits, -1))
        save(tmp_path / "labels" / f"case_{i}.nii.gz", values[labels])
    done = fit(tmp_path, "--regions", "brats")
    assert done.exit_code == 0, done.output
    assert load_calibrator(tmp_path / "c.json").temperature == pytest.approx(2.5, rel=0.07)


KITS = np.array([0, 1, 2, 3], np.uint8)
BRATS = np.array([0, 1, 2, 4], np.uint8)


def save_four_classes(folder, values):
    """Four cases: logits that are 2.5 times too large, class labels, and labels with the given values."""
    for i in range(4):
        logits, labels = draw(i, classes=4)
        save(folder / "logits" / f"case_{i}.nii.gz", logits)
        save(folder / "labels" / f"case_{i}.nii.gz", labels)
        save(folder / "values" / f"case_{i}.nii.gz", values[labels])


@pytest.mark.parametrize("method", list(CALIBRATORS))
@pytest.mark.parametrize(("regions", "values"), [("kits", KITS), ("brats", BRATS)])
def test_regions_do_not_change_a_fit_on_logits(tmp_path, method, regions, values):
    """A calibrator is fitted on the trained classes; regions are unions of them for the evaluation alone."""
    save_four_classes(tmp_path, values)
    settings = {"steps": 5} if method == "local-temperature" else {}
    fits = [
        fit_calibrator(
            tmp_path / "logits", tmp_path / labels, tmp_path / f"{labels}.json", method=method, folds=0,
            settings=settings, options=ReadOptions(logits=True, regions=union),
        ).calibrator
        for labels, union in (("labels", None), ("values", regions))
    ]  # fmt: skip
    assert fits[0].to_json() == fits[1].to_json()
    if method == "temperature":
        assert fits[1].temperature == pytest.approx(2.5, rel=0.07)


def test_logits_of_a_run_with_regions_are_calibrated_without_options_for_regions(tmp_path):
    """`segcal predict --logits` writes the regions of the run to a file beside the maps."""
    save_four_classes(tmp_path, BRATS)
    names = ("background", "necrosis", "edema", "enhancing")
    write_own(tmp_path / "logits" / BESIDE_MAPS, names, BRATS.tolist(), read_regions("brats"))
    (tmp_path / "labels").rename(tmp_path / "places")
    (tmp_path / "values").rename(tmp_path / "labels")
    done = fit(tmp_path, "--logits", "--folds", "0", kind="logits")
    assert done.exit_code == 0, done.output
    assert load_calibrator(tmp_path / "c.json").temperature == pytest.approx(2.5, rel=0.07)


@pytest.mark.parametrize("method", ["temperature", "vector"])
def test_regions_before_and_after_a_fit_are_those_of_the_maps(tmp_path, method):
    """Each case is calibrated by hand with the calibrator of its fold, and evaluated with --regions."""
    save_four_classes(tmp_path, KITS)
    options = ReadOptions(logits=True, regions="kits")
    paths = tmp_path / "logits", tmp_path / "labels"
    fitted = fit_calibrator(*paths, tmp_path / "c.json", method=method, folds=2, options=options)
    assert fitted.after.classes == ("tumour", "mass", "kidney and masses")
    for cases, calibrator in fitted.held_out:
        for case in cases:
            source = nibabel.load(tmp_path / "logits" / f"{case}.nii.gz").get_fdata(dtype=np.float32)
            new = calibrator.transform(torch.from_numpy(np.moveaxis(source, -1, 0))).numpy()
            save(tmp_path / "maps" / f"{case}.nii.gz", np.moveaxis(new, 0, -1))
    for maps, evaluation in (("logits", fitted.before), ("maps", fitted.after)):
        expected = evaluate(tmp_path / maps, paths[1], tmp_path / f"{maps}-out", options=options).evaluation
        assert expected.cases == evaluation.cases
        for name, values in expected.case_values().items():
            torch.testing.assert_close(evaluation.case_values()[name], values, rtol=1e-6, atol=1e-9, equal_nan=True)


def test_calibrated_logits_are_measured_in_regions_as_through_the_calibrator(tmp_path):
    save_four_classes(tmp_path, KITS)
    assert fit(tmp_path, "--logits", "--regions", "kits", "--folds", "0", kind="logits").exit_code == 0
    assert apply(tmp_path, "--logits", kind="logits").exit_code == 0
    options = ReadOptions(logits=True, regions="kits")
    direct = evaluate(
        tmp_path / "logits", tmp_path / "labels", tmp_path / "a", options=options, calibrator=tmp_path / "c.json"
    ).evaluation
    written = evaluate(tmp_path / "maps", tmp_path / "labels", tmp_path / "b", options=options).evaluation
    plain = evaluate(tmp_path / "logits", tmp_path / "labels", tmp_path / "p", options=options).evaluation
    for metric in ("ace", "nll"):
        one, other, before = (evaluation.case_values()[None, metric] for evaluation in (direct, written, plain))
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-9)
        assert (one < before).all()


def test_label_maps_of_regions_are_refused_for_a_fit_of_exclusive_classes(tmp_path):
    save_four_classes(tmp_path, KITS)
    for i in range(4):
        labels = draw(i, classes=4)[1]
        save(
            tmp_path / "labels" / f"case_{i}.nii.gz",
            np.stack([labels == 2, labels >= 2, labels >= 1], -1) * np.uint8(1),
        )
    done = fit(tmp_path, "--logits", "--regions", "kits", "--folds", "0", kind="logits")
    assert done.exit_code == 2
    assert "labels must be one map of classes to fit a calibrator of exclusive classes; got 3 channels" in " ".join(
        done.output.split()
    )


def test_a_single_channel_is_a_foreground(tmp_path):
    for i in range(3):
        generator = np.random.default_rng(i)
        logits = 2 * generator.normal(size=SHAPE)
        save(tmp_path / "probabilities" / f"case_{i}.nii.gz", expit(2.5 * logits).astype(np.float32))
        save(tmp_path / "labels" / f"case_{i}.nii.gz", (generator.random(SHAPE) < expit(logits)).astype(np.uint8))
    assert fit(tmp_path).exit_code == 0
    assert load_calibrator(tmp_path / "c.json").temperature == pytest.approx(2.5, rel=0.1)
    assert apply(tmp_path).exit_code == 0


def test_a_method_that_moves_decisions_says_so(folder):
    done = fit(folder, "--method", "vector", "--set", "voxels=3000", "--json")
    assert done.exit_code == 0, done.output
    assert ": decisions changed" in done.output
    assert "sampled voxels; sampling adds a standard error" in done.output
    assert load_calibrator(folder / "c.json").voxels == 3000


def test_a_temperature_may_move_decisions_about_sums_of_classes_and_says_so(folder):
    """A voxel with 0.4 / 0.3 / 0.3 is in the union of the last two, whatever the largest; when sharper, it is not."""
    (folder / "unions.toml").write_text('[regions]\n"liver and tumour" = [1, 2]\n')
    done = fit(folder, "--regions", str(folder / "unions.toml"))
    assert done.exit_code == 0, done.output
    assert ": decisions changed" in done.output
    assert load_calibrator(folder / "c.json").keeps_decisions  # of the classes themselves


@pytest.mark.parametrize("settings", [(), ("--set", "dilations=[1]"), ("--set", "smoothing=true")])
def test_a_local_temperature_sees_the_body_as_it_lies(folder, settings):
    """Maps whose axes are flipped give the same, turned: fit and apply look along the axes of the body."""
    done = fit(folder, "--folds", "2", "--set", "steps=20", *settings, method="local-temperature")
    assert done.exit_code == 0, done.output
    assert "no decision changed" in done.output
    assert load_calibrator(folder / "c.json").method == "local-temperature"
    assert apply(folder).exit_code == 0
    canonical = folder / "canonical"
    canonical.mkdir()
    source = nibabel.load(folder / "probabilities" / "case_0.nii.gz")
    nibabel.save(nibabel.as_closest_canonical(source), canonical / "case_0.nii.gz")
    assert apply(folder, kind="canonical", out="turned").exit_code == 0
    made = nibabel.as_closest_canonical(nibabel.load(folder / "maps" / "case_0.nii.gz")).get_fdata()
    np.testing.assert_allclose(nibabel.load(folder / "turned" / "case_0.nii.gz").get_fdata(), made, atol=1e-6)
    through = evaluate(folder / "probabilities", folder / "labels", folder / "a", calibrator=folder / "c.json")
    written = evaluate(folder / "maps", folder / "labels", folder / "b")
    one, other = (outcome.evaluation.scores.log_loss.numpy() for outcome in (through, written))
    np.testing.assert_allclose(one, other, rtol=1e-4)


def test_a_report_of_before_and_after_is_written(folder):
    done = fit(folder, "--report", str(folder / "page.html"))
    assert done.exit_code == 0, done.output
    assert "calibrated" in (folder / "page.html").read_text()


def test_every_method_is_listed_with_a_line():
    lines = CliRunner().invoke(app, ["calibrate", "methods"]).output.splitlines()
    assert all(len(line.split(": ", 1)[1]) > 10 for line in lines)
    assert {"temperature", "isotonic", "dirichlet"} <= {line.split(":")[0] for line in lines}


def test_a_broken_case_is_left_out_and_the_exit_code_tells(folder):
    (folder / "probabilities" / "case_3.nii.gz").write_bytes(b"nothing")
    probabilities = softmax(draw(4)[0], -1)
    probabilities[0, 0, 0, 0] = np.nan
    save(folder / "probabilities" / "case_4.nii.gz", probabilities)
    done = fit(folder)
    assert done.exit_code == 1
    assert "case_3: FileError" in done.output
    assert "case_4: RangeError: probabilities must" in done.output
    assert load_calibrator(folder / "c.json").report.cases == 4


@pytest.mark.parametrize("options", [("--folds", "0"), ("--folds", "2"), ("--folds", "2", "--workers", "2")])
@pytest.mark.parametrize("classes", [2, 5])
def test_a_case_with_other_classes_than_most_is_left_out_of_the_fit(folder, classes, options):
    logits, labels = draw(9, classes=classes)
    save(folder / "probabilities" / "case_0.nii.gz", softmax(logits, -1))
    save(folder / "labels" / "case_0.nii.gz", labels)
    done = fit(folder, *options)
    assert done.exit_code == 1, done.output
    assert f"case_0: ShapeError: has {classes} classes where most cases have 3." in done.output
    (folder / "probabilities" / "case_0.nii.gz").unlink()
    assert fit(folder, *options, out="others.json").exit_code == 0
    found, expected = (load_calibrator(folder / name).temperature for name in ("c.json", "others.json"))
    assert found == expected


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (("--folds", "7"), "got 6 patients and 7 folds"),
        (("--folds", "1"), "got 6 patients and 1 fold"),
        (("--patients", "(case)_"), "got 1 patient. Add cases"),
        (("--method", "nothing"), "method must be one of 'temperature'"),
        (("--set", "objective=beauty"), "objective must be one of"),
        (
            ("--set", "color=red"),
            "has no such setting as 'color'; it has temperature, activation",
        ),
        (("--set", "objektive=ace"), "Did you mean 'objective'?"),
        (("--set", "activation=softmax"), "activation must not be a setting here"),
        (("--set", "method=vector"), "method must not be a setting here; give --method"),
        (("--set", "objective"), "a setting must read KEY=VALUE"),
        (("--method", "dirichlet", "--sigmoid"), "dirichlet is for exclusive classes"),
        (("--method", "auto", "--folds", "0"), "the method 'auto' needs the check to choose by"),
        (("--method", "auto", "--set", "steps=9"), "the method 'auto' must go without settings; got steps"),
    ],
)
def test_what_cannot_be_done_is_one_sentence(folder, options, sentence):
    done = fit(folder, *options)
    assert done.exit_code == 2
    assert sentence in done.output
    assert not (folder / "c.json").exists()


def test_fitting_without_the_check_is_possible_with_one_case(folder):
    for i in range(1, 6):
        (folder / "labels" / f"case_{i}.nii.gz").unlink()
    assert "Add cases, or fit without the check" in fit(folder).output
    done = fit(folder, "--folds", "0")
    assert done.exit_code == 0, done.output
    assert not (folder / "c.png").exists()


def test_a_class_without_voxels_is_named(folder):
    for i in range(6):
        labels = draw(i)[1]
        save(folder / "labels" / f"case_{i}.nii.gz", np.where(labels == 2, 0, labels).astype(np.uint8))
    with pytest.raises(LabelError, match=r"vector needs voxels of every class in the labels; class 2 has none"):
        fit_calibrator(folder / "probabilities", folder / "labels", folder / "c.json", method="vector")
    assert fit(folder).exit_code == 0  # all classes share a temperature


def test_another_number_of_classes_is_refused_case_by_case(folder):
    logits, labels = draw(0, classes=4)
    VectorScaling().fit([(torch.from_numpy(np.moveaxis(logits, -1, 0)), torch.from_numpy(labels))]).save(
        folder / "c.json"
    )
    done = apply(folder, "--logits", kind="logits")
    assert done.exit_code == 1
    assert "4 classes" in done.output
    outcome = evaluate(
        folder / "logits",
        folder / "labels",
        folder / "e",
        calibrator=folder / "c.json",
        options=ReadOptions(logits=True),
    )
    assert len(outcome.failures) == 6
    assert "must have the 4 classes of the calibrator" in outcome.failures[0].message


def test_a_map_of_logits_is_not_made_from_probabilities(folder):
    done = fit(folder, "--method", "vector", "--folds", "0", "--logits", kind="logits")
    assert done.exit_code == 0, done.output
    done = apply(folder)
    assert done.exit_code == 2
    assert "was fitted on logits, which probabilities do not tell in full" in done.output
    assert "probabilities must lie in [0, 1]" in fit(folder, kind="logits", out="d.json").output


@pytest.mark.parametrize("place", [".", "../.."])
def test_what_nnunet_says_of_its_arrays_goes_along(tmp_path, place):
    """Names of classes, and whether arrays are turned; of a fold's validation, its plans lie above."""
    source = tmp_path / "fold_0" / "validation"
    source.mkdir(parents=True)
    np.savez(source / "a.npz", probabilities=np.full((2, 3, 4, 5), 0.5, np.float32))
    (source / "dataset.json").write_text('{"labels": {"background": 0, "liver": 1}}')
    (source / place / "plans.json").write_text('{"image_reader_writer": "NibabelIOWithReorient"}')
    apply_calibrator(Temperature(2.0), source, tmp_path / "maps")
    assert (tmp_path / "maps" / "dataset.json").read_bytes() == (source / "dataset.json").read_bytes()
    assert (tmp_path / "maps" / "plans.json").read_bytes() == (source / place / "plans.json").read_bytes()


@pytest.mark.parametrize("inside", ["probabilities", "probabilities/below"])
def test_predictions_are_never_written_over(folder, inside):
    Temperature(2.0).save(folder / "c.json")
    done = apply(folder, out=inside)
    assert done.exit_code == 2
    assert "--out must lie outside of the predictions" in done.output


def test_one_map_is_calibrated_into_a_folder_beside_it(folder):
    Temperature(2.0).save(folder / "c.json")
    source = folder / "probabilities" / "case_0.nii.gz"
    applied = apply_calibrator(folder / "c.json", source, folder / "probabilities" / "one")
    assert applied.paths == [folder / "probabilities" / "one" / "case_0.nii.gz"]
    with pytest.raises(ConfigError, match="--out must lie outside"):
        apply_calibrator(folder / "c.json", source, source.parent)


def test_of_many_classes_before_and_calibrated_stand_side_by_side(tmp_path):
    for i in range(3):
        logits, labels = draw(i, classes=6)
        save(tmp_path / "probabilities" / f"case_{i}.nii.gz", softmax(logits, -1))
        save(tmp_path / "labels" / f"case_{i}.nii.gz", labels)
    fitted = fit_calibrator(
        tmp_path / "probabilities", tmp_path / "labels", tmp_path / "c.json", method="temperature", folds=3
    )
    figure = reliability_before_and_after(fitted.before, fitted.after)
    titles = [axes.get_title() for axes in figure.axes if axes.get_title()]
    assert titles[:3] == ["class 1, before", "class 1, calibrated", "class 2, before"]


def test_a_broken_calibrator_is_one_sentence(folder):
    (folder / "c.json").write_text("{}")
    done = apply(folder)
    assert done.exit_code == 2
    assert "must be a calibrator that segcal wrote" in done.output
    with pytest.raises(SegcalError, match="must be a calibrator"):
        evaluate(folder / "probabilities", folder / "labels", folder / "e", calibrator=folder / "labels")


@pytest.mark.parametrize("seed", range(5))
def test_volumes_turned_to_the_body_come_back(seed):
    generator = np.random.default_rng(seed)
    affine = np.eye(4)
    affine[:3, :3] = np.eye(3)[generator.permutation(3)] * generator.choice([-1, 1], 3) * generator.uniform(0.5, 3, 3)
    values = torch.from_numpy(generator.normal(size=(2, 3, 4, 5)))
    turned = turn(values, orientation_of(affine))
    expected = nibabel.as_closest_canonical(nibabel.Nifti1Image(values[1].numpy(), affine)).get_fdata()
    np.testing.assert_array_equal(turned[1].numpy(), expected)
    assert torch.equal(turn_back(turned, orientation_of(affine)), values)


def test_json_holds_what_the_fit_found(folder):
    fit(folder, "--folds", "0")
    content = json.loads((folder / "c.json").read_text())
    assert content["inputs"] == "probabilities"
    assert content["fit"]["cases"] == 6
    assert content["fit"]["voxels"] == 6 * math.prod(SHAPE)
    assert content["fit"]["gradient"] < 1e-6


def test_an_interrupted_fit_goes_on_where_it_was(folder, monkeypatch):
    """Killed in the third fit: what was measured and fitted before is there, and the result is that of a calm run."""
    arguments = (folder / "probabilities", folder / "labels")
    calm = fit_calibrator(*arguments, folder / "calm.json", method="temperature", folds=3)
    fits, measured = [], []
    fit, measure = Temperature.fit, cohort.measure_case

    def counted_fit(self, *given, **named):
        fits.append(self)
        if len(fits) == 3:
            raise KeyboardInterrupt
        return fit(self, *given, **named)

    def counted_measure(*given, **named):
        measured.append(given)
        return measure(*given, **named)

    monkeypatch.setattr(Temperature, "fit", counted_fit)
    for module in (cohort, cross_fitting):
        monkeypatch.setattr(module, "measure_case", counted_measure)
    with pytest.raises(KeyboardInterrupt):
        fit_calibrator(*arguments, folder / "c.json", method="temperature", folds=3)
    assert not (folder / "c.json").exists()
    before = len(measured)
    again = fit_calibrator(*arguments, folder / "c.json", method="temperature", folds=3)
    assert len(fits) == 5  # two before, one that was cut short, and then two
    assert before + len(measured[before:]) == 2 * len(again.before.cases)
    assert (folder / "c.json").read_bytes() == (folder / "calm.json").read_bytes()
    for one, other in ((again.before, calm.before), (again.after, calm.after)):
        assert torch.equal(one.statistics.label_sum, other.statistics.label_sum)
    assert not list(folder.glob(".c.json*"))
