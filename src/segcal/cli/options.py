"""Options that several commands share, and the objects that they define."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

if TYPE_CHECKING:
    from segcal.adapters.dask import DaskCluster
    from segcal.evaluation.options import ReadOptions

Evaluations = Annotated[
    list[str],
    typer.Argument(
        metavar="BASELINE [OTHER...]",
        help="Results of evaluate: folders or .npz files, or NAME=FOLDER to name a method.",
    ),
]
Patients = Annotated[
    str | None,
    typer.Option(
        help="Groups cases by patient: 'none', patients.csv (case, patient), or a regular expression such as '^(.+)_'."
    ),
]
Test = Annotated[Literal["t", "wilcoxon"], typer.Option(help="Paired test for the stars in tables.")]
Holm = Annotated[bool, typer.Option("--holm", help="Corrects p values for several methods and classes (Holm).")]
Regions = Annotated[
    str | None,
    typer.Option(
        help="Evaluates unions of classes: brats, kits, regions.toml or nnU-Net's dataset.json. A .toml file with "
        "values = [0, 1, 2, 4] alone sets the label value of each channel."
    ),
]
Sigmoid = Annotated[
    bool, typer.Option("--sigmoid", help="Multi-label maps: classes overlap, each has a sigmoid probability.")
]
IgnoreIndex = Annotated[int | None, typer.Option(help="Ignores voxels with this label, for example 255.")]
ClassNames = Annotated[
    str | None,
    typer.Option(
        help="Names of all labels from 0 on, for example background,liver,spleen (single channel: background,liver), "
        "or a dataset.json or .toml file. Not with --regions, which have names."
    ),
]
StrictGrid = Annotated[
    bool, typer.Option("--strict-grid", help="Refuses cases whose headers do not define the position of the voxels.")
]
Dask = Annotated[
    str | None,
    typer.Option(metavar="ADDRESS", help="Runs the cases on this Dask cluster, for example tcp://HOST:8786."),
]
Member = Annotated[
    list[Path] | None,
    typer.Option("--member", metavar="FOLDER", help="Averages these maps of the same cases, too; can be repeated."),
]
Mean = Annotated[Literal["probabilities", "logits"], typer.Option(help="What is averaged over members.")]
Bins = Annotated[int, typer.Option(min=1, help="Number of bins of the calibration errors.")]
Calibrator = Annotated[
    Path | None, typer.Option(help="Applies this calibrator of `calibrate fit`, for example calibrator.json.")
]
Workers = Annotated[int, typer.Option(min=1, help="Number of processes for cases and folds.")]
Dtype = Annotated[
    Literal["float32", "float16", "uint8"] | None,
    typer.Option(
        help="Data type of probability maps: float16 stores them as 65535ths, uint8 as 255ths in a quarter of the size "
        "of float32 or less."
    ),
]
Seed = Annotated[int, typer.Option(min=0, help="Random seed of the bootstrap and of the floor.")]
Numbers = Annotated[bool, typer.Option("--json", help="Prints all values as JSON instead of tables.")]


def read_options(
    logits: bool, sigmoid: bool, ignore_index: int | None, class_names: str | None, regions: str | None, strict: bool
) -> ReadOptions:
    """The shared reading options as one object."""
    from segcal.evaluation.options import ReadOptions

    return ReadOptions(
        logits=logits,
        sigmoid=sigmoid,
        ignore_index=ignore_index,
        class_names=class_names,
        regions=regions,
        strict_grid=strict,
    )


def dask_cluster(address: str | None, *, gpus: bool = False) -> DaskCluster | None:
    """The cluster at an address, or None; with `gpus`, each job takes one GPU if workers declare them."""
    if address is None:
        return None
    from segcal.adapters.dask import DaskCluster

    return DaskCluster(address, gpus=gpus)


def numbers_of(option: str, text: str) -> list[float]:
    """The numbers of an option, as 10,100; ConfigError where they are none."""
    from segcal.errors import ConfigError

    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise ConfigError(f"{option} must be numbers between commas, as 10,100; got {text!r}.") from None
