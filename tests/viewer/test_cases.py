"""The slider's numbers are those of numpy on the same voxels; cases are chosen from both ends and the middle."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from cohorts import SHAPE, STRAIGHT, make_case, run, save, write_cohort
from handmade import evaluation_of

from segcal import ConfigError, EvaluationAccumulator, FileError
from segcal.evaluation.evaluation import Evaluation
from segcal.viewer import case_curves, choose_cases, view_cases
from segcal.viewer.cases import Choice


def by_numpy(probability, true, threshold):
    decided = probability >= threshold
    dice = 2 * (decided & true).sum() / (decided.sum() + true.sum())
    expected = 2 * probability[decided].sum() / (decided.sum() + probability.sum())
    return dice, expected, decided.sum()


def test_numbers_at_every_threshold_are_those_of_the_voxels(tmp_path):
    assert run(write_cohort(tmp_path, 2)).exit_code == 0
    evaluation = Evaluation.load(tmp_path / "out" / "evaluation.npz").foreground()
    probabilities, labels = make_case(1)
    found = case_curves(evaluation, "case_1")
    assert len(found) == 2
    for c, curves in enumerate(found, start=1):
        assert curves["threshold"] == [round(k / 100, 4) for k in range(1, 100)]
        for at, threshold in enumerate(curves["threshold"]):
            probability = probabilities[..., c].astype(np.float64)
            dice, expected, voxels = by_numpy(probability, labels == c, threshold)
            assert curves["dice"][at] == pytest.approx(dice, abs=6e-5)
            assert curves["expected"][at] == pytest.approx(expected, abs=6e-5)
            assert curves["voxels"][at] == voxels
            assert curves["volume_ml"][at] == pytest.approx(voxels * 2.5 / 1000, rel=1e-4)  # 1 x 1 x 2.5 mm


def test_a_class_that_is_not_there_has_no_dice_and_a_voxel_of_unknown_size_no_volume():
    accumulator = EvaluationAccumulator()
    accumulator.update(torch.full((1, 2, 6), 0.5), torch.zeros(1, 6, dtype=torch.long), ["one"])
    (curves,) = case_curves(accumulator.compute().foreground(), "one")
    assert curves["dice"] is None
    assert curves["volume_ml"] is None
    assert curves["voxels"][49:51] == [6, 0]  # at 0.5 and 0.51
    assert curves["expected"][49] == round(2 * 3 / (6 + 3), 4)
    with pytest.raises(ConfigError, match="the case must be one of the evaluation's 1; got 'two'"):
        case_curves(accumulator.compute(), "two")


def cohort(dices):
    values = torch.tensor(dices)[:, None].expand(-1, 2)
    return evaluation_of(1 - values, values, cases=[f"c{i}" for i in range(len(dices))])


def test_cases_come_from_the_worst_the_middle_and_the_best():
    evaluation = cohort([0.5, 0.9, 0.1, 0.7, 0.3, 0.8, 0.2])
    one, three, four = (choose_cases({"net": evaluation}, number=number) for number in (1, 3, 4))
    assert one == [Choice("c2", "worst by DSC: 0.100")]
    assert [choice.case for choice in three] == ["c2", "c0", "c1"]
    assert [choice.caption.split()[0] for choice in three] == ["worst", "median", "best"]
    assert [choice.case for choice in four] == ["c2", "c6", "c0", "c1"]
    assert [choice.case for choice in choose_cases({"net": evaluation}, number=99)] == [
        "c2", "c6", "c4", "c0", "c3", "c5", "c1",
    ]  # fmt: skip


def test_a_lower_error_is_better_and_methods_count_together():
    low, high = cohort([0.5, 0.6, 0.7]), cohort([0.5, 0.3, 0.7])
    chosen = choose_cases({"a": low, "b": high}, number=3, by="ace")  # the mean of |1 - dice|: 0.5, 0.55, 0.3
    assert [choice.case for choice in chosen] == ["c1", "c0", "c2"]
    assert chosen[0].caption == "worst by ACE: 0.550"


def test_what_cases_cannot_be_chosen_by_is_refused():
    with pytest.raises(ConfigError, match="one of dice, expected_dice, ace, ece, mce, brier, nll; got 'size'"):
        choose_cases({"net": cohort([0.5])}, number=1, by="size")
    with pytest.raises(ConfigError, match="must be a whole number of at least 1; got 0"):
        choose_cases({"net": cohort([0.5])}, number=0)
    with pytest.raises(ConfigError, match="where all evaluations have it"):
        choose_cases({"net": cohort([0.5])}, number=1, by="expected_dice")


def test_chosen_cases_come_with_images_labels_and_numbers(tmp_path):
    folder = write_cohort(tmp_path, 2)
    save(folder / "I" / "case_1_0000.nii.gz", make_case(1)[1], STRAIGHT)
    assert run(folder).exit_code == 0
    evaluation = Evaluation.load(folder / "out" / "evaluation.npz")
    names = [Choice("case_1", "why")]
    folders = {"net": folder / "P"}
    (whole,) = view_cases({"net": evaluation}, folders, labels=folder / "L", images=folder / "I", choices=names)
    assert (whole.caption, whole.volumes.shape, len(whole.curves[0])) == ("why", SHAPE, 2)
    assert whole.volumes.image is not None
    (bare,) = view_cases({"net": evaluation}, folders, choices=names)
    assert (bare.volumes.image, bare.volumes.labels) == (None, None)
    assert np.array_equal(bare.volumes.probabilities, whole.volumes.probabilities)
    with pytest.raises(FileError, match="must have an image of case_0"):
        list(view_cases({"net": evaluation}, folders, images=folder / "I", choices=[Choice("case_0", "")]))
    with pytest.raises(FileError, match=r"gone must be in .*P; there is no prediction"):
        list(view_cases({"net": evaluation}, folders, labels=folder / "L", choices=[Choice("gone", "")]))
    with pytest.raises(ConfigError, match="predictions must be of the methods"):
        list(view_cases({"net": evaluation}, {}, choices=names))
