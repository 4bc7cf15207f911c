"""The verb that decides: decide."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from segcal._io.words import counted
from segcal.cli.app import app
from segcal.cli.options import ClassNames, Dask, Regions, Sigmoid, dask_cluster, read_options
from segcal.cli.orderly import Verb
from segcal.cli.shown import print_json, progress_bar, refusing, say, show_failures, show_tables

if TYPE_CHECKING:
    from segcal.evaluation.tables import Table
    from segcal.quality.deciding import Decided, Decision


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
    _show(decided, out, as_json=as_json)
    if decided.contested:
        went = (
            f"{counted(decided.contested, 'voxel')} reached the thresholds of several classes and went to one of them."
        )
        kept = " What the file promises holds for the whole set of each class, which --masks writes."
        say(went + kept if Path(rule).is_file() else went)
    if decided.failures:
        raise typer.Exit(1)


def _show(decided: Decided, out: Path, *, as_json: bool) -> None:
    import json

    show_failures(decided.failures)
    if as_json:
        print_json(json.dumps([row._asdict() for row in decided.decisions], indent=2, ensure_ascii=False))
    elif decided.decisions:
        show_tables([_table(decided.decisions)], [])
    maps = counted(len(decided.paths), "label map")
    say(f"{maps} and decisions.csv are in {out}, {counted(len(decided.failures), 'case')} failed")


def _table(decisions: list[Decision]) -> Table:
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
