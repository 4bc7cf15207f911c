"""Training on plain PyTorch, one process or many.

Reading order: `loop` (the whole of it), `data` (patches, drawn anew from seed, epoch and index),
`log`.
"""

from segcal.training.log import Logger
from segcal.training.loop import TrainedRun, train

__all__ = ["Logger", "TrainedRun", "train"]
