"""Options that several verbs have, each said once, and what is made of them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

if TYPE_CHECKING:
    from segcal.adapters.dask import DaskCluster
    from segcal.evaluation.options import ReadOptions

Evaluations = Annotated[
    list[str],
    typer.Argument(metavar="BASELINE [OTHER...]", help="Folders of evaluate (or their .npz), or NAME=FOLDER."),
]
Patients = Annotated[
    str | None,
    typer.Option(help="Which cases are one patient's: 'none', a .csv (case, patient), or an expression's group."),
]
Test = Annotated[Literal["t", "wilcoxon"], typer.Option(help="Test that the stars show.")]
Holm = Annotated[bool, typer.Option("--holm", help="Correct for several methods and classes.")]
Regions = Annotated[
    str | None,
    typer.Option(
        help="Unions of classes: brats, kits, a .toml file or nnU-Net's dataset.json. A .toml file with values alone, "
        "as values = [0, 1, 2, 4], tells the label value of each channel."
    ),
]
Sigmoid = Annotated[bool, typer.Option("--sigmoid", help="Classes overlap: a probability by itself each.")]
IgnoreIndex = Annotated[int | None, typer.Option(help="Leave out voxels with this label, as 255.")]
ClassNames = Annotated[
    str | None,
    typer.Option(
        help="Names: a,b,c, one for every label from 0 on, so that the background comes first (of a single channel: "
        "background,a); a dataset.json or a .toml file. With --regions, names are those of the regions."
    ),
]
StrictGrid = Annotated[
    bool, typer.Option("--strict-grid", help="Refuse cases whose headers leave open where the voxels lie.")
]
Dask = Annotated[
    str | None, typer.Option(metavar="ADDRESS", help="Spread the cases over this Dask cluster, as tcp://HOST:8786.")
]
Member = Annotated[
    list[Path] | None,
    typer.Option(
        "--member", metavar="FOLDER", help="Further maps of the same cases, to take the mean with; may be repeated."
    ),
]
Mean = Annotated[Literal["probabilities", "logits"], typer.Option(help="What of the members the mean is of.")]
Bins = Annotated[int, typer.Option(min=1, help="Bins of the calibration errors.")]
Calibrator = Annotated[Path | None, typer.Option(help="A calibrator that `calibrate fit` wrote (.json).")]
Workers = Annotated[
    int, typer.Option(min=1, help="Processes that measure cases and try calibrators on folds, one each at a time.")
]
Dtype = Annotated[
    Literal["float32", "float16", "uint8"] | None,
    typer.Option(
        help="Of maps of probabilities: float16 stores them in steps of 1/65535, uint8 of 1/255, in a quarter of the "
        "room of float32 or less."
    ),
]
Seed = Annotated[int, typer.Option(min=0, help="Of the bootstrap and of the floor.")]
Numbers = Annotated[bool, typer.Option("--json", help="Print every number as JSON instead of tables.")]


def read_options(
    logits: bool, sigmoid: bool, ignore_index: int | None, class_names: str | None, regions: str | None, strict: bool
) -> ReadOptions:
    """The options that verbs share, as one object."""
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
    """The cluster at an address, if one is given; with `gpus`, each job takes one, where workers declare them."""
    if address is None:
        return None
    from segcal.adapters.dask import DaskCluster

    return DaskCluster(address, gpus=gpus)
