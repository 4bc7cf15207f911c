"""Leaves out what needs a package that only an environment of its own has: see `make test-adapters`."""

from __future__ import annotations

from importlib.util import find_spec

_PEERS = {
    "nbclient": ["tests/adapters/test_notebook.py"],
    "lightning": ["src/segcal/adapters/lightning.py", "tests/adapters/test_lightning.py"],
    "nnunetv2": [
        "src/segcal/adapters/nnunet.py",
        "src/segcal/adapters/nnunet_trainers",
        "tests/adapters/test_nnunet.py",
    ],
}
collect_ignore = [path for package, paths in _PEERS.items() if find_spec(package) is None for path in paths]
