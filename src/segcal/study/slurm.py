"""A study on a cluster with SLURM: a script for sbatch, an array with one job for each run."""

from __future__ import annotations

import math
import os
import re
import shlex
from collections.abc import Sequence
from pathlib import Path

from segcal.errors import ConfigError
from segcal.study.plan import Plan
from segcal.study.work import LOGS

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
# A job that ends early (time, preemption) may be submitted again: a run resumes from its last checkpoint, one that is
# done ends at once, and one that another job works on is left to it. Change the lines above to what
# your cluster wants (partition, account). After all jobs, with the number JOB that sbatch said:
#
#   sbatch --dependency=afterany:JOB {report}

set -eu
export SRUN_CPUS_PER_TASK="${{SLURM_CPUS_PER_TASK:-1}}" # newer versions of srun do not take it from above
runs=(
{runs}
)
srun segcal study run {out} --only "${{runs[$SLURM_ARRAY_TASK_ID]}}"
"""


def slurm_script(plan: Plan, out: Path, *, open_runs: Sequence[str], hours: float | None) -> str:
    """A script for sbatch that does the open runs of the study in the folder `out`, each on a GPU of its own.

    `hours` is what the longest run is estimated to take; where it is None or NaN, the cluster's own limit holds.
    Ensembles are done after the other runs, by the job that reports.
    """
    if not open_runs:
        raise ConfigError(f"the study {plan.study.name} must have runs to do; there is nothing to do.")
    ensembles = {name for name, run in plan.runs.items() if run.members}
    trained = [name for name in open_runs if name not in ensembles]
    later = len(trained) < len(open_runs) and bool(trained)
    open_runs = trained or open_runs
    out = out.absolute()
    report = shlex.join(["segcal", "study", "run" if later else "report", os.fspath(out)])
    logs = os.fspath(out / LOGS)
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
        report=f"{'--gres=gpu:1 ' * later}--wrap {shlex.quote(report)}",
        runs="\n".join(f"  {shlex.quote(name)}" for name in open_runs),
        out=shlex.quote(os.fspath(out)),
    )


def _time(hours: float | None) -> list[str]:
    if hours is None or math.isnan(hours):
        return []
    return [f"--time={max(1, math.ceil(MARGIN * hours))}:00:00"]
