"""What calibration costs in overlap and likelihood: single networks, ensembles and calibrators on held-out patients.

    python benchmarks/balance.py hippocampus STUDY --root DATA
    python benchmarks/balance.py acdc STUDY OTHER_STUDY --root DATA --divisions 2 --halves --crop

Takes the trained runs of study folders (`segcal study run`, or `segcal train --out STUDY/runs/NAME`): dice-ce, and
soft-ace of any weight, several seeds. Each division of a dataset into training and other patients is by itself.
Patients that a run was not trained on are divided again: into those that calibrators are fitted to, among them all that
the run was validated on, and those that everything is measured on. Values are means over a patient's cases, seeds and
divisions; intervals are over patients. Writes benchmarks/results/balance-NAME.csv.
"""

from __future__ import annotations

import argparse
import atexit
import csv
import gc
import math
import random
import shutil
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from scipy import stats
from torch import Tensor

from segcal import EvaluationAccumulator, ReadOptions, make_calibrator
from segcal.training.config import RunConfig
from segcal.training.runs import load_run

RESULTS = Path(__file__).parent / "results"
BASELINE = "dice-ce"
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
    side: str
    logits: Tensor
    labels: Tensor


Split = dict[tuple[str, int], dict[str, Held]]  # by method and seed, then by the name of the case


class System(NamedTuple):
    """Members whose probabilities are averaged, and the calibrators that are fitted to the mean."""

    name: str
    members: tuple[tuple[str, int], ...]
    calibrators: tuple[str, ...]


class Values(NamedTuple):
    """What was measured: by system and calibrator the rows of each patient, micro-ACE; the seconds of fits."""

    rows: dict[tuple[str, str], dict[str, list[list[float]]]]
    micro: dict[tuple[str, str], list[float]]
    seconds: dict[str, list[float]]


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("name")
    options.add_argument("studies", nargs="+", type=Path)
    options.add_argument("--root", type=Path, help="where the dataset lies")
    options.add_argument("--divisions", type=int, default=5, help="of held-out patients, into fit and test")
    options.add_argument("--halves", action="store_true", help="divisions come in pairs: each half fits the other")
    options.add_argument("--few", action="store_true", help="one calibrator, of the systems that matter most")
    options.add_argument("--crop", action="store_true", help="to the box around all that is not surely background")
    asked = options.parse_args()
    found = Values(defaultdict(lambda: defaultdict(list)), defaultdict(list), defaultdict(list))
    place = Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, place)
    for split in splits(asked.studies, asked.root, place):
        if asked.crop:
            crop(split)
        for division in range(asked.divisions):
            fit = fitted_patients(split, division, halves=asked.halves)
            for system in systems(split):
                measure(fewer(system) if asked.few else system, split, fit, found)
            print(f"division {division + 1} of {asked.divisions} done", flush=True)
            write(asked.name, found)


def on_disk(values: Tensor, folder: Path) -> Tensor:
    """The same values, mapped from a file: hundreds of cases need not fit in memory."""
    path = folder / f"{len(list(folder.iterdir()))}.npy"
    np.save(path, values.numpy())
    return torch.from_numpy(np.load(path, mmap_mode="c"))


def method_of(config: RunConfig) -> str:
    """As the table names it: what the loss is."""
    weight = config.loss.ace.weight
    return f"soft-ace {weight:g}" if weight else BASELINE


def splits(studies: list[Path], root: Path | None, place: Path) -> Iterator[Split]:
    """For each division into training and other patients its held-out cases."""
    folders: dict[Any, list[Path]] = defaultdict(list)
    for study in studies:
        for folder in sorted((study / "runs").iterdir()):
            folders[tuple((folder / "split.txt").read_text().split())].append(folder)
    for group in folders.values():
        held: Split = {}
        for folder in group:
            run = load_run(folder, root=root)
            held[method_of(run.config), run.config.seed] = {
                case.name: Held(case.patient, side, on_disk(logits, place), labels)
                for side in ("validation", "test")
                for case, (logits, labels) in zip(run.cases(side), run.logits_and_labels(side), strict=True)
            }
            print(f"{folder.name}: read", flush=True)
        yield held


def crop(split: Split) -> None:
    """Cut every case to the box, and eight voxels around it, where any run or its labels see more than background."""
    for name, case in next(iter(split.values())).items():
        seen = case.labels > 0
        for held in split.values():
            seen |= held[name].logits.softmax(0)[0] < 0.999
        ranges = []
        for axis in range(seen.ndim):
            there = seen.movedim(axis, 0).flatten(1).any(1).nonzero()
            ranges.append(slice(max(int(there.min()) - 8, 0), int(there.max()) + 9))
        for held in split.values():
            old = held[name]
            held[name] = old._replace(
                logits=old.logits[(slice(None), *ranges)].clone(), labels=old.labels[tuple(ranges)].clone()
            )


def fitted_patients(split: Split, division: int, *, halves: bool) -> set[str]:
    """Half of the patients: those for validation, and some that are drawn from the others."""
    side_of = {case.patient: case.side for case in next(iter(split.values())).values()}
    validation = {patient for patient, side in side_of.items() if side == "validation"}
    others = sorted(set(side_of) - validation)
    random.Random(division // 2 if halves else division).shuffle(others)
    drawn = len(others) // 2 if halves else max(0, len(side_of) // 2 - len(validation))
    half = others[:drawn] if not halves or division % 2 == 0 else others[drawn:]
    return validation.union(half)


def systems(split: Split) -> Iterator[System]:
    """Single networks, means of two and of three seeds, and of dice-ce with another method of the same seed."""
    seeds = sorted({seed for _, seed in split})
    methods = sorted({method for method, _ in split})
    for method in methods:
        mine = [seed for seed in seeds if (method, seed) in split]
        own = method == BASELINE
        for seed in mine:
            yield System(method, ((method, seed),), ALL if own else (LAST,))
        for number in (2, 3):
            for chosen in combinations(mine, number):
                yield System(f"{number} x {method}", tuple((method, seed) for seed in chosen), (LAST,))
        for seed in mine:
            if not own and (BASELINE, seed) in split:
                yield System(f"{BASELINE} and {method}", ((BASELINE, seed), (method, seed)), (LAST,))


def fewer(system: System) -> System:
    """With a temperature and the last calibrator for dice-ce, that one for means of seeds, and none for others."""
    if system.name == BASELINE:
        return system._replace(calibrators=(ALL[0], LAST))
    return system if " x " in system.name else system._replace(calibrators=())


def measure(system: System, split: Split, fit: set[str], found: Values) -> None:
    """Add the values of the system on patients that nothing is fitted to, with each of its calibrators."""
    first = split[system.members[0]]
    mean = {name: mean_of([split[member][name].logits for member in system.members]) for name in first}
    to_fit = [(mean[name], case.labels.long()) for name, case in first.items() if case.patient in fit]
    test = {name: case for name, case in first.items() if case.patient not in fit}

    def add(calibrator: str, logits: dict[str, Tensor]) -> None:
        rows, micro = numbers(test, logits)
        for patient, row in rows:
            found.rows[system.name, calibrator][patient].append(row)
        found.micro[system.name, calibrator].append(micro)

    add("none", mean)
    if system.name == BASELINE:
        add("own offsets (needs labels)", {name: with_own_offsets(mean[name], test[name].labels) for name in test})
    for calibrator in system.calibrators:
        method, settings = CALIBRATORS[calibrator]
        start = time.perf_counter()
        fitted = make_calibrator(method, **settings).fit(to_fit)
        found.seconds[calibrator].append(time.perf_counter() - start)
        add(calibrator, {name: fitted.transform(mean[name]) for name in test})


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
    gc.collect()  # an optimizer refers to itself, and keeps what it saw of the case
    moved = flat + torch.cat([torch.zeros(1, 1), offsets.detach()])
    return moved.reshape(logits.shape)


def numbers(test: dict[str, Held], logits: dict[str, Tensor]) -> tuple[list[tuple[str, list[float]]], float]:
    """Of each case its patient and metrics; and micro-ACE."""
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


def write(name: str, found: Values) -> None:
    """Means over patients, and changes against dice-ce with 95 % intervals over patients."""
    means = {
        key: {patient: torch.tensor(rows).nanmean(0) for patient, rows in by_patient.items()}
        for key, by_patient in found.rows.items()
    }
    base = means[BASELINE, "none"]
    own = torch.stack(list(base.values()))
    table = []
    for (system, calibrator), by_patient in means.items():
        mine = torch.stack([by_patient[patient] for patient in base])
        row: dict[str, Any] = {"system": system, "calibrator": calibrator, "patients": len(base)}
        for i, metric in enumerate(METRICS):
            in_points = metric == "dice"
            scale = 100.0 if in_points else 100.0 / float(own[:, i].mean())
            change = (mine[:, i] - own[:, i]) * scale
            around = float(stats.t.ppf(0.975, len(change) - 1)) * float(stats.sem(change))
            low, high = float(change.mean()) - around, float(change.mean()) + around
            row[metric] = round(float(mine[:, i].mean()), 5)
            row[f"{metric}_change_{'points' if in_points else '%'}"] = round(float(change.mean()), 2)
            row[f"{metric}_interval"] = f"[{low:.2f}, {high:.2f}]"
        micro = found.micro[system, calibrator]
        row["micro_ace"] = round(sum(micro) / len(micro), 5)
        taken = found.seconds.get(calibrator, [])
        row["fit_s"] = round(sum(taken) / len(taken), 1) if taken else ""
        table.append(row)
    with (RESULTS / f"balance-{name}.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(table[0]))
        writer.writeheader()
        writer.writerows(table)


if __name__ == "__main__":
    main()
