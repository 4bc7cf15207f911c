"""A study on a cluster with SLURM: a script for sbatch with one job for each run."""

from __future__ import annotations

import math
import os
import re
import shlex
from collections.abc import Sequence
from pathlib import Path

from segcal.errors import ConfigError
from segcal.study.plan import Plan, shipped_studies

MARGIN = 2  # the hours asked for, times the estimate, which is not measured

_SCRIPT = """\
#!/bin/bash
{options}

# {title}
#
# {number}. Submit from a shell in which `segcal` runs, as
#
#   mkdir -p {logs} && sbatch THIS_SCRIPT
#
# A job that ends early (time, preemption) may be submitted again: a run goes on where it stopped, and one that is done
# ends at once. Change the lines above to what your cluster wants (partition, account). After all jobs, with the number
# JOB that sbatch said:
#
#   sbatch --dependency=afterany:JOB --wrap {results}

set -eu
export SRUN_CPUS_PER_TASK="${{SLURM_CPUS_PER_TASK:-1}}" # newer versions of srun do not take it from above
runs=(
{runs}
)
srun {command} --worker --only "${{runs[$SLURM_ARRAY_TASK_ID]}}"
"""


def slurm_script(
    plan: Plan, study: str, out: Path, *, data: Sequence[str], open_runs: Sequence[str], hours: float | None
) -> str:
    """A script for sbatch that does the open runs of a study, each on a GPU of its own.

    `study` and `data` are as on the command line; paths are made absolute. `hours` is what the longest run is estimated
    to take; where it is None or NaN, the cluster's own limit holds.
    """
    if not open_runs:
        raise ConfigError(f"the study {plan.study.name} must have runs to do; there is nothing to do.")
    logs = os.path.abspath(out / "logs")
    command = ["segcal", "study", study if study in shipped_studies() else os.path.abspath(study)]
    command += ["--out", os.path.abspath(out)]
    for item in data:
        command += ["--data", _absolute(item)]
    options = [
        f"--job-name=segcal-{re.sub(r'[^A-Za-z0-9._-]', '-', plan.study.name)}",
        f"--array=0-{len(open_runs) - 1}",
        "--gres=gpu:1",
        "--cpus-per-task=8",
        "--mem=64G",
        *_time(hours),
        "--requeue",
        "--open-mode=append",  # a job that is requeued keeps what it logged
        f"--output={shlex.quote(logs.replace('%', '%%') + '/slurm-%A_%a.txt')}",
    ]
    return _SCRIPT.format(
        options="\n".join(f"#SBATCH {option}" for option in options),
        title=" ".join(plan.study.config.title.split()),
        number=f"{len(open_runs)} run" + "s" * (len(open_runs) > 1),
        logs=shlex.quote(logs),
        results=shlex.quote(shlex.join([*command, "--results"])),
        runs="\n".join(f"  {shlex.quote(name)}" for name in open_runs),
        command=shlex.join(command),
    )


def _absolute(item: str) -> str:
    """NAME=FOLDER or FOLDER."""
    name, equals, folder = item.partition("=")
    return f"{name}={os.path.abspath(folder)}" if equals else os.path.abspath(item)


def _time(hours: float | None) -> list[str]:
    if hours is None or math.isnan(hours):
        return []
    return [f"--time={max(1, math.ceil(MARGIN * hours))}:00:00"]
