"""The verbs that train a network and put it to work: train, predict."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from segcal.cli.app import app
from segcal.cli.evaluation import show_outcome
from segcal.cli.options import Calibrator, Dask, Dtype, Mean, dask_cluster
from segcal.cli.orderly import Verb
from segcal.cli.shown import progress_bar, refusing, say, say_maps, show_failures

if TYPE_CHECKING:
    from segcal.training.config import RunConfig

SHORT_H = 0.25  # of a training; for longer ones there is a remedy


@app.command(cls=Verb)
def train(
    out: Annotated[Path, typer.Option("--out", help="Folder of the run; started again, it goes on there.")],
    config: Annotated[Path | None, typer.Option(help="A run's .toml file.")] = None,
    dataset: Annotated[str | None, typer.Option(help="A dataset that `segcal datasets` lists.")] = None,
    data_root: Annotated[Path | None, typer.Option(help="Folder of the download.")] = None,
    method: Annotated[str | None, typer.Option(help="dice-ce, ce, hard-ace, soft-ace or balanced.")] = None,
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
    run: Annotated[
        list[Path],
        typer.Argument(metavar="RUN [RUN...]", help="Folder of a run, or a checkpoint in it; of several, the mean."),
    ],
    out: Annotated[Path, typer.Option("--out", help="Folder for maps, or for the results of --evaluate.")],
    mean: Mean = "probabilities",
    flips: Annotated[
        bool, typer.Option("--flips", help="Mean over mirror images of the image, too: eight times the work.")
    ] = False,
    data: Annotated[Path | None, typer.Option(help="Where the run's dataset lies now, if it has moved.")] = None,
    images: Annotated[Path | None, typer.Option(help="Predict this folder of images instead.")] = None,
    side: Annotated[
        Literal["train", "validation", "test", "all"] | None,
        typer.Option("--split", help="Side of the run's split; test if not given."),
    ] = None,
    evaluate: Annotated[bool, typer.Option("--evaluate", help="Measure on the spot; store no map.")] = False,
    calibrator: Calibrator = None,
    dask: Dask = None,
    logits: Annotated[bool, typer.Option("--logits", help="Write logits instead of probabilities.")] = False,
    dtype: Dtype = None,
) -> None:
    """Predict probability maps on the grid of the images, or evaluate them without storing any.

    Several runs, or checkpoints as RUN/last.pt, are members of an ensemble.
    """
    kept = f"What is done is kept in {out}: the same command goes on from there."
    with refusing(stopped=kept):
        from segcal.calibrators import load_calibrator
        from segcal.errors import ConfigError
        from segcal.training import runs
        from segcal.training.ensemble import load_ensemble

        if dask and not evaluate:
            raise ConfigError("--dask must come with --evaluate.")
        if evaluate and (images or logits or dtype):
            raise ConfigError("--evaluate must go without --images, which have no labels, --logits and --dtype.")
        if images and (side or data):
            raise ConfigError("--images must go without --split and --data: they are the images to predict.")
        if mean != "probabilities" and len(run) == 1 and not flips:
            raise ConfigError("--mean must come with several runs or with --flips; there is nothing to take it of.")
        found: runs.Predictor
        if len(run) > 1 or flips:
            found = load_ensemble(run, mean=mean, flips=flips, root=data, with_data=images is None)
            if len(run) > 1 and found.split.note:
                say(found.split.note)
        else:
            found = runs.load_run(run[0], root=data, with_data=images is None)
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
                    found, out, side=side or "test", cases=cases, content=content, dtype=dtype or "float32",
                    calibrator=fitted, progress=advance,
                )  # fmt: skip
    if evaluate:
        show_outcome(outcome, out)
    else:
        show_failures(predicted.failures)
        say_maps(predicted, out)
        if predicted.failures:
            raise typer.Exit(1)
