"""Cases inside the report: how large ten of them are, and how soon Chromium shows the first slice."""

from __future__ import annotations

import shutil
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from scipy import ndimage

from measure import write_rows
from segcal import EvaluationAccumulator, ReadOptions
from segcal.report import build_report
from segcal.viewer import CaseVolumes, ViewedCase, case_curves

SHAPE = (240, 240, 155)  # at 1 mm, as BraTS has them
REGIONS = {"whole tumor": 1.0, "tumor core": 0.65, "enhancing tumor": 0.45}  # relative radii
CASES = 10
FLAGS = "--no-sandbox --use-angle=swiftshader --enable-unsafe-swiftshader --disable-background-networking"


def make_case(number: int, methods: int) -> CaseVolumes:
    """A noisy brain with a lumpy tumor of 18 to 40 mm radius, and probabilities that are unsure around its border."""
    random = np.random.default_rng(number)
    grid = np.stack(np.meshgrid(*(np.arange(n, dtype=np.float32) for n in SHAPE), indexing="ij"))
    middle = np.array(SHAPE, np.float32)[:, None, None, None] / 2
    brain = (((grid - middle) / np.array([70, 85, 65], np.float32)[:, None, None, None]) ** 2).sum(0) < 1
    lumps = _smooth(random, 12.0)
    center = middle + random.uniform(-25, 25, 3).astype(np.float32)[:, None, None, None]
    distance = np.sqrt(((grid - center) ** 2).sum(0)) + 6 * lumps
    radius = random.uniform(18, 40)
    labels = np.stack([(distance < radius * share) & brain for share in REGIONS.values()])
    image = brain * (110 + 25 * _smooth(random, 3.0) + 50 * labels[0] + random.normal(0, 9, SHAPE))
    maps = [
        [
            _sigmoid((radius * share - distance + 2 * _smooth(random, 4.0)) / (1.0 + method)) * brain
            for share in REGIONS.values()
        ]
        for method in range(methods)
    ]
    return CaseVolumes(
        f"case_{number}",
        tuple(REGIONS),
        tuple(f"method {m}" for m in range(methods)),
        np.floor(np.array(maps) * 255 + 0.5).astype(np.uint8),
        labels.astype(np.uint8),
        np.clip(image, 0, 255).astype(np.uint8),
        (1.0, 1.0, 1.0),
        np.eye(4),
        True,
    )


def _smooth(random: np.random.Generator, sigma: float) -> np.ndarray:
    noise = ndimage.gaussian_filter(random.normal(size=SHAPE).astype(np.float32), sigma, truncate=2)
    return noise / noise.std()


def _sigmoid(values: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-np.clip(values, -30, 30)))


def write_report(out: Path, methods: int) -> int:
    """A report of ten such cases; how many voxels are embedded of each, on average."""
    accumulators = [EvaluationAccumulator(options=ReadOptions(sigmoid=True)) for _ in range(methods)]
    boxes = []
    for number in range(CASES):
        box = make_case(number, methods).cropped()
        for accumulator, maps in zip(accumulators, box.probabilities, strict=True):
            truth = torch.from_numpy(np.ascontiguousarray(box.labels))[None]
            accumulator.update(torch.from_numpy(maps / np.float32(255))[None], truth, [box.case])
        boxes.append(box)
    evaluations = {f"method {m}": each.compute() for m, each in enumerate(accumulators)}
    viewed = [
        ViewedCase(box, [case_curves(each, box.case) for each in evaluations.values()], "chosen") for box in boxes
    ]
    build_report(evaluations, out, cases=viewed, resamples=200)
    return int(np.mean([np.prod(box.shape) for box in boxes]))


def first_slice_s(report: Path, repeats: int = 5) -> float:
    """Median time from the address to a slice that is drawn, in fresh windows of a running browser."""
    from playwright.sync_api import sync_playwright

    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    times = []
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=chromium, args=FLAGS.split())
        for _ in range(repeats):
            page = browser.new_context(viewport={"width": 1400, "height": 900}).new_page()
            start = time.perf_counter()
            page.goto(f"{report.as_uri()}#viewer")
            page.wait_for_selector("[data-shown]")
            times.append(time.perf_counter() - start)
            page.close()
        browser.close()
    return statistics.median(times)


def measure(methods: int) -> dict[str, object]:
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.html"
        voxels = write_report(report, methods)
        return {
            "data": f"{CASES} cases x {len(REGIONS)} regions x {methods} methods, {voxels / 1e6:.2f} M voxels each",
            "must": "<= 2 s, <= 20 MB",
            "s": first_slice_s(report),
            "MB": report.stat().st_size / 1e6,
        }


if __name__ == "__main__":
    write_rows("viewer", [measure(1), measure(2)])
