"""Commands for decisions and quality: decide, quality fit, quality apply."""

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


@app.command(cls=Verb, epilog="Example: segcal decide maps --out labels --rule threshold=0.3")
def decide(
    predictions: Annotated[Path, typer.Argument(metavar="MAPS", help="Folder of probability maps, or one file.")],
    out: Annotated[Path, typer.Option("--out", help="Folder for the label maps; an interrupted run resumes there.")],
    rule: Annotated[
        str,
        typer.Option(
            metavar="argmax|threshold=T|FILE",
            help="argmax: most probable class; for --sigmoid and --regions, a probability of at least 1/2. "
            "threshold=0.3: a probability of at least 0.3. quality.json: thresholds of `quality fit`.",
        ),
    ] = "argmax",
    masks: Annotated[
        bool,
        typer.Option("--masks", help="Writes one mask channel per class instead of labels; masks may overlap."),
    ] = False,
    calibrator: Annotated[
        Path | None, typer.Option(help="Calibrates the maps first, for example with calibrator.json.")
    ] = None,
    regions: Regions = None,
    workers: Annotated[int, typer.Option(min=1, help="Number of processes.")] = 1,
    dask: Dask = None,
    logits: Annotated[bool, typer.Option("--logits", help="The maps are logits.")] = False,
    sigmoid: Sigmoid = False,
    class_names: ClassNames = None,
    as_json: Annotated[bool, typer.Option("--json", help="Prints every decision as JSON instead of a table.")] = False,
) -> None:
    """Write label maps on the grid of the maps, and decisions.csv: thresholds, volumes, expected Dice."""
    with refusing(stopped=f"Finished work is kept in {out}. Run the same command again to resume."):
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
            f"{counted(decided.contested, 'voxel')} reached the thresholds of several classes; each went to one class."
        )
        kept = " The guarantee holds for the whole set of each class, which --masks writes."
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
    say(f"{maps} and decisions.csv: {out}; {counted(len(decided.failures), 'case')} failed")


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


quality = typer.Typer(cls=Verbs, help="Predict the quality of cases without labels, and rank them for review.")
app.add_typer(quality, name="quality")
FIRST = 10  # cases of the queue that a screen shows


@quality.command(cls=Verb, epilog="Example: segcal quality fit results --out quality.json --risk fnr=0.1")
def fit(
    results: Annotated[Path, typer.Argument(help="Results of `segcal evaluate` for held-out cases.")],
    out: Annotated[Path, typer.Option("--out", help="File to write, for example quality.json.")],
    level: Annotated[float, typer.Option(help="Coverage of the intervals over patients, for example 0.9.")] = 0.9,
    risk: Annotated[
        str | None,
        typer.Option(
            metavar="RISK=LEVEL",
            help="Learns thresholds that bound a risk: fnr=0.1 (false-negative rate), fdr=0.1 (false-discovery rate) "
            "or dice-loss=0.2 (1 - Dice).",
        ),
    ] = None,
    fixed: Annotated[
        bool, typer.Option("--fixed", help="Learns one threshold for all cases. Default: one per case.")
    ] = False,
    patients: Patients = None,
    seed: Annotated[int, typer.Option(min=0, help="Random seed of the cross-validation.")] = 0,
    as_json: Annotated[
        bool, typer.Option("--json", help="Prints the cross-validation as JSON instead of a table.")
    ] = False,
) -> None:
    """Learn intervals for Dice and volume, guaranteed thresholds, and a reference of ordinary cases."""
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
    say(f"quality model: {out}")


def _risk(text: str | None) -> tuple[str | None, float]:
    from segcal.errors import ConfigError

    if text is None:
        return None, 0.1
    name, _, level = text.partition("=")
    try:
        return name, float(level)
    except ValueError:
        raise ConfigError(f"--risk must be a risk and its level; got {text!r}. Write it as fnr=0.1.") from None


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
    title = f"{learned.level:.0%} intervals of Dice and volume, on held-out patients"
    return Table(title, (*headings, "volume: coverage", "volume: width"), tuple(rows))


def _sentences(learned: Quality) -> list[str]:
    told = [
        "Error: mean absolute error of the predicted Dice; constant guess: that of the median Dice. Risk area: area "
        "under the curve of 1 - Dice over the share of accepted cases. Width of volumes: relative to their mean."
    ]
    found = learned.guarantee
    if found is not None:
        from segcal.quality.risk import NAMES

        kind = "each case has its own threshold" if found.adaptive else "one threshold"
        each = ", ".join(f"{name} {x.risk:.3f}" for name, x in zip(learned.classes, found.learned, strict=True))
        told.append(f"{NAMES[found.risk]} at most {found.level:g} on average over patients ({kind}); here: {each}.")
    return told


@quality.command(cls=Verb, epilog="Example: segcal quality apply quality.json new-maps --out queue")
def apply(
    file: Annotated[
        Path, typer.Argument(metavar="QUALITY", help="Quality model of `quality fit`, for example quality.json.")
    ],
    predictions: Annotated[Path, typer.Argument(help="Folder of probability maps of new cases, or one file.")],
    out: Annotated[Path, typer.Option("--out", help="Folder for the results; an interrupted run resumes there.")],
    calibrator: Annotated[
        Path | None, typer.Option(help="The calibrator used for the quality model, if its file has moved.")
    ] = None,
    patients: Patients = None,
    statistics: Annotated[
        bool, typer.Option("--statistics", help="Also writes statistics/CASE.json with volumes in mm3.")
    ] = False,
    workers: Annotated[int, typer.Option(min=1, help="Number of processes.")] = 1,
    dask: Dask = None,
    as_json: Annotated[bool, typer.Option("--json", help="Prints queue.json instead of a table.")] = False,
) -> None:
    """Predict Dice and volumes of cases without labels, with intervals; flag and rank them for review."""
    with refusing(stopped=f"Finished work is kept in {out}. Run the same command again to resume."):
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
    say(f"queue: {out / 'queue.csv'}; page: {out / 'queue.html'}")
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
    told = [f"Expected mean Dice of {ALL_CLASSES}: {whole.value:.3f} ({whole.low:.3f} to {whole.high:.3f})."]
    if queue.shifted:
        told += [NO_GUARANTEE, *queue.shifted]
    shown = min(FIRST, len(cases))
    show_tables([Table(f"{counted(len(cases), 'case')}, the first {shown} to review", headings, rows, names=3)], told)
