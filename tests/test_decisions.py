"""What decisions are worth, from sums alone: against arithmetic by hand, every decision there is, and drawn labels."""

import itertools
from dataclasses import replace

import nibabel
import numpy as np
import pytest
import torch
from scipy import ndimage

from segcal import Binning, BinStatistics, ConfigError, Evaluation, EvaluationAccumulator, bin_statistics, evaluate
from segcal.decisions import best_threshold, expected_dice, threshold_curves, uncertain_voxels
from segcal.evaluation.options import Options
from segcal.evaluation.voxels import largest_pieces, measure_voxels, sums_of_case

FINE = 1200


def stats_of(probabilities, labels=None, bins=FINE):
    """Statistics of one case and class."""
    p = torch.as_tensor(np.asarray(probabilities, np.float32)).reshape(1, 1, -1)
    y = torch.zeros_like(p) if labels is None else torch.as_tensor(np.asarray(labels, np.float32)).reshape(1, 1, -1)
    return bin_statistics(p, y, bins=bins)


def true_dice(decided, labels):
    return 2 * (decided & labels).sum() / (decided.sum() + labels.sum())


def test_curves_by_hand():
    curves = threshold_curves(stats_of([0.9, 0.6, 0.6, 0.2], [1, 1, 0, 0], bins=10))
    at = 6  # three voxels reach 0.6; two of the class are among them; 2.1 of 2.3 are expected
    assert curves.thresholds[at] == pytest.approx(0.6)
    found = {name: getattr(curves, name)[0, 0, at].item() for name in ("dice", "sensitivity", "precision", "volume")}
    assert found == pytest.approx({"dice": 4 / 5, "sensitivity": 1, "precision": 2 / 3, "volume": 3})
    assert curves.expected_dice[0, 0, at].item() == pytest.approx(2 * 2.1 / (3 + 2.3), abs=1e-6)
    assert curves.expected_sensitivity[0, 0, at].item() == pytest.approx(2.1 / 2.3, abs=1e-6)
    assert curves.expected_precision[0, 0, at].item() == pytest.approx(0.7, abs=1e-6)
    assert (curves.expected_volume.item(), curves.true_volume.item()) == pytest.approx((2.3, 2), abs=1e-6)
    assert curves.dice[0, 0, -1] == 0
    assert curves.precision[0, 0, -1].isnan()


def test_curves_are_those_of_every_threshold_tried_one_by_one():
    generator = np.random.default_rng(0)
    p = generator.random(500).astype(np.float32)
    labels = generator.random(500) < p
    curves = threshold_curves(stats_of(p, labels, bins=60))
    for k, threshold in enumerate(range(61)):
        decided = p.astype(np.float64) * 60 >= threshold
        assert curves.volume[0, 0, k] == decided.sum()
        assert curves.dice[0, 0, k].item() == pytest.approx(true_dice(decided, labels))
        promised = 2 * p[decided].sum(dtype=np.float64) / (decided.sum() + p.sum(dtype=np.float64))
        assert curves.expected_dice[0, 0, k].item() == pytest.approx(promised, rel=1e-6)


def test_an_absent_class_has_neither_dice_nor_sensitivity():
    curves = threshold_curves(stats_of([0.3, 0.1], [0, 0], bins=4))
    assert curves.dice.isnan().all()
    assert curves.sensitivity.isnan().all()
    assert not curves.expected_dice.isnan().any()


def exact_expected_dice(p, decided):
    """Over all 2^n label maps, of independent voxels; nothing decided and nothing there is a Dice of 1."""
    total = 0.0
    for labels in itertools.product((0, 1), repeat=len(p)):
        y = np.array(labels)
        weight = np.prod(np.where(y, p, 1 - p))
        size = decided.sum() + y.sum()
        total += weight * (1.0 if size == 0 else 2 * (decided * y).sum() / size)
    return total


@pytest.mark.parametrize("seed", range(3))
def test_no_decision_at_all_is_much_better_than_the_best_threshold(seed):
    """Over every subset of the voxels, by the exact expectation; ours is that of a ratio of expectations."""
    p = np.random.default_rng(seed).beta(0.6, 0.9, size=9)
    found = best_threshold(stats_of(p))
    decided = (p.astype(np.float32).astype(np.float64) * FINE >= found.bin.item()).astype(int)
    best = max(exact_expected_dice(p, np.array(s)) for s in itertools.product((0, 1), repeat=len(p)))
    assert exact_expected_dice(p, decided) >= best - 0.03


@pytest.mark.parametrize("seed", range(5))
def test_the_best_threshold_is_the_best_of_all(seed):
    p = np.random.default_rng(seed).beta(0.3, 0.8, size=400).astype(np.float32)
    found = best_threshold(stats_of(p))
    wide = p.astype(np.float64)
    each = [2 * wide[wide * FINE >= k].sum() / ((wide * FINE >= k).sum() + wide.sum()) for k in range(FINE)]
    assert found.expected_dice.item() == pytest.approx(max(each))
    assert each[found.bin.item()] == pytest.approx(max(each))
    assert each[-1] < max(each)


@pytest.mark.parametrize("shape", [(0.3, 0.8), (2.0, 2.0), (0.1, 0.1), (0.2, 3.0)])
def test_the_best_threshold_is_half_of_the_dice_that_it_promises(shape):
    p = np.random.default_rng(1).beta(*shape, size=200_000)
    found = best_threshold(stats_of(p))
    assert found.threshold.item() == pytest.approx(found.expected_dice.item() / 2, abs=2 / FINE)


def test_a_probability_on_an_edge_reaches_it():
    k = 480
    on = np.float32(0.4)  # just above 0.4
    below = np.float32(0.7)  # just below 0.7
    assert threshold_curves(stats_of([on])).volume[0, 0, k] == 1
    assert threshold_curves(stats_of([below])).volume[0, 0, 840] == 0
    assert threshold_curves(stats_of([0.5])).volume[0, 0, 600:602].tolist() == [1, 0]
    assert threshold_curves(stats_of([1.0])).volume[0, 0, -2:].tolist() == [1, 0]


def test_nothing_is_decided_where_the_class_is_likely_absent():
    found = best_threshold(stats_of([0.01] * 10))
    assert found.bin.item() == FINE
    assert found.threshold.item() > 1
    assert found.expected_dice.item() == pytest.approx(0.99**10)
    found = best_threshold(stats_of([0.01] * 500))  # that it is absent has a probability of 0.007
    assert found.bin.item() < FINE
    nothing = best_threshold(stats_of([0.0] * 10))
    assert (nothing.bin.item(), nothing.expected_dice.item()) == (FINE, 1.0)


@pytest.mark.parametrize(
    ("binning", "kind"),
    [(Binning(10, kernel="triangular"), "triangular"), (Binning(10, closed="right"), "closed on the right")],
)
def test_soft_bins_and_those_of_other_edges_are_refused(binning, kind):
    zeros = torch.zeros(1, 1, 10, dtype=torch.float64)
    stats = BinStatistics(zeros, zeros, zeros, binning)
    for function in (threshold_curves, best_threshold, uncertain_voxels):
        with pytest.raises(ConfigError, match=f"thresholds need hard bins.*{kind}"):
            function(stats)


def test_promises_hold_in_the_mean_when_labels_are_drawn_from_the_probabilities():
    generator = np.random.default_rng(2)
    p = generator.beta(0.2, 0.6, size=3000).astype(np.float32)
    stats = stats_of(p)
    best = best_threshold(stats)
    decided = p.astype(np.float64) * FINE >= best.bin.item()
    dices = [true_dice(decided, generator.random(len(p)) < p) for _ in range(2000)]
    error = np.std(dices) / np.sqrt(len(dices))
    assert np.mean(dices) == pytest.approx(best.expected_dice.item(), abs=4 * error + 1e-4)
    curves = threshold_curves(stats)
    at = curves.expected_dice[0, 0, 600].item()  # of another threshold, too
    dices = [true_dice(p >= 0.5, generator.random(len(p)) < p) for _ in range(2000)]
    assert np.mean(dices) == pytest.approx(at, abs=4 * error + 1e-4)


def test_uncertain_voxels_lie_between_a_tenth_and_nine():
    assert uncertain_voxels(stats_of([0.05, 0.1001, 0.5, 0.8999, 0.95])).item() == 3


def make_case(seed, shape=(7, 6, 5), classes=3):
    generator = np.random.default_rng(seed)
    powers = np.exp(2 * generator.normal(size=(*shape, classes)))
    p = (powers / powers.sum(-1, keepdims=True)).astype(np.float32)
    return p, generator.integers(0, classes, shape).astype(np.uint8)


def test_sums_of_decisions_of_files_are_those_of_numpy(tmp_path):
    affine = np.diag([2.0, 3.0, 0.5, 1.0])
    for name in ("maps", "labels"):
        (tmp_path / name).mkdir()
    cases = [make_case(seed) for seed in range(2)]
    for i, (p, labels) in enumerate(cases):
        nibabel.save(nibabel.Nifti1Image(p, affine), tmp_path / "maps" / f"{i}.nii.gz")
        nibabel.save(nibabel.Nifti1Image(labels, affine), tmp_path / "labels" / f"{i}.nii.gz")
    evaluation = evaluate(tmp_path / "maps", tmp_path / "labels", tmp_path / "out").evaluation
    promised = expected_dice(evaluation.statistics, evaluation.overlap, evaluation.decisions)
    for i, (p, _) in enumerate(cases):
        decided = p.argmax(-1)
        for c in range(3):
            mine = decided == c
            confidence = p[..., c][mine].sum(dtype=np.float64)
            assert evaluation.decisions.confidence[i, c].item() == pytest.approx(confidence, rel=1e-6)
            assert evaluation.decisions.voxel_ml[i, c].item() == pytest.approx(0.003)
            whole = p[..., c].sum(dtype=np.float64)
            assert promised[i, c].item() == pytest.approx(2 * confidence / (mine.sum() + whole), rel=1e-6)
            if c:
                pieces, _ = ndimage.label(mine)
                assert evaluation.decisions.largest[i, c] == np.bincount(pieces.ravel())[1:].max()
    assert evaluation.decisions.largest[:, 0].isnan().all()  # the background has no pieces


def test_the_largest_piece_is_connected_by_faces():
    decided = np.zeros((4, 4, 1), np.uint8)
    decided[0, 0] = decided[1, 1] = 1  # they touch at an edge only
    decided[3, :3] = 1
    decided[0, 3] = 2
    assert largest_pieces(decided.ravel(), decided.shape, 4)[1:].tolist() == [3, 1, 0]
    masks = np.stack([decided.ravel() == 1, np.zeros(16, bool)])
    assert largest_pieces(masks, decided.shape, 2).tolist() == [3, 0]


def test_slabs_give_the_sums_of_the_whole():
    p, labels = make_case(3)
    flat = np.ascontiguousarray(p.reshape(-1, 3).T)
    slabs = [
        measure_voxels(np.ascontiguousarray(flat[:, s]), labels.ravel()[s], Options())
        for s in (slice(0, 50), slice(50, None))
    ]
    parts = sums_of_case(slabs, labels.shape, voxel_ml=0.5)
    whole = sums_of_case([measure_voxels(flat, labels.ravel(), Options())], labels.shape, voxel_ml=0.5)
    np.testing.assert_allclose(parts.decided, whole.decided)
    assert parts.voxel_ml.tolist() == [[0.5]]
    unlabelled = sums_of_case([measure_voxels(flat, None, Options())], labels.shape, voxel_ml=0.5)
    np.testing.assert_array_equal(unlabelled.decided, whole.decided)
    np.testing.assert_array_equal(unlabelled.bins[:2], whole.bins[:2])
    assert not unlabelled.bins[2].any()


def test_an_evaluation_from_memory_promises_the_same_as_one_of_files(tmp_path):
    p, labels = make_case(4)
    for name in ("maps", "labels"):
        (tmp_path / name).mkdir()
    np.save(tmp_path / "maps" / "a.npy", np.moveaxis(p, -1, 0))
    np.save(tmp_path / "labels" / "a.npy", labels)
    files = evaluate(tmp_path / "maps", tmp_path / "labels", tmp_path / "out").evaluation
    accumulator = EvaluationAccumulator()
    accumulator.update(torch.from_numpy(p).movedim(-1, 0)[None], torch.from_numpy(labels)[None], ["a"])
    memory = accumulator.compute()
    for metric, values in files.decision_metrics().items():
        torch.testing.assert_close(memory.decision_metrics()[metric], values, equal_nan=True)


def test_an_evaluation_without_sums_of_decisions_survives_saving(tmp_path):
    accumulator = EvaluationAccumulator()
    p, labels = make_case(5)
    accumulator.update(torch.from_numpy(p).movedim(-1, 0)[None], torch.from_numpy(labels)[None], ["a"])
    replace(accumulator.compute(), decisions=None).save(tmp_path / "evaluation.npz")
    loaded = Evaluation.load(tmp_path / "evaluation.npz")
    assert loaded.decisions is None
    assert loaded.decision_metrics() == {}
