"""The mean of several folders of maps against numpy: read slab by slab, whatever the files are and where they lie."""

from __future__ import annotations

import shutil
import tracemalloc
from pathlib import Path

import nibabel
import numpy as np
import pytest
from cohorts import SHAPE, STRAIGHT, make_case, save
from scipy.special import expit, log_softmax, logit, softmax
from typer.testing import CliRunner

import segcal
from segcal.calibration.applying import apply_calibrator
from segcal.calibration.fitting import fit_calibrator
from segcal.calibrators import Temperature, VectorScaling
from segcal.cli import app
from segcal.errors import ConfigError, FileError, GridError, RangeError, ShapeError
from segcal.evaluation.options import ReadOptions
from segcal.volumes import CaseFiles, open_case, pair_cases
from segcal.volumes.averaging import Averaging

TURNED = STRAIGHT @ np.array([[-1, 0, 0, SHAPE[0] - 1], [0, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1.0]])  # x runs back


def maps_of(case: int, member: int):
    """Probabilities (x, y, z, class) of one member, and the labels that all share."""
    labels = make_case(case)[1]
    return np.roll(make_case(100 * member + case)[0], member, -1).copy(), labels


def write(folder: Path, *, cases: int = 3, kinds=("P", "Q", "R"), logits: bool = False) -> Path:
    """P as .nii.gz, Q as nnU-Net's .npz, R as .nii with x running the other way; labels L."""
    for i in range(cases):
        for member, kind in enumerate(kinds):
            values, labels = maps_of(i, member)
            values = np.log(values) * 1.5 + i if logits else values
            if kind == "Q":
                (folder / "Q").mkdir(exist_ok=True)
                np.savez_compressed(folder / "Q" / f"case_{i}.npz", probabilities=values.transpose(3, 2, 1, 0))
                save(folder / "Q" / f"case_{i}.nii.gz", labels)  # the decision that nnU-Net puts beside it
            elif kind == "R":
                save(folder / "R" / f"case_{i}.nii", values[::-1].copy(), TURNED)
            else:
                save(folder / kind / f"case_{i}.nii.gz", values)
        save(folder / "L" / f"case_{i}.nii.gz", labels)
    return folder


def mean_of(case: int, members=(0, 1, 2)):
    return sum(maps_of(case, member)[0].astype(np.float64) for member in members) / len(members)


def read(files: CaseFiles, most_voxels: int = 10**9):
    """Values (x, y, z, class) on the label's grid, put together from slabs in any order."""
    with open_case(files) as case:
        values, _ = case.voxels((slice(None),) * 3)
        slabs = [slab for slab, _ in case.slabs(most_voxels)]
        order = case.stored_shape
    assert sum(slab.shape[1] for slab in slabs) == np.prod(order)
    together = np.concatenate(slabs, 1)
    np.testing.assert_allclose(np.sort(together, 1), np.sort(values, 1), atol=1e-6)
    return np.moveaxis(values.reshape(-1, *SHAPE), 0, -1)


def paired(folder: Path, members: str, **averaging):
    others = {folder / name: pair_cases(folder / name, folder / "L") for name in members[1:]}
    return pair_cases(folder / members[0], folder / "L").averaged(others, Averaging(**averaging)).cases


@pytest.mark.parametrize("members", ["PQR", "RQP", "QR", "RP"])
@pytest.mark.parametrize("most_voxels", [50, 10**9])
def test_the_mean_of_files_of_any_kind(tmp_path, members, most_voxels):
    write(tmp_path, cases=1)
    (files,) = paired(tmp_path, members)
    expected = mean_of(0, ["PQR".index(name) for name in members])
    np.testing.assert_allclose(read(files, most_voxels), expected, atol=1e-6)


@pytest.mark.parametrize("sigmoid", [False, True])
@pytest.mark.parametrize("mean", ["probabilities", "logits"])
@pytest.mark.parametrize("logits", [False, True])
def test_what_the_mean_is_of(tmp_path, mean, logits, sigmoid):
    write(tmp_path, cases=1, logits=logits)
    (files,) = paired(tmp_path, "PQR", mean=mean, logits=logits, sigmoid=sigmoid)
    maps = [np.float64(maps_of(0, member)[0]) for member in range(3)]
    maps = [np.log(values) * 1.5 for values in maps] if logits else maps
    soften = expit if sigmoid else lambda values: softmax(values, -1)
    if mean == "probabilities":
        expected = sum(map(soften, maps)) / 3 if logits else sum(maps) / 3
    else:
        expected = sum(maps) / 3 if logits else soften(sum((logit if sigmoid else np.log)(each) for each in maps) / 3)
    np.testing.assert_allclose(read(files), expected, atol=2e-6)
    assert files.averaging.yields_logits == (logits and mean == "logits")


def test_an_evaluation_is_that_of_the_mean(tmp_path):
    write(tmp_path)
    for i in range(3):
        save(tmp_path / "M" / f"case_{i}.nii.gz", mean_of(i).astype(np.float32))
    expected = segcal.evaluate(tmp_path / "M", tmp_path / "L", tmp_path / "expected").evaluation
    done = run_cli(tmp_path, "--member", tmp_path / "Q", "--member", tmp_path / "R")
    assert done.exit_code == 0, done.output
    found = segcal.Evaluation.load(tmp_path / "out" / "evaluation.npz")
    for name, values in expected.case_metrics().items():
        np.testing.assert_allclose(found.case_metrics()[name], values, atol=1e-5)
    told = found.provenance["mean"]
    assert told["of"] == "probabilities"
    assert told["members"] == [str(tmp_path / name) for name in "PQR"]
    assert found.provenance["folders"] == {"predictions": str(tmp_path / "P"), "labels": str(tmp_path / "L")}


def run_cli(folder: Path, *more, verb: str = "evaluate"):
    arguments = [verb, folder / "P", folder / "L", "--out", folder / "out", *more]
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_workers_and_executors_take_members_along(tmp_path, monkeypatch):
    write(tmp_path, cases=2)
    monkeypatch.chdir(tmp_path)

    def elsewhere(function, jobs):
        monkeypatch.chdir(tmp_path / "P")  # another current folder
        for i, arguments in enumerate(jobs):
            yield i, function(*arguments)

    here = segcal.evaluate("P", "L", "here", members=["Q", "R"])
    there = segcal.evaluate("P", "L", tmp_path / "there", members=["Q", "R"], executor=elsewhere)
    assert there.failures == here.failures == []
    assert there.evaluation.case_metrics().keys() == here.evaluation.case_metrics().keys()


def test_what_the_mean_depends_on_is_measured_again(tmp_path, monkeypatch):
    write(tmp_path, logits=True)
    from segcal.evaluation import cohort

    seen = []
    own = cohort.measure_case

    def counted(files, *arguments, **options):
        seen.append(files.name)
        return own(files, *arguments, **options)

    monkeypatch.setattr(cohort, "measure_case", counted)

    def measured(members="QR", mean="probabilities") -> int:
        seen.clear()
        folders = [tmp_path / name for name in members]
        segcal.evaluate(
            tmp_path / "P", tmp_path / "L", tmp_path / "out", members=folders, mean=mean,
            options=ReadOptions(logits=True),
        )  # fmt: skip
        return len(seen)

    assert measured() == 3
    assert measured() == 0
    assert measured(mean="logits") == 3
    assert measured("R", mean="logits") == 3
    values, _ = maps_of(1, 0)
    save(tmp_path / "R" / "case_1.nii", (2 * np.log(values))[::-1].copy(), TURNED)
    assert measured("R", mean="logits") == 1


def test_a_case_that_a_member_lacks_fails_and_stops_no_other(tmp_path):
    write(tmp_path)
    (tmp_path / "R" / "case_1.nii").unlink()
    outcome = segcal.evaluate(tmp_path / "P", tmp_path / "L", tmp_path / "out", members=[tmp_path / "R"])
    assert outcome.evaluation.cases == ("case_0", "case_2")
    (failure,) = outcome.failures
    assert failure.case == "case_1"
    assert f"every member must have a prediction of the case; {tmp_path / 'R'} has none." in failure.message
    applied = apply_calibrator(Temperature(2.0), tmp_path / "P", tmp_path / "new", members=[tmp_path / "R"])
    assert [(each.case, each.kind) for each in applied.failures] == [("case_1", "FileError")]
    assert f"{tmp_path / 'R'} has none" in applied.failures[0].message
    assert len(applied.paths) == 2


def test_members_that_disagree_are_refused(tmp_path):
    write(tmp_path, cases=1)
    values, _ = maps_of(0, 1)

    def open_with(array, affine=STRAIGHT):
        shutil.rmtree(tmp_path / "S", ignore_errors=True)
        save(tmp_path / "S" / "case_0.nii.gz", array, affine)
        with open_case(paired(tmp_path, "PS")[0]) as case:
            return case.voxels((slice(None),) * 3)

    open_with(values)
    with pytest.raises(GridError, match=rf"case_0, {tmp_path / 'S'}: labels are 9"):
        open_with(values[:-1])
    with pytest.raises(GridError, match="origins are"):
        open_with(values, STRAIGHT + np.array([[0, 0, 0, 5.0], *[[0] * 4] * 3]))
    with pytest.raises(ShapeError, match=rf"same classes; {tmp_path / 'P'} has 3 channels and {tmp_path / 'S'} 2"):
        open_with(values[..., :2])
    with pytest.raises(RangeError, match=r"probabilities must lie in \[0, 1\]; one is 1\.5"):
        open_with(np.where(values == values.max(), np.float32(1.5), values))
    (tmp_path / "S" / "case_0.nii.gz").write_bytes(b"nothing")
    with pytest.raises(FileError, match=rf"case_0: {tmp_path / 'S'}: case_0\.nii\.gz must be"):
        open_case(paired(tmp_path, "PS")[0])
    calibrated = apply_calibrator(Temperature(2.0), tmp_path / "P", tmp_path / "new", members=[tmp_path / "S"])
    assert calibrated.failures[0].kind == "FileError"


@pytest.mark.parametrize("first", ["P", "Q"])
def test_maps_are_not_averaged_across_grids_and_classes(tmp_path, first):
    """Without labels, the first member says where voxels lie: by itself, or by the label map beside it."""
    write(tmp_path, cases=1)
    values, _ = maps_of(0, 1)
    moved = STRAIGHT + np.array([[0, 0, 0, 5.0], *[[0] * 4] * 3])
    wrong = {"cut": (values[:-1], STRAIGHT), "moved": (values, moved), "fewer": (values[..., :2], STRAIGHT)}
    kinds = {"cut": "GridError", "moved": "GridError", "fewer": "ShapeError"}
    for name, (array, affine) in wrong.items():
        save(tmp_path / name / "case_0.nii.gz", array, affine)
        applied = apply_calibrator(Temperature(2.0), tmp_path / first, tmp_path / "new", members=[tmp_path / name])
        (failure,) = applied.failures
        assert failure.kind == kinds[name]
        assert f"case_0, {tmp_path / name}: members must " in failure.message


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--member", "P"], "members must differ from each other and from the predictions"),
        (["--member", "Q", "--member", "Q"], "came twice"),
        (["--mean", "logits"], "--mean must come with --member"),
        (["--member", "empty"], "predictions and labels must be files of the formats"),
        (["--member", "named"], "members must have the same classes, label values and regions"),
    ],
)
def test_options_that_contradict_each_other(tmp_path, monkeypatch, more, message):
    write(tmp_path, cases=1, kinds="PQ")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    shutil.copytree(tmp_path / "P", tmp_path / "named")
    for folder, names in (("P", '["a", "b", "c"]'), ("named", '["a", "c", "b"]')):
        text = f'{{"format": "segcal classes 1", "classes": {names}, "values": [0, 1, 2], "regions": null}}'
        (tmp_path / folder / "segcal-classes.json").write_text(text)
    done = run_cli(tmp_path, *more)
    assert done.exit_code == 2
    assert message in done.stderr


@pytest.mark.parametrize("mean", ["probabilities", "logits"])
def test_a_calibrator_is_fitted_to_the_mean_and_applied_to_it(tmp_path, mean):
    """As to maps of the mean, made by numpy."""
    write(tmp_path, logits=True)
    for i in range(3):
        maps = [np.log(np.float64(maps_of(i, member)[0])) * 1.5 + i for member in range(3)]
        made = sum(maps) / 3 if mean == "logits" else sum(softmax(each, -1) for each in maps) / 3
        save(tmp_path / "M" / f"case_{i}.nii.gz", made.astype(np.float32))
    others = [tmp_path / "Q", tmp_path / "R"]
    logits, plain = ReadOptions(logits=True), ReadOptions(logits=mean == "logits")
    made = fit_calibrator(
        tmp_path / "P", tmp_path / "L", tmp_path / "made.json", members=others, mean=mean, method="temperature",
        options=logits, folds=0,
    ).calibrator  # fmt: skip
    expected = fit_calibrator(
        tmp_path / "M", tmp_path / "L", tmp_path / "expected.json", method="temperature", options=plain, folds=0
    ).calibrator
    assert made.temperature == pytest.approx(expected.temperature, rel=1e-4)
    assert made.inputs == expected.inputs == ("logits" if mean == "logits" else "probabilities")
    apply_calibrator(made, tmp_path / "P", tmp_path / "new", members=others, mean=mean, options=logits)
    apply_calibrator(made, tmp_path / "M", tmp_path / "same", options=plain)
    for i in range(3):
        found, wanted = (nibabel.load(tmp_path / name / f"case_{i}.nii.gz") for name in ("new", "same"))
        np.testing.assert_allclose(found.get_fdata(), wanted.get_fdata(), atol=1e-5)
        np.testing.assert_array_equal(found.affine, STRAIGHT)


@pytest.mark.parametrize("first", ["P", "Q", "R"])
def test_maps_are_written_as_the_first_member_has_them(tmp_path, first):
    write(tmp_path, cases=1)
    others = [tmp_path / name for name in "PQR" if name != first]
    half = Temperature(2.0)
    maps = apply_calibrator(half, tmp_path / first, tmp_path / "new", members=others)
    assert maps.failures == []
    expected = np.exp(log_softmax(np.log(mean_of(0)) / 2, -1))
    if first == "Q":
        found = np.load(tmp_path / "new" / "case_0.npz")["probabilities"].transpose(3, 2, 1, 0)
    else:
        image = nibabel.load(next((tmp_path / "new").glob("case_0.nii*")))
        found = image.get_fdata()[::-1] if first == "R" else image.get_fdata()
    np.testing.assert_allclose(found, expected, atol=1e-5)


def test_single_files_are_members_whatever_their_names(tmp_path):
    write(tmp_path, cases=1)
    shutil.copy(tmp_path / "R" / "case_0.nii", tmp_path / "second.nii")
    one, label = tmp_path / "P" / "case_0.nii.gz", tmp_path / "L" / "case_0.nii.gz"
    outcome = segcal.evaluate(one, label, tmp_path / "out", members=[tmp_path / "second.nii"])
    assert outcome.failures == []
    maps = apply_calibrator(Temperature(1.0), one, tmp_path / "new", members=[tmp_path / "second.nii"])
    found = nibabel.load(maps.paths[0]).get_fdata()
    np.testing.assert_allclose(found, mean_of(0, (0, 2)), atol=1e-5)


def test_of_compressed_members_one_is_in_memory_beside_the_sum(tmp_path):
    shape = (64, 64, 32)
    size = 3 * np.prod(shape) * 4
    values = np.full((*shape, 3), 1 / 3, np.float32)
    for name in "ABCDE":
        save(tmp_path / name / "case.nii.gz", values)
    save(tmp_path / "L" / "case.nii.gz", np.zeros(shape, np.uint8))
    (files,) = paired(tmp_path, "ABCDE")
    tracemalloc.start()
    with open_case(files) as case:
        for slab, _ in case.slabs(1 << 12):
            assert abs(slab - 1 / 3).max() < 1e-6
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert most < 2.6 * size + (8 << 20)


def test_a_calibrator_of_logits_is_refused_for_a_mean_of_probabilities(tmp_path):
    write(tmp_path, cases=2, logits=True)
    paths = tmp_path / "P", tmp_path / "L", tmp_path / "c.json"
    options = ReadOptions(logits=True)
    fitted = fit_calibrator(*paths, members=[tmp_path / "R"], mean="logits", method="vector", options=options, folds=0)
    assert isinstance(fitted.calibrator, VectorScaling)
    with pytest.raises(ConfigError, match="fitted on logits, which probabilities do not tell"):
        apply_calibrator(paths[2], tmp_path / "P", tmp_path / "new", members=[tmp_path / "R"], options=options)
