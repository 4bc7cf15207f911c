"""The command line: thin verbs, each over one public function; heavy imports wait inside them."""

from segcal.cli import calibrating, decisions, doctor, learning, measuring, studying  # noqa: F401  the verbs
from segcal.cli.app import app

__all__ = ["app"]
