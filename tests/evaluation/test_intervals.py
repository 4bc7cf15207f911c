"""Intervals, tests and draws, against scipy and known distributions."""

import math

import numpy as np
import pytest
import torch
from scipy import stats as scipy_stats

from segcal import Binning, BinStatistics, ConfigError, FileError, ace, micro
from segcal.calibrators import LocalTemperature, Temperature, draw_sample
from segcal.datasets import known_dataset, make_phantom, make_split
from segcal.evaluation.intervals import (
    error_interval,
    expanded,
    group_matrix,
    holm,
    patients_of,
    permutation_p,
    quantile_interval,
    resample_weights,
    signed_rank_test,
    swap_blocks,
    t_test,
    weighted_mean,
    wilson,
    with_drawn_labels,
)


def doubles(*values):
    return torch.tensor(values, dtype=torch.float64)


def test_frames_of_one_acdc_patient_belong_together_and_other_cases_stand_alone():
    cases = ["patient001_frame01", "patient001_frame12", "patient002_frame01", "liver_7"]
    assert patients_of(cases) == ("patient001", "patient001", "patient002", "liver_7")
    assert patients_of(cases, "none") == tuple(cases)


def test_patients_come_from_a_file(tmp_path):
    path = tmp_path / "patients.csv"
    path.write_text("case,patient\na,1\nb,1\nc,2\n")
    assert patients_of(["c", "a"], str(path)) == ("2", "1")
    path.write_text(path.read_text(), encoding="utf-8-sig")  # as a spreadsheet writes it
    assert patients_of(["c", "a"], str(path)) == ("2", "1")
    with pytest.raises(ConfigError, match="must name the patient of every case; 'z' is not in it"):
        patients_of(["z"], str(path))
    with pytest.raises(FileError, match="cannot be read"):
        patients_of(["a"], str(tmp_path / "none.csv"))
    path.write_text("name,patient\na,1\n")
    with pytest.raises(ConfigError, match="columns case and patient"):
        patients_of(["a"], str(path))


def test_a_case_without_a_patient_or_with_two_is_refused(tmp_path):
    """Cases without one were all of one patient, and of two the last counted."""
    path = tmp_path / "patients.csv"
    path.write_text("case,patient\na,1\na,1\n,\n")
    assert patients_of(["a"], str(path)) == ("1",)
    both = "one patient of each case; 'a' has '1' and '2'"
    for row, message in (("a,2", both), ("b,", "got 'b' and ''"), ("b", "got 'b' and None")):
        path.write_text(f"case,patient\na,1\n{row}\n")
        with pytest.raises(ConfigError, match=message):
            patients_of(["a"], str(path))


@pytest.mark.parametrize(
    ("rule", "message"),
    [("(", "regular expression"), ("abc", "must have a group"), (r"x(\d+)", "does not match 'a1'")],
)
def test_a_wrong_expression_for_patients_is_refused(rule, message):
    with pytest.raises(ConfigError, match=message):
        patients_of(["a1"], rule)


@pytest.mark.parametrize("seed", [-1, 1.5, True, 1 << 32, "0"])
def test_a_seed_that_no_generator_takes_is_refused(seed):
    dataset = known_dataset("acdc")
    for use in (
        lambda: resample_weights(["a", "b"], seed=seed),
        lambda: Temperature(seed=seed),
        lambda: LocalTemperature(seed=seed),
        lambda: draw_sample([], voxels=10, activation="softmax", seed=seed),
        lambda: make_split(dataset, seed=seed),
        lambda: make_phantom("nowhere", seed=seed),
    ):
        with pytest.raises(ConfigError, match="seed must be a whole number from 0 to 4294967295; got"):
            use()


def test_a_draw_takes_patients_whole():
    weights = resample_weights(["p", "q", "p", "r"], number=500, seed=3)
    assert torch.equal(weights[:, 0], weights[:, 2])  # both cases of p
    assert torch.equal(weights[:, :2].sum(1) + weights[:, 3], torch.full((500,), 3.0, dtype=torch.float64))
    assert weights.mean(0) == pytest.approx(np.ones(4), abs=0.15)  # each patient once on average
    assert torch.equal(weights, resample_weights(["p", "q", "p", "r"], number=500, seed=3))


def test_means_of_draws_skip_what_has_no_value():
    values = doubles([1, 10], [math.nan, 20], [3, math.nan])
    weights = doubles([1, 1, 1], [0, 2, 1], [0, 1, 0])
    expected = [[2.0, 15.0], [3.0, 20.0], [math.nan, 20.0]]
    assert weighted_mean(values, weights).numpy() == pytest.approx(np.array(expected), nan_ok=True)


def test_the_bootstrap_interval_of_a_mean_has_the_width_theory_says():
    values = torch.from_numpy(np.random.default_rng(0).normal(5, 2, 400))
    drawn = weighted_mean(values[:, None], resample_weights([str(i) for i in range(400)], number=4000))
    low, high = quantile_interval(drawn)
    half = 1.96 * values.std().item() / math.sqrt(400)
    assert low.item() == pytest.approx(values.mean().item() - half, abs=0.1 * half)
    assert high.item() == pytest.approx(values.mean().item() + half, abs=0.1 * half)


def test_two_equal_frames_per_patient_do_not_narrow_the_interval():
    values = torch.from_numpy(np.random.default_rng(1).normal(0, 1, 100))
    single = quantile_interval(weighted_mean(values[:, None], resample_weights([str(i) for i in range(100)])))
    doubled = [str(i) for i in range(100) for _ in range(2)]
    twice = quantile_interval(weighted_mean(values.repeat_interleave(2)[:, None], resample_weights(doubled)))
    naive = quantile_interval(
        weighted_mean(values.repeat_interleave(2)[:, None], resample_weights([str(i) for i in range(200)]))
    )
    width = [float(high - low) for low, high in (single, twice, naive)]
    assert width[1] == pytest.approx(width[0], rel=1e-12)
    assert width[2] == pytest.approx(width[0] / math.sqrt(2), rel=0.1)


def test_an_interval_of_nothing_is_nan():
    low, high = quantile_interval(torch.full((10, 2), math.nan, dtype=torch.float64))
    assert low.isnan().all()
    assert high.isnan().all()


def test_wilson_agrees_with_scipy():
    low, high = wilson(doubles(0, 3, 10, 0), doubles(5, 10, 10, 0))
    for i, (k, n) in enumerate([(0, 5), (3, 10), (10, 10)]):
        interval = scipy_stats.binomtest(k, n).proportion_ci(method="wilson")
        assert (low[i].item(), high[i].item()) == pytest.approx((interval.low, interval.high), abs=1e-12)
    assert low[3].isnan()


def test_paired_tests_are_scipys_and_skip_what_has_no_partner():
    a, b = np.random.default_rng(2).normal(size=(2, 25))
    differences = torch.from_numpy(np.append(a - b, math.nan))
    assert t_test(differences) == pytest.approx(scipy_stats.ttest_rel(a, b).pvalue)
    assert signed_rank_test(differences) == pytest.approx(scipy_stats.wilcoxon(a, b).pvalue)


def test_tests_without_spread_or_pairs_do_not_invent_significance():
    assert t_test(doubles(0, 0, 0, 0, 0)) == signed_rank_test(doubles(0, 0, 0, 0, 0)) == 1
    assert t_test(doubles(*[0.1] * 5)) == signed_rank_test(doubles(*[0.1] * 5)) == 2 / 2**5  # of all sign patterns
    for few in (doubles(0.3), doubles(math.nan, 0.1, 0.2, 0.3, 0.4), doubles(0.1, 0.1, 0.1, 0.1)):
        assert math.isnan(t_test(few))
        assert math.isnan(signed_rank_test(few))


def test_the_t_test_of_cases_counts_patients_and_tests_the_mean_over_cases():
    differences = np.random.default_rng(5).normal(0.3, 1, 12)
    patients = [str(i // 2) for i in range(12)]
    of_patients = differences.reshape(6, 2).mean(1)
    p = t_test(torch.from_numpy(differences), group_matrix(patients))
    assert p == pytest.approx(scipy_stats.ttest_1samp(of_patients, 0).pvalue)
    # A patient with nine cases and five with one: the mean over cases is what is tested, not that over patients.
    uneven = np.r_[[1.0] * 9, [-1.0, -1.1, -0.9, -1.2, -0.8]]
    groups = group_matrix([*["a"] * 9, *"bcdef"])
    mean, residuals = uneven.mean(), np.r_[9 * (1 - uneven.mean()), uneven[9:] - uneven.mean()]
    error = math.sqrt(6 / 5 * (residuals**2).sum()) / 14
    expected = 2 * scipy_stats.t.sf(abs(mean / error), 5)
    assert t_test(torch.from_numpy(uneven), groups) == pytest.approx(expected)
    assert expected > 0.5  # one patient against five


def test_all_swaps_are_taken_where_they_are_few_and_a_draw_of_them_where_not():
    (every,) = swap_blocks(["p", "q", "p"], number=100)
    assert sorted(map(tuple, every.tolist())) == [(0, 0, 0), (0, 1, 0), (1, 0, 1), (1, 1, 1)]
    some = torch.cat(list(swap_blocks([str(i) for i in range(30)], number=400, seed=1)))
    assert some.shape == (400, 30)
    assert not some[0].any()
    assert some[1:].mean().item() == pytest.approx(0.5, abs=0.02)


def test_the_permutation_test_is_exact_under_the_null():
    """p is at most 5 % in 5 % of experiments without an effect, and never below 2 / 2^patients."""
    generator = np.random.default_rng(0)
    (tossed,) = swap_blocks([str(i) for i in range(8)], number=1000)
    signs = 1 - 2 * tossed
    p = [permutation_p(signs @ torch.from_numpy(generator.normal(size=8))) for _ in range(2000)]
    assert np.mean(np.array(p) <= 0.05) == pytest.approx(0.047, abs=0.012)  # 12 of the 256 ways
    assert min(p) == 2 / 256
    assert math.isnan(permutation_p(doubles(math.nan, 1.0)))


@pytest.mark.parametrize("patients", [8, 40])
@pytest.mark.parametrize("gap", [0.0, 0.02, 0.1])
def test_the_interval_of_an_error_covers_the_truth_and_holds_its_value(patients, gap):
    """Percentiles of a bootstrap cover a small error hardly ever, since draws of an absolute gap only grow it."""
    generator = np.random.default_rng(patients)
    bins, rounds = 20, 200
    covered = held = percentiles = 0
    for i in range(rounds):
        gaps = gap + generator.normal(0, 0.08, (patients, 1)) + generator.normal(0, 0.05, (patients, bins))
        weights = resample_weights([str(k) for k in range(patients)], number=400, seed=i).numpy() / patients
        value, drawn = abs(gaps.mean(0)).mean(), abs(weights @ gaps)
        apart = abs(weights @ gaps - gaps.mean(0)).mean(1)
        draws, level = drawn.mean(1), expanded(0.95, patients)
        low, high = error_interval(value, torch.from_numpy(draws), torch.from_numpy(apart), level=level)
        covered += low <= gap <= high
        held += low <= value <= high
        percentiles += np.quantile(draws, 0.025) <= gap <= np.quantile(draws, 0.975)
    assert held == rounds
    assert covered >= 0.92 * rounds
    assert gap > 0 or percentiles < 0.2 * rounds


def test_holm_multiplies_by_the_tests_left_and_never_decreases():
    assert holm([0.01, 0.04, 0.03, math.nan]) == pytest.approx([0.03, 0.06, 0.06, math.nan], nan_ok=True)
    assert holm([0.5, 0.9]) == [1.0, 1.0]
    assert holm([]) == []


def test_groups_are_rows_of_ones():
    assert group_matrix(["a", "b", "a"]).tolist() == [[1, 0, 1], [0, 1, 0]]


def test_micro_of_a_draw_is_that_of_the_cases_it_takes():
    count = torch.rand(4, 2, 5, dtype=torch.float64).mul(50).round()
    stats = BinStatistics(count, count * 0.3, (count * 0.2).round(), Binning(5))
    for reading in ("paper", "pooled"):
        drawn = micro(stats, reading=reading, weights=doubles([1, 1, 1, 1], [2, 0, 1, 0]))
        assert ace(drawn)[0].numpy() == pytest.approx(ace(micro(stats, reading=reading))[0].numpy())
        taken = micro(stats.select(cases=[0, 0, 2]), reading=reading)
        assert ace(drawn)[1].numpy() == pytest.approx(ace(taken)[0].numpy())


def test_drawn_labels_follow_the_binomial_of_each_bin():
    count = doubles([[[1000.0, 0.0, 40.0]]]).view(1, 1, 3)
    stats = BinStatistics(count, count * doubles(0.1, 0.5, 0.8), count, Binning(3))
    generator = np.random.default_rng(1)
    drawn = torch.cat([with_drawn_labels(stats, generator).label_sum for _ in range(4000)])[:, 0]
    assert drawn.mean(0).numpy() == pytest.approx([100, 0, 32], rel=0.02)
    assert drawn.std(0).numpy() == pytest.approx([math.sqrt(90), 0, math.sqrt(6.4)], rel=0.05)


def test_the_floor_of_a_large_bin_is_the_mean_absolute_normal_deviation():
    count = torch.full((1, 1, 1), 10_000.0, dtype=torch.float64)
    stats = BinStatistics(count, count * 0.5, count, Binning(1))
    generator = np.random.default_rng(0)
    floor = torch.stack([ace(with_drawn_labels(stats, generator)) for _ in range(3000)]).mean().item()
    assert floor == pytest.approx(math.sqrt(2 / math.pi) * 0.5 / 100, rel=0.04)
