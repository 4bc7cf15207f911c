"""Whole numbers: fractions, truth values and texts are refused by name; those of numpy are taken."""

import numpy as np
import pytest
import torch
from cohorts import write_cohort
from handmade import evaluation_of

from segcal import (
    Binning,
    ConfigError,
    EvaluationAccumulator,
    audit_predictions,
    bin_statistics,
    compare,
    compare_groups,
    decide,
    equal_mass,
    evaluate,
    evaluate_lesions,
    fit_calibrator,
    make_calibrator,
)
from segcal.datasets import make_phantom
from segcal.errors import check_seed
from segcal.evaluation.diagrams import reliability, reliability_histogram
from segcal.evaluation.groups import Groups
from segcal.evaluation.options import Options
from segcal.viewer import choose_cases

PROBABILITIES, LABELS = torch.full((6, 1, 8), 0.25), torch.zeros(6, 1, 8)
STATS = bin_statistics(PROBABILITIES, LABELS, bins=1200)
EVALUATION = evaluation_of(torch.full((6, 2), 0.1), torch.full((6, 2), 0.8))
GROUPS = Groups({"site": dict.fromkeys(EVALUATION.cases, "north")})
IN_MEMORY = {
    "Binning, bins": Binning,
    "bin_statistics, bins": lambda bins: bin_statistics(PROBABILITIES, LABELS, bins=bins),
    "rebin, bins": STATS.rebin,
    "equal_mass, bins": lambda bins: equal_mass(STATS, bins),
    "EvaluationAccumulator, bins": lambda bins: EvaluationAccumulator(bins=bins),
    "Options, bins": lambda bins: Options(bins=bins),
    "compare, bins": lambda bins: compare({"a": EVALUATION}, bins=bins, resamples=2, draws=1),
    "compare, resamples": lambda number: compare({"a": EVALUATION}, resamples=number, draws=1),
    "compare, draws": lambda number: compare({"a": EVALUATION}, resamples=2, draws=number),
    "compare_groups, resamples": lambda number: compare_groups(EVALUATION, GROUPS, resamples=number),
    "compare_groups, permutations": lambda number: compare_groups(EVALUATION, GROUPS, permutations=number),
    "reliability, resamples": lambda number: reliability(STATS, patients=list("abcdef"), resamples=number),
    "reliability_histogram, levels": lambda levels: reliability_histogram(STATS.rebin(20), levels=levels),
    "choose_cases, number of cases": lambda number: choose_cases({"a": EVALUATION}, number=number),
    "temperature, voxels": lambda voxels: make_calibrator("temperature", voxels=voxels),
    "local, steps": lambda steps: make_calibrator("local-temperature", steps=steps),
    "local, bins": lambda bins: make_calibrator("local-temperature", bins=bins),
    "local, dilations": lambda number: make_calibrator("local-temperature", dilations=[number]),
    "check_seed, seed": check_seed,
}
OF_FILES = {
    "evaluate, bins": lambda p, labels, out, bins: evaluate(p, labels, out, bins=bins),
    "evaluate, workers": lambda p, labels, out, workers: evaluate(p, labels, out, workers=workers),
    "audit_predictions, workers": lambda p, labels, out, workers: audit_predictions(p, labels, out, workers=workers),
    "audit_predictions, cases": lambda p, labels, out, cases: audit_predictions(p, labels, out, cases=cases),
    "decide, workers": lambda p, labels, out, workers: decide(p, out, workers=workers),
    "evaluate_lesions, workers": lambda p, labels, out, workers: evaluate_lesions(p, labels, out, workers=workers),
    "evaluate_lesions, bins": lambda p, labels, out, bins: evaluate_lesions(p, labels, out, bins=bins),
    "evaluate_lesions, resamples": lambda p, labels, out, number: evaluate_lesions(p, labels, out, resamples=number),
    "fit_calibrator, folds": lambda p, labels, out, folds: fit_calibrator(p, labels, out / "c.json", folds=folds),
    "fit_calibrator, workers": lambda p, labels, out, number: fit_calibrator(p, labels, out / "c.json", workers=number),
    "make_phantom, cases": lambda p, labels, out, cases: make_phantom(out, cases=cases),
    "make_phantom, raters": lambda p, labels, out, raters: make_phantom(out, raters=raters),
}
WRONG = (7.5, 2.0, True, "2", np.float64(2), np.bool_(True))


@pytest.mark.parametrize("name", IN_MEMORY)
def test_whole_numbers_are_taken_and_others_refused_by_name(name):
    for value in (2, np.int64(2), np.uint8(2)):
        IN_MEMORY[name](value)
    for value in WRONG:
        with pytest.raises(ConfigError, match=rf"{name.split(', ')[1]} must be a whole number .*; got "):
            IN_MEMORY[name](value)


@pytest.mark.parametrize("name", OF_FILES)
def test_numbers_that_are_not_whole_are_refused_before_any_work(tmp_path, name):
    folder = write_cohort(tmp_path, 2)
    for value in WRONG:
        with pytest.raises(ConfigError, match=rf"{name.split(', ')[1]} must be a whole number .*; got "):
            OF_FILES[name](folder / "P", folder / "L", folder / "out", value)
    assert not list((folder / "out").glob("*.csv"))


def test_whole_numbers_of_numpy_are_kept_as_those_of_python():
    for bins in (Binning(np.int64(20)).bins, Options(bins=np.int64(20)).bins, STATS.rebin(np.int64(20)).binning.bins):
        assert type(bins) is int
