"""Every row of docs/reference/numbers.md, worked out by hand on eight voxels, or with scipy on a few cases."""

import math
import re
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from handmade import evaluation_of
from scipy import stats as scipy_stats

from segcal import Evaluation, EvaluationAccumulator, OverlapCounts, ScoreSums, bin_statistics, compare, compare_groups
from segcal.calibrators import Temperature, make_calibrator
from segcal.evaluation.bands import band_codes
from segcal.evaluation.cohort import evaluate
from segcal.evaluation.decisions import agreement_of
from segcal.evaluation.diagrams import normalize, pareto_front, reliability, reliability_histogram
from segcal.evaluation.groups import Groups
from segcal.evaluation.intervals import holm
from segcal.evaluation.raters import read_rater_rows
from segcal.lesions.case import Lesion
from segcal.lesions.components import Rules, match_components
from segcal.lesions.numbers import lesions_of_class, summarize

PAGE = Path(__file__).parents[1] / "docs" / "reference" / "numbers.md"

# Two cases of four voxels; classes background, a, b. In ten bins the voxels of a class share none but where said.
A = [[0.2, 0.7, 0.1, 0.0], [0.7, 0.2, 0.2, 0.0], [0.1, 0.1, 0.7, 1.0]]
B = [[0.6, 0.6, 0.6, 0.6], [0.4, 0.4, 0.4, 0.4], [0.0, 0.0, 0.0, 0.0]]
LABELS = [[1, 0, 2, 2], [0, 1, 1, 1]]  # b is absent from the second case


@pytest.fixture(scope="module")
def evaluation():
    probabilities, labels = torch.tensor([A, B], dtype=torch.float64), torch.tensor(LABELS)
    top, predicted = probabilities.max(1)
    return Evaluation(
        bin_statistics(probabilities, labels, bins=1200),
        OverlapCounts.of_classes(probabilities, labels),
        ScoreSums.of_classes(probabilities, labels),
        bin_statistics(top[:, None], (predicted == labels)[:, None], bins=1200),
        cases=("one", "two"),
        classes=("background", "a", "b"),
        has_background=True,
        bins=10,
        joint=ScoreSums.joint_of_classes(probabilities, labels),
    )


@pytest.fixture(scope="module")
def rows(evaluation):
    found = evaluation.summary()
    return {(r.cases, r.average, r.label, r.metric): r for r in found}


GAPS = np.random.default_rng(0).uniform(0.05, 0.2, (2, 8, 1))
DICES = np.random.default_rng(1).uniform(0.6, 0.9, (2, 8, 1))


@pytest.fixture(scope="module")
def comparison():
    first, second = (evaluation_of(*map(torch.from_numpy, pair)) for pair in zip(GAPS, DICES, strict=True))
    return compare({"first": first, "second": second})


def names_in_the_page():
    lines = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| ")]
    return [name for line in lines if (name := line.split(" | ")[0][2:].strip()) not in ("name", "---")]


# Case "one", class a: 0.7 is right (gap 0.3), two of 0.2 and one of 0.0 are not (gaps 0.2 and 0).
# Case "two", class a: four of 0.4, three of them right (gap 0.35).
CASE_AND_CLASS = {
    "`ace`": ("a", "ace", [(0.3 + 0.2 + 0.0) / 3, 0.35]),
    "`ece`": ("a", "ece", [(0.3 + 2 * 0.2 + 0.0) / 4, 0.35]),
    "`mce`": ("a", "mce", [0.3, 0.35]),
    "`occupied`": ("a", "occupied", [3 / 10, 1 / 10]),  # bins of 0.0, 0.2 and 0.7; that of 0.4
    "`equal_mass_ace`": ("a", "equal_mass_ace", [(0.3 + 0.2) / 2, 0.35]),  # 0.0 is left out
    "`signed_gap`": ("a", "signed_gap", [(-0.3 + 2 * 0.2) / 4, -0.35]),
    "`overconfidence`": ("a", "overconfidence", [0.0, 0.35]),  # three in four are there, on the other side of 1/2
    "`underconfidence`": ("a", "underconfidence", [(0.3 + 2 * 0.2) / 4, 0.0]),  # right wherever it says so
    "`dice`": ("b", "dice", [2 * 2 / (2 + 2), math.nan]),
    "`brier`, of a class": ("a", "brier", [(0.3**2 + 2 * 0.2**2) / 4, (3 * 0.6**2 + 0.4**2) / 4]),
    "`nll`, of a class": (
        "a", "nll", [-(math.log(0.7) + 2 * math.log(0.8)) / 4, -(3 * math.log(0.4) + math.log(0.6)) / 4],
    ),
    "mean over classes": (None, "ace", [((0.3 + 0.2) / 3 + (0.3 + 0.1 + 0.0) / 3) / 2, (0.35 + 0.0) / 2]),
    "`brier`, of all classes": (
        None,
        "brier",
        [3 * (0.04 + 0.09 + 0.01) / 4, (2 * 0.16 + 3 * 2 * 0.36) / 4],
    ),
    "`nll`, of all classes": (None, "nll", [-3 * math.log(0.7) / 4, -(math.log(0.6) + 3 * math.log(0.4)) / 4]),
    "`top_label_ece` (`_ace`, `_mce`)": (None, "top_label_ece", [3 * 0.3 / 4, 0.35]),  # 0.7 thrice and 1.0, all right
}  # fmt: skip


@pytest.mark.parametrize("name", CASE_AND_CLASS)
def test_of_one_case(evaluation, name):
    label, metric, expected = CASE_AND_CLASS[name]
    found = evaluation.case_values()[label, metric].tolist()
    assert found == pytest.approx(expected, nan_ok=True)


def over_cases(rows, evaluation, comparison):
    one, two = (0.3 + 0.2) / 3, 0.35
    macro = rows["all", "macro", "a", "ace"]
    assert macro.value == pytest.approx((one + two) / 2)
    yield "macro"
    assert macro.std == pytest.approx(abs(one - two) / math.sqrt(2))
    yield "std"
    # In bins 0.0, 0.2, 0.4 and 0.7; no two cases share one, so that both readings agree.
    for reading in ("pooled", "paper"):
        assert rows["all", f"micro {reading}", "a", "ace"].value == pytest.approx((0 + 0.2 + 0.35 + 0.3) / 4)
        yield f"micro {reading}"
    assert rows["complete", "macro", "a", "ace"].value == pytest.approx(one)
    assert rows["complete", "macro", "a", "ace"].number == 1
    assert replace(evaluation, label_counts=torch.ones(2, 3)).complete().cases == ("one", "two")
    yield "complete cases"
    floor = comparison.find("first", label="liver", metric="ace").floor
    assert floor == pytest.approx(math.sqrt(2 / math.pi * 0.525 * 0.475 / 1000), rel=0.1)  # 1,000 voxels in one bin
    yield "floor"


def between_methods(comparison):
    gaps, dices = GAPS[..., 0], DICES[..., 0]
    ace, dice, pooled = (
        comparison.find("second", label="liver", **which)
        for which in ({"metric": "ace"}, {"metric": "dice"}, {"metric": "ace", "average": "micro pooled"})
    )
    assert ace.change == pytest.approx(gaps[1].mean() / gaps[0].mean() - 1)
    assert dice.change == pytest.approx(dices[1].mean() - dices[0].mean())
    yield "change"
    # Of a mean over 8 patients, near to that of the t distribution.
    half = scipy_stats.t.ppf(0.975, 7) * gaps[1].std(ddof=1) / math.sqrt(8)
    assert (ace.low, ace.high) == pytest.approx((gaps[1].mean() - half, gaps[1].mean() + half), abs=0.2 * half)
    yield "interval, macro and scores"
    assert pooled.low <= pooled.value <= pooled.high
    assert (pooled.high - pooled.low) / 2 == pytest.approx(half, rel=0.25)  # one bin, always of one sign
    yield "interval, micro errors"
    shift = gaps[1] - gaps[0]
    half = scipy_stats.t.ppf(0.975, 7) * shift.std(ddof=1) / math.sqrt(8)
    assert (ace.difference_low, ace.difference_high) == pytest.approx(
        (shift.mean() - half, shift.mean() + half), abs=0.2 * half
    )
    yield "interval of a difference"
    assert ace.p_t == pytest.approx(scipy_stats.ttest_rel(*gaps).pvalue)
    yield "`p_t`"
    assert ace.p_wilcoxon == pytest.approx(scipy_stats.wilcoxon(*gaps).pvalue)
    yield "`p_wilcoxon`"
    found = scipy_stats.permutation_test((shift,), np.mean, permutation_type="samples", n_resamples=1000)
    assert pooled.p_permutation == pytest.approx(found.pvalue)  # of equally many voxels: the mean over cases
    yield "`p_permutation`"
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    yield "`holm`"
    assert ace.stars == ("**" if ace.p < 0.01 else "*" if ace.p < 0.05 else "")
    yield "stars"
    seeds = [evaluation_of(*map(torch.from_numpy, pair)) for pair in zip(GAPS, DICES, strict=True)]
    several = compare({"both": seeds}, resamples=10, draws=1).find("both", label="liver", metric="ace")
    assert several.seed_std == pytest.approx(gaps.mean(1).std(ddof=1))
    yield "seed_std"


def of_decisions():
    """Two cases of four voxels: liver is decided twice in each, and is there three times and once."""
    liver = torch.tensor([[0.9, 0.6, 0.4, 0.1], [0.8, 0.7, 0.2, 0.0]])
    accumulator = EvaluationAccumulator()
    accumulator.update(torch.stack([1 - liver, liver], 1), torch.tensor([[1, 1, 1, 0], [1, 0, 0, 0]]), ["one", "two"])
    found = agreement_of(accumulator.compute().foreground()).labels["class 1"]
    expected, actual = [2 * 1.5 / (2 + 2.0), 2 * 1.5 / (2 + 1.7)], [4 / 5, 2 / 3]
    assert found.expected == pytest.approx(expected)
    yield "`expected_dice`"
    off = [expected[0] - actual[0], expected[1] - actual[1]]
    assert found.dice.bias == pytest.approx(sum(off) / 2)
    yield "bias of expected Dice"
    assert found.dice.mean_absolute_error == pytest.approx((-off[0] + off[1]) / 2)
    yield "mean absolute error"
    assert found.dice.constant_guess == pytest.approx((4 / 5 - 2 / 3) / 2)
    yield "constant guess"
    assert found.dice.rank_correlation == pytest.approx(-1)
    yield "rank correlation"
    mean = (1 / 5 + 1 / 3) / 2
    assert found.risk.area == pytest.approx((1 / 3 + mean) / 2)
    assert found.risk.ideal_area == pytest.approx((1 / 5 + mean) / 2)
    assert found.risk.random_area == pytest.approx(mean)
    yield "risk-coverage area"
    curves = found.thresholds
    assert curves.dice[75] == pytest.approx((2 / (1 + 3) + 2 / (1 + 1)) / 2)
    assert curves.expected_dice[75] == pytest.approx((2 * 0.9 / (1 + 2.0) + 2 * 0.8 / (1 + 1.7)) / 2)
    assert (curves.sensitivity[75], curves.precision[75]) == pytest.approx(((1 / 3 + 1) / 2, 1))
    yield "threshold curve"
    assert curves.best.threshold == pytest.approx(0.4, abs=1 / 1200)
    assert curves.best.dice == pytest.approx((1 + 2 / 3) / 2)
    yield "best threshold"
    volume = found.decided_volume
    assert volume.bias == pytest.approx((-1 + 1) / 2)
    assert found.expected_volume.bias == pytest.approx((-1.0 + 0.7) / 2)
    yield "volume bias"
    assert (volume.low, volume.high) == pytest.approx((-1.96 * math.sqrt(2), 1.96 * math.sqrt(2)))
    yield "limits of agreement"


def of_lesions():
    """A row of voxels: two predicted lesions, the first over two true ones, and a true one that is missed."""
    p, true = np.zeros((1, 20, 1)), np.zeros((1, 20, 1), np.uint8)
    p[0, 1:5, 0], p[0, 9:11, 0] = (0.6, 0.9, 0.9, 0.6), 0.7
    true[0, 1, 0] = true[0, 4, 0] = true[0, 15, 0] = 1
    found = match_components(p, true, Rules())
    assert (found.predicted.voxels.tolist(), found.true.voxels.tolist()) == ([4, 2], [1, 1, 1])
    yield "lesion"
    assert found.pairs.T.tolist() == [[0, 0], [0, 1]]
    assert match_components(p, true, Rules(overlap=0.25)).pairs.shape[1] == 2  # 1 of 4 voxels
    assert match_components(p, true, Rules(overlap=0.26)).pairs.shape[1] == 0
    yield "match"
    assert found.confidence == pytest.approx([0.9, 0.7])
    assert match_components(p, true, Rules(confidence="mean")).confidence == pytest.approx([0.75, 0.7])
    yield "confidence of a lesion"
    center = (0.0,) * 6
    rows = [Lesion("one", "a", "predicted", n, None, c, real, int(real), *center) for n, c, real in (
        (4, 0.9, True), (2, 0.7, False))]  # fmt: skip
    rows += [Lesion("one", "a", "true", 1, None, c, c is not None, 1, *center) for c in (0.9, 0.9, None)]
    lesions = lesions_of_class(rows, ["one", "two"], "a")
    numbers = {number.metric: number.value for number in summarize(lesions, ["one", "two"], bins=5)}
    assert numbers["sensitivity"] == pytest.approx(2 / 3)
    yield "`sensitivity`, of lesions"
    assert numbers["precision"] == 1 / 2
    yield "`precision`, of lesions"
    assert numbers["f1"] == pytest.approx(2 * 2 / 3 * 1 / 2 / (2 / 3 + 1 / 2))
    yield "`f1`"
    assert numbers["false_positives_per_case"] == 1 / 2
    yield "`false_positives_per_case`"
    assert numbers["sensitivity_at_1/8"] == numbers["sensitivity_at_8"] == pytest.approx(2 / 3)
    yield "`sensitivity_at_1` (`_1/8` to `_8`)"
    assert numbers["froc"] == pytest.approx(2 / 3)
    yield "`froc`"
    assert (numbers["ace"], numbers["ece"]) == pytest.approx(((0.1 + 0.7) / 2, (0.1 + 0.7) / 2))
    yield "`ace`, `ece`, of lesions"


def of_raters():
    """Six voxels, decided where p >= 1/2; one rater drew two of them, the other four."""
    p = np.array([0.95, 0.85, 0.65, 0.45, 0.25, 0.05])
    masks = np.array([[1, 1, 0, 0, 0, 0], [1, 1, 1, 1, 0, 0]], np.uint8)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for kind, array in (("maps", np.stack([1 - p, p])), ("a", masks[0]), ("b", masks[1])):
            (folder / kind).mkdir()
            np.save(folder / kind / "case.npy", array.reshape(*array.shape[:-1], 6, 1, 1))
        evaluate(folder / "maps", [folder / "a", folder / "b"], folder / "out")
        n = {row.metric: row.value for row in read_rater_rows(folder / "out")}
    gaps = np.abs(p - masks.mean(0))
    assert (n["ace"], n["ece"], n["mce"]) == pytest.approx((gaps.mean(), gaps.mean(), 0.25))
    yield "`ace`, `ece`, `mce`"
    assert (n["ace_each"], n["ace_spread"]) == pytest.approx((0.25, (1.6 - 1.4) / 6 / math.sqrt(2)))
    yield "`ace_each`, `ace_spread` (and of ECE, MCE)"
    assert n["ace_floor"] == pytest.approx(0.25)  # of those whom one chose and the other may have, half: gaps 0.5 and 0
    yield "`ace_floor` (and of ECE, MCE)"
    assert (n["ace_pooled"], n["ace_floor_pooled"]) == pytest.approx((gaps.mean(), 1 / 3))  # 4 of 6, and 2 of 6
    yield "`ace_pooled`, `ace_floor_pooled`"
    assert (n["dice_each"], n["dice_spread"]) == pytest.approx(((4 / 5 + 6 / 7) / 2, (6 / 7 - 4 / 5) / math.sqrt(2)))
    yield "`dice_each`, `dice_spread`"
    assert n["dice_between"] == pytest.approx(2 * 2 / 6)
    yield "`dice_between`"
    assert n["dice_majority"] == pytest.approx(4 / 5)  # both of two
    yield "`dice_majority`"


def of_groups():
    gaps = torch.tensor([[0.1]] * 5 + [[0.2]] * 5 + [[0.4]] * 2)
    evaluation = evaluation_of(gaps, torch.full((12, 1), 0.8))
    told = {case: "abc"[min(i // 5, 2)] for i, case in enumerate(evaluation.cases)}
    found = compare_groups(evaluation, Groups({"site": told}), permutations=2000, resamples=50)
    assert found.find("site", "b", label="liver", metric="ace").value == pytest.approx(0.2)
    yield "value of a group"
    assert found.find("site", "b", label="liver", metric="ace").low == pytest.approx(0.2)
    assert math.isnan(found.find("site", "c", label="liver", metric="ace").low)  # two patients
    yield "interval of a group"
    gap = found.gap("site", label="liver", metric="ace")
    assert (gap.lowest, gap.highest, gap.gap) == ("a", "b", pytest.approx(0.1))
    yield "largest gap"
    assert 0 < gap.p < 1
    assert found.gap("site", label="liver", metric="dice").p == 1  # all are alike
    yield "`p`, of a gap"
    alike = [each.p for each in found.gaps if each.average == "macro" and each.label is not None]
    assert gap.p_holm == pytest.approx(holm(alike)[alike.index(gap.p)])
    yield "`p_holm`"


def of_bands():
    own = np.array([[True, True, True, False, False, False]])
    codes = band_codes(own, ~own, (1.0, 2.0), (2.0, 4.0))  # distances 6, 4, 2 and 2, 4, 6
    assert codes.tolist() == [[2, 1, 0, 0, 1, 2]]
    yield "distance to the boundary"
    assert band_codes(own, ~own, (1.0, 2.0), (1.9, 4.0)).tolist() == [[2, 1, 1, 1, 1, 2]]
    yield "band"


def in_figures(comparison):
    labels = torch.tensor([[[i % 2, 0, 0, 0]] for i in range(8)])
    stats = bin_statistics(torch.full((8, 1, 4), 0.25), labels, bins=10)
    diagram = reliability(stats, patients=list("abcdefgh"), resamples=4000)
    half = scipy_stats.t.ppf(0.975, 7) * np.std([0.0, 0.25] * 4, ddof=1) / math.sqrt(8)
    assert (diagram.high[2] - diagram.low[2]).item() / 2 == pytest.approx(half, rel=0.2)
    assert math.isnan(reliability(stats.select(cases=range(4)), patients=list("abcd")).low[1])
    yield "band of a diagram"
    histogram = reliability_histogram(stats, levels=4)
    assert histogram.share[2].tolist() == [0.5, 0.5, 0, 0]  # four cases at 0, four at 1/4
    yield "dataset histogram"
    values = torch.tensor([[0.8, 0.1], [0.4, 0.2]])
    scaled = normalize(values, higher_is_better=torch.tensor([True, False]))
    torch.testing.assert_close(scaled, torch.tensor([[1.0, 1.0], [0.5, 0.5]]))
    yield "radar"
    assert pareto_front([(0.9, 0.2), (0.8, 0.1), (0.8, 0.2)]) == [1, 0]
    yield "front"
    logits, labels = torch.tensor([[0.0, 0.0, 0.0], [1.0, 1.0, -1.0]]), torch.tensor([1, 0, 0])
    report = Temperature().fit([(logits, labels)]).report
    right, wrong = math.log1p(math.exp(-1)), math.log1p(math.e)
    assert report.before == pytest.approx((2 * right + wrong) / 3)
    beta = make_calibrator("platt").fit([(logits, labels)]).report
    assert beta.before == pytest.approx((2 * right + wrong) / 3)  # of two classes, each against the rest is the same
    yield "objective of a fit"


def test_over_cases_between_methods_and_in_figures_every_row_is_checked(rows, evaluation, comparison):
    checked = [*CASE_AND_CLASS, *over_cases(rows, evaluation, comparison), *between_methods(comparison)]
    checked += [*of_decisions(), *of_raters(), *of_lesions(), *of_groups(), *of_bands(), *in_figures(comparison)]
    assert sorted(checked) == sorted(names_in_the_page())


def test_the_page_has_a_row_for_every_metric_of_the_files(evaluation):
    words = set(re.findall(r"`(\w+)`", PAGE.read_text(encoding="utf-8")))
    for metric in {metric for _, metric in evaluation.case_values()}:
        assert metric in words or metric.startswith("top_label")
