"""What processes run that tests spawn: they import it by name, so it stands beside the tests, not in them."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed import destroy_process_group, init_process_group
from torch.nn.parallel import DistributedDataParallel

from segcal import Binning, SegmentationLoss

PROCESSES, STEPS = 2, 3


def make_network() -> nn.Module:
    torch.manual_seed(7)
    return nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 3, 3, padding=1)).double()


def make_batches() -> list[tuple[Tensor, Tensor]]:
    """One batch of four cases per step; each process takes its share."""
    torch.manual_seed(8)
    return [
        (torch.randn(2 * PROCESSES, 1, 8, 8, dtype=torch.float64), torch.randint(0, 3, (2 * PROCESSES, 8, 8)))
        for _ in range(STEPS)
    ]


def make_loss() -> SegmentationLoss:
    return SegmentationLoss(binning=Binning(6, kernel="triangular"))


def train_together(rank: int, folder: Path) -> None:
    """Train on this process's share of each batch; write the gradients of each step and the losses."""
    torch.set_num_threads(1)
    init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=PROCESSES)
    network, loss = DistributedDataParallel(make_network()), make_loss()
    optimizer = torch.optim.SGD(network.parameters(), lr=0.5)
    gradients, losses = [], []
    for images, labels in make_batches():
        share = slice(2 * rank, 2 * rank + 2)
        optimizer.zero_grad()
        value = loss(network(images[share]), labels[share])
        value.backward()
        gradients.append([parameter.grad.clone() for parameter in network.parameters()])
        losses.append(value.detach())
        optimizer.step()
    torch.save({"gradients": gradients, "losses": losses}, folder / f"{rank}.pt")
    destroy_process_group()


def train_under_torchrun(folder: Path, arguments: list[str]) -> None:
    """The command `segcal train` in one of torchrun's processes; each writes the weights that it ends with."""
    from segcal.cli import app
    from segcal.training import loop

    run = loop._Training.run

    def run_and_keep(training: loop._Training, progress: loop.Progress) -> loop.TrainedRun:
        done = run(training, progress)
        torch.save(training.network.state_dict(), folder / f"{training.team.rank}.pt")
        return done

    loop._Training.run = run_and_keep  # type: ignore[method-assign]
    app(arguments)


def idle_run(run, out):
    """As the study's `do_run`, with steps that only take time; the run's folder tells which process did it."""
    from segcal.study import work

    def execute(run, folder, prepared, tell):
        with (folder / "by.txt").open("a") as file:
            file.write(f"{os.getpid()}\n")
        for i in range(10):
            time.sleep(0.05)
            tell("training", i, 10)
        return {"fittings": [fitting.folder for fitting in run.fittings], "validation": work.CROSS_FITTED}

    work.execute = execute
    return work.do_run(run, out)


if __name__ == "__main__":
    train_under_torchrun(Path(sys.argv[1]), sys.argv[2:])
