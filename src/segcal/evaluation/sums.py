"""The sums of one case, and the file that keeps them until all cases are there. All in numpy, as the workers are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from segcal._io.files import read_header, read_npz, write_npz
from segcal._io.jobs import stamp
from segcal.errors import SegcalError
from segcal.evaluation.options import Options
from segcal.evaluation.packing import pack, unpack

Array = NDArray[Any]

FORMAT = "segcal case 5"


@dataclass(frozen=True, eq=False)
class CaseSums:
    """The sums of one case, float64; they add up over slabs."""

    bins: Array
    """(3, class, fine bin): count, confidence sum, label sum."""
    top_label: Array
    """(3, fine bin): the same of each voxel's most probable class; no bins where classes overlap."""
    overlap: Array
    """(3, class): voxels predicted, true, and both."""
    scores: Array
    """(3, class): squared error and log loss of the class against the rest, voxels."""
    joint: Array
    """(3, 1): the same of the distribution over all classes; where classes overlap, the mean over them."""
    labels: Array
    """(1, label): voxels of each trained label but the background, for regions that are unions of labels; else none."""

    decided: Array
    """(2, class): confidence summed over the voxels decided for a class, and how many of these are in the largest
    connected piece; NaN where that is not known."""
    voxel_ml: Array
    """(1, 1): the volume of a voxel, the same in all slabs; NaN where it is not known."""

    _packed: ClassVar[dict[str, bytes] | None] = None
    """Of sums that were read from a file, what is in it."""

    def __add__(self, other: CaseSums) -> CaseSums:
        added = {f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self)}
        return CaseSums(**added | {"voxel_ml": self.voxel_ml})

    def save(
        self, path: Path, case: str, sources: Sequence[Path], *, doubts: Sequence[str] = (), facets: Sequence[str] = ()
    ) -> None:
        """Write them to a file of their own, with the stamps of what they were read from and what is doubtful there.

        facets: Names of further sums of the case, which are in files beside this one.
        """
        stamps: dict[str, dict[str, int]] = {}
        for source in sources:  # those of members and raters have the same names in different folders
            names = ("/".join(source.parts[-depth:]) for depth in range(1, len(source.parts) + 1))
            stamps[next((name for name in names if name not in stamps), str(source))] = stamp(source)
        _, classes, fine_bins = self.bins.shape
        header = {"format": FORMAT, "case": case, "classes": classes, "fine_bins": fine_bins, "files": stamps}
        header |= {"exclusive": self.top_label.size > 0, "notes": list(doubts)}
        header |= {"facets": list(facets)} if facets else {}
        arrays = {f.name: getattr(self, f.name) for f in fields(self)}
        write_npz(path, header, arrays | {name: np.frombuffer(made, np.uint8) for name, made in self.packed().items()})

    def packed(self) -> dict[str, bytes]:
        """The sums in fine bins, those of classes and of top labels, as few bytes."""
        if self._packed is not None:
            return self._packed
        return {"bins": pack(self.bins), "top_label": pack(self.top_label[:, None]) if self.top_label.size else b""}

    @staticmethod
    def about(path: Path) -> tuple[int, list[str]]:
        """How many classes the sums in a file have, and what is doubtful about the case; sums are not read."""
        header = read_header(path, kind=FORMAT)
        return int(header["classes"]), [str(doubt) for doubt in header.get("notes", [])]

    @staticmethod
    def facets_in(path: Path) -> list[str]:
        """The names of further sums of the case in a file."""
        return [str(name) for name in read_header(path, kind=FORMAT).get("facets", [])]

    @staticmethod
    def doubts_in(path: Path) -> list[str]:
        """What is doubtful about the case in a file."""
        return CaseSums.about(path)[1]

    @staticmethod
    def load(path: Path) -> tuple[CaseSums, dict[str, Any]]:
        """What `save` wrote: the sums and the stamps."""
        header, arrays = read_npz(path, kind=FORMAT)
        try:
            sizes, exclusive = (int(header["classes"]), int(header["fine_bins"])), bool(header["exclusive"])
            packed = {name: arrays[name].tobytes() for name in ("bins", "top_label")}
            bins = unpack([packed["bins"]], *sizes)[:, 0]
            top = unpack([packed["top_label"]], 1, sizes[1])[:, 0, 0] if exclusive else np.zeros((3, 0))
            sums, stamps = CaseSums(**arrays | {"bins": bins, "top_label": top}), header["files"]
            sums._check(header["classes"])
        except (LookupError, TypeError, ValueError) as error:
            raise SegcalError(f"{path} must hold the sums of a case; {error}. Run `segcal evaluate` again.") from error
        object.__setattr__(sums, "_packed", packed)
        return sums, stamps

    def _check(self, named: object) -> None:
        """Refuse what `measure_voxels` never makes. Scores may be infinite, or below 0 by rounding; sums may not."""
        arrays = [np.asarray(getattr(self, f.name)) for f in fields(self)]
        shapes = [array.shape for array in arrays]
        (_, classes, bins), (_, top_bins), *_, (_, labels), _, _ = shapes
        expected = [(3, classes, bins), (3, top_bins), (3, classes), (3, classes), (3, 1), (1, labels)]
        expected += [(2, classes), (1, 1)]
        if shapes != expected or top_bins not in (0, bins):
            raise ValueError(f"its arrays have the shapes {shapes}")
        if named != classes:
            raise ValueError(f"its header names {named} classes, and it has {classes}")
        if any(array.dtype != np.float64 for array in arrays):
            raise ValueError("its arrays are not float64")
        if not all(((array >= 0) & (array < 2**60)).all() for array in (*arrays[:3], arrays[5], arrays[6][0])):
            raise ValueError("its sums are not finite numbers of at least 0")

    @staticmethod
    def are_in(path: Path, options: Options) -> bool:
        """Whether a file has the sums of a case; it may be missing, or spoilt since it was written."""
        try:
            return bool(CaseSums.load(path)[0].bins.shape[2] == options.fine_bins)
        except (SegcalError, OSError):
            return False
