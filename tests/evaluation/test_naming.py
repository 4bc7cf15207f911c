"""Which class each channel is: as many names as labels, label values that are not 0, 1, 2, and files that say so."""

import json

import numpy as np
import pytest
from cohorts import SHAPE, make_case, run, save, values, write_cohort
from typer.testing import CliRunner

from segcal import ConfigError, ReadOptions, evaluate
from segcal.calibration.fitting import fit_calibrator
from segcal.cli import app


@pytest.fixture
def folder(tmp_path):
    return write_cohort(tmp_path, 2)


def names(folder, out="out"):
    return json.loads((folder / out / "summary.json").read_text())["classes"]


def refused(result, *sentences):
    assert result.exit_code == 2, result.output
    told = " ".join(result.output.split())
    for sentence in sentences:
        assert sentence in told


def test_a_background_that_is_not_named_is_asked_for_with_the_corrected_option(folder):
    """Two names for three channels would drop one and shift the others."""
    result = run(folder, "--class-names", "liver,spleen")
    refused(result, "predictions have 3 channels, so labels are 0, 1, 2; got 2 names, liver,spleen")
    refused(result, "--class-names background,liver,spleen")
    assert run(folder, "--class-names", "background,liver,spleen").exit_code == 0
    assert names(folder) == ["liver", "spleen"]


@pytest.mark.parametrize("given", ["background,liver", "liver", "background,liver,spleen,kidney"])
def test_any_other_number_of_names_is_refused_without_a_guess(folder, given):
    result = run(folder, "--class-names", given)
    refused(result, "must name every label from 0 on")
    assert "If the background" not in result.output


def test_python_functions_refuse_them_too(folder):
    wrong = ReadOptions(class_names=["liver", "spleen"])
    with pytest.raises(ConfigError, match="--class-names background,liver,spleen"):
        evaluate(folder / "P", folder / "L", folder / "out", options=wrong)
    with pytest.raises(ConfigError, match="--class-names background,liver,spleen"):
        fit_calibrator(folder / "P", folder / "L", folder / "c.json", method="temperature", options=wrong)


def test_two_names_that_are_the_same_are_refused(folder):
    told = "class names must not be 'All classes', as tables call all"
    refused(run(folder, "--class-names", "bg,x,All classes"), told)
    refused(run(folder, "--class-names", "bg,x,x"), "class names must differ; 'x' came more than once")


def test_a_single_channel_takes_the_name_of_its_background_too(tmp_path):
    probabilities, labels = make_case(0, classes=2)
    save(tmp_path / "P" / "a.nii.gz", probabilities[..., 1])
    save(tmp_path / "L" / "a.nii.gz", labels)
    refused(
        run(tmp_path, "--class-names", "lesion"), "1 channel, so labels are 0, 1", "--class-names background,lesion"
    )
    assert run(tmp_path, "--class-names", "background,lesion").exit_code == 0
    assert names(tmp_path) == ["lesion"]


def test_channels_that_overlap_take_a_name_each(tmp_path):
    generator = np.random.default_rng(0)
    save(tmp_path / "P" / "a.nii.gz", generator.random((*SHAPE, 3)).astype(np.float32))
    save(tmp_path / "L" / "a.nii.gz", generator.integers(0, 2, (*SHAPE, 3)).astype(np.uint8))
    result = run(tmp_path, "--sigmoid", "--class-names", "WT,TC")
    refused(result, "3 channels")
    assert "If the background" not in result.output
    assert run(tmp_path, "--sigmoid", "--class-names", "WT,TC,ET").exit_code == 0


def test_names_beside_regions_are_refused_rather_than_dropped(folder):
    refused(run(folder, "--regions", "brats", "--class-names", "a,b,c,d"), "leave out --class-names a,b,c,d")


def test_a_dataset_json_of_other_classes_is_refused(folder):
    """Its names would be given to whatever channels there are."""
    four = {"0": "background", "1": "a", "2": "b", "3": "c"}
    (folder / "dataset.json").write_text(json.dumps({"labels": four}))
    refused(run(folder), "names label 3, 'c'", "Give the names with --class-names")
    assert run(folder, "--class-names", "background,a,b").exit_code == 0


def test_one_case_of_other_channels_does_not_speak_for_the_others(folder):
    probabilities, labels = make_case(5, classes=5)
    save(folder / "P" / "a_first.nii.gz", probabilities)
    save(folder / "L" / "a_first.nii.gz", labels)
    assert run(folder, "--class-names", "background,liver,spleen").exit_code == 1
    assert names(folder) == ["liver", "spleen"]
    assert {case for case, _, _ in values(folder)} == {"case_0", "case_1"}


def test_sigmoid_maps_beside_a_dataset_json_of_regions_need_them(tmp_path):
    generator = np.random.default_rng(0)
    save(tmp_path / "P" / "a.nii.gz", generator.random((*SHAPE, 2)).astype(np.float32))
    save(tmp_path / "L" / "a.nii.gz", generator.integers(0, 2, SHAPE).astype(np.uint8))
    file = tmp_path / "P" / "dataset.json"
    file.write_text(json.dumps({"labels": {"background": 0, "whole": [1, 2], "core": [2]}}))
    refused(run(tmp_path, "--sigmoid"), f"add --regions {file}")
    assert run(tmp_path, "--sigmoid", "--regions", str(file)).exit_code == 0
    assert names(tmp_path) == ["whole", "core"]


@pytest.fixture
def remapped(folder):
    """The same, with label files of 0, 2 and 5, and one of values that says so."""
    for i in range(2):
        save(folder / "L" / f"case_{i}.nii.gz", np.array([0, 2, 5], np.uint8)[make_case(i)[1]])
    (folder / "values.toml").write_text("values = [0, 2, 5]\n")
    return folder


def test_values_alone_say_which_label_each_channel_is(remapped):
    """The numbers are those of the same labels written as 0, 1, 2; a label that is none of them is refused."""
    assert run(remapped, "--regions", str(remapped / "values.toml")).exit_code == 0
    assert names(remapped) == ["class 2", "class 5"]
    for i in range(2):
        save(remapped / "L" / f"case_{i}.nii.gz", make_case(i)[1])
    assert run(remapped, "--class-names", "class 0,class 2,class 5", out="plain").exit_code == 0
    assert values(remapped) == values(remapped, "plain")
    result = run(remapped, "--regions", str(remapped / "values.toml"))
    assert result.exit_code == 1
    assert "labels must be among [0, 2, 5]; they hold [1]" in result.output


def test_names_beside_values_are_in_their_order_or_by_label(remapped):
    told = str(remapped / "values.toml")
    assert run(remapped, "--regions", told, "--class-names", "background,b,e").exit_code == 0
    assert names(remapped) == ["b", "e"]
    (remapped / "dataset.json").write_text(json.dumps({"labels": {"0": "background", "5": "five", "2": "two"}}))
    assert run(remapped, "--regions", told, out="again").exit_code == 0
    assert names(remapped, "again") == ["two", "five"]
    refused(run(remapped, "--regions", told, "--class-names", "b,e"), "each of the values [0, 2, 5]")


def test_values_of_an_ignored_label_and_of_another_order(remapped):
    """Label 1 is left out although the second channel has that place."""
    for i in range(2):
        probabilities, labels = make_case(i)
        stored = np.array([0, 2, 5], np.uint8)[labels]
        stored[0] = 1
        save(remapped / "L" / f"case_{i}.nii.gz", stored)
        save(remapped / "P" / f"case_{i}.nii.gz", probabilities[..., [2, 0, 1]])
    (remapped / "values.toml").write_text("values = [5, 0, 2]\n")
    told = ("--regions", str(remapped / "values.toml"), "--ignore-index", "1", "--background")
    assert run(remapped, *told).exit_code == 0
    assert names(remapped) == ["class 5", "class 0", "class 2"]
    for i in range(2):
        probabilities, labels = make_case(i)
        labels[0] = 9
        save(remapped / "L" / f"case_{i}.nii.gz", labels)
        save(remapped / "P" / f"case_{i}.nii.gz", probabilities)
    assert run(remapped, "--ignore-index", "9", "--background", out="plain").exit_code == 0
    assert values(remapped)["case_0", "class 5", "ace"] == values(remapped, "plain")["case_0", "class 2", "ace"]


def test_a_calibrator_is_fitted_to_labels_of_other_values(remapped):
    told = {"method": "temperature", "folds": 0}
    found = fit_calibrator(
        remapped / "P",
        remapped / "L",
        remapped / "c.json",
        options=ReadOptions(regions=remapped / "values.toml"),
        **told,
    )
    for i in range(2):
        save(remapped / "L" / f"case_{i}.nii.gz", make_case(i)[1])
    plain = fit_calibrator(remapped / "P", remapped / "L", remapped / "d.json", **told)
    assert found.calibrator.temperature == plain.calibrator.temperature


def test_values_of_channels_that_overlap_are_regions_of_one_value(tmp_path):
    probabilities, labels = make_case(0, classes=3)
    save(tmp_path / "P" / "a.nii.gz", probabilities[..., 1:])
    save(tmp_path / "L" / "a.nii.gz", np.array([0, 2, 5], np.uint8)[labels])
    (tmp_path / "values.toml").write_text("values = [2, 5]\n")
    assert run(tmp_path, "--sigmoid", "--regions", str(tmp_path / "values.toml")).exit_code == 0
    brier = ((probabilities[..., 2] - (labels == 2)) ** 2).mean()
    assert values(tmp_path)["a", "class 5", "brier"] == pytest.approx(brier, rel=1e-5)


def test_labels_of_brats_without_regions_name_the_option(tmp_path):
    probabilities, labels = make_case(0, classes=4)
    save(tmp_path / "P" / "a.nii.gz", probabilities)
    save(tmp_path / "L" / "a.nii.gz", np.array([0, 1, 2, 4], np.uint8)[labels])
    result = run(tmp_path)
    assert result.exit_code == 1
    assert "they hold [4]. For those of BraTS use --regions brats." in result.output


def test_channels_that_regions_lack_are_named(folder):
    """Without values in the file, a region of label 4 needs channels 0 to 4."""
    (folder / "r.toml").write_text("[regions]\nwhole = [1, 4]\n")
    result = run(folder, "--regions", str(folder / "r.toml"))
    assert "a channel for each label value [0, 1, 2, 3, 4]; they have 3" in result.output


def test_a_report_of_other_classes_says_which_they_are(folder):
    run(folder, out="a")
    run(folder, "--class-names", "background,x,y", out="b")
    pair = ["report", str(folder / "a"), str(folder / "b"), "--out", str(folder / "r.html")]
    maps = ["--predictions", str(folder / "P"), "--predictions", str(folder / "P"), "--labels", str(folder / "L")]
    for more in ([], maps):
        refused(CliRunner().invoke(app, [*pair, *more]), "a has class 1, class 2, b has x, y", "the same --class-names")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": "other"}, "its format is 'other'"),
        ({"classes": ["a", "b"]}, "shorter"),
        ({"classes": ["a", "a", "b"]}, "'a' came more than once"),
        ({"values": [0, 1, 1.5]}, "label values must be whole numbers"),
        ({"values": 3}, "segcal-classes.json"),
        ({"regions": {"members": {"a": "xyz"}, "values": None, "aliases": []}}, "label values must be whole numbers"),
        ({"regions": [1]}, "segcal-classes.json"),
    ],
)
def test_a_file_beside_maps_that_makes_no_sense_is_refused(folder, change, message):
    content = {"format": "segcal classes 1", "classes": ["bg", "a", "b"], "values": [0, 1, 2], "regions": None}
    (folder / "P" / "segcal-classes.json").write_text(json.dumps(content))
    assert run(folder).exit_code == 0
    assert names(folder) == ["a", "b"]
    (folder / "P" / "segcal-classes.json").write_text(json.dumps(content | change))
    refused(run(folder), "must hold the classes of maps, as segcal writes them", message)
    assert run(folder, "--class-names", "bg,x,y", out="told").exit_code == 0  # what is told wins
