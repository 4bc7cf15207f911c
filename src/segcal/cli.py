"""The command line: thin verbs, each over one public function; heavy imports wait inside them."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.table import Table

    from segcal.evaluation import Evaluation

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Makes the probabilities of medical image segmentation networks mean what they say.",
)


@app.callback(invoke_without_command=True)
def main(version: Annotated[bool, typer.Option("--version", help="Print the version and stop.")] = False) -> None:
    if version:
        from segcal import __version__

        print(__version__)
        raise typer.Exit


@app.command()
def demo(
    steps: Annotated[int, typer.Option(min=1, help="Training steps of each network.")] = 200,
    repeats: Annotated[int, typer.Option(min=1, help="Networks of each method; the table shows their means.")] = 3,
    seed: Annotated[int, typer.Option(help="Seed of images and networks.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Train a small network with and without the calibration term and compare, on images made on the spot."""
    from rich.console import Console
    from rich.table import Table

    from segcal.demo import run_demo

    with Console(stderr=True).status("training") as status:
        results = run_demo(steps=steps, repeats=repeats, seed=seed, progress=status.update)
    if as_json:
        json.dump([result._asdict() for result in results], sys.stdout, indent=2)
        print()
        return
    table = Table(title="Held-out images, foreground, means over images and networks")
    for column in ("method", "Dice", "ACE", "ECE", "MCE"):
        table.add_column(column, justify="left" if column == "method" else "right")
    for method, *numbers in results:
        table.add_row(method, *(f"{number:.4f}" for number in numbers))
    Console().print(table)


@app.command()
def evaluate(
    predictions: Annotated[Path, typer.Argument(help="Folder of predicted probability maps (or one file).")],
    labels: Annotated[Path, typer.Argument(help="Folder of label maps (or one file).")],
    out: Annotated[Path, typer.Option("--out", help="Folder for the results; started again, it goes on there.")],
    regions: Annotated[str | None, typer.Option(help="Unions of classes: brats, kits or a .toml file.")] = None,
    bins: Annotated[int, typer.Option(min=1, help="Bins of the calibration errors.")] = 20,
    background: Annotated[bool, typer.Option("--background", help="Report the background class, too.")] = False,
    workers: Annotated[int, typer.Option(min=1, help="Processes, each with one case at a time.")] = 1,
    logits: Annotated[bool, typer.Option("--logits", help="The maps hold logits.")] = False,
    sigmoid: Annotated[bool, typer.Option("--sigmoid", help="Classes overlap: a probability by itself each.")] = False,
    classes: Annotated[
        str | None, typer.Option(help="Names: a,b,c from label 0 on, a dataset.json or a .toml file.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print summary.json instead of a table.")] = False,
) -> None:
    """Measure calibration and overlap of every case: ECE, ACE, MCE, Brier, NLL and Dice, macro and micro."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    import segcal
    from segcal.errors import SegcalError

    console = Console(stderr=True)
    columns = (TextColumn("cases"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[rate]}"))
    with Progress(*columns, TimeRemainingColumn(), console=console) as bar:
        task = bar.add_task("cases", rate="", total=None)

        def advance(done: int, total: int) -> None:
            speed = bar.tasks[0].speed
            bar.update(task, completed=done, total=total, rate=f"{speed:.2f} cases/s" if speed else "")

        try:
            outcome = segcal.evaluate(
                predictions,
                labels,
                out,
                bins=bins,
                regions=regions,
                classes=classes,
                background=background,
                logits=logits,
                sigmoid=sigmoid,
                workers=workers,
                progress=advance,
            )
        except SegcalError as error:
            bar.stop()
            console.print(f"{type(error).__name__}: {error}", markup=False, highlight=False, soft_wrap=True)
            raise typer.Exit(2) from None
        except KeyboardInterrupt:
            bar.stop()
            console.print(f"Stopped. What is done is kept in {out}: the same command goes on from there.", markup=False)
            raise typer.Exit(130) from None
    for word, names in (
        ("predictions without labels", outcome.pairing.unpaired_predictions),
        ("labels without predictions", outcome.pairing.unpaired_labels),
    ):
        if names:
            shown = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
            console.print(f"{len(names)} {word}: {shown}", markup=False, highlight=False)
    for failure in outcome.failures[:10]:
        line = f"{failure.case}: {failure.kind}: {failure.message}"
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    if outcome.evaluation is not None:
        if as_json:
            print((out / "summary.json").read_text(encoding="utf-8"))
        else:
            shown_part = outcome.evaluation if background else outcome.evaluation.foreground()
            Console().print(_summary_table(shown_part))
    number = len(outcome.evaluation.cases) if outcome.evaluation is not None else 0
    console.print(f"{number} cases evaluated, {len(outcome.failures)} failed; results are in {out}", markup=False)
    if outcome.failures:
        raise typer.Exit(1)


def _summary_table(evaluation: Evaluation) -> Table:
    """Macro mean and deviation per class, and micro errors, over all and over complete cases."""
    from rich.table import Table

    metrics = ("dice", "ace", "ece", "mce", "brier", "nll")
    complete = len(evaluation.complete().cases)
    title = f"{len(evaluation.cases)} cases, {complete} complete, {evaluation.bins} bins"
    table = Table(
        "cases",
        "average",
        "class",
        *(metric.upper() if len(metric) == 3 else metric.capitalize() for metric in metrics),
    )
    table.title = title
    rows = {(row.cases, row.average, row.label, row.metric): row for row in evaluation.summary()}
    for which in ("all", "complete") if 0 < complete < len(evaluation.cases) else ("all",):
        for average in ("macro", "micro paper", "micro pooled"):
            for name in (*evaluation.classes, "mean") if len(evaluation.classes) > 1 else evaluation.classes:
                found = [rows.get((which, average, name, metric)) for metric in metrics]
                cells = ["" if row is None else _cell(row.value, row.std) for row in found]
                table.add_row(which, average, name, *cells, end_section=name == "mean")
    return table


def _cell(value: float, std: float) -> str:
    return f"{value:.4f}" + (f" ±{std:.4f}" if std == std else "")
