"""Evaluations as files of former formats, to see that these are still read."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from segcal import Evaluation
from segcal.statistics import SUMS


def rewrite_as_second(path: Path) -> None:
    """Turn a saved evaluation into a file of the second format: all fine bins as arrays of float64, empty ones, too."""
    evaluation = Evaluation.load(path)
    with np.load(path) as archive:
        arrays = {name: archive[name] for name in archive.files if not name.endswith("_sizes")}
    for kind in ("statistics", "top_label"):
        if arrays.pop(kind, None) is not None:
            arrays |= {f"{kind}_{name}": getattr(getattr(evaluation, kind), name).numpy() for name in SUMS}
    arrays["header"] = np.array(str(arrays["header"]).replace("segcal evaluation 3", "segcal evaluation 2"))
    np.savez(path, **arrays)
