"""Verbs that learn: datasets, train, predict, export-bundle, demo."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from segcal._io.words import counted
from segcal.cli.app import app
from segcal.cli.measuring import Dask, StrictGrid, dask_cluster
from segcal.cli.orderly import Verb, Verbs
from segcal.cli.shown import print_json, progress_bar, refusing, say, say_maps, show_failures, show_tables

if TYPE_CHECKING:
    from segcal.datasets import Check
    from segcal.training.config import RunConfig

SHORT_H = 0.25  # of a training; for longer ones there is a remedy

datasets = typer.Typer(cls=Verbs, help="List the datasets that segcal knows; check and split a download.")
app.add_typer(datasets, name="datasets")


@datasets.callback(invoke_without_command=True)
def list_datasets(context: typer.Context) -> None:
    """List the datasets that segcal knows."""
    if context.invoked_subcommand is not None:
        return
    from segcal.datasets import describe

    for row in describe():
        print(f"{row.name}: {row.title}\n  layout   {row.layout}\n  classes  {', '.join(row.classes)}")
        if row.regions:
            print(f"  regions  {', '.join(row.regions)}")


@datasets.command(cls=Verb)
def check(
    name: Annotated[str, typer.Argument(help="A dataset that `segcal datasets` lists.")],
    root: Annotated[Path, typer.Argument(help="Folder of the download.")],
    strict_grid: StrictGrid = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Verify a download: counts, pairs, shapes, label values, spacing, missing classes. Exit code 1 with problems."""
    from segcal.datasets import check_dataset, open_dataset

    with refusing(), progress_bar("files") as advance:
        found = check_dataset(open_dataset(name, root), strict_grid=strict_grid, progress=advance)
    if as_json:
        content = {"problems": [problem._asdict() for problem in found.problems], "notes": list(found.notes)}
        print_json(json.dumps(content | dict(found.facts()) | {"missing": found.missing}, indent=2, ensure_ascii=False))
    else:
        _print_check(found)
    say(f"{counted(len(found.problems), 'problem')}, {counted(len(found.notes), 'note')}")
    if found.problems:
        raise typer.Exit(1)


def _print_check(found: Check) -> None:
    from rich.table import Table

    table = Table(show_header=False)
    for fact, value in found.facts():
        table.add_row(fact, str(value))
    notes = [f"note: {note}" for note in found.notes]
    show_tables([table], [*notes, *(f"{problem.case}: {problem.what}" for problem in found.problems)])


@datasets.command(cls=Verb)
def split(
    name: Annotated[str, typer.Argument(help="A dataset that `segcal datasets` lists.")],
    root: Annotated[Path, typer.Argument(help="Folder of the download.")],
    out: Annotated[Path, typer.Option("--out", help="Text file to write: a line for each case.")],
    seed: Annotated[int, typer.Option(min=0, help="Seed of the draw.")] = 0,
) -> None:
    """Write the paper's split, by patient, as a text file that training takes as data.split."""
    from segcal.datasets import make_split, open_dataset, write_split

    with refusing():
        found = make_split(open_dataset(name, root), seed=seed)
        write_split(found, out)
    if found.note:
        say(found.note)
    numbers = f"{counted(len(found.train), 'case')} to train, {len(found.validation)} to validate"
    say(f"{numbers}, {len(found.test)} to test: {out}")


@app.command(cls=Verb)
def train(
    out: Annotated[Path, typer.Option("--out", help="Folder of the run; started again, it goes on there.")],
    config: Annotated[Path | None, typer.Option(help="A run's .toml file.")] = None,
    dataset: Annotated[str | None, typer.Option(help="A dataset that `segcal datasets` lists.")] = None,
    data_root: Annotated[Path | None, typer.Option(help="Folder of the download.")] = None,
    method: Annotated[str | None, typer.Option(help="dice-ce, ce, hard-ace or soft-ace.")] = None,
    preset: Annotated[str, typer.Option(help="paper, or small: a network for two CPU cores.")] = "paper",
    change: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="As loss.ace.weight=0.3; may be repeated.")
    ] = None,
    prepared: Annotated[Path | None, typer.Option(help="Folder of prepared images, which runs share.")] = None,
) -> None:
    """Train a network with one of the paper's losses; under torchrun, on several GPUs or machines."""
    with refusing(stopped=f"What is done is kept in {out}: the same command goes on from its last checkpoint."):
        from segcal.training import train as run_training
        from segcal.training.config import make_config

        made = make_config(
            file=config, dataset=dataset, root=data_root, method=method, preset=preset, changes=change or ()
        )
        if os.environ.get("RANK", "0") != "0":
            run_training(made, out, prepared=prepared)
            return
        _say_cpu_time(made, preset)
        with progress_bar("epochs") as advance:
            done = run_training(made, out, prepared=prepared, progress=advance, say=say)
    say(f"best validation DSC {done.best_dice:.4f} in epoch {done.best_epoch} of {done.epochs}: {done.folder}")


def _say_cpu_time(config: RunConfig, preset: str) -> None:
    """Where there is no GPU, about how long it takes, and what would be faster."""
    import torch

    from segcal.calibrators.cost import duration
    from segcal.datasets import open_dataset
    from segcal.study.estimate import cpu_hours

    if torch.cuda.is_available():
        return
    opened = open_dataset(config.data.dataset, config.data.root)
    say("there is no GPU: a few steps are tried first, to tell how long the training takes")
    hours = cpu_hours(config, opened)
    about = "a time that cannot be told" if hours != hours else f"roughly {duration(3600 * hours)}"
    say(f"the whole training takes {about} on this CPU, by a short trial of its speed")
    if preset != "small" and not hours < SHORT_H:
        say("--preset small trains a network for two CPU cores instead")


@app.command(cls=Verb)
def predict(
    run: Annotated[Path, typer.Argument(help="Folder of a run.")],
    out: Annotated[Path, typer.Option("--out", help="Folder for maps, or for the results of --evaluate.")],
    data: Annotated[Path | None, typer.Option(help="Where the run's dataset lies now, if it has moved.")] = None,
    images: Annotated[Path | None, typer.Option(help="Predict this folder of images instead.")] = None,
    side: Annotated[
        Literal["train", "validation", "test", "all"] | None,
        typer.Option("--split", help="Side of the run's split; test if not given."),
    ] = None,
    evaluate: Annotated[bool, typer.Option("--evaluate", help="Measure on the spot; store no map.")] = False,
    calibrator: Annotated[Path | None, typer.Option(help="A calibrator that `calibrate fit` wrote (.json).")] = None,
    dask: Dask = None,
    logits: Annotated[bool, typer.Option("--logits", help="Write logits instead of probabilities.")] = False,
    dtype: Annotated[
        Literal["float32", "float16"], typer.Option(help="float16: 16-bit integers with a scale, in NIfTI.")
    ] = "float32",
) -> None:
    """Predict probability maps on the grid of the images, or evaluate them without storing any."""
    kept = f"What is done is kept in {out}: the same command goes on from there."
    with refusing(stopped=kept):
        from segcal.calibrators import load_calibrator
        from segcal.errors import ConfigError
        from segcal.training import runs

        if dask and not evaluate:
            raise ConfigError("--dask must come with --evaluate.")
        if evaluate and (images or logits or dtype != "float32"):
            raise ConfigError("--evaluate must go without --images, which have no labels, --logits and --dtype.")
        if images and (side or data):
            raise ConfigError("--images must go without --split and --data: they are the images to predict.")
        found = runs.load_run(run, root=data, with_data=images is None)
        fitted = None if calibrator is None else load_calibrator(calibrator)
        with progress_bar("cases") as advance:
            if evaluate:
                outcome = runs.evaluate_run(
                    found, out, side=side or "test", calibrator=fitted, executor=dask_cluster(dask), progress=advance
                )
            else:
                cases = None if images is None else runs.image_cases(images, len(found.dataset.channels))
                content: Literal["logits", "probabilities"] = "logits" if logits else "probabilities"
                predicted = runs.predict(
                    found, out, side=side or "test", cases=cases, content=content, dtype=dtype, calibrator=fitted,
                    progress=advance,
                )  # fmt: skip
    if evaluate:
        from segcal.cli.measuring import show_outcome

        show_outcome(outcome, out)
    else:
        show_failures(predicted.failures)
        say_maps(predicted, out)
        if predicted.failures:
            raise typer.Exit(1)


@app.command(cls=Verb)
def export_bundle(
    run: Annotated[Path, typer.Argument(help="Folder of a run.")],
    out: Annotated[Path, typer.Option("--out", help="Folder of the bundle: a new or an empty one.")],
    calibrator: Annotated[Path | None, typer.Option(help="A calibrator that `calibrate fit` wrote (.json).")] = None,
    checkpoint: Annotated[str, typer.Option(help="Weights in the run's folder: best.pt or last.pt.")] = "best.pt",
    authors: Annotated[str, typer.Option(help="Who made the network.")] = "not stated",
    copyright: Annotated[str, typer.Option(help="Whose the weights are, and under which terms.")] = "not stated",
) -> None:
    """Write a trained run as a MONAI bundle, which predicts without segcal."""
    with refusing():
        from segcal.adapters import monai_bundle
        from segcal.calibrators import load_calibrator
        from segcal.training.runs import load_run

        found = load_run(run, checkpoint=checkpoint, with_data=False)
        fitted = None if calibrator is None else load_calibrator(calibrator)
        made = monai_bundle.export_bundle(found, out, calibrator=fitted, authors=authors, copyright=copyright)
    say(f"the bundle is {made}; {made / 'docs' / 'README.md'} has the command that runs it")


@app.command(cls=Verb)
def demo(
    out: Annotated[Path, typer.Option("--out", help="Folder for everything; started again, it goes on there.")] = Path(
        "segcal-demo"
    ),
    dataset: Annotated[Path | None, typer.Option(help="A Decathlon task to use instead of the phantom.")] = None,
    epochs: Annotated[int | None, typer.Option(min=1, help="Of each training.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of the phantom and of the networks.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print every number as JSON instead of tables.")] = False,
) -> None:
    """Train Dice + CE, hard ACE and soft ACE, fit a temperature, compare all on test cases, write the report."""

    with refusing(stopped=f"What is done is kept in {out}: the same command goes on from there."):
        from segcal.cli.studying import watching
        from segcal.comparison.tables import LAYOUTS, make_table, notes, to_json
        from segcal.evaluation.tables import ALL_CLASSES
        from segcal.study import demo as job
        from segcal.study import do_runs

        shop = job.open_demo(out, dataset=dataset, epochs=epochs, seed=seed)
        with watching(shop) as tell:
            do_runs(shop, say=tell)
        result = job.report_demo(shop)
    if as_json:
        print_json(to_json(result.comparison))
    else:
        title, columns = next(iter(LAYOUTS.items()))
        cases = counted(result.comparison.cases, "case")
        table = make_table(result.comparison, f"{title}, {ALL_CLASSES}, {cases}", columns)
        show_tables([table], notes(result.comparison))
    say(f"temperature {result.temperature:.3f}; tables and runs are in {out}; the report is {result.report}")
