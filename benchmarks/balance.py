"""What calibration costs in overlap and likelihood: single networks, ensembles and calibrators on held-out patients.

    python benchmarks/balance.py hippocampus STUDY --root DATA
    python benchmarks/balance.py acdc STUDY OTHER_STUDY --root DATA --divisions 2 --halves

Takes the trained runs of study folders (`segcal study run`): dice-ce, and soft-ace of any weight, several seeds; each
division of a dataset into training and other patients is by itself. Patients that a run was not trained on are divided
again, into those that calibrators are fitted to and those that all is measured on. Values are means over a patient's
cases, seeds and divisions; intervals are over patients. Writes benchmarks/results/balance-NAME.csv.
"""

from __future__ import annotations

import argparse
import atexit
import csv
import math
import random
import shutil
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from scipy import stats
from torch import Tensor

from segcal import EvaluationAccumulator, ReadOptions, make_calibrator
from segcal.training.runs import load_run

RESULTS = Path(__file__).parent / "results"
METRICS = ("dice", "ace", "ece", "nll", "brier", "occupied")
SMOOTH: dict[str, Any] = {"smoothing": True}
CALIBRATORS: dict[str, tuple[str, dict[str, Any]]] = {
    "temperature": ("temperature", {}),
    "local-temperature": ("local-temperature", {}),
    "local-temperature, smoothing": ("local-temperature", SMOOTH),
    "local-temperature, smoothing, ACE weighs 3": ("local-temperature", SMOOTH | {"ace": 3.0}),
}
ALL = tuple(CALIBRATORS)
LAST = ALL[-1]


class Held(NamedTuple):
    """A case that a run was not trained on."""

    patient: str
    logits: Tensor
    labels: Tensor


class System(NamedTuple):
    """Members whose probabilities are averaged, and the calibrators that are fitted to the mean."""

    name: str
    members: tuple[tuple[str, int], ...]
    calibrators: tuple[str, ...]


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("name")
    options.add_argument("studies", nargs="+", type=Path)
    options.add_argument("--root", type=Path, help="where the dataset lies")
    options.add_argument("--divisions", type=int, default=5, help="of held-out patients, into fit and test")
    options.add_argument("--halves", action="store_true", help="divisions come in pairs: each half fits the other")
    options.add_argument("--crop", action="store_true", help="to the box around all that is not surely background")
    options.add_argument("--few", action="store_true", help="fewer calibrators")
    options.add_argument("--keep", type=Path, help="a file of values, to which later calls with other studies add")
    asked = options.parse_args()
    kept = torch.load(asked.keep) if asked.keep and asked.keep.exists() else ({}, {}, {})
    found: dict[tuple[str, str], dict[str, list[list[float]]]] = defaultdict(lambda: defaultdict(list))
    for key, by_patient in kept[0].items():
        found[key].update(by_patient)
    micro: dict[tuple[str, str], list[float]] = defaultdict(list, kept[1])
    seconds: dict[str, list[float]] = defaultdict(list, kept[2])
    place = Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, place)
    for split in splits(asked.studies, asked.root, place):
        if asked.crop:
            crop(split)
        patients = sorted({case.patient for case in next(iter(split.values())).values()})
        for division in range(asked.divisions):
            order = list(patients)
            random.Random(division // 2 if asked.halves else division).shuffle(order)
            half = set(order[: len(order) // 2])
            fit = half if not asked.halves or division % 2 == 0 else set(order) - half
            for system in systems(split, few=asked.few):
                for calibrator, rows, pooled, taken_s in measured(system, split, fit):
                    key = system.name, calibrator
                    for patient, row in rows:
                        found[key].setdefault(patient, []).append(row)
                    micro[key].append(pooled)
                    if taken_s:
                        seconds[calibrator].append(taken_s)
            print(f"division {division + 1} of {asked.divisions} done", flush=True)
            write(asked.name, found, micro, seconds)
    if asked.keep:
        torch.save(
            ({key: dict(by_patient) for key, by_patient in found.items()}, dict(micro), dict(seconds)), asked.keep
        )


def on_disk(values: Tensor, folder: Path) -> Tensor:
    """The same values, mapped from a file: hundreds of cases need not fit in memory."""
    path = folder / f"{len(list(folder.iterdir()))}.npy"
    np.save(path, values.numpy())
    return torch.from_numpy(np.load(path, mmap_mode="c"))


def splits(studies: list[Path], root: Path | None, place: Path) -> Iterator[dict[tuple[str, int], dict[str, Held]]]:
    """For each division into training and other patients the held-out cases by (method, seed) and name."""
    folders: dict[Any, list[Path]] = defaultdict(list)
    for study in studies:
        for folder in sorted((study / "runs").iterdir()):
            folders[tuple((folder / "split.txt").read_text().split())].append(folder)
    for group in folders.values():
        held = {}
        for folder in group:
            run = load_run(folder, root=root)
            weight = run.config.loss.ace.weight
            method = f"soft-ace {weight:g}" if weight else "dice-ce"
            cases = [case for side in ("validation", "test") for case in run.cases(side)]
            pairs = (pair for side in ("validation", "test") for pair in run.logits_and_labels(side))
            held[method, run.config.seed] = {
                case.name: Held(case.patient, on_disk(logits, place), labels)
                for case, (logits, labels) in zip(cases, pairs, strict=True)
            }
            print(f"{folder.name}: {len(cases)} held-out cases", flush=True)
        yield held


def crop(split: dict[tuple[str, int], dict[str, Held]]) -> None:
    """Cut every case to the box, and eight voxels around it, where any run or its labels see more than background."""
    first = next(iter(split.values()))
    for name, case in first.items():
        seen = case.labels > 0
        for held in split.values():
            seen |= held[name].logits.softmax(0)[0] < 0.999
        ranges = []
        for axis in range(seen.ndim):
            there = seen.movedim(axis, 0).flatten(1).any(1).nonzero()
            ranges.append(slice(max(int(there.min()) - 8, 0), int(there.max()) + 9))
        box = tuple(ranges)
        for held in split.values():
            held[name] = Held(
                case.patient, held[name].logits[(slice(None), *box)].clone(), held[name].labels[box].clone()
            )


def systems(split: dict[tuple[str, int], Any], *, few: bool) -> Iterator[System]:
    methods = sorted({method for method, _ in split})
    seeds = sorted({seed for _, seed in split})
    for seed in seeds:
        yield System("dice-ce", (("dice-ce", seed),), ("temperature", "local-temperature", LAST) if few else ALL)
    for other in methods[1:]:
        for seed in seeds:
            yield System(other, ((other, seed),), () if few else (LAST,))
            both = (("dice-ce", seed), (other, seed))
            yield System(f"ensemble(dice-ce, {other})", both, (LAST,) if few else ("local-temperature", LAST))
        yield System(f"ensemble({other} over seeds)", tuple((other, seed) for seed in seeds), () if few else (LAST,))
    yield System("ensemble(dice-ce over seeds)", tuple(("dice-ce", seed) for seed in seeds), (LAST,))
    yield System("ensemble of all", tuple(split), (LAST,))


def measured(
    system: System, split: dict[tuple[str, int], dict[str, Held]], fit: set[str]
) -> Iterator[tuple[str, list[tuple[str, list[float]]], float, float]]:
    """Of each calibrator the values of each test case, micro-ACE, and the seconds of the fit."""
    first = split[system.members[0]]
    mean = {name: mean_of([split[member][name].logits for member in system.members]) for name in first}
    to_fit = [(mean[name], case.labels.long()) for name, case in first.items() if case.patient in fit]
    test = {name: case for name, case in first.items() if case.patient not in fit}
    yield "none", *numbers(test, mean), 0.0
    if system.name == "dice-ce":
        offset = {name: with_own_offsets(mean[name], case.labels) for name, case in test.items()}
        yield "own offsets (needs labels)", *numbers(test, offset), 0.0
    for calibrator in system.calibrators:
        method, settings = CALIBRATORS[calibrator]
        start = time.perf_counter()
        fitted = make_calibrator(method, **settings).fit(to_fit)
        taken_s = time.perf_counter() - start
        yield calibrator, *numbers(test, {name: fitted.transform(mean[name]) for name in test}), taken_s


def mean_of(logits: list[Tensor]) -> Tensor:
    """The logarithm of the mean probabilities."""
    if len(logits) == 1:
        return logits[0]
    return torch.stack([each.log_softmax(0) for each in logits]).logsumexp(0) - math.log(len(logits))


def with_own_offsets(logits: Tensor, labels: Tensor) -> Tensor:
    """With the likeliest constant added to each class of a case: what only its labels tell."""
    flat, truth = logits.flatten(1), labels.flatten().long()
    doubtful = flat.softmax(0).amax(0) < 0.9999
    offsets = torch.zeros(len(flat) - 1, 1, requires_grad=True)
    optimizer = torch.optim.LBFGS([offsets], max_iter=30)

    def closure() -> Tensor:
        optimizer.zero_grad()
        moved = flat[:, doubtful] + torch.cat([torch.zeros(1, 1), offsets])
        loss = torch.nn.functional.cross_entropy(moved[None], truth[None, doubtful])
        loss.backward()
        return loss

    optimizer.step(closure)
    moved = flat + torch.cat([torch.zeros(1, 1), offsets.detach()])
    return moved.reshape(logits.shape)


def numbers(test: dict[str, Held], logits: dict[str, Tensor]) -> tuple[list[tuple[str, list[float]]], float]:
    accumulator = EvaluationAccumulator(options=ReadOptions(logits=True))
    for name, case in test.items():
        accumulator.update(logits[name][None], case.labels[None].long(), [name])
    evaluation = accumulator.compute()
    values = evaluation.case_values()
    rows = [(test[name].patient, [float(values[None, metric][i]) for metric in METRICS]) for i, name in enumerate(test)]
    pooled = next(
        row.value
        for row in evaluation.summary()
        if (row.cases, row.average, row.label, row.metric) == ("all", "micro pooled", None, "ace")
    )
    return rows, pooled


def write(name: str, found: Any, micro: Any, seconds: Any) -> None:
    """Means over patients, and changes against dice-ce with 95 % intervals over patients."""
    means = {
        key: {patient: torch.tensor(rows).nanmean(0) for patient, rows in by_patient.items()}
        for key, by_patient in found.items()
    }
    base = means["dice-ce", "none"]
    rows = []
    for (system, calibrator), by_patient in means.items():
        mine = torch.stack([by_patient[patient] for patient in base])
        own = torch.stack(list(base.values()))
        row: dict[str, Any] = {"system": system, "calibrator": calibrator, "patients": len(base)}
        for i, metric in enumerate(METRICS):
            in_points = metric == "dice"
            scale = 100.0 if in_points else 100.0 / float(own[:, i].mean())
            change = (mine[:, i] - own[:, i]) * scale
            around = float(stats.t.ppf(0.975, len(change) - 1)) * float(stats.sem(change))
            low, high = float(change.mean()) - around, float(change.mean()) + around
            row[metric] = round(float(mine[:, i].mean()), 5)
            unit = "points" if in_points else "%"
            row[f"{metric}_change_{unit}"] = round(float(change.mean()), 2)
            row[f"{metric}_interval"] = f"[{low:.2f}, {high:.2f}]"
        row["micro_ace"] = round(sum(micro[system, calibrator]) / len(micro[system, calibrator]), 5)
        taken = seconds.get(calibrator, [])
        row["fit_s"] = round(sum(taken) / len(taken), 1) if taken else ""
        rows.append(row)
    with (RESULTS / f"balance-{name}.csv").open("w", newline="") as file:
        table = csv.DictWriter(file, list(rows[0]))
        table.writeheader()
        table.writerows(rows)


if __name__ == "__main__":
    main()
