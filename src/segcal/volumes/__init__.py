"""Predicted probability maps and label maps on disk: pair them, check that their grids agree, read them in slabs.

Reading order: `pairing` (which files belong together), `arrays` (what a file holds), `grids` (which axis is which and
whether prediction and label lie in the same place), `cases` (a case read slab by slab).
"""

from segcal.volumes.cases import Case, open_case
from segcal.volumes.grids import Grid
from segcal.volumes.pairing import CaseFiles, Pairing, pair_cases

__all__ = ["Case", "CaseFiles", "Grid", "Pairing", "open_case", "pair_cases"]
