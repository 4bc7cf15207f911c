"""An evaluation's numbers follow from its sums; it survives saving, joining and cutting."""

import math
import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from sklearn.metrics import brier_score_loss, log_loss

from segcal import (
    ConfigError,
    Evaluation,
    OverlapCounts,
    ScoreSums,
    SegcalError,
    ace,
    bin_statistics,
    brier,
    dice,
    nll,
)


def make(cases=3, classes=3, voxels=400, seed=0, absent=()):
    """Random probabilities and labels as an evaluation; `absent` are (case, class) pairs without a voxel."""
    generator = torch.Generator().manual_seed(seed)
    probabilities = torch.randn(cases, classes, voxels, generator=generator).softmax(1)
    labels = torch.randint(0, classes, (cases, voxels), generator=generator)
    for case, c in absent:
        labels[case][labels[case] == c] = 0
    top, predicted = probabilities.max(1)
    evaluation = Evaluation(
        bin_statistics(probabilities, labels, bins=1200),
        OverlapCounts.of_classes(probabilities, labels),
        ScoreSums.of_classes(probabilities, labels),
        bin_statistics(top[:, None], (predicted == labels)[:, None], bins=1200),
        cases=tuple(f"{seed}-{i}" for i in range(cases)),
        classes=("background", "liver", "tumour")[:classes],
        has_background=True,
        provenance={"note": "ünicode"},
        joint=ScoreSums.joint_of_classes(probabilities, labels),
    )
    return evaluation, probabilities, labels


def rows_of(evaluation, *, background=False):
    return {(r.cases, r.average, r.label, r.metric): r for r in evaluation.summary(background=background)}


def test_the_background_counts_in_no_mean_unless_asked():
    evaluation, probabilities, labels = make()
    errors = ace(bin_statistics(probabilities, labels, bins=20))
    pooled = ace(bin_statistics(probabilities, labels, bins=20).pool("case"))
    plain, asked = rows_of(evaluation), rows_of(evaluation, background=True)
    assert {label for _, _, label, _ in plain} == {"liver", "tumour", None}
    assert plain["all", "macro", None, "ace"].value == pytest.approx(errors[:, 1:].mean().item())
    assert plain["all", "micro pooled", None, "ace"].value == pytest.approx(pooled[0, 1:].mean().item())
    assert evaluation.means()["macro", "ace"] == plain["all", "macro", None, "ace"].value
    assert evaluation.case_values()[None, "ace"].tolist() == pytest.approx(errors[:, 1:].mean(1).tolist())
    assert asked["all", "macro", "background", "ace"].value == pytest.approx(errors[:, 0].mean().item())
    assert asked["all", "macro", None, "ace"].value == pytest.approx(errors.mean().item())
    assert asked["all", "micro pooled", None, "ace"].value == pytest.approx(pooled[0].mean().item())


def test_macro_is_the_mean_over_cases_and_micro_pools_them():
    evaluation, probabilities, labels = make()
    rows = rows_of(evaluation)
    errors = ace(bin_statistics(probabilities, labels, bins=20))
    liver = rows["all", "macro", "liver", "ace"]
    assert liver.value == pytest.approx(errors[:, 1].mean().item())
    assert liver.std == pytest.approx(errors[:, 1].std().item())
    assert liver.number == 3
    assert rows["all", "macro", None, "ace"].std == pytest.approx(errors[:, 1:].mean(1).std().item())
    together = bin_statistics(probabilities.movedim(1, 0).flatten(1)[None], labels.flatten()[None], bins=20)
    assert rows["all", "micro pooled", "tumour", "ace"].value == pytest.approx(ace(together)[0, 2].item())


def test_complete_cases_are_those_with_every_class():
    evaluation, _, _ = make(absent=[(1, 2)])
    assert evaluation.complete().cases == ("0-0", "0-2")
    rows = rows_of(evaluation)
    assert rows["complete", "macro", "liver", "ace"].number == 2
    assert rows["all", "macro", "liver", "ace"].number == 3


def test_without_complete_cases_there_are_numbers_for_all_and_none_for_complete():
    rows = rows_of(make(absent=[(0, 1), (1, 1), (2, 2)])[0])
    assert math.isnan(rows["complete", "macro", "liver", "ace"].value)
    assert ("complete", "micro pooled", "liver", "ace") not in rows


def test_foreground_leaves_out_the_background_and_keeps_the_numbers():
    evaluation, _, _ = make()
    part = evaluation.foreground()
    assert part.classes == ("liver", "tumour")
    assert not part.has_background
    assert part.foreground() is part
    for name, values in part.case_metrics().items():
        torch.testing.assert_close(values, evaluation.case_metrics()[name][:, 1:], equal_nan=True)


@pytest.mark.parametrize("classes", [[1, 0], [2, 1, 0], [1, 0, 2], [-1, -3], [-2, 0]])
def test_foreground_leaves_out_the_background_wherever_a_selection_puts_it(tmp_path, classes):
    evaluation, _, _ = make()
    part = evaluation.select(classes=classes)
    names = ("background", "liver", "tumour")
    expected = tuple(names[i] for i in classes if names[i] != "background")
    part.save(tmp_path / "part.npz")
    again = part.select(classes=[*range(len(classes))][::-1])
    for one, of in ((part, expected), (Evaluation.load(tmp_path / "part.npz"), expected), (again, expected[::-1])):
        assert one.has_background
        assert one.foreground().classes == of
        assert {row.label for row in one.summary()} == {*of, None}
        own = evaluation.case_metrics()["ace"][:, [names.index(name) for name in of]]
        torch.testing.assert_close(one.case_values()[None, "ace"], own.mean(1))
    assert not evaluation.select(classes=[2, 1]).has_background


def test_a_background_that_is_no_class_is_refused():
    with pytest.raises(ConfigError, match="background_index must be the place of one of the 3 classes; got 3"):
        replace(make()[0], background_index=3)


def test_saved_and_loaded_it_is_the_same(tmp_path):
    evaluation, _, _ = make(absent=[(0, 1)])
    evaluation.save(tmp_path / "evaluation.npz")
    loaded = Evaluation.load(tmp_path / "evaluation.npz")
    assert (loaded.cases, loaded.classes, loaded.bins) == (evaluation.cases, evaluation.classes, evaluation.bins)
    assert loaded.provenance == {"note": "ünicode"}
    for name, values in evaluation.case_metrics().items():
        assert torch.equal(values.nan_to_num(-1), loaded.case_metrics()[name].nan_to_num(-1))
    for name, values in evaluation.top_label_errors().items():
        assert torch.equal(values, loaded.top_label_errors()[name])
    assert '"liver"' in (tmp_path / "evaluation.json").read_text(encoding="utf-8")


def test_the_same_sums_give_the_same_bytes(tmp_path):
    make()[0].save(tmp_path / "a.npz")
    make()[0].save(tmp_path / "b.npz")
    assert (tmp_path / "a.npz").read_bytes() == (tmp_path / "b.npz").read_bytes()


def test_concatenation_puts_cases_side_by_side():
    first, second = make(seed=1)[0], make(seed=2)[0]
    both = Evaluation.concatenate([first, second])
    assert both.cases == first.cases + second.cases
    expected = torch.cat([dice(first.overlap), dice(second.overlap)])
    torch.testing.assert_close(dice(both.overlap), expected)


def test_concatenation_keeps_what_is_known_of_all_parts():
    one, other = make(seed=1)[0], make(seed=2)[0]
    failure = {"case": "bad", "kind": "FileError", "message": "cannot be read."}
    one = replace(
        one, provenance={"versions": {"segcal": "1"}, "files": {"1-0": 3}, "failures": [], "options": {"a": 1}}
    )
    other = replace(
        other,
        provenance={"versions": {"segcal": "1"}, "files": {"2-0": 4}, "failures": [failure], "options": {"a": 2}},
    )
    assert Evaluation.concatenate([one, other]).provenance == {
        "versions": {"segcal": "1"},
        "files": {"1-0": 3, "2-0": 4},
        "failures": [failure],
        "parts": [{"options": {"a": 1}}, {"options": {"a": 2}}],
    }
    assert Evaluation.concatenate([make(seed=1)[0], make(seed=2)[0]]).provenance == {"note": "ünicode"}


def test_concatenation_refuses_twice_the_same_case_and_other_classes():
    evaluation = make()[0]
    with pytest.raises(ConfigError, match="0-0"):
        Evaluation.concatenate([evaluation, evaluation])
    with pytest.raises(ConfigError, match="same classes"):
        Evaluation.concatenate([evaluation, make(classes=2, seed=3)[0]])
    with pytest.raises(ConfigError, match="same background"):
        Evaluation.concatenate([evaluation, replace(make(seed=3)[0], has_background=False)])


@pytest.mark.parametrize("damage", ["empty", "text", "cut", "foreign", "pickle"])
def test_a_file_that_is_no_evaluation_is_refused_in_a_sentence(tmp_path, damage):
    path = tmp_path / "evaluation.npz"
    make()[0].save(path)
    content = path.read_bytes()
    if damage == "foreign":
        np.savez(path, a=np.zeros(3))
    elif damage == "pickle":
        np.savez(path, header=np.array([{"format": 1}], dtype=object))
    else:
        path.write_bytes({"empty": b"", "text": b"hello", "cut": content[: len(content) // 2]}[damage])
    with pytest.raises(SegcalError, match="segcal evaluation 3"):
        Evaluation.load(path)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("overlap_true", lambda array: array * np.nan, "overlap_true must be finite numbers of at least 0"),
        ("overlap_true", lambda array: array - 1e9, "overlap_true must be finite numbers of at least 0"),
        ("overlap_true", lambda array: array.astype(complex), "overlap_true must be real numbers"),
        ("statistics", lambda array: array[::-1].copy(), "sums"),
        ("header", lambda text: np.array(re.sub(r'"fine_bins": \d+', '"fine_bins": 1e999', str(text))), "infinity"),
        ("header", lambda text: np.array(re.sub(r'"cases": \[', '"cases": [null, ', str(text))), "list of texts"),
    ],
)
def test_a_file_with_senseless_content_is_refused_in_a_sentence(tmp_path, name, change, message):
    path = tmp_path / "evaluation.npz"
    make()[0].save(path)
    with np.load(path) as archive:
        arrays = {key: archive[key] for key in archive.files}
    arrays[name] = change(arrays[name])
    np.savez(path, **arrays)
    with pytest.raises(SegcalError, match=rf"evaluation\.npz must hold the sums of an evaluation; .*{message}"):
        Evaluation.load(path)


def test_packed_sums_of_other_sizes_than_told_are_refused(tmp_path):
    path = tmp_path / "evaluation.npz"
    make()[0].save(path)
    with np.load(path) as archive:
        arrays = {key: archive[key] for key in archive.files}
    for sizes in (arrays["statistics_sizes"] + 1, arrays["statistics_sizes"][:-1], np.array(["a"])):
        np.savez(path, **arrays | {"statistics_sizes": sizes})
        with pytest.raises(SegcalError, match=r"evaluation\.npz must be a file of the format .*; packed sums must be"):
            Evaluation.load(path)


@pytest.mark.parametrize("version", [1, 2])
def test_files_of_former_formats_are_refused_with_a_remedy(tmp_path, version):
    path = tmp_path / "evaluation.npz"
    make()[0].save(path)
    with np.load(path) as archive:
        arrays = {key: archive[key] for key in archive.files}
    arrays["header"] = np.array(str(arrays["header"]).replace("segcal evaluation 3", f"segcal evaluation {version}"))
    np.savez(path, **arrays)
    message = rf"its format is 'segcal evaluation {version}'. Run `segcal evaluate` again with this version\.$"
    with pytest.raises(SegcalError, match=message):
        Evaluation.load(path)


def test_packed_sums_without_their_sizes_are_refused(tmp_path):
    path = tmp_path / "evaluation.npz"
    make()[0].save(path)
    with np.load(path) as archive:
        arrays = {key: archive[key] for key in archive.files if key != "statistics_sizes"}
    np.savez(path, **arrays)
    with pytest.raises(SegcalError, match=r"must hold the sums of an evaluation; 'statistics'\. Run"):
        Evaluation.load(path)


def test_scores_of_all_classes_are_torchs_cross_entropy_and_scikit_learns_brier_score():
    evaluation, probabilities, labels = make(cases=2)
    rows = rows_of(evaluation.foreground())
    losses = torch.nn.functional.nll_loss(probabilities.double().log(), labels, reduction="none").mean(1)
    assert rows["all", "macro", None, "nll"].value == pytest.approx(losses.mean().item())
    assert rows["all", "micro pooled", None, "nll"].value == pytest.approx(losses.mean().item())  # as many voxels
    by_case = [
        brier_score_loss(y.numpy(), p.T.numpy(), labels=[0, 1, 2]) for p, y in zip(probabilities, labels, strict=True)
    ]
    assert rows["all", "macro", None, "brier"].value == pytest.approx(np.mean(by_case))
    of_liver = [log_loss(y.numpy() == 1, p[1].numpy()) for p, y in zip(probabilities, labels, strict=True)]
    assert rows["all", "macro", "liver", "nll"].value == pytest.approx(np.mean(of_liver))


def test_predicting_more_foreground_than_there_is_does_not_better_the_likelihood():
    """The sum over each class's own voxels, without the background, fell where everything was called foreground."""
    labels = (torch.rand(1, 4000, generator=torch.Generator().manual_seed(0)) < 0.1).long()
    honest, greedy = (torch.tensor([[[1 - p], [p]]]).expand(1, 2, 4000) for p in (0.1, 0.9))
    for scores in (ScoreSums.joint_of_classes, ScoreSums.of_classes):
        assert nll(scores(honest, labels)).mean() < nll(scores(greedy, labels)).mean()
        assert brier(scores(honest, labels)).mean() < brier(scores(greedy, labels)).mean()


def test_a_class_named_as_a_mean_keeps_its_own_numbers(tmp_path):
    evaluation = replace(make()[0], classes=("background", "mean", "top label"))
    rows = {(r.scope, r.label, r.metric): r.value for r in evaluation.summary() if r[:2] == ("all", "macro")}
    plain = {(r.label, r.metric): r.value for r in make()[0].summary() if r[:2] == ("all", "macro")}
    assert rows["class", "mean", "ace"] == plain["liver", "ace"] != rows["mean", None, "ace"] == plain[None, "ace"]
    assert rows["top label", None, "top_label_ece"] == plain[None, "top_label_ece"]


@pytest.mark.parametrize("classes", [("background", "x", "x"), ("background", "", "x")])
def test_classes_of_one_name_or_none_are_refused(classes):
    with pytest.raises(ConfigError, match=r"class names must (differ|not be empty)"):
        replace(make()[0], classes=classes)


def test_complete_cases_of_regions_are_those_with_every_trained_label():
    evaluation = replace(make()[0], label_counts=torch.tensor([[5.0, 1.0, 9.0], [5.0, 0.0, 9.0], [1.0, 1.0, 1.0]]))
    assert evaluation.complete().cases == ("0-0", "0-2")  # every region is in all three
    none = replace(make(seed=4)[0], label_counts=torch.zeros(3, 3))
    assert Evaluation.concatenate([evaluation, none]).complete().cases == ("0-0", "0-2")


def test_label_counts_and_joint_scores_survive_saving(tmp_path):
    evaluation = replace(make()[0], label_counts=torch.tensor([[5.0], [0.0], [2.0]], dtype=torch.float64))
    evaluation.save(tmp_path / "a.npz")
    loaded = Evaluation.load(tmp_path / "a.npz")
    assert torch.equal(loaded.label_counts, evaluation.label_counts)
    assert torch.equal(loaded.joint_scores()["nll"], evaluation.joint_scores()["nll"])
