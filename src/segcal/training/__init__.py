"""Training on plain PyTorch, one process or many; and what a trained network is put to.

Reading order: `config` (a run as one frozen object), `preprocessing` (images made ready, and the way back), `data`
(patches, drawn anew from seed, epoch and index), `loop` (the whole of it), `log`, `checkpoint`, `distributed`,
`inference` (a network on whole images), `runs` (a trained run that predicts and is evaluated), `ensemble` (several of
them as one).
"""

from typing import TYPE_CHECKING

from segcal._io.lazy import attach

if TYPE_CHECKING:
    from segcal.training.log import Logger
    from segcal.training.loop import TrainedRun, train

__all__ = ["Logger", "TrainedRun", "train"]

if not TYPE_CHECKING:
    __getattr__, __dir__ = attach(__name__, {"Logger": "log", "TrainedRun": "loop", "train": "loop"})
