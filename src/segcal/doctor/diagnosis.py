"""Versions, devices and checks of all backends together, and what to set."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from segcal.collect import BACKEND_VARIABLE, BACKENDS, Backend, pick_backend
from segcal.doctor.checks import BackendCheck, check_backend
from segcal.doctor.machine import Device, devices, variables, versions
from segcal.errors import ConfigError


@dataclass(frozen=True)
class Diagnosis:
    """What `segcal doctor` finds."""

    versions: dict[str, str]
    variables: dict[str, str]
    devices: tuple[Device, ...]
    picked: dict[str, Backend]
    """The backend that segcal takes on each device if none is named."""
    checks: tuple[BackendCheck, ...]
    unavailable: dict[str, str]
    """For each backend that runs nowhere here, why."""
    setting: Backend | None
    """What SEGCAL_BACKEND should be; None: unset."""
    advice: str

    @property
    def agrees(self) -> bool:
        """Whether every backend gives what the reference gives."""
        return all(check.agrees for check in self.checks)

    def to_dict(self) -> dict[str, Any]:
        """All of it in types of JSON."""
        checks = [{**asdict(check), "agrees": check.agrees} for check in self.checks]
        return {**asdict(self), "checks": _finite(checks), "agrees": self.agrees}


def diagnose(*, progress: Callable[[str], None] = lambda text: None) -> Diagnosis:
    """Check every backend that runs here, on every device. ConfigError where SEGCAL_BACKEND names no backend."""
    found = [device for device in devices() if device.usable]
    tensors = {device.name: torch.zeros(1, device=device.name) for device in found}
    picked = {name: pick_backend(tensor, None) for name, tensor in tensors.items()}
    checks = []
    for (name, tensor), backend in itertools.product(tensors.items(), BACKENDS):
        if _runs(tensor, backend):
            progress(f"checking {backend} on {name}")
            checks.append(check_backend(backend, name))
    setting, advice = recommend(checks)
    missing = set(BACKENDS) - {check.backend for check in checks}
    return Diagnosis(
        versions=versions(),
        variables=variables(),
        devices=devices(),
        picked=picked,
        checks=tuple(checks),
        unavailable=dict.fromkeys(sorted(missing), "it is not installed"),
        setting=setting,
        advice=advice,
    )


def _runs(tensor: Tensor, backend: Backend) -> bool:
    try:
        pick_backend(tensor, backend)
    except ConfigError:
        return False
    return True


def recommend(checks: Sequence[BackendCheck]) -> tuple[Backend | None, str]:
    """What SEGCAL_BACKEND should be (None: unset), and why."""
    setting, why = _best(checks)
    now = os.environ.get(BACKEND_VARIABLE) or None
    if setting == now:
        return setting, f"Leave {BACKEND_VARIABLE} {f'at {now}' if now else 'unset'}: {why}"
    return setting, f"{f'Set {BACKEND_VARIABLE}={setting}' if setting else f'Unset {BACKEND_VARIABLE}'}: {why}"


def _best(checks: Sequence[BackendCheck]) -> tuple[Backend | None, str]:
    wrong = [check for check in checks if not check.agrees]
    if wrong:
        told = " and ".join(f"{check.backend} on {check.device}" for check in wrong)
        report = "Please report it with what segcal doctor --json prints."
        if any(check.backend == "torch" for check in wrong):
            return None, f"{told} disagrees with the reference; keep tensors on the CPU. {report}"
        return "torch", f"{told} disagrees with the reference. {report}"
    return None, "what segcal picks by itself agrees with the reference."


def _finite(value: Any) -> Any:
    """The same with None for numbers that JSON does not have."""
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not abs(value) < float("inf") else value
