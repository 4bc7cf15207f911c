"""The server: one page, the list, decisions and volumes, for browsers on this machine alone."""

from __future__ import annotations

import json
import os
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route

from segcal._io.parsing import parse_json
from segcal.errors import ConfigError, FileError, SegcalError
from segcal.review.decisions import ConflictError, Decisions, ReviewDecision
from segcal.review.guard import HOST, Guard, new_token
from segcal.review.page import review_page
from segcal.review.results import Result, find_results
from segcal.review.volumes import Volumes
from segcal.viewer.embedding import niivue_script

MOST_BYTES = 1 << 17  # of a request; a comment of 10,000 signs fits
PATIENCE_S = 5  # for answers that are under way when it ends


class ReviewServer:
    """A review that is being served.

    url: what to open, with the token; keep it to yourself.
    decisions: the file they are written to.
    cases: how many there are.
    notes: sentences on what cannot be shown, as volumes that are not there.
    """

    def __init__(self, url: str, decisions: Path, cases: int, notes: list[str], thread: threading.Thread) -> None:
        self.url, self.decisions, self.cases, self.notes = url, decisions, cases, notes
        self._thread = thread

    def wait(self) -> None:
        """Until the server ends, or somebody interrupts."""
        while self._thread.is_alive():
            self._thread.join(0.5)  # a wait without an end could not be interrupted on Windows


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
    source = Path(folder)
    results = find_results(source)
    volumes = _volumes(results, predictions, labels, images)
    beside = source.parent if source.is_file() else source
    path = beside / "decisions.csv" if decisions is None else Path(decisions)
    with Decisions.held(path) as held, _listening(port) as listening:
        token, port = new_token(), listening.getsockname()[1]
        app = Guard(_application(results, volumes, held, token=token, reviewer=reviewer), token=token, port=port)
        with _running(app, listening) as thread:
            number = len({case for result in results for case in result.cases})
            yield ReviewServer(f"http://{HOST}:{port}/?token={token}", path, number, volumes.notes, thread)


def _volumes(results: list[Result], predictions: Any, labels: Any, images: Any) -> Volumes:
    names = [result.name for result in results]
    if isinstance(predictions, Mapping):
        if unknown := [name for name in predictions if name not in names]:
            raise ConfigError(f"predictions must be of the results {', '.join(names)}; got {unknown[0]!r}.")
        maps = {name: Path(given) for name, given in predictions.items()}
    elif predictions is not None and len(results) > 1:
        raise ConfigError(f"predictions must say of which results they are, as NAME=FOLDER: {', '.join(names)}.")
    else:
        maps = {} if predictions is None else {names[0]: Path(predictions)}
    if images is not None and not Path(images).is_dir():
        raise FileError(f"images must be a folder; {images} is none.")
    return Volumes(
        results,
        predictions=maps,
        labels=None if labels is None else Path(labels),
        images=None if images is None else Path(images),
    )


@contextmanager
def _listening(port: int) -> Iterator[socket.socket]:
    """A socket of this machine alone; ConfigError where the port is taken."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as made:
        if os.name != "nt":  # there it would share the port with others
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            made.bind((HOST, port))
        except (OSError, OverflowError) as error:
            raise ConfigError(
                f"--port must be one that nobody listens at; {port}: {error}. 0 takes a free one."
            ) from error
        yield made


@contextmanager
def _running(app: Any, listening: socket.socket) -> Iterator[threading.Thread]:
    """The application in a thread, from when it answers to when its last answer is given."""
    config = uvicorn.Config(
        app, loop="asyncio", http="h11", ws="none", lifespan="off", interface="asgi3", log_config=None,
        access_log=False, server_header=False, timeout_graceful_shutdown=PATIENCE_S,
        h11_max_incomplete_event_size=MOST_BYTES,
    )  # fmt: skip
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
    thread.start()
    try:
        while thread.is_alive() and not server.started:
            thread.join(0.01)
        yield thread
    finally:
        server.should_exit = True
        thread.join()


def _application(
    results: list[Result], volumes: Volumes, decisions: Decisions, *, token: str, reviewer: str
) -> Starlette:
    page = review_page(
        results, token=token, reviewer=reviewer, volumes=volumes.any, notes=volumes.notes, file=decisions.path
    )
    listed = _as_json([result.content() for result in results])
    known = {case for result in results for case in result.cases}

    async def show(request: Request) -> Response:
        return HTMLResponse(page.text, headers={"Content-Security-Policy": page.policy})

    async def send_list(request: Request) -> Response:
        return _json(listed)

    def send_decisions(request: Request) -> Response:
        last, changed = decisions.after(_number(request, "after") or 0)
        return _json(_as_json({"revision": last, "decisions": [_told(*each) for each in changed.values()]}))

    async def decide(request: Request) -> Response:
        decision, seen = _asked(await _body(request), known)
        try:
            made = await run_in_threadpool(decisions.decide, decision, seen=seen)
        except ConflictError as error:
            _, there = await run_in_threadpool(decisions.after, 0)
            return _json(_as_json({"error": str(error), "theirs": _told(*there[decision.case])}), status=409)
        return _json(_as_json(_told(*made)))

    def send_facts(request: Request) -> Response:
        case, result = _case(request, known), _result(request, results)
        return _json(_as_json(volumes.facts(case, result)))

    def send_volume(request: Request) -> Response:
        case, result = _case(request, known), _result(request, results)
        kind = request.query_params.get("kind", "")
        return Response(
            volumes.bytes_of(case, result, kind, _number(request, "class")), media_type="application/octet-stream"
        )

    async def send_niivue(request: Request) -> Response:
        return Response(niivue_script(), media_type="text/javascript")

    routes = [
        Route("/", show),
        Route("/api/cases", send_list),
        Route("/api/decisions", send_decisions, methods=["GET"]),
        Route("/api/decisions", decide, methods=["PUT"]),
        Route("/api/case", send_facts),
        Route("/api/volume", send_volume),
        Route("/api/niivue.js", send_niivue),
    ]
    handlers: Any = {SegcalError: partial(_refused, 400), OSError: partial(_refused, 500)}
    return Starlette(routes=routes, exception_handlers=handlers)


def _told(revision: int, decision: ReviewDecision) -> dict[str, Any]:
    return {"revision": revision, **vars(decision)}


def _refused(status: int, request: Request, error: Exception) -> Response:
    return _json(_as_json({"error": str(error)}), status=status)


def _as_json(content: object) -> bytes:
    return json.dumps(content, allow_nan=False, separators=(",", ":")).encode()


def _json(content: bytes, *, status: int = 200) -> Response:
    return Response(content, status, media_type="application/json")


async def _body(request: Request) -> Any:
    """The JSON of a request; refused before it is read where it is too long or something else."""
    if request.headers.get("content-type", "").partition(";")[0].strip() != "application/json":
        raise ConfigError("a decision must come as application/json.")
    content = b""
    async for part in request.stream():
        content += part
        if len(content) > MOST_BYTES:
            raise ConfigError(f"a decision must have at most {MOST_BYTES} bytes; more came.")
    try:
        return parse_json(content.decode())
    except ValueError as error:
        raise ConfigError(f"a decision must be JSON; {error}.") from error


def _asked(content: Any, known: set[str]) -> tuple[ReviewDecision, int]:
    """The decision in a request, and the revision that it was made from."""
    fields: dict[str, Callable[[Any], bool]] = {
        **dict.fromkeys(("case", "decision", "comment", "reviewer"), lambda value: isinstance(value, str)),
        "seen": lambda value: isinstance(value, int) and not isinstance(value, bool),
    }
    if not isinstance(content, dict) or set(content) != set(fields):
        raise ConfigError(f"a decision must have {', '.join(fields)}, and no more.")
    for name, fits in fields.items():
        if not fits(content[name]):
            raise ConfigError(f"{name} must be {'a whole number' if name == 'seen' else 'a text'}.")
    if content["case"] not in known:
        raise ConfigError(f"the case must be one of the {len(known)} under review; got {content['case']!r}.")
    seen = content.pop("seen")
    return ReviewDecision(**content), seen


def _case(request: Request, known: set[str]) -> str:
    case = request.query_params.get("case", "")
    if case not in known:
        raise ConfigError(f"the case must be one of the {len(known)} under review; got {case!r}.")
    return case


def _result(request: Request, results: list[Result]) -> int:
    number = _number(request, "result")
    if number is None or number >= len(results):
        raise ConfigError(f"result must lie in 0..{len(results) - 1}; got {request.query_params.get('result')!r}.")
    return number


def _number(request: Request, name: str) -> int | None:
    text = request.query_params.get(name)
    if text is None:
        return None
    if not (text.isascii() and text.isdigit() and len(text) < 16):
        raise ConfigError(f"{name} must be a whole number; got {text!r}.")
    return int(text)
