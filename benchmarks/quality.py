"""How good promises on cases without labels are: expected Dice, intervals, guaranteed thresholds, queue, shift.

    python benchmarks/quality.py WORK --study hippocampus=STUDY_FOLDER --study acdc=OTHER --data ROOT

Takes the trained runs of study folders (`segcal study run`), predicts their test cases, evaluates them as they are and
calibrated, and writes benchmarks/results/quality_*.csv. What was learned is always tried on patients that it was not
learned from. With --shift the images of the first study are disturbed, and predicted again.
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import nibabel
import numpy as np
import torch
from numpy.typing import NDArray
from scipy import stats

import segcal
from segcal.errors import ConfigError
from segcal.evaluation.decisions import risk_coverage
from segcal.evaluation.evaluation import Evaluation
from segcal.evaluation.intervals import patients_of
from segcal.quality.conformal import Conformal
from segcal.quality.fitting import fit_quality
from segcal.quality.promises import Reference, promise, reference_of
from segcal.quality.queue import make_queue
from segcal.quality.risk import learn_thresholds
from segcal.quality.summaries import summaries_of

Array = NDArray[Any]
Found = dict[tuple[int, str], Evaluation]
RESULTS = Path(__file__).parent / "results"
SPLITS, FEW_SPLITS, LEVEL = 200, 40, 0.9


def write(name: str, rows: Sequence[dict[str, Any]]) -> None:
    with (RESULTS / name).open("w", newline="") as file:
        table = csv.DictWriter(file, list(rows[0]))
        table.writeheader()
        table.writerows(rows)
    for row in rows:
        print(
            "  ".join(
                f"{key} {value:.4f}" if isinstance(value, float) else f"{key} {value}" for key, value in row.items()
            )
        )
    print(f"wrote {name}\n")


def evaluations(work: Path, name: str, study: Path, data: Path | None) -> Found:
    """By seed and calibrator; "none" is the network as it is."""
    from segcal.training.runs import load_run, predict

    found = {}
    for folder in sorted((study / "runs").iterdir()):
        run = load_run(folder, root=data)
        seed, maps = run.config.seed, work / name / f"seed{run.config.seed}" / "maps"
        predict(run, maps, side="test")
        labels = labels_of(run, work / name / "labels")
        calibrators = {"none": None, **{path.parent.name: path for path in folder.glob("calibrated/*/calibrator.json")}}
        for method, path in calibrators.items():
            out = maps.parent / f"evaluated-{method}"
            found[seed, method] = segcal.evaluate(maps, labels, out, calibrator=path, workers=2).evaluation.foreground()
    return found


def labels_of(run: Any, folder: Path) -> Path:
    """Label maps of the run's dataset, by the names of its cases."""
    folder.mkdir(parents=True, exist_ok=True)
    for case in run.dataset.cases:
        link = folder / f"{case.name}.nii.gz"
        if not link.exists():
            link.symlink_to(Path(case.label).resolve())
    return folder


def part(reference: Reference, cases: Array) -> Reference:
    return reference.without(~np.isin(np.arange(len(reference.patients)), cases))


def halves(patients: Array, seed: int) -> tuple[Array, Array]:
    """Cases of half of the patients, and of the others."""
    names = np.unique(patients)
    known = np.random.default_rng(seed).permutation(names)[: len(names) // 2]
    inside = np.isin(patients, known)
    return np.flatnonzero(inside), np.flatnonzero(~inside)


def expected_rows(name: str, found: Found) -> Iterable[dict[str, Any]]:
    """Expected against actual Dice: as the probabilities have it, and as half of the patients teach for the others."""
    for (seed, method), evaluation in sorted(found.items()):
        _, patients = np.unique(patients_of(evaluation.cases), return_inverse=True)
        whole = reference_of(evaluation, patients)
        errors: dict[str, list[Array]] = {"predicted": [], "constant": []}
        for split in range(FEW_SPLITS):
            known, new = (part(whole, cases) for cases in halves(patients, split))
            errors["predicted"].append(np.nanmean(np.abs(promise(known, new, LEVEL).dice[..., 0] - new.dice), 0))
            errors["constant"].append(np.nanmean(np.abs(np.nanmedian(known.dice, 0) - new.dice), 0))
        predicted, constant = (np.mean(errors[kind], 0) for kind in ("predicted", "constant"))
        for c, label in enumerate(evaluation.classes):
            known = ~np.isnan(whole.dice[:, c])
            y, x = whole.dice[known, c], whole.expected[known, c]
            yield {
                "dataset": name, "seed": seed, "calibrator": method, "class": label, "cases": len(y),
                "dice": float(y.mean()), "expected": float(x.mean()), "bias": float((x - y).mean()),
                "error_expected": float(np.abs(x - y).mean()), "error_predicted": float(predicted[c]),
                "error_constant": float(constant[c]), "ratio": float(predicted[c] / constant[c]),
                "rank_correlation": float(stats.spearmanr(x, y).statistic),
            }  # fmt: skip


def interval_rows(name: str, found: Found, method: str) -> Iterable[dict[str, Any]]:
    """Coverage and width over random halves of the patients; beside it one width for all cases."""
    for seed in sorted({seed for seed, _ in found}):
        evaluation = found[seed, method]
        _, patients = np.unique(patients_of(evaluation.cases), return_inverse=True)
        whole = reference_of(evaluation, patients)
        gathered: dict[tuple[str, str], list[list[float]]] = {}
        for split in range(SPLITS):
            known, new = (part(whole, cases) for cases in halves(patients, split))
            promises = promise(known, new, LEVEL)
            for quantity, truth, anchors, most in (
                ("dice", [known.dice, new.dice], [known.expected, new.expected], 1.0),
                ("volume", [known.true, new.true], [known.volume, new.volume], np.inf),
            ):
                promised = getattr(promises, quantity)
                ours = held(truth[1], promised[..., 1], promised[..., 2])
                low, high = one_width(truth[0] - anchors[0], known.patients)
                ends = (np.clip(anchors[1] + end, 0, most) for end in (low, high))
                gathered.setdefault((quantity, "ours"), []).append(ours)
                gathered.setdefault((quantity, "constant"), []).append(held(truth[1], *ends))
        for quantity in ("dice", "volume"):
            ours, constant = (np.nanmean(gathered[quantity, kind], 0) for kind in ("ours", "constant"))
            yield {
                "dataset": name, "seed": seed, "calibrator": method, "quantity": quantity, "coverage": float(ours[0]),
                "width": float(ours[1]), "constant_coverage": float(constant[0]),
                "constant_width": float(constant[1]), "ratio": float(ours[1] / constant[1]),
            }  # fmt: skip


def one_width(errors: Array, patients: Array) -> tuple[Array, Array]:
    """By class, a conformal interval of the same width for all cases: no summaries, errors as they are."""
    ends = []
    for column in errors.T:
        known = ~np.isnan(column)
        model = Conformal(np.zeros((known.sum(), 1)), column[known], patients[known])
        ends.append(model.predict(np.zeros(1), LEVEL)[1:])
    return np.array(ends)[:, 0], np.array(ends)[:, 1]


def held(truth: Array, low: Array, high: Array) -> list[float]:
    known = ~np.isnan(truth) & ~np.isnan(low)
    return [float(((low <= truth) & (truth <= high))[known].mean()), float((high - low)[known].mean())]


def risk_rows(name: str, found: Found, method: str, level: float) -> Iterable[dict[str, Any]]:
    """Mean and spread of the false-negative rate of new patients, over random halves."""
    for seed in sorted({seed for seed, _ in found}):
        evaluation = found[seed, method]
        _, patients = np.unique(patients_of(evaluation.cases), return_inverse=True)
        fine = evaluation.statistics
        below = (fine.label_sum.cumsum(2) - fine.label_sum).numpy()  # of the class, lost at each edge
        true = fine.label_sum.sum(2).numpy()
        for adaptive in (False, True):
            means, spreads = [], []
            for split in range(SPLITS):
                known, new = halves(patients, split)
                try:
                    rule = learn_thresholds(
                        fine.select(cases=known.tolist()), patients[known], evaluation.classes, risk="fnr", level=level,
                        adaptive=adaptive,
                    )  # fmt: skip
                except ConfigError:
                    continue
                losses = []
                for i in new:
                    places = rule.bins(fine.count[i].numpy(), fine.confidence_sum[i].numpy())
                    ends = np.append(below[i], true[i][:, None], 1)
                    losses.append(
                        np.where(true[i] > 0, ends[np.arange(len(places)), places] / np.maximum(true[i], 1), np.nan)
                    )
                means.append(np.nanmean(losses))
                spreads.append(np.nanmean(np.nanstd(losses, 0)))
            yield {
                "dataset": name, "seed": seed, "calibrator": method, "rule": "adaptive" if adaptive else "fixed",
                "splits": len(means), "mean_fnr": float(np.mean(means)), "spread": float(np.mean(spreads)),
            }  # fmt: skip


def cohort_rows(name: str, found: Found, method: str) -> Iterable[dict[str, Any]]:
    """Mean Dice of new patients without labels, the queue, and how often usual cohorts are called shifted."""
    for seed in sorted({seed for seed, _ in found}):
        evaluation = found[seed, method]
        _, patients = np.unique(patients_of(evaluation.cases), return_inverse=True)
        truth = segcal.dice(evaluation.overlap).numpy()
        off, inside, alarms, unlike, worst = [], [], [], [], []
        for split in range(FEW_SPLITS):
            known, new = halves(patients, split)
            queue = make_queue(
                fit_quality(evaluation.select(cases=known.tolist())), evaluation.select(cases=new.tolist())
            )
            whole, actual = queue.cohort[0], float(np.nanmean(np.nanmean(truth[new], 0)))
            off.append(abs(whole.value - actual))
            inside.append(whole.low <= actual <= whole.high)
            alarms.append(bool(queue.shifted))
            unlike.append(np.mean(["unlike" in row.flags for row in queue.rows]))
            order = {row.case: row.rank for row in queue.rows}
            ranks = np.array([order[evaluation.cases[i]] for i in new])
            worst.append(lift(np.nanmean(truth[new], 1), ranks))
        yield {
            "dataset": name, "seed": seed, "calibrator": method, "off": float(np.mean(off)), "inside": np.mean(inside),
            "cohorts_called_shifted": np.mean(alarms), "cases_called_unlike": float(np.mean(unlike)),
            "worst_fifth_found_times_chance": float(np.mean(worst)),
        }  # fmt: skip


def lift(truth: Array, ranks: Array) -> float:
    """How many more of the truly worst fifth are among the first fifth of the queue than chance would bring."""
    number = max(1, round(0.2 * len(truth)))
    bad, first = set(np.argsort(truth)[:number].tolist()), set(np.argsort(ranks)[:number].tolist())
    return len(bad & first) / number / (number / len(truth))


def area_rows(work: Path, name: str, found: Found, method: str) -> Iterable[dict[str, Any]]:
    """Area under the risk-coverage curve by our order and by others, of the mean Dice over classes."""
    seeds = sorted({seed for seed, _ in found})
    for seed in seeds:
        evaluation = found[seed, method]
        truth = np.nanmean(segcal.dice(evaluation.overlap).numpy(), 1)
        top = evaluation.top_label
        fine = evaluation.statistics
        mean = fine.confidence_sum / fine.count.clamp(min=1)
        inside = mean.clamp(1e-9, 1 - 1e-9)
        entropy = -(fine.count * (inside * inside.log() + (1 - inside) * (1 - inside).log())).sum((1, 2))
        size = evaluation.overlap.predicted.sum(1).clamp(min=1)
        others = {
            "expected_dice": np.nanmean(summaries_of(evaluation).expected, 1),
            "entropy_per_foreground_voxel": -(entropy / size).numpy(),
            "mean_entropy": -entropy.numpy() / fine.count[:, 0].sum(1).numpy(),
            "mean_maximum_probability": (top.confidence_sum.sum(2) / top.count.sum(2))[:, 0].numpy() if top else None,
            "pairwise_dice_of_seeds": pairwise(work, name, seeds, evaluation) if len(seeds) > 1 else None,
            "ideal": truth,
            "none": None,
        }
        row: dict[str, Any] = {"dataset": name, "seed": seed, "calibrator": method}
        for kind, values in others.items():
            row[kind] = float((1 - truth).mean()) if kind == "none" else (
                float("nan") if values is None else risk_coverage(np.asarray(values), truth).area
            )  # fmt: skip
        yield row


def pairwise(work: Path, name: str, seeds: Sequence[int], evaluation: Evaluation) -> Array:
    """Mean Dice between the decisions of the seeds, over pairs and classes."""
    values = []
    for case in evaluation.cases:
        decided = [
            nibabel.load(work / name / f"seed{seed}" / "maps" / f"{case}.nii.gz").get_fdata(dtype=np.float32).argmax(3)
            for seed in seeds
        ]
        each = [
            2 * ((a == c) & (b == c)).sum() / max(1, (a == c).sum() + (b == c).sum())
            for i, a in enumerate(decided) for b in decided[i + 1 :] for c in range(1, len(evaluation.classes) + 1)
        ]  # fmt: skip
        values.append(np.mean(each))
    return np.array(values)


DISTURBED = ("as it is", "noise 0.3", "noise 1", "bias field", "missing slices")


def disturb(image: Array, kind: str, draw: np.random.Generator) -> Array:
    if kind.startswith("noise"):
        return image + draw.normal(size=image.shape) * image.std() * float(kind.split()[1])
    if kind == "bias field":
        axes = np.meshgrid(*(np.linspace(-1, 1, n) for n in image.shape), indexing="ij")
        return image * np.exp(sum(draw.normal() * 0.6 * axis for axis in axes))
    if kind == "missing slices":
        changed = image.copy()
        axis = int(np.argmax(image.shape))
        gone = draw.random(image.shape[axis]) < 0.25
        changed[(slice(None),) * axis + (gone,)] = 0
        return changed
    return image


def shift_rows(work: Path, name: str, study: Path, data: Path | None, method: str) -> Iterable[dict[str, Any]]:
    """Half of the patients are learned from, the others come disturbed: how far off is their mean Dice, is it said?"""
    from segcal.training.runs import image_cases, load_run, predict

    for folder in sorted((study / "runs").iterdir()):
        run = load_run(folder, root=data)
        seed, calibrator = run.config.seed, folder / "calibrated" / method / "calibrator.json"
        labels = labels_of(run, work / name / "labels")
        usual = Evaluation.load(work / name / f"seed{seed}" / f"evaluated-{method}" / "evaluation.npz").foreground()
        _, patients = np.unique(patients_of(usual.cases), return_inverse=True)
        for kind in DISTURBED:
            base = work / name / f"seed{seed}" / kind.replace(" ", "-")
            images = base / "images"
            images.mkdir(parents=True, exist_ok=True)
            for i, case in enumerate(case for case in run.dataset.cases if case.name in usual.cases):
                if not (images / f"{case.name}.nii.gz").exists():
                    volume = nibabel.load(case.images[0])
                    changed = disturb(volume.get_fdata(dtype=np.float32), kind, np.random.default_rng(i))
                    nibabel.save(
                        nibabel.Nifti1Image(changed.astype(np.float32), volume.affine), images / f"{case.name}.nii.gz"
                    )
            predict(run, base / "maps", cases=image_cases(images, 1))
            evaluation = segcal.evaluate(
                base / "maps", labels, base / "evaluated", calibrator=calibrator
            ).evaluation.foreground()
            truth = segcal.dice(evaluation.overlap).numpy()
            off, inside, said, safe, unlike = [], [], [], [], []
            for split in range(20):
                known, new = halves(patients, split)
                queue = make_queue(
                    fit_quality(usual.select(cases=known.tolist())), evaluation.select(cases=new.tolist())
                )
                whole, actual = queue.cohort[0], float(np.nanmean(np.nanmean(truth[new], 0)))
                off.append(whole.value - actual)
                inside.append(whole.low <= actual <= whole.high)
                said.append(bool(queue.shifted))
                safe.append(inside[-1] or said[-1])
                unlike.append(np.mean(["unlike" in row.flags for row in queue.rows]))
            yield {
                "dataset": name, "seed": seed, "disturbed": kind, "dice": float(np.nanmean(truth)),
                "off": float(np.mean(off)), "inside": np.mean(inside), "called_shifted": np.mean(said),
                "inside_or_called_shifted": np.mean(safe),
                "cases_called_unlike": float(np.mean(unlike)),
            }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("work", type=Path)
    parser.add_argument("--study", action="append", required=True, metavar="NAME=FOLDER")
    parser.add_argument("--data", action="append", default=[], metavar="NAME=FOLDER")
    parser.add_argument("--calibrator", default="local-temperature")
    parser.add_argument("--shift", metavar="NAME")
    parser.add_argument("--only", metavar="TABLE", help="one of the tables, as risk")
    options = parser.parse_args()
    torch.set_num_threads(1)
    roots = dict(text.split("=") for text in options.data)
    tables: dict[str, list[dict[str, Any]]] = {}
    for text in options.study:
        name, _, folder = text.partition("=")
        data = Path(roots[name]) if name in roots else None
        found = evaluations(options.work, name, Path(folder), data)
        method = options.calibrator
        for kind, rows in (
            ("expected", expected_rows(name, found)),
            ("intervals", interval_rows(name, found, method)),
            ("risk", risk_rows(name, found, method, 0.1)),
            ("cohort", cohort_rows(name, found, method)),
            ("area", area_rows(options.work, name, found, method)),
        ):
            if options.only in (None, kind):
                tables.setdefault(kind, []).extend(rows)
        if options.shift == name:
            tables.setdefault("shift", []).extend(shift_rows(options.work, name, Path(folder), data, method))
    for kind, rows in tables.items():
        write(f"quality_{kind}.csv", rows)


if __name__ == "__main__":
    main()
