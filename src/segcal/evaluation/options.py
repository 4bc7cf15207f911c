"""How predictions are read and what is reported of them: as a user says it, and as the measuring code sees it."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

from segcal.errors import check_integer
from segcal.volumes.regions import ClassNames, Regions

FINE_BINS = 1200  # divisible by every bin count in use
SLAB_ELEMENTS = 1 << 25  # probabilities read at a time: 128 MiB of float32


@dataclass(frozen=True)
class ReadOptions:
    """How to read predictions and labels; the same for files and for tensors.

    logits: The predictions are logits. By default they are probabilities.
    sigmoid: The classes overlap: each channel is a probability by itself. By default the classes are exclusive, and
        the probabilities of a voxel sum to 1.
    ignore_index: Label of voxels that are left out of everything. By default the label that nnU-Net's dataset.json
        names "ignore", if there is one.
    class_names: Names of the classes: a list in the order of the labels, background first; a mapping from label to
        name; the text "background,liver"; or a dataset.json or .toml file. By default, what files beside the
        predictions say.
    regions: Unions of classes to evaluate: a `Regions` object, "brats", "kits", a .toml file, or nnU-Net's
        dataset.json.
    strict_grid: Refuse cases whose headers leave open where the voxels lie. By default a note names them.

    >>> ReadOptions(logits=True, class_names=["background", "liver"]).logits
    True
    """

    logits: bool = False
    sigmoid: bool = False
    ignore_index: int | None = None
    class_names: ClassNames | None = None
    regions: str | os.PathLike[str] | Regions | None = None
    strict_grid: bool = False


@dataclass(frozen=True)
class Options:
    """How to read predictions and what to report, once the names of channels are known."""

    bins: int = 20
    background: bool = False
    logits: bool = False
    sigmoid: bool = False
    regions: Regions | None = None
    class_names: tuple[tuple[int, str], ...] | None = None
    ignore_index: int | None = None
    """Label of voxels that are left out of everything."""
    calibrator: str | None = None
    """File of a calibrator that predictions go through first."""
    calibrator_fingerprint: str | None = None
    values: tuple[int, ...] | None = None
    """Label value of each class, where they are not 0, 1, 2 and so on."""
    strict_grid: bool = False
    """Refuse cases whose headers leave the place of the voxels open."""
    bands: tuple[float, ...] = ()
    """Distances to the predicted boundary of a class, in mm, that divide voxels into bands; none: no bands."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "bins", check_integer("bins", self.bins, most=10 * FINE_BINS))

    @staticmethod
    def of(options: ReadOptions, *, bins: int, background: bool) -> Options:
        """Those of a user, without names."""
        return Options(
            bins=bins,
            background=background,
            logits=options.logits,
            sigmoid=options.sigmoid,
            ignore_index=options.ignore_index,
            strict_grid=options.strict_grid,
        )

    @staticmethod
    def from_json(told: Mapping[str, Any]) -> Options:
        """What `asdict` made of them, once it has been JSON; of other keys nothing is taken."""
        known = {name: value for name, value in told.items() if name in Options.__dataclass_fields__}
        if known.get("regions") is not None:
            known["regions"] = Regions.from_json(known["regions"])
        for name in ("class_names", "values", "bands"):
            if known.get(name) is not None:
                known[name] = tuple(tuple(each) if isinstance(each, list) else each for each in known[name])
        return Options(**known)

    @property
    def fine_bins(self) -> int:
        """1,200, or the nearest multiple of the bins that are reported where those do not divide it."""
        return self.bins * max(1, round(FINE_BINS / self.bins))


def slab_voxels(classes: int) -> int:
    """How many voxels of a case to have in hand at a time."""
    return max(1 << 16, SLAB_ELEMENTS // classes)


def slabs_of(values: NDArray[Any]) -> Iterator[slice]:
    """Where to cut (class, voxel) values that are worked through a part at a time."""
    step = slab_voxels(len(values))
    return (slice(start, start + step) for start in range(0, values.shape[1], step))
