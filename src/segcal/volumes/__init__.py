"""Predicted probability maps and label maps on disk: pair them, check that their grids agree, read them in slabs.

Reading order: `pairing` (which files belong together), `arrays` (what a file holds), `orientation` (which way its axes
run), `grids` (which axis is which and whether prediction and label lie in the same place), `averaging` (how the mean of
several predictions is taken), `cases` (a case read slab by slab), `mismatch` (why files do not belong together),
`predictions` (maps without labels, written elsewhere with other values), `writing` (how files take them).
"""

from segcal.volumes.cases import Case, count_channels, open_case
from segcal.volumes.grids import Grid
from segcal.volumes.pairing import CaseFiles, Pairing, pair_cases
from segcal.volumes.predictions import (
    Prediction,
    PredictionFiles,
    find_predictions,
    open_prediction,
    place_of_labels,
    places,
)

__all__ = [
    "Case",
    "CaseFiles",
    "Grid",
    "Pairing",
    "Prediction",
    "PredictionFiles",
    "count_channels",
    "find_predictions",
    "open_case",
    "open_prediction",
    "pair_cases",
    "place_of_labels",
    "places",
]
