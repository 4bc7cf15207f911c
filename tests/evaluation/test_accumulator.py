"""An evaluation from memory is the evaluation from files."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.multiprocessing as mp
from cohorts import SHAPE, make_case

from segcal import (
    ConfigError,
    EvaluationAccumulator,
    LabelError,
    RangeError,
    ReadOptions,
    Regions,
    SegcalError,
    ShapeError,
    build_report,
    compare,
    evaluate,
    write_figures,
)

NAMES = ["background", "liver", "spleen"]


def batch(*numbers):
    """(case, class, x, y, z) probabilities and (case, x, y, z) labels."""
    cases = [make_case(i) for i in numbers]
    probabilities = torch.stack([torch.from_numpy(np.moveaxis(p, -1, 0).copy()).float() for p, _ in cases])
    return probabilities, torch.stack([torch.from_numpy(labels.astype(np.int64)) for _, labels in cases])


def names(*numbers):
    return [f"case_{i}" for i in numbers]


def from_files(folder, options, *numbers):
    (folder / "P").mkdir(parents=True)
    (folder / "L").mkdir()
    for name, values, labels in zip(names(*numbers), *batch(*numbers), strict=True):
        np.save(folder / "P" / f"{name}.npy", values.numpy())
        np.save(folder / "L" / f"{name}.npy", labels.numpy().astype(np.uint8))
    return evaluate(folder / "P", folder / "L", folder / "out", options=options).evaluation


def assert_same(one, other):
    assert (one.cases, one.classes, one.bins, one.has_background) == (
        other.cases,
        other.classes,
        other.bins,
        other.has_background,
    )
    expected = other.case_values()
    for key, values in one.case_values().items():
        torch.testing.assert_close(values, expected[key], rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    "options",
    [ReadOptions(class_names=NAMES), ReadOptions(ignore_index=2), ReadOptions(regions=Regions({"any": (1, 2)}))],
    ids=["names", "ignore", "regions"],
)
def test_numbers_are_those_of_evaluate(options, tmp_path):
    accumulator = EvaluationAccumulator(options=options)
    accumulator.update(*batch(0, 1), names(0, 1))
    accumulator.update(*batch(2), names(2))
    assert_same(accumulator.compute(), from_files(tmp_path, options, 0, 1, 2))


def test_class_names_by_label_and_as_text_mean_the_same():
    made = []
    for given in (NAMES, dict(enumerate(NAMES)), ",".join(NAMES)):
        accumulator = EvaluationAccumulator(options=ReadOptions(class_names=given))
        accumulator.update(*batch(0), names(0))
        made.append(accumulator.compute().classes)
    assert made == [tuple(NAMES)] * 3


def test_logits_half_precision_and_labels_with_a_channel_are_read():
    probabilities, labels = batch(0)
    plain, logits = EvaluationAccumulator(), EvaluationAccumulator(options=ReadOptions(logits=True))
    plain.update(probabilities, labels, ["a"])
    logits.update(probabilities.log(), labels[:, None].float(), ["a"])
    one, other = plain.compute().case_values(), logits.compute().case_values()
    for key, values in one.items():
        torch.testing.assert_close(values, other[key], rtol=1e-3, atol=1e-5, equal_nan=True)
    half = EvaluationAccumulator()
    half.update(probabilities.bfloat16(), labels, ["a"])
    assert half.compute().cases == ("a",)


def test_overlapping_classes_take_zeros_and_ones():
    labels = torch.tensor([[[1, 1, 0, 0], [1, 0, 0, 0]]])
    probabilities = torch.tensor([[[0.9, 0.6, 0.2, 0.1], [0.8, 0.4, 0.1, 0.6]]])
    accumulator = EvaluationAccumulator(options=ReadOptions(sigmoid=True))
    accumulator.update(probabilities, labels, ["a"])
    assert accumulator.compute().case_metrics()["dice"].tolist() == [[1.0, pytest.approx(2 / 3)]]


def test_parts_of_a_case_add_up_to_the_case():
    probabilities, labels = batch(0)
    whole, parts = EvaluationAccumulator(), EvaluationAccumulator(parts=True)
    whole.update(probabilities, labels, ["a"])
    for z in range(SHAPE[-1]):
        parts.update(probabilities[..., z], labels[..., z], ["a"])
    one, other = whole.compute().case_values(), parts.compute().case_values()
    for key, values in one.items():
        torch.testing.assert_close(values, other[key], rtol=1e-9, atol=1e-12, equal_nan=True)


def test_a_case_that_comes_again_counts_once_or_is_refused():
    accumulator = EvaluationAccumulator()
    accumulator.update(*batch(0, 0), ["a", "a"])
    assert len(accumulator) == 1
    with pytest.raises(ConfigError, match="'a' came again with other values"):
        accumulator.update(*batch(1), ["a"])


def test_an_evaluation_from_memory_is_compared_and_reported(tmp_path):
    made = {}
    for method, sharpness in (("network", 1.0), ("sharper", 1.5)):
        accumulator = EvaluationAccumulator(options=ReadOptions(class_names=NAMES))
        for i in range(6):
            probabilities, labels = batch(i)
            sharp = probabilities**sharpness
            accumulator.update(sharp / sharp.sum(1, keepdim=True), labels, names(i))
        made[method] = accumulator.compute()
    found = compare(made)
    assert found.find("sharper", metric="ace").value != found.find("network", metric="ace").value
    build_report(made, tmp_path / "report.html")
    assert (tmp_path / "report.html").stat().st_size > 10_000
    assert write_figures(made, tmp_path / "figures")
    made["network"].save(tmp_path / "saved.npz")
    assert_same(type(made["network"]).load(tmp_path / "saved.npz"), made["network"])


def test_reset_forgets_and_nothing_is_no_evaluation():
    accumulator = EvaluationAccumulator()
    accumulator.update(*batch(0), ["a"])
    accumulator.reset()
    with pytest.raises(SegcalError, match="at least one case"):
        accumulator.compute()


@pytest.mark.parametrize(
    ("values", "labels", "cases", "kind", "told"),
    [
        (torch.rand(1, 3), torch.zeros(1, dtype=int), ["a"], ShapeError, r"\(case, class, ...\)"),
        (torch.rand(2, 3, 4), torch.zeros(2, 4, dtype=int), ["a"], ShapeError, "a name for each of 2 cases"),
        (torch.rand(1, 3, 4), torch.zeros(1, 4, dtype=int), "a", ShapeError, "must be a list"),
        (torch.full((1, 2, 4), 0.5), torch.zeros(1, 5, dtype=int), ["a"], ShapeError, r"a: labels .* shape \(4,\)"),
        (torch.full((1, 2, 4), 7.0), torch.zeros(1, 4, dtype=int), ["a"], RangeError, r"a: probabilities must lie"),
        (torch.full((1, 2, 4), 0.5), torch.full((1, 4), 5), ["a"], LabelError, "a: labels must be among"),
        (torch.full((1, 2, 4), 0.5), torch.full((1, 4), 0.5), ["a"], LabelError, "whole numbers"),
    ],
)
def test_what_makes_no_sense_is_refused_by_name(values, labels, cases, kind, told):
    with pytest.raises(kind, match=told):
        EvaluationAccumulator().update(values, labels, cases)


def refusal_of_evaluate(folder, options, probabilities, labels):
    """Why `evaluate` cannot measure this case."""
    for name, array in (("P", probabilities), ("L", labels)):
        (folder / name).mkdir()
        np.save(folder / name / "a.npy", array[0].numpy())
    (failure,) = evaluate(folder / "P", folder / "L", folder / "out", options=options).failures
    return failure


@pytest.mark.parametrize(
    ("options", "probabilities", "labels", "kind", "told"),
    [
        (
            ReadOptions(ignore_index=255),
            torch.full((1, 2, 4, 4, 4), 0.5),
            torch.full((1, 4, 4, 4), 255, dtype=torch.uint8),
            ShapeError,
            "voxels whose label is not 255, which is ignored; it has none",
        ),
        (
            ReadOptions(logits=True),
            torch.full((1, 2, 4, 4, 4), 0.5),
            torch.zeros(1, 4, 4, 4, dtype=torch.uint8),
            RangeError,
            "logits must not be probabilities",
        ),
    ],
    ids=["ignored", "logits"],
)
def test_what_evaluate_refuses_is_refused_in_the_same_words(tmp_path, options, probabilities, labels, kind, told):
    failure = refusal_of_evaluate(tmp_path, options, probabilities, labels)
    with pytest.raises(kind, match=told) as caught:
        EvaluationAccumulator(options=options).update(probabilities, labels, ["a"])
    assert (type(caught.value).__name__, str(caught.value)) == (failure.kind, f"a: {failure.message}")


def test_a_part_may_be_ignored_but_not_the_whole_case():
    accumulator = EvaluationAccumulator(options=ReadOptions(ignore_index=9), parts=True)
    probabilities = torch.full((1, 2, 4), 0.5)
    accumulator.update(probabilities, torch.full((1, 4), 9), ["a"])
    with pytest.raises(ShapeError, match="a: the volume must have voxels whose label is not 9"):
        accumulator.compute()
    accumulator.update(probabilities, torch.zeros(1, 4, dtype=torch.long), ["a"])
    assert accumulator.compute().cases == ("a",)


def _process(rank, folder):
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    accumulator = EvaluationAccumulator(options=ReadOptions(class_names=NAMES))
    for i in (0, 2) if rank == 0 else (1, 2):  # a sampler fills up with a case that the other has, too
        accumulator.update(*batch(i), names(i))
    accumulator.compute().save(folder / f"{rank}.npz")
    torch.distributed.destroy_process_group()


def test_two_processes_see_the_cases_of_both(tmp_path):
    from segcal import Evaluation

    mp.spawn(_process, (tmp_path,), nprocs=2)
    options = ReadOptions(class_names=NAMES)
    expected = from_files(tmp_path / "files", options, 0, 1, 2)
    for rank in range(2):
        assert_same(Evaluation.load(tmp_path / f"{rank}.npz"), expected)
