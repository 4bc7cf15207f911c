"""Every calibrator on a trained run: fitted to its validation cases, measured on its test cases.

    python benchmarks/posthoc.py RUN [--root DATA] [--out results/posthoc-NAME.csv] [--methods ...]

Prints a Markdown table and writes it as CSV. The network is asked once for each case; logits of all cases are held in
memory, so this is for small data.
"""

from __future__ import annotations

import argparse
import csv
import time
from pathlib import Path

import torch

from segcal.calibrators import CALIBRATORS, Calibrator, make_calibrator
from segcal.comparison.comparison import compare
from segcal.evaluation.evaluation import Evaluation
from segcal.evaluation.results import stack_cases
from segcal.training.inference import measure_logits, measuring_options
from segcal.training.preprocessing import read_labels
from segcal.training.runs import Run, load_run

VARIANTS: dict[str, dict[str, object]] = {
    "temperature, one epoch": {"method": "temperature", "protocol": "one-epoch"},
    "temperature, ACE": {"method": "temperature", "objective": "ace"},
    "vector, ACE": {"method": "vector", "objective": "ace"},
    "local-temperature, ACE weighs 3": {"method": "local-temperature", "ace": 3.0},
    "local-temperature, NLL alone": {"method": "local-temperature", "ace": 0.0},
    "local-temperature, neighbors": {"method": "local-temperature", "dilations": (1, 2)},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--root", type=Path)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--methods", nargs="*", default=[*CALIBRATORS, *VARIANTS])
    arguments = parser.parse_args()
    run = load_run(arguments.run, root=arguments.root)
    validation = list(run.logits_and_labels("validation"))
    cases = run.cases("test")
    test = {case.name: (run.logits(case), read_labels(case, run.dataset)) for case in cases}
    evaluations = {"network": measured(run, test, None)}
    seconds = {"network": 0.0}
    for name in arguments.methods:
        settings = dict(VARIANTS.get(name, {"method": name}))
        start = time.perf_counter()
        calibrator = make_calibrator(str(settings.pop("method")), **settings).fit(validation)
        seconds[name] = time.perf_counter() - start
        evaluations[name] = measured(run, test, calibrator)
        print(f"{name}: {seconds[name]:.1f} s {calibrator.report}", flush=True)
    rows = table(evaluations, seconds)
    print("| " + " | ".join(rows[0]) + " |\n" + "| --- " * len(rows[0]) + "|")
    for row in rows:
        print("| " + " | ".join(row.values()) + " |")
    if arguments.out:
        with arguments.out.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)


def measured(run: Run, test: dict[str, tuple[torch.Tensor, object]], calibrator: Calibrator | None) -> Evaluation:
    """All test cases; decisions are taken on the network's logits where the calibrator changes none."""
    options = measuring_options(run.dataset, run.config)

    def sums(name: str) -> object:
        logits, labels = test[name]
        if calibrator is None:
            return measure_logits(logits, labels, run.dataset, options), {}
        return measure_logits(calibrator.transform(logits), labels, run.dataset, options), {}

    return stack_cases(list(test), sums, options)


def table(evaluations: dict[str, Evaluation], seconds: dict[str, float]) -> list[dict[str, str]]:
    comparison = compare(evaluations)
    rows = []
    for name in evaluations:
        find = {
            metric: comparison.find(name, metric=metric, average=average)
            for metric, average in ((name, "macro") for name in ("dice", "ace", "ece", "nll", "brier"))
        }
        micro = comparison.find(name, metric="ace", average="micro paper")
        change = "" if name == "network" else f" ({find['ace'].change:+.1%}{find['ace'].stars})"
        rows.append(
            {
                "method": name,
                "DSC": f"{find['dice'].value:.6f}",
                "macro-ACE": f"{find['ace'].value:.4f}{change}",
                "micro-ACE": f"{micro.value:.4f}{'' if name == 'network' else f' ({micro.change:+.1%}{micro.stars})'}",
                "macro-ECE": f"{find['ece'].value:.5f}",
                "NLL": f"{find['nll'].value:.5f}",
                "Brier": f"{find['brier'].value:.5f}",
                "fit (s)": f"{seconds[name]:.1f}",
            }
        )
    return rows


if __name__ == "__main__":
    main()
