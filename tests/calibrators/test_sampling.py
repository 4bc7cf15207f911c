"""Fits on drawn voxels: weights make the draw fair, and the stated error is the one that is found."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from truths import drawn

from segcal.calibrators import draw_sample, make_calibrator


@pytest.fixture(scope="module", params=["softmax", "sigmoid"])
def cohort(request):
    """Two cases of other sizes and distortions."""
    cases = []
    for i, voxels in enumerate((3000, 9000)):
        logits, labels = drawn(request.param, voxels=voxels, seed=i, spread=3)
        cases.append(((1.5 + i) * logits, labels))
    return request.param, cases


SEEDS = 30


@pytest.mark.parametrize(
    ("cohort", "method"),
    [("softmax", "temperature"), ("sigmoid", "temperature"), ("softmax", "vector")],
    indirect=["cohort"],
)
def test_estimates_lie_as_far_from_the_full_fit_as_their_errors_say(cohort, method):
    activation, cases = cohort
    full = make_calibrator(method, activation=activation).fit(cases).parameters.flatten()
    fits = [make_calibrator(method, activation=activation, voxels=1200, seed=s).fit(cases) for s in range(SEEDS)]
    errors = torch.tensor([fitted.report.sampling_errors for fitted in fits])
    off = torch.stack([fitted.parameters.flatten() for fitted in fits]) - full
    assert (off.abs() < 4 * errors).all()
    ratio = (off**2).mean(0).sqrt() / errors.mean(0)
    assert 0.7 < ratio.mean() < 1.4
    assert all(fitted.report.sampled < 1500 < fitted.report.voxels == 12_000 for fitted in fits)


def test_errors_vanish_as_a_draw_becomes_complete():
    logits, labels = drawn(voxels=4000, classes=2, spread=0.3)  # all doubtful: two strata
    share = int(labels.bincount().min())
    logits, labels = (
        torch.cat([side[..., labels == k][..., :share] for k in range(2)], -1) for side in (logits, labels)
    )
    found = {}
    for part in (0.25, 0.99):
        sample = int(part * share) * 6  # over two classes and three levels of sureness
        (found[part],) = make_calibrator("temperature", voxels=sample).fit([(logits, labels)]).report.sampling_errors
    # As (1 / drawn - 1 / all) under the root.
    assert found[0.99] / found[0.25] == pytest.approx(((1 / 0.99 - 1) / (1 / 0.25 - 1)) ** 0.5, rel=0.3)


def test_sums_over_a_sample_estimate_sums_over_all_voxels(cohort):
    activation, cases = cohort
    true = sum(float(logits.sigmoid().sum()) for logits, _ in cases)
    found = []
    for seed in range(SEEDS):
        sample = draw_sample(cases, voxels=1000, activation=activation, seed=seed)
        found.append(sum(float((p.logits.sigmoid() * p.weights).sum()) for p in sample.pieces()))
    assert abs(np.mean(found) - true) < 4 * np.std(found) / SEEDS**0.5
    assert np.std(found) < 0.05 * true


def test_weights_sum_to_the_voxels_of_every_case(cohort):
    activation, cases = cohort
    sample = draw_sample(cases, voxels=1000, activation=activation, seed=0)
    assert sample.voxels == 12_000
    assert sample.classes == 3
    for strata, (logits, _) in zip(sample.cases, cases, strict=True):
        assert sum(float(piece.weights.sum()) for piece in strata) == pytest.approx(logits.shape[1], rel=1e-12)
    if activation == "softmax":
        counted = torch.bincount(torch.cat([labels for _, labels in cases]))
    else:
        counted = torch.cat([labels for _, labels in cases], 1).long().sum(1)
    assert torch.equal(sample.true_voxels, counted.double())
    assert sample.drawn == sum(piece.logits.shape[1] for piece in sample.pieces()) < 1500


def test_a_sample_is_of_voxels_that_there_are(cohort):
    activation, cases = cohort
    sample = draw_sample(cases, voxels=1000, activation=activation, seed=0)
    for strata, (logits, labels) in zip(sample.cases, cases, strict=True):
        there = {(*z.tolist(), *y.reshape(-1).tolist()) for z, y in zip(logits.mT, labels.movedim(-1, 0), strict=True)}
        taken = [
            (*z.tolist(), *(int(label) for label in y.reshape(-1)))
            for piece in strata
            for z, y in zip(piece.logits.mT, piece.labels.movedim(-1, 0), strict=True)
        ]
        assert len(set(taken)) == len(taken)
        assert set(taken) <= there


def test_some_cases_of_a_sample_are_the_sample_of_some_cases(cohort):
    activation, cases = cohort
    sample = draw_sample(cases, voxels=1000, activation=activation, seed=0)
    part = sample.select([1])
    assert part.cases == (sample.cases[1],)
    assert part.voxels == 9000
    assert part.true_voxels + sample.select([0]).true_voxels == pytest.approx(
        sample.true_voxels, rel=0.1 if activation == "sigmoid" else 1e-9
    )


def test_the_same_seed_draws_the_same_voxels_and_another_one_others(cohort):
    activation, cases = cohort
    one, again, other = (draw_sample(cases, voxels=500, activation=activation, seed=seed) for seed in (1, 1, 2))
    pairs = list(zip(one.pieces(), again.pieces(), strict=True))
    assert all(torch.equal(a.logits, b.logits) and torch.equal(a.labels, b.labels) for a, b in pairs)
    assert any(not torch.equal(a.logits, b.logits) for a, b in zip(one.pieces(), other.pieces(), strict=True))


def test_how_a_case_is_cut_leaves_its_sample_alike(cohort, monkeypatch):
    activation, cases = cohort
    whole = draw_sample(cases, voxels=500, activation=activation, seed=1)
    monkeypatch.setattr("segcal.calibrators.stream.PIECE_ELEMENTS", 1)
    pieces = draw_sample(cases, voxels=500, activation=activation, seed=1)
    for a, b in zip(whole.pieces(), pieces.pieces(), strict=True):
        assert torch.equal(a.weights, b.weights)
        assert torch.equal(a.logits, b.logits)


def test_small_strata_are_taken_whole():
    logits, labels = torch.zeros(2, 10_000), torch.zeros(10_000, dtype=torch.uint8)
    logits[0] = 3
    labels[:5] = 1  # rare
    logits[0, 5:9] = 0.1  # doubtful
    sample = draw_sample([(logits, labels)], voxels=100, activation="softmax", seed=0)
    sizes = sorted((piece.logits.shape[1], float(piece.weights[0])) for piece in sample.pieces())
    assert sizes[:2] == [(4, 1.0), (5, 1.0)]
    assert sizes[2][0] * sizes[2][1] == pytest.approx(9991)


@pytest.mark.parametrize("method", ["temperature", "beta"])
def test_a_draw_of_every_voxel_is_the_full_fit(cohort, method):
    activation, cases = cohort
    full = make_calibrator(method, activation=activation).fit(cases)
    drawn_fit = make_calibrator(method, activation=activation, voxels=10_000_000).fit(cases)
    assert drawn_fit.report.sampled == 12_000
    assert drawn_fit.report.after == pytest.approx(full.report.after, rel=1e-7)
    assert set(drawn_fit.report.sampling_errors) == {0.0}


@pytest.mark.parametrize("method", ["temperature", "vector"])
def test_a_sample_that_was_drawn_before_is_not_drawn_again(cohort, method):
    activation, cases = cohort
    sample = draw_sample(cases, voxels=2000, activation=activation, seed=5)
    settings = {"activation": activation, "voxels": 2000, "seed": 5}
    given, own = (
        make_calibrator(method, **settings).fit(cases, sample=sample),
        make_calibrator(method, **settings).fit(cases),
    )
    assert given.state() == own.state()
    assert given.report == own.report
