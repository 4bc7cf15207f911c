"""What a planned run costs before it runs.

Steps are counted as training takes them, and the network's operations layer by layer. Hours are these operations
divided by what a GPU is assumed to keep up: an estimate from arithmetic, not measured. Reading, preparing and altering
images, the loss, and measuring what the network says are not in it.

Where data are missing, the numbers of cases are the paper's.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import lru_cache
from statistics import fmean
from typing import Literal, NamedTuple

import torch
from torch.utils.flop_counter import FlopCounterMode

from segcal.datasets import DataCase, Dataset, known_dataset, make_split
from segcal.datasets.recipes import PLAIN, shape_and_spacing
from segcal.errors import ConfigError
from segcal.study.plan import Plan, PlannedRun
from segcal.training.config import RunConfig, Triple
from segcal.training.inference import build_network

GPU_TFLOPS = 25.0  # assumed, not measured: what an A100 keeps up in 3-D convolutions with mixed precision
BACKWARD = 2  # times the forward pass: each layer has gradients of its input and of its weights
WINDOWS = 2.0  # of an image, assumed where no header can be read; a large CT has more
MOST_HEADERS = 25
TRIAL_S = 2.0


class Cost(NamedTuple):
    """Of a run on one GPU; NaN where nothing is known of the data."""

    epochs: int
    steps: float
    """Of the optimizer, in total; a whole number."""
    training_pflop: float
    """Forward and backward over all steps, in 1e15 operations."""
    inference_pflop: float
    """Validation while training, then validation and test cases, and both again for each calibrator."""

    def hours(self, tflops: float) -> float:
        """With a GPU that keeps up so many 1e12 operations a second."""
        if not tflops > 0:
            raise ConfigError(f"tflops must be above 0; got {tflops}.")
        return (self.training_pflop + self.inference_pflop) * 1e3 / tflops / 3600


class PlanRow(NamedTuple):
    """A run as a dry run lists it."""

    run: str
    """Its name; without the hash where data are missing, which may change it."""
    dataset: str
    methods: tuple[str, ...]
    """Of the study, that use this run."""
    seed: int
    epochs: int
    steps: float
    hours: float


class PlanTotal(NamedTuple):
    """Of runs together."""

    runs: int
    unknown: int
    """Runs whose cost is not known; steps and hours are those of the others."""
    steps: int
    hours: float


def describe_plan(plan: Plan, tflops: float = GPU_TFLOPS) -> list[PlanRow]:
    """Every run of a study, what it is for and what it costs; `total` adds them up."""
    methods: dict[str, list[str]] = {name: [] for name in plan.runs}
    for arm in plan.arms:
        for name in (arm.run, *(member.name for member in plan.runs[arm.run].members)):
            methods[name].append(arm.method)
    rows = []
    for name, run in plan.runs.items():
        cost = estimate(run)
        shown = name if run.opened else name.removesuffix(f"-{run.hash}")
        rows.append(
            PlanRow(
                shown, run.dataset, tuple(methods[name]), run.config.seed, cost.epochs, cost.steps, cost.hours(tflops)
            )
        )
    return rows


def total(rows: Iterable[PlanRow]) -> PlanTotal:
    """Of all rows whose cost is known."""
    every = list(rows)
    known = [row for row in every if not math.isnan(row.hours)]
    steps, hours = sum(int(row.steps) for row in known), math.fsum(row.hours for row in known)
    return PlanTotal(len(every), len(every) - len(known), steps, hours)


def estimate(run: PlannedRun) -> Cost:
    """Of a run from its first step to its last evaluation.

    A dataset that describes itself (decathlon, nnunet) must be there; without it only the epochs are known. Test images
    that the paper does not count (AMOS) cost nothing here while they are missing. An ensemble costs what its members
    say of validation and test cases.
    """
    if not run.members:
        return _estimate(run)
    parts = [_estimate(replace(member, fittings=run.fittings), trains=False) for member in run.members]
    return Cost(0, sum(part.steps for part in parts), 0.0, math.fsum(part.inference_pflop for part in parts))


def _estimate(run: PlannedRun, *, trains: bool = True) -> Cost:
    dataset = run.opened or known_dataset(run.config.data.dataset)
    if dataset is None:
        return Cost((run.config.training.epochs or PLAIN.epochs) * trains, math.nan, math.nan, math.nan)
    config = run.config if run.opened else run.config.resolved(dataset)
    data, training = config.data, config.training
    epochs, patch, window = training.epochs if trains else 0, data.patch, data.inference_patch
    assert epochs is not None  # resolved
    assert patch is not None
    assert window is not None
    trained, validated, tested, seen = _cases(dataset, config)
    steps = epochs * steps_per_epoch(trained, config)
    patches = steps * training.batch_size * (1 + BACKWARD)
    validations = -(-epochs // training.validate_every)  # the last epoch has one, too
    fitted = len(run.fittings)  # to logits of validation cases, then evaluated as the run was
    images = validated * (validations + 1 + 2 * fitted) + tested * (1 + fitted)
    windows = images * _windows_per_image(seen, data.spacing_mm or "keep", window, data.inference_overlap)
    return Cost(
        epochs,
        steps,
        patches * forward_flop(config, dataset, patch) / 1e15,
        windows * forward_flop(config, dataset, window) / 1e15,
    )


def cpu_hours(config: RunConfig, dataset: Dataset) -> float:
    """Of a training on this CPU, roughly, with its validations; NaN if the network's operations cannot be counted.

    The CPU is taken to keep up what it does now in a step on one patch, which is tried.
    """
    resolved = config.resolved(dataset)
    patch = resolved.data.patch
    assert patch is not None  # resolved
    network = build_network(resolved, dataset).train()
    image = torch.randn(1, len(dataset.channels), *patch)
    times: list[float] = []
    while not times or (len(times) < 3 and sum(times) < TRIAL_S):  # the first waits for kernels, if others are quick
        start = time.perf_counter()
        outputs = network(image)
        sum(output.sum() for output in (outputs if isinstance(outputs, (list, tuple)) else [outputs])).backward()
        times.append(time.perf_counter() - start)
    tflops = forward_flop(resolved, dataset, patch) * (1 + BACKWARD) / min(times) / 1e12
    return math.nan if math.isnan(tflops) else estimate(PlannedRun("", resolved, dataset, ())).hours(tflops)


def steps_per_epoch(cases: int, config: RunConfig) -> int:
    """Batches of an epoch on one GPU; the last one is filled up."""
    return -(-cases * config.training.patches_per_case // config.training.batch_size)


def _cases(dataset: Dataset, config: RunConfig) -> tuple[int, int, int, tuple[DataCase, ...]]:
    """How many are for training, validation and test; and those of the last two, if they are there."""
    if not dataset.cases:
        trained, validated, *tested = dataset.paper_cases
        return trained, validated, sum(tested), ()
    split = make_split(dataset, seed=config.data.split_seed, file=config.data.split)
    names = {*split.validation, *split.test}
    seen = tuple(case for case in dataset.cases if case.name in names)
    return len(split.train), len(split.validation), len(split.test), seen


_counted: dict[tuple[str, int, int, Triple], float] = {}


def forward_flop(config: RunConfig, dataset: Dataset, patch: Triple) -> float:
    """Operations of the network on one patch, a multiplication and an addition being two; NaN if it cannot be told."""
    key = (config.network.model_dump_json(), len(dataset.channels), len(dataset.classes), patch)
    if key not in _counted:
        _counted[key] = _count(config, dataset, patch)
    return _counted[key]


def _count(config: RunConfig, dataset: Dataset, patch: Triple) -> float:
    """On the meta device, where tensors have shapes and no values."""
    try:
        with torch.device("meta"):
            network = build_network(config, dataset)
    except ConfigError:  # some networks need values while they are made; if it is something else, it is raised here
        network = build_network(config, dataset).to("meta")
    try:
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            network.eval()(torch.empty(1, len(dataset.channels), *patch, device="meta"))
    except RuntimeError:  # a network that looks at values
        return math.nan
    return float(counter.get_total_flops())


@lru_cache
def _windows_per_image(
    cases: tuple[DataCase, ...], spacing_mm: tuple[float, float, float] | Literal["keep"], patch: Triple, overlap: float
) -> float:
    """The mean over some headers; images are taken as if nothing were cropped."""
    counts = []
    for case in cases[:: max(1, -(-len(cases) // MOST_HEADERS))]:
        if (header := shape_and_spacing(case)) is not None:
            shape, spacing = header
            wanted = spacing if spacing_mm == "keep" else spacing_mm
            size = [round(n * old / new) for n, old, new in zip(shape, spacing, wanted, strict=True)]
            counts.append(count_windows(size, patch, overlap))
    return fmean(counts) if counts else WINDOWS


def count_windows(size: Sequence[int], patch: Sequence[int], overlap: float) -> int:
    """How often MONAI's sliding window stops on an image.

    >>> count_windows((48, 40, 16), (32, 32, 32), 0.25)
    4
    """
    return math.prod(
        1 + max(0, -(-(n - width) // max(1, int(width * (1 - overlap))))) for n, width in zip(size, patch, strict=True)
    )
