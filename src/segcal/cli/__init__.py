"""The command line: thin verbs, each over one public function; heavy imports wait inside them.

A module holds the commands of the package that it is named after.
"""

from segcal.cli import (  # noqa: F401  the verbs
    adapters,
    audit,
    calibration,
    comparison,
    datasets,
    doctor,
    evaluation,
    quality,
    report,
    review,
    study,
    training,
)
from segcal.cli.app import app

__all__ = ["app"]
