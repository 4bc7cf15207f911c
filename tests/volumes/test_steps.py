"""Maps in 8 bits: what is rounded, what it costs, and that evaluations read them as what they stand for."""

import tracemalloc
from itertools import pairwise

import cohorts
import nibabel as nib
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

import segcal
from segcal.calibration.applying import apply_calibrator
from segcal.calibrators import Temperature
from segcal.cli import app
from segcal.datasets import make_phantom
from segcal.errors import ConfigError, RangeError
from segcal.evaluation.measure import measure_case
from segcal.evaluation.options import Options, ReadOptions
from segcal.volumes import CaseFiles
from segcal.volumes.steps import in_steps


@settings(max_examples=100, deadline=None)
@given(
    logits=st.lists(st.lists(st.floats(-12, 12, width=32), min_size=5, max_size=5), min_size=2, max_size=20),
    steps=st.sampled_from([255, 65535]),
    dtype=st.sampled_from([np.float32, np.float64]),
)
def test_steps_sum_to_the_scale_keep_the_order_and_the_decision(logits, steps, dtype):
    exponentials = np.exp(np.array(logits))
    probabilities = (exponentials / exponentials.sum(0)).astype(dtype)
    numbers = in_steps(probabilities, steps)
    assert (numbers.sum(0, dtype=np.int64) == steps).all()
    np.testing.assert_array_equal(numbers.argmax(0), probabilities.argmax(0))
    assert np.abs(numbers / steps - probabilities).max() < 2 / steps
    for voxel in range(5):
        leader = probabilities[:, voxel].argmax()
        order = [c for c in np.argsort(probabilities[:, voxel], kind="stable") if c != leader]
        assert all(numbers[b, voxel] >= int(numbers[a, voxel]) - 1 for a, b in pairwise(order))


@settings(max_examples=60, deadline=None)
@given(
    classes=st.sampled_from([2, 3, 17, 100, 300, 2000]),
    steps=st.sampled_from([255, 65535]),
    dtype=st.sampled_from([np.float16, np.float32, np.float64]),
    spread=st.sampled_from([0.0, 1e-12, 1e-3, 1.0, 4.0]),
    scale=st.sampled_from([0.5, 0.9995, 1.0, 1.0005]),
    seed=st.integers(0, 999),
)
def test_steps_of_many_classes_sum_to_the_scale_though_the_probabilities_do_not(
    classes, steps, dtype, spread, scale, seed
):
    exponentials = np.exp(spread * np.random.default_rng(seed).standard_normal((classes, 20)))
    probabilities = (scale * exponentials / exponentials.sum(0)).clip(0, 1).astype(dtype)
    numbers = in_steps(probabilities, steps)
    assert (numbers.sum(0, dtype=np.int64) == steps).all()
    np.testing.assert_array_equal(numbers.argmax(0), probabilities.argmax(0))
    shares = probabilities / probabilities.sum(0, dtype=np.float64)
    assert np.abs(numbers / steps - shares).max() < 2 / steps


def test_a_voxel_without_probabilities_is_shared_equally():
    assert in_steps(np.zeros((3, 1)), 255).ravel().tolist() == [85, 85, 85]


@pytest.mark.parametrize(
    ("probabilities", "numbers"),
    [
        ([1.0, 0.0, 0.0], [255, 0, 0]),
        ([0.5, 0.5], [128, 127]),  # equally probable: the first one is decided, as before
        ([0.4999, 0.5001], [127, 128]),
        ([100.6 / 255, 100.7 / 255, 53.7 / 255], [100, 101, 54]),  # two steps are missing, to the larger remainders
        ([1 / 3, 1 / 3, 1 / 3], [85, 85, 85]),
        ([84.9 / 255, 84.95 / 255, 85.15 / 255], [84, 85, 86]),  # all would be 85, and the first seem to lead
        ([0.998] + [0.001] * 2, [255, 0, 0]),  # 254.49: the largest remainder
        ([0.5005, 0.5004], [128, 127]),  # of 1.0009: 127.51 and 127.49
    ],
)
def test_steps_by_hand(probabilities, numbers):
    assert in_steps(np.array(probabilities)[:, None], 255).ravel().tolist() == numbers


def test_a_foreground_by_itself_is_decided_as_before():
    probabilities = np.array([[0.0, 0.4999, 0.5, 0.5001, 1.0]], np.float32)
    numbers = in_steps(probabilities, 255)
    assert numbers.ravel().tolist() == [0, 127, 128, 128, 255]
    np.testing.assert_array_equal(numbers / 255 >= 0.5, probabilities >= 0.5)


@pytest.mark.parametrize(("wrong", "told"), [(np.nan, "nan"), (1.5, "1.5"), (-3.0, "-3")])
def test_what_is_no_probability_is_not_stored_as_one(wrong, told):
    with pytest.raises(RangeError, match=rf"must lie in \[0, 1\]; one is {told}"):
        in_steps(np.array([[0.5, wrong], [0.5, 0.5]]), 255)


@pytest.fixture(scope="module")
def phantom(tmp_path_factory):
    """Overconfident maps of a phantom, as float32, and its labels."""
    folder = make_phantom(tmp_path_factory.mktemp("phantom"), cases=12)
    apply_calibrator(Temperature(0.6), folder / "probabilitiesTr", folder / "sharp")
    return folder


def measured(folder, maps, out):
    return segcal.evaluate(maps, folder / "labelsTr", out).evaluation.foreground()


def test_8_bits_take_a_quarter_of_the_room_and_tell_the_same_calibration(phantom, tmp_path):
    small = apply_calibrator(Temperature(1.0), phantom / "sharp", tmp_path / "small", dtype="uint8")
    same = apply_calibrator(Temperature(1.0), phantom / "sharp", tmp_path / "same")  # packed alike
    sizes = [sum(path.stat().st_size for path in maps.paths) for maps in (small, same)]
    assert sizes[0] < sizes[1] / 4
    image = nib.load(small.paths[0])
    assert image.get_data_dtype() == np.uint8
    np.testing.assert_allclose(image.get_fdata().sum(-1), 1, atol=1e-6)
    here, there = (measured(phantom, tmp_path / name, tmp_path / f"{name}-out") for name in ("small", "same"))
    for name in ("predicted", "true", "both"):
        np.testing.assert_array_equal(getattr(here.overlap, name), getattr(there.overlap, name))
    ours, theirs = here.case_values(), there.case_values()
    for metric, most in (("ace", 5e-4), ("ece", 1e-4), ("brier", 1e-5)):
        assert abs((ours[None, metric] - theirs[None, metric]).mean().item()) < most, metric
    rise = ours[None, "nll"].mean() / theirs[None, "nll"].mean() - 1
    assert 0 < rise < 0.15  # the documented cost: probabilities below 1/510 are stored as 0


@pytest.mark.parametrize("extension", [".nii.gz", ".npy", ".npz"])
def test_maps_of_other_formats_become_8_bits_and_are_read_as_255ths(tmp_path, extension):
    probabilities = np.moveaxis(cohorts.make_case(0)[0], -1, 0)
    source = tmp_path / "P" / f"case_0{extension}"
    if extension == ".nii.gz":
        cohorts.save(source, np.moveaxis(probabilities, 0, -1))
    else:
        source.parent.mkdir()
        (np.save if extension == ".npy" else np.savez_compressed)(source, probabilities)
    maps = apply_calibrator(Temperature(1.0), tmp_path / "P", tmp_path / "out", dtype="uint8")
    assert maps.failures == []
    (prediction,) = segcal.volumes.find_predictions(tmp_path / "out")
    values = segcal.volumes.open_prediction(prediction).read()
    numbers = np.rint(values * 255)
    np.testing.assert_allclose(values, numbers / 255, atol=1e-7)
    np.testing.assert_array_equal(numbers.sum(0), 255)
    np.testing.assert_array_equal(values.argmax(0), probabilities.argmax(0))
    again = apply_calibrator(Temperature(1.0), tmp_path / "out", tmp_path / "again")  # of their own type
    second = segcal.volumes.open_prediction(segcal.volumes.find_predictions(tmp_path / "again")[0]).read()
    np.testing.assert_array_equal(second, values)
    wide = apply_calibrator(Temperature(1.0), tmp_path / "out", tmp_path / "wide", dtype="float32")
    assert wide.paths[0].stat().st_size > again.paths[0].stat().st_size


def test_files_of_one_class_each_share_the_steps_of_a_voxel(tmp_path):
    for i in range(3):
        probabilities, _ = cohorts.make_case(i)
        for c in range(3):
            cohorts.save(tmp_path / "P" / f"case_{i}_{c}.nii.gz", probabilities[..., c])
    paths, failures = apply_calibrator(Temperature(1.0), tmp_path / "P", tmp_path / "out", dtype="uint8")
    assert (len(paths), failures) == (9, [])
    for i in range(3):
        numbers = [np.asarray(nib.load(path).dataobj.get_unscaled(), int) for path in paths[3 * i : 3 * i + 3]]
        np.testing.assert_array_equal(sum(numbers), 255)


def test_a_faint_foreground_in_an_array_is_not_taken_for_a_label_map(tmp_path):
    """15 / 255 at most, where no header tells the scale: float32 tells it."""
    (tmp_path / "P").mkdir()
    np.save(tmp_path / "P" / "case_0.npy", np.linspace(0.001, 0.05, 60, dtype=np.float32).reshape(1, 3, 4, 5))
    apply_calibrator(Temperature(1.0, activation="sigmoid"), tmp_path / "P", tmp_path / "out", dtype="uint8")
    (prediction,) = segcal.volumes.find_predictions(tmp_path / "out")
    values = segcal.volumes.open_prediction(prediction).read()
    np.testing.assert_allclose(values, np.load(tmp_path / "P" / "case_0.npy"), rtol=1e-5)


def test_logits_stay_floating_point(tmp_path):
    cohorts.write_cohort(tmp_path, 1)
    options = ReadOptions(logits=True)
    with pytest.raises(ConfigError, match="logits must stay floating point; uint8 is for probabilities"):
        apply_calibrator(Temperature(2.0), tmp_path / "P", tmp_path / "out", options=options, dtype="uint8")
    with pytest.raises(ConfigError, match="dtype must be"):
        apply_calibrator(Temperature(2.0), tmp_path / "P", tmp_path / "out", dtype="int8")


def test_another_type_is_written_anew_and_the_command_takes_it(tmp_path):
    cohorts.write_cohort(tmp_path, 2)
    Temperature(2.0).save(tmp_path / "c.json")
    command = ["calibrate", "apply", str(tmp_path / "c.json"), str(tmp_path / "P"), "--out", str(tmp_path / "new")]
    for options, kind in (([], np.float32), (["--dtype", "uint8"], np.uint8), (["--dtype", "float16"], np.uint16)):
        done = CliRunner().invoke(app, [*command, *options])
        assert done.exit_code == 0, done.output
        assert nib.load(tmp_path / "new" / "case_1.nii.gz").get_data_dtype() == kind


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """A case of more voxels than are converted at a time: as 8 bits, and as the float32 that they stand for."""
    folder = tmp_path_factory.mktemp("large")
    generator = np.random.default_rng(0)
    labels = np.zeros((128, 128, 80), np.uint8)
    labels[40:90, 30:100, 20:60] = 1
    there = np.clip(generator.normal(labels * 0.8 + 0.05, 0.05), 0, 1)
    numbers = in_steps(np.stack([1 - there, there]), 255)
    for name, array, slope in (("bytes", numbers, 1 / 255), ("labels", labels[None], 1)):
        image = nib.Nifti1Image(np.moveaxis(array, 0, -1) if name == "bytes" else labels, np.eye(4))
        image.header.set_slope_inter(slope, 0)
        nib.save(image, folder / f"{name}.nii.gz")
    values = nib.load(folder / "bytes.nii.gz").get_fdata(dtype=np.float32)
    nib.save(nib.Nifti1Image(values, np.eye(4)), folder / "floats.nii")
    return folder


def test_8_bits_are_measured_as_the_numbers_that_nibabel_reads(large):
    """To the bit: all sums, of files that are read in the same slabs."""
    here, there = (
        measure_case(CaseFiles("a", (large / name,), large / "labels.nii.gz"), Options()).sums
        for name in ("bytes.nii.gz", "floats.nii")
    )
    for name, array in vars(there).items():
        np.testing.assert_array_equal(getattr(here, name), array, err_msg=name)


def test_8_bits_are_measured_without_a_copy_in_floats(large, monkeypatch):
    """The case has 2.5 MiB of numbers and 1.25 MiB of labels; as float32 the numbers alone would take 10 MiB."""
    files = CaseFiles("a", (large / "bytes.nii.gz",), large / "labels.nii.gz")
    measure_case(files, Options(), threads=1)  # compiles
    monkeypatch.setattr("segcal.evaluation.measure.COPIED_VOXELS", 1 << 16)
    tracemalloc.start()
    try:
        measure_case(files, Options(), threads=1)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 10 * 2**20
