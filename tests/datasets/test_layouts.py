"""Each dataset is opened from hand-made files in its own layout; names and counts are known by construction."""

import json

import layouts
import nibabel
import numpy as np
import pytest

from segcal.datasets import dataset_names, describe, known_dataset, open_dataset
from segcal.errors import ConfigError, FileError
from segcal.volumes.regions import BUILT_IN

WRITERS = {
    "acdc": layouts.write_acdc,
    "amos": layouts.write_amos,
    "brats": layouts.write_brats,
    "kits": layouts.write_kits,
    "decathlon": layouts.write_decathlon,
    "nnunet": layouts.write_nnunet,
}


def names(cases):
    return [case.name for case in cases]


@pytest.mark.parametrize("name", WRITERS)
def test_files_exist_and_classes_match_values(tmp_path, name):
    dataset = open_dataset(name, WRITERS[name](tmp_path))
    assert dataset.name == name
    assert names(dataset.cases) == sorted(names(dataset.cases))
    assert len(dataset.classes) == len(dataset.values)
    assert dataset.classes[0] == "background"
    assert dataset.values[0] == 0
    assert dataset.problems == ()
    for case in (*dataset.cases, *dataset.unlabelled):
        assert all(path.is_file() for path in case.images)
    assert all(case.label.is_file() for case in dataset.cases)
    assert all(case.label is None for case in dataset.unlabelled)


def test_acdc_has_two_frames_of_each_patient_and_the_official_test(tmp_path):
    dataset = open_dataset("acdc", layouts.write_acdc(tmp_path, patients=3, test_patients=2))
    assert len(dataset.cases) == 10
    assert names(dataset.cases)[:2] == ["patient001_frame01", "patient001_frame12"]
    assert dataset.cases[0].patient == "patient001"
    assert dataset.patients == ("patient001", "patient002", "patient003", "patient101", "patient102")
    assert dataset.official_test == tuple(f"patient{n}_frame{f}" for n in (101, 102) for f in ("01", "12"))
    assert dataset.shares == (90, 10, 50)
    assert dataset.split_note == ""
    assert dataset.regions is None


@pytest.mark.parametrize("place", [".", "database", "database/training"])
def test_acdc_is_found_from_its_root_and_from_within(tmp_path, place):
    layouts.write_acdc(tmp_path, patients=2)
    assert open_dataset("acdc", tmp_path / place).root == tmp_path / "database"


def test_acdc_without_a_test_folder_says_so(tmp_path):
    dataset = open_dataset("acdc", layouts.write_acdc(tmp_path))
    assert dataset.official_test == ()
    assert dataset.shares == (60, 10, 30)
    assert "testing/ has no labeled patients" in dataset.split_note


def test_acdc_test_images_without_labels_are_unlabelled(tmp_path):
    layouts.write_acdc(tmp_path, test_patients=1)
    for path in (tmp_path / "database" / "testing").rglob("*_gt.nii.gz"):
        path.unlink()
    dataset = open_dataset("acdc", tmp_path)
    assert names(dataset.unlabelled) == ["patient101_frame01", "patient101_frame12"]
    assert dataset.official_test == ()
    assert dataset.problems == ()


def test_acdc_frame_without_label_is_a_problem_and_left_out(tmp_path):
    layouts.write_acdc(tmp_path)
    (tmp_path / "database/training/patient003/patient003_frame12_gt.nii.gz").unlink()
    dataset = open_dataset("acdc", tmp_path)
    assert "patient003_frame12" not in names(dataset.cases)
    assert dataset.problems == (
        ("patient003_frame12", "patient003_frame12.nii.gz must have labels; there are none."),
        ("patient003", "two labeled frames must be there, ED and ES; found 1."),
    )


def test_amos_leaves_out_mr_and_tests_on_the_validation_folder(tmp_path):
    dataset = open_dataset("amos", layouts.write_amos(tmp_path, mr_cases=3))
    assert names(dataset.cases) == ["amos_0001", "amos_0002", "amos_0003", "amos_0004", "amos_0101", "amos_0102"]
    assert dataset.official_test == ("amos_0101", "amos_0102")
    assert names(dataset.unlabelled) == ["amos_0201", "amos_0202"]
    assert dataset.notes == ("MR images (id 500 and above) are left out: 3.",)
    assert len(dataset.classes) == 16
    assert dataset.classes[15] == "prostate/uterus"


def test_amos_takes_the_names_of_dataset_json(tmp_path):
    layouts.write_amos(tmp_path)
    labels = {"0": "background", "8": "arota"}  # as the published file spells it
    (tmp_path / "amos22" / "dataset.json").write_text(json.dumps({"labels": labels}))
    classes = open_dataset("amos", tmp_path / "amos22").classes
    assert (classes[7], classes[8]) == ("stomach", "arota")


def test_amos_without_validation_labels_makes_a_test_share(tmp_path):
    layouts.write_amos(tmp_path)
    for path in (tmp_path / "amos22" / "labelsVa").iterdir():
        path.unlink()
    dataset = open_dataset("amos", tmp_path)
    assert names(dataset.unlabelled) == ["amos_0101", "amos_0102", "amos_0201", "amos_0202"]
    assert dataset.shares == (60, 10, 30)
    assert dataset.problems == ()


def test_brats_has_four_channels_in_order_and_regions(tmp_path):
    dataset = open_dataset("brats", layouts.write_brats(tmp_path))
    assert dataset.channels == ("t1", "t1ce", "t2", "flair")
    endings = [path.name.removeprefix("BraTS2021_00000_") for path in dataset.cases[0].images]
    assert endings == ["t1.nii.gz", "t1ce.nii.gz", "t2.nii.gz", "flair.nii.gz"]
    assert dataset.values == (0, 1, 2, 4)
    assert dataset.regions == BUILT_IN["brats"]
    assert dataset.regions.channels("TC") == [1, 3]


def test_brats_case_with_a_missing_channel_is_a_problem_and_left_out(tmp_path):
    layouts.write_brats(tmp_path)
    (tmp_path / "BraTS2021_00002" / "BraTS2021_00002_t2.nii.gz").unlink()
    dataset = open_dataset("brats", tmp_path)
    assert names(dataset.cases) == ["BraTS2021_00000", "BraTS2021_00001", "BraTS2021_00003"]
    sentence = "a file for each of t1, t1ce, t2, flair must be there; t2 is missing."
    assert dataset.problems == (("BraTS2021_00002", sentence),)


def test_brats_is_found_below_a_folder_with_a_similar_name(tmp_path):
    layouts.write_brats(tmp_path / "BraTS2021_Training_Data", cases=3)
    assert len(open_dataset("brats", tmp_path).cases) == 3


def test_brats_of_2023_keeps_visits_of_a_patient_together(tmp_path):
    image = np.zeros((4, 4, 4), np.int16)
    for visit in ("000", "001"):
        folder = tmp_path / "train" / f"BraTS-GLI-00005-{visit}"
        for ending in ("t1n", "t1c", "t2w", "t2f", "seg"):
            layouts.save(folder / f"{folder.name}-{ending}.nii.gz", image)
    dataset = open_dataset("brats", tmp_path)
    assert names(dataset.cases) == ["BraTS-GLI-00005-000", "BraTS-GLI-00005-001"]
    assert dataset.patients == ("BraTS-GLI-00005",)
    assert [path.name[-10:] for path in dataset.cases[0].images] == [
        f"{ending}.nii.gz" for ending in ("t1n", "t1c", "t2w", "t2f")
    ]


@pytest.mark.parametrize("place", [".", "dataset"])
def test_kits_is_found_with_and_without_its_folder(tmp_path, place):
    layouts.write_kits(tmp_path)
    dataset = open_dataset("kits", tmp_path / place)
    assert names(dataset.cases) == ["case_00000", "case_00001", "case_00002", "case_00003"]
    assert dataset.regions == BUILT_IN["kits"]


def test_kits_labels_without_images_are_problems(tmp_path):
    layouts.write_kits(tmp_path)  # as in the published repository before the images are fetched
    (tmp_path / "dataset/case_00001/imaging.nii.gz").unlink()
    dataset = open_dataset("kits", tmp_path)
    assert dataset.problems == (("case_00001", "segmentation.nii.gz must have an image; there is none."),)


def test_decathlon_takes_channels_and_classes_from_its_json(tmp_path):
    root = layouts.write_decathlon(tmp_path, channels=("FLAIR", "T1w"))
    dataset = open_dataset("decathlon", tmp_path)
    assert dataset.root == root
    assert dataset.channels == ("FLAIR", "T1w")
    assert dataset.classes == ("background", "near", "far")
    assert names(dataset.cases) == ["test_001", "test_002", "test_003", "test_004"]
    assert names(dataset.unlabelled) == ["test_005"]


def test_decathlon_is_found_by_a_roundabout_path(tmp_path):
    root = layouts.write_decathlon(tmp_path)
    assert len(open_dataset("decathlon", root / ".." / root.name).cases) == 4


def test_decathlon_uses_the_list_not_the_numbers_and_reports_what_is_missing(tmp_path):
    root = layouts.write_decathlon(tmp_path)
    content = json.loads((root / "dataset.json").read_text())
    content["numTraining"] = 99
    content["training"] = content["training"][:3]
    (root / "dataset.json").write_text(json.dumps(content))
    (root / "labelsTr" / "test_002.nii.gz").unlink()
    (root / "imagesTr" / "._test_001.nii.gz").write_bytes(b"left by macOS")
    dataset = open_dataset("decathlon", root)
    assert names(dataset.cases) == ["test_001", "test_003"]
    sentence = "labelsTr/test_002.nii.gz must be there, as dataset.json lists it; it is missing."
    assert dataset.problems == (("test_002", sentence),)
    assert dataset.notes == (
        "Cases on disk that dataset.json does not list are left out: 1.",
        "dataset.json speaks of 99 training cases and lists 3; the list counts.",
    )


@pytest.mark.parametrize(
    ("key", "value", "sentence"),
    [
        ("modality", None, "modality must name the channels"),
        ("modality", {"1": "MRI"}, "modality must name the channels"),
        ("training", ["a.nii.gz"], "training must list an image and a label each"),
        ("training", {"a": 1}, "training must be a list"),
    ],
)
def test_decathlon_json_that_makes_no_sense_is_refused(tmp_path, key, value, sentence):
    root = layouts.write_decathlon(tmp_path)
    content = json.loads((root / "dataset.json").read_text())
    (root / "dataset.json").write_text(json.dumps(content | {key: value}))
    with pytest.raises(FileError, match=sentence):
        open_dataset("decathlon", root)


@pytest.mark.parametrize(
    ("name", "write", "labels"),
    [
        ("decathlon", layouts.write_decathlon, '{"0": "background", "1": "near", "2": "near"}'),
        ("decathlon", layouts.write_decathlon, '{"1": "background", "2": "far"}'),
        ("nnunet", layouts.write_nnunet, '{"0": "background", "1": "x", "2": "x", "3": "y"}'),
        ("nnunet", layouts.write_nnunet, '{"background": 0, "x": 1, "y": 2, "y": 3}'),
        ("nnunet", layouts.write_nnunet, '{"background": 0, "x": 1, "y": 2, "z": 2}'),
    ],
)
def test_two_classes_of_one_name_or_value_are_refused(tmp_path, name, write, labels):
    path = write(tmp_path) / "dataset.json"
    content = json.loads(path.read_text()) | {"labels": "HERE"}
    path.write_text(json.dumps(content).replace('"HERE"', labels))
    with pytest.raises((ConfigError, FileError), match="more than once"):
        open_dataset(name, path.parent)


@pytest.mark.parametrize(
    ("name", "write", "labels"),
    [
        ("decathlon", layouts.write_decathlon, {"0": "background"}),
        ("nnunet", layouts.write_nnunet, {"background": 0}),
    ],
)
def test_a_dataset_of_the_background_alone_is_refused(tmp_path, name, write, labels):
    path = write(tmp_path) / "dataset.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"labels": labels}))
    with pytest.raises(ConfigError, match="at least one class besides the background; got background"):
        open_dataset(name, path.parent)


def test_several_tasks_in_a_folder_must_be_chosen_from(tmp_path):
    layouts.write_decathlon(tmp_path)
    (tmp_path / "Task09_Test").rename(tmp_path / "Task01_First")
    layouts.write_decathlon(tmp_path)
    with pytest.raises(FileError, match=r"holds Task01_First, Task09_Test\. Name one"):
        open_dataset("decathlon", tmp_path)


def test_nnunet_joins_the_files_of_the_channels(tmp_path):
    dataset = open_dataset("nnunet", layouts.write_nnunet(tmp_path))
    assert dataset.channels == ("T1", "T2")
    assert dataset.classes == ("background", "liver", "spleen", "lesion")
    assert names(dataset.cases) == ["scan-00", "scan-01", "scan-02", "scan-03"]
    assert [path.name for path in dataset.cases[1].images] == ["scan-01_0000.nii.gz", "scan-01_0001.nii.gz"]
    assert names(dataset.unlabelled) == ["scan-04"]
    assert dataset.regions is None


def test_nnunet_lists_of_labels_are_regions(tmp_path):
    labels = {"background": 0, "whole": [1, 2, 3], "core": [2, 3], "enhancing": [3]}
    dataset = open_dataset("nnunet", layouts.write_nnunet(tmp_path, labels=labels))
    assert dataset.values == (0, 1, 2, 3)
    assert dataset.classes == ("background", "label 1", "label 2", "enhancing")
    assert dataset.regions.members == {"whole": (1, 2, 3), "core": (2, 3), "enhancing": (3,)}


def test_nnunet_missing_channel_is_a_problem(tmp_path):
    root = layouts.write_nnunet(tmp_path)
    (root / "imagesTr" / "scan-02_0001.nii.gz").unlink()
    dataset = open_dataset("nnunet", root)
    sentence = "channels 0000 to 0001 must be there, as dataset.json says; found 0000."
    assert dataset.problems == (("scan-02", sentence),)


def test_nnunet_ignore_label_is_refused(tmp_path):
    root = layouts.write_nnunet(tmp_path, labels={"background": 0, "liver": 1, "ignore": 2})
    with pytest.raises(ConfigError, match="must not contain 'ignore'"):
        open_dataset("nnunet", root)


def test_nnunet_of_other_file_formats_is_refused(tmp_path):
    root = layouts.write_nnunet(tmp_path)
    content = json.loads((root / "dataset.json").read_text()) | {"file_ending": ".bmp"}
    (root / "dataset.json").write_text(json.dumps(content))
    with pytest.raises(ConfigError, match=r"file_ending must be one of \.nii\.gz, \.nii, \.png.*; got '\.bmp'"):
        open_dataset("nnunet", root)


@pytest.mark.parametrize("name", dataset_names())
def test_a_folder_of_another_layout_is_refused_with_both_layouts(tmp_path, name):
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "cat.png").touch()
    with pytest.raises(FileError, match=r"must have the layout .*found photos/\. Download"):
        open_dataset(name, tmp_path)
    with pytest.raises(FileError, match=r"must have the layout .*it does not exist\. Download"):
        open_dataset(name, tmp_path / "nowhere")


def test_an_unknown_name_is_refused_with_a_suggestion(tmp_path):
    with pytest.raises(ConfigError, match=r"dataset must be one of acdc, .*; got 'ACDc'\. Did you mean 'acdc'\?"):
        open_dataset("ACDc", tmp_path)


def test_the_list_describes_every_dataset():
    rows = describe()
    assert tuple(row.name for row in rows) == dataset_names()
    assert rows[2].regions == ("ET", "TC", "WT")
    assert all(row.layout and "\n" not in row.layout for row in rows)


# Recipes: METHOD.md, table "Protocol"


@pytest.mark.parametrize(
    ("name", "spacing", "window", "patch", "inference", "epochs", "rate"),
    [
        ("acdc", (1, 1, 5), None, (256, 256, 16), (256, 256, 16), 600, 1e-4),
        ("amos", (1, 1, 5), (-100, 200), (176, 176, 64), (192, 192, 64), 600, 2e-4),
        ("brats", (1, 1, 1), None, (224, 224, 144), (240, 240, 160), 1250, 1e-4),
        ("kits", (1, 1, 1), (-54, 242), (128, 128, 128), (256, 256, 256), 1250, 1e-4),
    ],
)
def test_recipes_are_the_papers(tmp_path, name, spacing, window, patch, inference, epochs, rate):
    recipe = open_dataset(name, WRITERS[name](tmp_path)).recipe
    assert recipe.spacing_mm == spacing
    assert (recipe.intensity, recipe.window) == ("window" if window else "zscore", window)
    assert (recipe.patch, recipe.inference_patch) == (patch, inference)
    assert (recipe.epochs, recipe.learning_rate) == (epochs, rate)
    assert recipe.augmentation == ("brats" if name == "brats" else "affine")
    assert recipe.sampling == ("random" if name == "brats" else "foreground")


def test_other_recipes_follow_the_size_of_the_images(tmp_path):
    recipe = open_dataset("decathlon", layouts.write_decathlon(tmp_path, size=(20, 40, 150))).recipe
    assert recipe.patch == (32, 48, 128)
    assert recipe.spacing_mm is None
    assert recipe.intensity == "zscore"


def test_ct_is_windowed_and_mixed_voxel_sizes_are_resampled(tmp_path):
    root = layouts.write_nnunet(tmp_path, cases=3, channels=("CT",))
    turned = np.array([[0, 0, 4.0, 0], [2.0, 0, 0, 0], [0, 2.0, 0, 0], [0, 0, 0, 1]])  # axes anterior, superior, right
    for number in range(2):
        values = np.zeros((20, 30, 40), np.int16)
        nibabel.Nifti1Image(values, turned).to_filename(root / "imagesTr" / f"scan-{number:02d}_0000.nii.gz")
    recipe = open_dataset("nnunet", root).recipe
    assert recipe.intensity == "window"
    assert recipe.spacing_mm == (4, 2, 2)
    assert recipe.patch == (48, 32, 32)


@pytest.mark.parametrize("name", ["acdc", "amos", "brats", "kits"])
def test_what_is_known_without_files_is_what_opening_finds(tmp_path, name):
    known, opened = known_dataset(name), open_dataset(name, WRITERS[name](tmp_path))
    assert known.cases == ()
    for fact in ("name", "title", "channels", "classes", "values", "regions", "recipe", "paper", "paper_cases"):
        assert getattr(known, fact) == getattr(opened, fact)


def test_cases_of_the_paper_count_the_frames_of_a_patient():
    assert known_dataset("acdc").paper_cases == (180, 20, 100)
    assert known_dataset("amos").paper_cases == (216, 24)
    assert known_dataset("decathlon") is None


@pytest.mark.parametrize(("write", "name"), [(layouts.write_decathlon, "decathlon"), (layouts.write_nnunet, "nnunet")])
def test_a_dataset_json_that_overwhelms_the_parser_is_refused_in_a_sentence(tmp_path, write, name):
    root = write(tmp_path)
    (root / "dataset.json").write_text("[" * 100_000 + "]" * 100_000)
    with pytest.raises(FileError, match=r"dataset\.json must be a JSON file that can be read; it is nested too deeply"):
        open_dataset(name, root)
