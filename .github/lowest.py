"""The lowest versions that pyproject.toml allows, as pip installs them: `python .github/lowest.py [EXTRA...]`."""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path

project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
extras = (project["optional-dependencies"][extra] for extra in sys.argv[1:])
for requirement in sorted({*project["dependencies"], *(each for extra in extras for each in extra)}):
    print(requirement.replace(">=", "=="))
