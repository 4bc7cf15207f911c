"""A network on whole images: build it, slide it over them, measure what it says."""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Sequence
from difflib import get_close_matches
from typing import Any

import numpy as np
import torch
from monai.inferers import sliding_window_inference
from monai.networks import nets
from torch import Tensor, nn

from segcal.datasets import DataCase, Dataset
from segcal.errors import ConfigError
from segcal.evaluation.evaluation import Evaluation
from segcal.evaluation.options import Options, slabs_of
from segcal.evaluation.results import stack_cases
from segcal.evaluation.sums import CaseSums
from segcal.evaluation.voxels import measure_voxels, sums_of_case
from segcal.training.config import RunConfig
from segcal.training.distributed import Processes
from segcal.training.preprocessing import PreparedStore


def build_network(config: RunConfig, dataset: Dataset) -> nn.Module:
    """The network that the configuration names, from MONAI, for the channels and classes of the dataset.

    It has two axes where patches have a third length of 1: it sees pictures, or volumes slice by slice.
    """
    name = config.network.name
    found = getattr(nets, name, None)
    if not (inspect.isclass(found) and issubclass(found, nn.Module)):
        known = [other for other in dir(nets) if inspect.isclass(getattr(nets, other))]
        near = get_close_matches(name, known, 1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise ConfigError(f"network.name must be a network of monai.networks.nets; got {name!r}.{hint}")
    options = {key: tuple(value) if isinstance(value, list) else value for key, value in config.network.options.items()}
    flat = config.data.patch is not None and config.data.patch[2] == 1
    given = {
        "spatial_dims": 2 if flat else 3,
        "in_channels": len(dataset.channels),
        "out_channels": len(dataset.classes),
    }
    takes = inspect.signature(found).parameters
    try:
        network: nn.Module = found(**{key: value for key, value in given.items() if key in takes}, **options)
    except Exception as error:  # each network of MONAI refuses in its own way
        raise ConfigError(f"network.options must fit {name}; {error}.") from error
    if flat and "spatial_dims" not in takes:
        raise ConfigError(f"network.name must be a network that takes two axes, for pictures; {name} does not.")
    _check_patches(network, config)
    return Flat(network) if flat else network


class Flat(nn.Module):
    """A network of two axes for (case, channel, x, y, 1)."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, image: Tensor) -> Any:
        """What the network says, with the third axis again; a list of it under deep supervision."""
        found = self.network(image[..., 0])
        return found[..., None] if isinstance(found, Tensor) else [each[..., None] for each in found]


def _check_patches(network: nn.Module, config: RunConfig) -> None:
    """Networks that halve their input say by what its size must divide; both patches are flat, or neither."""
    patches = {key: getattr(config.data, key) for key in ("patch", "inference_patch")}
    if len({patch[2] == 1 for patch in patches.values() if patch}) > 1:
        told = " and ".join(str(list(patch)) for patch in patches.values() if patch)
        raise ConfigError(
            f"data.patch and data.inference_patch must both have a third length of 1, or neither; got {told}."
        )
    factor_of: Any = getattr(network, "shape_factor", None)
    if factor_of is None:
        return
    factors = [int(factor) for factor in factor_of()]
    if min(factors) < 1:
        raise ConfigError(f"network.options must give the network a level; it would divide its input by {factors}.")
    for key, whole in patches.items():
        patch = whole[: len(factors)]
        if any(width % factor for width, factor in zip(patch, factors, strict=True)):
            fitting = [factor * max(1, round(width / factor)) for width, factor in zip(patch, factors, strict=True)]
            raise ConfigError(
                f"data.{key} must be divisible by {factors} for this network; got {list(patch)}. "
                f"The nearest is {fitting}."
            )


def predict_logits(network: nn.Module, image: Tensor, config: RunConfig, device: torch.device) -> Tensor:
    """(class, x, y, z) logits of a prepared image: overlapping windows, blended with Gaussian weights."""
    network.eval()
    half = config.training.mixed_precision and device.type == "cuda"
    try:
        with torch.inference_mode(), torch.autocast(device.type, enabled=half):
            logits: Any = sliding_window_inference(
                image[None].to(device),
                config.data.inference_patch,
                sw_batch_size=1,
                predictor=network,
                overlap=config.data.inference_overlap,
                mode="gaussian",
            )
    except RuntimeError as error:  # torch has no class of its own for this on every device
        if not re.search("allocate memory|out of memory", str(error)):
            raise
        raise MemoryError(
            f"the image {tuple(image.shape)} with data.inference_patch = {list(config.data.inference_patch or ())} "
            f"needs more memory than there is on {device.type}"
        ) from error
    return torch.as_tensor(logits[0]).float().cpu()


def soften(logits: Tensor) -> Tensor:
    """Probabilities of (class, x, y, z) logits, in their place: of a large image there may be no room for both."""
    values = logits.contiguous()
    flat = values.flatten(1).numpy()  # torch itself lets nobody write to what was made in its inference mode
    for slab in slabs_of(flat):
        part = flat[:, slab]
        part[...] = torch.from_numpy(part).softmax(0).numpy()
    return values


def measuring_options(dataset: Dataset, config: RunConfig) -> Options:
    """Classes or regions as the dataset is evaluated; its names."""
    return Options(
        bins=config.evaluation.bins,
        logits=True,
        regions=dataset.regions,
        class_names=tuple(enumerate(dataset.classes)),
    )


def measure_logits(
    logits: Tensor, labels: np.ndarray[Any, Any], dataset: Dataset, options: Options, *, voxel_ml: float = math.nan
) -> CaseSums:
    """The sums of one case; labels are class indices on the grid of the logits."""
    truth = labels.reshape(-1)
    if dataset.regions is not None:
        # Regions are unions of values, not of indices.
        truth = np.array(dataset.values, np.uint8 if max(dataset.values) < 256 else np.int64)[truth]
    values = logits.flatten(1).numpy()
    slabs = (measure_voxels(values[:, slab], truth[slab], options) for slab in slabs_of(values))
    sums = sums_of_case(slabs, logits.shape[1:], voxel_ml=voxel_ml)
    assert sums is not None  # images have voxels
    return sums


def evaluate_prepared(
    network: nn.Module,
    cases: Sequence[DataCase],
    store: PreparedStore,
    dataset: Dataset,
    config: RunConfig,
    team: Processes,
) -> Evaluation:
    """An evaluation on the prepared grid, for validation while training; the same on every process."""
    options = measuring_options(dataset, config)
    mine = {}
    for case in team.share(list(cases)):
        prepared = store.get(case)
        logits = predict_logits(network, torch.from_numpy(np.array(prepared.image)), config, team.device)
        assert prepared.first_labels is not None  # validation cases have them
        mine[case.name] = measure_logits(logits, np.asarray(prepared.first_labels), dataset, options)
    everyone = {name: sums for part in team.gather(mine) for name, sums in part.items()}
    return stack_cases([case.name for case in cases], lambda name: (everyone[name], {}), options)
