"""Checkpoints: written whole, read without unpickling anything but tensors and plain values."""

from __future__ import annotations

import io
import pickle
from pathlib import Path
from typing import Any

import torch

from segcal.errors import FileError
from segcal.files import write_whole

LAST, BEST = "last.pt", "best.pt"


def save_checkpoint(path: Path, content: dict[str, Any]) -> None:
    """Write a checkpoint; the one of before stands until the new one is whole."""
    buffer = io.BytesIO()
    torch.save(content, buffer)
    try:
        write_whole(path, buffer.getbuffer())
    except OSError as error:
        raise FileError(
            f"{path} cannot be written: {error.strerror or error}. The checkpoint of before stands: make room, and the "
            f"same command goes on from it."
        ) from error


def load_checkpoint(path: Path, device: torch.device | str = "cpu") -> dict[str, Any]:
    """Read a checkpoint; FileError where it is none."""
    try:
        content = torch.load(path, map_location=device, weights_only=True)
    except (OSError, RuntimeError, ValueError, LookupError, EOFError, pickle.UnpicklingError) as error:
        reason = str(error).split(".")[0].split("\n")[0]
        raise FileError(f"{path} must be a checkpoint of a run; {reason}.") from error
    if not isinstance(content, dict) or "network" not in content:
        raise FileError(f"{path} must be a checkpoint of a run; it holds no network.")
    return content
