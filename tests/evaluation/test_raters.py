"""Several raters of the same cases, against what brute force on the arrays finds."""

import csv
import itertools
import json
import math
import shutil
import unicodedata
from pathlib import Path

import nibabel as nib
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from scipy.ndimage import gaussian_filter
from scipy.stats import norm
from typer.testing import CliRunner

import segcal
from segcal.cli import app
from segcal.evaluation import cohort
from segcal.evaluation.cohort import _rater_names
from segcal.evaluation.options import Options
from segcal.evaluation.rated import RaterSums, Votes
from segcal.evaluation.raters import read_rater_rows
from segcal.evaluation.voting import floor_errors, floor_sums, numbers_of_votes

SHAPE = (14, 12, 10)
RATERS = ("anna", "ben", "cem")
NUMBERS = ("value", "std", "low", "high", "number")  # columns of tables


def drawn(probabilities, rng):
    """Labels of each voxel from its own probabilities."""
    return (rng.random(SHAPE) > probabilities.cumsum(0)).sum(0).clip(max=len(probabilities) - 1).astype(np.uint8)


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    """Five cases of three classes, three raters whose labels are drawn from the probabilities; Cem missed one case."""
    folder, rng = tmp_path_factory.mktemp("raters"), np.random.default_rng(4)
    for name in ("maps", *RATERS):
        (folder / name).mkdir()
    cases = {}
    for i in range(5):
        fields = np.stack([8 * gaussian_filter(rng.normal(size=SHAPE), 2) * 2 for _ in range(3)])
        fields[0] += 1
        maps = (np.exp(fields) / np.exp(fields).sum(0)).astype(np.float32)
        raters = {rater: drawn(maps, rng) for rater in RATERS if (rater, i) != ("cem", 2)}
        cases[f"case_{i}"] = maps, raters
        np.save(folder / "maps" / f"case_{i}.npy", maps)
        for rater, labels in raters.items():
            np.save(folder / rater / f"case_{i}.npy", labels)
    return folder, cases


@pytest.fixture(scope="module")
def outcome(study):
    folder, _ = study
    return segcal.evaluate(folder / "maps", [folder / rater for rater in RATERS], folder / "out")


@pytest.fixture(scope="module")
def numbers(study, outcome):
    """By case, class and metric."""
    with (study[0] / "out" / "raters.csv").open() as file:
        return {(row["case"], row["class"], row["metric"]): float(row["value"]) for row in csv.DictReader(file)}


def by_hand(study):
    """Of each case and foreground class: decision, and the raters' masks."""
    for case, (maps, raters) in study[1].items():
        for c in (1, 2):
            masks = np.array([labels == c for labels in raters.values()])
            yield case, f"class {c}", maps[c], maps.argmax(0) == c, masks


def dice_of(one, other):
    return 2 * (one & other).sum() / (one.sum() + other.sum())


def iou_of(one, other):
    return (one & other).sum() / (one | other).sum() if (one | other).any() else 1.0


def test_each_rater_has_the_results_of_an_evaluation_against_that_rater_alone(study, outcome):
    folder, _ = study
    for rater in RATERS:
        alone = segcal.evaluate(folder / "maps", folder / rater, folder / f"alone-{rater}").evaluation
        own = outcome.facets[f"raters/{rater}"]
        assert own.cases == alone.cases
        for name in ("count", "confidence_sum", "label_sum"):
            assert (getattr(own.statistics, name) == getattr(alone.statistics, name)).all()
            assert (getattr(own.top_label, name) == getattr(alone.top_label, name)).all()
        for metric, values in alone.case_metrics().items():
            np.testing.assert_allclose(own.case_metrics()[metric], values, rtol=1e-9, err_msg=metric)
        loaded = segcal.Evaluation.load(folder / "out" / "raters" / rater / "evaluation.npz")
        assert loaded.cases == alone.cases


def test_the_evaluation_is_that_against_the_mean_of_the_raters(study, outcome):
    import torch

    for i, (case, (maps, raters)) in enumerate(study[1].items()):
        soft = np.mean([[labels == c for c in range(3)] for labels in raters.values()], 0)
        stats = segcal.bin_statistics(torch.from_numpy(maps)[None], torch.from_numpy(soft)[None], bins=20)
        assert outcome.evaluation.cases[i] == case
        np.testing.assert_allclose(outcome.evaluation.case_metrics()["ace"][i], segcal.ace(stats)[0], rtol=1e-6)
        np.testing.assert_allclose(outcome.evaluation.case_metrics()["ece"][i], segcal.ece(stats)[0], rtol=1e-6)


def test_dice_against_every_reference(study, numbers):
    for case, label, _, decided, masks in by_hand(study):
        each = [dice_of(decided, mask) for mask in masks]
        share = masks.mean(0)
        expected = {
            "raters": len(masks),
            "dice_each": np.mean(each),
            "dice_spread": np.std(each, ddof=1),
            "dice_between": np.mean([dice_of(a, b) for a, b in itertools.combinations(masks, 2)]),
            "dice_majority": dice_of(decided, share > 0.5),
        }
        for metric, value in expected.items():
            assert numbers[case, label, metric] == pytest.approx(value, rel=1e-9), metric


MASKS = {"a": [1, 1, 1, 1, 0, 0, 0, 0], "b": [0, 0, 1, 1, 1, 0, 0, 0], "c": [0] * 8, "d": [0] * 8}


@pytest.mark.parametrize(
    ("raters", "decision", "between", "dices"),
    [
        ("ab", [0, 1, 1, 0, 0, 0, 0, 0], 4 / 7, [2 / 3, 2 / 5]),  # 2 voxels in common of 4 + 3; 2 of 6, 1 of 5
        ("abc", [0, 1, 1, 0, 0, 0, 0, 0], 4 / 7 / 3, [2 / 3, 2 / 5, 0]),
        ("abcd", [0, 1, 1, 0, 0, 0, 0, 0], 4 / 7 / 5, [2 / 3, 2 / 5, 0, 0]),  # the pair of c and d does not count
        ("abc", [0] * 8, 4 / 7 / 3, [0, 0]),
        ("cd", [0] * 8, math.nan, []),
        ("cd", [0, 1, 1, 0, 0, 0, 0, 0], math.nan, [0, 0]),
        ("ac", [0] * 8, 0, [0]),
    ],
)
def test_dice_of_an_empty_mask_is_0_and_of_two_left_out_in_any_order(raters, decision, between, dices):
    values = np.array([np.subtract(1, decision), decision], np.float32)
    for order in itertools.permutations(raters):
        sums = RaterSums(order, Options(), threads=1)
        total = sums.slab(values, np.array([MASKS[rater] for rater in order], np.uint8), None).sums
        result = numbers_of_votes(sums.of_case(total)[2])
        spread = np.std(dices, ddof=1) if len(dices) > 1 else math.nan
        expected = {"dice_between": between, "dice_each": np.mean(dices) if dices else math.nan, "dice_spread": spread}
        for metric, value in expected.items():
            assert result[metric][1] == pytest.approx(value, abs=1e-12, nan_ok=True), (order, metric)


@given(st.data())
def test_numbers_of_votes_do_not_depend_on_the_order_of_raters(data):
    """Raters with random masks, some of them empty; voxels that one of them ignores count for none."""
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    number, classes = data.draw(st.integers(1, 5)), data.draw(st.integers(2, 3))
    values = rng.dirichlet(np.ones(classes), 40).T
    labels = rng.integers(0, classes, (number, 40)).astype(np.uint8)
    labels[np.array(data.draw(st.lists(st.booleans(), min_size=number, max_size=number)))] = 0
    if data.draw(st.booleans()):
        labels[rng.integers(number), :5] = 9

    def measure(order):
        sums = RaterSums([f"rater {i}" for i in order], Options(ignore_index=9), threads=1)
        total = sums.slab(values, labels[list(order)], None).sums
        mean, _, votes = sums.of_case(total)
        result = numbers_of_votes(votes) | floor_errors(floor_sums(votes, 20))
        result |= {name: getattr(mean, name) for name in ("bins", "overlap", "scores", "joint")}
        return result

    expected, result = measure(range(number)), measure(data.draw(st.permutations(range(number))))
    for metric, value in expected.items():
        np.testing.assert_allclose(result[metric], value, rtol=1e-9, atol=1e-9, err_msg=metric)


def test_results_do_not_depend_on_the_order_of_rater_folders(study, tmp_path):
    """One rater missed a case, and one found nothing in another."""
    folder, _ = study
    for rater in RATERS:
        shutil.copytree(folder / rater, tmp_path / rater)
    np.save(tmp_path / "ben" / "case_0.npy", np.zeros(SHAPE, np.uint8))
    tables = []
    for i, order in enumerate(itertools.permutations(RATERS)):
        segcal.evaluate(folder / "maps", [tmp_path / rater for rater in order], tmp_path / f"out-{i}")
        tables.append({})
        for name in ("cases.csv", "summary.csv", "raters.csv", "raters_summary.csv"):
            with (tmp_path / f"out-{i}" / name).open() as file:
                for row in csv.DictReader(file):
                    tables[i][name, *(text for key, text in row.items() if key not in NUMBERS)] = row["value"]
    for other in tables[1:]:
        assert other.keys() == tables[0].keys()
        for key, value in tables[0].items():
            assert float(other[key]) == pytest.approx(float(value), rel=1e-9, abs=1e-12, nan_ok=True), key


@pytest.mark.parametrize("order", [("anna", "ben"), ("ben", "anna")])
def test_a_dataset_json_beside_the_labels_of_any_rater_names_classes_and_the_ignored_label(study, tmp_path, order):
    folder, cases = study
    for rater in order:
        shutil.copytree(folder / rater, tmp_path / rater / "labels")
    hidden = cases["case_0"][1]["anna"].copy()
    hidden[:3] = 3
    np.save(tmp_path / "anna" / "labels" / "case_0.npy", hidden)
    described = {"labels": {"background": 0, "liver": 1, "tumor": 2, "ignore": 3}}
    (tmp_path / "anna" / "dataset.json").write_text(json.dumps(described))
    labels = [tmp_path / rater / "labels" for rater in order]
    result = segcal.evaluate(folder / "maps", labels, tmp_path / "out")
    assert not result.failures
    assert result.evaluation.classes == ("background", "liver", "tumor")
    assert result.evaluation.statistics.count[0, 0].sum() == (hidden != 3).sum()
    described["labels"]["tumor"], described["labels"]["liver"] = 1, 2
    (tmp_path / "ben" / "labels" / "dataset.json").write_text(json.dumps(described))
    with pytest.raises(segcal.ConfigError, match="raters must have the same class names and ignored label"):
        segcal.evaluate(folder / "maps", labels, tmp_path / "out")


def test_the_floor_is_the_error_of_the_others_mean(study, numbers):
    import torch

    for case, label, _, _, masks in by_hand(study):
        floors = []
        for r in range(len(masks)):
            others = torch.from_numpy(np.delete(masks, r, 0).mean(0))
            stats = segcal.bin_statistics(others[None, None], torch.from_numpy(masks[r : r + 1])[None], bins=20)
            floors.append(segcal.ace(stats).item())
        assert numbers[case, label, "ace_floor"] == pytest.approx(np.mean(floors), rel=1e-9)


def test_a_network_that_knows_the_probabilities_reaches_the_floor_and_an_overconfident_one_does_not(tmp_path):
    """Raters who agree but for a shift: their mean is nearly calibrated, and so is the network that has it."""
    rng = np.random.default_rng(0)
    for name in ("sure", "right", *(f"r{i}" for i in range(5))):
        (tmp_path / name).mkdir()
    where = np.broadcast_to(np.arange(60.0)[:, None, None], (60, 10, 10))
    for case in range(20):
        chance = norm.cdf((where - 30) / 4)  # a rater's boundary is drawn from a normal distribution
        np.save(tmp_path / "right" / f"{case}.npy", np.stack([1 - chance, chance]).astype(np.float32))
        sure = norm.cdf((where - 30) / 0.5)
        np.save(tmp_path / "sure" / f"{case}.npy", np.stack([1 - sure, sure]).astype(np.float32))
        for i in range(5):
            np.save(tmp_path / f"r{i}" / f"{case}.npy", (where > rng.normal(30, 4)).astype(np.uint8))
    rows = {}
    for network in ("right", "sure"):
        folders = [tmp_path / f"r{i}" for i in range(5)]
        segcal.evaluate(tmp_path / network, folders, tmp_path / f"out-{network}")
        rows[network] = {row.metric: row.value for row in read_rater_rows(tmp_path / f"out-{network}")}
    for error in ("ace", "ece"):
        floor = rows["right"][f"{error}_floor_pooled"]
        assert rows["right"][f"{error}_pooled"] < floor
        assert rows["sure"][f"{error}_floor_pooled"] == floor
    assert rows["sure"]["ece_pooled"] > 5 * rows["right"]["ece_pooled"]


def test_files_and_channels_hold_raters_as_well_as_folders(study, outcome, tmp_path):
    folder, cases = study
    for name in ("files", "channels"):
        (tmp_path / name).mkdir()
    for case, (_, raters) in cases.items():
        for rater, labels in zip(("rater1", "rater2", "rater3"), raters.values(), strict=False):
            np.save(tmp_path / "files" / f"{case}_{rater}.npy", labels)
        np.save(tmp_path / "channels" / f"{case}.npy", np.stack(list(raters.values())))
    for kind in ("files", "channels"):
        found = segcal.evaluate(folder / "maps", tmp_path / kind, tmp_path / f"out-{kind}", raters_from=kind)
        assert not found.failures
        assert (found.evaluation.statistics.label_sum == outcome.evaluation.statistics.label_sum).all()
        assert len(found.facets) == 3


FLAT = (16, 16)


@pytest.fixture(scope="module")
def flat(tmp_path_factory):
    """Two 2-D cases of two classes with the labels of two raters, and their evaluation from a folder of each rater.

    The number of raters is that of the classes, and the images are square: shapes alone tell little.
    """
    folder, rng = tmp_path_factory.mktemp("flat"), np.random.default_rng(5)
    for name in ("maps", "anna", "ben"):
        (folder / name).mkdir()
    cases = {}
    for case in ("case_1", "case_2"):
        p = rng.random(FLAT).astype(np.float32)
        masks = (rng.random((2, *FLAT)) < p).astype(np.uint8)
        cases[case] = np.stack([1 - p, p]), masks
        np.save(folder / "maps" / f"{case}.npy", cases[case][0])
        for rater, mask in zip(("anna", "ben"), masks, strict=True):
            np.save(folder / rater / f"{case}.npy", mask)
    result = segcal.evaluate(folder / "maps", [folder / "anna", folder / "ben"], folder / "out")
    return cases, result.evaluation


def write_nifti(path, values):
    nib.Nifti1Image(values, np.diag([1, 2, 3, 1])).to_filename(path.with_suffix(".nii.gz"))


def write_pages(path, values):
    import tifffile

    tifffile.imwrite(path.with_suffix(".tif"), np.ascontiguousarray(values), photometric="minisblack")


def write_npz(path, values):
    np.savez_compressed(path.with_suffix(".npz"), values)


WRITERS = {"npy": np.save, "npz": write_npz, "nifti": write_nifti, "pages": write_pages}
LAYOUTS = {  # of (channel, x, y)
    "channels first": lambda values: values,
    "channels last": lambda values: np.moveaxis(values, 0, -1),
    "flat volume": lambda values: np.moveaxis(values, 0, -1)[:, :, None],
    "flat array": lambda values: values[..., None],
    "picture": lambda values: values.transpose(0, 2, 1),  # (page, y, x)
}


@pytest.mark.parametrize(
    ("maps", "labels"),
    [
        (("npy", "channels first"), ("npy", "channels first")),
        (("npy", "channels first"), ("npz", "channels first")),
        (("npz", "channels first"), ("npy", "channels last")),
        (("npy", "flat array"), ("npy", "channels first")),
        (("npy", "channels first"), ("npy", "flat array")),
        (("nifti", "flat volume"), ("nifti", "flat volume")),
        (("nifti", "flat volume"), ("nifti", "channels last")),
        (("nifti", "flat volume"), ("npy", "channels first")),
        (("pages", "picture"), ("pages", "picture")),
        (("npy", "picture"), ("pages", "picture")),
        (("nifti", "flat volume"), ("pages", "picture")),
    ],
)
def test_raters_of_2d_images_can_be_channels(flat, tmp_path, maps, labels):
    if "pages" in (maps[0], labels[0]):
        pytest.importorskip("tifffile", reason="needs tifffile")
    cases, expected = flat
    for name, (form, layout), which in (("maps", maps, 0), ("labels", labels, 1)):
        (tmp_path / name).mkdir()
        for case, arrays in cases.items():
            WRITERS[form](tmp_path / name / case, LAYOUTS[layout](arrays[which]))
    options = segcal.ReadOptions(class_names=["background", "nodule"])
    result = segcal.evaluate(
        tmp_path / "maps", tmp_path / "labels", tmp_path / "out", raters_from="channels", options=options
    )
    assert not result.failures
    assert list(result.facets) == ["raters/rater 1", "raters/rater 2"]
    for name in ("count", "confidence_sum", "label_sum"):
        np.testing.assert_array_equal(getattr(result.evaluation.statistics, name), getattr(expected.statistics, name))


def test_colors_of_a_picture_can_be_the_masks_of_raters(tmp_path):
    rng = np.random.default_rng(6)
    p = rng.integers(0, 256, FLAT).astype(np.uint8)
    masks = rng.random((*FLAT, 3)) * 255 < p[..., None]
    for name, values in (("maps", p), ("labels", (masks * 255).astype(np.uint8))):
        (tmp_path / name).mkdir()
        Image.fromarray(values).save(tmp_path / name / "case.png")
    result = segcal.evaluate(tmp_path / "maps", tmp_path / "labels", tmp_path / "out", raters_from="channels")
    assert not result.failures
    for i, facet in enumerate(result.facets.values()):
        assert facet.statistics.label_sum.sum() == masks[..., i].sum()


def test_members_of_2d_images_with_raters_as_channels(flat, tmp_path):
    cases, expected = flat
    for name in ("maps", "more", "labels"):
        (tmp_path / name).mkdir()
        for case, arrays in cases.items():
            np.save(tmp_path / name / f"{case}.npy", arrays[name == "labels"])
    result = segcal.evaluate(
        tmp_path / "maps", tmp_path / "labels", tmp_path / "out", members=[tmp_path / "more"], raters_from="channels"
    )
    assert not result.failures
    np.testing.assert_array_equal(result.evaluation.statistics.label_sum, expected.statistics.label_sum)


def test_cubic_volumes_with_raters_on_the_last_axis(tmp_path):
    """As many raters as classes: read with the axes reversed, the last axes of both could be one of space."""
    rng = np.random.default_rng(7)
    p = rng.random((16, 16, 16)).astype(np.float32)
    masks = (rng.random((16, 16, 16, 2)) < p[..., None]).astype(np.uint8)
    for name, values in (("maps", np.stack([1 - p, p])), ("labels", masks)):
        (tmp_path / name).mkdir()
        np.save(tmp_path / name / "case.npy", values)
    result = segcal.evaluate(tmp_path / "maps", tmp_path / "labels", tmp_path / "out", raters_from="channels")
    assert not result.failures
    for i, facet in enumerate(result.facets.values()):
        assert facet.statistics.label_sum[0, 1].sum() == masks[..., i].sum()


@pytest.mark.parametrize(
    ("maps", "labels", "message"),
    [
        ((2, 9, 8), (9, 8), "labels must have an axis of raters, as arrays (rater, x, y)"),
        ((2, 9, 8, 7), (9, 8, 7), "labels are 9\N{MULTIPLICATION SIGN}8\N{MULTIPLICATION SIGN}7, probabilities 2"),
        ((2, 9, 8), (3, 9, 9), "Save a channel for each rater."),
        ((2, 9, 8), (1, 9, 8), "labels must have a channel for each rater; case.npy has one."),
        ((2, 4, 4), (4, 4, 4), "labels of several raters must have axes of different lengths"),
    ],
)
def test_labels_without_an_axis_of_raters_are_refused_with_the_layouts_that_are_read(tmp_path, maps, labels, message):
    for name, values in (("maps", np.full(maps, 0.5, np.float32)), ("labels", np.zeros(labels, np.uint8))):
        (tmp_path / name).mkdir()
        np.save(tmp_path / name / "case.npy", values)
    result = segcal.evaluate(tmp_path / "maps", tmp_path / "labels", tmp_path / "out", raters_from="channels")
    assert message in result.failures[0].message


def test_logits_regions_and_ignored_labels(study, tmp_path):
    _, cases = study
    (tmp_path / "logits").mkdir()
    for rater in RATERS[:2]:
        (tmp_path / rater).mkdir()
    masks = {}
    for case, (maps, raters) in cases.items():
        np.save(tmp_path / "logits" / f"{case}.npy", np.log(maps.astype(np.float64)))
        hidden = [raters[rater].copy() for rater in RATERS[:2]]
        hidden[0][:3], hidden[1][-2:] = 9, 9
        masks[case] = (hidden[0] != 9) & (hidden[1] != 9)
        for rater, labels in zip(RATERS[:2], hidden, strict=True):
            np.save(tmp_path / rater / f"{case}.npy", labels)
    regions = segcal.Regions({"any": (1, 2), "two": (2,)})
    options = segcal.ReadOptions(logits=True, ignore_index=9, regions=regions)
    found = segcal.evaluate(
        tmp_path / "logits", [tmp_path / rater for rater in RATERS[:2]], tmp_path / "out", options=options
    )
    assert not found.failures
    for i, (case, (maps, raters)) in enumerate(cases.items()):
        keep = masks[case]
        chance = maps[1:].astype(float).sum(0)[keep]
        soft = np.mean([(raters[rater] > 0)[keep] for rater in RATERS[:2]], 0)
        cells = np.minimum((chance * 20).astype(int), 19)
        gaps = [abs((chance[cells == b] - soft[cells == b]).mean()) for b in np.unique(cells)]
        assert found.evaluation.case_metrics()["ace"][i, 0].item() == pytest.approx(np.mean(gaps), rel=1e-4)


def test_it_goes_on_where_it_was_stopped_and_notices_what_is_spoilt(study, tmp_path, monkeypatch):
    folder, _ = study
    labels = [folder / rater for rater in RATERS]
    segcal.evaluate(folder / "maps", labels, tmp_path / "out")
    before = (tmp_path / "out" / "raters.csv").read_bytes()
    read, original = [], cohort.measure_case
    monkeypatch.setattr(cohort, "measure_case", lambda f, o, **k: read.append(f.name) or original(f, o, **k))
    segcal.evaluate(folder / "maps", labels, tmp_path / "out")
    assert read == []
    spoilt = sorted((tmp_path / "out" / ".parts").glob("*.votes.npz"))[0]
    spoilt.write_bytes(spoilt.read_bytes()[:100])
    segcal.evaluate(folder / "maps", labels, tmp_path / "out")
    assert len(read) == 1
    assert (tmp_path / "out" / "raters.csv").read_bytes() == before
    segcal.evaluate(folder / "maps", labels[0], tmp_path / "out")  # one rater: what several told goes
    assert not (tmp_path / "out" / "raters").exists()
    assert not (tmp_path / "out" / "raters.csv").exists()


def test_two_workers_find_what_one_finds(study, outcome, tmp_path):
    folder, _ = study
    segcal.evaluate(folder / "maps", [folder / rater for rater in RATERS], tmp_path / "out", workers=2)
    for name in ("raters.csv", "cases.csv", "raters_summary.csv"):
        assert (tmp_path / "out" / name).read_bytes() == (folder / "out" / name).read_bytes()


def test_the_command_shows_a_table(study, tmp_path):
    folder, _ = study
    raters = [str(folder / rater) for rater in RATERS]
    found = CliRunner().invoke(app, ["evaluate", str(folder / "maps"), *raters, "--out", str(tmp_path / "out")])
    assert found.exit_code == 0, found.output
    assert "rater floor" in found.output
    assert "DSC to majority" in found.output


LONG = "u" * 200
DEEP = "/".join("abcdefgh")


@pytest.mark.parametrize(
    ("folders", "names"),
    [
        (["a/x/labels", "b/x/labels"], ["a-x-labels", "b-x-labels"]),
        (["a/labels", "b/labels", "ben"], ["a-labels", "b-labels", "{root}-ben"]),
        (["p/Anna", "q/anna"], ["p-Anna", "q-anna"]),
        (["p/Am\u00e9lie", "q/Ame\u0301lie"], ["p-Am\u00e9lie", "q-Ame\u0301lie"]),
        ([f"p/{DEEP}", f"q/{DEEP}"], ["p-a-b-c-d-e-f-g-h", "q-a-b-c-d-e-f-g-h"]),
    ],
)
def test_raters_have_different_names_whatever_their_folders_are_called(study, tmp_path, folders, names):
    folder, cases = study
    for rater, place in zip(RATERS, folders, strict=False):
        shutil.copytree(folder / rater, tmp_path / place)
    result = segcal.evaluate(folder / "maps", [tmp_path / place for place in folders], tmp_path / "out")
    names = [name.format(root=tmp_path.name) for name in names]
    assert sorted(result.facets) == sorted(f"raters/{name}" for name in names)
    assert {path.name for path in (tmp_path / "out" / "raters").iterdir()} == set(names)
    for rater, name in zip(RATERS, names, strict=False):
        assert result.facets[f"raters/{name}"].cases == tuple(case for case in cases if rater in cases[case][1])
    maps, raters = cases["case_0"]
    cells = np.minimum((maps[1] * 20).astype(int), 19)
    soft = np.mean([raters[rater] == 1 for rater in RATERS[: len(folders)]], 0)
    gaps = [abs((maps[1].astype(float) - soft)[cells == b].mean()) for b in np.unique(cells)]
    assert result.evaluation.case_metrics()["ace"][0, 1].item() == pytest.approx(np.mean(gaps), rel=1e-6)


@pytest.mark.parametrize(
    ("folders", "names"),
    [
        (["x/rater: 1", "y/rater: 1"], ["x-rater_ 1", "y-rater_ 1"]),
        (["rater: 1", "rater? 1"], ["rater_ 1-1", "rater_ 1-2"]),
        (["Dr.", "Dr "], ["Dr_-1", "Dr_-2"]),
        (["a-b/c", "a/b-c", "a/c", "c"], ["c-1", "b-c-2", "c-3", "c-4"]),
        ([f"p/{LONG}/{LONG}/labels", f"q/{LONG}/{LONG}/labels"], ["labels-1", "labels-2"]),  # 255 bytes at most
    ],
)
def test_names_of_raters_can_be_those_of_folders(tmp_path, folders, names):
    assert _rater_names([tmp_path / folder for folder in folders]) == names


@given(st.lists(st.lists(st.sampled_from(["a", "A", "b", "a-b", "a:", "a?", "\u00e9", "e\u0301", ".a", "a.", LONG]),
                         min_size=1, max_size=4).map("/".join), min_size=2, max_size=5, unique=True))  # fmt: skip
def test_names_of_raters_are_different_on_every_file_system(folders):
    names = _rater_names([Path("/", folder) for folder in folders])
    assert len({unicodedata.normalize("NFC", name.casefold()) for name in names}) == len(folders)
    for name in names:
        assert len(name.encode()) <= 255
        assert not set(name) & set('<>:"/\\|?*')
        assert name[-1] not in ". "


def test_one_folder_under_two_paths_is_one_rater_and_is_refused(study, tmp_path, monkeypatch):
    folder, _ = study
    (tmp_path / "link").symlink_to(folder / "anna", target_is_directory=True)
    monkeypatch.chdir(folder / "anna")
    for again in (".", "../anna/", "../ben/../anna", tmp_path / "link"):
        with pytest.raises(segcal.ConfigError, match="anna came twice"):
            segcal.evaluate(folder / "maps", [folder / "anna", again], tmp_path / "out")
    with monkeypatch.context() as patch:  # of a file system that does not tell upper from lower case
        (tmp_path / "Ben").mkdir()
        (tmp_path / "ben").mkdir(exist_ok=True)
        patch.setattr(Path, "samefile", lambda self, other: str(self).lower() == str(other).lower())
        for arguments in (
            (folder / "maps", [tmp_path / "Ben", tmp_path / "ben"], ()),
            (tmp_path / "Ben", [folder / "anna"], [tmp_path / "ben"]),
        ):
            with pytest.raises(segcal.ConfigError, match="ben came twice"):
                segcal.evaluate(*arguments[:2], tmp_path / "out", members=arguments[2])
    result = segcal.evaluate("../maps", [".", "../ben/"], tmp_path / "out")
    assert list(result.facets) == ["raters/anna", "raters/ben"]


def test_links_of_one_name_to_different_folders_are_different_raters(study, tmp_path):
    folder, _ = study
    for rater in RATERS[:2]:
        (tmp_path / rater).mkdir()
        (tmp_path / rater / "labels").symlink_to(folder / rater, target_is_directory=True)
    labels = [tmp_path / rater / "labels" for rater in RATERS[:2]]
    assert len(segcal.evaluate(folder / "maps", labels, tmp_path / "out").facets) == 2


def test_every_file_of_a_case_has_its_stamp(study, tmp_path):
    """Prediction and label maps of all raters have the same name, in folders of the same names."""
    folder, _ = study
    shutil.copytree(folder / "anna", tmp_path / "a" / "x" / "labels")
    shutil.copytree(folder / "ben", tmp_path / "b" / "x" / "labels")
    labels = [tmp_path / rater / "x" / "labels" for rater in "ab"]
    result = segcal.evaluate(folder / "maps", labels, tmp_path / "out").evaluation
    assert list(result.provenance["files"]["case_0"]) == ["case_0.npy", "labels/case_0.npy", "x/labels/case_0.npy"]


@pytest.mark.parametrize(
    ("labels", "options", "message"),
    [
        (["anna", "anna"], {}, "came twice"),
        (["anna", "ben"], {"raters_from": "files"}, "one folder"),
        (["anna"], {"raters_from": "files"}, "case_1_rater1.nii.gz"),
        (["anna"], {"raters_from": "moon"}, "'folders', 'files', 'channels'"),
        ([], {}, "none came"),
    ],
)
def test_what_makes_no_sense_is_refused(study, tmp_path, labels, options, message):
    folder, _ = study
    with pytest.raises(segcal.errors.SegcalError, match=message):
        segcal.evaluate(folder / "maps", [folder / rater for rater in labels], tmp_path / "out", **options)


def test_raters_on_other_grids_fail_alone(tmp_path):
    maps = np.full((2, 4, 5, 6), 0.5, np.float32)
    for name in ("maps", "a", "b"):
        (tmp_path / name).mkdir()
    for case in ("one", "two"):
        np.save(tmp_path / "maps" / f"{case}.npy", maps)
        np.save(tmp_path / "a" / f"{case}.npy", np.zeros((4, 5, 6), np.uint8))
        np.save(tmp_path / "b" / f"{case}.npy", np.zeros((4, 5, 6) if case == "one" else (6, 5, 4), np.uint8))
    found = segcal.evaluate(tmp_path / "maps", [tmp_path / "a", tmp_path / "b"], tmp_path / "out")
    assert found.evaluation.cases == ("one",)
    assert "rater b" in found.failures[0].message


def test_nifti_raters_with_a_calibrator_and_members(study, tmp_path):
    _, cases = study
    for name in ("maps", "more", *RATERS[:2]):
        (tmp_path / name).mkdir()
    for case, (maps, raters) in cases.items():
        for name in ("maps", "more"):
            nib.Nifti1Image(np.moveaxis(maps, 0, 3), np.diag([1, 2, 3, 1])).to_filename(tmp_path / name / f"{case}.nii")
        for rater in RATERS[:2]:
            nib.Nifti1Image(raters[rater], np.diag([1, 2, 3, 1])).to_filename(tmp_path / rater / f"{case}.nii.gz")
    labels = [tmp_path / rater for rater in RATERS[:2]]
    segcal.fit_calibrator(tmp_path / "maps", labels[0], tmp_path / "t.json", method="temperature")
    one = segcal.evaluate(tmp_path / "maps", labels, tmp_path / "one", calibrator=tmp_path / "t.json")
    alone = segcal.evaluate(tmp_path / "maps", labels[1], tmp_path / "alone", calibrator=tmp_path / "t.json")
    assert (one.facets["raters/ben"].statistics.label_sum == alone.evaluation.statistics.label_sum).all()
    several = segcal.evaluate(tmp_path / "maps", labels, tmp_path / "two", members=[tmp_path / "more"])
    plain = segcal.evaluate(tmp_path / "maps", labels, tmp_path / "three")
    assert (several.evaluation.statistics.label_sum == plain.evaluation.statistics.label_sum).all()


def test_votes_are_read_as_written(tmp_path):
    votes = Votes(("a", "b"), 1, np.array([0, 0]), np.array([0, 3]), np.ones((2, 2)))
    votes.save(tmp_path / "v.npz")
    again = Votes.load(tmp_path / "v.npz")
    assert (again.raters, again.classes) == (votes.raters, votes.classes)
    for name in ("place", "pattern", "voxels"):
        np.testing.assert_array_equal(getattr(again, name), getattr(votes, name))
    shutil.copy(tmp_path / "v.npz", tmp_path / "w.npz")
    (tmp_path / "w.npz").write_bytes((tmp_path / "v.npz").read_bytes()[:-50])
    with pytest.raises(segcal.errors.SegcalError):
        Votes.load(tmp_path / "w.npz")


def test_the_floor_of_chance_knows_how_many_raters_there_are(study, outcome):
    """Labels of the study are drawn voxel by voxel: the error of the true probabilities is that of chance."""
    from segcal.comparison.comparison import floors

    folder, _ = study
    alone = segcal.evaluate(folder / "maps", folder / "anna", folder / "alone-floor").evaluation
    assert (outcome.evaluation.raters, alone.raters) == (3, 1)
    for evaluation in (outcome.evaluation.foreground(), alone.foreground()):
        found = evaluation.case_metrics()["ace"].nanmean().item()
        assert floors(evaluation)["macro", None, "ace"] == pytest.approx(found, rel=0.2)


@pytest.mark.parametrize("kind", ["folders", "files"])
def test_raters_of_pictures(tmp_path, kind):
    """A gray picture is the probability of one class; raters' masks hold 0 and 255."""
    rng = np.random.default_rng(3)
    (tmp_path / "maps").mkdir()
    chance = gaussian_filter(rng.random((40, 50)), 3)
    chance = ((chance - chance.min()) / np.ptp(chance) * 65535).astype(np.uint16)
    Image.fromarray(chance).save(tmp_path / "maps" / "nodule.png")
    masks = [rng.random(chance.shape) * 65535 < chance for _ in range(3)]
    folders = []
    for i, mask in enumerate(masks, 1):
        name = f"r{i}/nodule.png" if kind == "folders" else f"all/nodule_rater{i}.png"
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        Image.fromarray((mask * 255).astype(np.uint8)).save(path)
        folders = [*folders, path.parent] if kind == "folders" else [path.parent]
    found = segcal.evaluate(tmp_path / "maps", folders, tmp_path / "out", raters_from=kind)
    assert not found.failures
    p, soft = chance / 65535, np.mean(masks, 0)
    cells = np.minimum((p * 20).astype(int), 19)
    expected = sum(abs((p[cells == b] - soft[cells == b]).sum()) for b in range(20)) / p.size
    assert found.evaluation.case_metrics()["ece"].item() == pytest.approx(expected, rel=1e-4)
    assert len(found.facets) == 3


@pytest.mark.parametrize("options", [{}, {"logits": True}, {"regions": segcal.Regions({"any": (1, 2)})}])
def test_raters_who_agree_on_everything(study, tmp_path, options):
    _, cases = study
    for name in ("maps", "a", "b"):
        (tmp_path / name).mkdir()
    for case, (maps, raters) in list(cases.items())[:2]:
        np.save(tmp_path / "maps" / f"{case}.npy", np.log(maps) if "logits" in options else maps)
        for name in ("a", "b"):
            np.save(tmp_path / name / f"{case}.npy", raters["anna"])
    reading = segcal.ReadOptions(**options)
    found = segcal.evaluate(tmp_path / "maps", [tmp_path / "a", tmp_path / "b"], tmp_path / "out", options=reading)
    alone = segcal.evaluate(tmp_path / "maps", tmp_path / "a", tmp_path / "alone", options=reading).evaluation
    assert not found.failures
    assert (found.evaluation.statistics.label_sum == alone.statistics.label_sum).all()
    assert all(math.isnan(row.low) and math.isnan(row.high) for row in read_rater_rows(tmp_path / "out"))  # 2 patients
    rows = {row.metric: row.value for row in read_rater_rows(tmp_path / "out")}
    assert (rows["dice_between"], rows["ace_floor"], rows["ace_spread"]) == (1, 0, 0)
    assert rows["dice_each"] == pytest.approx(rows["dice_majority"])
