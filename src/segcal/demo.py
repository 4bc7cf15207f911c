"""A minute's proof: the same small network trained with and without the calibration term.

The images are made here: discs of low contrast in noise, with a label drawn at random near the
boundary, so that a network that knows what it knows should be unsure there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from segcal.binning import Binning
from segcal.collect import bin_statistics
from segcal.losses import SegmentationLoss
from segcal.metrics import ace, ece, mce
from segcal.overlap import OverlapCounts, dice

SIZE = 64
METHODS = {
    "Dice + CE": SegmentationLoss(ace=0),
    "Dice + CE + hard ACE": SegmentationLoss(binning=Binning(20)),
    "Dice + CE + soft ACE": SegmentationLoss(binning=Binning(20, kernel="triangular")),
}


class Result(NamedTuple):
    """Means over held-out images and repeats, foreground only."""

    method: str
    dice: float
    ace: float
    ece: float
    mce: float


def run_demo(
    *, steps: int = 200, repeats: int = 3, seed: int = 0, progress: Callable[[str], None] = lambda _: None
) -> list[Result]:
    """Train networks with each method on the same images and measure them on images none of them saw.

    Each number is the mean over `repeats` sets of images and networks.
    """
    results = []
    for method, loss in METHODS.items():
        measured = []
        for repeat in range(repeats):
            progress(f"{method}: network {repeat + 1} of {repeats}")
            images, labels = _images(16, seed + 2 * repeat)
            torch.manual_seed(seed + repeat)
            network = nn.Sequential(nn.Conv2d(1, 16, 7, padding=3), nn.ReLU(), nn.Conv2d(16, 2, 7, padding=3))
            optimizer = torch.optim.Adam(network.parameters(), lr=1e-2)
            schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
            for _ in range(steps):
                batch = torch.randint(len(images), (4,))
                optimizer.zero_grad()
                loss(network(images[batch]), labels[batch]).backward()
                optimizer.step()
                schedule.step()
            measured.append(_measure(network, *_images(24, seed + 2 * repeat + 1)))
        results.append(Result(method, *torch.tensor(measured).mean(0).tolist()))
    return results


def _images(number: int, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    axis = torch.arange(SIZE, dtype=torch.float32)
    centres = SIZE * (0.3 + 0.4 * torch.rand(number, 2, 1, 1, generator=generator))
    radii = SIZE * (0.1 + 0.15 * torch.rand(number, 1, 1, generator=generator))
    distance = ((axis[:, None] - centres[:, 0]) ** 2 + (axis[None, :] - centres[:, 1]) ** 2).sqrt()
    inside = torch.sigmoid((radii - distance) / 1.5)  # the true probability of the label
    labels = torch.rand(inside.shape, generator=generator) < inside
    images = inside + 0.6 * torch.randn(inside.shape, generator=generator)
    return images[:, None], labels.long()


@torch.no_grad()
def _measure(network: nn.Module, images: Tensor, labels: Tensor) -> tuple[float, ...]:
    probabilities = network(images).softmax(1)
    stats = bin_statistics(probabilities, labels).select(classes=[1])
    overlap = dice(OverlapCounts.of_classes(probabilities.flatten(2), labels.flatten(1)))[:, 1]
    return tuple(float(values.nanmean()) for values in (overlap, ace(stats), ece(stats), mce(stats)))
