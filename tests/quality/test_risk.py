"""Thresholds with a guarantee: by hand, and by the risk of new patients in simulations."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from segcal import bin_statistics
from segcal.errors import ConfigError
from segcal.quality.risk import bet_against, learn_thresholds
from segcal.statistics import BinStatistics


def cohort(number: int, seed: int, *, sharpness: float = 3.0, bins: int = 200) -> BinStatistics:
    """Cases whose labels are drawn from their probabilities, and whose doubt differs from case to case."""
    draw = np.random.default_rng(seed)
    logits = draw.normal(size=(number, 1, 300)) * sharpness * draw.uniform(0.3, 2.0, size=(number, 1, 1)) - 1
    probabilities = 1 / (1 + np.exp(-logits))
    labels = draw.random(probabilities.shape) < probabilities
    return bin_statistics(torch.from_numpy(probabilities), torch.from_numpy(labels.astype(np.float64)), bins=bins)


def risks(guarantee, stats: BinStatistics, kind: str) -> np.ndarray:
    """Of each case, counted from its bins at the threshold that it gets."""
    found = []
    for i in range(stats.cases):
        k = int(guarantee.bins(stats.count[i].numpy(), stats.confidence_sum[i].numpy())[0])
        decided, hits = stats.count[i, 0, k:].sum().item(), stats.label_sum[i, 0, k:].sum().item()
        true = stats.label_sum[i, 0].sum().item()
        if kind == "fnr":
            found.append(1 - hits / true)
        elif kind == "fdr":
            found.append(1 - hits / decided if decided else 0.0)
        else:
            found.append(1 - 2 * hits / (decided + true))
    return np.array(found)


def test_the_threshold_is_the_last_one_within_the_bound_by_hand():
    # Nine patients with two voxels of the class at 0.25 and 0.75: a threshold above 0.25 loses half, above 0.75 all.
    stats = bin_statistics(torch.tensor([[[0.25, 0.75]]] * 9), torch.ones(9, 1, 2), bins=4)
    half = learn_thresholds(stats, np.arange(9), ("a",), risk="fnr", level=0.56, adaptive=False)
    assert half.learned[0].parameter == 3  # (9 * 0.5 + 1) / 10 = 0.55
    none = learn_thresholds(stats, np.arange(9), ("a",), risk="fnr", level=0.54, adaptive=False)
    assert none.learned[0].parameter == 1  # edges 0 and 1 lose nothing: (0 + 1) / 10


def test_false_discoveries_get_the_lowest_threshold_within_the_bound_by_hand():
    stats = bin_statistics(torch.tensor([[[0.25, 0.75]]] * 9), torch.tensor([[[0.0, 1.0]]] * 9), bins=4)
    found = learn_thresholds(stats, np.arange(9), ("a",), risk="fdr", level=0.3, adaptive=False)
    assert found.learned[0].parameter == 2  # from 0.5 on only the right one is left; below, half is false


def test_too_few_patients_are_refused_with_the_number_needed():
    with pytest.raises(ConfigError, match=r"^a: a false-negative rate of at most 0.05 needs at least 19 patients"):
        learn_thresholds(cohort(12, 0), np.arange(12), ("a",), risk="fnr", level=0.05)
    with pytest.raises(ConfigError, match="1 - Dice must be shown to be at most"):
        learn_thresholds(cohort(12, 0), np.arange(12), ("a",), risk="dice-loss", level=0.3)
    with pytest.raises(ConfigError, match="must be one of 'fnr', 'fdr', 'dice-loss'; got 'auc'"):
        learn_thresholds(cohort(12, 0), np.arange(12), ("a",), risk="auc", level=0.3)
    with pytest.raises(ConfigError, match="at least 1e-06 and below 1"):
        learn_thresholds(cohort(12, 0), np.arange(12), ("a",), risk="fnr", level=1.5)


@pytest.mark.parametrize("adaptive", [True, False])
@pytest.mark.parametrize("kind", ["fnr", "fdr"])
def test_new_patients_stay_within_the_level_on_average(kind, adaptive):
    means = []
    for seed in range(40):
        known, new = cohort(30, seed), cohort(30, 1000 + seed)
        rule = learn_thresholds(known, np.arange(30), ("a",), risk=kind, level=0.15, adaptive=adaptive)
        means.append(risks(rule, new, kind).mean())
    assert 0.08 < np.mean(means) < 0.15 + 3 * np.std(means) / np.sqrt(len(means))


def test_adaptive_thresholds_spread_the_risk_less():
    known, new = cohort(60, 1), cohort(200, 2)
    spread = {
        adaptive: risks(
            learn_thresholds(known, np.arange(60), ("a",), risk="fnr", level=0.15, adaptive=adaptive), new, "fnr"
        ).std()
        for adaptive in (True, False)
    }
    assert spread[True] < 0.85 * spread[False]


def test_overconfident_probabilities_keep_the_guarantee():
    """Calibration makes thresholds sharp; the guarantee does not need it."""
    means = []
    for seed in range(30):
        known, new = cohort(30, seed), cohort(30, 500 + seed)
        both = []
        for stats in (known, new):  # each bin's confidence moved away from 1/2, labels as they were
            mean = (stats.confidence_sum / stats.count.clamp(min=1)).clamp(1e-6, 1 - 1e-6)
            odds = (mean / (1 - mean)) ** 3
            both.append(BinStatistics(stats.count, stats.count * odds / (1 + odds), stats.label_sum, stats.binning))
        rule = learn_thresholds(both[0], np.arange(30), ("a",), risk="fnr", level=0.15)
        means.append(risks(rule, both[1], "fnr").mean())
    assert np.mean(means) < 0.15 + 3 * np.std(means) / np.sqrt(len(means))


def test_dice_loss_that_passes_holds_for_new_patients():
    known, new = cohort(200, 3), cohort(300, 4)
    for adaptive in (True, False):
        rule = learn_thresholds(known, np.arange(200), ("a",), risk="dice-loss", level=0.35, adaptive=adaptive)
        assert risks(rule, new, "dice-loss").mean() < 0.35


def test_betting_rejects_rarely_where_the_mean_is_the_level():
    draw = np.random.default_rng(0)
    rejected = [bet_against((draw.random(50) < 0.2).astype(float), 0.2) <= 0.1 for _ in range(500)]
    assert np.mean(rejected) <= 0.1 + 3 * np.sqrt(0.09 / 500)
    assert bet_against(np.full(60, 0.05), 0.2) < 0.01


def test_cases_without_the_class_have_no_false_negatives():
    stats = bin_statistics(
        torch.tensor([[[0.25, 0.75]]] * 12), torch.tensor([[[1.0, 1.0]]] * 9 + [[[0.0, 0.0]]] * 3), bins=4
    )
    found = learn_thresholds(stats, np.arange(12), ("a",), risk="fnr", level=0.3)
    assert found.learned[0].patients == 9
