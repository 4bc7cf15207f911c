"""What a run reports while it trains, once an epoch: to a CSV file, to TensorBoard, and to loggers of the caller.

A logger is any callable that takes an epoch and its values by name, such as `training/loss` and `validation/ace`. It is
told of an epoch after its checkpoint stands. One that raises stops nothing: what it did not take it is told again with
the next epoch.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from segcal._io.files import write_whole, writing

Logger = Callable[[int, Mapping[str, float]], None]
Row = dict[str, float]

VALIDATION = ("dice", "ace", "ece", "mce")
"""Means over the validation cases and their classes; missing in epochs without validation."""
COLUMNS = ("epoch", "learning_rate", "loss", "dice_loss", "ce_loss", "ace_loss", "seconds", *VALIDATION)


class Log:
    """The rows so far; they live in the checkpoint, so that what is reported never runs ahead of it."""

    def __init__(
        self, folder: Path, *, loggers: Sequence[Logger] = (), say: Callable[[str], None] = lambda text: None
    ) -> None:
        self.folder, self.rows = folder, list[Row]()
        self._board = _Board(folder / "tensorboard")
        self._listeners = [_Listener(logger, f"logger {i}", say) for i, logger in enumerate(loggers, start=1)]

    def add(self, row: Row) -> None:
        self.rows.append(row)

    def write(self) -> None:
        """Write all rows to the file, and tell everyone of the last."""
        content = io.StringIO()
        writer = csv.DictWriter(content, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(self.rows)
        write_whole(self.folder / "log.csv", content.getvalue().encode())
        everyone: list[Logger] = [self._board, *self._listeners]
        for tell in everyone:
            tell(int(self.rows[-1]["epoch"]), _values(self.rows[-1]))

    def close(self) -> None:
        self._board.close()
        for listener in self._listeners:
            listener.close()


def _values(row: Row) -> Row:
    """The values of an epoch under the names that loggers see."""
    return {
        f"{'validation' if name in VALIDATION else 'training'}/{name}": value
        for name, value in row.items()
        if name != "epoch"
    }


class _Board:
    """TensorBoard, begun with the first epoch that it is told of; what it had from there on is replaced."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._writer: Any = None

    def __call__(self, epoch: int, values: Mapping[str, float]) -> None:
        with writing(self.folder):
            if self._writer is None:
                from torch.utils.tensorboard import SummaryWriter

                self._writer = SummaryWriter(str(self.folder), purge_step=epoch)
            for name, value in values.items():
                self._writer.add_scalar(name, value, epoch)
            self._writer.flush()

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


class _Listener:
    """A logger of the caller, whose failures must not end a training of days; the first one is said."""

    def __init__(self, logger: Logger, name: str, say: Callable[[str], None]) -> None:
        self.logger, self.name, self.say = logger, name, say
        self.waiting: dict[int, Mapping[str, float]] = {}
        self.failed = False

    def __call__(self, epoch: int, values: Mapping[str, float]) -> None:
        self.waiting[epoch] = values
        try:
            for told in list(self.waiting):
                self.logger(told, dict(self.waiting[told]))
                del self.waiting[told]
        except Exception as error:  # whatever a server or its client may raise
            if not self.failed:
                self.say(
                    f"{self.name} failed in epoch {epoch}: {type(error).__name__}: {error}. Training continues. "
                    f"The missed epochs are sent again with each further epoch."
                )
            self.failed = True

    def close(self) -> None:
        if self.waiting:
            self.say(
                f"{self.name} did not take these epochs: {', '.join(map(str, self.waiting))}. They are in log.csv."
            )
