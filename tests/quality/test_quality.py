"""quality fit and quality apply: real files, the promises they make, and what they refuse."""

from __future__ import annotations

import csv
import json
import shutil

import nibabel
import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import segcal
from segcal.cli import app
from segcal.errors import ConfigError, FileError
from segcal.evaluation.evaluation import Evaluation
from segcal.quality.applying import apply_quality
from segcal.quality.fitting import fit_quality, load_quality
from segcal.quality.queue import EMPTY, FRAGMENTED, TINY, UNLIKE, make_queue
from segcal.quality.summaries import summaries_of

SHAPE = (16, 16, 12)


def make_case(seed: int, *, doubt: float | None = None, radius: float | None = None):
    """A ball whose border is blurred more or less; its true border lies where one draw puts it."""
    draw = np.random.default_rng(seed)
    width = draw.uniform(0.5, 2.5) if doubt is None else doubt
    size = draw.uniform(3.5, 5.5) if radius is None else radius
    grid = np.stack(np.meshgrid(*map(np.arange, SHAPE), indexing="ij"))
    distance = np.sqrt(((grid - np.array(SHAPE).reshape(3, 1, 1, 1) / 2) ** 2).sum(0)) - size
    foreground = 1 / (1 + np.exp(distance / (width / 2)))
    truth = distance + draw.logistic(scale=width / 2) < 0
    return np.stack([1 - foreground, foreground]).astype(np.float32), truth.astype(np.uint8)


def write_case(folder, name: str, probabilities, labels=None, spacing=(1.0, 1.0, 2.0)) -> None:
    affine = np.diag([*spacing, 1.0])
    (folder / "maps").mkdir(parents=True, exist_ok=True)
    nibabel.save(nibabel.Nifti1Image(np.moveaxis(probabilities, 0, 3), affine), folder / "maps" / f"{name}.nii.gz")
    if labels is not None:
        (folder / "labels").mkdir(exist_ok=True)
        nibabel.save(nibabel.Nifti1Image(labels, affine), folder / "labels" / f"{name}.nii.gz")


@pytest.fixture(scope="module")
def cohort(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cohort")
    for seed in range(40):
        write_case(folder, f"case_{seed:02}", *make_case(seed))
    segcal.evaluate(
        folder / "maps",
        folder / "labels",
        folder / "results",
        options=segcal.ReadOptions(class_names="background,ball"),
    )
    return folder


@pytest.fixture
def quality(cohort):
    return fit_quality(cohort / "results")


def queue_of(quality, folder, tmp_path, **options):
    return apply_quality(quality, folder / "maps", tmp_path / "queue", **options)


def test_a_file_keeps_what_was_learned(cohort, tmp_path):
    made = fit_quality(cohort / "results", tmp_path / "quality.json", risk="fnr")
    read = load_quality(tmp_path / "quality.json")
    assert (read.classes, read.level, read.options, read.guarantee) == (
        made.classes, made.level, made.options, made.guarantee,
    )  # fmt: skip
    evaluation = Evaluation.load(cohort / "results" / "evaluation.npz").foreground()
    assert make_queue(read, evaluation).rows == make_queue(made, evaluation).rows
    text = (tmp_path / "quality.json").read_text()
    assert "case_00" not in text  # names of labeled cases stay where they are


def test_unlabelled_cases_give_the_sums_of_labeled_ones(cohort, quality, tmp_path):
    """The queue of maps equals the one of the evaluation, which read the same maps beside their labels."""
    queue = queue_of(quality, cohort, tmp_path)
    evaluation = Evaluation.load(cohort / "results" / "evaluation.npz").foreground()
    for ours, theirs in zip(queue.rows, make_queue(quality, evaluation).rows, strict=True):
        assert ours[:3] == theirs[:3]
        assert ours[3:13] == pytest.approx(theirs[3:13], rel=1e-9)


def test_volumes_are_those_of_the_header(cohort, quality, tmp_path):
    row = next(row for row in queue_of(quality, cohort, tmp_path).rows if row.case == "case_03")
    image = nibabel.load(cohort / "maps" / "case_03.nii.gz").get_fdata()
    decided = (image[..., 1] > image[..., 0]).sum()
    assert row.voxels == decided
    assert row.volume_ml == pytest.approx(decided * 0.002)
    assert row.expected_volume_ml == pytest.approx(image[..., 1].sum() * 0.002, rel=1e-6)
    assert row.uncertain_volume_ml == pytest.approx(((image[..., 1] >= 0.1) & (image[..., 1] < 0.9)).sum() * 0.002)
    assert row.volume_low_ml <= row.volume_high_ml


def test_new_patients_lie_within_their_intervals():
    """Over 30 divisions of 120 cases into known and new ones about 90 % lie inside, for Dice and for volume."""
    accumulator = segcal.EvaluationAccumulator()
    for seed in range(120):
        probabilities, labels = make_case(seed)
        accumulator.update(torch.from_numpy(probabilities)[None], torch.from_numpy(labels)[None], [f"{seed:03}"])
    whole, draw = accumulator.compute(), np.random.default_rng(0)
    dice, volume = [], []
    for _ in range(30):
        order = draw.permutation(120)
        quality, new = fit_quality(whole.select(cases=order[:60])), whole.select(cases=order[60:]).foreground()
        promises = quality.promise(summaries_of(new))
        truth, sizes = segcal.dice(new.overlap).numpy(), new.overlap.true.numpy()
        known = ~np.isnan(truth)
        dice += ((promises.dice[..., 1] <= truth) & (truth <= promises.dice[..., 2]))[known].tolist()
        volume += ((promises.volume[..., 1] <= sizes) & (sizes <= promises.volume[..., 2])).ravel().tolist()
    assert 0.87 <= np.mean(dice) <= 0.94
    assert 0.87 <= np.mean(volume) <= 0.94


def test_doubtful_cases_come_first(cohort, quality, tmp_path):
    for name, doubt in (("clear", 0.5), ("middle", 1.5), ("doubtful", 2.5)):
        write_case(tmp_path, name, make_case(7, doubt=doubt, radius=4.5)[0])
    assert [row.case for row in queue_of(quality, tmp_path, tmp_path).rows] == ["doubtful", "middle", "clear"]


def test_flags_say_what_is_odd(quality, tmp_path):
    usual = make_case(3)[0]
    empty = np.stack([np.full(SHAPE, 0.999), np.full(SHAPE, 0.001)]).astype(np.float32)
    tiny = empty.copy()
    tiny[:, 8:10, 8:10, 6] = [[[0.05]], [[0.95]]]
    broken = usual.copy()
    broken[:, 8, :, :], broken[:, :, 8, :] = [[[0.99]], [[0.01]]], [[[0.99]], [[0.01]]]
    for name, map_ in (("usual", usual), ("empty", empty), ("tiny", tiny), ("broken", broken)):
        write_case(tmp_path, name, map_)
    flags = {row.case: row.flags for row in queue_of(quality, tmp_path, tmp_path).rows}
    assert flags["usual"] == ""
    assert EMPTY in flags["empty"]
    assert TINY not in flags["empty"]
    assert TINY in flags["tiny"]
    assert UNLIKE in flags["tiny"]
    assert FRAGMENTED in flags["broken"]


def test_a_shifted_cohort_is_said_to_be_outside_of_the_guarantee(quality, tmp_path):
    for seed in range(20):
        write_case(tmp_path, f"case_{seed}", make_case(seed, doubt=6.0)[0])
    queue = queue_of(quality, tmp_path, tmp_path)
    assert queue.shifted
    told = json.loads((tmp_path / "queue" / "queue.json").read_text())
    assert told["guaranteed"] is False
    assert "no interval and no threshold is guaranteed" in (tmp_path / "queue" / "queue.html").read_text()


def test_files_of_the_queue_hold_the_same_numbers(cohort, quality, tmp_path):
    queue = queue_of(quality, cohort, tmp_path, statistics=True)
    with (tmp_path / "queue" / "queue.csv").open() as file:
        rows = list(csv.DictReader(file))
    wanted = {"case", "class", "expected_dice", "dice_low", "dice_high", "volume_ml", "volume_low_ml", "volume_high_ml",
              "uncertain_volume_ml", "flags", "rank"}  # fmt: skip
    assert wanted <= set(rows[0])
    assert [float(row["predicted_dice"]) for row in rows] == [row.predicted_dice for row in queue.rows]
    told = json.loads((tmp_path / "queue" / "queue.json").read_text())
    assert [row["dice_low"] for row in told["queue"]] == [row.dice_low for row in queue.rows]
    assert told["guaranteed"] is True
    assert told["cohort"][0]["class"] is None
    of_case = json.loads((tmp_path / "queue" / "statistics" / "case_05.json").read_text())
    row = next(row for row in queue.rows if row.case == "case_05")
    assert of_case["ball"]["volume"] == pytest.approx(row.volume_ml * 1000)


def test_the_mean_of_the_cohort_lies_in_its_interval(cohort, quality, tmp_path):
    truth = []
    for seed in range(2000, 2040):
        probabilities, labels = make_case(seed)
        write_case(tmp_path, f"new_{seed}", probabilities)
        if labels.any():
            decided = probabilities[1] > 0.5
            truth.append(2 * (decided & (labels > 0)).sum() / (decided.sum() + labels.sum()))
    whole = queue_of(quality, tmp_path, tmp_path).cohort[0]
    assert whole.low <= np.mean(truth) <= whole.high
    assert whole.high - whole.low < 0.2


def test_a_bad_case_does_not_stop_the_others_and_work_is_resumed(cohort, quality, tmp_path):
    shutil.copytree(cohort / "maps", tmp_path / "maps")
    (tmp_path / "maps" / "broken.nii.gz").write_bytes(b"nothing")
    first = queue_of(quality, tmp_path, tmp_path)
    assert [failure.case for failure in first.failures] == ["broken"]
    seen = []
    again = queue_of(quality, tmp_path, tmp_path, progress=lambda done, total: seen.append((done, total)))
    assert seen == [(41, 41)]  # only the broken one was tried again
    assert again.rows == first.rows


def test_workers_find_the_same(cohort, quality, tmp_path):
    one = apply_quality(quality, cohort / "maps", tmp_path / "one")
    two = apply_quality(quality, cohort / "maps", tmp_path / "two", workers=2)
    assert one.rows == two.rows
    assert (tmp_path / "one" / "queue.html").read_bytes() == (tmp_path / "two" / "queue.html").read_bytes()


def test_the_calibrator_must_be_the_one_that_was_learned_with(cohort, tmp_path):
    from segcal.calibrators import Temperature

    Temperature(1.3).save(tmp_path / "warm.json")
    Temperature(2.0).save(tmp_path / "hot.json")
    segcal.evaluate(cohort / "maps", cohort / "labels", tmp_path / "warm", calibrator=tmp_path / "warm.json")
    learned = fit_quality(tmp_path / "warm")
    row = apply_quality(learned, cohort / "maps", tmp_path / "queue").rows[0]  # the file in its place
    evaluation = Evaluation.load(tmp_path / "warm" / "evaluation.npz").foreground()
    assert row[3:13] == pytest.approx(make_queue(learned, evaluation).rows[0][3:13], rel=1e-6)
    with pytest.raises(ConfigError, match=r"hot\.json is another one"):
        apply_quality(learned, cohort / "maps", tmp_path / "other", calibrator=tmp_path / "hot.json")
    with pytest.raises(ConfigError, match="learned without a calibrator"):
        apply_quality(
            fit_quality(cohort / "results"), cohort / "maps", tmp_path / "o", calibrator=tmp_path / "hot.json"
        )
    (tmp_path / "warm.json").rename(tmp_path / "moved.json")
    with pytest.raises(ConfigError, match="Give its place with --calibrator"):
        apply_quality(learned, cohort / "maps", tmp_path / "other")
    apply_quality(learned, cohort / "maps", tmp_path / "other", calibrator=tmp_path / "moved.json")


def test_regions_and_overlapping_classes_are_read_as_they_were(tmp_path):
    for seed in range(12):
        probabilities, labels = make_case(seed)
        inner = (probabilities[1] * 0.5)[None]
        write_case(tmp_path, f"case_{seed}", np.concatenate([probabilities[1:], inner]).astype(np.float32), labels)
    options = segcal.ReadOptions(sigmoid=True, class_names="whole,core")
    segcal.evaluate(tmp_path / "maps", tmp_path / "labels", tmp_path / "results", options=options)
    queue = queue_of(fit_quality(tmp_path / "results"), tmp_path, tmp_path)
    assert {row.class_name for row in queue.rows} == {"whole", "core"}


def test_a_class_that_few_patients_have_has_no_interval(tmp_path):
    for seed in range(12):
        probabilities, labels = make_case(seed)
        write_case(tmp_path, f"case_{seed}", probabilities, labels * (seed < 5))
    segcal.evaluate(tmp_path / "maps", tmp_path / "labels", tmp_path / "results")
    row = queue_of(fit_quality(tmp_path / "results"), tmp_path, tmp_path).rows[0]
    assert np.isnan([row.predicted_dice, row.dice_low, row.dice_high]).all()
    assert not np.isnan(row.volume_low_ml)  # absent is a volume of 0
    assert "nan" not in (tmp_path / "queue" / "queue.csv").read_text().lower()


@pytest.mark.parametrize(
    ("content", "told"),
    [("{", "it cannot be read"), ("{}", "'format'"), ('{"format": "other", "summaries": []}', "its format is 'other'")],
)
def test_what_is_no_quality_file_is_refused(tmp_path, content, told):
    (tmp_path / "quality.json").write_text(content)
    with pytest.raises(FileError, match=told):
        load_quality(tmp_path / "quality.json")


def test_too_few_patients_and_wrong_levels_are_refused(cohort, tmp_path):
    evaluation = Evaluation.load(cohort / "results" / "evaluation.npz")
    with pytest.raises(ConfigError, match="need at least 9 patients; got 5"):
        fit_quality(evaluation.select(cases=range(5)))
    with pytest.raises(ConfigError, match="need at least 99 patients; got 40"):
        fit_quality(evaluation, level=0.99)
    with pytest.raises(ConfigError, match=r"at least 0\.5 and below 1"):
        fit_quality(evaluation, level=1.5)
    with pytest.raises(FileError, match="does not exist"):
        fit_quality(tmp_path)


def test_an_evaluation_without_sums_of_decisions_is_refused(cohort):
    from dataclasses import replace

    evaluation = replace(Evaluation.load(cohort / "results" / "evaluation.npz"), decisions=None)
    with pytest.raises(ConfigError, match="Run `segcal evaluate` again"):
        fit_quality(evaluation)


def test_other_classes_are_refused(cohort, tmp_path):
    for seed in range(2):
        probabilities, _ = make_case(seed)
        three = np.concatenate([probabilities * 0.9, np.full((1, *SHAPE), 0.1)]).astype(np.float32)
        write_case(tmp_path, f"case_{seed}", three)
    with pytest.raises((ConfigError, segcal.SegcalError)) as refused:
        queue_of(fit_quality(cohort / "results"), tmp_path, tmp_path)
    assert "class" in str(refused.value)


def test_the_commands_do_it_all(cohort, tmp_path):
    run = CliRunner()
    fitted = run.invoke(
        app, ["quality", "fit", str(cohort / "results"), "--out", str(tmp_path / "q.json"), "--risk", "fnr=0.2"]
    )
    assert fitted.exit_code == 0, fitted.output
    assert "coverage" in fitted.output
    assert "false-negative rate at most 0.2" in fitted.output
    applied = run.invoke(
        app, ["quality", "apply", str(tmp_path / "q.json"), str(cohort / "maps"), "--out", str(tmp_path / "queue")]
    )
    assert applied.exit_code == 0, applied.output
    assert "40 cases, the first 10 to review" in applied.output
    wrong = run.invoke(
        app, ["quality", "fit", str(cohort / "results"), "--out", str(tmp_path / "q.json"), "--risk", "fnr"]
    )
    assert wrong.exit_code == 2
    assert "as fnr=0.1" in wrong.output
