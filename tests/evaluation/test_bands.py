"""Bands around the predicted boundaries of classes: distances by brute force, sums that add up, exact probabilities."""

import math

import nibabel
import numpy as np
import pytest
import torch
from cohorts import SHAPE, STRAIGHT, make_case, run, save, write_cohort
from scipy.ndimage import gaussian_filter
from typer.testing import CliRunner

from segcal import (
    ConfigError,
    Evaluation,
    ReadOptions,
    Regions,
    ace,
    apply_calibrator,
    compare,
    evaluate,
    fit_calibrator,
)
from segcal.cli import app
from segcal.evaluation.bands import band_codes, band_names, check_bands

LIMITS = (2.0, 5.0)
TURNED = np.array([[-1.0, 0, 0, 3], [0, 0, 2.5, 1], [0, 1.0, 0, 2], [0, 0, 0, 1]])


def brute_force(inside, outside, spacing, limits):
    """The band of each voxel, from the distances to all voxels of the other side."""
    codes = []
    for place, own in zip(np.argwhere(np.ones(inside.shape)) * spacing, inside.ravel(), strict=True):
        there = np.argwhere(outside if own else inside) * spacing
        distance = np.sqrt(((there - place) ** 2).sum(1)).min() if len(there) else math.inf
        codes.append(sum(distance > limit for limit in limits))
    return np.array(codes).reshape(inside.shape)


@pytest.mark.parametrize("spacing", [(1.0, 1.0, 1.0), (0.7, 0.9, 3.0), (2.0, 0.5, 1.25)])
@pytest.mark.parametrize("ignored", [0.0, 0.3])
def test_bands_are_those_of_brute_force(spacing, ignored):
    generator = np.random.default_rng(0)
    grid = np.stack(np.meshgrid(*map(np.arange, (13, 11, 7)), indexing="ij"), -1) - [5, 5, 3]
    own = (np.linalg.norm(grid, axis=-1) < 3.3) | (generator.random((13, 11, 7)) < 0.01)
    known = generator.random(own.shape) >= ignored
    own &= known
    found = band_codes(own, known & ~own, spacing, LIMITS)
    assert np.array_equal(found[known], brute_force(own, known & ~own, spacing, LIMITS)[known])


def test_a_limit_belongs_to_the_band_below_it():
    own = np.zeros((1, 9), bool)
    own[0, :4] = True
    assert band_codes(own, ~own, (1.0, 1.0), LIMITS).tolist() == [[1, 1, 0, 0, 0, 0, 1, 1, 1]]


def test_without_a_boundary_all_voxels_are_in_the_last_band():
    nothing = np.zeros((3, 3, 3), bool)
    assert (band_codes(nothing, ~nothing, (1, 1, 1), LIMITS) == 2).all()
    assert (band_codes(~nothing, nothing, (1, 1, 1), LIMITS) == 2).all()


def test_far_sides_that_do_not_come_near_have_no_near_band():
    own = np.zeros((40, 3, 3), bool)
    own[0, 0, 0] = True
    other = np.zeros_like(own)
    other[30:] = True  # between them nothing counts
    assert (band_codes(own, other, (1, 1, 1), LIMITS) == 2).all()


@pytest.mark.parametrize("wrong", [[], [5, 2], [0, 2], [2, 2], ["two"], [math.inf]])
def test_bands_that_mean_nothing_are_refused(wrong):
    with pytest.raises(ConfigError, match="bands must be positive distances in mm that rise, as 2,5"):
        check_bands(wrong)


REGIONS = Regions({"both": (1, 2), "second": (2,)})


@pytest.mark.parametrize(
    "options",
    [ReadOptions(), ReadOptions(ignore_index=2), ReadOptions(regions=REGIONS), ReadOptions(sigmoid=True)],
    ids=["all", "ignored", "regions", "sigmoid"],
)
def test_bands_add_up_to_the_case(tmp_path, options):
    write_cohort(tmp_path, cases=2, affine=TURNED)
    for path in (tmp_path / "P").iterdir() if options.ignore_index is not None else ():
        values = np.asarray(nibabel.load(path).dataobj)[..., :2]  # so that the third label can only be left out
        save(path, (values / values.sum(-1, keepdims=True)).astype(np.float32), TURNED)
    outcome = evaluate(tmp_path / "P", tmp_path / "L", tmp_path / "out", options=options, bands=(2, 5))
    assert not outcome.failures
    parts, whole = list(outcome.facets.values()), outcome.evaluation
    assert len(parts) == 3
    for kind, names, tolerance in (
        ("statistics", ("count", "label_sum"), 0),
        ("statistics", ("confidence_sum",), 1e-12),
        ("overlap", ("predicted", "true", "both"), 0),
        ("scores", ("squared_error", "log_loss", "voxels"), 1e-12),
    ):
        for name in names:
            total = sum(getattr(getattr(part, kind), name) for part in parts)
            expected = getattr(getattr(whole, kind), name)
            torch.testing.assert_close(total, expected, rtol=tolerance, atol=tolerance, equal_nan=True)


@pytest.mark.parametrize("affine", [STRAIGHT, TURNED], ids=["straight", "turned"])
@pytest.mark.parametrize("sigmoid", [False, True])
def test_the_numbers_of_a_band_are_those_of_its_voxels(tmp_path, affine, sigmoid):
    write_cohort(tmp_path, cases=1, affine=affine)
    options = ReadOptions(sigmoid=sigmoid)
    outcome = evaluate(tmp_path / "P", tmp_path / "L", tmp_path / "out", options=options, bands=LIMITS)
    probabilities, labels = make_case(0)
    own = probabilities[..., 1] >= 0.5 if sigmoid else probabilities.argmax(-1) == 1
    codes = brute_force(own, ~own, (1.0, 1.0, 2.5), LIMITS)
    for band, name in enumerate(band_names(LIMITS)):
        p, y = (values[codes == band].astype(float) for values in (probabilities[..., 1], labels == 1))
        bins = np.minimum((p * 20).astype(int), 19)
        gaps = [abs(p[bins == b].mean() - y[bins == b].mean()) for b in np.unique(bins)]
        part = outcome.facets[f"bands/{name}"]
        column = part.classes.index("class 1")
        assert part.statistics.count[0, column].sum() == len(p)
        assert part.overlap.predicted[0, column] == own[codes == band].sum()
        assert part.case_metrics()["ace"][0, column].item() == pytest.approx(
            np.mean(gaps) if gaps else math.nan, nan_ok=True
        )


def test_an_unpredicted_class_is_in_the_last_band(tmp_path):
    labels = make_case(0)[1]
    chance = np.full(SHAPE, 0.25)
    save(tmp_path / "L" / "case_0.nii.gz", (labels == 1).astype(np.uint8))
    save(tmp_path / "P" / "case_0.nii.gz", np.stack([1 - chance, chance], -1).astype(np.float32))
    facets = evaluate(tmp_path / "P", tmp_path / "L", tmp_path / "out", bands=(2,)).facets
    assert {name: part.statistics.count[0].sum(1).tolist() for name, part in facets.items()} == {
        "bands/0-2mm": [0, 0], "bands/beyond-2mm": [labels.size, labels.size],
    }  # fmt: skip


def test_exact_probabilities_are_calibrated_in_every_band(tmp_path):
    """Labels are sampled from the probabilities: the ACE of 30 cases is that of chance, also far from the boundary.

    Around the true boundary, whose bands are selected by labels, it is many times as large.
    """
    generator = np.random.default_rng(1)
    around_truth = np.zeros((3, 3, 20))
    for i in range(30):
        field = gaussian_filter(generator.normal(size=(24, 24, 24)), 3)
        chance = (1 / (1 + np.exp(1 - 3 * field / field.std()))).astype(np.float32)
        labels = generator.random(chance.shape) < chance
        save(tmp_path / "P" / f"case_{i}.nii.gz", np.stack([1 - chance, chance], -1))
        save(tmp_path / "L" / f"case_{i}.nii.gz", labels.astype(np.uint8))
        codes = band_codes(labels, ~labels, (1.0, 1.0, 2.5), LIMITS)
        cells = np.minimum((chance * 20).astype(int), 19)
        for values, sums in zip((1, chance, labels), around_truth, strict=True):
            np.add.at(sums, (codes, cells), values)
    facets = evaluate(tmp_path / "P", tmp_path / "L", tmp_path / "out", bands=LIMITS).facets
    for band, name in enumerate(band_names(LIMITS)):
        pooled = facets[f"bands/{name}"].foreground().binned.pool("case")
        count, mean = pooled.count[0, 0], (pooled.confidence_sum / pooled.count)[0, 0]
        occupied = count > 0
        assert count.sum() > 2000
        chance_alone = (2 * mean * (1 - mean) / (math.pi * count)).sqrt()[occupied].mean()  # mean of |normal|
        assert ace(pooled).item() < 1.7 * chance_alone, name
        if band == 1:
            count, confidence, positives = around_truth[:, band][:, around_truth[0, band] > 0]
            assert np.abs((confidence - positives) / count).mean() > 5 * ace(pooled).item()


def test_bands_are_written_shown_read_by_other_commands_and_removed(tmp_path):
    write_cohort(tmp_path, cases=6)
    done = run(tmp_path, "--bands", "2,5")
    assert done.exit_code == 0, done.output
    assert "Bands around the predicted boundary" in done.output
    assert done.output.index("0-2mm") < done.output.index("2-5mm") < done.output.index("beyond-5mm")
    folders = [tmp_path / "out" / "bands" / name for name in ("0-2mm", "2-5mm", "beyond-5mm")]
    assert sorted((tmp_path / "out" / "bands").iterdir()) == folders
    assert len({Evaluation.load(folder / "evaluation.npz").classes for folder in folders}) == 1
    found = CliRunner().invoke(app, ["report", str(folders[0]), "--out", str(tmp_path / "band.html")])
    assert found.exit_code == 0, found.output
    assert run(tmp_path).exit_code == 0
    assert not (tmp_path / "out" / "bands").exists()


def test_bands_before_and_after_a_temperature_can_be_compared(tmp_path):
    """The decisions are the same, and so are the bands."""
    write_cohort(tmp_path, cases=6)
    fit_calibrator(tmp_path / "P", tmp_path / "L", tmp_path / "t.json", method="temperature")
    before = evaluate(tmp_path / "P", tmp_path / "L", tmp_path / "before", bands=LIMITS).facets
    calibrator = tmp_path / "t.json"
    after = evaluate(tmp_path / "P", tmp_path / "L", tmp_path / "after", bands=LIMITS, calibrator=calibrator).facets
    for name, part in before.items():
        assert (part.statistics.count.sum(2) == after[name].statistics.count.sum(2)).all()
        compared = compare({"before": part, "after": after[name]})
        assert compared.methods == ("before", "after")


def test_bands_through_a_spatial_calibrator_are_those_of_its_maps(tmp_path):
    """A spatial calibrator yields voxels along the axes of the grid, not in the order of the file."""
    write_cohort(tmp_path, cases=4, affine=TURNED)
    fit_calibrator(
        tmp_path / "P",
        tmp_path / "L",
        tmp_path / "c.json",
        method="local-temperature",
        settings={"dilations": (1,)},
        folds=0,
    )
    apply_calibrator(tmp_path / "c.json", tmp_path / "P", tmp_path / "maps")
    found = evaluate(tmp_path / "P", tmp_path / "L", tmp_path / "a", bands=LIMITS, calibrator=tmp_path / "c.json")
    expected = evaluate(tmp_path / "maps", tmp_path / "L", tmp_path / "b", bands=LIMITS)
    for name, part in expected.facets.items():
        for of in ("count", "label_sum"):
            values = getattr(found.facets[name].statistics, of).sum(2)
            torch.testing.assert_close(values, getattr(part.statistics, of).sum(2))


def test_files_without_the_size_of_a_voxel_are_told(tmp_path):
    for name in ("P", "L"):
        (tmp_path / name).mkdir()
    probabilities, labels = make_case(0)
    np.save(tmp_path / "P" / "case_0.npy", np.moveaxis(probabilities, -1, 0))
    np.save(tmp_path / "L" / "case_0.npy", labels)
    done = run(tmp_path, "--bands", "2")
    assert done.exit_code == 1
    assert "bands need files with a voxel size" in done.output
    assert "--bands must be numbers between commas" in run(tmp_path, "--bands", "near").output
