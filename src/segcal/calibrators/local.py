"""A temperature for each voxel, from a small network on the logits (after Ding and others, 2021).

A positive temperature changes no decision, so that Dice stays exactly what it was, while the average calibration error,
which is part of what is minimised here, falls. The network looks at how the logits of a voxel stand to each other; with
`dilations` also at its neighbours, with `image` also at the image.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy

from segcal.calibrators.calibrator import Activation, Calibrator, FitReport, Inputs, check_inputs
from segcal.calibrators.objective import average_error, soft_statistics
from segcal.calibrators.stream import (
    CaseStream,
    check_stream,
    flat_labels,
    flatten,
    need_finite,
    need_same_classes,
    slabs_of,
    volume_of,
    voxels_of,
)
from segcal.errors import ConfigError, ShapeError, check_seed

COLDEST, HOTTEST = math.exp(-0.25), math.exp(1.5)  # much colder ones empty the middle bins, which flatters ACE
CLIP = 12.0  # logits further than this from the largest one (of a sigmoid: from zero) look alike
SURE = 0.99  # voxels surer than this stay in the outermost bins: ACE must not steer them, the likelihood does
BATCH = 4  # cases in a step
MOST_BOXES = 8  # of a case
KEPT_BYTES = 1 << 30  # of all boxes
STEP_WORK = 3 << 18  # voxels of a case times (classes + 4) in a step: 98,304 voxels of four classes


class TemperatureNetwork(nn.Module):
    """Logits (class, ...) and perhaps an image to the logarithm of temperatures.

    Of a softmax one for each voxel, (1, ...); of a sigmoid one for each voxel and class, since each is a decision by
    itself. All temperatures are 1 at first.
    """

    def __init__(
        self, classes: int, axes: int, activation: Activation, *, channels: int, width: int, dilations: Sequence[int]
    ) -> None:
        super().__init__()
        convolution: Any = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}[axes]
        seen = channels + (classes + 2 if activation == "softmax" else 2 * classes)
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
        raw: Tensor = self.layers(features[None])[0]
        limit = torch.where(raw < 0, -math.log(COLDEST), math.log(HOTTEST))
        return limit * torch.tanh(raw / limit)


def features_of(logits: Tensor, image: Tensor | None, activation: Activation) -> Tensor:
    """What the network sees, each about within -2 and 2; a constant added to all logits of a softmax is not seen."""
    logits = logits.detach().float()
    if activation == "softmax":
        best = logits.topk(2, 0).values
        logs = logits.log_softmax(0)
        entropy = -(logs.exp() * logs).sum(0, keepdim=True)
        margin = (best[:1] - best[1:]).clamp(max=CLIP) / 4 - 1
        parts = [(logits - best[:1]).clamp(min=-CLIP) / 4 + 1, margin, entropy]
    else:
        parts = [logits.clamp(-CLIP, CLIP) / 4, logits.abs().clamp(max=CLIP) / 4 - 1]
    if image is not None:
        parts.append(image)
    return torch.cat(parts)


class _Box(NamedTuple):
    """A case, or a part of it: logits and labels, and the image where it is wanted."""

    logits: Tensor
    labels: Tensor
    image: Tensor | None
    weights: Tensor | None = None
    """(voxel): how many voxels each stands for; None: one."""

    @property
    def voxels(self) -> int:
        return self.logits[0].numel()

    @property
    def bytes_of_voxel(self) -> float:
        return sum(part.nbytes for part in self if part is not None) / self.voxels


class LocalTemperature(Calibrator):
    """A temperature for each voxel, trained for ACE and likelihood together; no decision changes.

    activation: "softmax" for exclusive classes, "sigmoid" for classes that overlap.
    ace, nll: weights of the soft-binned average calibration error (of the foreground; half of it case by case, half of
        four cases together) and of the negative log-likelihood, each as a share of what it is before the fit.
    dilations: a convolution over three voxels along each axis for each; none: every voxel by itself.
    image: whether the network sees the image, too; cases are then (logits, labels, image).
    width, steps: of the network; of its training.
    bins: of that error.
    box_voxels: with neighbours or an image, up to eight boxes of this size are learned from in a larger case, around
        doubtful voxels.
    seed: of the network's start and of all draws.

    The cases are read once. What is kept of them, the doubtful voxels and some of the others, or boxes, takes a fixed
    memory at most: less of each if there are many.
    """

    method = "local-temperature"
    summary = "A temperature for each voxel, trained for ACE and likelihood together; no decision changes."

    def __init__(
        self,
        *,
        activation: Activation = "softmax",
        ace: float = 1.0,
        nll: float = 1.0,
        dilations: Sequence[int] = (),
        image: bool = False,
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
        numbers = {"width": width, "steps": steps, "box_voxels": box_voxels} | {"dilations": min(dilations, default=1)}
        for name, number in numbers.items():
            if number < 1:
                raise ConfigError(f"{name} must be at least 1; got {number}.")
        self.ace, self.nll, self.dilations, self.image = ace, nll, tuple(dilations), image
        self.width, self.steps, self.bins, self.box_voxels = width, steps, bins, box_voxels
        self.seed = check_seed(seed)
        self.network: TemperatureNetwork | None = None
        self.axes, self.channels = 1, 0

    @property
    def spatial(self) -> bool:
        return bool(self.dilations) or self.image

    @property
    def fitted(self) -> bool:
        return self.network is not None

    @property
    def keeps_decisions(self) -> bool:
        return True

    def settings(self) -> dict[str, Any]:
        own = ("ace", "nll", "dilations", "image", "width", "steps", "bins", "box_voxels", "seed")
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
        boxes, voxels = self._draw_boxes(cases, number)
        first = boxes[0][0]
        self._classes, self.axes = len(first.logits), first.logits.ndim - 1
        self.channels = 0 if first.image is None else len(first.image)
        random = torch.Generator().manual_seed(self.seed)
        seen = [self._at_most(case[0], random) for case in boxes]
        own = torch.stack([torch.stack(self._errors([box])) for box in seen]).mean(0).clamp(min=1e-6)
        self.network = self._train(boxes, own, progress)
        after = torch.stack([torch.stack(self._errors([box], self.network)) for box in seen]).mean(0) / own
        weights = torch.tensor([self.ace, self.nll], dtype=torch.float64)
        likelihood = "NLL" if self.activation == "softmax" else "binary NLL"
        objective = f"{self.ace:g} ACE / own + {self.nll:g} {likelihood} / own"
        report = FitReport(number, voxels, 1, objective, float(weights.sum()), float(weights @ after))
        self._end_fit(self._classes, inputs, report)
        return self

    def _train(
        self, boxes: Sequence[Sequence[_Box]], own: Tensor, progress: Callable[[float], None]
    ) -> TemperatureNetwork:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            network = self._new_network()
        optimizer = torch.optim.AdamW(network.parameters(), lr=5e-3, weight_decay=1e-4)
        rise = math.ceil(0.1 * self.steps)
        schedule = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda i: min((i + 1) / rise, 1) * (1 + math.cos(math.pi * i / self.steps)) / 2
        )
        random = torch.Generator().manual_seed(self.seed)
        for step in range(self.steps):
            chosen = torch.randperm(len(boxes), generator=random)[:BATCH].tolist()
            places = torch.rand(len(chosen), generator=random).tolist()
            batch = [boxes[i][int(place * len(boxes[i]))] for i, place in zip(chosen, places, strict=True)]
            batch = [self._at_most(box, random) for box in batch]
            ace, nll = self._errors(batch, network, learning=True)
            optimizer.zero_grad(set_to_none=True)
            (self.ace / own[0] * ace + self.nll / own[1] * nll).backward()  # type: ignore[no-untyped-call]
            nn.utils.clip_grad_norm_(network.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            progress((step + 1) / self.steps)
        return network.eval().requires_grad_(False)

    def _at_most(self, box: _Box, random: torch.Generator) -> _Box:
        """A box, or a new draw of its voxels where they are more than a step may cost; neighbours stay together."""
        most = STEP_WORK // (len(box.logits) + 4)
        if self.spatial or box.voxels <= most:
            return box
        drawn = torch.randint(box.voxels, (most,), generator=random)
        weights = None if box.weights is None else box.weights[drawn]
        return _Box(box.logits[:, drawn], box.labels[..., drawn], None, weights)

    def _errors(
        self, batch: Sequence[_Box], network: TemperatureNetwork | None = None, *, learning: bool = False
    ) -> tuple[Tensor, Tensor]:
        """ACE, half of it box by box, half of all together, and mean negative log-likelihood, both float64.

        `learning`: ACE has no gradient by the temperatures of voxels that are sure.
        """
        aces, nlls, pooled = [], [], None
        for box in batch:
            logits = steered = box.logits
            if network is not None:
                logarithm = self._logarithm(network, box.logits, box.image)
                sure = _sureness(box.logits, self.activation) > SURE
                logits = box.logits / logarithm.exp()
                steered = box.logits / torch.where(sure & learning, logarithm.detach(), logarithm).exp()
            stats = soft_statistics(steered, box.labels, self.activation, bins=self.bins)
            aces.append(average_error(stats, "ace", background=self.activation == "sigmoid"))
            pooled = stats if pooled is None else pooled + stats
            nlls.append(_likelihood(logits, box.labels, box.weights, self.activation))
        assert pooled is not None  # a batch has boxes
        together = average_error(pooled, "ace", background=self.activation == "sigmoid")
        return (torch.stack(aces).mean() + together) / 2, torch.stack(nlls).mean()

    def _logarithm(self, network: TemperatureNetwork, logits: Tensor, image: Tensor | None) -> Tensor:
        """Log-temperatures (1 or class, ...)."""
        features = features_of(logits, image, self.activation)
        found: Tensor = network(features if self.spatial else features.flatten(1))
        return found.reshape(-1, *logits.shape[1:])

    def _new_network(self) -> TemperatureNetwork:
        assert self.classes is not None  # a file or the cases have told
        return TemperatureNetwork(
            self.classes, self.axes if self.spatial else 1, self.activation,
            channels=self.channels, width=self.width, dilations=self.dilations,
        )  # fmt: skip

    def temperatures(self, logits: Tensor, *, image: Tensor | None = None) -> Tensor:
        """(1, ...) of (class, ...) logits; (class, ...) for a sigmoid. To look at: where was the network too sure?"""
        self.check(logits)
        assert self.network is not None  # it is fitted
        if self.image and (image is None or image.shape != (self.channels, *logits.shape[1:])):
            came = "none" if image is None else str(tuple(image.shape))
            raise ShapeError(f"the calibrator needs an image of {self.channels} channels on the grid; got {came}.")
        if self.spatial and logits.ndim - 1 != self.axes:
            raise ShapeError(f"logits must have {self.axes} axes of space, as in the fit; got {tuple(logits.shape)}.")
        seen = _standardised(image.float()) if self.image and image is not None else None
        with torch.no_grad():
            return self._logarithm(self.network, logits, seen).exp().to(logits)

    def _apply(self, logits: Tensor) -> Tensor:
        return logits / self.temperatures(logits)

    def _transform(self, logits: Tensor, image: Tensor | None) -> Tensor:
        return logits / self.temperatures(logits, image=image) if self.spatial else super()._transform(logits, image)

    def state(self) -> dict[str, Any]:
        assert self.network is not None  # `save` has looked
        weights = {name: value.tolist() for name, value in self.network.state_dict().items()}
        return {"axes": self.axes, "channels": self.channels, "weights": weights}

    def set_state(self, state: dict[str, Any]) -> None:
        self.axes, self.channels = int(state["axes"]), int(state["channels"])
        if self.axes not in (1, 2, 3) or self.channels < 0 or self.classes is None:
            raise ValueError("its axes, channels and classes must be those of a local temperature")
        network = self._new_network()
        network.load_state_dict({name: torch.tensor(value) for name, value in state["weights"].items()})
        if not all(bool(value.isfinite().all()) for value in network.state_dict().values()):
            raise ValueError("its weights must be finite numbers")
        self.network = network.eval().requires_grad_(False)

    def _draw_boxes(self, cases: CaseStream, number: int) -> tuple[list[list[_Box]], int]:
        """Boxes of each case, in one pass, and the voxels of all cases."""
        random = torch.Generator().manual_seed(self.seed)
        boxes: list[list[_Box]] = []
        voxels = 0
        for i, case in enumerate(cases):
            draw = self._cut_boxes if self.spatial else self._draw_voxels
            found, seen = draw(i, case, KEPT_BYTES / number, random)
            if boxes:
                need_same_classes(len(boxes[0][0].logits), len(found[0].logits), i)
            boxes.append(found)
            voxels += seen
        return boxes, voxels

    def _cut_boxes(self, place: int, case: Any, most_bytes: float, random: torch.Generator) -> tuple[list[_Box], int]:
        """Boxes of a case whose voxels stand side by side, or all of a small one; and how many voxels it has."""
        whole = self._checked(place, *volume_of(case))
        share = max(1, int(most_bytes / whole.bytes_of_voxel))
        size = box_size(whole.logits.shape[1:], min(self.box_voxels, share))
        often = 1 if size == whole.logits.shape[1:] else min(MOST_BOXES, max(1, share // math.prod(size)))
        return [self._cut(whole, size, random) for _ in range(often)], whole.voxels

    def _draw_voxels(self, place: int, case: Any, most_bytes: float, random: torch.Generator) -> tuple[list[_Box], int]:
        """Some voxels of a case, as many from each of its parts as that is large; and how many it has."""
        found: list[_Box] = []
        seen = total = 0
        for logits, labels in slabs_of(case):
            if not logits[0].numel():
                continue
            part = self._checked(place, logits, labels, None)
            total = total or voxels_of(case, len(logits))
            most = min(MOST_BOXES * self.box_voxels, max(1, int(most_bytes / part.bytes_of_voxel)))
            found.append(self._thin(part, most * part.voxels / total, random))
            seen += part.voxels
        if not found:
            raise ConfigError(f"there must be voxels to fit a calibrator on; case {place} has none.")
        weights = [box.weights for box in found if box.weights is not None]
        logits, labels = torch.cat([box.logits for box in found], -1), torch.cat([box.labels for box in found], -1)
        return [_Box(logits, labels, None, torch.cat(weights))], seen

    def _checked(self, place: int, logits: Tensor, labels: Tensor, image: Tensor | None) -> _Box:
        """A case or a part of it, if it can be learned from."""
        flat, truth = flatten(logits, labels, self.activation)
        if not flat.shape[1]:
            raise ConfigError(f"there must be voxels to fit a calibrator on; case {place} has none.")
        need_finite(flat)
        if self.image and (image is None or image.shape[1:] != logits.shape[1:]):
            raise ShapeError(
                f"image=True needs cases (logits, labels, image), the image (channel, ...) on the grid of the logits; "
                f"case {place} has {'none' if image is None else tuple(image.shape)}."
            )
        seen = image.detach().float() if image is not None and self.image else None
        truth = truth.reshape(*truth.shape[:-1], *logits.shape[1:]).to(torch.uint8)
        return _Box(flat.float().reshape(logits.shape), truth, None if seen is None else _standardised(seen))

    def _thin(self, whole: _Box, most_voxels: float, random: torch.Generator) -> _Box:
        """The voxels (class, voxel) that are not sure, and a draw of one in ten of the others; fewer of too many."""
        logits = whole.logits.flatten(1)
        labels = flat_labels(whole.labels, whole.logits)
        sure = _sureness(logits, self.activation).amin(0) > SURE
        places, weights = [], []
        for group, share in ((~sure, 1.0), (sure, 0.1)):
            there = group.nonzero()[:, 0]
            taken = math.ceil(min(len(there) * share, most_voxels * (0.8 if share == 1 else 0.2)))
            drawn = there[torch.randperm(len(there), generator=random)[:taken]]
            places.append(drawn)
            weights.append(torch.full((taken,), len(there) / max(taken, 1)))
        chosen = torch.cat(places)
        return _Box(logits[:, chosen], labels[..., chosen], None, torch.cat(weights))

    def _cut(self, whole: _Box, size: tuple[int, ...], random: torch.Generator) -> _Box:
        """A box of this size around a voxel that is not sure; all of a small case."""
        shape = whole.logits.shape[1:]
        if size == shape:
            return whole
        doubtful = (_sureness(whole.logits, self.activation).amin(0) < SURE).nonzero()
        chosen = int(torch.randint(max(len(doubtful), 1), (), generator=random))
        centre = doubtful[chosen].tolist() if len(doubtful) else [length // 2 for length in shape]
        starts = [min(max(c - s // 2, 0), w - s) for c, s, w in zip(centre, size, shape, strict=True)]
        box: Any = (..., *(slice(a, a + s) for a, s in zip(starts, size, strict=True)))
        return _Box(*(None if part is None else part[box].clone() for part in whole))  # type: ignore[arg-type]


def box_size(shape: Sequence[int], most_voxels: int) -> tuple[int, ...]:
    """As large as allowed, the longest sides cut first.

    >>> box_size((100, 100, 10), 10_000)
    (31, 32, 10)
    """
    size = list(shape)
    while math.prod(size) > most_voxels:
        longest = size.index(max(size))
        size[longest] -= max(1, size[longest] // 20)
    return tuple(size)


def _likelihood(logits: Tensor, labels: Tensor, weights: Tensor | None, activation: Activation) -> Tensor:
    """Mean negative log-likelihood."""
    if activation == "softmax":
        losses = cross_entropy(logits[None], labels[None].long(), reduction="none")[0]
    else:
        losses = binary_cross_entropy_with_logits(logits, labels.to(logits.dtype), reduction="none")
    if weights is None:
        return losses.double().mean()
    return (losses * weights).double().sum() / weights.double().sum() / (1 if losses.ndim == 1 else len(losses))


def _sureness(logits: Tensor, activation: Activation) -> Tensor:
    """Probability of what is decided, (1 or class, ...)."""
    return logits.softmax(0).amax(0, keepdim=True) if activation == "softmax" else logits.abs().sigmoid()


def _standardised(image: Tensor) -> Tensor:
    """Each channel less its mean, by its deviation."""
    axes = tuple(range(1, image.ndim))
    deviation = image.std(axes, keepdim=True).clamp(min=1e-6)
    return (image - image.mean(axes, keepdim=True)) / deviation
