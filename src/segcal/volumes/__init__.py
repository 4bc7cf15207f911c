"""Predicted probability maps and label maps on disk: pair them, check that their grids agree, read them in slabs.

Reading order: `pairing` (which files belong together), `stored` (what a file holds), `arrays` (how it is read;
`pictures`, `nrrd`, `metaimage` and `dicom` read other formats, with `text_header` for NRRD and MetaImage),
`orientation` (which way axes run), `grids` (which axis is which and whether prediction and label lie in the same
place), `averaging` (how the mean of several predictions is taken), `cases` (a case read slab by slab), `mismatch` (why
files do not belong together), `images` (what was segmented), `finding` (maps without labels), `predictions` (such maps,
written elsewhere with other values), `steps` (probabilities as integers), `writing` (how files take them).
"""

from segcal.volumes.cases import Case, count_channels, open_case
from segcal.volumes.finding import PredictionFiles, find_predictions, place_of_labels, places
from segcal.volumes.grids import Grid
from segcal.volumes.pairing import CaseFiles, Pairing, pair_cases
from segcal.volumes.predictions import Prediction, open_prediction

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
