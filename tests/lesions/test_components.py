"""Components of hand-made volumes: sizes, centers, confidences, and which predicted ones match which true ones."""

import math
import sys

import numpy as np
import pytest

from segcal import ConfigError
from segcal.lesions.components import Rules, match_components


def volume(shape=(12, 10, 8)):
    return np.zeros(shape, np.float32), np.zeros(shape, np.uint8)


def pairs_of(matched):
    return sorted(map(tuple, matched.pairs.T.tolist()))


def test_sizes_centers_and_confidences_are_those_of_the_voxels():
    predicted, true = volume()
    predicted[1:3, 2:5, 4] = [[0.5, 0.6, 0.9], [0.5, 0.7, 0.8]]
    predicted[8, 8, 7] = 0.6
    true[2, 2:6, 4] = 1
    found = match_components(predicted, true, Rules())
    assert found.predicted.voxels.tolist() == [6, 1]
    assert found.predicted.center.tolist() == [[1.5, 3, 4], [8, 8, 7]]
    assert found.confidence == pytest.approx([0.9, 0.6])
    assert found.true.voxels.tolist() == [4]
    assert found.true.center.tolist() == [[2, 3.5, 4]]
    assert pairs_of(found) == [(0, 0)]
    mean = match_components(predicted, true, Rules(confidence="mean"))
    assert mean.confidence == pytest.approx([4.0 / 6, 0.6])


def test_one_prediction_over_two_lesions_matches_both():
    predicted, true = volume()
    predicted[2:9, 4, 4] = 0.8
    true[2:4, 4, 4] = true[7:9, 4, 4] = 1
    assert pairs_of(match_components(predicted, true, Rules())) == [(0, 0), (0, 1)]
    # Each has 2 of 7 voxels: an intersection over union of 2/7.
    assert pairs_of(match_components(predicted, true, Rules(overlap=2 / 7))) == [(0, 0), (0, 1)]
    assert pairs_of(match_components(predicted, true, Rules(overlap=0.29))) == []


def test_two_predictions_in_one_lesion_both_match_it():
    predicted, true = volume()
    predicted[2:4, 4, 4], predicted[7:9, 4, 4] = 0.8, 0.6
    true[2:9, 4, 4] = 1
    assert pairs_of(match_components(predicted, true, Rules())) == [(0, 0), (1, 0)]


def test_what_touches_is_one_lesion_as_the_connectivity_says():
    predicted, true = volume()
    predicted[2, 2, 2] = predicted[3, 3, 2] = predicted[4, 4, 3] = 0.9  # by an edge, then by a corner
    numbers = {c: len(match_components(predicted, true, Rules(connectivity=c)).confidence) for c in (6, 18, 26)}
    assert numbers == {6: 3, 18: 2, 26: 1}


def test_small_lesions_are_left_out_and_so_is_what_hits_only_them():
    predicted, true = volume()
    true[1, 1, 1] = 1  # small
    true[5:9, 5, 5] = 1
    predicted[1:4, 1, 1] = 0.9  # hits the small one alone: neither right nor wrong
    predicted[5:8, 5, 5] = 0.8
    predicted[10, 1, 1] = 0.7  # small itself
    predicted[9:12, 9, 1] = 0.6  # false
    found = match_components(predicted, true, Rules(), least_voxels=3)
    assert found.confidence == pytest.approx([0.8, 0.6])
    assert found.true.voxels.tolist() == [4]
    assert pairs_of(found) == [(0, 0)]


def test_a_threshold_counts_from_itself_on_and_nothing_is_nothing():
    predicted, true = volume()
    predicted[1, 1, 1] = 0.7
    assert len(match_components(predicted, true, Rules(threshold=0.7)).confidence) == 1
    assert len(match_components(predicted, true, Rules(threshold=0.71)).confidence) == 0


@pytest.mark.parametrize("shape", [(20, 18, 9), (24, 30, 1)])
def test_components_are_those_of_a_flood_fill(shape):
    generator = np.random.default_rng(1)
    predicted = generator.random(shape).astype(np.float32)
    true = (generator.random(shape) < 0.1).astype(np.uint8)
    found = match_components(predicted, true, Rules(threshold=0.9))
    own, real = (flood(mask) for mask in (predicted >= 0.9, true == 1))
    assert sorted(found.predicted.voxels.tolist()) == sorted(map(len, own))
    assert sorted(found.true.voxels.tolist()) == sorted(map(len, real))
    assert sorted(found.confidence) == pytest.approx(sorted(max(predicted[v] for v in part) for part in own))
    assert found.pairs.shape[1] == sum(bool(a & b) for a in own for b in real)


def test_cc3d_and_scipy_find_the_same(monkeypatch):
    pytest.importorskip("cc3d")
    generator = np.random.default_rng(2)
    predicted, true = generator.random((20, 18, 9)), generator.random((20, 18, 9)) < 0.1
    for connectivity in (6, 18, 26):
        rules = Rules(threshold=0.85, connectivity=connectivity)
        fast = match_components(predicted, true, rules)
        with monkeypatch.context() as patch:
            patch.setitem(sys.modules, "cc3d", None)
            slow = match_components(predicted, true, rules)
        for one, other in ((fast.predicted, slow.predicted), (fast.true, slow.true)):
            assert np.array_equal(one.voxels, other.voxels)
            assert np.array_equal(one.center, other.center)
        assert np.array_equal(fast.confidence, slow.confidence)
        assert np.array_equal(fast.pairs, slow.pairs)


@pytest.mark.parametrize("shape", [(7, 1, 1), (1, 7, 1), (1, 1, 7), (7, 7, 1), (7, 1, 7), (1, 7, 7), (7, 7, 7)])
def test_every_second_voxel_of_a_line_or_plane_is_a_lesion_of_its_own(shape):
    predicted = np.zeros(shape, np.float32)
    predicted[::2, ::2, ::2] = 0.9
    found = match_components(predicted, predicted > 0.5, Rules())
    number = math.prod((n + 1) // 2 for n in shape)
    assert found.predicted.voxels.tolist() == [1] * number
    assert found.pairs.shape == (2, number)


def flood(mask):
    """Sets of connected voxels, one neighbor at a time."""
    left, parts = set(map(tuple, np.argwhere(mask).tolist())), []
    while left:
        edge = [left.pop()]
        part = set(edge)
        while edge:
            x, y, z = edge.pop()
            near = {(x + i, y + j, z + k) for i in (-1, 0, 1) for j in (-1, 0, 1) for k in (-1, 0, 1)} & left
            left -= near
            part |= near
            edge += near
        parts.append(part)
    return parts


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"threshold": 0}, "threshold must be a number above 0"),
        ({"overlap": 1.5}, "overlap must be a number from 0 to 1"),
        ({"connectivity": 8}, "connectivity must be one of 6, 18, 26"),
        ({"confidence": "median"}, "confidence must be one of 'max', 'mean'"),
        ({"min_size": "10ml"}, "min_size must be a number of voxels, as 5, or of mm3"),
        ({"min_size": -1}, "min_size must be"),
    ],
)
def test_rules_that_mean_nothing_are_refused(wrong, said):
    with pytest.raises(ConfigError, match=said):
        Rules(**wrong)


def test_millimeters_need_a_file_that_tells_them():
    assert Rules(min_size="10 mm3").least_voxels(2.5) == 4
    assert Rules(min_size=5).least_voxels(float("nan")) == 5
    with pytest.raises(ConfigError, match="needs files that tell the size of a voxel"):
        Rules(min_size="10mm3").least_voxels(float("nan"))
