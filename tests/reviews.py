"""Raw requests to a review server, and small results for it to show."""

from __future__ import annotations

import http.client
import json
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import parse_qs, urlsplit

import numpy as np
import torch

from segcal import EvaluationAccumulator

HOSTILE = "<img src=x onerror=alert(1)>'\"&amp;</script>"


class Answer(NamedTuple):
    """Of the server to a raw request."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


class Client:
    """Asks a server as no browser would: any header, any path."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self.host, self.port = parts.hostname, parts.port
        self.token = parse_qs(parts.query)["token"][0]
        self.origin = f"http://{parts.netloc}"

    def ask(self, path: str, method: str = "GET", *, body: Any = None, **changes: str | None) -> Answer:
        """With the headers of the page's own script, less those that are None; _ stands for -."""
        headers: dict[str, str | None] = {"host": urlsplit(self.origin).netloc, "x-segcal-token": self.token}
        content = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        if content is not None:
            headers |= {"content-type": "application/json", "content-length": str(len(content))}
        if method != "GET":
            headers["origin"] = self.origin
        headers |= {name.replace("_", "-"): value for name, value in changes.items()}
        connection = http.client.HTTPConnection(self.host, self.port, timeout=20)
        try:
            connection.putrequest(method, path, skip_host=True, skip_accept_encoding=True)
            for name, value in headers.items():
                if value is not None:
                    connection.putheader(name, value)
            connection.endheaders(content)
            answer = connection.getresponse()
            return Answer(answer.status, {k.lower(): v for k, v in answer.getheaders()}, answer.read())
        finally:
            connection.close()

    def decide(self, case: str, decision: str = "accept", *, comment: str = "", seen: int = 0, by: str = "") -> Answer:
        body = {"case": case, "decision": decision, "comment": comment, "reviewer": by, "seen": seen}
        return self.ask("/api/decisions", "PUT", body=body)


def save_evaluation(path: Path, cases: list[str], *, classes: int = 2, voxels: int = 64) -> None:
    """Sums of cases whose probabilities get surer from case to case, so that the first is expected to be worst."""
    draw = np.random.default_rng(0)
    found = EvaluationAccumulator()
    for i, case in enumerate(cases):
        labels = torch.from_numpy(draw.integers(0, classes + 1, (1, voxels)))
        sure = 0.4 + 0.55 * (i + 1) / len(cases)
        rest = (1 - sure) / classes
        one_hot = torch.nn.functional.one_hot(labels, classes + 1).movedim(-1, 1)
        found.update(rest + (sure - rest) * one_hot.double(), labels, [case])
    path.parent.mkdir(parents=True, exist_ok=True)
    found.compute().save(path)
