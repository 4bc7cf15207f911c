"""The commands that train networks and predict with them: train, predict."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Literal

import typer

from segcal.cli.app import app
from segcal.cli.evaluation import show_outcome
from segcal.cli.options import Calibrator, Dask, Dtype, Mean, dask_cluster
from segcal.cli.orderly import Verb
from segcal.cli.shown import progress_bar, refusing, say, say_maps, show_failures


@app.command(cls=Verb, epilog="Example: segcal train --dataset acdc --data-root data/ACDC --method soft-ace --out run")
def train(
    out: Annotated[Path, typer.Option("--out", help="Folder of the run; an interrupted training resumes there.")],
    config: Annotated[Path | None, typer.Option(help="Settings file, for example run.toml.")] = None,
    dataset: Annotated[
        str | None, typer.Option(help="A dataset that `segcal datasets` lists, for example acdc.")
    ] = None,
    data_root: Annotated[Path | None, typer.Option(help="Folder of the dataset.")] = None,
    method: Annotated[str | None, typer.Option(help="Loss: dice-ce, ce, hard-ace, soft-ace or balanced.")] = None,
    preset: Annotated[str, typer.Option(help="Default settings: paper, or small for two CPU cores.")] = "paper",
    change: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="KEY=VALUE", help="Changes a setting, for example loss.ace.weight=0.3; can be repeated."
        ),
    ] = None,
    prepared: Annotated[Path | None, typer.Option(help="Folder of preprocessed images, which runs can share.")] = None,
) -> None:
    """Train a network with one of the paper's losses. Use torchrun for several GPUs or machines."""
    with refusing(
        stopped=f"Finished work is kept in {out}. Run the same command again to resume from the last checkpoint."
    ):
        from segcal.training import train as run_training
        from segcal.training.config import make_config

        made = make_config(
            file=config, dataset=dataset, root=data_root, method=method, preset=preset, changes=change or ()
        )
        if os.environ.get("RANK", "0") != "0":
            run_training(made, out, prepared=prepared)
            return
        _say_cpu(preset)
        with progress_bar("epochs") as advance:
            done = run_training(made, out, prepared=prepared, progress=advance, say=say)
    say(f"best validation DSC {done.best_dice:.4f} in epoch {done.best_epoch} of {done.epochs}: {done.folder}")


def _say_cpu(preset: str) -> None:
    """Without a GPU, print a faster alternative."""
    import torch

    if not torch.cuda.is_available():
        hint = "" if preset == "small" else "; for a smaller network, add --preset small"
        say(f"no GPU found: training on the CPU{hint}")


@app.command(cls=Verb, epilog="Example: segcal predict run --split validation --out maps")
def predict(
    run: Annotated[
        list[Path],
        typer.Argument(
            metavar="RUN [RUN...]",
            help="Folder of a run, or a checkpoint such as RUN/last.pt; several runs are averaged.",
        ),
    ],
    out: Annotated[Path, typer.Option("--out", help="Folder for the maps, or for the results of --evaluate.")],
    mean: Mean = "probabilities",
    flips: Annotated[
        bool,
        typer.Option("--flips", help="Test-time augmentation: averages over mirrored images; eight times the work."),
    ] = False,
    data: Annotated[Path | None, typer.Option(help="Folder of the dataset, if it has moved.")] = None,
    images: Annotated[Path | None, typer.Option(help="Predicts this folder of images instead of the dataset.")] = None,
    side: Annotated[
        Literal["train", "validation", "test", "all"] | None,
        typer.Option("--split", help="Part of the split to predict. Default: test."),
    ] = None,
    evaluate: Annotated[bool, typer.Option("--evaluate", help="Measures the predictions; stores no map.")] = False,
    calibrator: Calibrator = None,
    dask: Dask = None,
    logits: Annotated[bool, typer.Option("--logits", help="Writes logits instead of probabilities.")] = False,
    dtype: Dtype = None,
) -> None:
    """Predict probability maps on the grid of the images, or evaluate without storing maps.

    Several runs or checkpoints form an ensemble.
    """
    kept = f"Finished work is kept in {out}. Run the same command again to resume."
    with refusing(stopped=kept):
        from segcal.calibrators import load_calibrator
        from segcal.errors import ConfigError
        from segcal.training import runs
        from segcal.training.ensemble import load_ensemble

        if dask and not evaluate:
            raise ConfigError("--dask must be used with --evaluate; got --dask alone. Add --evaluate or remove --dask.")
        if evaluate and (images or logits or dtype):
            raise ConfigError(
                "--evaluate must not be used with --images, --logits or --dtype; got one of them. Remove one option."
            )
        if images and (side or data):
            raise ConfigError("--images must not be used with --split or --data; got one of them. Remove one option.")
        if mean != "probabilities" and len(run) == 1 and not flips:
            raise ConfigError(
                "--mean must be used with several runs or --flips; got one run. Add runs or remove --mean."
            )
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
