"""What this machine has, whether every backend is right on it, and which one to take: `segcal doctor`.

Reading order: `machine` (versions and devices), `checks` (a backend against the reference), `diagnosis` (all of it).
"""

from segcal.doctor.checks import BackendCheck, check_backend
from segcal.doctor.diagnosis import Diagnosis, diagnose
from segcal.doctor.machine import Device

__all__ = ["BackendCheck", "Device", "Diagnosis", "check_backend", "diagnose"]
