"""Public objects come back the same from pickle and copy.deepcopy, as processes and notebooks make copies of them."""

import copy
import dataclasses
import pickle

import numpy as np
import pytest
import torch
from cohorts import write_cohort

import segcal
from segcal import (
    ACELoss,
    Audit,
    Calibrator,
    Evaluation,
    EvaluationAccumulator,
    ReadOptions,
    Regions,
    ReviewDecision,
    SegcalError,
    SegmentationLoss,
    apply_quality,
    compare,
    compare_groups,
    evaluate,
    evaluate_lesions,
    fit_quality,
    make_calibrator,
)
from segcal.audit.nnunet import Sources
from segcal.calibrators import CALIBRATORS
from segcal.evaluation.groups import Groups

COPIES = {
    "pickle": lambda value: pickle.loads(pickle.dumps(value)),
    "deepcopy": copy.deepcopy,
    "copy": copy.copy,
}


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Every kind of result, of 10 small cases."""
    folder = write_cohort(tmp_path_factory.mktemp("results"), 10)
    maps, labels = folder / "P", folder / "L"
    outcome = evaluate(maps, labels, folder / "out")
    evaluation = outcome.evaluation
    accumulator = EvaluationAccumulator()
    accumulator.update(torch.full((2, 2, 8), 0.5), torch.tensor([[0, 1] * 4] * 2), ["one", "two"])
    quality = fit_quality(evaluation)
    comparison = compare({"one": evaluation, "other": evaluation}, resamples=5, draws=2)
    return {
        "Outcome": outcome,
        "Evaluation": evaluation,
        "Evaluation from a file": Evaluation.load(folder / "out" / "evaluation.npz"),
        "Evaluation from memory": accumulator.compute(),
        "Evaluation of some cases": evaluation.select(cases=[7, 2]).foreground(),
        "FineStatistics": evaluation.statistics,
        "FineStatistics, selected": evaluation.statistics.select(cases=[5, 1], classes=[2, 0]),
        "BinStatistics": evaluation.binned,
        "OverlapCounts": evaluation.overlap,
        "ScoreSums": evaluation.scores,
        "DecisionSums": evaluation.decisions,
        "EvaluationAccumulator": accumulator,
        "Comparison": comparison,
        "GroupComparison": compare_groups(
            evaluation, Groups({"site": dict.fromkeys(evaluation.cases, "north")}), resamples=5
        ),
        "LesionOutcome": evaluate_lesions(maps, labels, folder / "lesions", resamples=5),
        "Quality": quality,
        "Queue": apply_quality(quality, maps, folder / "queue"),
        "Audit": Audit(
            folder,
            Sources(maps, labels, None, ReadOptions()),
            outcome,
            evaluation.select(cases=[0]),
            comparison,
            "",
            None,
            None,
            folder / "report.html",
            folder / "NEXT.md",
            {"calibrate": "there are few patients."},
            {},
        ),
        "Binning": segcal.Binning(5, kernel="gaussian"),
        "ReadOptions": ReadOptions(class_names={0: "background", 1: "liver"}),
        "Regions": Regions({"any": (1, 2)}),
        "ReviewDecision": ReviewDecision("case_1", "reject"),
        "ACELoss": ACELoss(class_weights=[1.0, 2.0]),
        "SegmentationLoss": SegmentationLoss(class_weights=[1.0, 2.0]),
        "LossTerms": SegmentationLoss().terms(torch.zeros(1, 2, 4), torch.tensor([[0, 1, 0, 1]])),
        "SegcalError": segcal.FileError("maps/case_1.npy cannot be read."),
    }


def plain(value):
    """The value as nested lists whose representation tells all of it, NaN included."""
    if isinstance(value, torch.Tensor | np.ndarray):
        return value.tolist()
    if isinstance(value, Calibrator):
        return value.to_json()
    if isinstance(value, torch.nn.Module):
        return [repr(value), *map(plain, (*value.state_dict().values(), *value.buffers()))]
    if isinstance(value, EvaluationAccumulator):
        return plain(value.compute())
    if isinstance(value, SegcalError):
        return [type(value).__name__, str(value)]
    if dataclasses.is_dataclass(value):
        return [type(value).__name__, *(plain(getattr(value, each.name)) for each in dataclasses.fields(value))]
    if isinstance(value, dict):
        return [(plain(key), plain(each)) for key, each in value.items()]
    if isinstance(value, list | tuple):
        return [type(value).__name__, *map(plain, value)]
    return repr(value)


NAMES = (
    "Outcome", "Evaluation", "Evaluation from a file", "Evaluation from memory", "Evaluation of some cases",
    "FineStatistics", "FineStatistics, selected", "BinStatistics", "OverlapCounts", "ScoreSums", "DecisionSums",
    "EvaluationAccumulator", "Comparison", "GroupComparison", "LesionOutcome", "Quality", "Queue", "Audit", "Binning",
    "ReadOptions", "Regions", "ReviewDecision", "ACELoss", "SegmentationLoss", "LossTerms", "SegcalError",
)  # fmt: skip


@pytest.mark.parametrize("way", COPIES)
@pytest.mark.parametrize("name", NAMES)
def test_a_copy_is_the_same(results, name, way):
    value = results[name]
    made = COPIES[way](value)
    assert type(made) is type(value)
    assert repr(plain(made)) == repr(plain(value))


def test_every_public_class_is_copied():
    kinds = {name for name in segcal.__all__ if isinstance(getattr(segcal, name), type)}
    errors = {name for name in kinds if issubclass(getattr(segcal, name), SegcalError)}
    assert kinds - errors - {"Calibrator"} <= set(NAMES)


@pytest.mark.parametrize("way", COPIES)
@pytest.mark.parametrize("method", CALIBRATORS)
def test_a_copy_of_a_fitted_calibrator_is_the_same(method, way):
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(0, 3, (12, 12, 12), generator=generator)
    logits = torch.randn(3, 12, 12, 12, generator=generator) + torch.nn.functional.one_hot(labels).movedim(-1, 0)
    fitted = make_calibrator(method, **({"steps": 2} if "local" in method else {})).fit([(logits, labels)])
    made = COPIES[way](fitted)
    assert made.to_json() == fitted.to_json()
    assert torch.equal(made.transform(logits), fitted.transform(logits))


@pytest.mark.parametrize("way", COPIES)
def test_a_copy_of_an_evaluation_can_be_used_and_saved(results, way, tmp_path):
    evaluation = results["Evaluation from a file"]
    made = COPIES[way](evaluation)
    made.save(tmp_path / "made.npz")
    evaluation.save(tmp_path / "evaluation.npz")
    assert (tmp_path / "made.npz").read_bytes() == (tmp_path / "evaluation.npz").read_bytes()
    both = Evaluation.concatenate([made.select(cases=[0]), evaluation.select(cases=[1])])
    assert repr(plain(both.case_metrics())) == repr(plain(evaluation.select(cases=[0, 1]).case_metrics()))


def test_a_pickle_of_statistics_holds_the_selected_cases_alone(results):
    stats = results["Evaluation from a file"].statistics
    assert 4 * len(pickle.dumps(stats.select(cases=[3]))) < len(pickle.dumps(stats))
