"""Rules are read as they are written, and choices follow from them by hand arithmetic."""

import math

import pytest

from segcal import ConfigError
from segcal.study.choose import METRICS, Candidate, Condition, choose, metric_name, parse_rule

NAN = math.nan
BASELINE = {"dsc": 0.9, "macro-ace": 0.2, "macro-mce": 0.5}


def runs(method, *values):
    """Runs with seeds 0, 1, ... from (dsc, macro ACE, macro MCE)."""
    names = ("dsc", "macro-ace", "macro-mce")
    return [Candidate(method, seed, dict(zip(names, row, strict=True))) for seed, row in enumerate(values)]


@pytest.mark.parametrize(
    ("text", "conditions"),
    [
        ("dsc >= baseline - 0.005", [("dsc", ">=", 1, -0.005)]),
        ("  DSC>=Baseline-5e-3 ", [("dsc", ">=", 1, -0.005)]),
        ("dice ≥ baseline − 0.005", [("dsc", ">=", 1, -0.005)]),  # noqa: RUF001
        ("dsc >= 0.85 and macro-mce <= baseline", [("dsc", ">=", 0, 0.85), ("macro-mce", "<=", 1, 0)]),
        ("dsc >= 0.99 * baseline", [("dsc", ">=", 0.99, 0)]),
        ("dsc >= baseline*.99 - .01", [("dsc", ">=", 0.99, -0.01)]),
        ("ace < baseline + 0.01 AND micro_ece > 0", [("macro-ace", "<", 1, 0.01), ("micro-ece", ">", 0, 0)]),
        ("mce <= 1 and micro ace <= 1.1 * baseline", [("macro-mce", "<=", 0, 1), ("micro-ace", "<=", 1.1, 0)]),
    ],
)
def test_a_rule_is_read_as_it_is_written(text, conditions):
    rule = parse_rule(text)
    assert rule.conditions == tuple(Condition(*each) for each in conditions)
    assert rule.text == text.strip()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r"must have a condition.*got ''.*'dsc >= 0' allows every method"),
        ("dcs >= 0.8", r"one of dsc, macro-ace, .*; got 'dcs'\. Did you mean 'dsc'\?"),
        ("makro-mce <= baseline", r"got 'makro-mce'\. Did you mean 'macro-mce'\?"),
        ("zzzzz >= 0.8", r"got 'zzzzz'\.$"),
        ("dsc 0.85", r"a metric, one of >=, <=, >, <, and a bound.*got 'dsc 0.85'"),
        ("dsc = 0.85", r"got 'dsc = 0.85'"),
        ("dsc => 0.85", r"got 'dsc => 0.85'"),
        (">= 0.85", r"got '>= 0.85'"),
        ("0.8 <= dsc <= 0.9", r"got '0.8 <= dsc <= 0.9'"),
        ("dsc >= 0.85 and", r"got '' in 'dsc >= 0.85 and'"),
        ("dsc >= 0.85, mce <= 0.3", r"got 'dsc >= 0.85, mce <= 0.3'"),
        ("dsc >=", r"a bound must be like 0.85, baseline, .*; got '' in 'dsc >='"),
        ("dsc >= baselin", r"a bound must be like.*got 'baselin'"),
        ("dsc >= baseline 0.005", r"a bound must be like.*got 'baseline 0.005'"),
        ("dsc >= 0,85", r"a bound must be like.*got '0,85'"),
        ("dsc >= __import__('os')", r"a bound must be like"),
        ("dsc >= baseline - 0.5 %", r"no %.*'baseline - 0.005', for half a percent less '0.995 \* baseline'"),
        ("dsc >= 85", r"\[0, 1\], as metrics do; got 85 in 'dsc >= 85'"),
        ("dsc >= baseline - 5", r"got 5 in"),
        ("dsc >= 0.9 or mce <= 0.1", r"joined by 'and'; got"),
    ],
)
def test_a_bad_rule_is_refused_with_what_to_write(text, message):
    with pytest.raises(ConfigError, match=message):
        parse_rule(text)


@pytest.mark.parametrize(
    ("text", "values", "allowed"),
    [
        ("dsc >= baseline - 0.005", {"dsc": 0.895}, True),  # 0.9 - 0.005 to within rounding
        ("dsc >= baseline - 0.005", {"dsc": 0.8949}, False),
        ("dsc > baseline - 0.005", {"dsc": 0.895}, False),
        ("dsc > baseline - 0.005", {"dsc": 0.8951}, True),
        ("dsc >= 0.99 * baseline", {"dsc": 0.891}, True),
        ("dsc >= 0.99 * baseline", {"dsc": 0.8909}, False),
        ("macro-mce <= baseline", {"macro-mce": 0.5}, True),
        ("macro-mce < baseline", {"macro-mce": 0.5}, False),
        ("macro-mce < baseline", {"macro-mce": 0.49}, True),
        ("dsc >= 0.85 and mce <= baseline", {"dsc": 0.86, "macro-mce": 0.51}, False),
        ("dsc >= 0.85 and mce <= baseline", {"dsc": 0.84, "macro-mce": 0.49}, False),
        ("dsc >= 0.85 and mce <= baseline", {"dsc": 0.86, "macro-mce": 0.49}, True),
        ("dsc >= 0", {"dsc": NAN}, False),
        ("dsc <= 1", {"dsc": NAN}, False),
    ],
)
def test_what_a_rule_allows(text, values, allowed):
    assert parse_rule(text).allows(values, BASELINE) is allowed


def test_nothing_is_allowed_beside_a_baseline_without_a_value():
    assert not parse_rule("dsc >= baseline - 0.1").allows({"dsc": 0.9}, {"dsc": NAN})
    assert parse_rule("dsc >= 0.85").allows({"dsc": 0.9}, {})  # does not ask the baseline


def test_values_that_a_rule_reads_must_be_there():
    with pytest.raises(ConfigError, match="a method must have a value of dsc; it has macro-ace"):
        parse_rule("dsc >= 0.85").allows({"macro-ace": 0.1}, BASELINE)
    with pytest.raises(ConfigError, match="the baseline must have a value of dsc; it has none"):
        parse_rule("dsc >= baseline").allows({"dsc": 0.9}, {})


def test_the_budget_is_the_highest_of_the_lower_bounds():
    rule = parse_rule("dsc >= 0.85 and dsc > 0.99 * baseline and dsc <= 0.95 and macro-mce <= baseline")
    assert rule.budget("DICE", BASELINE) == pytest.approx(0.891)
    assert rule.budget("dsc", {"dsc": 0.8}) == 0.85
    assert rule.budget("macro-mce", BASELINE) is None  # bounded from above alone
    assert math.isnan(rule.budget("dsc", {"dsc": NAN}))
    with pytest.raises(ConfigError, match="Did you mean 'dice'"):
        rule.budget("dicee", BASELINE)


def test_metrics_have_one_name_each():
    assert [metric_name(name.upper()) for name in METRICS] == list(METRICS)
    assert METRICS["dsc"] == ("macro", "dice")


CANDIDATES = [
    *runs("CE", (0.88, 0.20, 0.5), (0.92, 0.30, 0.6)),  # means 0.90, 0.25, 0.55
    *runs("soft", (0.88, 0.05, 0.3), (0.90, 0.15, 0.3)),  # 0.89, 0.10, 0.30
    *runs("hard", (0.91, 0.12, 0.4), (0.88, 0.18, 0.8)),  # 0.895, 0.15, 0.60
]


def test_the_best_calibrated_of_those_within_the_rule_is_chosen_by_means_over_seeds():
    choice = choose(CANDIDATES, parse_rule("dsc >= baseline - 0.02"), baseline="CE")
    assert (choice.method, choice.allowed, choice.refused) == ("soft", ("CE", "soft", "hard"), ())
    assert choice.values == pytest.approx({"dsc": 0.89, "macro-ace": 0.10, "macro-mce": 0.30})

    choice = choose(CANDIDATES, parse_rule("dsc >= baseline - 0.005"), baseline="CE")
    assert (choice.method, choice.allowed, choice.refused) == (
        "hard",
        ("CE", "hard"),
        ("soft",),
    )  # though soft has 0.10

    choice = choose(CANDIDATES, parse_rule("dsc >= 0.895 and mce <= baseline"), baseline="CE")
    assert (choice.method, choice.allowed, choice.refused) == ("CE", ("CE",), ("soft", "hard"))


def test_a_lucky_seed_does_not_make_a_method_win():
    candidates = [*runs("CE", (0.9, 0.2, 0.5)), *runs("luck", (0.9, 0.01, 0.5), (0.9, 0.45, 0.5))]
    assert choose(candidates, parse_rule("dsc >= baseline"), baseline="CE").method == "CE"  # 0.2 against 0.23


def test_the_run_is_the_best_of_the_methods_own_that_obeys_the_rule():
    choice = choose(CANDIDATES, parse_rule("dsc >= baseline - 0.02"), baseline="CE")
    assert (choice.seed, choice.run_values["macro-ace"]) == (0, 0.05)  # 0.88 is just within 0.90 - 0.02
    choice = choose(CANDIDATES, parse_rule("dsc >= baseline - 0.012"), baseline="CE")
    assert (choice.method, choice.seed, choice.run_values["macro-ace"]) == ("soft", 1, 0.15)  # 0.88 < 0.888


def test_where_no_run_obeys_alone_the_best_of_all_is_taken():
    # The means 0.9 and 0.5 are within; each run breaks one condition.
    candidates = runs("one", (0.8, 0.3, 0.4), (1.0, 0.2, 0.6))
    choice = choose(candidates, parse_rule("dsc >= 0.9 and mce <= 0.5"), baseline="one")
    assert (choice.method, choice.seed) == ("one", 1)


def test_another_metric_may_decide_and_dsc_is_best_high():
    rule = parse_rule("dsc >= 0.5")
    choice = choose(CANDIDATES, rule, baseline="CE", by="DSC")
    assert (choice.method, choice.seed) == ("CE", 1)
    assert choose(CANDIDATES, rule, baseline="CE", by="mce").method == "soft"
    with pytest.raises(ConfigError, match="got 'brier'"):
        choose(CANDIDATES, rule, baseline="CE", by="brier")


def test_ties_go_to_the_earlier():
    candidates = [*runs("b", (0.9, 0.2, 0.5), (0.9, 0.2, 0.5)), *runs("a", (0.95, 0.2, 0.5))]
    choice = choose(candidates, parse_rule("dsc >= baseline"), baseline="a")
    assert choice.method == "a"
    choice = choose(candidates, parse_rule("dsc >= baseline"), baseline="b")
    assert (choice.method, choice.seed) == ("b", 0)


def test_methods_may_come_in_any_order():
    mixed = [CANDIDATES[i] for i in (4, 0, 2, 5, 3, 1)]
    choice = choose(mixed, parse_rule("dsc >= baseline - 0.005"), baseline="CE")
    assert (choice.method, choice.seed, choice.allowed) == ("hard", 0, ("hard", "CE"))


def test_no_method_within_the_rule_is_no_choice():
    assert choose(CANDIDATES, parse_rule("dsc >= 0.99"), baseline="CE") is None


@pytest.mark.parametrize("row", [(NAN, 0.1, 0.5), (0.9, NAN, 0.5)])
def test_a_method_with_a_nan_that_counts_is_refused(row):
    candidates = [*runs("CE", (0.9, 0.2, 0.5)), *runs("lost", (0.9, 0.1, 0.5), row)]
    choice = choose(candidates, parse_rule("dsc >= baseline"), baseline="CE")
    assert (choice.method, choice.refused) == ("CE", ("lost",))


def test_a_nan_that_does_not_count_does_no_harm():
    candidates = [*runs("CE", (0.9, 0.2, 0.5)), *runs("other", (0.9, 0.1, NAN))]
    assert choose(candidates, parse_rule("dsc >= baseline"), baseline="CE").method == "other"


def test_what_cannot_be_judged_is_refused():
    rule = parse_rule("dsc >= baseline")
    with pytest.raises(ConfigError, match="at least one run"):
        choose([], rule, baseline="CE")
    with pytest.raises(ConfigError, match=r"\('CE', 'soft', 'hard'\); got 'sofd'\. Did you mean 'soft'\?"):
        choose(CANDIDATES, rule, baseline="sofd")
    with pytest.raises(ConfigError, match="own seed; 'CE' has 0 twice"):
        choose([*CANDIDATES, CANDIDATES[0]], rule, baseline="CE")
    with pytest.raises(ConfigError, match="'new', seed 3, must have a value of macro-ace; it has dsc"):
        choose([*CANDIDATES, Candidate("new", 3, {"dsc": 0.9})], rule, baseline="CE")
