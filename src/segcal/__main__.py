"""`python -m segcal` is `segcal`."""

from segcal.cli import app

app(prog_name="segcal")
