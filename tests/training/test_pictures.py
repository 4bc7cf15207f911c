"""Trainings on pictures: disks of known place in noise, 48 x 64 pixels, gray or in color."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from typer.testing import CliRunner

import segcal
from segcal.cli import app
from segcal.datasets import check_dataset, open_dataset
from segcal.errors import ConfigError
from segcal.training.config import make_config
from segcal.training.data import augmentation
from segcal.training.inference import Flat, build_network, predict_logits
from segcal.training.loop import train
from segcal.training.preprocessing import prepare_case, read_labels, restore
from segcal.training.runs import evaluate_run, image_cases, load_run, predict
from segcal.volumes import find_predictions, open_prediction

SIZE = (48, 64)
NETWORK = 'network={name="UNet", options={channels=[8, 16], strides=[2], norm="BATCH"}}'
QUICK = [
    NETWORK,
    "training.epochs=12",
    "training.validate_every=6",
    "training.learning_rate=0.02",
    "training.batch_size=4",
]


def disk(number: int) -> tuple[np.ndarray, np.ndarray]:
    """An image (y, x) of bytes, and where its disk is."""
    random = np.random.default_rng(number)
    rows, columns = np.mgrid[: SIZE[0], : SIZE[1]]
    inside = np.hypot(rows - random.uniform(14, 34), columns - random.uniform(16, 48)) < random.uniform(7, 12)
    return np.clip(80 + 80 * inside + 20 * random.standard_normal(SIZE), 1, 254).astype(np.uint8), inside


def write_folder(root: Path, *, cases: int = 12, color: bool = False, image_ending: str = ".png") -> Path:
    for part in ("images", "labels", "test"):
        (root / part).mkdir(parents=True)
    for number in range(cases):
        image, inside = disk(number)
        shown = np.dstack([image, image // 2, 255 - image]) if color else image
        part = "images" if number < cases - 1 else "test"
        Image.fromarray(shown).save(root / part / f"disk_{number:02d}{image_ending}")
        if part == "images":
            Image.fromarray(inside * np.uint8(255)).save(root / "labels" / f"disk_{number:02d}.png")
    (root / "dataset.json").write_text(json.dumps({"labels": {"background": 0, "disk": 1}}))
    return root


def config(root: Path, *changes: str, dataset: str = "folder"):
    return make_config(dataset=dataset, root=root, changes=[*QUICK, *changes])


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run on pictures in color."""
    folder = tmp_path_factory.mktemp("pictures")
    train(config(write_folder(folder / "data", color=True)), folder / "run")
    return folder


def test_a_folder_of_pictures_is_a_dataset(tmp_path):
    dataset = open_dataset("folder", write_folder(tmp_path, color=True))
    assert (len(dataset.cases), len(dataset.unlabelled)) == (11, 1)
    assert (dataset.channels, dataset.classes) == (("red", "green", "blue"), ("background", "disk"))
    assert dataset.recipe.patch == dataset.recipe.inference_patch == (48, 64, 1)
    check = check_dataset(dataset)
    assert (check.problems, check.present) == ((), {"disk": 11})
    assert ("voxels", "48\N{MULTIPLICATION SIGN}64\N{MULTIPLICATION SIGN}1") in check.facts()


def test_a_picture_of_other_channels_is_a_problem(tmp_path):
    root = write_folder(tmp_path)
    Image.fromarray(np.dstack([disk(3)[0]] * 3)).save(root / "images" / "disk_03.png")
    assert [problem.what for problem in check_dataset(open_dataset("folder", root)).problems] == [
        "disk_03.png must have 1 channels; it is 3\N{MULTIPLICATION SIGN}48\N{MULTIPLICATION SIGN}64."
    ]


def test_nnunets_layout_has_pictures_too(tmp_path):
    for part in ("imagesTr", "labelsTr"):
        (tmp_path / part).mkdir()
    for number in range(3):
        image, inside = disk(number)
        Image.fromarray(np.dstack([image] * 3)).save(tmp_path / "imagesTr" / f"disk_{number}_0000.png")
        Image.fromarray(inside.astype(np.uint8)).save(tmp_path / "labelsTr" / f"disk_{number}.png")
    content = {
        "channel_names": {"0": "R", "1": "G", "2": "B"}, "labels": {"background": 0, "disk": 1}, "file_ending": ".png",
    }  # fmt: skip
    (tmp_path / "dataset.json").write_text(json.dumps(content))
    dataset = open_dataset("nnunet", tmp_path)
    assert [case.images[0].name for case in dataset.cases] == [f"disk_{number}_0000.png" for number in range(3)]
    assert check_dataset(dataset).problems == ()
    data = config(tmp_path, dataset="nnunet").resolved(dataset).data
    prepared = prepare_case(dataset.cases[1], dataset, data)
    assert prepared.image.shape == (3, *SIZE, 1)
    np.testing.assert_array_equal(prepared.labels[..., 0], disk(1)[1])


@pytest.mark.parametrize("channels", [2, 1])
def test_pages_of_a_tiff_are_the_channels_that_are_named_or_slices(tmp_path, channels):
    tifffile = pytest.importorskip("tifffile")
    random = np.random.default_rng(0)
    pages, inside = random.integers(1, 60_000, (2, *SIZE)).astype(np.uint16), random.random((2, *SIZE)) < 0.3
    labels = inside[0] if channels == 2 else inside
    for part, values in (("images", pages), ("labels", labels.astype(np.uint8))):
        (tmp_path / part).mkdir()
        tifffile.imwrite(tmp_path / part / "one.tif", values, photometric="minisblack")
    names = {str(number): f"stain {number}" for number in range(channels)}
    (tmp_path / "dataset.json").write_text(json.dumps({"labels": {"background": 0, "cell": 1}, "channel_names": names}))
    dataset = open_dataset("folder", tmp_path)
    assert check_dataset(dataset).problems == ()
    assert dataset.recipe.patch == ((48, 64, 1) if channels == 2 else (16, 48, 64))
    prepared = prepare_case(
        dataset.cases[0], dataset, config(tmp_path, "data.crop_foreground=false").resolved(dataset).data
    )
    expected = pages[..., None] if channels == 2 else pages[None]
    assert prepared.image.shape == expected.shape
    for channel, stored in zip(prepared.image, expected, strict=True):
        np.testing.assert_allclose(channel, (stored - stored.mean()) / stored.std(), rtol=1e-3, atol=1e-4)
    np.testing.assert_array_equal(prepared.labels, labels[..., None] if channels == 2 else labels)


def test_rows_stay_rows_on_the_way_there_and_back(tmp_path):
    dataset = open_dataset("folder", write_folder(tmp_path))
    found = config(tmp_path).resolved(dataset)
    prepared = prepare_case(dataset.cases[0], dataset, found.data)
    image, inside = disk(0)
    np.testing.assert_allclose(prepared.image[0, ..., 0], (image - image.mean()) / image.std(), rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(read_labels(dataset.cases[0], dataset)[..., 0], inside)
    logits = torch.arange(2.0 * image.size).reshape(2, *SIZE, 1)
    assert torch.equal(restore(logits.clone(), prepared.geometry), logits)


@pytest.mark.parametrize("name", ["UNet", "SegResNetDS"])
def test_a_patch_without_depth_makes_a_network_of_two_axes(tmp_path, name):
    dataset = open_dataset("folder", write_folder(tmp_path, cases=4))
    options = {"UNet": "{channels=[8, 16], strides=[2]}", "SegResNetDS": "{init_filters=4, blocks_down=[1, 1]}"}[name]
    changes = [f'network.name="{name}"', f"network.options={options}"]
    found = make_config(dataset="folder", root=tmp_path, changes=changes).resolved(dataset)
    network = build_network(found, dataset)
    assert isinstance(network, Flat)
    kinds = {type(module).__name__ for module in network.modules()}
    assert "Conv2d" in kinds
    assert "Conv3d" not in kinds
    logits = predict_logits(network, torch.zeros(1, 50, 70, 1), found, torch.device("cpu"))
    assert logits.shape == (2, 50, 70, 1)
    # Slices of a volume are seen one by one.
    volume = torch.randn(1, *SIZE, 3)
    with torch.no_grad():
        whole = predict_logits(network, volume, found, torch.device("cpu"))
        single = predict_logits(network, volume[..., 1:2], found, torch.device("cpu"))
    torch.testing.assert_close(whole[..., 1:2], single)


def test_patches_are_flat_both_or_neither(tmp_path):
    dataset = open_dataset("folder", write_folder(tmp_path, cases=4))
    found = config(tmp_path, "data.inference_patch=[48, 64, 16]").resolved(dataset)
    with pytest.raises(ConfigError, match=r"both have a third length of 1, or neither; got \[48, 64, 1\] and"):
        build_network(found, dataset)


@pytest.mark.parametrize("name", ["affine", "brats"])
def test_augmentation_stays_in_the_plane(name):
    alter = augmentation(name, (24, 32))
    alter.set_random_state(seed=1)
    image = torch.rand(2, 24, 32)
    changed = [alter({"image": image, "labels": (image[:1] > 0.5).float()}) for _ in range(6)]
    assert all(each["image"].shape == (2, 24, 32) and each["labels"].shape == (1, 24, 32) for each in changed)
    assert any(not torch.equal(torch.as_tensor(each["image"]), image) for each in changed)


def test_a_run_on_pictures_finds_the_disks_and_measures_the_same_by_every_way(trained):
    run = load_run(trained / "run")
    on_the_spot = evaluate_run(run, trained / "spot").evaluation
    assert on_the_spot.case_values()[None, "dice"].mean() > 0.8
    stored = predict(run, trained / "maps")
    assert [path.suffix for path in stored.paths] == [".npy"] * len(run.split.test)
    from_maps = segcal.evaluate(trained / "maps", trained / "data" / "labels", trained / "results").evaluation
    assert from_maps.cases == on_the_spot.cases == run.split.test
    for name in ("dice", "ece"):
        one, other = (each.case_values()[None, name] for each in (from_maps, on_the_spot))
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-7)


def test_maps_as_integers_are_pictures_of_each_class(trained):
    run = load_run(trained / "run")
    plain = predict(run, trained / "float").paths
    for dtype, kind, steps in (("uint8", np.uint8, 255), ("float16", np.uint16, 65535)):
        paths = predict(run, trained / dtype, dtype=dtype).paths
        assert [path.name for path in paths[:2]] == [f"{run.split.test[0]}_class{index}.png" for index in (0, 1)]
        pictures = [np.asarray(Image.open(path)) for path in paths[:2]]
        assert all(picture.dtype == kind for picture in pictures)
        assert np.all(pictures[0].astype(int) + pictures[1] == steps)
        np.testing.assert_allclose(np.stack(pictures) / steps, np.load(plain[0]), atol=1.01 / steps)
        found = find_predictions(trained / dtype)
        assert [files.name for files in found] == list(run.split.test)
        assert open_prediction(found[0]).read().shape == (2, *SIZE, 1)


def test_other_pictures_are_predicted_with_flips(trained):
    from segcal.training.ensemble import load_ensemble

    (other,) = (trained / "data" / "test").iterdir()
    (trained / "new").mkdir()
    (trained / "new" / "disk_11_0000.png").write_bytes(
        other.read_bytes()
    )  # as nnU-Net names it, all colors in one file
    cases = image_cases(trained / "new", 3)
    assert [case.name for case in cases] == ["disk_11"]
    mean = load_ensemble([trained / "run"], flips=True, with_data=False)
    (path,) = predict(mean, trained / "flips", cases=cases).paths
    maps = np.load(path)
    assert maps.shape == (2, *SIZE)
    inside = disk(11)[1]
    assert 2 * (inside & (maps[1] > 0.5)).sum() / (inside.sum() + (maps[1] > 0.5).sum()) > 0.8


def test_calibration_decisions_and_the_report_take_pictures(trained):
    labels, images = trained / "data" / "labels", trained / "data" / "images"
    maps, calibrated, decided = (trained / name for name in ("eight", "calibrated", "decided"))
    shown = ["--cases", "1", "--worst", "1", "--out", trained / "report.html"]
    commands = [
        ["predict", trained / "run", "--split", "all", "--dtype", "uint8", "--out", maps],
        ["calibrate", "fit", maps, labels, "--method", "temperature", "--folds", "0", "--out", trained / "fitted.json"],
        ["calibrate", "apply", trained / "fitted.json", maps, "--out", calibrated],
        ["evaluate", calibrated, labels, "--out", trained / "after"],
        ["decide", maps, "--calibrator", trained / "fitted.json", "--rule", "argmax", "--out", decided],
        ["report", trained / "after", "--predictions", calibrated, "--labels", labels, "--images", images, *shown],
    ]
    for command in commands:
        done = CliRunner().invoke(app, [str(word) for word in command])
        assert done.exit_code == 0, done.output
    page = (trained / "report.html").read_text()
    assert '<section id="viewer"' in page
    assert '<section id="maps"' in page
    for number in range(11):
        name = f"disk_{number:02d}"
        picture = np.asarray(Image.open(decided / f"{name}.png"))
        rows = [np.load(calibrated / f"{name}_class{index}.npy") for index in (0, 1)]
        np.testing.assert_array_equal(picture, rows[1] > rows[0])
        np.testing.assert_allclose(rows[0] + rows[1], 1, atol=1e-6)
