"""Time of the threshold curves of a cohort."""

from __future__ import annotations

import torch

from measure import alternate, write_rows
from segcal import Binning, BinStatistics
from segcal.decisions import threshold_curves

FINE_BINS = 1200


def curves() -> list[dict[str, object]]:
    """All thresholds of 200 cases and 15 classes, against merely adding up as many numbers."""
    generator = torch.Generator().manual_seed(0)
    count = torch.randint(0, 1000, (200, 15, FINE_BINS), generator=generator).double()
    stats = BinStatistics(count, count / 2, count / 3, Binning(FINE_BINS))
    times = alternate(lambda: threshold_curves(stats), lambda: count.cumsum(-1), repetitions=5)
    return [
        {"what": "threshold_curves / one cumulative sum", "data": "200 cases x 15 classes", "must": "ours_s <= 2"}
        | times
    ]


if __name__ == "__main__":
    write_rows("decisions_curves", curves())
