"""Conditions are parsed as they are written, and compare with their bound."""

from __future__ import annotations

import math

import pytest

from segcal.errors import ConfigError
from segcal.evaluation.conditions import METRICS, Condition, metric_name, parse_conditions


@pytest.mark.parametrize(
    ("text", "conditions"),
    [
        ("dice>=0.85, macro_ace<=0.10", [("dsc", ">=", 0.85), ("macro-ace", "<=", 0.1)]),
        ("  DSC >= 8.5e-1 ", [("dsc", ">=", 0.85)]),
        ("dice ≥ .85,mce ≤ 1", [("dsc", ">=", 0.85), ("macro-mce", "<=", 1.0)]),
        ("ace < 0.01, micro ECE > 0", [("macro-ace", "<", 0.01), ("micro-ece", ">", 0.0)]),
    ],
)
def test_conditions_are_parsed(text, conditions):
    assert parse_conditions(text) == tuple(Condition(*each) for each in conditions)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r"a metric, one of >=, <=, >, <, and a number.*got ''"),
        ("dcs >= 0.8", r"one of dsc, macro-ace, .*; got 'dcs'\. Did you mean 'dsc'\?"),
        ("makro-mce <= 0.1", r"got 'makro-mce'\. Did you mean 'macro-mce'\?"),
        ("zzzzz >= 0.8", r"got 'zzzzz'\.$"),
        ("dsc 0.85", r"got 'dsc 0.85'"),
        ("dsc = 0.85", r"got 'dsc = 0.85'"),
        ("dsc => 0.85", r"got 'dsc => 0.85'"),
        (">= 0.85", r"got '>= 0.85'"),
        ("0.8 <= dsc <= 0.9", r"got '0.8 <= dsc <= 0.9'"),
        ("dsc >= 0.85,", r"got '' in 'dsc >= 0.85,'"),
        ("dsc >= 0,85", r"got '85' in 'dsc >= 0,85'"),
        ("dsc >= 0.85 and ace <= 0.1", r"got 'dsc >= 0.85 and ace <= 0.1'"),
        ("dsc >=", r"a number from 0 to 1.*got '' in 'dsc >='"),
        ("dsc >= 85 %", r"got '85 %'"),
        ("dsc >= 85", r"got '85'"),
        ("dsc >= -0.1", r"got '-0.1'"),
        ("dsc >= nan", r"got 'nan'"),
    ],
)
def test_other_texts_are_rejected_with_an_example(text, message):
    with pytest.raises(ConfigError, match=message):
        parse_conditions(text)


@pytest.mark.parametrize(
    ("text", "value", "holds"),
    [
        ("dsc >= 0.85", (0.8 + 0.9) / 2, True),  # equal but for rounding
        ("dsc > 0.85", (0.8 + 0.9) / 2, False),
        ("dsc >= 0.85", 0.8499, False),
        ("dsc > 0.85", 0.8501, True),
        ("ace <= 0.1", 0.1, True),
        ("ace < 0.1", 0.1, False),
        ("ace < 0.1", 0.0999, True),
        ("dsc >= 0", math.nan, False),
        ("ace <= 1", math.nan, False),
    ],
)
def test_a_condition_compares_with_its_bound(text, value, holds):
    (condition,) = parse_conditions(text)
    assert condition.holds(value) is holds


def test_metrics_have_one_name_each():
    assert [metric_name(name.upper()) for name in METRICS] == list(METRICS)
    assert METRICS["dsc"] == ("macro", "dice")
