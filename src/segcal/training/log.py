"""What a run reports while it trains: a CSV file and TensorBoard, one row an epoch."""

from __future__ import annotations

import csv
import io
from pathlib import Path
from typing import Any

from segcal.files import write_whole

COLUMNS = (
    "epoch",
    "learning_rate",
    "loss",
    "dice_loss",
    "ce_loss",
    "ace_loss",
    "seconds",
    "dice",
    "ace",
    "ece",
    "mce",
)
"""The last four are of the validation cases, means over cases and classes; empty in epochs without validation."""


class Log:
    """The rows so far; they live in the checkpoint, so that the files never run ahead of it."""

    def __init__(self, folder: Path, rows: list[dict[str, float]]) -> None:
        self.folder, self.rows = folder, rows
        self._board: Any = None

    def add(self, row: dict[str, float]) -> None:
        self.rows.append(row)

    def write(self) -> None:
        """Bring the files up to date."""
        content = io.StringIO()
        writer = csv.DictWriter(content, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(self.rows)
        write_whole(self.folder / "log.csv", content.getvalue().encode())
        row = self.rows[-1]
        if self._board is None:
            from torch.utils.tensorboard import SummaryWriter

            self._board = SummaryWriter(str(self.folder / "tensorboard"), purge_step=int(row["epoch"]))
        for name, value in row.items():
            if name != "epoch":
                group = "validation" if name in COLUMNS[-4:] else "training"
                self._board.add_scalar(f"{group}/{name}", value, int(row["epoch"]))
        self._board.flush()

    def close(self) -> None:
        if self._board is not None:
            self._board.close()
