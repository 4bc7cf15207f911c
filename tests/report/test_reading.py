"""The sentences of a report are true: of sides, ranges and sizes, of tests and their absence, of classes and cases."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from gaps import CAUTIOUS, CENTERS, EXTREME, OVER, UNDER, make

from segcal.comparison.comparison import compare
from segcal.comparison.matching import match_cases
from segcal.evaluation.intervals import with_drawn_labels
from segcal.report import reading
from segcal.report.content import method_diagrams
from segcal.report.summary import summarize


def of(evaluations):
    """A comparison and its diagrams."""
    comparison = compare(evaluations, resamples=50)
    matched, _ = match_cases(evaluations)
    return comparison, method_diagrams(matched, next(iter(matched.values())).cases, level=0.95, seed=0)


def read(evaluations):
    return reading(*of(evaluations))


@pytest.mark.parametrize(
    ("frequencies", "expected"),
    [
        (
            OVER,
            [
                "net is overconfident about liver: where it gives 50 to 100 %",
                "liver is there 20.0 percentage points less often than it says",
            ],
        ),
        (
            UNDER,
            [
                "net is overconfident about liver: where it gives 0 to 50 %",
                "liver is there 15.0 percentage points more often than it says",
            ],
        ),
        (
            EXTREME,
            [
                "net is overconfident about liver",
                "where it gives 0 to 50 %, liver is there 10.0 percentage points more often",
                "and where it gives 50 to 100 %, liver is there 10.0 percentage points less often",
            ],
        ),
        (CAUTIOUS, ["net is underconfident about liver"]),
        ([max(0.0, c - 0.1) for c in CENTERS], ["net overestimates liver: where it gives"]),
        ([min(1.0, c + 0.1) for c in CENTERS], ["net underestimates liver: where it gives"]),
        (CENTERS, ["net is well calibrated"]),
    ],
    ids=["over", "sure of no", "extreme", "cautious", "too much", "too little", "calibrated"],
)
def test_the_reading_tells_the_side_the_range_and_the_size(frequencies, expected):
    (paragraph,) = read({"net": make(frequencies)})
    for words in expected:
        assert words in paragraph


def test_the_reading_compares_the_error_with_chance_and_says_that_chance_is_more():
    (paragraph,) = read({"net": make(OVER)})
    floor = compare({"net": make(OVER)}, resamples=50).find("net", metric="ace").floor
    assert 0 < floor < 0.02  # 1,000 voxels a bin: about 0.8 sqrt(p (1 - p) / 1000)
    words = f"ACE, the mean gap over bins, is 0.100; a perfectly calibrated model would show at least {floor:.3f}"
    assert words in paragraph


def test_the_verdict_is_that_of_the_classes_not_of_their_pool():
    """Pooled, what one class is given too much hides what the other is given too little."""
    more, less = [max(0.0, c - 0.08) for c in CENTERS], [min(1.0, c + 0.08) for c in CENTERS]
    (paragraph,) = read({"net": make(more, less)})
    assert "well calibrated" not in paragraph
    assert "overestimates liver" in paragraph
    assert "underestimates tumour" in paragraph


def test_the_reading_names_the_class_that_is_furthest_off():
    (paragraph,) = read({"net": make(CENTERS, OVER)})
    assert "net is overconfident about tumour: where it gives 50 to 100 %, tumour is there 20.0 percentage" in paragraph
    assert "furthest off, with a pooled ACE of 0.100" in paragraph
    assert "The other classes are not off" in paragraph


def test_a_small_gap_is_not_told_and_cases_that_are_off_each_their_way_are():
    assert "well calibrated" in read({"net": make([c - 0.005 for c in CENTERS])})[0]
    noisy = make([c - 0.02 for c in CENTERS], wobble=0.1)  # inside its band, over patients
    (paragraph,) = read({"net": noisy})
    assert "well calibrated" not in paragraph
    assert "net is calibrated on average over patients, but not case by case" in paragraph


def test_a_bin_that_one_patient_fills_is_not_told():
    evaluation = make(CENTERS)
    count, confidence, labels = (
        getattr(evaluation.statistics, name) for name in ("count", "confidence_sum", "label_sum")
    )
    for sums in (count, confidence, labels):
        sums[1:, :, 60 * 15 + 30] = 0
    labels[0, :, 60 * 15 + 30] = 300  # of 1,000 at 78 %
    assert "well calibrated" in read({"net": evaluation})[0]


def test_of_many_bins_those_that_chance_alone_moves_are_not_told():
    """Labels drawn from the probabilities: one bin of twenty lies outside its band, and 9 of 10 methods were off."""
    calibrated = make(CENTERS, CENTERS, cases=8)
    few = replace(calibrated.statistics, count=calibrated.statistics.count / 10)
    few = replace(few, confidence_sum=few.confidence_sum / 10)
    generator = np.random.default_rng(0)
    draws = [with_drawn_labels(few, generator) for _ in range(10)]
    told = [read({"net": replace(calibrated, statistics=drawn)})[0] for drawn in draws]
    assert sum("net is well calibrated" in paragraph for paragraph in told) >= 9


def test_an_empty_bin_does_not_break_a_range():
    evaluation = make(OVER)
    for sums in (evaluation.statistics.count, evaluation.statistics.confidence_sum, evaluation.statistics.label_sum):
        sums[:, :, 60 * 15 + 30] = 0
    assert "50 to 100 %, liver is there 20.0" in read({"net": evaluation})[0]


def test_the_reading_says_which_method_is_better_and_whether_significantly():
    better, *_ = read({"old": make(OVER), "new": make([c - 0.1 if c > 0.5 else c for c in CENTERS])})
    assert better.startswith(
        "new lowers the ACE of old by 50 %, from 0.100 to 0.050, a significant difference, p = 0.031"
    )
    assert "Its negative log-likelihood is 0.2000 against 0.2000, no significant difference, p = 1.000." in better
    worse, *_ = read({"old": make(CENTERS), "new": make(OVER, wobble=0.01)})
    assert worse.startswith("new raises the ACE of old from 0.000 to 0.105, a significant difference")
    same, *_ = read({"old": make(OVER), "new": make(OVER)})
    assert same.startswith("new leaves the ACE of old as it is, 0.100, no significant difference, p = 1.000")


def test_the_reading_picks_the_best_of_several_and_counts_incomplete_cases():
    methods = {"a": make(OVER, absent=[(0, 0)]), "b": make(CENTERS, absent=[(0, 0)]), "c": make(UNDER, absent=[(0, 0)])}
    text = " ".join(read(methods))
    assert "Of all methods, b has the lowest ACE (0.083) and a the highest Dice coefficient" in text
    assert "1 of 6 cases lacks at least one class. On the 5 complete cases alone the ACE is: a 0.100, b 0.000" in text


def test_the_reading_does_not_call_a_method_best_that_chance_may_have_made_so():
    old, worse = make(OVER), make([max(0.0, c - 0.3) for c in CENTERS])
    new = make(OVER)
    at = 60 * 15 + 30
    new.statistics.label_sum[::2, :, at] += 20  # better in half of the cases, worse in the others
    new.statistics.label_sum[1::2, :, at] -= 18
    text = " ".join(read({"old": old, "new": new, "worse": worse}))
    assert "Of all methods, new has the lowest ACE (0.100; against old no significant difference, p = " in text


def test_a_single_case_can_be_read():
    first, second, *_ = read({"old": make(OVER, cases=1), "new": make(CENTERS, cases=1)})
    assert "not tested, for fewer than 5 patients (n/a)" in first
    assert second.startswith("Whether old is well calibrated cannot be told from fewer than 5 patients. On average")


# The top of the report


def shifted(by):
    return [c - by if c > 0.5 else c for c in CENTERS]


def top(evaluations):
    summary = summarize(*of(evaluations))
    assert 1 <= len(summary.sentences) <= 3
    assert all(sentence.endswith(".") and sentence.count(". ") == 0 for sentence in summary.sentences)
    assert not any("nan" in sentence for sentence in summary.sentences)
    assert [row.method for row in summary.rows] == list(evaluations)
    return summary


def words(summary):
    return [(row.compared, row.verdict, row.about) for row in summary.rows]


@pytest.mark.parametrize(
    ("frequencies", "verdict", "about"),
    [
        (OVER, "overconfident", "about liver"),
        (CAUTIOUS, "underconfident", "about liver"),
        ([max(0.0, c - 0.1) for c in CENTERS], "overestimates", "liver"),
        ([min(1.0, c + 0.1) for c in CENTERS], "underestimates", "liver"),
        (CENTERS, "well calibrated", ""),
    ],
)
def test_the_verdict_is_a_word(frequencies, verdict, about):
    assert words(top({"net": make(frequencies)})) == [("baseline", verdict, about)]


def test_one_method_is_told_with_its_range_and_what_chance_would_show():
    first, second = top({"net": make(OVER)}).sentences
    assert first == (
        "net is overconfident about liver: where it gives 50 to 100 %, liver is there 20.0 percentage points less "
        "often than it says."
    )
    floor = compare({"net": make(OVER)}, resamples=50).find("net", metric="ace").floor
    assert second == (
        "Over all ranges of probability it is off by 10.0 percentage points on average; a perfectly calibrated model "
        f"would show at least {100 * floor:.1f} by chance."
    )


def test_other_classes_that_are_off_are_counted():
    assert words(top({"net": make(OVER, CAUTIOUS, CENTERS)})) == [
        ("baseline", "overconfident", "about liver; 1 other class off, too")
    ]


def test_cases_that_are_off_each_their_way_are_uneven():
    summary = top({"net": make([c - 0.02 for c in CENTERS], wobble=0.1)})
    assert words(summary) == [("baseline", "uneven", "right on average, not case by case")]
    assert summary.sentences[0].startswith("net is right on average over patients, but not case by case")


def test_a_better_method_is_told_with_its_overlap_and_what_is_still_off():
    summary = top({"old": make(OVER), "new": make(shifted(0.1))})
    assert summary.sentences == [
        "The probabilities of new are closer to what is observed than those of old: on average they are off by 5.0 "
        "percentage points against 10.0, more than chance explains (p = 0.031).",
        "The overlap of its segmentations with the labels does not differ beyond chance (DSC 0.800 against 0.800).",
        "Still, new is overconfident about liver: where it gives 50 to 100 %, liver is there 10.0 percentage points "
        "less often than it says.",
    ]
    assert words(summary) == [
        ("baseline", "overconfident", "about liver"),
        ("better", "overconfident", "about liver"),
    ]


def test_what_a_better_method_cost_is_told():
    dearer = top({"old": make(OVER), "new": make(CENTERS, nll=0.22)})
    assert dearer.sentences[1] == (
        "The overlap of its segmentations with the labels does not differ beyond chance (DSC 0.800 against 0.800), but "
        "NLL rose by 10 %: part of the gain may come from less informative probabilities."
    )
    assert words(dearer)[1] == ("better, at a cost", "well calibrated", "")
    both = top({"old": make(OVER), "new": make(CENTERS, nll=0.22, dice=0.7)})
    assert both.sentences[1].startswith(
        "Its segmentations overlap less with the labels (DSC 0.700 against 0.800, p = 0.031) and NLL rose by 10 %: part"
    )
    worse = top({"old": make(OVER), "new": make(CENTERS, dice=0.7)})
    assert worse.sentences[1] == "Its segmentations overlap less with the labels (DSC 0.700 against 0.800, p = 0.031)."
    assert words(worse)[1][0] == "better, at a cost"
    more = top({"old": make(OVER), "new": make(CENTERS, dice=0.9)})
    assert more.sentences[1] == "Its segmentations overlap more with the labels (DSC 0.900 against 0.800, p = 0.031)."
    assert words(more)[1][0] == "better"


def test_a_worse_method_and_one_that_chance_may_explain_are_not_called_better():
    worse = top({"old": make(shifted(0.1)), "new": make(OVER)})
    assert worse.sentences[0].startswith(
        "The probabilities of new are further from what is observed than those of old: on average they are off by 10.0 "
        "percentage points against 5.0, more than chance explains (p = "
    )
    assert worse.sentences[2].startswith("old is overconfident about liver")
    assert words(worse)[1][0] == "worse"
    same = top({"old": make(OVER), "new": make(OVER)})
    assert same.sentences[0] == (
        "new is not shown to be better or worse calibrated than old: on average it is off by 10.0 percentage "
        "points against 10.0, which may be chance (p = 1.000)."
    )
    assert words(same)[1][0] == "no clear difference"


def test_of_several_the_best_that_chance_does_not_explain_is_told():
    methods = {"a": make(OVER), "b": make(shifted(0.15)), "c": make(shifted(0.05))}
    first, _, third = top(methods).sentences
    assert first.startswith("The probabilities of c are closer to what is observed than those of a: on average")
    assert "they are off by 2.5 percentage points against 10.0" in first
    assert first.endswith("; those of b are closer, too.")
    assert third.startswith("Still, c is overconfident")
    methods = {"a": make(CENTERS), "b": make(OVER), "c": make(UNDER)}
    assert top(methods).sentences[0] == "No method is shown to be better calibrated than a; b and c are worse."
    assert top(methods).sentences[1].startswith("a is well calibrated")
    doubtful = make(OVER)
    doubtful.statistics.label_sum[::2, :, 60 * 15 + 30] += 20  # better in half of the cases, worse in the others
    doubtful.statistics.label_sum[1::2, :, 60 * 15 + 30] -= 18
    methods = {"a": make(OVER), "b": doubtful, "c": make(OVER)}
    assert top(methods).sentences[0] == "No method is shown to be better calibrated than a."
    assert [row.compared for row in top(methods).rows] == ["baseline", "no clear difference", "no clear difference"]


def test_few_patients_are_said_to_be_few():
    alone = top({"net": make(OVER, cases=1)})
    assert alone.sentences[0].startswith("Whether net is calibrated cannot be tested with fewer than 5")
    assert words(alone) == [("baseline", "unknown", "fewer than 5 patients")]
    two = top({"old": make(OVER, cases=3), "new": make(CENTERS, cases=3)})
    assert two.sentences == [
        "Whether new is better calibrated than old cannot be told from fewer than 5 patients: on average it is off by "
        "0.0 percentage points against 10.0.",
        "Its segmentations have a DSC of 0.800 against 0.800, not tested.",
    ]
    assert words(two)[1] == ("not tested", "unknown", "fewer than 5 patients")
    three = top({"a": make(OVER, cases=3), "b": make(CENTERS, cases=3), "c": make(UNDER, cases=3)})
    assert three.sentences == [
        "Whether any method is better calibrated than a cannot be told from fewer than 5 patients."
    ]


def empty(evaluation):
    for sums in (evaluation.statistics.count, evaluation.statistics.confidence_sum, evaluation.statistics.label_sum):
        sums[:] = 0
    return evaluation


def test_methods_without_a_value_are_not_compared():
    assert top({"net": empty(make(OVER))}).sentences == ["net has no calibration error: no class has a value."]
    assert words(top({"net": empty(make(OVER))})) == [("baseline", "no value", "")]
    for methods in ({"old": empty(make(OVER)), "new": make(OVER)}, {"a": make(OVER), "b": empty(make(OVER))}):
        summary = top(methods)
        assert summary.sentences == [
            "The methods cannot be compared: no case has a calibration error by every one of them."
        ]
        assert words(summary) == [("baseline", "no value", ""), ("no value", "no value", "")]
        assert "old has no calibration error: no case has one by every method." in read(methods) or "old" not in methods


def test_cases_that_lack_a_class_are_told_where_there_is_room():
    told = top({"net": make(OVER, UNDER, absent=[(0, 0), (1, 1)])}).sentences
    assert told[2] == (
        "2 of 6 cases lack at least one class: a probability that a case gives to a class it lacks can only be too "
        "high."
    )
    assert top({"net": make(OVER, absent=[(0, 0)])}).sentences[2].startswith("1 of 6 cases lacks at least one class:")
    assert top({"net": make(OVER, absent=[(i, 0) for i in range(6)])}).sentences[-1].startswith("6 of 6 cases lack")
