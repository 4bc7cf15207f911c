"""The paper's methods on a real task, small: the Decathlon's hippocampus on two CPU cores, about five minutes a run.

    SEGCAL_DATA=folder-of-Task04_Hippocampus python benchmarks/hippocampus.py --out folder [--seed 0]

120 cases to train, 20 to validate, 60 to test, by a split file. A comparison and a report are written to
the folder. Stopped and started again, it goes on. Also measured: the time of a training step with the
calibration term against one without, in turns.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from itertools import cycle
from pathlib import Path

import torch

from measure import write_rows
from segcal import compare
from segcal.config import METHODS, RunConfig, make_config
from segcal.datasets import make_split, open_dataset
from segcal.datasets.splits import Split, write_split
from segcal.distributed import Processes
from segcal.inference import build_network
from segcal.prepare import PreparedStore
from segcal.report import build_report
from segcal.runs import evaluate_run, load_run
from segcal.scaling import Temperature
from segcal.tables import comparison_tables, to_markdown, write_comparison
from segcal.training import train
from segcal.training.data import patch_loader


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--epochs", type=int, default=25)
    parser.add_argument("--steps", type=int, default=20, help="training steps timed of each kind; 0: none")
    parser.add_argument(
        "--methods", nargs="*", default=list(METHODS), help="only these; two processes can share the work"
    )
    arguments = parser.parse_args()
    root = Path(os.environ["SEGCAL_DATA"]) / "Task04_Hippocampus"
    out = arguments.out / f"seed{arguments.seed}"
    out.mkdir(parents=True, exist_ok=True)
    split = make_hippocampus_split(root, out / "split.txt")
    evaluations = {}
    for method in arguments.methods:
        config = make_config(
            dataset="decathlon", root=root, method=method, preset="small",
            changes=[
                f"seed={arguments.seed}", f"training.epochs={arguments.epochs}", f"data.split='{split}'",
                "data.patch=[40, 56, 40]",  # about the size of an image
            ],
        )  # fmt: skip
        start = time.perf_counter()
        train(config, out / method, prepared=arguments.out / "prepared")
        print(f"{method}: trained in {time.perf_counter() - start:.0f} s", flush=True)
        run = load_run(out / method)
        evaluations[method] = evaluate_run(run, out / method / "test").evaluation
        if method == "dice-ce":
            temperature = Temperature().fit(list(run.logits_and_labels("validation")))
            temperature.save(out / method / "temperature.json")
            print(f"temperature {temperature.temperature:.3f}", flush=True)
            evaluations["dice-ce, temperature"] = evaluate_run(
                run, out / method / "test-temperature", calibrator=temperature
            ).evaluation
    comparison = compare(evaluations)
    write_comparison(comparison, out)
    build_report(evaluations, out / "report.html", title="Hippocampus")
    print(to_markdown(comparison_tables(comparison)[0]))
    if arguments.steps:
        ratios = step_ratios(config, arguments.out / "prepared", arguments.steps)
        write_rows("training_step", ratios)


def make_hippocampus_split(root: Path, path: Path) -> Path:
    """120, 20 and 60 cases, in the order of the drawn default split."""
    dataset = open_dataset("decathlon", root)
    drawn = make_split(dataset, seed=0)
    names = [*drawn.train, *drawn.validation, *drawn.test]
    write_split(Split(tuple(names[:120]), tuple(names[120:140]), tuple(names[140:200])), path)
    return path


def step_ratios(config: RunConfig, prepared: Path, steps: int) -> list[dict[str, object]]:
    """Median time of a training step with each loss over that of Dice + CE, steps taken in turns.

    A step is all that the loop does: cut and alter a batch of patches, forward, backward, update.
    """
    dataset = open_dataset(config.data.dataset, config.data.root)
    resolved = config.resolved(dataset)
    losses = {
        method: make_config(dataset="decathlon", root=config.data.root, method=method).loss.build()
        for method in ("dice-ce", "hard-ace", "soft-ace")
    }
    network = build_network(resolved, dataset)
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-5)
    alone = Processes(0, 1, torch.device("cpu"))
    store = PreparedStore(prepared, dataset, resolved.data)
    loader, _ = patch_loader(dataset.cases, store, resolved, alone)
    batches = cycle(loader)
    times: dict[str, list[float]] = {method: [] for method in losses}
    for _ in range(steps + 2):
        for method, loss in losses.items():
            start = time.perf_counter()
            images, labels = next(batches)
            terms = loss.terms(network(images), labels)
            optimizer.zero_grad(set_to_none=True)
            terms.total.backward()
            optimizer.step()
            times[method].append(time.perf_counter() - start)
    medians = {method: statistics.median(values[2:]) for method, values in times.items()}
    return [
        {"step": method, "seconds": round(value, 4), "ratio": round(value / medians["dice-ce"], 3)}
        for method, value in medians.items()
    ]


if __name__ == "__main__":
    main()
