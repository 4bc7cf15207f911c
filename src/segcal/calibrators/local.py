"""A temperature for each voxel, from a small network on the logits (after Ding and others, 2021).

A positive temperature leaves the most probable class, so that its Dice stays exactly what it was (that of a union of
classes may not), while the average calibration error, which is part of what is minimized here, falls. The network looks
at how the logits of a voxel stand to each other; with `dilations` also at its neighbors. With `smoothing` probabilities
are averaged with those of the neighbors first, by shares that are learned, too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy

from segcal.binning import MOST_BINS
from segcal.calibrators.boxes import Box, Drawing, lessons
from segcal.calibrators.calibrator import Activation, Calibrator, FitReport, Inputs, check_inputs, decided
from segcal.calibrators.objective import average_error, soft_statistics
from segcal.calibrators.smoothing import compiled, smooth_volume, smoothed
from segcal.calibrators.stream import CaseStream, check_stream
from segcal.errors import ConfigError, ShapeError, check_integer, check_seed
from segcal.kernels.threads import pass_threads

COLDEST, HOTTEST = math.exp(-0.25), math.exp(1.5)  # much colder ones empty the middle bins, which flatters ACE
CLIP = 12.0  # logits further than this from the largest one (of a sigmoid: from zero) look alike
BATCH = 4  # cases in a step
FIRST_SHARE = 0.25  # of the neighbors along an axis, for each that is a voxel's own
STEP_WORK = 3 << 18  # voxels of a case times (classes + 4) in a step: 98,304 voxels of four classes


class TemperatureNetwork(nn.Module):
    """Logits (class, ...) to the logarithm of temperatures.

    Of a softmax one for each voxel, (1, ...); of a sigmoid one for each voxel and class, since each is a decision by
    itself. All temperatures are 1 at first.
    """

    def __init__(
        self, classes: int, axes: int, activation: Activation, *, width: int, dilations: Sequence[int]
    ) -> None:
        super().__init__()
        convolution: Any = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}[axes]
        seen = classes + 2 if activation == "softmax" else 2 * classes
        layers: list[nn.Module] = []
        for dilation in dilations:
            layers += [convolution(seen, width, 3, padding=dilation, dilation=dilation), nn.GELU()]
            seen = width
        for _ in range(1 if dilations else 2):
            layers += [convolution(seen, width, 1), nn.GELU()]
            seen = width
        last = convolution(seen, 1 if activation == "softmax" else classes, 1)
        nn.init.zeros_(last.weight)
        nn.init.zeros_(last.bias)
        self.layers = nn.Sequential(*layers, last)

    def forward(self, features: Tensor) -> Tensor:
        raw = features
        for layer in self.layers:
            kernel: Any = getattr(layer, "kernel_size", ())
            raw = _everywhere(layer, raw) if set(kernel) == {1} else layer(raw[None])[0]
        limit = torch.where(raw < 0, -math.log(COLDEST), math.log(HOTTEST))
        return limit * torch.tanh(raw / limit)

    def matrices(self) -> list[NDArray[np.float32]]:
        """Weights and biases, in turn, of layers that look at single voxels."""
        return [part.flatten(1).numpy() if part.ndim > 1 else part.numpy() for part in self.layers.parameters()]


def _everywhere(layer: Any, values: Tensor) -> Tensor:
    """A convolution of single voxels, as the product of matrices that it is."""
    found = torch.addmm(layer.bias[:, None], layer.weight.flatten(1), values.flatten(1))
    return found.reshape(-1, *values.shape[1:])


def features_of(logits: Tensor, activation: Activation, *, largest: Tensor | None = None) -> Tensor:
    """What the network sees, each about within -2 and 2; a constant added to all logits of a softmax is not seen.

    largest: the classes that the logits decide for, as `decided` gives them, where they are known.
    """
    logits = logits.detach().float()
    if activation == "softmax":
        apart = logits - logits.amax(0, keepdim=True)
        logs = apart.log_softmax(0)
        entropy = -(logs.exp() * logs).sum(0, keepdim=True)
        second = apart.scatter(0, decided(apart) if largest is None else largest, -torch.inf).amax(0, keepdim=True)
        parts = [apart.clamp(min=-CLIP) / 4 + 1, second.neg().clamp(max=CLIP) / 4 - 1, entropy]
    else:
        parts = [logits.clamp(-CLIP, CLIP) / 4, logits.abs().clamp(max=CLIP) / 4 - 1]
    return torch.cat(parts)


class LocalTemperature(Calibrator):
    """A temperature for each voxel, trained for ACE and likelihood together; the most probable class stays.

    activation: "softmax" for exclusive classes, "sigmoid" for classes that overlap.
    ace, nll: weights of the soft-binned average calibration error (of the foreground; half of it case by case, half of
        four cases together) and of the negative log-likelihood, each as a share of what it is before the fit.
    smoothing: whether each probability is averaged first with those of the neighbors along each axis, by shares that
        are learned with the temperatures; no decision changes.
    dilations: a convolution over three voxels along each axis for each; none: every voxel by itself.
    width, steps: of the network; of its training.
    bins: of that error.
    box_voxels: with dilations, up to eight boxes of this size are learned from in a larger case, around
        doubtful voxels.
    seed: of the network's start and of all draws.

    The cases are read once. What is kept of them, the doubtful voxels and some of the others, or boxes, takes a fixed
    memory at most: less of each if there are many.
    """

    method = "local-temperature"
    summary = "A temperature for each voxel, trained for ACE and likelihood together; the most probable class stays."

    def __init__(
        self,
        *,
        activation: Activation = "softmax",
        ace: float = 1.0,
        nll: float = 1.0,
        smoothing: bool = False,
        dilations: Sequence[int] = (),
        width: int = 16,
        steps: int = 300,
        bins: int = 20,
        box_voxels: int = 1 << 17,
        seed: int = 0,
    ) -> None:
        super().__init__(activation=activation)
        for name, weight in (("ace", ace), ("nll", nll)):
            if not (math.isfinite(weight) and weight >= 0):
                raise ConfigError(f"the weight {name} must be a number of at least 0; got {weight!r}.")
        if not ace + nll > 0:
            raise ConfigError("one of the weights ace and nll must be above 0; both are 0.")
        self.dilations = tuple(check_integer("dilations", dilation) for dilation in dilations)
        self.width, self.steps = check_integer("width", width), check_integer("steps", steps)
        self.bins = check_integer("bins", bins, most=MOST_BINS)
        self.box_voxels = check_integer("box_voxels", box_voxels)
        self.ace, self.nll, self.smoothing = ace, nll, smoothing
        self.seed = check_seed(seed)
        self.network: TemperatureNetwork | None = None
        self.shares: Tensor | None = None
        """(axis): of each probability, what comes from the neighbors along an axis; None: nothing."""
        self.axes = 1

    @property
    def spatial(self) -> bool:
        return bool(self.dilations) or self.smoothing

    @property
    def drawing(self) -> Drawing:
        """How cases are drawn from for a fit."""
        return Drawing(self.activation, self.box_voxels, side_by_side=bool(self.dilations), neighbors=self.smoothing)

    @property
    def fitted(self) -> bool:
        return self.network is not None

    @property
    def keeps_decisions(self) -> bool:
        return True

    def settings(self) -> dict[str, Any]:
        own = ("ace", "nll", "smoothing", "dilations", "width", "steps", "bins", "box_voxels", "seed")
        return super().settings() | {name: getattr(self, name) for name in own}

    def fit(
        self,
        cases: CaseStream,
        *,
        inputs: Inputs = "logits",
        progress: Callable[[float], None] = lambda share: None,
    ) -> Self:
        """Itself, fitted, as `Calibrator.fit` says; `progress` is told which share of the training's steps is done."""
        number = check_stream(cases)
        check_inputs(inputs)
        boxes, voxels = self.drawing.draw(cases, number, self.seed)
        first = boxes[0][0]
        self._classes = len(first.logits)
        self.axes = first.logits.ndim - 1 if first.neighbors is None else len(first.neighbors)
        most = STEP_WORK / (self._classes + 4)
        for i, drawn in enumerate(boxes):
            boxes[i] = [part for box in drawn for part in lessons(box, self.activation, most)]
        seen = [case[0] for case in boxes]
        own = torch.stack([torch.stack(self._errors([box])) for box in seen]).mean(0).clamp(min=1e-6)
        self.network, self.shares = self._train(boxes, own, progress)
        now = [torch.stack(self._errors([box], self.network, self.shares)) for box in seen]
        after = torch.stack(now).mean(0) / own
        weights = torch.tensor([self.ace, self.nll], dtype=torch.float64)
        likelihood = "NLL" if self.activation == "softmax" else "binary NLL"
        objective = f"{self.ace:g} ACE / own + {self.nll:g} {likelihood} / own"
        report = FitReport(number, voxels, 1, objective, float(weights.sum()), float(weights @ after))
        self._end_fit(self._classes, inputs, report)
        return self

    def _train(
        self, boxes: Sequence[Sequence[Box]], own: Tensor, progress: Callable[[float], None]
    ) -> tuple[TemperatureNetwork, Tensor | None]:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            network = self._new_network()
        optimizer = torch.optim.AdamW(network.parameters(), lr=5e-3, weight_decay=1e-4)
        mixing = torch.full((self.axes,), math.log(FIRST_SHARE), requires_grad=self.smoothing)  # to the own share
        if self.smoothing:
            optimizer.add_param_group({"params": [mixing], "lr": 5e-2, "weight_decay": 0.0})
        rise = math.ceil(0.1 * self.steps)
        schedule = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda i: min((i + 1) / rise, 1) * (1 + math.cos(math.pi * i / self.steps)) / 2
        )
        random = torch.Generator().manual_seed(self.seed)
        for step in range(self.steps):
            chosen = torch.randperm(len(boxes), generator=random)[:BATCH].tolist()
            places = torch.rand(len(chosen), generator=random).tolist()
            batch = [boxes[i][int(place * len(boxes[i]))] for i, place in zip(chosen, places, strict=True)]
            shares = _shares(mixing) if self.smoothing else None
            ace, nll = self._errors(batch, network, shares, learning=True)
            optimizer.zero_grad(set_to_none=True)
            (self.ace / own[0] * ace + self.nll / own[1] * nll).backward()  # type: ignore[no-untyped-call]
            nn.utils.clip_grad_norm_([*network.parameters(), mixing], 1.0)
            optimizer.step()
            schedule.step()
            progress((step + 1) / self.steps)
        return network.eval().requires_grad_(False), _shares(mixing).detach() if self.smoothing else None

    def _errors(
        self,
        batch: Sequence[Box],
        network: TemperatureNetwork | None = None,
        shares: Tensor | None = None,
        *,
        learning: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """ACE, half of it box by box, half of all together, and mean negative log-likelihood, both float64.

        `learning`: ACE has no gradient by the temperatures of voxels that are sure.
        """
        aces, nlls, pooled = [], [], None
        for box in batch:
            logits = steered = box.logits
            if network is not None:
                if shares is not None and box.neighbors is not None:
                    logits = smoothed(logits, box.neighbors, shares, self.activation, largest=box.largest)
                logarithm = self._logarithm(network, logits, largest=box.largest)
                assert box.sure is not None  # `lessons` has looked
                steered = logits / torch.where(box.sure & learning, logarithm.detach(), logarithm).exp()
                logits = logits / logarithm.exp()
            stats = soft_statistics(steered, box.labels, self.activation, bins=self.bins)
            aces.append(average_error(stats, "ace", background=self.activation == "sigmoid"))
            pooled = stats if pooled is None else pooled + stats
            nlls.append(_likelihood(logits, box.labels, box.weights, self.activation))
        assert pooled is not None  # a batch has boxes
        together = average_error(pooled, "ace", background=self.activation == "sigmoid")
        return (torch.stack(aces).mean() + together) / 2, torch.stack(nlls).mean()

    def _logarithm(self, network: TemperatureNetwork, logits: Tensor, *, largest: Tensor | None = None) -> Tensor:
        """Log-temperatures (1 or class, ...)."""
        features = features_of(logits, self.activation, largest=largest)
        found: Tensor = network(features if self.dilations else features.flatten(1))
        return found.reshape(-1, *logits.shape[1:])

    def _new_network(self) -> TemperatureNetwork:
        assert self.classes is not None  # a file or the cases have told
        return TemperatureNetwork(
            self.classes, self.axes if self.dilations else 1, self.activation,
            width=self.width, dilations=self.dilations,
        )  # fmt: skip

    def temperatures(self, logits: Tensor) -> Tensor:
        """(1, ...) of (class, ...) logits; (class, ...) for a sigmoid. For inspection."""
        self.check(logits)
        return self._temperatures(self._smoothed(logits))

    def _smoothed(self, logits: Tensor) -> Tensor:
        """Logits (class, ...) with what comes from the neighbors."""
        if self.spatial and logits.ndim - 1 != self.axes:
            raise ShapeError(
                f"logits must have {self.axes} axes of space, as in the fit; got {tuple(logits.shape)}."
                " Use logits with the axes of the fit."
            )
        if self.shares is None:
            return logits
        return smooth_volume(logits, self.shares, self.activation)

    def _temperatures(self, logits: Tensor) -> Tensor:
        assert self.network is not None  # it is fitted
        with torch.no_grad():
            return self._logarithm(self.network, logits).exp().to(logits)

    def _apply(self, logits: Tensor) -> Tensor:
        return logits / self._temperatures(logits)

    def _transform(self, logits: Tensor) -> Tensor:
        values = self._smoothed(logits.detach())
        if self.dilations:
            return values / self._temperatures(values)
        if not compiled(values):
            return super()._transform(values)
        from segcal.kernels import numba_local

        assert self.network is not None  # it is fitted
        found = numba_local.divide(
            values.flatten(1).contiguous().numpy(), numba_local.Dense(*self.network.matrices()),
            softmax=self.activation == "softmax", clip=CLIP, coldest=-math.log(COLDEST), hottest=math.log(HOTTEST),
            threads=pass_threads(),
        )  # fmt: skip
        return torch.from_numpy(found).reshape(logits.shape)

    def state(self) -> dict[str, Any]:
        assert self.network is not None  # `save` has looked
        weights = {name: value.tolist() for name, value in self.network.state_dict().items()}
        smoothing = {} if self.shares is None else {"shares": self.shares.tolist()}
        return {"axes": self.axes, "weights": weights} | smoothing

    def set_state(self, state: dict[str, Any]) -> None:
        self.axes = int(state["axes"])
        if self.axes not in (1, 2, 3) or self.classes is None:
            raise ValueError("its axes and classes must be those of a local temperature")
        network = self._new_network()
        network.load_state_dict({name: torch.tensor(value) for name, value in state["weights"].items()})
        if not all(bool(value.isfinite().all()) for value in network.state_dict().values()):
            raise ValueError("its weights must be finite numbers")
        if self.smoothing:
            self.shares = torch.tensor(state["shares"], dtype=torch.float32)
            if self.shares.shape != (self.axes,) or not (bool((self.shares >= 0).all()) and self.shares.sum() <= 1):
                raise ValueError("its shares must be a number for each axis, at least 0 and together at most 1")
        self.network = network.eval().requires_grad_(False)


def _shares(mixing: Tensor) -> Tensor:
    """(axis) shares of the neighbors; what is left to 1 is a voxel's own."""
    return torch.cat([mixing.new_zeros(1), mixing]).softmax(0)[1:]


def _likelihood(logits: Tensor, labels: Tensor, weights: Tensor | None, activation: Activation) -> Tensor:
    """Mean negative log-likelihood."""
    if activation == "softmax":
        losses = cross_entropy(logits[None], labels[None].long(), reduction="none")[0]
    else:
        losses = binary_cross_entropy_with_logits(logits, labels.to(logits.dtype), reduction="none")
    if weights is None:
        return losses.double().mean()
    return (losses * weights).double().sum() / weights.double().sum() / (1 if losses.ndim == 1 else len(losses))
