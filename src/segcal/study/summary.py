"""What a study found: its evaluations compared dataset by dataset, as the paper's tables and as files."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from segcal._io.files import csv_text, replacing, write_whole
from segcal.comparison.comparison import Comparison, compare
from segcal.comparison.cost import costs
from segcal.comparison.tables import ENTRY_COLUMNS, LAYOUTS, explanations, left_out, make_table
from segcal.evaluation.columns import Column
from segcal.evaluation.conditions import METRICS
from segcal.evaluation.evaluation import Evaluation
from segcal.evaluation.remarks import remarks
from segcal.evaluation.tables import ALL_CLASSES, Cell, Table, latex_document, markdown_document
from segcal.study.plan import Arm, Plan, SweepPoint
from segcal.study.work import SIDES, RunState, Workshop

MEAN = "mean of datasets"
PAPER_LAYOUTS = {  # without what the paper does not have
    title: tuple(column for column in columns if column.average != "micro pooled") for title, columns in LAYOUTS.items()
}
CHANGES = (
    Column("dice", "macro"),
    *(Column(metric, average) for metric in ("ace", "ece", "mce") for average in ("macro", "micro pooled")),
    *(Column(metric, "macro") for metric in ("brier", "nll", "occupied")),
)


class RunValues(NamedTuple):
    """The means of one run, by the names of METRICS."""

    method: str
    seed: int
    values: Mapping[str, float]


@dataclass(frozen=True, eq=False)
class DatasetResults:
    """A dataset's evaluations by method, one for each seed, and the comparison of the test ones."""

    name: str
    seeds: dict[str, tuple[int, ...]]
    validation: dict[str, list[Evaluation]]
    """Without calibrators that were fitted to all validation cases, as there was only one validation patient."""
    test: dict[str, list[Evaluation]]
    comparison: Comparison
    points: tuple[SweepPoint, ...]

    @property
    def methods(self) -> tuple[str, ...]:
        return self.comparison.methods

    @property
    def main_methods(self) -> tuple[str, ...]:
        """Those that are not a point of a sweep alone."""
        swept = {point.label for point in self.points} - {point.method for point in self.points}
        return tuple(method for method in self.methods if method not in swept)

    @cached_property
    def run_values(self) -> dict[str, list[RunValues]]:
        """The means of every run on validation and on test cases."""
        return {
            side: [
                RunValues(method, seed, metric_values(evaluation))
                for method, found in evaluations.items()
                for seed, evaluation in zip(self.seeds[method], found, strict=True)
            ]
            for side, evaluations in (("validation", self.validation), ("test", self.test))
        }


@dataclass(frozen=True, eq=False)
class Results:
    """All that a study has so far."""

    plan: Plan
    datasets: tuple[DatasetResults, ...]
    remarks: tuple[str, ...]
    """What is missing."""
    states: tuple[RunState, ...]
    """How each run stood when the evaluations were read."""

    @cached_property
    def changes(self) -> dict[str, dict[str, list[float]]]:
        """As `relative_changes` tells them."""
        return relative_changes(self.datasets)

    @cached_property
    def tables(self) -> tuple[Table, ...]:
        """The paper's table 1, relative changes, the other errors, complete cases; then every class."""
        return tuple(_study_tables(self))

    @cached_property
    def notes(self) -> tuple[str, ...]:
        """What a reader must know to read the tables, once, and what is missing."""
        return tuple(_study_notes(self))

    @cached_property
    def rows(self) -> tuple[dict[str, Any], ...]:
        """Every arm of the plan, with its numbers where it is done."""
        return tuple(_run_rows(self))

    @property
    def failures(self) -> tuple[RunState, ...]:
        """Runs that failed."""
        return tuple(state for state in self.states if state.status == "failed")


def metric_values(evaluation: Evaluation) -> dict[str, float]:
    """Return the means over classes by the names of METRICS."""
    means = evaluation.means()
    return {name: means[place] for name, place in METRICS.items()}


def collect(shop: Workshop) -> Results:
    """Read the evaluations that are there and compare them; what is missing is said."""
    plan = shop.plan
    states = tuple(shop.states())
    done = {state.name for state in states if state.status == "done"}
    datasets = []
    missing = [f"{name} is missing: {what}" for name, what in plan.missing.items()]
    for name in plan.study.config.datasets:
        if name in plan.missing:
            continue
        arms = [arm for arm in plan.arms if arm.dataset == name]
        lacking = [f"{arm.method}, seed {arm.seed}" for arm in arms if arm.run not in done]
        missing += [f"{name}: {', '.join(lacking)}: not there yet."] if lacking else []
        there = [arm for arm in arms if arm.run in done]
        if plan.study.config.baseline not in {arm.method for arm in there}:
            missing.append(f"{name}: nothing to compare with yet, without {plan.study.config.baseline}.")
            continue
        datasets.append(_dataset_results(name, there, shop.runs, plan.points))
    return Results(plan, tuple(datasets), tuple(missing), states)


def _dataset_results(name: str, arms: Sequence[Arm], runs: Path, points: Sequence[SweepPoint]) -> DatasetResults:
    seeds: dict[str, tuple[int, ...]] = {}
    found: dict[str, dict[str, list[Evaluation]]] = {side: {} for side in SIDES}
    for arm in arms:
        seeds[arm.method] = (*seeds.get(arm.method, ()), arm.seed)
        for side in SIDES:
            path = arm.results(runs, side) / "evaluation.npz"
            if arm.fitting is None or side == "test" or path.exists():
                found[side].setdefault(arm.method, []).append(Evaluation.load(path))
    for method in [method for method, own in found["validation"].items() if len(own) < len(seeds[method])]:
        del found["validation"][method]
    return DatasetResults(
        name, seeds, found["validation"], found["test"], compare(found["test"]),
        tuple(point for point in points if point.dataset == name and point.label in seeds),
    )  # fmt: skip


def _study_tables(results: Results) -> list[Table]:
    datasets = results.datasets
    if not datasets:
        return []
    tables = [_over_datasets(f"{title}, {ALL_CLASSES}", datasets, c, "all") for title, c in PAPER_LAYOUTS.items()]
    tables.insert(1, change_table(results))
    if any("complete" in found.comparison.case_sets for found in datasets):
        tables += [
            _over_datasets(f"{title}, {ALL_CLASSES}, cases with every label", datasets, columns, "complete")
            for title, columns in PAPER_LAYOUTS.items()
        ]
    for found in datasets:
        classes = found.comparison.classes
        if len(classes) > 1:
            tables += [
                make_table(found.comparison, f"{found.name}: {title[0].lower()}{title[1:]}", columns, labels=classes)
                for title, columns in PAPER_LAYOUTS.items()
            ]
    return tables


def _over_datasets(title: str, datasets: Sequence[DatasetResults], columns: Sequence[Column], which: str) -> Table:
    """One group of rows for each dataset."""
    rows: list[tuple[Cell, ...]] = []
    for found in datasets:
        there = which if which in found.comparison.case_sets else "all"  # where all cases are complete
        part = make_table(found.comparison, title, columns, which=there, floor=False)
        rows += [(Cell(found.name if i == 0 else ""), *row) for i, row in enumerate(part.rows)]
    return Table(title, ("dataset", *part.headings), tuple(rows), names=2)


def relative_changes(datasets: Sequence[DatasetResults]) -> dict[str, dict[str, list[float]]]:
    """By dataset and method, the change of each of `CHANGES` against the baseline: DSC in points, errors in percent.

    Of several datasets, their mean follows, over those that have the method.
    """
    found: dict[str, dict[str, list[float]]] = {}
    for dataset in datasets:
        _, *others = dataset.methods
        found[dataset.name] = {
            method: [
                100 * dataset.comparison.find(method, average=column.average, metric=column.metric).change
                for column in CHANGES
            ]
            for method in others
        }
    if len(datasets) > 1:
        methods = dict.fromkeys(method for rows in found.values() for method in rows)
        found[MEAN] = {
            method: [fmean(each) for each in zip(*_having(found, method), strict=True)] for method in methods
        }
    return found


def _having(rows: dict[str, dict[str, list[float]]], method: str) -> Iterator[list[float]]:
    return (each[method] for each in rows.values() if method in each)


def change_table(results: Results) -> Table:
    """The relative changes, with the tests' stars where they are of one dataset."""
    comparisons = {found.name: found.comparison for found in results.datasets}
    headings = ("dataset", "method", *(f"{c.heading} {'points' if c.metric == 'dice' else '%'}" for c in CHANGES))
    rows: list[tuple[Cell, ...]] = []
    for name, methods in results.changes.items():
        for i, (method, values) in enumerate(methods.items()):
            cells = [Cell(name if i == 0 else ""), Cell(method)]
            for column, value in zip(CHANGES, values, strict=True):
                stars = ""
                if name in comparisons:
                    stars = comparisons[name].find(method, average=column.average, metric=column.metric).stars
                digits = 2 if column.metric == "dice" else 1
                cells.append(Cell("-" if math.isnan(value) else f"{value:+.{digits}f}", stars=stars))
            rows.append(tuple(cells))
    return Table(f"Change against {results.datasets[0].methods[0]}", headings, tuple(rows), names=2)


def _run_rows(results: Results) -> Iterator[dict[str, Any]]:
    values = {
        (found.name, side, run.method, run.seed): run.values
        for found in results.datasets
        for side, runs in found.run_values.items()
        for run in runs
    }
    facts = {state.name: state for state in results.states}
    for arm in results.plan.arms:
        row: dict[str, Any] = {
            "dataset": arm.dataset, "method": arm.method, "seed": arm.seed, "run": arm.run,
            "status": facts[arm.run].status, "seconds": facts[arm.run].seconds,
        }  # fmt: skip
        for side in SIDES:
            known = values.get((arm.dataset, side, arm.method, arm.seed), {})
            row |= {f"{side} {name}": known.get(name, math.nan) for name in METRICS}
        yield row


def _study_notes(results: Results) -> list[str]:
    said = [f"{found.name}: {note}" for found in results.datasets for note in explanations(found.comparison)[:1]]
    for found in results.datasets:
        run = found.test[found.methods[0]][0].provenance.get("run", {})
        said += [f"{found.name}: {run['split_note']}"] if run.get("split_note") else []
    shared = [note for found in results.datasets[:1] for note in explanations(found.comparison)[1:]]
    if len(results.datasets) > 1:
        shared.append("Means over datasets count each dataset once, as the paper does.")
    told = [f"{found.name}, {remark}" for found in results.datasets for remark in _remarks(found)]
    return [*said, *shared, *told, *results.remarks]


def _remarks(found: DatasetResults) -> Iterator[str]:
    """What a lower ACE cost, of the methods that are no point of a sweep alone; what was not measured, and why."""
    paid = costs(found.comparison)
    yield from (paid[method] for method in found.main_methods if method in paid)
    if unmeasured := [method for method in found.main_methods if method not in found.validation]:
        yield (
            f"without validation results: {'; '.join(unmeasured)}. A calibrator is measured on validation cases that "
            "it was not fitted to, which needs those of at least 2 patients."
        )
    yield from left_out(found.comparison)
    yield from remarks(found.test)


def write_tables(results: Results, out: Path) -> list[Path]:
    """Write results.md and results.tex (tables and notes), results.csv (every number) and runs.csv."""
    tables, sentences = results.tables, results.notes
    config = results.plan.study.config
    entries = [(found.name, *entry) for found in results.datasets for entry in found.comparison.entries]
    rows = results.rows
    files = {
        "results.md": f"# {config.title}\n\n" + markdown_document(tables, sentences),
        "results.tex": latex_document(tables, sentences),
        "results.csv": csv_text(("dataset", *ENTRY_COLUMNS), entries),
        "runs.csv": csv_text(list(rows[0]), [list(row.values()) for row in rows]),
    }
    with replacing(out, files) as new:
        for name, content in files.items():
            write_whole(new / name, content.encode())
    return [out / name for name in files]
