"""Overlap counts, Dice, Brier score and log-likelihood against hand arithmetic, scikit-learn, MONAI and `evaluate`."""

import math

import nibabel
import numpy as np
import pytest
import torch
from cohorts import make_case
from monai.data import MetaTensor
from monai.metrics import DiceMetric
from sklearn.metrics import brier_score_loss, log_loss

from segcal import (
    ConfigError,
    Evaluation,
    LabelError,
    OverlapCounts,
    RangeError,
    ScoreSums,
    ShapeError,
    brier,
    dice,
    evaluate,
    nll,
)

OF_CLASSES = (OverlapCounts.of_classes, ScoreSums.of_classes, ScoreSums.joint_of_classes)
OF_REGIONS = (OverlapCounts.of_regions, ScoreSums.of_regions)


def one_hot(labels, classes=3):
    return torch.nn.functional.one_hot(labels, classes).movedim(-1, 1)


def same(got, expected):
    return all(torch.equal(getattr(got, name), getattr(expected, name)) for name in expected.names())


def assert_close(got, expected, **tolerance):
    for name in expected.names():
        torch.testing.assert_close(getattr(got, name), getattr(expected, name), **tolerance)


@pytest.fixture
def volumes():
    """Logits of two cases and three classes on a grid, and their labels."""
    return 2 * torch.randn(2, 3, 6, 5, 4), torch.randint(0, 3, (2, 6, 5, 4))


@pytest.mark.parametrize("absent", [False, True], ids=["every class", "one absent and predicted"])
def test_dice_equals_monai(absent):
    probabilities, labels = torch.rand(2, 3, 200).softmax(1), torch.randint(0, 3, (2, 200))
    if absent:
        labels[0][labels[0] == 2] = 1
    predicted = torch.nn.functional.one_hot(probabilities.argmax(1), 3).movedim(-1, 1)
    true = torch.nn.functional.one_hot(labels, 3).movedim(-1, 1)
    metric = DiceMetric(reduction="none")
    metric(predicted[..., None], true[..., None])
    expected = metric.aggregate().double()
    assert bool(expected[0, 2].isnan()) == absent
    values = dice(OverlapCounts.of_classes(probabilities, labels))
    torch.testing.assert_close(values, expected, rtol=1e-6, atol=1e-6, equal_nan=True)


def test_a_class_that_is_not_present_has_no_dice_whether_predicted_or_not():
    probabilities = torch.tensor([[[0.9, 0.1], [0.1, 0.8], [0.0, 0.1]]])
    values = dice(OverlapCounts.of_classes(probabilities, torch.tensor([[0, 0]])))[0].tolist()
    assert values[0] == pytest.approx(2 / 3)
    assert all(map(math.isnan, values[1:]))


def test_regions_are_predicted_from_one_half_on():
    counts = OverlapCounts.of_regions(torch.tensor([[[0.5, 0.49, 0.9]]]), torch.tensor([[[1, 1, 0]]]))
    assert (counts.predicted.item(), counts.true.item(), counts.both.item()) == (2, 2, 1)


def test_counts_add_over_any_split():
    probabilities, labels = torch.rand(1, 4, 300).softmax(1), torch.randint(0, 4, (1, 300))
    whole = OverlapCounts.of_classes(probabilities, labels)
    parts = [OverlapCounts.of_classes(probabilities[..., s], labels[..., s]) for s in (slice(0, 77), slice(77, 300))]
    for name in OverlapCounts.names():
        assert torch.equal(getattr(parts[0] + parts[1], name), getattr(whole, name))


def test_brier_and_nll_by_hand():
    probabilities = torch.tensor([[[0.8, 0.4], [0.2, 0.6]]], dtype=torch.float64)
    labels = torch.tensor([[0, 1]])
    scores, joint = ScoreSums.of_classes(probabilities, labels), ScoreSums.joint_of_classes(probabilities, labels)
    assert brier(scores)[0].tolist() == pytest.approx([(0.04 + 0.16) / 2] * 2)
    assert nll(scores)[0].tolist() == pytest.approx([-(math.log(0.8) + math.log(0.6)) / 2] * 2)  # p and 1 - p
    assert nll(joint).item() == pytest.approx(torch.nn.functional.nll_loss(probabilities.log(), labels).item())
    assert brier(joint).item() == pytest.approx((0.04 + 0.16) / 2)  # of two classes, that of one


def test_two_channels_score_as_one():
    foreground, labels = torch.rand(3, 1, 50), torch.randint(0, 2, (3, 50))
    one = ScoreSums.of_regions(foreground, labels[:, None])
    two = ScoreSums.joint_of_classes(torch.cat([1 - foreground, foreground], 1), labels)
    torch.testing.assert_close(nll(one), nll(two))
    torch.testing.assert_close(brier(one), brier(two))


def test_three_classes_have_the_brier_score_of_all_of_them():
    joint = ScoreSums.joint_of_classes(torch.tensor([[[0.5], [0.3], [0.2]]]), torch.tensor([[1]]))
    assert brier(joint).item() == pytest.approx(0.25 + 0.49 + 0.04)
    assert nll(joint).item() == pytest.approx(-math.log(0.3))


def test_a_probability_of_zero_costs_as_much_as_the_smallest_half_precision_number():
    scores = ScoreSums.of_classes(torch.tensor([[[0.0], [1.0]]]), torch.tensor([[0]]))
    assert nll(scores)[0, 0].item() == pytest.approx(24 * math.log(2))


def test_sums_of_different_shapes_are_refused():
    with pytest.raises(ShapeError, match="share one shape"):
        OverlapCounts(torch.zeros(1, 2), torch.zeros(1, 2), torch.zeros(1, 3))


def test_dice_of_logits_in_a_volume_equals_monai(volumes):
    logits, labels = volumes
    metric = DiceMetric(reduction="none")
    metric(one_hot(logits.argmax(1)), one_hot(labels))
    values = dice(OverlapCounts.of_classes(logits, labels, activation="softmax"))
    torch.testing.assert_close(values, metric.aggregate().double(), rtol=1e-6, atol=1e-6)


def test_dice_of_classes_that_overlap_equals_monai():
    logits, labels = torch.randn(2, 3, 6, 5, 4), torch.randint(0, 2, (2, 3, 6, 5, 4))
    metric = DiceMetric(reduction="none")
    metric((logits.sigmoid() >= 0.5).long(), labels)
    values = dice(OverlapCounts.of_regions(logits, labels, activation="sigmoid"))
    torch.testing.assert_close(values, metric.aggregate().double(), rtol=1e-6, atol=1e-6)


def test_scores_of_each_class_are_those_of_scikit_learn(volumes):
    logits, labels = volumes
    scores = ScoreSums.of_classes(logits.double(), labels, activation="softmax")
    probabilities = logits.double().softmax(1)
    for case in range(2):
        for c in range(3):
            p, y = probabilities[case, c].flatten().numpy(), (labels[case] == c).flatten().numpy()
            assert brier(scores)[case, c].item() == pytest.approx(brier_score_loss(y, p), rel=1e-12)
            assert nll(scores)[case, c].item() == pytest.approx(log_loss(y, p), rel=1e-12)


def test_joint_scores_are_those_of_scikit_learn(volumes):
    logits, labels = volumes
    joint = ScoreSums.joint_of_classes(logits.double(), labels, activation="softmax")
    rows = logits.double().softmax(1).movedim(1, -1).reshape(2, -1, 3).numpy()
    for case in range(2):
        y = labels[case].flatten().numpy()
        assert nll(joint)[case].item() == pytest.approx(log_loss(y, rows[case], labels=[0, 1, 2]), rel=1e-12)
        squared = ((rows[case] - np.eye(3)[y]) ** 2).sum(1).mean()
        assert brier(joint)[case].item() == pytest.approx(squared, rel=1e-12)


def test_scores_of_overlapping_classes_are_those_of_scikit_learn():
    logits, labels = torch.randn(1, 2, 50, dtype=torch.float64), torch.randint(0, 2, (1, 2, 50))
    scores = ScoreSums.of_regions(logits, labels, activation="sigmoid")
    for c in range(2):
        p, y = logits[0, c].sigmoid().numpy(), labels[0, c].numpy()
        assert brier(scores)[0, c].item() == pytest.approx(brier_score_loss(y, p), rel=1e-12)
        assert nll(scores)[0, c].item() == pytest.approx(log_loss(y, p), rel=1e-12)


def evaluated(tmp_path, probabilities, labels):
    """What `evaluate` finds in files of these arrays, (x, y, z, class) and (x, y, z)."""
    for name, arrays in (("predictions", probabilities), ("labels", labels)):
        (tmp_path / name).mkdir()
        for i, array in enumerate(arrays):
            nibabel.save(nibabel.Nifti1Image(array, np.eye(4)), tmp_path / name / f"case_{i}.nii.gz")
    evaluate(tmp_path / "predictions", tmp_path / "labels", tmp_path / "out")
    return Evaluation.load(tmp_path / "out" / "evaluation.npz")


@pytest.mark.parametrize("classes", [2, 3])
def test_sums_of_classes_are_those_of_an_evaluation(tmp_path, classes):
    probabilities, labels = zip(*(make_case(i, classes) for i in range(2)), strict=True)
    evaluation = evaluated(tmp_path, probabilities, labels)
    tensors = torch.from_numpy(np.stack(probabilities)).movedim(-1, 1), torch.from_numpy(np.stack(labels))
    assert same(OverlapCounts.of_classes(*tensors), evaluation.overlap)
    assert_close(ScoreSums.of_classes(*tensors), evaluation.scores, rtol=1e-12, atol=1e-12)
    assert_close(ScoreSums.joint_of_classes(*tensors), evaluation.joint, rtol=1e-12, atol=1e-12)


def test_sums_of_a_region_are_those_of_an_evaluation(tmp_path):
    probabilities, labels = zip(*(make_case(i, 2) for i in range(2)), strict=True)
    evaluation = evaluated(tmp_path, [p[..., 1] for p in probabilities], labels)
    tensors = torch.from_numpy(np.stack(probabilities)[..., 1])[:, None], torch.from_numpy(np.stack(labels))
    assert same(OverlapCounts.of_regions(*tensors), evaluation.overlap)
    assert_close(ScoreSums.of_regions(*tensors), evaluation.scores, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("of", OF_CLASSES + OF_REGIONS)
@pytest.mark.parametrize("how", ["mask", "ignored label", "both"])
def test_voxels_that_are_left_out_may_hold_anything(volumes, of, how):
    logits, labels = volumes
    probabilities, left_out = logits.softmax(1), torch.rand(labels.shape) < 0.3
    parts = [of(probabilities[i, :, ~left_out[i]][None], labels[i, ~left_out[i]][None]) for i in range(len(labels))]
    expected = type(parts[0])(*(torch.cat([getattr(part, name) for part in parts]) for name in parts[0].names()))
    probabilities = torch.where(left_out[:, None], torch.nan, probabilities)
    masked, ignored = left_out.clone(), left_out.clone()
    if how == "both":
        masked[:, ::2], ignored[:, 1::2] = False, False
    given = {}
    if how != "ignored label":
        given["mask"] = ~masked
    if how != "mask":
        labels, given["ignore_index"] = torch.where(ignored, 255, labels), 255
    assert_close(of(probabilities, labels, **given), expected)


@pytest.mark.parametrize("of", OF_CLASSES + OF_REGIONS)
def test_labels_may_be_a_map_or_have_a_channel_per_class(volumes, of):
    logits, labels = volumes
    expected = of(logits.softmax(1), labels)
    assert same(of(logits.softmax(1), labels[:, None]), expected)
    assert_close(of(logits.softmax(1), one_hot(labels)), expected)
    assert_close(of(MetaTensor(logits.softmax(1)), MetaTensor(one_hot(labels).float())), expected)


@pytest.mark.parametrize("of", OF_CLASSES)
def test_logits_and_their_probabilities_give_the_same(volumes, of):
    logits, labels = volumes
    assert_close(of(logits, labels, activation="softmax"), of(logits.softmax(1), labels))


@pytest.mark.parametrize("of", OF_REGIONS)
def test_logits_of_regions_and_their_probabilities_give_the_same(volumes, of):
    logits, labels = volumes
    assert_close(of(logits, labels, activation="sigmoid"), of(logits.sigmoid(), labels))


def test_decisions_are_taken_on_logits_where_probabilities_are_rounded_alike():
    logits = torch.tensor([[[50.0], [50.1], [-50.0]]])
    counts = OverlapCounts.of_classes(logits + 1000, torch.tensor([[1]]), activation="softmax")
    assert counts.both.tolist() == [[0, 1, 0]]
    tiny = torch.tensor([[[1e-30]]])
    assert OverlapCounts.of_regions(-tiny, torch.tensor([[[1]]]), activation="sigmoid").predicted.item() == 0
    assert OverlapCounts.of_regions(tiny, torch.tensor([[[1]]]), activation="sigmoid").predicted.item() == 1


def test_half_precision_is_widened_first(volumes):
    logits, labels = volumes
    for of in OF_CLASSES:
        assert same(
            of(logits.half(), labels, activation="softmax"), of(logits.half().float(), labels, activation="softmax")
        )


def test_every_split_of_the_voxels_adds_up_to_the_same_sums(volumes):
    logits, labels = volumes
    keep = torch.rand(labels.shape) < 0.5
    for of in OF_CLASSES:
        parts = [of(logits, labels, activation="softmax", mask=mask) for mask in (keep, ~keep)]
        assert_close(parts[0] + parts[1], of(logits, labels, activation="softmax"))


THIRDS = torch.full((1, 3, 2), 1 / 3)


@pytest.mark.parametrize(
    ("attempt", "error", "message"),
    [
        (lambda of: of(THIRDS, torch.tensor([[0, 3]])), LabelError, r"one of the classes 0 to 2; case 0, voxel 1"),
        (lambda of: of(THIRDS, torch.ones(1, 3, 2)), LabelError, r"exclusive classes must sum to 1"),
        (lambda of: of(THIRDS * 3, torch.zeros(1, 2)), RangeError, r"must sum to 1; one of case 0 has 3\..*of_regions"),
        (
            lambda of: of(THIRDS - 1, torch.zeros(1, 2)),
            RangeError,
            r"in \[0, 1\]; case 0, class 0 holds -0\.66.*logits",
        ),
        (lambda of: of(THIRDS * math.nan, torch.zeros(1, 2)), RangeError, r"case 0, class 0 holds nan"),
        (
            lambda of: of(THIRDS * math.nan, torch.zeros(1, 2), activation="softmax"),
            RangeError,
            r"logits must be numbers; case 0, class 0 holds nan\.$",
        ),
        (lambda of: of(THIRDS, torch.zeros(1, 2), activation="sigmoid"), ConfigError, r"one of 'softmax', 'none'; got"),
        (lambda of: of(THIRDS[:, :1], torch.zeros(1, 1, 2)), ShapeError, r"two or more; got one.*use of_regions"),
        (lambda of: of(THIRDS, torch.zeros(1, 5)), ShapeError, r"integer map"),
        (lambda of: of(THIRDS.numpy(), torch.zeros(1, 2)), ShapeError, r"must be a torch tensor.*from_numpy"),
    ],
)
@pytest.mark.parametrize("of", OF_CLASSES)
def test_what_is_not_of_exclusive_classes_is_refused(of, attempt, error, message):
    with pytest.raises(error, match=message):
        attempt(of)


@pytest.mark.parametrize("of", OF_REGIONS)
def test_what_is_not_of_regions_is_refused(of):
    with pytest.raises(ConfigError, match="one of 'sigmoid', 'none'; got 'softmax'"):
        of(THIRDS, torch.zeros(1, 2), activation="softmax")
    with pytest.raises(LabelError, match=r"must lie in \[0, 1\]"):
        of(THIRDS, torch.full((1, 3, 2), 2))
    with pytest.raises(RangeError, match=r"class 0 holds 1\.33333"):
        of(THIRDS + 1, torch.zeros(1, 3, 2))
    of(THIRDS, torch.ones(1, 3, 2))  # they overlap
