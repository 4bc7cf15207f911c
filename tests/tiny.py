"""Trainings that take a second: a small network, small patches, few epochs."""

from __future__ import annotations

from pathlib import Path

import layouts
import torch

from segcal.datasets import open_dataset
from segcal.training.checkpoint import BEST, save_checkpoint
from segcal.training.config import RunConfig, make_config
from segcal.training.inference import build_network
from segcal.training.runs import remember

NETWORK = 'network.options={init_filters=4, blocks_down=[1, 1], norm="BATCH", dsdepth=2}'


def changes(*, epochs: int = 1, patch: tuple[int, int, int] = (16, 16, 4), more: tuple[str, ...] = ()) -> list[str]:
    """What `--set` takes; validation after every epoch."""
    return [
        NETWORK,
        f"data.patch={list(patch)}",
        f"training.epochs={epochs}",
        "training.validate_every=1",
        "training.learning_rate=0.01",
        *more,
    ]


def tiny_config(dataset: str, root: Path, *, method: str = "soft-ace", **options) -> RunConfig:
    return make_config(dataset=dataset, root=root, method=method, changes=changes(**options))


def untrained_run(folder: Path) -> Path:
    """`folder/run` as `train` leaves it, but for the training; of images of one channel and three classes."""
    dataset = open_dataset("decathlon", layouts.write_decathlon(folder / "data"))
    config = tiny_config("decathlon", dataset.root, patch=(8, 8, 4)).resolved(dataset)
    run = folder / "run"
    run.mkdir()
    config.save(run / "config.toml")
    remember(run, dataset)
    torch.manual_seed(0)
    save_checkpoint(run / BEST, {"network": build_network(config, dataset).state_dict()})
    return run
