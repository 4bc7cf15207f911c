"""The script is run by bash with another srun, which tells what arrives."""

from __future__ import annotations

import os
import shlex
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from segcal.errors import ConfigError
from segcal.study.plan import make_plan, read_study
from segcal.study.slurm import slurm_script

RUNS = ["ACDC_17-dice-ce-seed0-0123", "ACDC_17-ce-seed0-4567", "BraTS_21-ce-seed0-89ab"]
STRANGE = 'a b/it\'s "$HOME" `x` {y} #1 50%'


@pytest.fixture
def plan(tmp_path, monkeypatch):
    monkeypatch.delenv("SEGCAL_DATA", raising=False)
    monkeypatch.chdir(tmp_path)
    return make_plan(read_study("paper"), tmp_path)


def script_of(plan, out="out", *, runs=RUNS, hours=None):
    return slurm_script(plan, Path(out), open_runs=runs, hours=hours)


def options_of(script):
    """What sbatch reads: the lines before the first command, words as a shell has them."""
    lines = script.splitlines()
    found = [shlex.split(line.removeprefix("#SBATCH ")) for line in lines if line.startswith("#SBATCH ")]
    assert all(len(words) == 1 for words in found)
    assert all(line.startswith("#") for line in lines[: len(found) + 1])
    return {word.partition("=")[0]: word.partition("=")[2] for (word,) in found}


def run_script(script, folder, task):
    """What srun is given by the job of a number."""
    place = folder / "bin"
    place.mkdir(exist_ok=True)
    fake = place / "srun"
    fake.write_text('#!/bin/bash\n[ "$SRUN_CPUS_PER_TASK" = 8 ] && printf \'%s\\0\' "$@"\n')
    fake.chmod(0o755)
    path = folder / "job.sh"
    path.write_text(script)
    subprocess.run(["bash", "-n", path], check=True)
    told = {"SLURM_ARRAY_TASK_ID": str(task), "SLURM_CPUS_PER_TASK": "8"}
    environment = os.environ | told | {"PATH": f"{place}:{os.environ['PATH']}"}
    done = subprocess.run(["bash", path], env=environment, capture_output=True, text=True)
    assert done.stderr == ""
    return done.stdout.split("\0")[:-1]


def test_each_job_does_its_run(plan, tmp_path):
    script = script_of(plan)
    for task, name in enumerate(RUNS):
        assert run_script(script, tmp_path, task) == ["segcal", "study", "run", f"{tmp_path}/out", "--only", name]


def test_strange_paths_survive(plan, tmp_path):
    script = script_of(plan, STRANGE)
    assert run_script(script, tmp_path, 1)[1:-2] == ["study", "run", f"{tmp_path}/{STRANGE}"]
    assert options_of(script)["--output"] == f"{tmp_path}/{STRANGE}/logs/slurm-%A_%a.txt".replace("50%", "50%%")


def test_the_last_job_reports(plan, tmp_path):
    script = script_of(plan, STRANGE)
    (line,) = (line for line in script.splitlines() if "--dependency" in line)
    words = shlex.split(line.removeprefix("#"))
    assert words[:3] == ["sbatch", "--dependency=afterany:JOB", "--wrap"]
    assert shlex.split(words[3]) == ["segcal", "study", "report", f"{tmp_path}/{STRANGE}"]


def test_what_a_job_asks_for(plan, tmp_path):
    options = options_of(script_of(plan))
    assert options == {
        "--job-name": "segcal-paper",
        "--array": "0-2",
        "--gres": "gpu:1",
        "--cpus-per-task": "8",
        "--mem": "64G",
        "--requeue": "",
        "--open-mode": "append",
        "--output": f"{tmp_path}/out/logs/slurm-%A_%a.txt",
    }
    assert options_of(script_of(plan, runs=RUNS[:1]))["--array"] == "0-0"


@pytest.mark.parametrize(("hours", "asked"), [(0.01, "1"), (0.5, "1"), (0.6, "2"), (188.2, "377")])
def test_twice_the_estimated_hours_are_asked_for(plan, hours, asked):
    assert options_of(script_of(plan, hours=hours))["--time"] == f"{asked}:00:00"


def test_an_unknown_time_is_left_to_the_cluster(plan):
    assert "--time" not in options_of(script_of(plan, hours=float("nan")))


def test_the_name_of_a_job_is_one_word(plan):
    named = replace(plan, study=replace(plan.study, name="my study's"))
    assert options_of(script_of(named))["--job-name"] == "segcal-my-study-s"


def test_nothing_to_do_is_said(plan):
    with pytest.raises(ConfigError, match="nothing to do"):
        script_of(plan, runs=[])


def test_a_script_that_is_run_by_hand_stops(plan, tmp_path):
    path = tmp_path / "job.sh"
    path.write_text(script_of(plan))
    environment = {name: value for name, value in os.environ.items() if name != "SLURM_ARRAY_TASK_ID"}
    done = subprocess.run(["bash", path], env=environment, capture_output=True, text=True)
    assert done.returncode != 0
    assert "SLURM_ARRAY_TASK_ID" in done.stderr
