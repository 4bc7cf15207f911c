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
PIECE = 1 << 18  # voxels taken to float64 at a time


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
    cases: Iterable[tuple[Tensor, Tensor]], *, tolerance: float = 1e-6, most_passes: int = 100
) -> Temperature:
    """The temperature with the least negative log-likelihood over the voxels of all cases, to a relative `tolerance`.

    Each case is logits (class, voxel) and class indices (voxel). The cases are gone through several times: give a
    list, or an object that can be iterated again. The likelihood is convex in 1 / temperature, so that Newton's steps,
    kept within bounds, end at its one minimum, or at a bound where there is none (every voxel right, or none).
    """
    if iter(cases) is cases:
        raise ConfigError("cases must be a list, or another object that can be iterated again; got an iterator.")
    coldest, hottest = 1 / COLDEST, 1 / HOTTEST
    inverse, low, high = 1.0, hottest, coldest
    before, change = math.nan, math.inf
    for passes in range(1, most_passes + 1):
        nll, slope, curve = _likelihood(cases, inverse)
        if not math.isfinite(nll):
            raise SegcalError("logits must be finite numbers to fit a temperature; they hold NaN or infinity.")
        if passes == 1:
            before = nll
        if slope > 0:
            high, end = inverse, low
        else:
            low, end = inverse, high
        newton = inverse - slope / curve if curve > 0 else math.nan
        # Halve the interval where Newton leaves it or creeps, as it does where nearly every voxel is right.
        well = low < newton < high and abs(math.log(newton / inverse)) <= change / 2
        following = newton if well else _halfway(inverse, end)
        change = abs(math.log(following / inverse))
        least = slope == 0 and nll > 0
        if least or change <= tolerance or inverse == (hottest if slope > 0 else coldest):
            return Temperature(1 / inverse, slope, passes, before, nll)
        inverse = following
    raise SegcalError(f"the temperature must settle within {most_passes} passes; the gradient is still {slope:.2g}.")


def _halfway(now: float, end: float) -> float:
    """Between the two in ratio; a bound of all temperatures is taken itself once it is near."""
    if end in (1 / HOTTEST, 1 / COLDEST) and abs(math.log(end / now)) < 1:
        return end
    return math.sqrt(now * end)


def _likelihood(cases: Iterable[tuple[Tensor, Tensor]], inverse: float) -> tuple[float, float, float]:
    """Mean negative log-likelihood of logits times `inverse`, and its first two derivatives by it."""
    sums, voxels = torch.zeros(3, dtype=torch.float64), 0
    for logits, labels in cases:
        truth = labels.flatten().long()
        for start in range(0, len(truth), PIECE):
            part, chosen = logits.detach().flatten(1)[:, start : start + PIECE], truth[start : start + PIECE]
            # Taken from the true class's logit, nothing cancels: the sums stay exact where all but a few are right.
            flat = part.double() - part.double().gather(0, chosen[None])
            probabilities = (flat * inverse).softmax(0)
            mean = (probabilities * flat).sum(0)
            spread = (probabilities * (flat - mean) ** 2).sum()
            sums += torch.stack([(flat * inverse).logsumexp(0).sum(), mean.sum(), spread]).cpu()
        voxels += len(truth)
    if not voxels:
        raise ConfigError("there must be voxels to fit a temperature on; got none.")
    nll, slope, curve = (sums / voxels).tolist()
    return nll, slope, curve
