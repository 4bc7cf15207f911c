"""`segcal audit`: the chain of commands in one, resumed where it was, and honest about what cannot be done."""

from __future__ import annotations

import csv
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import cohorts
import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import segcal
from segcal import ConfigError, SegcalError, audit_predictions, evaluate, fit_calibrator, fit_quality
from segcal.audit import work
from segcal.calibration import cross_fitting, planning
from segcal.calibration.choosing import Candidate
from segcal.cli import app
from segcal.evaluation import cohort

QUICK = (Candidate("temperature", "temperature", {}, (1.0,)), Candidate("vector", "vector", {}))
CASES = 10


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Calibrators that take no training, in place of those that "auto" tries."""
    monkeypatch.setattr(planning, "CANDIDATES", QUICK)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Ten cases that are less sure than they could be."""
    return cohorts.write_cohort(tmp_path_factory.mktemp("made"), CASES)


@pytest.fixture(scope="module")
def audited(made):
    """Their audit."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(planning, "CANDIDATES", QUICK)
        return audit_predictions(made / "P", made / "L", made / "audit", cases=2)


@pytest.fixture
def folder(made, audited, tmp_path):
    """A copy of both, to be changed."""
    shutil.copytree(made, tmp_path / "made")
    return tmp_path / "made"


def run(*arguments: object):
    return CliRunner().invoke(app, ["audit", *map(str, arguments)])


def text(done) -> str:
    return " ".join(done.output.split())


def rows(path) -> list[dict[str, str]]:
    return list(csv.DictReader(path.read_text(encoding="utf-8").splitlines()))


def calls_of(monkeypatch, module, name):
    """How often a function is called from now on, by its name in a module."""
    calls, own = [], getattr(module, name)
    monkeypatch.setattr(module, name, lambda *args, **named: (calls.append(args), own(*args, **named))[1])
    return calls


def all_calls(monkeypatch):
    return {
        "measured": calls_of(monkeypatch, cohort, "measure_case"),
        "fitted": calls_of(monkeypatch, work, "fit_calibrator"),
        "learned": calls_of(monkeypatch, work, "fit_quality"),
        "reported": calls_of(monkeypatch, work, "build_report"),
    }


def numbers(calls):
    return {name: len(each) for name, each in calls.items()}


def test_what_an_audit_writes_is_what_the_single_commands_write(made, audited, tmp_path):
    evaluate(made / "P", made / "L", tmp_path / "before")
    fitted = fit_calibrator(made / "P", made / "L", tmp_path / "calibrator.json")
    out = audited.out
    assert (out / "before" / "cases.csv").read_bytes() == (tmp_path / "before" / "cases.csv").read_bytes()
    assert (out / "calibrator.json").read_bytes() == (tmp_path / "calibrator.json").read_bytes()
    assert fitted.after.case_values()[None, "ace"].equal(audited.calibrated.case_values()[None, "ace"])
    quality = fit_quality(out / "calibrated", tmp_path / "quality.json")
    assert quality.options.calibrator_fingerprint == fitted.calibrator.fingerprint
    assert (out / "quality.json").read_bytes() == (tmp_path / "quality.json").read_bytes()
    assert audited.skipped == {}
    assert audited.comparison.methods == ("before", "calibrated")
    names = [row["calibrator"] for row in rows(out / "candidates.csv")]
    assert names == ["as it is", "temperature", "vector", "vector, at 50%"]


def test_a_case_is_calibrated_by_what_never_saw_it(made, audited, tmp_path):
    """The fold's calibrator is that of a fit to the other cases alone, and gives the numbers in `calibrated`."""
    fold_of = {row["case"]: row["fold"] for row in rows(audited.out / "calibrated" / "folds.csv")}
    assert len(fold_of) == CASES
    case, fold = next(iter(fold_of.items()))
    for name in "PL":
        for i in range(CASES):
            if fold_of[f"case_{i}"] != fold:
                (tmp_path / name).mkdir(exist_ok=True)
                shutil.copy(made / name / f"case_{i}.nii.gz", tmp_path / name)
    (taken,) = (row for row in rows(audited.out / "candidates.csv") if row["remark"] == "taken")
    fitted = fit_calibrator(
        tmp_path / "P", tmp_path / "L", tmp_path / "c.json", method=taken["calibrator"].split(",")[0], folds=0
    )
    kept = segcal.load_calibrator(audited.out / "calibrated" / "folds" / f"{fold}.json")
    logits = np.array([[2.0, 0.0], [0.0, 1.0], [1.0, -1.0]], np.float32)
    strength = kept.strength
    expected = fitted.calibrator.weakened(strength).transform(torch.from_numpy(logits)).softmax(0)
    assert torch.allclose(kept.transform(torch.from_numpy(logits)).softmax(0), expected, atol=1e-5)
    evaluate(
        made / "P" / f"{case}.nii.gz", made / "L" / f"{case}.nii.gz", tmp_path / "one",
        calibrator=audited.out / "calibrated" / "folds" / f"{fold}.json",
    )  # fmt: skip
    found = segcal.Evaluation.load(tmp_path / "one" / "evaluation.npz").case_values()[None, "ace"].item()
    place = audited.calibrated.cases.index(case)
    assert audited.calibrated.case_values()[None, "ace"][place].item() == pytest.approx(found, abs=1e-12)


def test_the_command_shows_before_and_calibrated_and_where_everything_is(folder):
    done = run(folder / "P", folder / "L", "--out", folder / "new", "--cases", 0)
    assert done.exit_code == 0, done.output
    assert all(f"{step} " in done.stderr for step in ("evaluate", "calibrate", "quality", "report"))  # a bar each
    assert "before" in done.output
    assert "calibrated" in done.output
    assert f"{CASES} cases audited, 0 failed; report: {folder / 'new' / 'report.html'}" in text(done)
    names = {path.name for path in (folder / "new").iterdir()}
    assert names == {
        "report.html", "calibrator.json", "quality.json", "NEXT.md", "candidates.csv", "audit.json", "before",
        "calibrated",
    }  # fmt: skip


def test_json_names_files_and_numbers(folder):
    done = CliRunner().invoke(
        app, ["audit", str(folder / "P"), str(folder / "L"), "--out", str(folder / "audit"), "--cases", "2", "--json"]
    )
    assert done.exit_code == 0, done.output
    told = json.loads(done.stdout)
    assert told["cases"] == CASES
    assert told["failures"] == []
    assert told["skipped"] == {}
    assert all(Path(path).exists() for path in told["files"].values())
    assert {entry["method"] for entry in told["comparison"]["entries"]} == {"before", "calibrated"}


def test_the_report_has_both_methods_and_the_cases(audited):
    page = audited.report.read_text(encoding="utf-8")
    assert "Audit of P" in page
    assert "worst by DSC" in page
    assert "median by DSC" in page


def test_a_second_run_does_nothing_again(folder, monkeypatch):
    run(folder / "P", folder / "L", "--out", folder / "audit", "--cases", 2)  # the copy's files are others
    times = {
        path: path.stat().st_mtime_ns for path in (folder / "audit").rglob("*.json") if path.parent.name != "before"
    }
    calls = all_calls(monkeypatch)
    done = run(folder / "P", folder / "L", "--out", folder / "audit", "--cases", 2)
    assert done.exit_code == 0, done.output
    assert numbers(calls) == {"measured": 0, "fitted": 0, "learned": 0, "reported": 0}
    assert {path: path.stat().st_mtime_ns for path in times} == times


def test_only_what_depends_on_a_change_is_done_again(folder, monkeypatch):
    arguments = [folder / "P", folder / "L", "--out", folder / "audit", "--cases", 0]
    assert run(*arguments).exit_code == 0
    lines = "".join(f"case_{i},{i // 2 if i < 2 else i}\n" for i in range(CASES))
    (folder / "patients.csv").write_text(f"case,patient\n{lines}")
    (folder / "regions.toml").write_text('values = [0, 1, 2]\n[regions]\n"both" = [1, 2]\n')
    for what, change, again in (
        ("cases", lambda: arguments.__setitem__(-1, 1), (0, 0, 0, 1)),
        ("quality", (folder / "audit" / "quality.json").unlink, (0, 0, 1, 0)),
        ("calibrator", (folder / "audit" / "calibrator.json").unlink, (0, 1, 0, 0)),
        ("a case", lambda: cohorts.save(folder / "P" / "case_3.nii.gz", cohorts.make_case(77)[0]), (1, 1, 1, 1)),
        ("patients", lambda: arguments.extend(["--patients", folder / "patients.csv"]), (0, 1, 1, 1)),
        ("regions", lambda: arguments.extend(["--regions", folder / "regions.toml"]), (CASES, 1, 1, 1)),
        ("nothing", lambda: None, (0, 0, 0, 0)),
    ):
        change()
        with monkeypatch.context() as patch:
            calls = all_calls(patch)
            done = run(*arguments)
        assert done.exit_code == 0, done.output
        assert tuple(numbers(calls).values()) == again, what


@pytest.mark.parametrize("step", ["evaluate: 3", "calibrate: measuring case_7", "calibrate: fitting to all"])
def test_stopped_by_ctrl_c_it_goes_on_where_it_was(made, tmp_path, monkeypatch, step):
    out = tmp_path / "audit"

    @contextmanager
    def stopping_bars():
        def advance(name, done, total, text):
            if f"{name}: {text or done}".startswith(step):
                raise KeyboardInterrupt

        yield advance

    with monkeypatch.context() as patch:
        patch.setattr("segcal.cli.audit.step_bars", stopping_bars)
        done = run(made / "P", made / "L", "--out", out, "--cases", 0)
    assert done.exit_code == 130
    assert f"Finished work is kept in {out}. Run the same command again to resume." in text(done)
    kept = len(list((out / "before" / ".parts").glob("*.npz")))
    assert kept == (3 if step.startswith("evaluate") else CASES)
    fits = len(list((out / ".calibrator.json.parts").glob("*.json"))) if kept == CASES else 0
    measured, fitted = calls_of(monkeypatch, cohort, "measure_case"), calls_of(monkeypatch, cross_fitting, "_fit")
    done = run(made / "P", made / "L", "--out", out, "--cases", 0)
    assert done.exit_code == 0, done.output
    assert len(measured) == CASES - kept
    assert len(fitted) == 5 * len(QUICK) + 1 - fits  # one for each fold, one for all
    assert (out / "calibrator.json").read_bytes() == (made / "audit" / "calibrator.json").read_bytes()
    assert not list(out.glob(".calibrator*"))


KILLED = """
from segcal.calibration import planning
from segcal.calibration.choosing import Candidate
from segcal.cli import app
planning.CANDIDATES = (Candidate("temperature", "temperature", {}, (1.0,)), Candidate("vector", "vector", {}))
app()
"""


@pytest.mark.skipif(sys.platform == "win32", reason="sends signals")
def test_killed_while_it_fits_it_ends_as_if_it_had_not_been(made, audited, tmp_path):
    out = tmp_path / "audit"
    command = [sys.executable, "-c", KILLED, "audit", str(made / "P"), str(made / "L"), "--out", str(out)]
    with (tmp_path / "said").open("wb") as said:
        process = subprocess.Popen([*command, "--cases", "2"], stdout=said, stderr=said, start_new_session=True)
        end = time.monotonic() + 120
        while not list((out / ".calibrator.json.parts").glob("*.json")):
            assert process.poll() is None, (tmp_path / "said").read_text()
            assert time.monotonic() < end
            time.sleep(0.02)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    assert not (out / "NEXT.md").exists()
    found = audit_predictions(made / "P", made / "L", out, cases=2)
    assert found.calibrator.read_bytes() == audited.calibrator.read_bytes()
    assert (out / "calibrated" / "cases.csv").read_bytes() == (audited.out / "calibrated" / "cases.csv").read_bytes()


def test_progress_of_every_step_grows_to_its_end(made, tmp_path):
    told: dict[str, list[float]] = {}
    audit_predictions(
        made / "P", made / "L", tmp_path / "out", cases=1,
        progress=lambda step, done, total, text: told.setdefault(step, []).append(done / total),
    )  # fmt: skip
    assert list(told) == ["evaluate", "calibrate", "quality", "report"]
    for shares in told.values():
        assert shares == sorted(shares)
        assert shares[-1] == 1
    assert len(told["evaluate"]) >= CASES


def cohort_of(folder, number):
    return cohorts.write_cohort(folder, number)


def test_few_patients_get_numbers_and_a_report_alone(tmp_path):
    cohort_of(tmp_path, 4)
    done = run(tmp_path / "P", tmp_path / "L", "--out", tmp_path / "out")
    assert done.exit_code == 0, done.output
    why = "to fit and check a calibrator takes at least 5 patients; there are 4."
    assert f"calibrate is left out: {why}" in text(done)
    told = (tmp_path / "out" / "NEXT.md").read_text()
    assert f"The step `calibrate` was skipped: {why}" in told
    assert "The step `quality` was skipped: intervals that hold 90% need at least 9 patients; got 4." in told
    assert "calibrate apply" not in told
    assert not (tmp_path / "out" / "calibrator.json").exists()
    assert (tmp_path / "out" / "report.html").exists()


def test_too_few_patients_for_intervals_still_get_a_calibrator(tmp_path):
    cohort_of(tmp_path, 6)
    found = audit_predictions(tmp_path / "P", tmp_path / "L", tmp_path / "out", cases=0)
    assert list(found.skipped) == ["quality"]
    assert found.quality is None
    assert found.calibrator.exists()


def test_cases_that_are_gone_take_calibrator_and_quality_along(folder):
    for i in range(4, CASES):
        (folder / "P" / f"case_{i}.nii.gz").unlink()
    found = audit_predictions(folder / "P", folder / "L", folder / "audit", cases=0)
    assert list(found.skipped) == ["calibrate", "quality"]
    left = {path.name for path in (folder / "audit").iterdir()}
    assert not left & {"calibrator.json", "quality.json", "calibrated"}


def test_where_no_calibrator_helps_none_is_kept(folder, monkeypatch):
    """Labels drawn from the probabilities: there is nothing to mend."""
    for i in range(CASES):
        generator = np.random.default_rng(i)
        p = generator.dirichlet(np.ones(3), (12, 12, 12)).astype(np.float32)
        labels = (generator.random((12, 12, 12, 1)) > p.cumsum(-1)).sum(-1).clip(max=2).astype(np.uint8)
        cohorts.save(folder / "P" / f"case_{i}.nii.gz", p)
        cohorts.save(folder / "L" / f"case_{i}.nii.gz", labels)
    done = run(folder / "P", folder / "L", "--out", folder / "audit", "--cases", 1)
    assert done.exit_code == 0, done.output
    assert "no candidate lowers the ACE without a cost: nothing is changed." in text(done)
    told = (folder / "audit" / "NEXT.md").read_text()
    assert "The step `calibrate` was skipped: no candidate" in told
    assert "--calibrator" not in told
    assert not (folder / "audit" / "calibrator.json").exists()
    assert segcal.load_quality(folder / "audit" / "quality.json").options.calibrator_fingerprint is None
    calls = all_calls(monkeypatch)
    assert run(folder / "P", folder / "L", "--out", folder / "audit", "--cases", 1).exit_code == 0
    assert numbers(calls) == {"measured": 0, "fitted": 0, "learned": 0, "reported": 0}


def test_maps_of_zeros_and_ones_are_measured_and_not_calibrated(tmp_path):
    for i in range(CASES):
        _, labels = cohorts.make_case(i)
        cohorts.save(tmp_path / "P" / f"case_{i}.nii.gz", np.eye(3, dtype=np.float32)[cohorts.make_case(i + 50)[1]])
        cohorts.save(tmp_path / "L" / f"case_{i}.nii.gz", labels)
    found = audit_predictions(tmp_path / "P", tmp_path / "L", tmp_path / "out", cases=0)
    assert (
        found.skipped["calibrate"] == "the maps of 10 cases hold only zeros and ones, which no calibrator can improve."
    )


def test_predictions_without_a_mistake_are_not_calibrated(tmp_path, monkeypatch):
    """No temperature is best then; that is a property of the data, and no failure."""
    monkeypatch.setattr(planning, "CANDIDATES", QUICK[:1])
    for i in range(CASES):
        labels = cohorts.make_case(i)[1]
        cohorts.save(tmp_path / "P" / f"case_{i}.nii.gz", (0.1 + 0.7 * np.eye(3)[labels]).astype(np.float32))
        cohorts.save(tmp_path / "L" / f"case_{i}.nii.gz", labels)
    done = run(tmp_path / "P", tmp_path / "L", "--out", tmp_path / "out", "--cases", 0)
    assert done.exit_code == 0, done.output
    assert "calibrate is left out: no calibrator could be fitted: no finite fit is best" in text(done)


def fail(message):
    """A function that raises the error of a step."""

    def step(*arguments, **options):
        raise SegcalError(message)

    return step


@pytest.mark.parametrize(("step", "function"), [("calibrate", "fit_calibrator"), ("quality", "fit_quality")])
def test_a_step_that_fails_is_not_skipped(folder, monkeypatch, step, function):
    """The other steps are done, but the exit code tells scripts that something is wrong."""
    arguments = [folder / "P", folder / "L", "--out", folder / "new", "--cases", 0]
    with monkeypatch.context() as patch:
        patch.setattr(work, function, fail("the step must work; it does not."))
        done = run(*arguments, "--json")
        audit = audit_predictions(folder / "P", folder / "L", folder / "new", cases=0)
    assert done.exit_code == 1
    assert f"{step} failed: the step must work; it does not." in text(done)
    content = json.loads(done.stdout)
    assert (content["skipped"], content["failed"]) == ({}, {step: "the step must work; it does not."})
    assert (audit.skipped, audit.failed) == (content["skipped"], content["failed"])
    assert f"The step `{step}` failed: the step must work" in (folder / "new" / "NEXT.md").read_text()
    assert (folder / "new" / "report.html").exists()
    assert (folder / "new" / "quality.json").exists() == (step == "calibrate")
    assert run(*arguments).exit_code == 0  # the step is tried again


def test_logits_that_no_calibrator_can_take_make_the_audit_fail(tmp_path):
    """Logits of minus infinity are probabilities of 0: they are measured, but not calibrated."""
    for i in range(CASES):
        p, labels = cohorts.make_case(i)
        logits = np.log(p)
        logits[0, 0, 0, (labels[0, 0, 0] + 1) % 3] = -np.inf
        cohorts.save(tmp_path / "P" / f"case_{i}.nii.gz", logits)
        cohorts.save(tmp_path / "L" / f"case_{i}.nii.gz", labels)
    done = run(tmp_path / "P", tmp_path / "L", "--out", tmp_path / "out", "--cases", 0, "--logits")
    assert done.exit_code == 1
    assert "calibrate failed: logits must be finite numbers to fit a calibrator" in text(done)
    assert f"{CASES} cases audited, 0 failed" in text(done)


def test_label_maps_alone_are_refused(tmp_path):
    for i in range(6):
        _, labels = cohorts.make_case(i)
        for name in "PL":
            cohorts.save(tmp_path / name / f"case_{i}.nii.gz", labels)
    with pytest.raises(SegcalError, match="looks like a label map"):
        audit_predictions(tmp_path / "P", tmp_path / "L", tmp_path / "out")


def test_files_of_the_audit_that_are_spoilt_are_made_again(folder):
    audit_predictions(folder / "P", folder / "L", folder / "audit", cases=0)
    whole = {name: (folder / "audit" / name).read_bytes() for name in ("calibrator.json", "quality.json")}
    for name in (*whole, "audit.json", "calibrated/evaluation.npz"):
        (folder / "audit" / name).write_text('{"seconds for each case": []}')
    found = audit_predictions(folder / "P", folder / "L", folder / "audit", cases=0)
    assert found.skipped == {}
    assert {name: (folder / "audit" / name).read_bytes() for name in whole} == whole


def test_a_broken_file_is_told_and_stops_nothing(folder):
    (folder / "P" / "case_2.nii.gz").write_bytes(b"nothing")
    done = run(folder / "P", folder / "L", "--out", folder / "audit", "--cases", 1)
    assert done.exit_code == 1
    assert "case_2: FileError" in text(done)
    assert f"{CASES - 1} cases audited, 1 failed" in text(done)
    told = (folder / "audit" / "NEXT.md").read_text()
    assert f"1 case failed; `{folder / 'audit' / 'before' / 'failures.csv'}` says why." in told
    assert (folder / "audit" / "quality.json").exists()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("nowhere", "L"), "nowhere does not exist"),
        (("P", "nowhere"), "nowhere does not exist"),
        (("empty", "L"), "empty holds no files"),
        (("P", "empty"), "empty holds no files"),
        (("P",), "LABELS must be given, as `segcal audit MAPS LABELS --out DIR`"),
        (("nowhere",), "predictions must be a folder of maps or a model folder of nnU-Net"),
        (("P", "L", "--images", "nowhere"), "images must be a folder"),
        (("P", "L", "--patients", "("), "patients must be 'none', a .csv file or a regular expression"),
        (("P", "L", "--class-names", "one,two"), "--class-names must name every label"),
    ],
)
def test_what_cannot_be_is_one_sentence_and_nothing_is_written(made, tmp_path, arguments, said):
    (tmp_path / "empty").mkdir()
    words = [tmp_path / word if word in ("empty", "nowhere") else made / word if word in "PL" else word
             for word in arguments]  # fmt: skip
    done = run(*words, "--out", tmp_path / "out")
    assert done.exit_code == 2, done.output
    assert said in text(done)
    assert not (tmp_path / "out").exists()


def test_results_stay_outside_of_what_they_are_made_from(made):
    with pytest.raises(ConfigError, match="must lie outside of the predictions"):
        audit_predictions(made / "P", made / "L", made / "P" / "audit")


def test_two_audits_do_not_write_one_folder(made, audited):
    from segcal._io.files import locked

    with locked(audited.out / ".lock", audited.out), pytest.raises(ConfigError, match="written by another process"):
        audit_predictions(made / "P", made / "L", audited.out)


def test_an_image_that_is_not_there_costs_the_picture_alone(folder):
    (folder / "images").mkdir()
    done = run(folder / "P", folder / "L", "--out", folder / "audit", "--cases", 1, "--images", folder / "images")
    assert done.exit_code == 0, done.output
    assert "cannot be shown upon its image" in text(done)
    assert "worst by DSC" in (folder / "audit" / "report.html").read_text(encoding="utf-8")


def commands_of(path: Path) -> list[list[str]]:
    blocks = re.findall(r"^```sh\n(.*?)^```$", path.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    return [shlex.split(line) for block in blocks for line in block.splitlines()]


def test_the_commands_of_next_md_work_as_they_stand(folder, monkeypatch):
    """In a folder with a space in its name, and with options to pass on."""
    home = folder / "my work"
    home.mkdir()
    monkeypatch.chdir(home)
    for name, target in (("NEW_MAPS", "P"), ("OTHER_MAPS", "P")):
        Path(name).symlink_to(folder / target)
    names = "background,inner part,outer part"
    assert run(folder / "P", folder / "L", "--out", "my audit", "--class-names", names, "--cases", 0).exit_code == 0
    commands = commands_of(Path("my audit/NEXT.md"))
    known = app.registered_commands
    assert [words[1] for words in commands] == [
        "calibrate", "decide", "quality", "review", "review", "evaluate", "compare",
    ]  # fmt: skip
    for words in commands:
        if words[1] == "review" and "review" not in {each.name or each.callback.__name__ for each in known}:
            continue
        if words[1] != "review":  # which serves until it is stopped
            done = CliRunner().invoke(app, words[1:])
            assert done.exit_code == 0, (words, done.output)
    assert len(list(Path("calibrated-maps").glob("*.nii.gz"))) == CASES
    assert "outer part" in Path("decided/decisions.csv").read_text()
    assert Path("queue/queue.csv").exists()
    compared = Path("comparison/comparison.csv").read_text()
    assert all(name in compared for name in ("before", "calibrated", "other"))


def test_logits_and_overlapping_classes_are_passed_on(tmp_path):
    for i in range(6):
        p, labels = cohorts.make_case(i)
        cohorts.save(tmp_path / "P" / f"case_{i}.nii.gz", np.log(p))
        cohorts.save(tmp_path / "L" / f"case_{i}.nii.gz", labels)
    how = ("--logits", "--sigmoid", "--ignore-index", 255)
    done = run(tmp_path / "P", tmp_path / "L", "--out", tmp_path / "out", "--cases", 0, *how)
    assert done.exit_code == 0, done.output
    by_verb = {words[1]: words for words in commands_of(tmp_path / "out" / "NEXT.md")}
    assert "--logits" in by_verb["calibrate"]
    assert {"--logits", "--sigmoid"} <= set(by_verb["decide"])
    assert by_verb["evaluate"][-6:-2] == ["--logits", "--sigmoid", "--ignore-index", "255"]


def test_logits_with_regions_are_calibrated(tmp_path):
    """The temperature is that of the classes without regions: 0.5 makes such logits, of a factor 2, right."""
    for i in range(6):
        generator = np.random.default_rng(i)
        p = generator.dirichlet(np.ones(4), cohorts.SHAPE)
        labels = (generator.random((*cohorts.SHAPE, 1)) > p.cumsum(-1)).sum(-1).clip(max=3).astype(np.uint8)
        cohorts.save(tmp_path / "P" / f"case_{i}.nii.gz", (np.log(p) / 2).astype(np.float32))
        cohorts.save(tmp_path / "L" / f"case_{i}.nii.gz", labels)
    done = run(tmp_path / "P", tmp_path / "L", "--out", tmp_path / "out", "--cases", 1, "--logits", "--regions", "kits")
    assert done.exit_code == 0, done.output
    assert "calibrate is left out" not in text(done)
    nll = {row["calibrator"]: float(row["nll"]) for row in rows(tmp_path / "out" / "candidates.csv")}
    assert nll["temperature"] < nll["as it is"]
    fitted = fit_calibrator(
        tmp_path / "P", tmp_path / "L", tmp_path / "c.json", method="temperature", folds=0,
        options=segcal.ReadOptions(logits=True),
    )  # fmt: skip
    assert fitted.calibrator.temperature == pytest.approx(0.5, rel=0.07)
    loaded = segcal.load_calibrator(tmp_path / "out" / "calibrator.json")
    assert (loaded.classes, loaded.inputs) == (4, "logits")


def test_beyond_the_patients_that_are_tried_all_cases_are_checked(made, tmp_path, monkeypatch):
    """With very many patients, candidates are tried on some; the report is on all, each case by what never saw it."""
    monkeypatch.setattr(planning, "chosen_patients", lambda names, rule: list(names)[:6])
    found = audit_predictions(made / "P", made / "L", tmp_path / "out", cases=0)
    assert len(found.calibrated.cases) == CASES
    folds = rows(tmp_path / "out" / "calibrated" / "folds.csv")
    assert len(folds) == CASES
    assert len({row["fold"] for row in folds}) == 5
    assert found.comparison.cases == CASES
