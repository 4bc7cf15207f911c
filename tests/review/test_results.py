"""What there is to review: evaluations, queues, studies and folders of them, and their numbers."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace

import nibabel
import numpy as np
import pytest
from cohorts import make_case, save, write_cohort
from reviews import Client, save_evaluation
from scipy.special import softmax

from segcal import Evaluation, ReadOptions, apply_quality, evaluate, fit_quality
from segcal.errors import FileError, SegcalError
from segcal.quality.page import write_queue
from segcal.quality.queue import CohortDice, Queue, Row
from segcal.review.results import ABSENT, EMPTY, find_results
from segcal.review.serving import serve_review


def row(rank: int, case: str, name: str, dice: float, *, expected: float = 0.5, flags: str = "") -> Row:
    return Row(rank, case, name, dice, 0.1, 0.9, expected, 1.0, 1.0, 0.5, 2.0, 0.2, 10, flags, 0.4)


def test_an_evaluation_is_ordered_by_expected_dice_and_has_its_numbers(tmp_path):
    save_evaluation(tmp_path / "evaluation.npz", ["a", "b", "c"])
    (result,) = find_results(tmp_path)
    evaluation = Evaluation.load(tmp_path / "evaluation.npz").foreground()
    assert (result.cases, result.classes) == (("a", "b", "c"), ("class 1", "class 2"))
    expected = evaluation.decision_metrics()["expected_dice"].numpy()
    assert result.quality_name == "Expected Dice"
    np.testing.assert_allclose(result.quality[:, 1:], expected)
    np.testing.assert_allclose(result.quality[:, 0], expected.mean(1))
    np.testing.assert_allclose(result.values["ace"][:, 1:], evaluation.case_metrics()["ace"].numpy())
    assert np.isnan(result.values["volume_ml"][:, 0]).all()  # of all classes there is none


def test_an_evaluation_without_sums_of_decisions_is_ordered_by_dice(tmp_path):
    save_evaluation(tmp_path / "evaluation.npz", ["a", "b"])
    old = replace(Evaluation.load(tmp_path / "evaluation.npz"), decisions=None)
    old.save(tmp_path / "evaluation.npz")
    (result,) = find_results(tmp_path / "evaluation.npz")
    assert result.quality_name == "Dice"
    assert "expected_dice" not in result.values


def test_flags_of_an_evaluation_are_its_empty_and_absent_classes_and_its_notes(tmp_path):
    save_evaluation(tmp_path / "evaluation.npz", ["a", "b"])
    found = Evaluation.load(tmp_path / "evaluation.npz")
    found.overlap.predicted[1, 2] = 0
    found.overlap.true[1, 1] = 0
    found.provenance["notes"] = [{"kind": "odd", "message": "looks odd.", "cases": ["a"]}]
    found.save(tmp_path / "evaluation.npz")
    (result,) = find_results(tmp_path)
    assert result.flags == [[("odd",)] * 3, [(ABSENT, EMPTY), (ABSENT,), (EMPTY,)]]


def test_a_queue_is_ordered_by_predicted_dice_as_its_file_is(tmp_path):
    rows = (
        row(1, "x", "one", 0.3, flags="tiny; fragmented"), row(1, "x", "two", 0.5),
        row(2, "y", "one", float("nan"), expected=0.45), row(2, "y", "two", 0.55),
    )  # fmt: skip
    write_queue(Queue(rows, (CohortDice(None, 0.4, 0.3, 0.5),), (), 0.9), tmp_path)
    (result,) = find_results(tmp_path)
    assert (result.cases, result.classes, result.quality_name) == (("x", "y"), ("one", "two"), "Predicted Dice")
    np.testing.assert_allclose(result.quality, [[0.4, 0.3, 0.5], [0.5, 0.45, 0.55]])
    assert np.isnan(result.values["predicted_dice"][1, 1])
    assert result.flags == [[("tiny", "fragmented"), ("tiny", "fragmented"), ()], [(), (), ()]]


@pytest.mark.parametrize(
    "content",
    ["", "[]", "{}", '{"queue": 3}', '{"queue": [{"case": 1}], "failures": []}', '{"queue": [], "failures": [1]}'],
)
def test_a_queue_that_is_none_is_refused(tmp_path, content):
    (tmp_path / "queue.json").write_text(content)
    with pytest.raises(FileError, match=r"queue.json must be a queue that `segcal quality apply` wrote"):
        find_results(tmp_path)


def test_cases_of_a_queue_must_stand_together(tmp_path):
    rows = (row(1, "x", "one", 0.3), row(2, "y", "one", 0.5))
    write_queue(Queue(rows, (CohortDice(None, 0.4, 0.3, 0.5),), (), 0.9), tmp_path)
    content = json.loads((tmp_path / "queue.json").read_text())
    content["queue"].append(content["queue"][0])
    (tmp_path / "queue.json").write_text(json.dumps(content))
    with pytest.raises(FileError, match="do not stand together"):
        find_results(tmp_path)


def test_runs_of_a_study_are_results_and_cases_of_two_datasets_stay_apart(tmp_path):
    for run, dataset in (("acdc-dice-seed0-1", "acdc"), ("kits-dice-seed0-2", "kits")):
        for place in ("test", "calibrated/temperature/test"):
            file = tmp_path / "runs" / run / place / "evaluation.npz"
            save_evaluation(file, ["1", "2"])
            found = Evaluation.load(file)
            found.provenance["run"] = {"config": {"data": {"dataset": dataset}}}
            found.save(file)
    results = find_results(tmp_path)
    assert {result.name: result.cases for result in results} == {
        "acdc-dice-seed0-1": ("acdc/1", "acdc/2"),
        "acdc-dice-seed0-1 + temperature": ("acdc/1", "acdc/2"),
        "kits-dice-seed0-2": ("kits/1", "kits/2"),
        "kits-dice-seed0-2 + temperature": ("kits/1", "kits/2"),
    }
    with serve_review(tmp_path) as server:
        client = Client(server.url)
        assert server.cases == 4
        assert client.decide("acdc/1").status == 200
        assert client.decide("1").status == 400


def test_results_in_folders_below_are_found_a_queue_first(tmp_path):
    save_evaluation(tmp_path / "evaluation" / "evaluation.npz", ["a"])
    write_queue(Queue((row(1, "x", "one", 0.3),), (CohortDice(None, 0.4, 0.3, 0.5),), (), 0.9), tmp_path / "queue")
    assert [result.name for result in find_results(tmp_path)] == ["queue", "evaluation"]


def test_results_with_the_same_name_are_all_shown(tmp_path):
    """A folder has the name that a queue beside an evaluation gets."""
    for name in ("x/evaluation.npz", "x/queue.json", "x, queue/queue.json"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
    save_evaluation(tmp_path / "x" / "evaluation.npz", ["a"])
    queue = {"queue": [], "failures": [], "provenance": {}}
    for name in ("x", "x, queue"):
        (tmp_path / name / "queue.json").write_text(json.dumps(queue))
    results = find_results(tmp_path)
    assert {result.file.relative_to(tmp_path).as_posix() for result in results} == {
        "x/evaluation.npz", "x/queue.json", "x, queue/queue.json",
    }  # fmt: skip
    assert len({result.name for result in results}) == 3


def test_a_folder_without_results_and_a_broken_file_are_refused(tmp_path):
    with pytest.raises(FileError, match="must hold results to review"):
        find_results(tmp_path)
    (tmp_path / "evaluation.npz").write_bytes(b"nothing")
    with pytest.raises(SegcalError, match="must be a file of the format"):
        find_results(tmp_path)


@pytest.fixture
def cohort(tmp_path):
    write_cohort(tmp_path, 6)
    evaluate(tmp_path / "P", tmp_path / "L", tmp_path / "out")
    return tmp_path


def test_volumes_are_found_where_the_results_say_and_are_those_of_the_files(cohort):
    with serve_review(cohort / "out") as server:
        client = Client(server.url)
        assert server.notes == []
        facts = client.ask("/api/case?case=case_2&result=0").json
        assert (facts["hasLabels"], facts["hasImage"], facts["methods"]) == (True, False, ["out"])
        assert facts["classes"] == ["class 1", "class 2"]
        ask = "/api/volume?case=case_2&result=0&class=1&kind="
        assert facts["shape"] == list(nibabel.load(cohort / "L" / "case_2.nii.gz").shape)
        probability, label = (
            np.asarray(nibabel.Nifti1Image.from_bytes(client.ask(ask + kind).body).dataobj)
            for kind in ("probability", "label")
        )
        curve = facts["curves"]["0"]["1"]
    stored = nibabel.load(cohort / "P" / "case_2.nii.gz").get_fdata()[..., 2]
    truth = nibabel.load(cohort / "L" / "case_2.nii.gz").get_fdata() == 2
    np.testing.assert_array_equal(probability, np.rint(stored.astype(np.float32) * 255))
    np.testing.assert_array_equal(label, truth)
    decided = stored >= 0.5
    at = curve["threshold"].index(0.5)
    assert curve["dice"][at] == pytest.approx(2 * (decided & truth).sum() / (decided.sum() + truth.sum()), abs=1e-4)


@pytest.mark.parametrize(("logits", "mean"), [(False, "probabilities"), (True, "probabilities"), (True, "logits")])
def test_what_is_shown_of_members_is_their_mean(tmp_path, monkeypatch, logits, mean):
    """With labels beside, then without; a member that has moved is named."""
    write_cohort(tmp_path, 2)
    maps = {folder: [make_case(10 * member + i)[0] for i in range(2)] for member, folder in enumerate("PQ")}
    for folder, cases in maps.items():
        for i, probabilities in enumerate(cases):
            save(tmp_path / folder / f"case_{i}.nii.gz", np.log(probabilities) if logits else probabilities)
    one, other = maps["P"][1], maps["Q"][1]
    expected = softmax((np.log(one) + np.log(other)) / 2, -1) if mean == "logits" else (one + other) / 2
    monkeypatch.chdir(tmp_path)
    evaluate("P", "L", "out", members=["Q"], mean=mean, options=ReadOptions(logits=logits))
    monkeypatch.chdir(tmp_path / "P")
    for labeled in (True, False):
        with serve_review(tmp_path / "out") as server:
            client = Client(server.url)
            assert server.notes == []
            facts = client.ask("/api/case?case=case_1&result=0").json
            assert facts["hasLabels"] == labeled
            shown = client.ask("/api/volume?case=case_1&result=0&class=1&kind=probability").body
            probability = np.asarray(nibabel.Nifti1Image.from_bytes(shown).dataobj)
            np.testing.assert_allclose(probability, 255 * expected[..., 2], atol=0.51)
        shutil.rmtree(tmp_path / "L", ignore_errors=True)
    (tmp_path / "Q").rename(tmp_path / "moved")
    with serve_review(tmp_path / "out") as server:
        (note,) = server.notes
        assert f"their folder {tmp_path / 'Q'} is not there any more" in note


def test_folders_that_are_given_come_before_those_of_the_results(cohort):
    (cohort / "P").rename(cohort / "moved")
    with serve_review(cohort / "out") as server:
        assert "is not there any more" in server.notes[0]
    with serve_review(cohort / "out", predictions=cohort / "moved", labels=cohort / "L", images=cohort / "L") as server:
        facts = Client(server.url).ask("/api/case?case=case_0&result=0").json
        assert (facts["hasLabels"], facts["hasImage"]) == (True, True)


def test_a_queue_tells_where_its_predictions_are(cohort):
    fit_quality(cohort / "out", cohort / "quality.json", level=0.6)
    apply_quality(cohort / "quality.json", cohort / "P", cohort / "queue")
    with serve_review(cohort / "queue") as server:
        facts = Client(server.url).ask("/api/case?case=case_0&result=0").json
    assert (facts["hasLabels"], facts["curves"]) == (False, None)


def test_a_case_name_of_the_results_is_never_a_path(cohort):
    """The results may be anyone's: a name in them must lead to no file outside of the folders."""
    found = Evaluation.load(cohort / "out" / "evaluation.npz")
    replace(found, cases=("../L/case_0", "/etc/passwd", *found.cases[2:])).save(cohort / "out" / "evaluation.npz")
    with serve_review(cohort / "out", images=cohort / "P") as server:
        client = Client(server.url)
        assert "no prediction of 2 cases" in server.notes[0]
        for name in ("../L/case_0", "/etc/passwd"):
            for place in ("case", "volume"):
                assert client.ask(f"/api/{place}?case={name}&result=0&kind=image").status == 400
