"""A review from start to end: what there is to see is found, the file of decisions held, and the server run beside.

Starlette and uvicorn are imported when a review is served, so that everything else works without them.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from segcal.errors import ConfigError, FileError
from segcal.review.decisions import Decisions
from segcal.review.results import Result, find_results
from segcal.review.volumes import Volumes


class ReviewServer:
    """A review that is being served.

    url: what to open, with the token; keep it to yourself.
    decisions: the file they are written to.
    cases: how many there are.
    notes: sentences on what cannot be shown, as volumes that are not there.
    """

    def __init__(self, url: str, decisions: Path, cases: int, notes: list[str], ended: threading.Event) -> None:
        self.url, self.decisions, self.cases, self.notes = url, decisions, cases, notes
        self._ended = ended

    def wait(self) -> None:
        """Until the server ends, or somebody interrupts."""
        while not self._ended.wait(0.5):  # a wait without an end could not be interrupted on Windows
            pass


@contextmanager
def serve_review(
    folder: str | os.PathLike[str],
    *,
    predictions: str | os.PathLike[str] | Mapping[str, str | os.PathLike[str]] | None = None,
    labels: str | os.PathLike[str] | None = None,
    images: str | os.PathLike[str] | None = None,
    decisions: str | os.PathLike[str] | None = None,
    reviewer: str = "",
    port: int = 0,
) -> Iterator[ReviewServer]:
    """Serve the cases of a folder for review by browsers on this machine, until the block ends.

    The list, worst first, is of what the folder holds: the evaluation of `segcal evaluate`, the queue of `segcal
    quality apply`, the runs of `segcal study run`, or such in folders directly below. Decisions are in their file
    before a browser is told so, and are there again the next time. FileError where there is nothing to review,
    ConfigError where another process serves the same file of decisions or the port is taken.

    folder: the results, or one file of them.
    predictions: folder of the maps to show; of several results, by name. If not given, what the results tell.
    labels: folder of their labels. If not given, what the results tell.
    images: folder of their images.
    decisions: the file to write; if not given, decisions.csv in the folder.
    reviewer: whose decisions they are, unless the page is told otherwise.
    port: to listen at; 0 takes a free one.

    >>> import tempfile, torch, urllib.request
    >>> from segcal import EvaluationAccumulator
    >>> found = EvaluationAccumulator()
    >>> found.update(torch.full((2, 2, 8), 0.5), torch.tensor([[0, 1] * 4] * 2), ["one", "two"])
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     found.compute().save(f"{folder}/evaluation.npz")
    ...     with serve_review(folder) as server, urllib.request.urlopen(server.url) as answer:
    ...         server.cases, answer.status, server.decisions.name
    (2, 200, 'decisions.csv')
    """
    from segcal.review.guard import HOST, Guard, new_token
    from segcal.review.server import application, running

    source = Path(folder)
    results = find_results(source)
    volumes = _volumes(results, predictions, labels, images)
    beside = source.parent if source.is_file() else source
    path = beside / "decisions.csv" if decisions is None else Path(decisions)
    with Decisions.held(path) as held, _listening(HOST, port) as listening:
        token, port = new_token(), listening.getsockname()[1]
        app = Guard(application(results, volumes, held, token=token, reviewer=reviewer), token=token, port=port)
        with running(app, listening) as ended:
            number = len({case for result in results for case in result.cases})
            yield ReviewServer(f"http://{HOST}:{port}/?token={token}", path, number, volumes.notes, ended)


def _volumes(results: list[Result], predictions: Any, labels: Any, images: Any) -> Volumes:
    names = [result.name for result in results]
    if isinstance(predictions, Mapping):
        if unknown := [name for name in predictions if name not in names]:
            raise ConfigError(f"predictions must be of the results {', '.join(names)}; got {unknown[0]!r}.")
        maps = {name: Path(given) for name, given in predictions.items()}
    elif predictions is not None and len(results) > 1:
        raise ConfigError(f"predictions must name their results: {', '.join(names)}. Write NAME=FOLDER.")
    else:
        maps = {} if predictions is None else {names[0]: Path(predictions)}
    if images is not None and not Path(images).is_dir():
        raise FileError(f"images must be a folder; {images} is none. Check the path.")
    return Volumes(
        results,
        predictions=maps,
        labels=None if labels is None else Path(labels),
        images=None if images is None else Path(images),
    )


@contextmanager
def _listening(host: str, port: int) -> Iterator[socket.socket]:
    """A socket of this machine alone; ConfigError where the port is taken."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as made:
        if os.name != "nt":  # there it would share the port with others
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            made.bind((host, port))
        except (OSError, OverflowError) as error:
            raise ConfigError(
                f"--port must be one that nobody listens at; {port}: {error}. 0 takes a free one."
            ) from error
        yield made
