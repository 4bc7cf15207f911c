"""What the server answers: one page, the list, decisions and volumes."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route

from segcal._io.jobs import failure_of
from segcal._io.parsing import parse_json
from segcal.errors import ConfigError, SegcalError
from segcal.review.decisions import OPEN, ConflictError, Decisions, ReviewDecision
from segcal.review.page import review_page
from segcal.review.results import Result
from segcal.review.volumes import Volumes
from segcal.viewer.embedding import niivue_script

MOST_BYTES = 1 << 17  # of a request; a comment of 10,000 signs fits
PATIENCE_S = 5  # for answers that are under way when it ends


@contextmanager
def running(app: Any, listening: socket.socket) -> Iterator[threading.Event]:
    """The application in a thread, from when it answers to when its last answer is given; the event is its end."""
    config = uvicorn.Config(
        app, loop="asyncio", http="h11", ws="none", lifespan="off", interface="asgi3", log_config=None,
        access_log=False, log_level="critical", server_header=False, timeout_graceful_shutdown=PATIENCE_S,
        h11_max_incomplete_event_size=MOST_BYTES,
    )  # fmt: skip
    server = uvicorn.Server(config)
    ended = threading.Event()  # a thread whose join a signal interrupts counts as ended for Python 3.11

    def run() -> None:
        try:
            server.run(sockets=[listening])
        finally:
            ended.set()

    threading.Thread(target=run, daemon=True).start()
    try:
        while not server.started and not ended.wait(0.01):
            pass
        yield ended
    finally:
        server.should_exit = True
        ended.wait()


def application(
    results: list[Result], volumes: Volumes, decisions: Decisions, *, token: str, reviewer: str
) -> Starlette:
    """All answers, for those that `Guard` lets through."""
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
            theirs = there.get(decision.case, (0, ReviewDecision(decision.case, OPEN)))
            return _json(_as_json({"error": str(error), "theirs": _told(*theirs)}), status=409)
        return _json(_as_json(_told(*made)))

    def send_facts(request: Request) -> Response:
        case, result = _case(request, known), _result(request, results)
        return _json(_as_json(volumes.facts(case, result)))

    def send_volume(request: Request) -> Response:
        case, result = _case(request, known), _result(request, results)
        kind = request.query_params.get("kind", "")
        content = volumes.nifti(case, result, kind, _number(request, "class"))
        return Response(content, media_type="application/octet-stream")

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
    handlers: Any = {SegcalError: partial(_refused, 400), OSError: partial(_refused, 500), Exception: _unexpected}
    return Starlette(routes=routes, exception_handlers=handlers)


def _told(revision: int, decision: ReviewDecision) -> dict[str, Any]:
    return {"revision": revision, **vars(decision)}


def _refused(status: int, request: Request, error: Exception) -> Response:
    return _json(_as_json({"error": str(error)}), status=status)


def _unexpected(request: Request, error: Exception) -> Response:
    return _json(_as_json({"error": failure_of("", error).message}), status=500)


def _as_json(content: object) -> bytes:
    return json.dumps(content, allow_nan=False, separators=(",", ":")).encode()


def _json(content: bytes, *, status: int = 200) -> Response:
    return Response(content, status, media_type="application/json")


async def _body(request: Request) -> Any:
    """The JSON of a request; refused before it is read where it is too long or something else."""
    if request.headers.get("content-type", "").partition(";")[0].strip() != "application/json":
        raise ConfigError("a decision must come as application/json. Reload the page.")
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
        raise ConfigError(f"a decision must have {', '.join(fields)}, and no more. Reload the page.")
    for name, fits in fields.items():
        if not fits(content[name]):
            raise ConfigError(f"{name} must be {'a whole number' if name == 'seen' else 'a text'}. Reload the page.")
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
