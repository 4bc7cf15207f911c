"""Patches for training: which, where and how altered follows from seed, epoch and index alone.

So an epoch is the same whether the run was interrupted before it or not, and however many processes draw.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from monai import transforms
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from segcal._io.ending import start_worker
from segcal.datasets import DataCase
from segcal.errors import LARGEST_SEED
from segcal.training.config import RunConfig
from segcal.training.distributed import Processes
from segcal.training.preprocessing import PreparedCase, PreparedStore

FOREGROUND_SHARE = 0.5  # of patches drawn around a labeled voxel


class Patches(Dataset[tuple[Tensor, Tensor]]):
    """Item (epoch, i) is a patch of case i (modulo the cases): image (channel, x, y, z) and class indices.

    Of several raters one is drawn for each patch; or labels are the share of raters who chose each class, (class, x, y,
    z), of all cases where one has several raters.
    """

    def __init__(self, cases: Sequence[DataCase], store: PreparedStore, config: RunConfig) -> None:
        self.cases, self.store, self.config = cases, store, config
        self.soft = config.data.raters == "mean" and any(case.more_labels for case in cases)

    def __getitem__(self, where: tuple[int, int]) -> tuple[Tensor, Tensor]:
        epoch, index = where
        data = self.config.data
        random = np.random.default_rng([self.config.seed, 1, epoch, index])
        prepared = self.store.get(self.cases[index % len(self.cases)])
        assert data.patch is not None  # resolved
        assert prepared.labels is not None  # training cases have them
        start = patch_start(prepared, data.patch, random, around_foreground=data.sampling == "foreground")
        image = torch.from_numpy(cut_patch(prepared.image, start, data.patch))
        drawn = prepared.labels if prepared.labels.ndim == 4 else prepared.labels[None]
        if len(drawn) > 1 and not self.soft:
            drawn = drawn[(rater := int(random.integers(len(drawn)))) : rater + 1]
        labels = torch.from_numpy(cut_patch(drawn, start, data.patch))
        flat = data.patch[2] == 1
        alter = augmentation(data.augmentation or "none", data.patch[:2] if flat else data.patch)
        alter.set_random_state(seed=int(random.integers(LARGEST_SEED)))
        if flat:
            image, labels = image[..., 0], labels[..., 0]
        altered: Any = alter({"image": image, "labels": labels.float()})
        image, labels = (altered[key].as_subclass(Tensor) for key in ("image", "labels"))  # not MONAI's, which is slow
        if flat:
            image, labels = image[..., None], labels[..., None]
        image, classes = image.float().contiguous(), labels.round().to(torch.uint8)
        if not self.soft:
            return image, classes[0]
        places = torch.arange(len(self.store.dataset.classes), dtype=torch.uint8)
        return image, (classes[:, None] == places[:, None, None, None]).float().mean(0)


def patch_start(
    prepared: PreparedCase, patch: Sequence[int], random: np.random.Generator, *, around_foreground: bool
) -> list[int]:
    """First voxel of a patch along each axis; negative where the patch is larger than the image."""
    shape = prepared.image.shape[1:]
    starts = []
    center = None
    if around_foreground and len(prepared.foreground) and random.random() < FOREGROUND_SHARE:
        center = prepared.foreground[random.integers(len(prepared.foreground))]
    for axis, (size, width) in enumerate(zip(shape, patch, strict=True)):
        if size <= width:
            starts.append(-((width - size) // 2))
        elif center is None:
            starts.append(int(random.integers(size - width + 1)))
        else:
            starts.append(int(min(max(center[axis] - width // 2, 0), size - width)))
    return starts


def cut_patch(values: NDArray[Any], start: Sequence[int], patch: Sequence[int]) -> NDArray[Any]:
    """(channel, x, y, z) of a patch; zeros where it reaches beyond the image."""
    result = np.zeros((len(values), *patch), values.dtype)
    inside, into = [], []
    for first, width, size in zip(start, patch, values.shape[1:], strict=True):
        low, high = max(first, 0), min(first + width, size)
        inside.append(slice(low, high))
        into.append(slice(low - first, high - first))
    result[:, *into] = values[:, *inside]
    return result


@lru_cache(maxsize=4)
def augmentation(name: str, patch: tuple[int, ...]) -> transforms.Compose:
    """The paper's random changes of patches of three axes, or the same of two, by MONAI."""
    both, modes = ("image", "labels"), ("bilinear", "nearest")
    if name == "none":
        return transforms.Compose([])
    if name == "affine":
        affine = transforms.RandAffined(
            both,
            prob=0.5,
            rotate_range=(0.1,) * (3 if len(patch) == 3 else 1),
            shear_range=(0.1,) * len(patch),
            translate_range=tuple(0.1 * width for width in patch),
            scale_range=(0.1,) * len(patch),
            mode=modes,
            padding_mode="zeros",
        )
        return transforms.Compose([affine])
    turn, linear = math.radians(15), "trilinear" if len(patch) == 3 else "bilinear"
    return transforms.Compose(
        [
            transforms.RandZoomd(both, prob=0.3, min_zoom=0.7, max_zoom=1.5, mode=(linear, "nearest-exact")),
            transforms.RandRotated(both, turn, turn, turn, prob=0.3, mode=modes, padding_mode="zeros"),
            transforms.RandGaussianNoised("image", prob=0.2, std=0.1),
            transforms.RandGaussianSmoothd("image", (0.5, 1.15), (0.5, 1.15), (0.5, 1.15), prob=0.2),
            transforms.RandAdjustContrastd("image", prob=0.3, gamma=(0.7, 1.5)),
            transforms.RandFlipd(both, prob=0.5, spatial_axis=0),
        ]
    )


class EpochOrder(Sampler[tuple[int, int]]):
    """The items of an epoch in random order, those of this process; as many for each, the first ones again if need be.

    Set `epoch` before iterating.
    """

    def __init__(self, items: int, seed: int, batch_size: int, processes: Processes) -> None:
        self.items, self.seed, self.processes = items, seed, processes
        together = batch_size * processes.world
        self.total = -(-items // together) * together  # whole batches: a batch of one would spoil batch norm
        self.epoch = 0

    def __iter__(self) -> Iterator[tuple[int, int]]:
        order = np.random.default_rng([self.seed, 0, self.epoch]).permutation(self.items)
        filled = np.resize(order, self.total).tolist()
        return iter([(self.epoch, index) for index in self.processes.share(filled)])

    def __len__(self) -> int:
        return self.total // self.processes.world


def patch_loader(
    cases: Sequence[DataCase], store: PreparedStore, config: RunConfig, processes: Processes
) -> tuple[DataLoader[tuple[Tensor, Tensor]], EpochOrder]:
    """Batches of patches, and the order whose epoch is to be set."""
    training = config.training
    order = EpochOrder(len(cases) * training.patches_per_case, config.seed, training.batch_size, processes)
    loader = DataLoader(
        Patches(cases, store, config),
        batch_size=training.batch_size,
        sampler=order,
        num_workers=training.loader_workers,
        multiprocessing_context="spawn" if training.loader_workers else None,
        persistent_workers=bool(training.loader_workers),
        worker_init_fn=_start_loader,
        pin_memory=processes.device.type == "cuda",
    )
    return loader, order


def _start_loader(number: int) -> None:
    start_worker()
