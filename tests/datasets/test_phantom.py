"""The phantom's probabilities are the truth: drawn labels agree with them as far as chance allows, and no further."""

import hashlib
import json

import nibabel
import numpy as np
import pytest

from segcal.datasets import make_phantom, make_split, open_dataset
from segcal.datasets import phantom as source
from segcal.datasets.phantom import DRAW_SIGMA_MM, SPACING_MM, phantom_case
from segcal.errors import ConfigError, FileError
from segcal.evaluation.cohort import evaluate

SMALL = (40, 40, 26)
CASES = 10


@pytest.fixture(scope="module")
def phantom(tmp_path_factory):
    return make_phantom(tmp_path_factory.mktemp("phantom"), cases=CASES, size=SMALL)


def probabilities_and_labels(root):
    paths = sorted((root / "labelsTr").iterdir())
    labels = np.stack([np.asarray(nibabel.load(path).dataobj) for path in paths])
    maps = np.stack([np.asarray(nibabel.load(root / "probabilitiesTr" / path.name).dataobj) for path in paths])
    return maps, labels


def spread(probabilities, bins=20):
    """Bound on the expected ECE of the truth, by hand.

    The expected size of a bin's sum of (label - probability) is at most its standard deviation. Draws are functions of
    a Gaussian field with correlation exp(-d^2 / (4 sigma^2)); functions of two Gaussians correlate no more than these
    do, so the variance is at most the sum of p (1 - p) times the sum of the correlations over all lags.
    """
    lags = np.prod([(np.exp(-((np.arange(-40, 41) * mm) ** 2) / (4 * DRAW_SIGMA_MM**2))).sum() for mm in SPACING_MM])
    p = probabilities.astype(np.float64).ravel()
    variance = np.bincount(np.minimum(p * bins, bins - 1).astype(int), p * (1 - p), bins)
    return np.sqrt(lags * variance).sum() / p.size


def test_it_opens_as_a_dataset_and_as_a_decathlon_task(phantom):
    for name, root in (("phantom", phantom), ("phantom", phantom.parent), ("decathlon", phantom)):
        dataset = open_dataset(name, root)
        assert dataset.name == name
        assert len(dataset.cases) == CASES
        assert dataset.classes == ("background", "organ", "core", "vessel")
        assert dataset.recipe.patch == (48, 48, 32)
        assert dataset.problems == dataset.notes == ()
    split = make_split(dataset)
    assert (len(split.train), len(split.validation), len(split.test)) == (6, 1, 3)


def test_probabilities_are_float32_and_sum_to_exactly_one(phantom):
    maps, labels = probabilities_and_labels(phantom)
    assert maps.dtype == np.float32
    assert labels.dtype == np.uint8
    assert (maps.sum(-1, dtype=np.float32) == 1).all()
    assert (maps >= 0).all()


def test_labels_never_have_a_probability_of_zero(phantom):
    maps, labels = probabilities_and_labels(phantom)
    assert (np.take_along_axis(maps, labels[..., None].astype(int), -1) > 0).all()


def test_one_case_in_five_lacks_a_class(phantom):
    _, labels = probabilities_and_labels(phantom)
    lacking = {i: set(range(4)) - set(np.unique(label).tolist()) for i, label in enumerate(labels)}
    assert {i: classes for i, classes in lacking.items() if classes} == {3: {2}, 7: {3}}


def test_each_voxel_is_drawn_with_its_own_probability():
    # A label is chosen by a number that must be uniform: its share below any edge is the edge, within five deviations.
    draws = np.stack([source._draw(np.random.default_rng(seed), SMALL)[::8, ::8, ::8] for seed in range(100)])
    for edge in (0.001, 0.02, 0.5, 0.9, 0.999):
        share = (draws < edge).mean()  # voxels eight apart are as good as independent
        assert abs(share - edge) < 5 * np.sqrt(edge * (1 - edge) / draws.size)
    assert draws.min() >= 0
    assert draws.max() < 1


def test_the_true_probabilities_are_calibrated(phantom, tmp_path):
    outcome = evaluate(phantom / "probabilitiesTr", phantom / "labelsTr", tmp_path / "out")
    assert outcome.failures == []
    assert len(outcome.evaluation.cases) == CASES
    rows = [row for row in outcome.evaluation.summary() if row.metric == "ece" and row.cases == "all"]
    errors = {row.label: row.value for row in rows if row.average == "micro pooled"}
    maps, _ = probabilities_and_labels(phantom)
    for value, name in enumerate(("organ", "core", "vessel"), start=1):
        bound = spread(maps[..., value])
        assert bound < 0.01  # otherwise the test says nothing
        assert errors[name] < 2 * bound


def test_labels_of_another_case_are_not_calibrated(phantom):
    maps, labels = probabilities_and_labels(phantom)
    p, y = maps[..., 1].ravel().astype(float), (np.roll(labels, 1, 0) == 1).ravel()
    place = np.minimum(p * 20, 19).astype(int)
    ece = np.abs(np.bincount(place, p, 20) - np.bincount(place, y, 20)).sum() / p.size
    assert ece > 5 * spread(maps[..., 1])


def test_the_same_seed_gives_the_same_bytes(tmp_path, phantom):
    again = make_phantom(tmp_path, cases=3, size=SMALL)
    for folder in ("imagesTr", "labelsTr", "probabilitiesTr"):
        for path in (again / folder).iterdir():
            one, other = (hashlib.sha256((root / folder / path.name).read_bytes()) for root in (again, phantom))
            assert one.hexdigest() == other.hexdigest()


def test_cases_and_seeds_differ():
    images = [phantom_case(number, size=SMALL, seed=seed).image for number, seed in ((0, 0), (1, 0), (0, 1))]
    assert not np.array_equal(images[0], images[1])
    assert not np.array_equal(images[0], images[2])


def test_intensities_of_classes_overlap(phantom):
    # A threshold alone, the best one, must not find the organ: its Dice stays below what a network can reach.
    case = phantom_case(0, size=SMALL)
    organ = case.label > 0
    scores = []
    for threshold in np.percentile(case.image, range(50, 100, 5)):
        bright = case.image > threshold
        scores.append(2 * (bright & organ).sum() / (bright.sum() + organ.sum()))
    assert 0.2 < max(scores) < 0.75


def test_the_same_phantom_is_kept_and_another_refused(phantom):
    before = {path: path.stat().st_mtime_ns for path in phantom.rglob("*.nii.gz")}
    assert make_phantom(phantom.parent, cases=CASES, size=SMALL) == phantom
    assert {path: path.stat().st_mtime_ns for path in phantom.rglob("*.nii.gz")} == before
    with pytest.raises(FileError, match=r"cases 10, .* seed 1; it holds .*seed 0\. Choose another folder"):
        make_phantom(phantom.parent, cases=CASES, size=SMALL, seed=1)


def test_what_is_no_phantom_is_left_alone(tmp_path):
    folder = tmp_path / "Task00_Phantom"
    folder.mkdir()
    with pytest.raises(FileError, match="it holds something else"):
        make_phantom(tmp_path, cases=1)
    (folder / "dataset.json").write_text(json.dumps({"name": "mine"}))
    with pytest.raises(FileError, match="it holds another dataset"):
        make_phantom(tmp_path, cases=1)
    assert [path.name for path in folder.iterdir()] == ["dataset.json"]


def test_an_interrupted_phantom_leaves_nothing(tmp_path, monkeypatch):
    def interrupt(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(source, "phantom_case", interrupt)
    with pytest.raises(KeyboardInterrupt):
        make_phantom(tmp_path, cases=2)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"cases": 0}, "cases must be a whole number of at least 1; got 0"),
        ({"size": (8, 48, 32)}, r"size must be three lengths of at least \(40, 40, 26\) voxels; got \(8, 48, 32\)"),
        ({"size": (48, 48)}, "size must be three lengths"),
        ({"seed": -1}, "seed must be a whole number from 0 .* got -1"),
    ],
)
def test_senseless_options_are_refused(tmp_path, options, sentence):
    with pytest.raises(ConfigError, match=sentence):
        make_phantom(tmp_path, **options)
    assert list(tmp_path.iterdir()) == []
