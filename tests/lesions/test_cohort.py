"""`segcal lesions` on folders: every reading option, resumed, in workers, and what cannot be meant."""

import csv
import json

import nibabel
import numpy as np
import pytest
from cohorts import save
from typer.testing import CliRunner

from segcal import ConfigError, FileError, ReadOptions, evaluate_lesions
from segcal.cli import app
from segcal.lesions import cohort
from segcal.lesions.components import Rules
from segcal.lesions.results import read_lesions

AFFINE = np.array([[-2.0, 0, 0, 10], [0, 0, 1.5, 20], [0, 1.0, 0, -5], [0, 0, 0, 1]])  # flipped and turned


def make(folder, cases=6, affine=AFFINE):
    """In each case two true lesions; the first is found, and there is a false one in every second case."""
    for i in range(cases):
        p, labels = np.zeros((14, 12, 10), np.float32), np.zeros((14, 12, 10), np.uint8)
        labels[1:4, 1:4, 1:3] = 1
        labels[8:10, 8, 8] = 1
        p[2:5, 1:4, 1:3] = 0.8 + 0.01 * i
        if i % 2:
            p[10:13, 2, 2] = 0.6
        save(folder / "P" / f"case_{i}.nii.gz", np.stack([1 - p, p], -1), affine)
        save(folder / "L" / f"case_{i}.nii.gz", labels, affine)
    return folder


def run(folder, *options, out="out"):
    arguments = ["lesions", str(folder / "P"), str(folder / "L"), "--out", str(folder / out), *options]
    return CliRunner().invoke(app, arguments)


def rows(folder, out="out"):
    with (folder / out / "lesions.csv").open() as file:
        return list(csv.DictReader(file))


def test_every_lesion_is_listed_and_the_numbers_are_right(tmp_path):
    done = run(make(tmp_path), "--figures", "png")
    assert done.exit_code == 0, done.output
    found = [row for row in rows(tmp_path) if row["case"] == "case_1"]
    assert [(row["kind"], row["voxels"], row["matched"]) for row in found] == [
        ("predicted", "18", "True"), ("predicted", "3", "False"), ("true", "18", "True"), ("true", "2", "False"),
    ]  # fmt: skip
    assert float(found[0]["volume_mm3"]) == pytest.approx(18 * 3.0)
    assert [float(found[0][axis]) for axis in "xyz"] == [3, 2, 1.5]
    assert [float(found[0][f"{axis}_mm"]) for axis in "xyz"] == pytest.approx([10 - 2 * 3, 20 + 1.5 * 1.5, -5 + 2])
    assert (found[0]["confidence"], found[3]["confidence"]) == (found[2]["confidence"], "")
    summary = read_lesions(tmp_path / "out")
    assert summary.find("class 1", "sensitivity").value == 0.5
    assert summary.find("class 1", "precision").value == pytest.approx(6 / 9)
    assert summary.find("class 1", "false_positives_per_case").value == 0.5
    assert summary.find("class 1", "sensitivity_at_1/8").value == 0.5
    rate = summary.find("class 1", "false_positives_per_case")
    assert 0 <= rate.low < 0.5 < rate.high <= 1
    assert (tmp_path / "out" / "froc.png").stat().st_size > 5000
    assert (tmp_path / "out" / "lesion-reliability.png").exists()


def test_it_goes_on_where_it_was_stopped_and_workers_change_nothing(tmp_path, monkeypatch):
    make(tmp_path, cases=4)
    whole = evaluate_lesions(tmp_path / "P", tmp_path / "L", tmp_path / "one", resamples=20)
    looked, find = [], cohort.find_lesions

    def find_and_stop(files, *arguments):
        looked.append(files.name)
        if len(looked) == 3:
            raise KeyboardInterrupt
        return find(files, *arguments)

    monkeypatch.setattr(cohort, "find_lesions", find_and_stop)
    with pytest.raises(KeyboardInterrupt):
        evaluate_lesions(tmp_path / "P", tmp_path / "L", tmp_path / "two", resamples=20)
    again = evaluate_lesions(tmp_path / "P", tmp_path / "L", tmp_path / "two", resamples=20)
    assert looked == ["case_0", "case_1", "case_2", "case_2", "case_3"]
    assert again.lesions == whole.lesions
    assert (tmp_path / "one" / "summary.csv").read_bytes() == (tmp_path / "two" / "summary.csv").read_bytes()
    evaluate_lesions(tmp_path / "P", tmp_path / "L", tmp_path / "two", resamples=20)
    assert len(looked) == 5
    evaluate_lesions(tmp_path / "P", tmp_path / "L", tmp_path / "two", rules=Rules(threshold=0.7), resamples=20)
    assert len(looked) == 9  # other rules, other lesions
    monkeypatch.undo()
    spread = evaluate_lesions(tmp_path / "P", tmp_path / "L", tmp_path / "three", resamples=20, workers=2)
    assert spread.lesions == whole.lesions


def test_logits_regions_ignored_labels_and_stored_order_are_read_as_evaluate_does(tmp_path):
    make(tmp_path, cases=2)
    expected = evaluate_lesions(tmp_path / "P", tmp_path / "L", tmp_path / "out").lesions
    for path in sorted((tmp_path / "P").iterdir()):
        image = nibabel.load(path)
        values = np.asarray(image.dataobj)
        (tmp_path / "logits").mkdir(exist_ok=True)
        save(tmp_path / "logits" / path.name, np.log(values.clip(1e-6)), AFFINE)
        save(tmp_path / "single" / path.name, values[..., 1], AFFINE)
        (tmp_path / "arrays").mkdir(exist_ok=True)
        np.save(tmp_path / "arrays" / path.name.replace(".nii.gz", ".npy"), np.moveaxis(values, -1, 0))

    def same(found):
        assert [row[:4] for row in found] == [row[:4] for row in expected]
        assert [row[6:11] for row in found] == [row[6:11] for row in expected]
        assert [row.confidence or 0 for row in found] == pytest.approx(
            [row.confidence or 0 for row in expected], abs=1e-5
        )

    same(
        evaluate_lesions(tmp_path / "logits", tmp_path / "L", tmp_path / "a", options=ReadOptions(logits=True)).lesions
    )
    same(evaluate_lesions(tmp_path / "single", tmp_path / "L", tmp_path / "b").lesions)
    same(evaluate_lesions(tmp_path / "arrays", tmp_path / "L", tmp_path / "c").lesions)
    for path in sorted((tmp_path / "L").iterdir()):
        labels = np.asarray(nibabel.load(path).dataobj).copy()
        labels[5:] = 255
        save(tmp_path / "ignored" / path.name, labels, AFFINE)
    options = ReadOptions(ignore_index=255)
    left = evaluate_lesions(tmp_path / "P", tmp_path / "ignored", tmp_path / "d", options=options).lesions
    assert [(row.kind, row.matched) for row in left] == [("predicted", True), ("true", True)] * 2


def test_a_case_that_fails_does_not_stop_the_others(tmp_path):
    make(tmp_path, cases=3)
    save(tmp_path / "P" / "case_1.nii.gz", np.full((14, 12, 10, 2), 0.8, np.float32), AFFINE)
    done = run(tmp_path)
    assert done.exit_code == 1
    assert "case_1: RangeError: the probabilities of a voxel must sum to 1" in done.output
    assert json.loads((tmp_path / "out" / "summary.json").read_text())["cases"] == 2
    assert "No intervals: there are 2 patients" in done.output


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--class", "liver"], "--class must be one of class 1; got 'liver'."),
        (["--connectivity", "4"], "connectivity must be one of 6, 18, 26"),
        (["--min-size", "big"], "min_size must be a number of voxels"),
    ],
)
def test_options_that_mean_nothing_are_refused_before_work(tmp_path, options, said):
    done = run(make(tmp_path, cases=1), *options)
    assert done.exit_code == 2
    assert said in done.output
    assert not (tmp_path / "out" / "lesions.csv").exists()


def test_out_must_lie_elsewhere_and_a_summary_must_be_one(tmp_path):
    make(tmp_path, cases=1)
    with pytest.raises(ConfigError, match="--out must lie outside"):
        evaluate_lesions(tmp_path / "P", tmp_path / "L", tmp_path / "P" / "out")
    with pytest.raises(FileError, match="must be a folder that `segcal lesions` wrote"):
        read_lesions(tmp_path)
    (tmp_path / "summary.json").write_text('{"format": "other"}')
    with pytest.raises(FileError, match="its format is 'other'"):
        read_lesions(tmp_path)
