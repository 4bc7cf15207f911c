"""Calibrators fitted after training, on logits of cases the network was not trained on."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from segcal.errors import ConfigError, FileError, SegcalError
from segcal.files import write_whole

FORMAT = "segcal temperature 1"
COLDEST, HOTTEST = 0.01, 100.0


@dataclass(frozen=True)
class Temperature:
    """One number that all logits are divided by; the most probable class stays what it was.

    >>> Temperature(2.0).transform(torch.tensor([3.0, 1.0])).tolist()
    [1.5, 0.5]
    """

    temperature: float
    gradient: float = math.nan
    """Of the mean negative log-likelihood by 1 / temperature, where the fit ended."""
    passes: int = 0
    nll_before: float = math.nan
    nll_after: float = math.nan

    def transform(self, logits: Tensor) -> Tensor:
        """Calibrated logits."""
        return logits / self.temperature

    def save(self, path: str | os.PathLike[str]) -> None:
        content = {"format": FORMAT} | {
            name: None if math.isnan(value) else value for name, value in asdict(self).items()
        }
        write_whole(Path(path), json.dumps(content, indent=2).encode())

    @staticmethod
    def load(path: str | os.PathLike[str]) -> Temperature:
        """Read what `save` wrote."""
        try:
            content = json.loads(Path(path).read_text(encoding="utf-8"))
            if content.pop("format") != FORMAT:
                raise ValueError("its format is another")
            numbers = {name: math.nan if value is None else float(value) for name, value in content.items()}
            found = Temperature(**numbers | {"passes": int(numbers.get("passes", 0))})  # type: ignore[arg-type]
        except OSError as error:
            raise FileError(f"{path} must be a calibrator; {error.strerror or error}.") from error
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise SegcalError(f"{path} must be a temperature that segcal wrote; {error}.") from error
        if not COLDEST <= found.temperature <= HOTTEST:
            raise SegcalError(f"{path}: the temperature must lie in [{COLDEST}, {HOTTEST}]; got {found.temperature}.")
        return found


def fit_temperature(
    cases: Iterable[tuple[Tensor, Tensor]], *, tolerance: float = 1e-6, most_passes: int = 50
) -> Temperature:
    """The temperature with the least negative log-likelihood over the voxels of all cases.

    Each case is logits (class, voxel) and class indices (voxel). The cases are gone through several times: give a
    list, or an object that can be iterated again. The likelihood is convex in 1 / temperature, so that Newton's steps,
    kept within bounds, end at its one minimum, or at a bound where there is none (every voxel right, or none).
    """
    inverse, low, high = 1.0, 1 / HOTTEST, 1 / COLDEST
    before = math.nan
    for passes in range(1, most_passes + 1):
        nll, slope, curve = _likelihood(cases, inverse)
        if passes == 1:
            before = nll
        if slope > 0:
            high = inverse
        else:
            low = inverse
        at_bound = inverse in (1 / HOTTEST, 1 / COLDEST) and (slope > 0) == (inverse == 1 / HOTTEST)
        if abs(slope) <= tolerance or at_bound or high - low <= 1e-12:
            return Temperature(1 / inverse, slope, passes, before, nll)
        step = inverse - slope / curve if curve > 0 else math.nan
        inverse = _within(step, inverse, low, high)
    raise SegcalError(f"the temperature must settle within {most_passes} passes; the gradient is still {slope:.2g}.")


def _within(step: float, now: float, low: float, high: float) -> float:
    """The step if it lies between the bounds, else halfway there; the outermost bounds themselves can be reached."""
    if low < step < high:
        return step
    target = high if not step <= low else low
    if target in (1 / HOTTEST, 1 / COLDEST) and abs(math.log(target / now)) < 1:
        return target
    return math.sqrt(now * target)


def _likelihood(cases: Iterable[tuple[Tensor, Tensor]], inverse: float) -> tuple[float, float, float]:
    """Mean negative log-likelihood of logits times `inverse`, and its first two derivatives by it."""
    sums, voxels = torch.zeros(3, dtype=torch.float64), 0
    for logits, labels in cases:
        flat = logits.detach().flatten(1).float()
        truth = labels.flatten().long()
        log_probabilities = (flat * inverse).log_softmax(0)
        probabilities = log_probabilities.exp()
        mean = (probabilities * flat).sum(0)
        chosen = truth[None]
        sums += torch.stack(
            [
                -log_probabilities.gather(0, chosen).sum(dtype=torch.float64),
                (mean - flat.gather(0, chosen)[0]).sum(dtype=torch.float64),
                ((probabilities * flat**2).sum(0) - mean**2).sum(dtype=torch.float64),
            ]
        ).cpu()
        voxels += len(truth)
    if not voxels:
        raise ConfigError("there must be voxels to fit a temperature on; got none.")
    nll, slope, curve = (sums / voxels).tolist()
    return nll, slope, curve
