"""Trainings that take a second: a small network, small patches, few epochs."""

from __future__ import annotations

from pathlib import Path

from segcal.config import RunConfig, make_config

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
