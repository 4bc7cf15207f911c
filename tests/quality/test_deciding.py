"""`segcal decide` on folders of real files: rules by brute force, every layout, resuming, headers kept."""

import csv
import json

import nibabel
import numpy as np
import pytest
from scipy.special import expit, log_softmax, logit
from typer.testing import CliRunner

import segcal.quality.deciding as deciding
from segcal import ConfigError, ReadOptions, Regions, ShapeError, apply_calibrator, decide, evaluate, fit_calibrator
from segcal.calibrators import Temperature
from segcal.cli import app
from segcal.evaluation import deciding as of_a_case
from segcal.evaluation import unlabelled
from segcal.evaluation.options import Options
from segcal.evaluation.rules import Cuts, choose_classes, choose_masks
from segcal.quality.fitting import Quality
from segcal.quality.promises import ARRAYS, Reference
from segcal.quality.risk import Guarantee, Learned
from segcal.quality.summaries import NAMES

SHAPE = (7, 6, 5)
BINS = 1200
AFFINE = np.array([[-1.0, 0, 0, 3], [0, 0, 2.0, -4], [0, 1.5, 0, 5], [0, 0, 0, 1]])  # axes flipped and exchanged


def draw(seed, classes=3, shape=SHAPE):
    """Probabilities (x, y, z, class), and labels drawn from them."""
    generator = np.random.default_rng(seed)
    powers = np.exp(2 * generator.normal(size=(*shape, classes)))
    p = (powers / powers.sum(-1, keepdims=True)).astype(np.float32)
    labels = (generator.random((*shape, 1)) > p.cumsum(-1)).sum(-1).clip(max=classes - 1).astype(np.uint8)
    return p, labels


def save(path, array, affine=AFFINE):
    path.parent.mkdir(exist_ok=True, parents=True)
    nibabel.save(nibabel.Nifti1Image(array, affine), path)


def load(path):
    return np.asarray(nibabel.load(path).dataobj)


def table(folder):
    with (folder / "decisions.csv").open() as file:
        return list(csv.DictReader(file))


def decide_at(threshold, p):
    """The labels of a threshold: the most probable class of those that reach it, or background."""
    wide = p.astype(np.float64)
    reached = np.where(wide[..., 1:] >= threshold, wide[..., 1:], -1)
    return np.where(reached.max(-1) >= 0, 1 + reached.argmax(-1), 0)


@pytest.fixture
def folder(tmp_path):
    """Four cases of three classes as .nii.gz."""
    for i in range(4):
        p, labels = draw(i)
        save(tmp_path / "maps" / f"case_{i}.nii.gz", p)
        save(tmp_path / "truth" / f"case_{i}.nii.gz", labels)
    return tmp_path


def run(folder, *options, rule="argmax", maps="maps", out="out"):
    arguments = ["decide", str(folder / maps), "--out", str(folder / out), "--rule", rule]
    return CliRunner().invoke(app, [*arguments, *options])


def test_the_most_probable_class_is_that_of_numpy(folder):
    decided = decide(folder / "maps", folder / "out", rule="argmax")
    assert [path.name for path in decided.paths] == [f"case_{i}.nii.gz" for i in range(4)]
    for i in range(4):
        found = load(folder / "out" / f"case_{i}.nii.gz")
        assert found.dtype == np.uint8
        np.testing.assert_array_equal(found, draw(i)[0].argmax(-1))


def test_the_dice_of_argmax_is_that_of_evaluate(folder):
    decide(folder / "maps", folder / "out", rule="argmax")
    dice = evaluate(folder / "maps", folder / "truth", folder / "results").evaluation.case_metrics()["dice"]
    promised = {(row["case"], row["class"]): float(row["expected_dice"]) for row in table(folder / "out")}
    metrics = evaluate(folder / "maps", folder / "truth", folder / "results").evaluation.decision_metrics()
    for i in range(4):
        found, truth = load(folder / "out" / f"case_{i}.nii.gz"), draw(i)[1]
        for c in (1, 2):
            by_hand = 2 * ((found == c) & (truth == c)).sum() / ((found == c).sum() + (truth == c).sum())
            assert dice[i, c].item() == pytest.approx(by_hand)
            assert promised[f"case_{i}", f"class {c}"] == pytest.approx(metrics["expected_dice"][i, c].item())


def test_the_default_rule_is_the_most_probable_class_or_a_half_where_classes_overlap(folder):
    done = CliRunner().invoke(app, ["decide", str(folder / "maps"), "--out", str(folder / "out")])
    assert done.exit_code == 0, done.output
    np.testing.assert_array_equal(load(folder / "out" / "case_0.nii.gz"), draw(0)[0].argmax(-1))
    decide(folder / "maps", folder / "overlapping", options=ReadOptions(sigmoid=True))
    np.testing.assert_array_equal(load(folder / "overlapping" / "case_0.nii.gz"), draw(0)[0] >= 0.5)
    decide(folder / "maps", folder / "regions", options=ReadOptions(regions=Regions({"all": (1, 2), "core": (2,)})))
    p = draw(0)[0]
    expected = np.stack([p[..., 1] + p[..., 2] >= 0.5, p[..., 2] >= 0.5], -1)
    np.testing.assert_array_equal(load(folder / "regions" / "case_0.nii.gz"), expected)


def test_a_threshold_gives_a_voxel_to_the_most_probable_class_that_reaches_it(folder):
    decide(folder / "maps", folder / "out", rule="threshold=0.3")
    rows = {(row["case"], row["class"]): row for row in table(folder / "out")}
    for i in range(4):
        p = draw(i)[0]
        found = load(folder / "out" / f"case_{i}.nii.gz")
        np.testing.assert_array_equal(found, decide_at(0.3, p))
        assert (found != p.argmax(-1)).any()
        for c in (1, 2):
            row, mask = rows[f"case_{i}", f"class {c}"], found == c
            assert float(row["threshold"]) == 0.3
            assert int(row["voxels"]) == mask.sum()
            assert float(row["volume_ml"]) == pytest.approx(mask.sum() * 0.003)  # 1 x 2 x 1.5 mm
            wide = p[..., c].astype(np.float64)
            expected_dice = 2 * wide[mask].sum() / (mask.sum() + wide.sum())
            assert float(row["expected_dice"]) == pytest.approx(expected_dice, rel=1e-6)


def test_a_class_that_reaches_no_threshold_is_empty(tmp_path):
    p = np.full((2, 4, 4, 4), 0.0005, np.float32)
    p[0] = 1 - p[1]
    (tmp_path / "maps").mkdir()
    np.save(tmp_path / "maps" / "a.npy", p)
    decided = decide(tmp_path / "maps", tmp_path / "out", rule="threshold=0.3")
    assert not np.load(tmp_path / "out" / "a.npy").any()
    (row,) = decided.decisions
    assert (row.voxels, row.volume_ml, row.expected_dice) == (0, None, 0.0)
    assert table(tmp_path / "out")[0]["volume_ml"] == ""


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_the_compiled_decision_is_that_of_numpy(dtype):
    generator = np.random.default_rng(0)
    p = generator.dirichlet(np.ones(5), size=70_001).T.astype(dtype)
    p[:, ::7] = np.rint(p[:, ::7] * 20) / 20  # many on edges and many ties
    cuts = Cuts(np.array([120.0, 240, np.inf, 0]), np.array([1.0, 2, 1, 0.5]))
    found = choose_classes(np.ascontiguousarray(p), cuts, BINS, threads=2)
    wide = p[1:].astype(np.float64)
    wanted = wide * BINS >= cuts.lowest[:, None]
    expected = np.where(wanted.any(0), 1 + np.where(wanted, cuts.factor[:, None] * wide, -np.inf).argmax(0), 0)
    np.testing.assert_array_equal(found.decided, expected)
    sums = [[(expected == c).sum() for c in range(1, 5)], [wide[c - 1][expected == c].sum() for c in range(1, 5)]]
    np.testing.assert_allclose(found.sums, sums)
    assert found.contested == (wanted.sum(0) > 1).sum() > 0
    masks = choose_masks(p[1:], cuts, BINS)
    np.testing.assert_array_equal(masks.decided, wanted)


def test_a_threshold_of_one_takes_certain_voxels_and_no_others():
    p = np.array([[0.0, 1e-7, 0.5], [1.0, 1 - 1e-7, 0.5]], np.float32)
    assert choose_classes(p, Cuts.at(1.0, 1, BINS), BINS).decided.tolist() == [1, 0, 0]
    assert Cuts.at(0.7, 1, BINS).lowest.tolist() == [840.0]
    assert choose_classes(p, Cuts.at_bins(np.array([BINS]), BINS), BINS).decided.tolist() == [0, 0, 0]


def test_the_header_of_the_map_is_kept(tmp_path):
    p, _ = draw(0)
    image = nibabel.Nifti1Image(p, AFFINE)
    image.header.set_qform(AFFINE, code=1)
    image.header.set_sform(AFFINE, code=2)
    image.header.set_xyzt_units("mm")
    image.header["descrip"] = b"of a scanner"
    (tmp_path / "maps").mkdir()
    for ending in (".nii", ".nii.gz"):
        nibabel.save(image, tmp_path / "maps" / f"case{ending}")
        decide(tmp_path / "maps" / f"case{ending}", tmp_path / ending, rule="threshold=0.3")
        found = nibabel.load(tmp_path / ending / f"case{ending}")
        assert found.shape == SHAPE
        assert found.get_data_dtype() == np.uint8
        np.testing.assert_array_equal(found.affine, nibabel.load(tmp_path / "maps" / f"case{ending}").affine)
        assert (int(found.header["qform_code"]), int(found.header["sform_code"])) == (1, 2)
        assert found.header["descrip"].item() == b"of a scanner"
        assert found.header.get_xyzt_units() == ("mm", "unknown")
        np.testing.assert_array_equal(load(tmp_path / ending / f"case{ending}"), decide_at(0.3, p))
    assert (tmp_path / ".nii" / "case.nii").read_bytes()[:2] != b"\x1f\x8b"


@pytest.mark.parametrize("rule", ["argmax", "threshold=0.3"])
def test_logits_are_decided_as_their_probabilities(folder, rule):
    for i in range(4):
        save(folder / "logits" / f"case_{i}.nii.gz", log_softmax(draw(i)[0].astype(np.float64), -1))
        powers = np.exp(load(folder / "logits" / f"case_{i}.nii.gz"))
        save(folder / "same" / f"case_{i}.nii.gz", powers / powers.sum(-1, keepdims=True))
    decide(folder / "logits", folder / "a", rule=rule, options=ReadOptions(logits=True))
    decide(folder / "same", folder / "b", rule=rule)
    for i in range(4):
        np.testing.assert_array_equal(load(folder / "a" / f"case_{i}.nii.gz"), load(folder / "b" / f"case_{i}.nii.gz"))


def test_one_file_for_each_class_makes_one_label_map(folder):
    for i in range(2):
        for c in range(3):
            save(folder / "split" / f"case_{i}_{c}.nii.gz", draw(i)[0][..., c])
    decided = decide(folder / "split", folder / "out", rule="threshold=0.3")
    assert [path.name for path in decided.paths] == ["case_0.nii.gz", "case_1.nii.gz"]
    np.testing.assert_array_equal(load(folder / "out" / "case_1.nii.gz"), decide_at(0.3, draw(1)[0]))


def test_the_arrays_of_nnunet_become_images_in_the_place_of_their_label_maps(tmp_path):
    p, _ = draw(0)
    save(tmp_path / "maps" / "case_0.nii.gz", p.argmax(-1).astype(np.uint8))
    np.savez_compressed(tmp_path / "maps" / "case_0.npz", probabilities=p.transpose(3, 2, 1, 0))
    np.savez_compressed(tmp_path / "maps" / "alone.npz", probabilities=p.transpose(3, 2, 1, 0))
    decided = decide(tmp_path / "maps", tmp_path / "out", rule="threshold=0.3")
    assert sorted(path.name for path in decided.paths) == ["alone.npy", "case_0.nii.gz"]
    np.testing.assert_array_equal(load(tmp_path / "out" / "case_0.nii.gz"), decide_at(0.3, p))
    np.testing.assert_allclose(nibabel.load(tmp_path / "out" / "case_0.nii.gz").affine, AFFINE)
    np.testing.assert_array_equal(np.load(tmp_path / "out" / "alone.npy"), decide_at(0.3, p).transpose(2, 1, 0))


@pytest.mark.parametrize("order", ["C", "F"])
def test_arrays_become_arrays_of_labels(tmp_path, order):
    p, _ = draw(0, shape=(6, 5, 4))
    (tmp_path / "maps").mkdir()
    np.save(tmp_path / "maps" / "deep.npy", np.asarray(np.moveaxis(p, -1, 0), order=order))
    np.save(tmp_path / "maps" / "flat.npy", np.asarray(np.moveaxis(p[:, :, 0], -1, 0), order=order))
    np.savez(tmp_path / "maps" / "last.npz", logits=np.log(p))
    decide(tmp_path / "maps" / "deep.npy", tmp_path / "out", rule="threshold=0.3")
    np.testing.assert_array_equal(np.load(tmp_path / "out" / "deep.npy"), decide_at(0.3, p))
    decide(tmp_path / "maps" / "flat.npy", tmp_path / "flat", rule="argmax")
    np.testing.assert_array_equal(np.load(tmp_path / "flat" / "flat.npy"), p[:, :, 0].argmax(-1))
    named = ReadOptions(logits=True, class_names="background,b,c")  # tells which axis is that of classes
    decide(tmp_path / "maps" / "last.npz", tmp_path / "last", rule="argmax", options=named)
    np.testing.assert_array_equal(np.load(tmp_path / "last" / "last.npy"), p.argmax(-1))


def test_labels_are_the_values_of_classes(folder, tmp_path):
    (tmp_path / "values.toml").write_text("values = [0, 7, 300]\n")
    options = ReadOptions(regions=str(tmp_path / "values.toml"))
    decide(folder / "maps", folder / "out", rule="argmax", options=options)
    found = load(folder / "out" / "case_0.nii.gz")
    assert found.dtype == np.int16
    np.testing.assert_array_equal(found, np.array([0, 7, 300])[draw(0)[0].argmax(-1)])
    assert {row["class"] for row in table(folder / "out")} == {"class 7", "class 300"}


def test_a_single_channel_is_a_foreground(tmp_path):
    p = draw(0)[0][..., 1]
    save(tmp_path / "maps" / "case.nii.gz", p)
    decide(tmp_path / "maps", tmp_path / "out", rule="threshold=0.4")
    found = load(tmp_path / "out" / "case.nii.gz")
    assert found.shape == SHAPE
    np.testing.assert_array_equal(found, p.astype(np.float64) >= 0.4)


def test_classes_that_overlap_have_a_channel_each(tmp_path):
    p = np.random.default_rng(0).random((*SHAPE, 2)).astype(np.float32)
    save(tmp_path / "maps" / "case.nii.gz", p)
    save(tmp_path / "logits" / "case.nii.gz", logit(p.astype(np.float64)))
    for rule, reached in (
        ("argmax", p >= 0.5),
        ("threshold=0.3", p.astype(np.float64) >= 0.3),
    ):
        decide(tmp_path / "maps", tmp_path / rule, rule=rule, options=ReadOptions(sigmoid=True))
        found = load(tmp_path / rule / "case.nii.gz")
        assert found.dtype == np.uint8
        np.testing.assert_array_equal(found, reached)
    options = ReadOptions(sigmoid=True, logits=True)
    decide(tmp_path / "logits", tmp_path / "of logits", rule="threshold=0.3", options=options)
    expected = expit(load(tmp_path / "logits" / "case.nii.gz")) >= 0.3
    np.testing.assert_array_equal(load(tmp_path / "of logits" / "case.nii.gz"), expected)


def test_regions_have_a_channel_each_which_evaluate_takes_as_labels(folder):
    regions = Regions({"all": (1, 2), "core": (2,)})
    decide(folder / "maps", folder / "out", rule="threshold=0.5", options=ReadOptions(regions=regions))
    p = draw(0)[0]
    found = load(folder / "out" / "case_0.nii.gz")
    np.testing.assert_array_equal(found[..., 0], p[..., 1] + p[..., 2] >= 0.5)
    np.testing.assert_array_equal(found[..., 1], p[..., 2] >= 0.5)
    assert {row["class"] for row in table(folder / "out")} == {"all", "core"}
    measured = evaluate(folder / "maps", folder / "out", folder / "r", options=ReadOptions(regions=regions)).evaluation
    assert (measured.case_metrics()["dice"] == 1).all()  # the decisions are those at 1/2, against themselves


def test_masks_hold_the_whole_set_of_each_class(folder):
    decided = decide(folder / "maps", folder / "out", rule="threshold=0.2", masks=True)
    p = draw(0)[0].astype(np.float64)
    found = load(folder / "out" / "case_0.nii.gz")
    np.testing.assert_array_equal(found, p[..., 1:] >= 0.2)
    assert (found.sum(-1) > 1).any()
    assert decided.contested == 0
    rows = {(row.case, row.class_name): row.voxels for row in decided.decisions}
    assert rows["case_0", "class 2"] == (p[..., 2] >= 0.2).sum()
    decide(folder / "maps", folder / "most", rule="argmax", masks=True)
    most = load(folder / "most" / "case_0.nii.gz")
    np.testing.assert_array_equal(most, p.argmax(-1)[..., None] == [1, 2])
    assert decide(folder / "maps", folder / "one", rule="threshold=0.2").contested > 0


def test_decisions_are_taken_on_what_a_calibrator_makes(folder):
    Temperature(3.0).save(folder / "c.json")
    decide(folder / "maps", folder / "out", rule="threshold=0.5", calibrator=folder / "c.json")
    powers = draw(0)[0].astype(np.float64) ** (1 / 3)
    p = powers / powers.sum(-1, keepdims=True)
    near = np.abs(p - 0.5).min(-1) < 1e-5
    expected = np.where(p[..., 1:].max(-1) >= 0.5, 1 + p[..., 1:].argmax(-1), 0)
    np.testing.assert_array_equal(load(folder / "out" / "case_0.nii.gz")[~near], expected[~near])
    assert not np.array_equal(expected, draw(0)[0].argmax(-1))


def test_a_calibrator_that_looks_at_neighbors_sees_them(folder):
    settings = {"dilations": [1], "steps": 5}
    fit_calibrator(
        folder / "maps", folder / "truth", folder / "c.json", method="local-temperature", settings=settings, folds=0
    )
    apply_calibrator(folder / "c.json", folder / "maps", folder / "calibrated")
    decide(folder / "maps", folder / "a", rule="threshold=0.3", calibrator=folder / "c.json")
    decide(folder / "calibrated", folder / "b", rule="threshold=0.3")
    for i in range(4):
        np.testing.assert_array_equal(load(folder / "a" / f"case_{i}.nii.gz"), load(folder / "b" / f"case_{i}.nii.gz"))


def test_slabs_do_not_matter(folder, monkeypatch):
    image = nibabel.load(folder / "maps" / "case_0.nii.gz")
    nibabel.save(image, folder / "maps" / "plain.nii")
    decide(folder / "maps", folder / "a", rule="threshold=0.3")
    monkeypatch.setattr(unlabelled, "slab_voxels", lambda classes: 17)
    decide(folder / "maps", folder / "b", rule="threshold=0.3")
    for name in ("case_0.nii.gz", "case_3.nii.gz", "plain.nii"):
        assert (folder / "a" / name).read_bytes() == (folder / "b" / name).read_bytes()
    one, other = table(folder / "a"), table(folder / "b")
    assert [row["voxels"] for row in one] == [row["voxels"] for row in other]


def test_two_workers_write_the_same_bytes(folder):
    decide(folder / "maps", folder / "one", rule="threshold=0.3")
    decide(folder / "maps", folder / "two", rule="threshold=0.3", workers=2)
    for path in sorted((folder / "one").glob("*.*")):
        if path.is_file():
            assert path.read_bytes() == (folder / "two" / path.name).read_bytes()


def test_what_was_done_before_an_interruption_is_not_done_again(folder, monkeypatch):
    original, done = of_a_case.decide_case, []

    def counting(prediction, *arguments, **named):
        if len(done) == 2:
            raise KeyboardInterrupt
        done.append(prediction.name)
        return original(prediction, *arguments, **named)

    monkeypatch.setattr(deciding, "decide_case", counting)
    with pytest.raises(KeyboardInterrupt):
        decide(folder / "maps", folder / "out", rule="threshold=0.3")
    done.clear()
    monkeypatch.setattr(deciding, "decide_case", lambda p, *a, **n: done.append(p.name) or original(p, *a, **n))
    again = decide(folder / "maps", folder / "out", rule="threshold=0.3")
    assert done == ["case_2", "case_3"]
    assert len(again.paths) == 4
    assert len(table(folder / "out")) == 8
    decide(folder / "maps", folder / "out", rule="threshold=0.3")
    assert done == ["case_2", "case_3"]
    (folder / "out" / "case_1.nii.gz").unlink()
    save(folder / "maps" / "case_2.nii.gz", draw(9)[0])
    decide(folder / "maps", folder / "out", rule="threshold=0.3")
    assert done[2:] == ["case_1", "case_2"]
    decide(folder / "maps", folder / "out", rule="argmax")
    assert len(done) == 8
    assert len(list((folder / "out" / ".parts").iterdir())) == 5  # four cases, and which files are ours


def test_a_case_that_cannot_be_read_does_not_stop_the_others(folder):
    (folder / "maps" / "case_1.nii.gz").write_bytes(b"")
    save(folder / "maps" / "case_2.nii.gz", np.full((*SHAPE, 3), np.nan, np.float32))
    done = run(folder)
    assert done.exit_code == 1
    assert "case_1: FileError:" in done.output
    assert "case_2: RangeError:" in done.output
    assert "2 label maps and decisions.csv: " in done.output
    assert {row["case"] for row in table(folder / "out")} == {"case_0", "case_3"}
    assert not (folder / "out" / "case_2.nii.gz").exists()


def test_label_maps_of_another_rule_go_where_a_case_fails_now(folder):
    run(folder)
    (folder / "maps" / "case_1.nii.gz").write_bytes(b"")
    assert run(folder, rule="threshold=0.3").exit_code == 1
    assert not (folder / "out" / "case_1.nii.gz").exists()


def test_the_command_shows_a_table_or_json(folder):
    done = run(folder, rule="threshold=0.3")
    assert done.exit_code == 0
    assert "expected Dice" in done.output
    assert "4 label maps and decisions.csv" in done.output
    shown = CliRunner().invoke(
        app, ["decide", str(folder / "maps"), "--out", str(folder / "out"), "--rule", "threshold=0.3", "--json"]
    )
    rows = json.loads(shown.stdout)
    assert len(rows) == 8
    assert rows[0]["class_name"] == "class 1"


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        ("otsu", r"the rule must be argmax, threshold=T, or a file.*'otsu' is none"),
        ("dice", r"'dice' is none"),
        ("threshold=0", r"the threshold must be a number above 0 and at most 1.*got '0'"),
        ("threshold=1.5", r"got '1.5'"),
        ("threshold=half", r"got 'half'"),
        ("threshold=nan", r"got 'nan'"),
    ],
)
def test_a_rule_that_is_none_is_refused(folder, rule, message):
    with pytest.raises(ConfigError, match=message):
        decide(folder / "maps", folder / "out", rule=rule)
    assert run(folder, rule=rule).exit_code == 2
    assert not (folder / "out").exists()


def test_out_inside_of_the_predictions_is_refused(folder):
    with pytest.raises(ConfigError, match="--out must lie outside of the predictions"):
        decide(folder / "maps", folder / "maps" / "labels", rule="argmax")


def test_label_maps_of_others_are_not_overwritten(folder):
    before = (folder / "truth" / "case_0.nii.gz").read_bytes()
    with pytest.raises(ConfigError, match=r"must not hold label maps of others; .*case_0.nii.gz is there"):
        decide(folder / "maps", folder / "truth", rule="argmax")
    assert (folder / "truth" / "case_0.nii.gz").read_bytes() == before


def test_a_calibrator_that_does_not_fit_is_refused(folder):
    Temperature(2.0, activation="sigmoid").save(folder / "c.json")
    with pytest.raises(ConfigError, match="the calibrator is for classes that overlap; add --sigmoid"):
        decide(folder / "maps", folder / "out", rule="threshold=0.3", calibrator=folder / "c.json")


def test_names_that_are_not_those_of_the_channels_are_refused(folder):
    with pytest.raises(ConfigError, match="--class-names must name every label from 0 on"):
        decide(folder / "maps", folder / "out", rule="threshold=0.3", options=ReadOptions(class_names="a,b"))
    decide(folder / "maps", folder / "out", rule="threshold=0.3", options=ReadOptions(class_names="background,a,b"))
    assert {row["class"] for row in table(folder / "out")} == {"a", "b"}


def test_probabilities_given_as_logits_and_label_maps_are_refused(folder):
    decided = decide(folder / "maps", folder / "out", rule="argmax", options=ReadOptions(logits=True))
    assert "logits must not be probabilities" in decided.failures[0].message
    save(folder / "whole" / "case.nii.gz", draw(0)[1])
    decided = decide(folder / "whole", folder / "out", rule="argmax")
    assert "this looks like a label map" in decided.failures[0].message


@pytest.fixture
def quality(tmp_path):
    """A quality file of two classes, with thresholds of 300 and 240 bins if not given."""

    def write(*names: str, thresholds=(300.0, 240.0)) -> None:
        cases, classes = 9, len(names)
        plain = {name: np.zeros((cases, classes)) for name in ARRAYS}
        plain |= {"features": np.zeros((cases, classes, len(NAMES))), "patients": np.arange(cases)}
        learned = tuple(Learned(place, cases, 0.05) for place in thresholds)
        guarantee = Guarantee("fnr", 0.1, False, learned)
        Quality(names, 0.9, Options(), Reference(**plain), (), guarantee).save(tmp_path / "quality.json")

    write("class 1", "class 2")
    return write


def test_thresholds_of_a_quality_file_give_contested_voxels_to_the_larger_factor(folder, quality):
    done = run(folder, rule=str(folder / "quality.json"))
    assert done.exit_code == 0, done.output
    p = draw(0)[0].astype(np.float64)
    factors = np.stack(
        [np.where(p[..., 1] >= 0.25, p[..., 1] / 0.25, 0), np.where(p[..., 2] >= 0.2, p[..., 2] / 0.2, 0)]
    )
    expected = np.where(factors.max(0) > 0, 1 + factors.argmax(0), 0)
    np.testing.assert_array_equal(load(folder / "out" / "case_0.nii.gz"), expected)
    contested = sum(
        int(((draw(i)[0][..., 1] >= 0.25) & (draw(i)[0].astype(np.float64)[..., 2] >= 0.2)).sum()) for i in range(4)
    )
    assert f"{contested} voxels reached the thresholds of several classes" in done.output
    assert "holds for the whole set of each class, which --masks writes" in done.output
    assert run(folder, "--masks", rule=str(folder / "quality.json")).exit_code == 0
    masks = load(folder / "out" / "case_0.nii.gz")
    np.testing.assert_array_equal(masks, np.stack([p[..., 1] >= 0.25, p[..., 2] >= 0.2], -1))


def test_a_class_whose_threshold_lies_above_1_is_empty(folder, quality):
    quality("class 1", "class 2", thresholds=(300.0, float(BINS)))
    decided = decide(folder / "maps", folder / "out", rule=folder / "quality.json")
    rows = [row for row in decided.decisions if row.class_name == "class 2"]
    assert len(rows) == 4
    assert all(row.threshold > 1 and row.voxels == 0 for row in rows)
    assert not (load(folder / "out" / "case_0.nii.gz") == 2).any()


def test_a_quality_file_of_other_classes_or_another_calibrator_is_refused(folder, quality):
    Temperature(2.0).save(folder / "c.json")
    rule = folder / "quality.json"
    with pytest.raises(ConfigError, match="learned without a calibrator; leave out --calibrator"):
        decide(folder / "maps", folder / "out", rule=rule, calibrator=folder / "c.json")
    quality("liver", "tumour")
    with pytest.raises(ConfigError, match=r"must have the classes of .*, liver, tumour; they have class 1, class 2"):
        decide(folder / "maps", folder / "out", rule=rule)


@pytest.mark.parametrize("masks", [[], ["--masks"]])
@pytest.mark.parametrize("classes", [2, 4, 40])
@pytest.mark.parametrize("case", ["case_0", "case_2"])
def test_a_map_with_other_classes_than_the_quality_file_fails_and_leaves_no_label_map(
    folder, quality, case, classes, masks
):
    save(folder / "maps" / f"{case}.nii.gz", draw(5, classes)[0])
    done = run(folder, *masks, rule=str(folder / "quality.json"))
    assert done.exit_code == 1, done.output
    assert f"{case}: ShapeError: the map must have the classes of " in done.output
    assert not (folder / "out" / f"{case}.nii.gz").exists()
    assert {row["case"] for row in table(folder / "out")} == {f"case_{i}" for i in range(4)} - {case}


@pytest.mark.parametrize("adaptive", [False, True])
@pytest.mark.parametrize("classes", [1, 3])
def test_learned_thresholds_are_not_for_a_case_with_more_or_fewer_classes(adaptive, classes):
    learned = (Learned(0.1, 9, 0.05),) * 2
    with pytest.raises(ShapeError, match=f"must have the 2 classes .*; it has {classes}"):
        Guarantee("fnr", 0.1, adaptive, learned).bins(np.ones((classes, BINS)), np.zeros((classes, BINS)))
