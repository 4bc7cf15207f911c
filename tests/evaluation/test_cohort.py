"""`segcal evaluate` on folders of real files: the right numbers, every format of trouble, stopping and going on."""

import csv
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time

import nibabel
import numpy as np
import pytest
import torch
from cohorts import SHAPE, make_case, values
from sklearn.metrics import log_loss
from typer.testing import CliRunner

from segcal import ConfigError, Evaluation, ace, bin_statistics, ece, evaluate, mce
from segcal._io.files import WriteError
from segcal.cli import app
from segcal.evaluation.options import Options
from segcal.evaluation.voxels import measure_voxels
from segcal.kernels.numba_likelihood import absent_log_loss

AFFINE = np.diag([1.0, 1.0, 2.5, 1.0])


def save(path, array):
    nibabel.save(nibabel.Nifti1Image(array, AFFINE), path)


@pytest.fixture
def folder(tmp_path):
    """Three cases of three classes."""
    for name in ("predictions", "labels"):
        (tmp_path / name).mkdir()
    for i in range(3):
        probabilities, labels = make_case(i)
        save(tmp_path / "predictions" / f"case_{i}.nii.gz", probabilities)
        save(tmp_path / "labels" / f"case_{i}.nii.gz", labels)
    return tmp_path


def run(folder, *options, out="out"):
    arguments = ["evaluate", str(folder / "predictions"), str(folder / "labels"), "--out", str(folder / out), *options]
    return CliRunner().invoke(app, arguments)


def failures(folder, out="out"):
    with (folder / out / "failures.csv").open() as file:
        return {r["case"]: f"{r['kind']}: {r['message']}" for r in csv.DictReader(file)}


def contents(folder):
    return {p.name: p.read_bytes() for p in folder.iterdir() if p.is_file()}


def test_values_are_those_of_the_arrays(folder):
    result = run(folder, "--class-names", "background,liver,tumour")
    assert result.exit_code == 0, result.output
    found = values(folder)
    for i in range(3):
        probabilities, labels = make_case(i)
        stats = bin_statistics(torch.from_numpy(probabilities).movedim(-1, 0)[None], torch.from_numpy(labels)[None])
        for name, metric in (("ace", ace), ("ece", ece), ("mce", mce)):
            assert found[f"case_{i}", "tumour", name] == pytest.approx(metric(stats)[0, 2].item(), abs=1e-12)
        one_hot = np.eye(3)[labels]
        assert found[f"case_{i}", "liver", "brier"] == pytest.approx(((probabilities - one_hot) ** 2)[..., 1].mean())
        predicted = probabilities.argmax(-1)
        expected = 2 * ((predicted == 1) & (labels == 1)).sum() / ((predicted == 1).sum() + (labels == 1).sum())
        assert found[f"case_{i}", "liver", "dice"] == pytest.approx(expected)
        of_class = log_loss((labels == 1).ravel(), probabilities[..., 1].ravel())
        assert found[f"case_{i}", "liver", "nll"] == pytest.approx(of_class, rel=1e-5)
        flat = probabilities.reshape(-1, 3).astype(np.float64)
        assert found[f"case_{i}", "", "nll"] == pytest.approx(
            -np.log(flat[one_hot.reshape(-1, 3) == 1]).mean(), rel=1e-5
        )
        assert found[f"case_{i}", "", "brier"] == pytest.approx(((flat - one_hot.reshape(-1, 3)) ** 2).sum(1).mean())
    assert ("case_0", "background", "ace") not in found


def test_top_label_ece_is_that_of_the_predicted_class(folder):
    run(folder)
    probabilities, labels = make_case(1)
    top, right = probabilities.max(-1).ravel(), (probabilities.argmax(-1) == labels).ravel()
    which = np.minimum((top.astype(np.float64) * 20).astype(int), 19)
    expected = sum(
        (which == b).mean() * abs(top[which == b].mean() - right[which == b].mean())
        for b in range(20)
        if (which == b).any()
    )
    assert values(folder)["case_1", "", "top_label_ece"] == pytest.approx(expected, abs=1e-6)


def test_summary_json_and_the_printed_table_agree_with_the_cases(folder):
    result = run(folder, "--background")
    summary = json.loads((folder / "out" / "summary.json").read_text())
    rows = {(r["cases"], r["average"], r["class"], r["metric"]): r for r in summary["summary"]}
    found = [values(folder)[f"case_{i}", "class 0", "ece"] for i in range(3)]
    assert rows["all", "macro", "class 0", "ece"]["value"] == pytest.approx(np.mean(found))
    assert rows["all", "macro", "class 0", "ece"]["std"] == pytest.approx(np.std(found, ddof=1))
    assert f"{np.mean(found):.4f}" in result.output
    assert json.loads(run(folder, "--json", "--background").stdout) == summary


def test_names_come_from_a_dataset_json_beside_the_labels(folder):
    (folder / "dataset.json").write_text(json.dumps({"labels": {"0": "background", "1": "Anterior", "2": "Posterior"}}))
    run(folder)
    assert ("case_0", "Posterior", "ace") in values(folder)


def test_logits_are_turned_into_probabilities(folder):
    expected = run(folder) and values(folder)
    for i in range(3):
        save(folder / "predictions" / f"case_{i}.nii.gz", np.log(make_case(i)[0]))
    assert run(folder, "--logits", out="again").exit_code == 0
    for key, value in values(folder, "again").items():
        assert value == pytest.approx(expected[key], abs=1e-5), key


def test_voxels_with_an_ignored_label_count_nowhere(folder):
    """As if those voxels were not in the arrays; a case of nothing else has nothing to measure."""
    kept = {}
    for i in range(3):
        probabilities, labels = make_case(i)
        ignored = np.random.default_rng(i).random(SHAPE) < 0.3
        kept[i] = probabilities[~ignored].T[None], labels[~ignored][None]
        save(folder / "labels" / f"case_{i}.nii.gz", np.where(ignored, 255, labels).astype(np.uint8))
    save(folder / "labels" / "case_2.nii.gz", np.full(SHAPE, 255, np.uint8))
    assert run(folder).exit_code == 1
    assert run(folder, "--ignore-index", "255").exit_code == 1
    assert list(failures(folder)) == ["case_2"]
    assert "not 255, which is ignored" in str(failures(folder)["case_2"])
    found = values(folder)
    for i in range(2):
        probabilities, labels = (torch.from_numpy(array) for array in kept[i])
        stats = bin_statistics(probabilities.double(), labels.long(), bins=20)
        predicted = probabilities.argmax(1)
        for c in (1, 2):
            assert found[f"case_{i}", f"class {c}", "ace"] == pytest.approx(ace(stats)[0, c].item(), abs=1e-6)
            both = ((predicted == c) & (labels == c)).sum().item()
            dice = 2 * both / ((predicted == c).sum() + (labels == c).sum()).item()
            assert found[f"case_{i}", f"class {c}", "dice"] == pytest.approx(dice)


def test_a_label_that_dataset_json_names_ignore_is_left_out_unless_another_is_asked_for(folder):
    """Class names and regions of nnU-Net may both come from that file."""
    for i in range(3):
        labels = make_case(i)[1]
        labels[:, :, 0] = 3
        save(folder / "labels" / f"case_{i}.nii.gz", labels)
    run(folder, "--ignore-index", "3", out="asked")
    named = folder / "named.json"
    named.write_text(json.dumps({"labels": {"background": 0, "class 1": 1, "class 2": 2, "ignore": 3}}))
    assert run(folder, "--class-names", str(named)).exit_code == 0
    assert values(folder) == values(folder, "asked")
    assert run(folder, "--class-names", str(named), "--ignore-index", "255", out="other").exit_code == 1
    assert "they hold [3]" in failures(folder, "other")["case_0"]
    named.write_text(json.dumps({"labels": {"background": 0, "both": [1, 2], "class 2": 2, "ignore": 3}}))
    assert run(folder, "--regions", str(named), out="regions").exit_code == 0
    assert values(folder, "regions")["case_1", "class 2", "ece"] == values(folder)["case_1", "class 2", "ece"]


def test_a_slab_that_is_ignored_as_a_whole_adds_nothing():
    labels = np.full(50, 255, np.uint8)
    for sigmoid in (False, True):
        sums = measure_voxels(
            np.full((3, 50), 1 / 3, np.float32), labels, Options(ignore_index=255, sigmoid=sigmoid)
        ).sums
        assert not any(getattr(sums, name).any() for name in ("bins", "overlap", "scores"))


def test_workers_change_nothing(folder):
    run(folder)
    assert run(folder, "--workers", "2", out="two").exit_code == 0
    assert contents(folder / "out") == contents(folder / "two")


def test_brats_regions_sum_their_members(tmp_path):
    for name in ("predictions", "labels"):
        (tmp_path / name).mkdir()
    probabilities, labels = make_case(0, classes=4)
    save(tmp_path / "predictions" / "a.nii.gz", probabilities)
    save(tmp_path / "labels" / "a.nii.gz", np.array([0, 1, 2, 4], dtype=np.uint8)[labels])
    assert run(tmp_path, "--regions", "brats").exit_code == 0
    found = values(tmp_path)
    for region, members in {"ET": [3], "TC": [1, 3], "WT": [1, 2, 3]}.items():
        p = torch.from_numpy(probabilities[..., members].astype(np.float64).sum(-1).clip(0, 1))[None, None]
        y = torch.from_numpy(np.isin(labels, members))[None, None]
        assert found["a", region, "ace"] == pytest.approx(ace(bin_statistics(p, y)).item(), abs=1e-5)
        expected = torch.nn.functional.binary_cross_entropy(p, y.double()).item()
        assert found["a", region, "nll"] == pytest.approx(expected, rel=1e-4)
        over = (p[0, 0] >= 0.5).numpy()
        assert found["a", region, "dice"] == pytest.approx(
            2 * (over & y[0, 0].numpy()).sum() / (over.sum() + y.sum().item())
        )


def test_member_probabilities_that_round_above_one_lose_no_voxel(tmp_path):
    for name in ("predictions", "labels"):
        (tmp_path / name).mkdir()
    probabilities = np.zeros((*SHAPE, 4), dtype=np.float32)
    probabilities[...] = (0, 0.4, 0.3, 0.3000002)
    save(tmp_path / "predictions" / "a.nii", probabilities)
    save(tmp_path / "labels" / "a.nii", np.full(SHAPE, 2, dtype=np.uint8))
    assert run(tmp_path, "--regions", "brats").exit_code == 0
    evaluation = Evaluation.load(tmp_path / "out" / "evaluation.npz")
    assert evaluation.statistics.count[0, 2].sum() == math.prod(SHAPE)
    assert evaluation.statistics.rebin(20).count[0, 2, 19] == math.prod(SHAPE)


def test_channels_of_the_foreground_alone_need_no_background(tmp_path):
    for name in ("predictions", "labels"):
        (tmp_path / name).mkdir()
    probabilities, labels = make_case(0, classes=4)
    save(tmp_path / "predictions" / "a.nii.gz", probabilities[..., 1:])
    save(tmp_path / "labels" / "a.nii.gz", labels)
    (tmp_path / "regions.toml").write_text("values = [1, 2, 3]\n[regions]\nwhole = [1, 2, 3]\n")
    result = run(tmp_path, "--regions", str(tmp_path / "regions.toml"))
    assert result.exit_code == 0, result.output
    p = torch.from_numpy(probabilities[..., 1:].astype(np.float64).sum(-1))[None, None]
    expected = ace(bin_statistics(p, torch.from_numpy(labels > 0)[None, None])).item()
    assert values(tmp_path)["a", "whole", "ace"] == pytest.approx(expected, abs=1e-5)


def test_sigmoid_channels_are_measured_one_by_one(tmp_path):
    for name in ("predictions", "labels"):
        (tmp_path / name).mkdir()
    generator = np.random.default_rng(0)
    probabilities = generator.random((*SHAPE, 3)).astype(np.float32)
    labels = generator.integers(0, 2, (*SHAPE, 3)).astype(np.uint8)
    save(tmp_path / "predictions" / "a.nii.gz", probabilities)
    save(tmp_path / "labels" / "a.nii.gz", labels)
    assert run(tmp_path, "--sigmoid", "--class-names", "TC,WT,ET").exit_code == 0
    p, y = (torch.from_numpy(a).movedim(-1, 0)[None] for a in (probabilities, labels))
    assert values(tmp_path)["a", "WT", "ece"] == pytest.approx(ece(bin_statistics(p, y))[0, 1].item(), abs=1e-9)


def test_a_single_map_is_the_foreground(tmp_path):
    for name in ("predictions", "labels"):
        (tmp_path / name).mkdir()
    probabilities, labels = make_case(0, classes=2)
    save(tmp_path / "predictions" / "a.nii.gz", probabilities[..., 1])
    save(tmp_path / "labels" / "a.nii.gz", labels)
    assert run(tmp_path, "--class-names", "background,lesion").exit_code == 0
    p = torch.from_numpy(probabilities[..., 1])[None, None]
    expected = ace(bin_statistics(p, torch.from_numpy(labels)[None, None])).item()
    assert values(tmp_path)["a", "lesion", "ace"] == pytest.approx(expected, abs=1e-9)


BROKEN = {
    "nan": "RangeError",
    "infinite": "RangeError",
    "outside": "RangeError",
    "no total": "RangeError",
    "unknown label": "LabelError",
    "shape": "GridError",
    "classes": "ShapeError",
    "truncated": "FileError",
    "empty": "FileError",
    "text": "FileError",
}


def spoil(folder, kind):
    prediction, label = folder / "predictions" / "case_1.nii.gz", folder / "labels" / "case_1.nii.gz"
    probabilities, labels = make_case(1)
    if kind in ("nan", "infinite", "outside", "no total"):
        probabilities[1, 2, 3, 1] = {"nan": np.nan, "infinite": np.inf, "outside": 7.31, "no total": 0.0}[kind]
        if kind == "no total":
            probabilities[1, 2, 3] = 0.1
        save(prediction, probabilities)
    elif kind == "unknown label":
        labels[0, 0, 0] = 9
        save(label, labels)
    elif kind == "shape":
        save(prediction, probabilities[:-1])
    elif kind == "classes":
        save(prediction, make_case(1, classes=5)[0])
    else:
        content = prediction.read_bytes()
        prediction.write_bytes({"truncated": content[: len(content) // 2], "empty": b"", "text": b"no volume"}[kind])


@pytest.mark.parametrize("kind", BROKEN)
def test_one_bad_case_is_reported_and_stops_no_other(folder, kind):
    spoil(folder, kind)
    result = run(folder)
    assert result.exit_code == 1, result.output
    assert "Traceback" not in result.output
    found = failures(folder)
    assert list(found) == ["case_1"]
    assert found["case_1"].startswith(BROKEN[kind])
    assert {case for case, _, _ in values(folder)} == {"case_0", "case_2"}


def test_when_every_case_fails_there_are_failures_and_no_numbers(folder):
    for path in (folder / "predictions").iterdir():
        path.write_bytes(b"")
    assert run(folder).exit_code == 1
    assert len(failures(folder)) == 3
    assert not (folder / "out" / "cases.csv").exists()


def test_when_every_case_fails_the_numbers_of_the_last_time_go(folder):
    run(folder)
    (folder / "out" / "mine.txt").write_text("kept")
    for path in (folder / "predictions").iterdir():
        path.write_bytes(b"")
    assert run(folder).exit_code == 1
    assert sorted(contents(folder / "out")) == ["failures.csv", "mine.txt"]
    done = CliRunner().invoke(app, ["report", str(folder / "out"), "--out", str(folder / "report.html")])
    assert done.exit_code == 2
    assert "evaluation.npz does not exist" in " ".join(done.output.split())


def test_new_results_that_cannot_be_written_leave_the_old_ones_whole(folder, monkeypatch):
    run(folder)
    before = contents(folder / "out")
    save(folder / "predictions" / "case_0.nii.gz", make_case(7)[0])

    def full(path, fields, rows):
        raise WriteError(28, "No space left on device", str(path))

    with monkeypatch.context() as patch:
        patch.setattr("segcal.evaluation.results.write_csv", full)
        done = run(folder)
    assert done.exit_code == 1
    assert f"{folder / 'out' / 'failures.csv'} cannot be written" in done.output.replace("\n", "")
    assert contents(folder / "out") == before
    assert run(folder).exit_code == 0
    assert contents(folder / "out").keys() == before.keys()
    assert contents(folder / "out")["evaluation.npz"] != before["evaluation.npz"]


@pytest.mark.parametrize("after", range(1, 8))
def test_killed_while_results_take_their_places_old_and_new_are_never_together(folder, after):
    """Killed at each of the moves; what is there afterwards is of one evaluation, and the command ends it."""
    run(folder)
    old = contents(folder / "out")
    save(folder / "predictions" / "case_0.nii.gz", make_case(7)[0])
    shutil.copytree(folder / "out", folder / "calm")
    run(folder, out="calm")
    new = contents(folder / "calm")
    script = (
        "import os, signal, sys, segcal._io.files as files, segcal.evaluation.cohort as cohort\n"
        "moves, replace = [], os.replace\n"
        "def move(source, target):\n"
        "    if '.new-' in str(source) and '.new-' not in str(target):\n"
        "        moves.append(1)\n"
        f"        if len(moves) == {after}: os.kill(os.getpid(), signal.SIGKILL)\n"
        "    replace(source, target)\n"
        "files.os.replace = move\n"
        f"cohort.evaluate({str(folder / 'predictions')!r}, {str(folder / 'labels')!r}, {str(folder / 'out')!r})\n"
    )
    ended = subprocess.run([sys.executable, "-c", script], check=False).returncode
    assert ended == (-signal.SIGKILL if after <= 6 else 0)
    left = contents(folder / "out")
    assert all(new[name] == content for name, content in left.items())
    assert len(left) == min(after - 1, 6)
    assert old["cases.csv"] != new["cases.csv"]
    assert run(folder).exit_code == 0
    assert contents(folder / "out") == new
    assert not list((folder / "out").glob(".new-*"))


def test_failures_are_told_by_the_evaluation_that_lacks_them(folder):
    assert run(folder).exit_code == 0
    assert Evaluation.load(folder / "out" / "evaluation.npz").provenance["failures"] == []
    spoil(folder, "unknown label")
    run(folder)
    (told,) = Evaluation.load(folder / "out" / "evaluation.npz").provenance["failures"]
    assert (told["case"], told["kind"]) == ("case_1", "LabelError")
    assert failures(folder)["case_1"] == f"{told['kind']}: {told['message']}"


def test_files_without_a_partner_are_listed(folder):
    save(folder / "predictions" / "extra.nii.gz", make_case(0)[0])
    (folder / "predictions" / "case_2.nii.gz").unlink()
    result = run(folder)
    assert result.exit_code == 0
    assert "extra.nii.gz" in result.output
    summary = json.loads((folder / "out" / "summary.json").read_text())
    assert summary["unpaired_labels"] == ["case_2.nii.gz"]


@pytest.mark.parametrize(
    "options",
    [["--bins", "0"], ["--regions", "heart"], ["--workers", "0"], ["--class-names", "nowhere.json"], ["--wrong"]],
)
def test_misuse_ends_with_two(folder, options):
    assert run(folder, *options).exit_code == 2


def test_folders_without_common_cases_and_missing_folders_are_misuse(folder, tmp_path):
    (tmp_path / "none").mkdir()
    for labels in ("none", "nowhere"):
        arguments = ["evaluate", str(folder / "predictions"), str(tmp_path / labels), "--out", str(tmp_path / "out")]
        assert CliRunner().invoke(app, arguments).exit_code == 2


def test_started_again_it_reads_only_what_changed(folder, monkeypatch):
    import segcal.evaluation.cohort

    read = []
    original = segcal.evaluation.cohort.measure_case
    monkeypatch.setattr(
        segcal.evaluation.cohort, "measure_case", lambda f, o, **k: read.append(f.name) or original(f, o, **k)
    )
    run(folder)
    assert len(read) == 3
    before = contents(folder / "out")
    run(folder)
    assert len(read) == 3
    assert contents(folder / "out") == before
    probabilities, _ = make_case(7)
    save(folder / "predictions" / "case_0.nii.gz", probabilities)
    run(folder)
    assert read[3:] == ["case_0"]
    run(folder, "--bins", "15")
    assert len(read) == 7


def test_sums_that_were_spoilt_since_are_measured_again(folder):
    run(folder)
    before = contents(folder / "out")
    first, second, third = sorted((folder / "out" / ".parts").glob("*.npz"))
    first.write_bytes(first.read_bytes()[:100])
    second.write_bytes(b"")
    with np.load(third) as content:
        np.savez(third, **{name: content[name][:2] if name == "bins" else content[name] for name in content.files})
    (folder / "out" / "evaluation.npz").unlink()
    assert run(folder).exit_code == 0
    assert contents(folder / "out") == before


def test_killed_half_way_it_goes_on_and_ends_the_same(folder):
    undisturbed = contents(folder / "out") if run(folder).exit_code == 0 else None
    shutil.rmtree(folder / "out")
    script = (
        "import os, signal, segcal.evaluation.cohort as c\n"
        "original = c.measure_case\n"
        "def die(files, options, **rest):\n"
        "    if files.name == 'case_2': os.kill(os.getpid(), signal.SIGKILL)\n"
        "    return original(files, options, **rest)\n"
        "c.measure_case = die\n"
        f"c.evaluate({str(folder / 'predictions')!r}, {str(folder / 'labels')!r}, {str(folder / 'out')!r})\n"
    )
    killed = subprocess.run([sys.executable, "-c", script], check=False)
    assert killed.returncode == -signal.SIGKILL
    assert not (folder / "out" / "evaluation.npz").exists()
    assert len(list((folder / "out" / ".parts").glob("*.npz"))) == 2
    assert run(folder).exit_code == 0
    assert contents(folder / "out") == undisturbed


def test_ctrl_c_keeps_what_is_done_and_says_so(tmp_path):
    for name in ("predictions", "labels"):
        (tmp_path / name).mkdir()
    probabilities, labels = make_case(0)
    for i in range(1200):
        np.save(tmp_path / "predictions" / f"case_{i}.npy", probabilities)
        save(tmp_path / "labels" / f"case_{i}.nii.gz", labels)
    arguments = [
        str(tmp_path / "predictions"),
        str(tmp_path / "labels"),
        "--out",
        str(tmp_path / "out"),
        "--workers",
        "2",
    ]
    process = subprocess.Popen(
        [sys.executable, "-m", "segcal", "evaluate", *arguments],
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    parts = tmp_path / "out" / ".parts"
    for _ in range(6000):
        if parts.is_dir() and len(list(parts.glob("*.npz"))) > 3:
            break
        time.sleep(0.01)  # on a busy machine the cases may be done before a longer nap ends
    os.killpg(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    assert "again to resume" in errors.replace("\n", " ")
    assert "Traceback" not in errors
    assert 3 < len(list(parts.glob("*.npz"))) < 1200


def test_a_worker_that_dies_costs_one_case(folder):
    # a worker that is killed takes the pool down; the others must still be evaluated
    script = folder / "sitecustomize.py"
    script.write_text(
        "import sys\n"
        "if 'spawn_main' in ' '.join(sys.argv) or any('multiprocessing' in a for a in sys.orig_argv):\n"
        "    import os, segcal.evaluation.cohort as c\n"
        "    original = c.measure_case\n"
        "    def die(files, options, **rest):\n"
        "        if files.name == 'case_1': os._exit(9)\n"
        "        return original(files, options, **rest)\n"
        "    c.measure_case = die\n"
    )
    paths = [str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]
    command = ["evaluate", str(folder / "predictions"), str(folder / "labels"), "--out", str(folder / "out")]
    subprocess.run(  # whose workers are not of a process that began before
        [sys.executable, "-m", "segcal", *command, "--workers", "2"],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
        check=False,
    )
    with (folder / "out" / "failures.csv").open() as file:
        (failure,) = csv.DictReader(file)
    assert failure["case"] == "case_1"
    assert "died" in failure["message"]
    assert Evaluation.load(folder / "out" / "evaluation.npz").cases == ("case_0", "case_2")


def test_two_processes_do_not_write_one_folder(folder):
    import fcntl

    run(folder)
    with (folder / "out" / ".parts" / ".lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        result = run(folder)
    assert result.exit_code == 2
    assert "another process" in result.output
    with pytest.raises(ConfigError, match="workers"):
        evaluate(folder / "predictions", folder / "labels", folder / "out", workers=0)


def test_the_floor_of_the_ace_is_printed_and_is_what_calibrated_labels_show(folder):
    """Labels drawn anew from the mean confidence of each bin, by numpy."""
    result = run(folder)
    (line,) = [line for line in result.stdout.splitlines() if line.startswith("Floor of the macro-ACE: ")]
    told = {name: float(value) for name, value in (part.rsplit(" ", 1) for part in line[24:].rstrip(".").split(", "))}
    assert list(told) == ["class 1", "class 2", "all classes"]
    generator = np.random.default_rng(1)
    found = {1: [], 2: []}
    for i in range(3):
        probabilities, _ = make_case(i)
        for c in (1, 2):
            p = probabilities[..., c].ravel().astype(np.float64)
            which = np.minimum((p * 20).astype(int), 19)
            bins = [(p[which == b].mean(), (which == b).sum()) for b in range(20) if (which == b).any()]
            found[c] += [np.mean([abs(generator.binomial(n, mean) / n - mean) for mean, n in bins]) for _ in range(200)]
    for c in (1, 2):
        assert told[f"class {c}"] == pytest.approx(np.mean(found[c]), rel=0.1)
    assert told["all classes"] == pytest.approx((told["class 1"] + told["class 2"]) / 2, abs=1e-4)
    assert "by chance on the same predictions" in result.stdout


def test_one_case_is_no_plural(folder):
    for i in (1, 2):
        (folder / "predictions" / f"case_{i}.nii.gz").unlink()
    (folder / "labels" / "case_2.nii.gz").unlink()
    text = " ".join(run(folder).output.split())
    assert "1 label map without a prediction: case_1.nii.gz" in text
    assert "1 case, 1 complete, 20 bins" in text
    assert "1 case evaluated, 0 failed" in text


def test_logits_too_near_for_their_probabilities_still_decide():
    logits = np.array([[1.0], [np.nextafter(np.float32(1), np.float32(2))], [-3.0]], np.float32)
    sums = measure_voxels(logits, np.array([1], np.uint8), Options(logits=True)).sums
    assert sums.overlap.tolist() == [[0, 1, 0], [0, 1, 0], [0, 1, 0]]  # predicted, true, both
    cooler = measure_voxels(logits / np.float32(1.5), np.array([1], np.uint8), Options(logits=True)).sums
    assert cooler.overlap.tolist() == sums.overlap.tolist()


def test_one_and_two_channels_of_the_same_map_have_the_same_scores(tmp_path):
    """As a likelihood over each class's own voxels, two channels scored half of one."""
    probabilities, labels = make_case(3, classes=2)
    for name, maps in (("one", probabilities[..., 1:]), ("two", probabilities)):
        for kind in ("predictions", "labels"):
            (tmp_path / name / kind).mkdir(parents=True)
        save(tmp_path / name / "predictions" / "a.nii.gz", maps)
        save(tmp_path / name / "labels" / "a.nii.gz", labels)
        assert run(tmp_path / name).exit_code == 0
    one, two = (values(tmp_path / name) for name in ("one", "two"))
    for metric in ("nll", "brier"):
        expected = one["a", "class 1", metric]
        assert one["a", "", metric] == pytest.approx(expected)
        assert [two["a", name, metric] for name in ("", "class 1")] == pytest.approx([expected] * 2, rel=1e-5)


def test_complete_cases_of_regions_have_every_trained_label(tmp_path):
    """With KiTS' regions, a case without a cyst has every region, and was called complete."""
    probabilities, labels = make_case(5, classes=4)
    for kind in ("predictions", "labels"):
        (tmp_path / kind).mkdir()
    for name, truth in (("whole", labels), ("no cyst", np.where(labels == 3, 2, labels).astype(np.uint8))):
        save(tmp_path / "predictions" / f"{name}.nii.gz", probabilities)
        save(tmp_path / "labels" / f"{name}.nii.gz", truth)
    assert run(tmp_path, "--regions", "kits").exit_code == 0
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert (summary["cases"], summary["complete_cases"]) == (2, 1)
    loaded = Evaluation.load(tmp_path / "out" / "evaluation.npz")
    assert loaded.complete().cases == ("whole",)
    row = loaded.label_counts[loaded.cases.index("no cyst")].tolist()
    assert row == [(labels == 1).sum(), (labels >= 2).sum(), 0]  # kidney, tumour, cyst


def test_the_log_loss_is_that_of_numpy():
    probabilities, labels = make_case(7)
    flat, truth = np.ascontiguousarray(probabilities.reshape(-1, 3).T), labels.ravel()
    sums, wide = measure_voxels(flat, truth, Options()).sums, flat.astype(np.float64)
    losses = [-np.log(np.where(truth == c, wide[c], 1 - wide[c])).sum() for c in range(3)]
    np.testing.assert_allclose(sums.scores[1], losses, rtol=1e-8)
    np.testing.assert_allclose(sums.joint[1], -np.log(wide[truth, np.arange(len(truth))]).sum(), rtol=1e-8)
    absent = [-np.log(1 - flat[c][truth != c].astype(np.float64)).sum() for c in range(3)]
    np.testing.assert_allclose(absent_log_loss(flat, truth, threads=2), absent, rtol=1e-12)
