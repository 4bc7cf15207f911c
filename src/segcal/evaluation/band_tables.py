"""What bands around the boundaries of classes show, as tables and files."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from segcal._io.files import write_csv
from segcal.errors import FileError
from segcal.evaluation.bands import KIND, SIDES
from segcal.evaluation.evaluation import Evaluation
from segcal.evaluation.tables import Cell, Table
from segcal.metrics import ace, ece, mce

FILE = "bands.csv"
NOTE = (
    "Distance: from the center of a voxel to the nearest center of a voxel on the other side of the class's true "
    "boundary. Confidence and frequency are over all voxels of the band, errors of pooled bins. Inside, every label is "
    "1, and outside 0: there, only the mean gap (ECE) tells anything; calibration shows in both sides together. Bands "
    "are chosen by the labels, so that even perfect probabilities show errors far from the boundary: compare methods, "
    "not with 0."
)


class BandRow(NamedTuple):
    """One band and class; macro errors are means over cases, the others are of all voxels together.

    side: "both", "inside" or "outside" of the class.
    """

    band: str
    side: str
    class_name: str
    voxels: int
    confidence: float
    frequency: float
    ace: float
    ece: float
    mce: float
    macro_ace: float
    macro_ece: float
    macro_mce: float


def side_of(name: str) -> tuple[str, str]:
    """The distances and the side of a band, from the name of its facet.

    >>> side_of("bands/inside-0-2mm"), side_of("bands/2-5mm")
    (('0-2mm', 'inside'), ('2-5mm', 'both'))
    """
    band = name.removeprefix(f"{KIND}/")
    side, dash, rest = band.partition("-")
    return (rest, side) if dash and side in SIDES else (band, "both")


def bands_of(facets: Mapping[str, Evaluation]) -> dict[str, Evaluation]:
    """The facets that are bands: both sides, inside, then outside, from the nearest on."""
    found = {name: part for name, part in facets.items() if name.startswith(f"{KIND}/")}

    def order(name: str) -> tuple[int, bool, float]:
        band, side = side_of(name)
        return ("both", *SIDES).index(side), band.startswith("beyond"), _lower(band)

    return {name: found[name] for name in sorted(found, key=order)}


def _lower(band: str) -> float:
    """The lower limit in mm."""
    try:
        return float(band.removeprefix("beyond-").partition("-")[0].removesuffix("mm"))
    except ValueError:
        return math.inf


def band_rows(facets: Mapping[str, Evaluation], *, background: bool = False) -> list[BandRow]:
    """Every band and class."""
    rows = []
    for name, facet in bands_of(facets).items():
        part = facet if background else facet.foreground()
        whole = part.binned.pool("case")
        by_case = part.case_metrics()
        errors = [error(whole)[0].tolist() for error in (ace, ece, mce)]
        for c, label in enumerate(part.classes):
            voxels = whole.count[0, c].sum().item()
            shares = [
                sums[0, c].sum().item() / voxels if voxels else math.nan
                for sums in (whole.confidence_sum, whole.label_sum)
            ]
            macro = [by_case[metric][:, c].nanmean().item() for metric in ("ace", "ece", "mce")]
            rows.append(BandRow(*side_of(name), label, round(voxels), *shares, *(each[c] for each in errors), *macro))
    return rows


def write_bands(rows: Iterable[BandRow], out: Path) -> None:
    """Write bands.csv."""
    header = tuple(name.removesuffix("_name") for name in BandRow._fields)
    plain = (["" if isinstance(x, float) and math.isnan(x) else x for x in row] for row in rows)
    write_csv(out / FILE, header, plain)


def band_table(rows: Iterable[BandRow]) -> Table:
    """A row for each class and band, both sides first."""
    rows = list(rows)
    cells = []
    for label in dict.fromkeys(row.class_name for row in rows):
        for i, row in enumerate(row for row in rows if row.class_name == label):
            of_both = row.side == "both"  # on one side every bin's gap is its distance from 0 or 1
            errors = (row.ace, row.ece, row.mce, row.macro_ace) if of_both else (math.nan, row.ece, math.nan, math.nan)
            numbers = (row.confidence, row.frequency, *errors)
            values = (Cell("-" if math.isnan(x) else f"{x:.4f}") for x in numbers)
            cells.append(
                (
                    Cell(label if i == 0 else ""),
                    Cell(f"{row.side}, {spelled(row.band)}"),
                    Cell(f"{row.voxels:,}"),
                    *values,
                )
            )
    headings = ("class", "band", "voxels", "confidence", "frequency", "ACE", "ECE", "MCE", "Macro-ACE")
    return Table("Bands around the true boundary", headings, tuple(cells), names=2)


def spelled(band: str) -> str:
    """As a reader has it.

    >>> spelled("0-2mm"), spelled("beyond-5mm")
    ('0 to 2 mm', 'beyond 5 mm')
    """
    return band.replace("beyond-", "beyond ").replace("-", " to ").replace("mm", " mm")


def read_bands(folder: str | os.PathLike[str]) -> dict[str, Evaluation]:
    """The bands that `evaluate` wrote to a folder; FileError where there are none."""
    root = Path(folder)
    found = {f"{KIND}/{path.parent.name}": path for path in sorted((root / KIND).glob("*/evaluation.npz"))}
    if not found:
        raise FileError(f"{root} must hold bands, as `segcal evaluate --bands 2,5` writes them; it holds none. Run it.")
    return bands_of({name: Evaluation.load(path) for name, path in found.items()})
