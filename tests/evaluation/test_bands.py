"""Bands around the boundaries of classes: distances by brute force, sums that add up to those of the case."""

import csv
import math

import nibabel
import numpy as np
import pytest
from cohorts import SHAPE, make_case, run, save, write_cohort
from typer.testing import CliRunner

from segcal import ConfigError, Evaluation, ReadOptions, Regions, evaluate
from segcal.cli import app
from segcal.evaluation.band_tables import band_rows, read_bands, side_of
from segcal.evaluation.bands import band_codes, check_bands

LIMITS = (2.0, 5.0)
TURNED = np.array([[-1.0, 0, 0, 3], [0, 0, 2.5, 1], [0, 1.0, 0, 2], [0, 0, 0, 1]])


def brute_force(of_class, other, spacing, limits):
    """The band of each voxel, from the distances to all voxels of the other side."""
    here = np.argwhere(np.ones(of_class.shape)) * spacing
    codes = []
    for place, inside in zip(here, of_class.ravel(), strict=True):
        there = np.argwhere(other if inside else of_class) * spacing
        distance = np.sqrt(((there - place) ** 2).sum(1)).min() if len(there) else math.inf
        band = sum(distance > limit for limit in limits)
        codes.append(band + (0 if inside else len(limits) + 1))
    return np.array(codes).reshape(of_class.shape)


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
    assert band_codes(own, ~own, (1.0, 1.0), LIMITS).tolist() == [[1, 1, 0, 0, 3, 3, 4, 4, 4]]


def test_without_a_boundary_all_voxels_are_far_on_their_side():
    nothing = np.zeros((3, 3, 3), bool)
    assert (band_codes(nothing, ~nothing, (1, 1, 1), LIMITS) == 5).all()
    assert (band_codes(~nothing, nothing, (1, 1, 1), LIMITS) == 2).all()


def test_far_sides_that_do_not_come_near_have_no_near_band():
    own = np.zeros((40, 3, 3), bool)
    own[0, 0, 0] = True
    other = np.zeros_like(own)
    other[30:] = True  # between them nothing counts
    codes = band_codes(own, other, (1, 1, 1), LIMITS)
    assert codes[0, 0, 0] == 2
    assert (codes[30:] == 5).all()


@pytest.mark.parametrize("wrong", [[], [5, 2], [0, 2], [2, 2], ["two"], [math.inf]])
def test_bands_that_mean_nothing_are_refused(wrong):
    with pytest.raises(ConfigError, match="bands must be positive distances in mm that rise, as 2,5"):
        check_bands(wrong)


def together(facets, side):
    """Sums of all bands of a side, or of both sides."""
    parts = [part for name, part in facets.items() if (side_of(name)[1] == "both") == (side == "both")]
    return [
        sum(getattr(part.statistics, name) for part in parts) for name in ("count", "label_sum", "confidence_sum")
    ] + [sum(getattr(part.overlap, name) for part in parts) for name in ("predicted", "true", "both")] + [
        sum(getattr(part.scores, name) for part in parts) for name in ("squared_error", "log_loss", "voxels")
    ]  # fmt: skip


REGIONS = Regions({"both": (1, 2), "second": (2,)})


@pytest.mark.parametrize(
    "options",
    [ReadOptions(), ReadOptions(ignore_index=2), ReadOptions(regions=REGIONS)],
    ids=["all", "ignored", "regions"],
)
@pytest.mark.parametrize("side", ["both", "sides"])
def test_bands_add_up_to_the_case(tmp_path, options, side):
    write_cohort(tmp_path, cases=2, affine=TURNED)
    if options.ignore_index is not None:  # two channels, so that the third label can only be left out
        for path in (tmp_path / "P").iterdir():
            values = np.asarray(nibabel.load(path).dataobj)[..., :2]
            save(path, (values / values.sum(-1, keepdims=True)).astype(np.float32), TURNED)
    outcome = evaluate(tmp_path / "P", tmp_path / "L", tmp_path / "out", options=options, bands=(2, 5))
    whole = outcome.evaluation
    count, label, confidence, *others = together(outcome.facets, side)
    assert (count == whole.statistics.count).all()
    assert (label == whole.statistics.label_sum).all()
    assert confidence.numpy() == pytest.approx(whole.statistics.confidence_sum.numpy(), abs=1e-9)
    for name, sums in zip(("predicted", "true", "both"), others[:3], strict=True):
        assert (sums == getattr(whole.overlap, name)).all()
    for name, sums in zip(("squared_error", "log_loss", "voxels"), others[3:], strict=True):
        assert sums.numpy() == pytest.approx(getattr(whole.scores, name).numpy())
    inside = {n: part for n, part in outcome.facets.items() if side_of(n)[1] == "inside"}
    assert all((part.statistics.label_sum == part.statistics.count).all() for part in inside.values())


def test_the_numbers_of_a_band_are_those_of_its_voxels(tmp_path):
    write_cohort(tmp_path, cases=1, affine=TURNED)
    outcome = evaluate(tmp_path / "P", tmp_path / "L", tmp_path / "out", bands=(2, 5))
    probabilities, labels = make_case(0)
    own = labels == 1
    here = np.isin(brute_force(own, ~own, (1.0, 1.0, 2.5), LIMITS), (0, 3))  # within 2 mm, both sides
    (row,) = [r for r in band_rows(outcome.facets) if (r.band, r.side, r.class_name) == ("0-2mm", "both", "class 1")]
    assert row.voxels == here.sum()
    assert row.confidence == pytest.approx(probabilities[..., 1][here].mean(), rel=1e-6)
    assert row.frequency == pytest.approx(own[here].mean())
    bins = np.minimum((probabilities[..., 1][here].astype(np.float64) * 20).astype(int), 19)
    gaps = [
        abs(probabilities[..., 1][here][bins == b].mean(dtype=np.float64) - own[here][bins == b].mean())
        for b in range(20)
        if (bins == b).any()
    ]
    assert row.ace == pytest.approx(np.mean(gaps))
    assert row.macro_ace == pytest.approx(np.mean(gaps))  # one case
    assert row.mce == pytest.approx(max(gaps))


def test_of_two_classes_each_is_the_other_ones_outside(tmp_path):
    probabilities, labels = make_case(3, classes=2)
    save(tmp_path / "P" / "case_0.nii.gz", probabilities)
    save(tmp_path / "L" / "case_0.nii.gz", labels)
    outcome = evaluate(tmp_path / "P", tmp_path / "L", tmp_path / "out", bands=(2, 5), background=True)
    voxels = {(r.class_name, r.side, r.band): r.voxels for r in band_rows(outcome.facets, background=True)}
    for c in (0, 1):
        own = labels == c
        codes = brute_force(own, ~own, (1.0, 1.0, 2.5), LIMITS)
        for code, (side, band) in enumerate(
            (s, b) for s in ("inside", "outside") for b in ("0-2mm", "2-5mm", "beyond-5mm")
        ):
            assert voxels[f"class {c}", side, band] == (codes == code).sum()


def test_an_absent_class_is_far_outside(tmp_path):
    labels = np.zeros(SHAPE, np.uint8)
    save(tmp_path / "L" / "case_0.nii.gz", labels)
    save(tmp_path / "P" / "case_0.nii.gz", np.stack([1 - labels * 0.5 - 0.25, labels + 0.25], -1).astype(np.float32))
    outcome = evaluate(tmp_path / "P", tmp_path / "L", tmp_path / "out", bands=(2,))
    voxels = {(r.side, r.band): r.voxels for r in band_rows(outcome.facets)}
    assert voxels == {
        ("both", "0-2mm"): 0, ("both", "beyond-2mm"): labels.size, ("inside", "0-2mm"): 0,
        ("inside", "beyond-2mm"): 0, ("outside", "0-2mm"): 0, ("outside", "beyond-2mm"): labels.size,
    }  # fmt: skip


def test_files_are_written_read_compared_shown_and_removed(tmp_path):
    write_cohort(tmp_path, cases=6)
    done = run(tmp_path, "--bands", "2,5")
    assert done.exit_code == 0, done.output
    assert "Bands around the true boundary" in done.output
    with (tmp_path / "out" / "bands.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 9 * 2  # bands and classes
    found = read_bands(tmp_path / "out")
    assert list(found)[:3] == ["bands/0-2mm", "bands/2-5mm", "bands/beyond-5mm"]
    near, far = (Evaluation.load(tmp_path / "out" / "bands" / b / "evaluation.npz") for b in ("0-2mm", "2-5mm"))
    assert near.classes == far.classes
    arguments = ["report", str(tmp_path / "out"), "--out", str(tmp_path / "r.html"), "--bands"]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    assert '<a href="#bands">Boundary bands</a>' in (tmp_path / "r.html").read_text()
    arguments = ["report", str(tmp_path / "out" / "bands" / "0-2mm"), "--out", str(tmp_path / "band.html")]
    assert CliRunner().invoke(app, arguments).exit_code == 0
    assert run(tmp_path).exit_code == 0
    assert not (tmp_path / "out" / "bands").exists()
    assert not (tmp_path / "out" / "bands.csv").exists()
    done = CliRunner().invoke(app, ["report", str(tmp_path / "out"), "--out", str(tmp_path / "r.html"), "--bands"])
    assert done.exit_code == 2
    assert "must hold bands, as `segcal evaluate --bands 2,5` writes them" in done.output


def test_files_without_the_size_of_a_voxel_are_told(tmp_path):
    for name in ("P", "L"):
        (tmp_path / name).mkdir()
    probabilities, labels = make_case(0)
    np.save(tmp_path / "P" / "case_0.npy", np.moveaxis(probabilities, -1, 0))
    np.save(tmp_path / "L" / "case_0.npy", labels)
    done = run(tmp_path, "--bands", "2")
    assert done.exit_code == 1
    assert "bands need files that tell the size of a voxel" in done.output
    assert "--bands must be numbers between commas" in run(tmp_path, "--bands", "near").output
