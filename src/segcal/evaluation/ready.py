"""Imported by the process from which workers are forked: brings all that measuring a case needs, but for torch.

Compiled code is loaded for the usual types; workers that measure others load theirs.
"""

from __future__ import annotations

from contextlib import suppress

import numpy as np
from scipy import ndimage  # noqa: F401

from segcal.evaluation import cohort  # noqa: F401
from segcal.evaluation.options import Options
from segcal.evaluation.voxels import measure_voxels

with suppress(Exception):  # whoever measures meets it again
    measure_voxels(np.full((2, 8), 0.5, np.float32), np.zeros(8, np.uint8), Options(), threads=1)
