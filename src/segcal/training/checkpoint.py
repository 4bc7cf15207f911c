"""Checkpoints: written whole, read without unpickling anything but tensors and plain values."""

from __future__ import annotations

import io
import zipfile
from pathlib import Path
from typing import Any

import torch

from segcal._io.files import WriteError, reject_pipe, write_whole
from segcal.errors import FileError

LAST, BEST = "last.pt", "best.pt"
_ZIP = b"PK\x03\x04"  # torch.load also takes its form of before 1.6, a row of pickles, which nothing here writes


class UnsavedError(WriteError, FileError):
    """A checkpoint that cannot be written; the previous one is kept."""

    def __str__(self) -> str:
        kept = "The previous checkpoint is kept. Free some space and run the same command again to resume."
        return f"{super().__str__()} {kept}"


def save_checkpoint(path: Path, content: dict[str, Any]) -> None:
    """Write a checkpoint; the previous one is kept until the new one is complete."""
    buffer = io.BytesIO()
    torch.save(content, buffer)
    try:
        write_whole(path, buffer.getbuffer())
    except WriteError as error:
        raise UnsavedError(error.errno or 0, error.strerror or "", error.filename) from error


def load_checkpoint(path: Path, device: torch.device | str = "cpu") -> dict[str, Any]:
    """Read a checkpoint; FileError where it is none."""
    reject_pipe(path)
    try:
        with path.open("rb") as file:
            if file.read(4) != _ZIP:
                raise ValueError("it is no archive")
            with zipfile.ZipFile(file) as archive:  # torch does not compare the checksums
                if damaged := archive.testzip():
                    raise ValueError(f"its part {damaged} is damaged")
        content = torch.load(path, map_location=device, weights_only=True)
    except Exception as error:  # whatever torch trips over in a broken file
        reason = str(error).split(".")[0].split("\n")[0] or type(error).__name__
        raise FileError(f"{path} must be a checkpoint of a run; {reason}. Train the run again.") from error
    if not isinstance(content, dict) or "network" not in content:
        raise FileError(f"{path} must be a checkpoint of a run; it holds no network. Train the run again.")
    return content
