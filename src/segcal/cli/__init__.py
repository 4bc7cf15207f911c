"""The command line: thin commands, each calls one public function and imports heavy packages itself.

Each module holds the commands of the package of the same name.
"""

from segcal.cli import (  # noqa: F401  the commands
    audit,
    calibration,
    comparison,
    datasets,
    doctor,
    evaluation,
    lesions,
    quality,
    report,
    review,
    study,
    training,
)
from segcal.cli.app import app

__all__ = ["app"]
