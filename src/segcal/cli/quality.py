"""Verbs that decide and promise: decide, quality fit, quality apply."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from segcal._io.words import counted
from segcal.cli.app import app
from segcal.cli.options import ClassNames, Dask, Patients, Regions, Sigmoid, dask_cluster, read_options
from segcal.cli.orderly import Verb, Verbs
from segcal.cli.shown import print_json, progress_bar, refusing, say, show_failures, show_notes, show_tables

if TYPE_CHECKING:
    from segcal.evaluation.tables import Table
    from segcal.quality.deciding import Decided, Decision
    from segcal.quality.fitting import Quality
    from segcal.quality.queue import Queue


@app.command(cls=Verb)
def decide(
    predictions: Annotated[Path, typer.Argument(metavar="MAPS", help="Folder of probability maps (or one file).")],
    out: Annotated[Path, typer.Option("--out", help="Folder for the label maps; started again, it goes on there.")],
    rule: Annotated[
        str,
        typer.Option(
            metavar="argmax|dice|threshold=T|FILE",
            help="The most probable class; the largest expected Dice of each case and class; every class where its "
            "probability is at least T; thresholds that `quality fit` learned.",
        ),
    ],
    masks: Annotated[
        bool,
        typer.Option("--masks", help="A channel for each class's whole set, which may overlap, in place of labels."),
    ] = False,
    calibrator: Annotated[
        Path | None, typer.Option(help="Decide on what this calibrator (.json) makes of the maps.")
    ] = None,
    regions: Regions = None,
    workers: Annotated[int, typer.Option(min=1, help="Processes, each with one case at a time.")] = 1,
    dask: Dask = None,
    logits: Annotated[bool, typer.Option("--logits", help="The maps hold logits.")] = False,
    sigmoid: Sigmoid = False,
    class_names: ClassNames = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print every decision as JSON instead of a table.")] = False,
) -> None:
    """Write label maps, each on the grid of its map, and decisions.csv: thresholds, volumes, expected Dice."""
    with refusing(stopped=f"What is done is kept in {out}: the same command goes on from there."):
        import segcal

        with progress_bar("cases") as advance:
            decided = segcal.decide(
                predictions,
                out,
                rule=rule,
                options=read_options(logits, sigmoid, None, class_names, regions, strict=False),
                calibrator=calibrator,
                masks=masks,
                workers=workers,
                executor=dask_cluster(dask),
                progress=advance,
            )
    _show_decided(decided, out, as_json=as_json)
    if decided.contested:
        went = (
            f"{counted(decided.contested, 'voxel')} reached the thresholds of several classes and went to one of them."
        )
        kept = " What the file promises holds for the whole set of each class, which --masks writes."
        say(went + kept if Path(rule).is_file() else went)
    if decided.failures:
        raise typer.Exit(1)


def _show_decided(decided: Decided, out: Path, *, as_json: bool) -> None:
    import json

    show_failures(decided.failures)
    if as_json:
        print_json(json.dumps([row._asdict() for row in decided.decisions], indent=2, ensure_ascii=False))
    elif decided.decisions:
        show_tables([_decisions_table(decided.decisions)], [])
    maps = counted(len(decided.paths), "label map")
    say(f"{maps} and decisions.csv are in {out}, {counted(len(decided.failures), 'case')} failed")


def _decisions_table(decisions: list[Decision]) -> Table:
    """A row for each class: means over cases."""
    from statistics import fmean

    from segcal.evaluation.tables import Cell, Table

    def mean(values: list[float | None], form: str) -> Cell:
        known = [value for value in values if value is not None]
        return Cell(format(fmean(known), form) if known else "n/a")

    rows = []
    for name in dict.fromkeys(row.class_name for row in decisions):
        of_class = [row for row in decisions if row.class_name == name]
        rows.append(
            (
                Cell(name),
                Cell(str(len(of_class))),
                Cell(str(sum(row.voxels == 0 for row in of_class))),
                mean([row.threshold for row in of_class if row.threshold is None or row.threshold <= 1], ".3f"),
                mean([row.volume_ml for row in of_class], ".2f"),
                mean([row.expected_dice for row in of_class if row.voxels], ".4f"),
            )
        )
    headings = ("class", "cases", "empty", "threshold", "volume (ml)", "expected Dice")
    return Table("Decisions, means over cases; thresholds and Dice of those that are not empty", headings, tuple(rows))


quality = typer.Typer(
    cls=Verbs, help="Learn from labelled patients what can be promised of new ones; rank unlabelled cases for review."
)
app.add_typer(quality, name="quality")
FIRST = 10  # cases of the queue that a screen shows


@quality.command(cls=Verb)
def fit(
    results: Annotated[
        Path, typer.Argument(help="Folder that `segcal evaluate` wrote, of cases that the network was not trained on.")
    ],
    out: Annotated[Path, typer.Option("--out", help="The file to write, as quality.json.")],
    level: Annotated[float, typer.Option(help="Share of patients that intervals hold.")] = 0.9,
    risk: Annotated[
        str | None,
        typer.Option(
            metavar="RISK=LEVEL",
            help="Learn thresholds that keep a risk within a level: fnr=0.1 (false-negative rate), fdr=0.1 "
            "(false-discovery rate) or dice-loss=0.2 (1 - Dice).",
        ),
    ] = None,
    fixed: Annotated[
        bool, typer.Option("--fixed", help="One threshold for all cases; otherwise each has its own.")
    ] = False,
    patients: Patients = None,
    seed: Annotated[int, typer.Option(min=0, help="Of the parts in which promises are tried.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print the trial as JSON instead of a table.")] = False,
) -> None:
    """Learn intervals for Dice and volume, thresholds with a guarantee, and what usual cases look like."""
    import json

    with refusing():
        from segcal.quality.fitting import fit_quality

        name, value = _risk(risk)
        learned = fit_quality(
            results, out, level=level, risk=name, risk_level=value, adaptive=not fixed, patients=patients, seed=seed
        )
    if as_json:
        rows = [{k: None if v != v else v for k, v in trial._asdict().items()} for trial in learned.trials]
        print_json(json.dumps(rows, indent=2, ensure_ascii=False))
    else:
        show_tables([_trials(learned)], _sentences(learned))
    say(f"what was learned is in {out}")


def _risk(text: str | None) -> tuple[str | None, float]:
    from segcal.errors import ConfigError

    if text is None:
        return None, 0.1
    name, _, level = text.partition("=")
    try:
        return name, float(level)
    except ValueError:
        raise ConfigError(f"--risk must be a risk and its level, as fnr=0.1; got {text!r}.") from None


def _trials(learned: Quality) -> Table:
    from segcal.evaluation.tables import Cell, Table

    def cells(*numbers: float) -> list[Cell]:
        return [Cell("-" if x != x else f"{x:.3f}") for x in numbers]

    headings = ("class", "cases", "coverage", "width", "error", "constant guess", "rank correlation", "risk area")
    rows = (
        (
            Cell(t.class_name),
            Cell(str(t.cases)),
            *cells(t.coverage, t.width, t.error, t.constant_error, t.rank_correlation, t.area),
            *cells(t.volume_coverage, t.volume_width),
        )
        for t in learned.trials
    )
    title = f"{learned.level:.0%} intervals of Dice and of volume, tried on patients that were left out"
    return Table(title, (*headings, "volume: coverage", "volume: width"), tuple(rows))


def _sentences(learned: Quality) -> list[str]:
    told = [
        "Error: mean absolute, of predicted Dice; constant guess: of the median Dice. Risk area: under the curve of "
        "1 - Dice over the share of cases that are kept. Width of volumes: relative to their mean."
    ]
    found = learned.guarantee
    if found is not None:
        from segcal.quality.risk import NAMES

        kind = "each case has its own threshold" if found.adaptive else "one threshold"
        each = ", ".join(f"{name} {x.risk:.3f}" for name, x in zip(learned.classes, found.learned, strict=True))
        told.append(f"{NAMES[found.risk]} at most {found.level:g} on average over patients ({kind}); here: {each}.")
    return told


@quality.command(cls=Verb)
def apply(
    file: Annotated[Path, typer.Argument(metavar="QUALITY", help="What `quality fit` wrote.")],
    predictions: Annotated[Path, typer.Argument(help="Folder of predicted probability maps (or one file).")],
    out: Annotated[Path, typer.Option("--out", help="Folder for the results; started again, it goes on there.")],
    calibrator: Annotated[
        Path | None, typer.Option(help="The calibrator that was learned with, if it is no longer in its place.")
    ] = None,
    patients: Patients = None,
    statistics: Annotated[
        bool, typer.Option("--statistics", help="Also write statistics/CASE.json, with volumes in mm3.")
    ] = False,
    workers: Annotated[int, typer.Option(min=1, help="Processes, each with one case at a time.")] = 1,
    dask: Dask = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print queue.json instead of a table.")] = False,
) -> None:
    """Predict Dice and volumes of cases without labels, with intervals; flag them, and rank them for review."""
    with refusing(stopped=f"What is done is kept in {out}: the same command goes on from there."):
        from segcal.quality.applying import apply_quality

        with progress_bar("cases") as advance:
            queue = apply_quality(
                file, predictions, out, calibrator=calibrator, patients=patients, statistics=statistics,
                workers=workers, executor=dask_cluster(dask), progress=advance,
            )  # fmt: skip
    show_failures(queue.failures)
    show_notes(queue.notes)
    if as_json:
        print_json((out / "queue.json").read_text(encoding="utf-8"))
    else:
        _show_queue(queue)
    say(f"the queue is {out / 'queue.csv'}, and {out / 'queue.html'} to look at")
    if queue.failures:
        raise typer.Exit(1)


def _show_queue(queue: Queue) -> None:
    from segcal.evaluation.tables import ALL_CLASSES, Cell, Table
    from segcal.quality.queue import NO_GUARANTEE

    cases = {row.case: row.rank for row in queue.rows}
    headings = ("rank", "case", "class", "predicted Dice", "interval", "volume, ml", "interval, ml", "flags")
    rows = tuple(
        tuple(map(Cell, (
            str(row.rank), row.case, row.class_name, f"{row.predicted_dice:.3f}",
            f"{row.dice_low:.3f} to {row.dice_high:.3f}", f"{row.volume_ml:.2f}",
            f"{row.volume_low_ml:.2f} to {row.volume_high_ml:.2f}", row.flags,
        )))
        for row in queue.rows if row.rank <= FIRST
    )  # fmt: skip
    whole = next(each for each in queue.cohort if each.class_name is None)
    told = [f"Mean Dice of {ALL_CLASSES} to be expected: {whole.value:.3f} ({whole.low:.3f} to {whole.high:.3f})."]
    if queue.shifted:
        told += [NO_GUARANTEE, *queue.shifted]
    shown = min(FIRST, len(cases))
    show_tables([Table(f"{counted(len(cases), 'case')}, the first {shown} to look at", headings, rows, names=3)], told)
