"""Who may ask the server what: its token, its own name, its own pages, and headers that keep a browser strict.

The server listens on 127.0.0.1, which every program and every user of the machine can reach, and every web page that a
browser on it shows can send requests there. So each request must

- carry the token, 256 random bits made at the start and compared in constant time. It is in the address that is
  printed, and the page's script sends it with every request in a header of its own. It is not made a cookie: browsers
  send the cookies of 127.0.0.1 to every port there, so that any other local server, which on a shared machine may be
  anybody's, would receive it; and they attach a cookie to requests that other pages make. A header is sent by our
  script alone, to our server alone, and a foreign page cannot set it without asking first, which is never answered.
  The token stays in the address bar, so that a page can be loaded again; it is worth nothing once the server has ended.
- be for this server by name (`Host`), for a name of an attacker's that leads here (DNS rebinding) would make his page
  and this server one origin.
- if it is for data, come from our own page (`Sec-Fetch-Site`, where the browser says it); if it writes, say so
  (`Origin`).

The page's policy lets nothing run but the script and the style in it, and nothing be fetched but from here.
"""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Iterable
from typing import NamedTuple
from urllib.parse import parse_qs

from starlette.datastructures import Headers
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

HOST = "127.0.0.1"
TOKEN_HEADER = "x-segcal-token"
PAGE = "/"
READING = ("GET", "HEAD")
MOST_FIELDS = 10  # of an address
HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "default-src 'none'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}


class Refusal(NamedTuple):
    """Why a request is not answered."""

    status: int
    reason: str


def new_token() -> str:
    return secrets.token_urlsafe(32)


class Guard:
    """Lets through to the application what may ask, and puts headers on every answer."""

    def __init__(self, app: ASGIApp, *, token: str, port: int) -> None:
        self.app, self._token = app, token.encode()
        names = [f"{name}:{port}" for name in (HOST, "localhost")]
        self._names = {*names, HOST, "localhost"} if port == 80 else set(names)  # browsers leave out the usual port

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return

        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                given = {name for name, _ in message["headers"]}
                message["headers"] = [
                    *message["headers"],
                    *((n, v) for n, v in _encoded(HEADERS.items()) if n not in given),
                ]
            await send(message)

        refusal = self.refuse(scope)
        if refusal is None:
            await self.app(scope, receive, with_headers)
        else:
            answer = PlainTextResponse(f"{refusal.reason}\n", refusal.status, headers={"Connection": "close"})
            await answer(scope, receive, with_headers)

    def refuse(self, scope: Scope) -> Refusal | None:
        """Why this request is refused; None where it is not."""
        headers = Headers(scope=scope)
        hosts = headers.getlist("host")
        if len(hosts) != 1 or hosts[0].lower() not in self._names:
            return Refusal(421, "This server has another name. Open the address that `segcal review` printed.")
        if scope["query_string"].count(b"&") >= MOST_FIELDS:
            return Refusal(400, "The address has too many fields. Open the address that `segcal review` printed.")
        if not self._knows_token(scope, headers):
            return Refusal(403, "The token is wrong. Open the address that `segcal review` printed.")
        site = headers.get("sec-fetch-site")
        if scope["path"] != PAGE and site not in (None, "same-origin"):
            return Refusal(403, "Only the page of this server may ask for this.")
        if scope["method"] not in READING and headers.getlist("origin") != [f"http://{headers['host']}"]:
            return Refusal(403, "Only the page of this server may write.")
        return None

    def _knows_token(self, scope: Scope, headers: Headers) -> bool:
        """In the address of the page, in the header of everything else."""
        if scope["path"] == PAGE:
            given = parse_qs(scope["query_string"].decode("latin-1")).get("token", [])
        else:
            given = headers.getlist(TOKEN_HEADER)
        return len(given) == 1 and hmac.compare_digest(given[0].encode("utf-8", "replace"), self._token)


def _encoded(headers: Iterable[tuple[str, str]]) -> list[tuple[bytes, bytes]]:
    return [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in headers]
