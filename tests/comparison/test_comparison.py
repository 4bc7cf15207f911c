"""Means, deviations, changes and stars of hand-made evaluations, worked out with scipy on the numbers put in."""

import csv
import json
import math
from dataclasses import replace

import nibabel
import numpy as np
import pytest
import torch
from handmade import evaluation_of
from scipy import stats as scipy_stats
from typer.testing import CliRunner

import segcal
from segcal import ConfigError, compare
from segcal.cli import app
from segcal.comparison.tables import LAYOUTS, comparison_tables, make_table, notes, to_csv, to_json, write_comparison
from segcal.evaluation.evaluation import read_evaluations
from segcal.evaluation.intervals import resample_weights
from segcal.evaluation.remarks import remarks
from segcal.evaluation.tables import Cell, to_latex, to_markdown, to_terminal
from segcal.plots import new_figure
from segcal.report import build_report

CASES = 24
T = scipy_stats.t.ppf(0.975, CASES - 1) * math.sqrt(CASES / (CASES - 1))  # of an interval widened for few cases
ENDS = [scipy_stats.norm.cdf(-T), scipy_stats.norm.cdf(T)]
GENERATOR = np.random.default_rng(7)
BASE_GAP = GENERATOR.uniform(0.05, 0.3, (CASES, 2))
CLEAR_GAP = BASE_GAP - GENERATOR.uniform(0.0, 0.03, (CASES, 2))  # lower in every case
FAINT_GAP = BASE_GAP + GENERATOR.normal(0.004, 0.01, (CASES, 2))
DICE = GENERATOR.uniform(0.7, 0.9, (CASES, 2))


def make(gaps, dices=DICE, **options):
    return evaluation_of(torch.from_numpy(gaps), torch.from_numpy(dices), **options)


@pytest.fixture(scope="module")
def methods():
    return {"base": make(BASE_GAP), "clear": make(CLEAR_GAP), "faint": make(FAINT_GAP, DICE - 0.01)}


@pytest.fixture(scope="module")
def comparison(methods):
    return compare(methods)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ({"average": "micro"}, "average must be one of 'macro', 'micro paper', 'micro pooled'; got 'micro'"),
        ({"label": "kidney"}, "label must be one of 'liver', 'tumour', None; got 'kidney'"),
        ({"metric": "ECE"}, "metric must be one of 'dice', 'ace', 'ece'"),
        ({"average": "micro paper"}, "there is no entry with all of these names"),
    ],
)
def test_an_entry_that_is_not_there_is_refused_with_those_that_are(comparison, names, message):
    """The paper's micro average has no Dice."""
    with pytest.raises(ConfigError, match=message):
        comparison.find("base", **names)
    with pytest.raises(ConfigError, match="method must be one of 'base', 'clear', 'faint'; got 'other'"):
        comparison.find("other")


def test_means_deviations_and_changes_are_those_of_the_numbers_put_in(comparison):
    for label, column in (("liver", 0), ("tumour", 1)):
        entry = comparison.find("clear", label=label, metric="ace")
        assert entry.value == pytest.approx(CLEAR_GAP[:, column].mean())
        assert entry.std == pytest.approx(CLEAR_GAP[:, column].std(ddof=1))
        assert entry.change == pytest.approx(CLEAR_GAP[:, column].mean() / BASE_GAP[:, column].mean() - 1)
        assert entry.number == CASES
        assert comparison.find("base", label=label).value == pytest.approx(DICE[:, column].mean())
    mean = comparison.find("faint", metric="mce")
    assert mean.value == pytest.approx(FAINT_GAP.mean())
    assert mean.std == pytest.approx(FAINT_GAP.mean(1).std(ddof=1))
    assert math.isnan(comparison.find("base", metric="ace").change)


@pytest.mark.parametrize("test", ["t", "wilcoxon"])
@pytest.mark.parametrize("holm", [False, True])
def test_stars_are_those_of_scipys_tests(methods, test, holm):
    comparison = compare(methods, test=test, correction="holm" if holm else "none", resamples=10, draws=1)
    expected = {}
    for name, gaps in (("clear", CLEAR_GAP), ("faint", FAINT_GAP)):
        for label, column in (("liver", 0), ("tumour", 1)):
            a, b = gaps[:, column], BASE_GAP[:, column]
            p_t, p_w = scipy_stats.ttest_rel(a, b).pvalue, scipy_stats.wilcoxon(a, b).pvalue
            entry = comparison.find(name, label=label, metric="ece")
            assert (entry.p_t, entry.p_wilcoxon) == pytest.approx((p_t, p_w))
            expected[name, label] = p_t if test == "t" else p_w
    if holm:  # scipy has none: by its definition, over the four tests of classes
        ranked = sorted(expected, key=expected.__getitem__)
        running = 0.0
        for i, key in enumerate(ranked):
            running = max(running, min(1.0, (4 - i) * expected[key]))
            expected[key] = running
    for (name, label), p in expected.items():
        entry = comparison.find(name, label=label, metric="ece")
        assert entry.p == pytest.approx(p)
        assert entry.stars == ("**" if p < 0.01 else "*" if p < 0.05 else "")
    assert {comparison.find(n, label=c, metric="ece").stars for n, c in expected} >= {"**"}
    assert comparison.find("base", label="liver", metric="ece").stars == ""


def test_a_method_against_itself_differs_in_nothing(methods):
    comparison = compare({"base": methods["base"], "again": methods["base"]}, resamples=50, draws=2)
    for entry in comparison.entries:
        if entry.method == "again" and not math.isnan(entry.value):
            assert entry.stars == ""
            assert entry.difference_low == entry.difference_high == 0


def test_micro_intervals_hold_the_value_and_tell_methods_apart(comparison):
    for average in ("micro paper", "micro pooled"):
        entry = comparison.find("clear", average=average, label="liver", metric="ace")
        assert entry.value == pytest.approx(CLEAR_GAP[:, 0].mean())  # all cases have as many voxels
        half = T * CLEAR_GAP[:, 0].std() / math.sqrt(CASES)
        assert (entry.low, entry.high) == pytest.approx((entry.value - half, entry.value + half), abs=0.2 * half)
        assert entry.difference_high < 0
        assert entry.stars == "**"
        assert math.isnan(entry.std)


def test_the_floor_is_that_of_chance(comparison):
    entry = comparison.find("base", label="liver", metric="ace")
    expected = math.sqrt(2 / math.pi) * math.sqrt(0.525 * 0.475 / 1000)  # 1000 voxels in one bin
    assert entry.floor == pytest.approx(expected, rel=0.1)
    pooled = comparison.find("base", average="micro pooled", label="liver", metric="ace")
    assert pooled.floor == pytest.approx(expected / math.sqrt(CASES), rel=0.25)
    assert math.isnan(comparison.find("base", label="liver").floor)  # Dice has none


def test_two_frames_of_a_patient_count_once_in_tests():
    frames = [f"patient{i:03d}_frame{f:02d}" for i in range(12) for f in (1, 9)]
    base, other = make(BASE_GAP, cases=frames), make(FAINT_GAP, cases=frames)
    grouped = compare({"a": base, "b": other}, resamples=50, draws=1)
    assert (grouped.cases, grouped.patients) == (24, 12)
    difference = (FAINT_GAP - BASE_GAP)[:, 0].reshape(12, 2).mean(1)
    entry = grouped.find("b", label="liver", metric="ace")
    assert entry.p_t == pytest.approx(scipy_stats.ttest_1samp(difference, 0).pvalue)
    assert entry.std == pytest.approx(FAINT_GAP[:, 0].std(ddof=1))  # still over cases
    apart = compare({"a": base, "b": other}, patients="none", resamples=50, draws=1)
    assert apart.patients == 24
    assert apart.find("b", label="liver", metric="ace").p_t != pytest.approx(entry.p_t)
    assert "24 cases of 12 patients" in notes(grouped)[0]


def test_cases_are_matched_by_name_in_any_order_and_missing_ones_are_reported(methods):
    order = list(range(CASES))[::-1]
    shuffled = methods["clear"].select(cases=order[:-2])  # lacks case 0 and case 1
    comparison = compare({"base": methods["base"], "other": shuffled}, resamples=20, draws=1)
    assert comparison.unmatched == {"case 0": ("other",), "case 1": ("other",)}
    assert comparison.cases == CASES - 2
    assert comparison.find("base", label="liver", metric="ace").value == pytest.approx(BASE_GAP[2:, 0].mean())
    p = scipy_stats.ttest_rel(CLEAR_GAP[2:, 0], BASE_GAP[2:, 0]).pvalue
    assert comparison.find("other", label="liver", metric="ace").p_t == pytest.approx(p)
    assert "Left out: case 1, which other lacks." in notes(comparison)


def test_complete_cases_have_their_own_entries():
    absent = [(0, 1), (5, 1)]
    parts = {"a": make(BASE_GAP, absent=absent), "b": make(CLEAR_GAP, absent=absent)}
    comparison = compare(parts, resamples=20, draws=1)
    assert (comparison.cases, comparison.complete, comparison.case_sets) == (CASES, CASES - 2, ("all", "complete"))
    kept = [i for i in range(CASES) if i not in (0, 5)]
    assert comparison.find("b", cases="complete", metric="ace").value == pytest.approx(CLEAR_GAP[kept].mean())
    assert comparison.find("a", label="tumour").value == pytest.approx(
        DICE[kept, 1].mean()
    )  # where it is absent, it has no Dice


def test_what_cannot_be_compared_is_refused(methods):
    base = methods["base"]
    with pytest.raises(ConfigError, match="have none in common"):
        compare({"a": base, "b": make(BASE_GAP, cases=[f"other {i}" for i in range(CASES)])})
    with pytest.raises(ConfigError, match="same classes; a has liver, tumour, b has liver, cyst"):
        compare({"a": base, "b": make(BASE_GAP, classes=("liver", "cyst"))})
    with pytest.raises(ConfigError, match="same bins; a has 20, b 10"):
        compare({"a": base, "b": replace(base, bins=10)})
    other = replace(base.overlap, true=base.overlap.true + torch.eye(CASES, 2))
    with pytest.raises(ConfigError, match="same labels; case 'case 0' has 100 voxels of liver in a and 101 in b"):
        compare({"a": base, "b": replace(base, overlap=other)})
    with pytest.raises(ConfigError, match="at least one evaluation"):
        compare({})
    with pytest.raises(ConfigError, match="level must lie between 0 and 1"):
        compare(methods, level=95)
    assert compare({"a": base, "b": replace(base, bins=10)}, bins=10, resamples=2, draws=1).bins == 10


def test_the_latex_table_reads_as_the_papers(comparison):
    text = to_latex(comparison_tables(comparison)[0])
    assert r"\toprule" in text
    assert r"\bottomrule" in text
    mean, std = CLEAR_GAP.mean(), CLEAR_GAP.mean(1).std(ddof=1)
    assert rf"\textbf{{{mean:.3f} $\pm$ {std:.3f}$^{{**}}$}}" in text  # best, starred
    dice, spread = DICE.mean(), DICE.mean(1).std(ddof=1)
    assert text.count(rf"\textbf{{{dice:.3f} $\pm$ {spread:.3f}}}") == 2  # equal values are both best
    assert text.count("{") == text.count("}")


def test_names_cannot_break_a_table(methods):
    odd = {"a|b_*1*": methods["base"], "50% & \\{x} λ\n": methods["clear"]}
    tables = comparison_tables(compare(odd, resamples=5, draws=1))
    widths = {line.replace(r"\|", "").count("|") for line in to_markdown(tables[0]).splitlines()[2:]}
    assert len(widths) == 1
    assert r"50\% \& \textbackslash{}\{x\} $\lambda$ " in to_latex(tables[0])


def test_every_number_is_in_the_csv(comparison, tmp_path):
    paths = write_comparison(comparison, tmp_path / "new" / "folder")
    assert [path.name for path in paths] == ["comparison.csv", "comparison.md", "comparison.tex"]
    rows = list(csv.DictReader(paths[0].read_text().splitlines()))
    assert len(rows) == len(comparison.entries)
    row = next(r for r in rows if r["method"] == "clear" and r["class"] == "liver" and r["metric"] == "ace")
    assert float(row["value"]) == comparison.find("clear", label="liver", metric="ace").value
    assert "ignores the correlation of neighboring voxels" in paths[1].read_text()


SEED_GAPS = {  # (seed, case, class), of either sign: means of sizes are not sizes of means
    "base": BASE_GAP + GENERATOR.normal(0, 0.2, (3, CASES, 2)),
    "other": CLEAR_GAP + GENERATOR.normal(0, 0.15, (3, CASES, 2)),
}
SEED_DICES = {
    "base": DICE + GENERATOR.normal(0, 0.02, (3, CASES, 2)),
    "other": DICE + GENERATOR.normal(0.01, 0.02, (3, CASES, 2)),
}


def seeds_of(name, number=3):
    parts = [make(SEED_GAPS[name][i], SEED_DICES[name][i], voxels=(1000.0, 100.0, 400.0)[i]) for i in range(number)]
    return [parts[0], *(part.select(cases=list(range(CASES))[::-1]) for part in parts[1:])]  # in any order


def numbers(comparison):
    """Every entry, with each number to its last bit."""
    return [[x.hex() if isinstance(x, float) else x for x in entry] for entry in comparison.entries]


@pytest.fixture(scope="module")
def seeded():
    return compare({name: seeds_of(name) for name in SEED_GAPS})


@pytest.mark.parametrize("metric", ["ace", "dice"])
@pytest.mark.parametrize("label", ["liver", "tumour", None])
def test_macro_values_and_tests_of_several_seeds_are_those_of_the_means_of_cases(seeded, metric, label):
    single = {}  # (seed, case)
    for name in SEED_GAPS:
        values = abs(SEED_GAPS[name]) if metric == "ace" else SEED_DICES[name]
        single[name] = values.mean(2) if label is None else values[..., ("liver", "tumour").index(label)]
    by_case = {name: values.mean(0) for name, values in single.items()}
    weights = resample_weights(list(map(str, range(CASES)))).numpy() / CASES
    for name in SEED_GAPS:
        entry = seeded.find(name, label=label, metric=metric)
        assert (entry.seeds, entry.number) == (3, CASES)
        assert entry.value == pytest.approx(by_case[name].mean())
        assert entry.std == pytest.approx(by_case[name].std(ddof=1))
        assert entry.seed_std == pytest.approx(single[name].mean(1).std(ddof=1))
        assert (entry.low, entry.high) == pytest.approx(tuple(np.quantile(weights @ by_case[name], ENDS)))
    a, b = by_case["other"].mean(), by_case["base"].mean()
    assert entry.change == pytest.approx(a / b - 1 if metric == "ace" else a - b)  # of Dice in points
    assert entry.p_t == pytest.approx(scipy_stats.ttest_rel(by_case["other"], by_case["base"]).pvalue)
    assert entry.p_wilcoxon == pytest.approx(scipy_stats.wilcoxon(by_case["other"], by_case["base"]).pvalue)
    shifts = weights @ (by_case["other"] - by_case["base"])
    ends = np.quantile(shifts, ENDS) - (shifts.mean() - (a - b))
    assert (entry.difference_low, entry.difference_high) == pytest.approx(tuple(ends))


def test_micro_values_of_several_seeds_are_the_means_of_their_own_in_every_draw(seeded):
    weights = resample_weights(list(map(str, range(CASES)))).numpy() / CASES
    drawn, value = {}, {}
    for name, gaps in SEED_GAPS.items():
        single = abs(gaps[..., 0].mean(1))  # all cases of a seed have as many voxels
        entry = seeded.find(name, average="micro pooled", label="liver", metric="ace")
        value[name], drawn[name] = single.mean(), abs(weights @ gaps[..., 0].T).mean(1)
        apart = abs(weights @ gaps[..., 0].T - gaps[..., 0].mean(1)).mean(1)
        high = np.quantile(drawn[name], ENDS[1]) - (drawn[name].mean() - single.mean())
        low = max(0, single.mean() - np.quantile(apart, ENDS[1]))
        assert entry.value == pytest.approx(value[name])
        assert entry.seed_std == pytest.approx(single.std(ddof=1))
        assert (entry.low, entry.high) == pytest.approx((low, max(high, single.mean())))
        assert math.isnan(entry.std)
    assert entry.change == pytest.approx(value["other"] / value["base"] - 1)
    shifts, observed = drawn["other"] - drawn["base"], value["other"] - value["base"]
    ends = np.quantile(shifts, ENDS) - (shifts.mean() - observed)
    assert (entry.difference_low, entry.difference_high) == pytest.approx(tuple(ends))


def test_the_floor_of_several_seeds_is_the_mean_of_theirs(seeded):
    first, *others = seeds_of("base")
    alone = [compare({"first": first, "one": part}, resamples=2) for part in (first, *others)]  # cases in one order
    assert math.isnan(seeded.find("base", average="micro paper", label="liver", metric="ace").floor)  # not chance
    for average in ("macro", "micro pooled"):
        floors = [one.find("one", average=average, label="liver", metric="ace").floor for one in alone]
        assert len(set(floors)) == 3
        assert seeded.find("base", average=average, label="liver", metric="ace").floor == pytest.approx(np.mean(floors))


def test_one_seed_in_a_list_is_the_evaluation_itself(methods):
    plain = compare(methods, resamples=50, draws=2)
    listed = compare({name: [part] for name, part in methods.items()}, resamples=50, draws=2)
    assert numbers(plain) == numbers(listed)
    assert all(entry.seeds == 1 and math.isnan(entry.seed_std) for entry in plain.entries)
    assert not any("seeds" in sentence for sentence in notes(plain))


def test_values_changes_and_tests_are_about_the_same_cases():
    """A case in which one method alone has a value counted for it, and its change was not that of the tested pairs."""
    base, other = make(BASE_GAP), make(BASE_GAP)
    for sums in (other.statistics.count, other.statistics.confidence_sum, other.statistics.label_sum):
        sums[:6, 1] = 0  # six cases without a voxel, and so without an error
    entry, first = (
        compare({"a": base, "b": other}, resamples=20, draws=1).find(n, label="tumour", metric="ace") for n in "ba"
    )
    assert entry.number == first.number == CASES - 6
    assert entry.value == first.value == pytest.approx(BASE_GAP[6:, 1].mean())
    assert (entry.change, entry.p) == (0, 1)


def test_a_class_predicted_where_it_is_absent_changes_no_dice():
    """One false voxel in each of 6 of 20 cases gave -30 % with p = 1."""
    absent = [(i, 1) for i in range(6)]
    base = make(BASE_GAP[:20], DICE[:20], absent=absent)
    predicted = base.overlap.predicted.clone()
    predicted[:6, 1] = 0
    clean = replace(base, overlap=replace(base.overlap, predicted=predicted))
    entry = compare({"clean": clean, "false alarms": base}, resamples=20, draws=1).find("false alarms", label="tumour")
    assert (entry.number, entry.change, entry.p) == (14, 0, 1)
    assert entry.value == pytest.approx(DICE[6:20, 1].mean())


@pytest.mark.parametrize("patients", [1, 2, 3, 4, 5])
def test_few_patients_are_not_tested_and_have_no_interval(patients):
    rows = list(range(patients))
    methods = {"base": make(BASE_GAP).select(cases=rows), "clear": make(CLEAR_GAP).select(cases=rows)}
    comparison = compare(methods, resamples=50, draws=1)
    enough = patients >= 5
    for entry in comparison.entries:
        if entry.method == "clear" and not math.isnan(entry.value):
            assert math.isnan(entry.p) != enough
            assert math.isnan(entry.low) != enough
            assert enough or not entry.stars
    text = to_markdown(make_table(comparison, "", next(iter(LAYOUTS.values()))))
    assert ("n/a" in text) != enough
    assert any("fewer than 5 patients" in note for note in notes(comparison))


@pytest.mark.parametrize("present", [1, 4, 5])
def test_a_class_of_few_patients_has_no_interval(present):
    """A class present in one of 20 patients had a Dice interval of zero width."""
    absent = [(i, 1) for i in range(present, CASES)]
    methods = {"base": make(BASE_GAP, absent=absent), "other": make(BASE_GAP, DICE - 0.01, absent=absent)}
    comparison = compare(methods, resamples=50, draws=1)
    for average in ("macro", "micro pooled"):
        entry = comparison.find("other", average=average, label="tumour")
        ends = (entry.low, entry.high, entry.difference_low, entry.difference_high)
        assert [math.isnan(end) for end in ends] == [present < 5] * 4
        assert not math.isnan(comparison.find("other", average=average, label="liver").low)


@pytest.mark.long
def test_stars_of_micro_averages_are_as_rare_as_they_claim():
    """Two methods that differ by chance: with the bootstrap, 12 % had ** at 3 patients and 45 % at 2."""
    generator = np.random.default_rng(3)
    found = []
    for _ in range(150):
        one, two = (make(0.1 + generator.normal(0, 0.05, (7, 1)), DICE[:7, :1], classes=("liver",)) for _ in range(2))
        comparison = compare({"a": one, "b": two}, resamples=40, draws=1)
        found.append(comparison.find("b", average="micro pooled", label="liver", metric="ace").p)
    assert np.mean(np.array(found) < 0.05) <= 0.08
    assert min(found) >= 2 / 2**7


def test_two_stars_are_within_reach_of_holms_correction():
    clear = {f"clear {i}": make(CLEAR_GAP) for i in range(20)}
    comparison = compare({"base": make(BASE_GAP)} | clear, correction="holm", draws=1)
    assert comparison.find("clear 3", average="micro pooled", label="liver", metric="ace").stars == "**"  # of 40 tests


def test_changes_of_dice_are_in_points_everywhere(comparison):
    entry = comparison.find("faint", metric="dice")
    assert entry.change == pytest.approx(-0.01)
    tables = comparison_tables(comparison)
    assert "-1.00 points" in to_markdown(tables[0])
    assert "-1.0 %" not in to_markdown(tables[0]).split("|")[2]


def test_a_case_that_one_seed_lacks_is_left_out_everywhere(methods):
    cut = [part.select(cases=[i for i in range(CASES) if part.cases[i] != "case 3"]) for part in seeds_of("other")]
    parts = {"base": methods["base"], "other": [seeds_of("other")[0], *cut[1:]]}
    comparison = compare(parts, resamples=20, draws=1)
    assert comparison.unmatched == {"case 3": ("other",)}
    assert comparison.cases == CASES - 1
    kept = [i for i in range(CASES) if i != 3]
    assert comparison.find("base", label="liver", metric="ace").value == pytest.approx(BASE_GAP[kept, 0].mean())
    value = abs(SEED_GAPS["other"][:, kept, 0]).mean()
    assert comparison.find("other", label="liver", metric="ace").value == pytest.approx(value)


def test_seeds_that_do_not_fit_are_refused(methods):
    base, wide = methods["base"], make(BASE_GAP, classes=("liver", "cyst"))
    other = replace(base, overlap=replace(base.overlap, true=base.overlap.true + torch.eye(CASES, 2)))
    with pytest.raises(ConfigError, match=r"100 voxels of liver in a and 101 in b \(seed 2 of 2\)"):
        compare({"a": base, "b": [base, other]})
    with pytest.raises(ConfigError, match=r"a \(seed 1 of 2\) has liver, tumour, a \(seed 2 of 2\) has liver, cyst"):
        compare({"a": [base, wide]})
    with pytest.raises(ConfigError, match="at least one evaluation; b has none"):
        compare({"a": base, "b": []})


def test_methods_may_have_different_numbers_of_seeds():
    comparison = compare({"base": seeds_of("base"), "other": seeds_of("other", 2)}, resamples=20, draws=1)
    a, b = abs(SEED_GAPS["base"][..., 0]).mean(0), abs(SEED_GAPS["other"][:2, :, 0]).mean(0)
    entry = comparison.find("other", label="liver", metric="ace")
    assert (comparison.find("base", label="liver", metric="ace").seeds, entry.seeds) == (3, 2)
    assert entry.value == pytest.approx(b.mean())
    assert entry.p_t == pytest.approx(scipy_stats.ttest_rel(b, a).pvalue)
    assert any("means over seeds (3 of base, 2 of other)" in sentence for sentence in notes(comparison))


def test_seeds_that_differ_in_what_they_measured_share_the_rest():
    base = make(BASE_GAP)
    topped = replace(base, top_label=base.statistics.select(classes=[0]))
    for seeds in ([topped, base], [base, topped]):
        scopes = {entry.scope for entry in compare({"a": seeds}, resamples=5, draws=1).entries}
        assert scopes == {"class", "mean", "joint"}


def test_tables_tell_the_spread_over_seeds(seeded, tmp_path):
    first, _, table, *_ = comparison_tables(seeded)
    cells = [cell.text for cell in first.rows[1]]
    entry = seeded.find("other", metric="dice")
    assert cells[:2] == ["other", f"{entry.value:.3f} ± {entry.std:.3f} (seeds ± {entry.seed_std:.3f})"]
    cells = [cell.text for cell in table.rows[1]]
    entry = seeded.find("other", average="micro paper", metric="ace")
    interval = f"[{entry.low:.3f}, {entry.high:.3f}]"
    assert f"{entry.value:.3f} {interval} (seeds ± {entry.seed_std:.3f})" in cells
    sentence = next(sentence for sentence in notes(seeded) if "means over 3 seeds" in sentence)
    assert sentence.endswith("over patients, not over trainings.")
    assert rf"(seeds $\pm$ {entry.seed_std:.3f})" in to_latex(table)
    assert f"(seeds ± {entry.seed_std:.3f})" in to_markdown(table)
    row = next(csv.DictReader(to_csv(seeded).splitlines()))
    assert (row["seeds"], float(row["seed_std"])) == ("3", seeded.entries[0].seed_std)
    assert json.loads(to_json(seeded))["entries"][0]["seed_std"] == seeded.entries[0].seed_std
    assert "not over trainings" in write_comparison(seeded, tmp_path)[1].read_text(encoding="utf-8")


def test_a_table_knows_its_names_and_can_leave_the_floor_out(comparison):
    columns = LAYOUTS["Average calibration error"]
    grouped = make_table(comparison, "", columns, labels=comparison.classes, floor=False)
    assert grouped.headings == ("class", "method", "Macro-ACE ↓", "Micro-ACE ↓", "Micro-ACE (paper) ↓")
    assert {len(row) for row in grouped.rows} == {5}
    assert (grouped.names, [grouped.opens_group(i) for i in range(6)]) == (2, [True, False, False] * 2)
    plain = make_table(comparison, "", columns)
    assert (plain.names, plain.opens_group(0), plain.headings.count("floor")) == (1, False, 2)
    other = replace(grouped, headings=("dataset", *grouped.headings[1:]))
    assert to_latex(other).count(r"\midrule") == 2
    assert [column.justify for column in to_terminal(other).columns] == ["left"] * 2 + ["right"] * 3


def test_what_an_ace_cost_is_beside_it_and_occupied_bins_have_no_best(comparison):
    table = make_table(comparison, "", next(iter(LAYOUTS.values())))
    costs = ("Occupied bins", "Macro-NLL ↓", "Macro-Brier ↓")
    assert table.headings == ("method", "DSC ↑", "Macro-ACE ↓", "floor", *costs)
    assert [row[4] for row in table.rows] == [
        Cell("0.050", "± 0.000"), *[Cell("0.050", "± 0.000", change="+0.0 %")] * 2
    ]  # fmt: skip


def test_a_report_takes_a_comparison_that_is_there(methods, seeded, tmp_path):
    def page(**options):
        return build_report(methods, tmp_path / "report.html", resamples=50, **options).read_text(encoding="utf-8")

    assert page(comparison=compare(methods, resamples=50)) == page()
    assert "Wilcoxon signed-rank test" in page(comparison=compare(methods, test="wilcoxon", resamples=5, draws=1))
    fewer = compare({name: methods[name] for name in ("base", "faint")}, resamples=5, draws=1)
    with pytest.raises(
        ConfigError, match="methods of the report's evaluations; it has base, faint, they have base, cl"
    ):
        page(comparison=fewer)
    with pytest.raises(ConfigError, match="bins of the report's evaluations; it has 10, they have 20"):
        page(comparison=compare(methods, bins=10, resamples=5, draws=1))
    with pytest.raises(ConfigError, match=r"one evaluation of each method, .*; base has 3 seeds"):
        build_report({name: seeds_of(name)[0] for name in SEED_GAPS}, tmp_path / "report.html", comparison=seeded)


def test_evaluations_are_read_by_folder_file_or_name(methods, tmp_path):
    for folder in ("one/fold_0", "two/fold_0"):
        (tmp_path / folder).mkdir(parents=True)
        methods["base"].save(tmp_path / folder / "evaluation.npz")
    one, two = tmp_path / "one/fold_0", tmp_path / "two/fold_0"
    assert list(read_evaluations([str(one), str(two / "evaluation.npz")])) == ["one/fold_0", "two/fold_0"]
    assert list(read_evaluations([f"soft={one}", str(two)])) == ["soft", "fold_0"]
    with pytest.raises(ConfigError, match="results must have different names; got x more than once"):
        read_evaluations([f"x={one}", f"x={two}"])
    with pytest.raises(ConfigError, match="one/fold_0 more than once"):
        read_evaluations([str(one / ".." / "fold_0"), str(one), str(two)])
    with pytest.raises(segcal.FileError, match="does not exist"):
        read_evaluations([str(tmp_path / "nothing")])


def test_a_folder_and_a_file_of_one_name_are_refused_or_named_by_their_folders(methods, tmp_path):
    for folder in ("one/a", "two"):
        (tmp_path / folder).mkdir(parents=True)
    methods["base"].save(tmp_path / "one/a/evaluation.npz")
    methods["base"].save(tmp_path / "one/a.npz")
    methods["base"].save(tmp_path / "two/a.npz")
    folder, file, other = (str(tmp_path / name) for name in ("one/a", "one/a.npz", "two/a.npz"))
    with pytest.raises(ConfigError, match=r"different names; got .*one/a more than once\. Give NAME=PATH"):
        read_evaluations([folder, file])
    assert list(read_evaluations([folder, other])) == ["one/a", "two/a"]
    assert list(read_evaluations([f"a.npz={folder}", file])) == ["a.npz", "a"]


def test_the_command_prints_tables_or_json_and_writes_files(methods, tmp_path):
    sources = []
    for name, part in methods.items():
        (tmp_path / name).mkdir()
        part.save(tmp_path / name / "evaluation.npz")
        sources.append(str(tmp_path / name))
    out = tmp_path / "out"
    done = CliRunner().invoke(app, ["compare", *sources, "--out", str(out), "--resamples", "50"])
    assert done.exit_code == 0, done.output
    assert "paired t-test over patients" in done.stdout
    assert f"{CLEAR_GAP.mean():.3f}" in done.stdout
    assert sorted(path.name for path in out.iterdir()) == ["comparison.csv", "comparison.md", "comparison.tex"]
    done = CliRunner().invoke(app, ["compare", *sources, "--out", str(out), "--resamples", "50", "--json"])
    content = json.loads(done.stdout)
    assert content["methods"] == ["base", "clear", "faint"]
    assert any(entry["std"] is None for entry in content["entries"])


def saved(folder, evaluations):
    for name, part in evaluations.items():
        (folder / name).mkdir()
        part.save(folder / name / "evaluation.npz")
    return [str(folder / name) for name in evaluations]


def test_the_command_prints_what_fits_a_screen_and_all_of_it_if_asked(methods, tmp_path):
    """Five methods; one of them lacks five cases, another knows of a failure."""
    five = {**methods, "fourth": methods["clear"], "fifth": methods["clear"].select(cases=range(5, CASES))}
    failed = {"case": "[bold]lost", "kind": "RangeError", "message": "must lie in [0, 1]."}
    five["fourth"] = replace(five["fourth"], provenance={"failures": [failed]})
    command = ["compare", *saved(tmp_path, five), "--out", str(tmp_path / "out"), "--resamples", "20"]
    short, full = (CliRunner().invoke(app, [*command, *option]).stdout for option in ([], ["--full"]))
    assert len(short.splitlines()) <= 45
    assert "Dice, calibration and likelihood, all classes" in short
    assert "Average calibration error, all classes" in short
    assert "Expected calibration error" not in short
    assert short.count("Left out:") == 3
    assert full.count("Left out:") == 5
    for word in ("Expected calibration error", "Maximum calibration error"):
        assert word in full
    written = (tmp_path / "out" / "comparison.md").read_text()
    for text in (short, full, written):
        assert f"fourth: 1 of {CASES + 1} cases failed and count nowhere: [bold]lost (RangeError: must lie" in text


def test_files_of_the_last_comparison_go_and_others_stay(methods, tmp_path):
    sources, out = saved(tmp_path, methods), tmp_path / "out"
    done = CliRunner().invoke(app, ["compare", *sources, "--out", str(out), "--resamples", "9", "--figures", "png"])
    assert done.exit_code == 0, done.output
    (out / "mine.png").write_bytes(b"mine")
    assert (out / "reliability-clear.png").exists()
    done = CliRunner().invoke(app, ["compare", sources[0], "--out", str(out), "--resamples", "9"])
    assert done.exit_code == 0, done.output
    assert sorted(path.name for path in out.iterdir()) == [
        "comparison.csv", "comparison.md", "comparison.tex", "mine.png",
    ]  # fmt: skip


def test_a_list_of_files_from_elsewhere_removes_nothing_outside(methods, tmp_path):
    sources, out = saved(tmp_path, methods), tmp_path / "out"
    (out / "folder").mkdir(parents=True)
    (tmp_path / "outside.txt").write_text("kept")
    for names in (["../outside.txt", str(tmp_path / "outside.txt"), "..", "", ".", "folder", 7, None], {"a": 1}, 3):
        (out / ".written.json").write_text(json.dumps(names))
        done = CliRunner().invoke(app, ["compare", sources[0], "--out", str(out), "--resamples", "9"])
        assert done.exit_code == 0, done.output
    assert (tmp_path / "outside.txt").exists()
    assert (out / "folder").is_dir()


def test_remarks_tell_failures_and_notes_and_survive_what_is_neither(methods):
    base = methods["base"]
    odd = [7, None, "text", {}, {"kind": "x"}, {"case": 3, "message": None}]
    told = {
        "failures": [{"case": f"case {i}", "kind": "GridError", "message": "is off."} for i in range(7)],
        "notes": [{"kind": "hard", "message": "0 and 1 alone.", "cases": ["a", "b"]}, {"kind": "all", "cases": "a"}],
    }
    number = len(base.cases)
    empty = (
        "net: only 5 % of the bins hold voxels, on average over cases and their classes: most are empty, as in label "
        "maps, so that ACE says little (see How ACE can be gamed)."
    )
    assert remarks({"net": replace(base, provenance=told), "none": base}) == [
        f"net: 7 of {number + 7} cases failed and count nowhere: "
        + "; ".join(f"case {i} (GridError: is off.)" for i in range(5))
        + " and 2 more",
        "net: 0 and 1 alone. (2 cases: a, b)",
        "net: all",
        empty,
        empty.replace("net", "none"),
    ]
    assert remarks({"net": [replace(base, provenance=told)] * 2}) == remarks({"net": replace(base, provenance=told)})
    assert remarks({"net": replace(base, provenance={"failures": odd, "notes": odd})}) == [
        f"net: 1 of {number + 1} cases failed and count nowhere: 3 (unknown)",
        "net: x",
        empty,
    ]
    assert remarks({"net": replace(base, provenance={"failures": 3, "notes": {"a": 1}})}) == [empty]


def test_the_command_refuses_with_a_sentence(tmp_path):
    done = CliRunner().invoke(app, ["compare", str(tmp_path / "no"), "--out", str(tmp_path)])
    assert done.exit_code == 2
    assert done.stderr.startswith("FileError: an evaluation must be a folder")


def test_the_report_verb_writes_a_page_with_maps(tmp_path):
    generator = np.random.default_rng(0)
    predictions, labels = tmp_path / "predictions", tmp_path / "labels"
    for folder in (predictions, labels):
        folder.mkdir()
    for name in ("a", "b"):
        probability = generator.uniform(size=(8, 9, 10)).astype(np.float32)
        nibabel.save(
            nibabel.Nifti1Image(np.stack([1 - probability, probability], 3), np.eye(4)), predictions / f"{name}.nii.gz"
        )
        truth = (generator.uniform(size=(8, 9, 10)) < probability).astype(np.uint8)
        nibabel.save(nibabel.Nifti1Image(truth, np.eye(4)), labels / f"{name}.nii.gz")
    segcal.evaluate(predictions, labels, tmp_path / "net")
    command = ["report", str(tmp_path / "net"), "--out", str(tmp_path / "page" / "report.html"), "--title", "A <title>"]
    maps = ["--predictions", str(predictions), "--labels", str(labels), "--worst", "1"]
    done = CliRunner().invoke(app, [*command, *maps])
    assert done.exit_code == 0, done.output
    page = (tmp_path / "page" / "report.html").read_text(encoding="utf-8")
    assert "A &lt;title&gt;" in page
    assert page.count("data:image/png;base64,") == 1
    done = CliRunner().invoke(app, [*command, "--labels", str(labels)])
    assert done.exit_code == 2
    assert "--predictions must be given once for each of the 1 evaluations" in done.stderr
    done = CliRunner().invoke(app, [*command, "--predictions", str(predictions)])
    assert "--labels must be given for pictures of the worst cases" in done.stderr


def test_a_notebook_shows_evaluations_comparisons_and_figures(methods, comparison):
    evaluation = replace(methods["base"], classes=("<b>odd</b>", "b"))
    text = evaluation._repr_html_()
    assert "&lt;b&gt;odd&lt;/b&gt;" in text
    assert "<b>odd" not in text
    (row,) = (row for row in evaluation.summary() if row[:5] == ("all", "macro", "mean", None, "ace"))
    assert f"{row.value:.4f} ± {row.std:.4f}" in text
    shown = comparison._repr_html_()
    assert all(f"<th>{method}</th>" in shown for method in comparison.methods)
    assert f"{comparison.find('clear', metric='ace').value:.3f}" in shown
    assert new_figure()._repr_png_().startswith(b"\x89PNG")


def test_errors_in_bins_of_equal_count_are_those_of_the_fine_bins():
    generator = torch.Generator().manual_seed(0)
    probabilities = torch.rand(6, 2, 900, generator=generator).softmax(1)
    labels = torch.randint(0, 2, (6, 900), generator=generator)
    evaluation = segcal.Evaluation(
        segcal.bin_statistics(probabilities, labels, bins=1200),
        segcal.OverlapCounts.of_classes(probabilities, labels),
        segcal.ScoreSums.of_classes(probabilities, labels),
        None,
        cases=tuple("abcdef"),
        classes=("x", "y"),
    )
    entry = compare({"one": evaluation}, resamples=5, draws=1).find("one", label="y", metric="equal_mass_ace")
    assert entry.value == pytest.approx(evaluation.case_metrics()["equal_mass_ace"][:, 1].mean().item())
    coarse = segcal.ace(segcal.equal_mass(evaluation.statistics.rebin(20), 20))[:, 1].mean().item()
    assert entry.value != pytest.approx(coarse)
