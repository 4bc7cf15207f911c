"""The time of a training step with the calibration term against one without, steps taken in turns.

    python benchmarks/training_step.py --data folder-of-Task04_Hippocampus [--steps 150]

On the network, patches and images of the hippocampus study, whose results are those of `segcal study run hippocampus`.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from itertools import cycle
from pathlib import Path

import torch

from measure import write_rows
from segcal.datasets import open_dataset
from segcal.study import make_plan, read_study
from segcal.training.config import RunConfig, make_config
from segcal.training.data import patch_loader
from segcal.training.distributed import Processes
from segcal.training.inference import build_network
from segcal.training.preprocessing import PreparedStore


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=150, help="timed of each kind")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        plan = make_plan(read_study("hippocampus"), temporary, data=[str(arguments.data)])
        config = next(iter(plan.runs.values())).config
        write_rows("training_step", step_ratios(config, Path(temporary), arguments.steps))


def step_ratios(config: RunConfig, prepared: Path, steps: int) -> list[dict[str, object]]:
    """Median time of a training step with each loss over that of Dice + CE, steps taken in turns.

    A step is all that the loop does: cut and alter a batch of patches, forward, backward, update.
    """
    dataset = open_dataset(config.data.dataset, config.data.root)
    losses = {
        method: make_config(dataset="decathlon", root=config.data.root, method=method).loss.build()
        for method in ("dice-ce", "hard-ace", "soft-ace")
    }
    network = build_network(config, dataset)
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-5)
    alone = Processes(0, 1, torch.device("cpu"))
    store = PreparedStore(prepared, dataset, config.data)
    loader, _ = patch_loader(dataset.cases, store, config, alone)
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
