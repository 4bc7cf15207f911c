"""Versions of what takes part in a computation, and the devices of this machine."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

import torch

from segcal import __version__

PACKAGES = {  # as pip knows them
    "torch": "torch",
    "numpy": "numpy",
    "numba": "numba",
    "llvmlite": "llvmlite",
    "SciPy": "scipy",
    "NiBabel": "nibabel",
    "Pillow": "pillow",
    "tifffile": "tifffile",
    "highdicom": "highdicom",
    "isal": "isal",
    "filelock": "filelock",
    "matplotlib": "matplotlib",
    "MONAI": "monai",
    "nnU-Net": "nnunetv2",
    "Lightning": "lightning",
    "torchmetrics": "torchmetrics",
    "Dask": "dask",
    "pydantic": "pydantic",
}
VARIABLES = ("SEGCAL_BACKEND", "OMP_NUM_THREADS", "NUMBA_DISABLE_JIT", "CUDA_VISIBLE_DEVICES")


@dataclass(frozen=True)
class Device:
    """Where tensors can be."""

    name: str
    """As torch names it: cpu, cuda:0."""
    about: str
    usable: bool = True
    """Whether segcal works there: its sums need float64."""


def versions() -> dict[str, str]:
    """Versions of segcal, Python and the system, and of every package that is installed and may take part."""
    found = {"segcal": __version__, "Python": platform.python_version(), "system": platform.platform()}
    for name, package in PACKAGES.items():
        try:
            found[name] = version(package)
        except PackageNotFoundError:
            continue
    return found | ({"CUDA of torch": torch.version.cuda} if torch.version.cuda else {})


def variables() -> dict[str, str]:
    """Variables of the environment that are set and change how sums are computed."""
    return {name: os.environ[name] for name in VARIABLES if name in os.environ}


def devices() -> tuple[Device, ...]:
    """The CPU, and what else torch finds."""
    threads = torch.get_num_threads()
    found = [Device("cpu", f"{platform.processor() or platform.machine()}, {threads} of {os.cpu_count()} cores used")]
    for i in range(torch.cuda.device_count()):
        about = torch.cuda.get_device_properties(i)
        found.append(Device(f"cuda:{i}", f"{about.name}, {about.total_memory / 2**30:.0f} GiB"))
    if torch.backends.mps.is_available():
        found.append(Device("mps", "has no float64, which the sums need; move tensors to the CPU", usable=False))
    return tuple(found)
