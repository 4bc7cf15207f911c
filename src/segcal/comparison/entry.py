"""One number of a comparison."""

from __future__ import annotations

from typing import NamedTuple

from segcal.evaluation.columns import Label


class Entry(NamedTuple):
    """One number of one method, and how it compares with the baseline's."""

    method: str
    cases: str
    """"all", or "complete": those with every class present."""
    average: str
    """"macro", "micro paper" or "micro pooled"."""
    scope: str
    """"class", or of all classes: "mean", "joint" or "top label" (see `segcal.evaluation.columns.scope_of`)."""
    label: Label
    """The class; None: all of them."""
    metric: str
    value: float
    std: float
    """Over cases; NaN for micro averages, which are one number."""
    number: int
    """Cases that have a value."""
    seeds: int
    """Evaluations of the method. Of several, the other fields are of means over them."""
    seed_std: float
    """Over seeds, of the value that each has by itself; NaN for one."""
    low: float
    high: float
    """Bootstrap interval over patients; NaN where fewer than 5 have a value."""
    floor: float
    """What a perfectly calibrated model would show by chance, voxels taken as independent: the real one is higher.

    NaN but for errors, and for the paper's micro average, in which more than chance tells confidence and frequency
    apart.
    """
    change: float
    """Relative to the baseline: -0.12 is 12 % lower; of Dice and signed gap the difference, -0.01 is a point less.

    NaN for the baseline itself, as all that follows.
    """
    difference_low: float
    difference_high: float
    """Bootstrap interval over patients of the difference from the baseline."""
    p_t: float
    p_wilcoxon: float
    """Paired tests over patients; macro only. NaN below 5 patients, as all p."""
    p_permutation: float
    """The share of ways to swap the two methods, patient by patient, that differ as much; micro only."""
    p: float
    """Of the test that was chosen (of the permutation for micro averages), corrected if that was asked for."""
    stars: str
    """* p < 0.05, ** p < 0.01."""
