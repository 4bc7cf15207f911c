"""Runs the notebooks in this folder from top to bottom and stores them with what they show: `python execute.py`.

What differs from run to run (times, the version of Python) is left out, so that a file changes only with what it shows.
Needs nbclient and ipykernel.
"""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

import nbformat
from nbclient import NotebookClient
from nbformat import NotebookNode

SECONDS = 600  # for the slowest cell


def execute(path: Path) -> NotebookNode:
    """The notebook with fresh outputs, run in an empty folder; a cell that fails is an error."""
    notebook = nbformat.read(path, as_version=4)
    with TemporaryDirectory() as folder:
        where = {"metadata": {"path": folder}}
        # What a cell prints is one output, however it came in.
        client = NotebookClient(notebook, timeout=SECONDS, resources=where, record_timing=False, coalesce_streams=True)
        client.execute()
    notebook.metadata["language_info"] = {"name": "python"}
    for cell in notebook.cells:
        cell.metadata.clear()
    return notebook


if __name__ == "__main__":
    for path in sorted(Path(__file__).parent.glob("*.ipynb")):
        nbformat.write(execute(path), path)
        print(f"{path.name}: {path.stat().st_size / 1000:.0f} kB")
