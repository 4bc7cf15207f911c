"""The figures of a study, for its page and for print."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch
from matplotlib.figure import Figure

from segcal._io.files import file_stems, replacing, write_whole
from segcal.calibrators import load_calibrator
from segcal.datasets import DataCase, Dataset
from segcal.errors import FileError, SegcalError, one_of
from segcal.evaluation.diagrams import reliability_histogram
from segcal.evaluation.evaluation import Evaluation
from segcal.evaluation.options import Options
from segcal.plots.colors import method_colors
from segcal.plots.curves import SensitivityPoint, sensitivity_figure
from segcal.plots.maps import case_maps
from segcal.plots.pareto import TradeOff, pareto_figure
from segcal.plots.radar import AXES, radar_figure
from segcal.plots.saving import FORMATS, figure_bytes
from segcal.plots.standard import histogram_figure
from segcal.plots.style import COLUMN_IN, PAGE_IN, default_settings, new_figure
from segcal.statistics import BinStatistics
from segcal.study.plan import Arm
from segcal.study.summary import DatasetResults, Results
from segcal.study.work import CALIBRATOR, Workshop, load_planned
from segcal.training.config import RunConfig
from segcal.training.inference import measuring_options
from segcal.training.runs import predict
from segcal.volumes.regions import Regions

FOLDER = "figures"
LEGEND_COLUMNS, LEGEND_LINE_IN = 4, 0.16  # roughly, to leave room below


class StudyFigure(NamedTuple):
    """A figure as it was written."""

    kind: str
    """"pareto", "histograms", "radar", "sensitivity" or "maps"."""
    name: str
    """Of its files."""
    caption: str
    svg: bytes
    """As the page shows it, whatever the formats of its files."""
    size_in: tuple[float, float]


class Drawn(NamedTuple):
    """The figures of a study, and which could not be drawn."""

    figures: tuple[StudyFigure, ...]
    remarks: tuple[str, ...]


class MapCase(NamedTuple):
    """A case and class to show, and why it was chosen."""

    case: str
    class_name: str
    rank: str


class _Sketch(NamedTuple):
    kind: str
    name: str
    caption: str
    figure: Figure


def write_figures(results: Results, shop: Workshop, out: Path, *, formats: Iterable[str] = ("png", "pdf")) -> Drawn:
    """Draw what a study found, and write it to the folder `figures` of `out`, in the place of what was drawn before.

    Probability maps are predicted now, where data and weights are there; if they are not, a remark says so.
    """
    formats = tuple(formats)
    for kind in formats:
        one_of("the format of a figure", kind, FORMATS)
    figures: list[StudyFigure] = []
    remarks: list[str] = []
    with default_settings(), replacing(out / FOLDER) as new:
        for sketch in _sketches(results, shop, remarks):
            content = {kind: figure_bytes(sketch.figure, kind) for kind in dict.fromkeys(("svg", *formats))}
            for kind in formats:
                write_whole(new / f"{sketch.name}.{kind}", content[kind])
            figures.append(StudyFigure(*sketch[:3], content["svg"], tuple(sketch.figure.get_size_inches().tolist())))
    return Drawn(tuple(figures), tuple(remarks))


def study_colors(results: Results) -> dict[str, str]:
    """The color of each method in all figures of a study and on its page."""
    main = [method for found in results.datasets for method in found.main_methods]
    return method_colors([*main, *(method for found in results.datasets for method in found.methods)])


def _sketches(results: Results, shop: Workshop, remarks: list[str]) -> Iterator[_Sketch]:
    """One figure at a time."""
    if not results.datasets:
        return
    colors = study_colors(results)
    stems = file_stems(results.plan.study.config.datasets)
    yield _pareto(results, colors)
    yield _histograms(results, colors)
    for found in results.datasets:
        yield _radar(found, stems[found.name], colors)
    for found in results.datasets:
        yield from _sensitivity(found, stems[found.name], colors)
    for found in results.datasets:
        yield from _maps(found, shop, stems[found.name], remarks)


def _histograms(results: Results, colors: dict[str, str]) -> _Sketch:
    rows = {
        found.name: {method: reliability_histogram(_together(found.test[method])) for method in found.main_methods}
        for found in results.datasets
    }
    several = any(_has_seeds(found) for found in results.datasets)
    caption = (
        f"Dataset reliability histograms of the test cases{' of all seeds' if several else ''}, averaged over classes: "
        "in each column of a panel, how the observed frequencies of single cases are spread. A narrow ridge on the "
        "dashed line means that every case can be trusted, not just their average."
    )
    return _Sketch("histograms", "histograms", caption, histogram_figure(rows, colors=colors))


def _has_seeds(found: DatasetResults) -> bool:
    return any(len(seeds) > 1 for seeds in found.seeds.values())


def _together(seeds: Sequence[Evaluation]) -> BinStatistics:
    return BinStatistics.concatenate(evaluation.foreground().binned for evaluation in seeds)


def _radar(found: DatasetResults, stem: str, colors: dict[str, str]) -> _Sketch:
    comparison = found.comparison
    numbers = {"all": comparison.cases, "complete": comparison.complete}
    panels = {
        f"{which} cases (n = {numbers[which]})": {
            method: {
                axis: comparison.find(method, cases=which, average=column.average, metric=column.metric).value
                for axis, column in AXES.items()
            }
            for method in found.main_methods
        }
        for which in comparison.case_sets
    }
    figure = new_figure(*((PAGE_IN, 3.7) if len(panels) > 1 else (COLUMN_IN, 3.7)))
    radar_figure(figure, panels, colors=colors)
    caption = f"{found.name}: each metric relative to the best method, which lies on the rim; further out is better."
    return _Sketch("radar", f"radar-{stem}", caption, figure)


def _sensitivity(found: DatasetResults, stem: str, colors: dict[str, str]) -> Iterator[_Sketch]:
    points: dict[str, list[SensitivityPoint]] = {"bins": [], "lambda": []}
    for _, method, against, setting, label in found.points:
        dice, ace = (found.comparison.find(label, metric=metric) for metric in ("dice", "ace"))
        if setting > 0:  # the axis is logarithmic
            point = SensitivityPoint(method, setting, dice.value, ace.value, dice.seed_std, ace.seed_std)
            points[against].append(point)
    shown = [against for against, some in points.items() if some]
    if not shown:
        return
    figure = new_figure(PAGE_IN if len(shown) > 1 else COLUMN_IN, 3.6)
    sensitivity_figure(figure, bins=points["bins"], weights=points["lambda"], colors=colors)
    words = {"bins": "the number of bins", "lambda": "the weight of the calibration term"}
    caption = (
        f"{found.name}: DSC (higher is better) and macro-ACE (lower is better) against "
        f"{' and '.join(words[against] for against in shown)}"
        + ("; bands are one standard deviation over seeds to either side." if _has_seeds(found) else ".")
    )
    yield _Sketch("sensitivity", f"sensitivity-{stem}", caption, figure)


def _pareto(results: Results, colors: dict[str, str]) -> _Sketch:
    panels = {
        f"{found.name}, {side} cases": [
            TradeOff(run.method, run.values["dsc"], run.values["macro-ace"]) for run in runs
        ]
        for found in results.datasets
        for side, runs in found.run_values.items()
    }
    legend_in = LEGEND_LINE_IN * -(-len(colors) // LEGEND_COLUMNS)
    figure = new_figure(PAGE_IN, 0.5 + 2.5 * len(results.datasets) + legend_in)
    pareto_figure(figure, panels, colors=colors)
    caption = (
        "DSC against macro-ACE: better lies to the right and below. The front joins the methods that no other beats in "
        "both."
    )
    return _Sketch("pareto", "pareto", caption, figure)


def map_cases(found: DatasetResults, number: int) -> list[MapCase]:
    """Test cases to show: the median by the baseline's macro-ACE (mean over seeds), then from the worst on.

    The class is the one with the largest ACE of those that the case has.
    """
    baseline = [evaluation.foreground() for evaluation in found.test[found.methods[0]]]
    others = [found.test[method][0].cases for method in found.main_methods]
    names = sorted(set(baseline[0].cases).intersection(*(part.cases for part in baseline), *others))
    errors = torch.stack([_errors(part, names) for part in baseline]).nanmean(0)  # case, class
    score = errors.nanmean(1)
    true = baseline[0].overlap.true[[baseline[0].cases.index(name) for name in names]]
    present = errors.where(true > 0, torch.nan)
    known = [i for i in range(len(names)) if not present[i].isnan().all()]
    worst_first = sorted(known, key=lambda i: -score[i].item())
    ranked = {i: f"the {_ordinal(rank)}worst" for rank, i in enumerate(worst_first, start=1)}
    if worst_first:
        median = worst_first[len(worst_first) // 2]
        ranked = {median: "the median"} | {i: rank for i, rank in ranked.items() if i != median}
    return [
        MapCase(names[i], baseline[0].classes[int(present[i].nan_to_num(-1).argmax())], rank)
        for i, rank in list(ranked.items())[:number]
    ]


def _errors(part: Evaluation, names: Sequence[str]) -> torch.Tensor:
    return part.case_metrics()["ace"][[part.cases.index(name) for name in names]]


def _ordinal(rank: int) -> str:
    return "" if rank == 1 else {2: "second ", 3: "third "}.get(rank, f"{rank}th ")


def _maps(found: DatasetResults, shop: Workshop, stem: str, remarks: list[str]) -> Iterator[_Sketch]:
    shown = map_cases(found, shop.plan.study.config.maps)
    if not shown:
        return
    try:
        arms = [_first_arm(found, shop, method) for method in found.main_methods]
        cases, options = _predict([each.case for each in shown], arms, shop)
    except (SegcalError, OSError) as error:
        remarks.append(f"{found.name}: no probability maps; {error}")
        return
    for i, (name, class_name, rank) in enumerate(shown, start=1):
        case = cases[name]
        predictions = {arm.method: arm.results(shop.runs, "maps") / f"{name}.nii.gz" for arm in arms}
        try:
            assert case.label is not None  # it was tested
            figure = case_maps(predictions, case.label, class_name, image=case.images[0], case=name, options=options)
        except (SegcalError, OSError) as error:
            remarks.append(f"{found.name}: no probability maps of {name}; {error}")
            continue
        caption = (
            f"{found.name}, {name}: {rank} test case by the macro-ACE of {found.methods[0]}. Probabilities of "
            f"{class_name}, each method's run of seed {arms[0].seed}, in the slice where they are furthest from the "
            "labels."
        )
        yield _Sketch("maps", f"maps-{stem}-{i}", caption, figure)


def _first_arm(found: DatasetResults, shop: Workshop, method: str) -> Arm:
    """That of the first seed there is."""
    wanted = found.name, method, found.seeds[method][0]
    return next(arm for arm in shop.plan.arms if (arm.dataset, arm.method, arm.seed) == wanted)


def _predict(names: Sequence[str], arms: Sequence[Arm], shop: Workshop) -> tuple[dict[str, DataCase], Options]:
    """Write the maps of these cases by each arm, unless they are there; the cases, and how to read the maps."""
    for arm in arms:
        folder = shop.runs / arm.run
        run = load_planned(shop.plan.runs[arm.run], shop.runs)
        cases = {case.name: case for case in run.dataset.cases}
        if lost := [name for name in names if name not in cases]:
            raise FileError(f"{run.dataset.root} must have the case {lost[0]}; it has not. Check the dataset.")
        fitted = None if arm.fitting is None else load_calibrator(folder / arm.fitting.folder / CALIBRATOR)
        made = predict(run, arm.results(shop.runs, "maps"), cases=[cases[name] for name in names], calibrator=fitted)
        if made.failures:
            raise SegcalError(made.failures[0].message)
    return cases, _reading(run.dataset, run.config)


def _reading(dataset: Dataset, config: RunConfig) -> Options:
    """How case maps and labels on disk are read as they were evaluated."""
    options = replace(measuring_options(dataset, config), logits=False)
    if dataset.regions is not None or dataset.values == tuple(range(len(dataset.values))):
        return options
    each: dict[str, tuple[int, ...]] = {
        name: (value,) for name, value in zip(dataset.classes, dataset.values, strict=True)
    }
    return replace(options, regions=Regions(each, dataset.values))  # label files hold values, not indices
