"""Draws the pictures of the concepts and of the tutorial into docs/images: `python docs/pictures.py [TUTORIAL]`.

Concepts need nothing but this file: the phantom's true probabilities are known, so that predictions that are too sure,
or off in single cases, can be made from them. TUTORIAL is a folder in which the commands of docs/tutorial.md were run;
its figures are those that `segcal compare` and `segcal report` wrote there. The same input gives the same pictures.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import Tensor

from segcal import Binning, BinStatistics, ScoreSums, ace, bin_statistics, ece, nll
from segcal.datasets.phantom import CLASSES, phantom_case
from segcal.evaluation.diagrams import reliability
from segcal.plots import COLUMN_IN, PAGE_IN, memberships, new_figure, reliability_grid, save_figure
from segcal.plots.colors import BLUE, GRAY, VERMILION
from segcal.plots.style import legend, plain_axes

IMAGES = Path(__file__).parent / "images"
DPI = 200
ORGAN = CLASSES.index("organ")


def phantom(numbers: range) -> tuple[Tensor, Tensor]:
    """True probabilities of the organ, (case, 1, voxel), and its labels."""
    cases = [phantom_case(number) for number in numbers]
    probabilities = torch.stack([torch.from_numpy(case.probabilities[..., ORGAN]).flatten() for case in cases])
    labels = torch.stack([torch.from_numpy(case.label == ORGAN).flatten() for case in cases])
    return probabilities[:, None].double(), labels[:, None].double()


def changed(probabilities: Tensor, *, factor: float = 1.0, shift: float = 0.0) -> Tensor:
    """Probabilities whose logits are multiplied and shifted."""
    return (torch.logit(probabilities, eps=1e-5) * factor + shift).sigmoid()


def calibration() -> None:
    """Reliability diagrams of calibrated, overconfident and underconfident probabilities."""
    probabilities, labels = phantom(range(20))
    names = [f"phantom_{number:03d}" for number in range(20)]
    kinds = {"the true probabilities": 1.0, "overconfident: logits times 3": 3.0, "underconfident: logits / 3": 1 / 3}
    diagrams = {
        name: reliability(bin_statistics(changed(probabilities, factor=factor), labels, bins=20), patients=names)
        for name, factor in kinds.items()
    }
    figure = new_figure(PAGE_IN, 3.4)
    reliability_grid(figure, diagrams, columns=3)
    save_figure(figure, IMAGES / "concept-calibration.png", dpi=DPI)


def why_ece_misleads() -> None:
    """ECE and ACE of the same predictions while empty background is added around them, relative to the start."""
    probabilities, labels = phantom(range(20))
    stats = bin_statistics(changed(probabilities, factor=3.0), labels, bins=20)
    first = torch.zeros_like(stats.count)
    first[..., 0] = stats.count.sum(-1)
    margins = torch.linspace(0, 9, 37)
    errors = []
    for margin in margins:  # background of probability 1e-4, one voxel in ten thousand of which is the organ
        more = BinStatistics(
            stats.count + margin * first,
            stats.confidence_sum + margin * first * 1e-4,
            stats.label_sum + margin * first * 1e-4,
            stats.binning,
        )
        errors.append((ace(more).mean().item(), ece(more).mean().item()))
    figure = new_figure(COLUMN_IN * 1.3, 2.4)
    ax = figure.add_subplot()
    lines = [
        ax.plot(1 + margins, [value / values[0] for value in values], color=color, linewidth=1.5)[0]
        for values, color in zip(zip(*errors, strict=True), (VERMILION, BLUE), strict=True)
    ]
    plain_axes(ax, x="voxels, relative to the image without a margin", y="error, relative to the same")
    ax.set(xlim=(1, 10), ylim=(0, 1.1), xticks=[1, 2, 4, 6, 8, 10], yticks=[0, 0.5, 1])
    first_ace, first_ece = errors[0]
    legend(ax, lines, [f"ACE (from {first_ace:.3f})", f"ECE (from {first_ece:.4f})"], loc="center right")
    save_figure(figure, IMAGES / "concept-ece.png", dpi=DPI)


def how_ace_can_be_gamed() -> None:
    """ACE and NLL of the page's network while its logits are divided, relative to the network's own."""
    probabilities, labels = phantom(range(10))
    generator = torch.Generator().manual_seed(0)
    noise = [torch.randn(shape, generator=generator) for shape in ((10, 1, 1), probabilities.shape)]
    logits = torch.logit(probabilities, eps=1e-5) + noise[0] + 0.5 * noise[1]
    divisors = torch.linspace(0.75, 2.25, 31)
    found = []
    for divisor in divisors:
        organ = (logits / divisor).sigmoid()
        errors = ace(bin_statistics(organ, labels, bins=20)).mean().item()
        found.append((errors, nll(ScoreSums.of_regions(organ, labels)).mean().item()))
    figure = new_figure(COLUMN_IN * 1.3, 2.4)
    ax = figure.add_subplot()
    own = found[divisors.tolist().index(1.0)]
    lines = [
        ax.plot(divisors, [value / first for value in values], color=color, linewidth=1.5)[0]
        for values, first, color in zip(zip(*found, strict=True), own, (VERMILION, BLUE), strict=True)
    ]
    ax.axhline(1, color=GRAY, linewidth=0.75, linestyle="--")
    plain_axes(ax, x="divisor of the logits", y="relative to the network")
    ax.set(xlim=(0.75, 2.25), ylim=(0.8, 1.4), xticks=[0.75, 1, 1.25, 1.5, 1.75, 2, 2.25], yticks=[0.8, 1, 1.2, 1.4])
    legend(ax, lines, [f"ACE (from {own[0]:.3f})", f"NLL (from {own[1]:.4f})"], loc="upper left")
    save_figure(figure, IMAGES / "concept-heat.png", dpi=DPI)


def hard_and_soft_binning() -> None:
    """What a probability weighs in each of five bins."""
    figure = new_figure(COLUMN_IN * 1.3, 2.4)
    memberships(figure.add_subplot(), [Binning(5), Binning(5, kernel="triangular")])
    save_figure(figure, IMAGES / "concept-binning.png", dpi=DPI)


def micro_and_macro() -> None:
    """Two cases, wrong in opposite directions, and both together."""
    probabilities, labels = phantom(range(2))
    off = torch.cat([changed(probabilities[:1], shift=1.5), changed(probabilities[1:], shift=-1.5)])
    stats = bin_statistics(off, labels, bins=20)
    parts = {
        "case A: too high": stats.select(cases=[0]),
        "case B: too low": stats.select(cases=[1]),
        "both, pooled": stats,
    }
    figure = new_figure(PAGE_IN, 3.4)
    reliability_grid(figure, {name: reliability(part) for name, part in parts.items()}, columns=3)
    save_figure(figure, IMAGES / "concept-micro-macro.png", dpi=DPI)


def finite_sample_floor() -> None:
    """ACE of perfectly calibrated probabilities against the number of voxels, and what the formula says."""
    generator = torch.Generator().manual_seed(0)
    numbers = [round(10 ** (2 + step / 4)) for step in range(17)]
    found = []
    for number in numbers:
        probabilities = torch.rand(200 if number < 1e5 else 20, 1, number, generator=generator, dtype=torch.float64)
        labels = torch.bernoulli(probabilities, generator=generator)
        errors = ace(bin_statistics(probabilities, labels, bins=20))
        found.append((errors.mean().item(), errors.quantile(0.025).item(), errors.quantile(0.975).item()))
    mean, low, high = zip(*found, strict=True)
    figure = new_figure(COLUMN_IN * 1.3, 2.6)
    ax = figure.add_subplot()
    band = ax.fill_between(numbers, low, high, color=BLUE, alpha=0.2, linewidth=0)
    (line,) = ax.plot(numbers, mean, color=BLUE, marker="o", markersize=3, linewidth=1)
    (rule,) = ax.plot(numbers, [0.313 * (20 / number) ** 0.5 for number in numbers], "--", color=GRAY, linewidth=1)
    plain_axes(ax, x="voxels with probabilities between 0 and 1", y="ACE, 20 bins")
    ax.set(xscale="log", yscale="log")
    ax.set_yticks([0.001, 0.01, 0.1], labels=["0.001", "0.01", "0.1"])
    names = ["perfectly calibrated", "95 % of draws", "0.313 √(bins / voxels)"]
    legend(ax, [line, band, rule], names, loc="upper right")
    save_figure(figure, IMAGES / "concept-floor.png", dpi=DPI)


def tutorial(folder: Path) -> None:
    """The figures that its commands wrote, and the top of its report as a browser shows it."""
    for name in ("reliability-dice-ce", "histograms"):
        shutil.copy(folder / "comparison" / f"{name}.png", IMAGES / f"tutorial-{name}.png")
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        sys.exit("chromium must be there to take the picture of the report; it was not found.")
    with TemporaryDirectory() as profile:
        quiet = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-sync"]
        quiet += ["--disable-component-update", "--hide-scrollbars"]
        size, target = "--window-size=1200,800", f"--screenshot={IMAGES / 'tutorial-report.png'}"
        page = (folder / "report.html").absolute().as_uri()
        command = [browser, *quiet, f"--user-data-dir={profile}", size, target, page]
        subprocess.run(command, check=True, capture_output=True, timeout=120)


if __name__ == "__main__":
    for draw in (
        calibration,
        why_ece_misleads,
        how_ace_can_be_gamed,
        hard_and_soft_binning,
        micro_and_macro,
        finite_sample_floor,
    ):
        draw()
    if len(sys.argv) > 1:
        tutorial(Path(sys.argv[1]))
