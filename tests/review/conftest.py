"""A review that is being served, asked by raw requests and by a real browser."""

from __future__ import annotations

from contextlib import contextmanager

import pytest
from reviews import Client, save_evaluation

from segcal.review.serving import serve_review


@pytest.fixture
def results(tmp_path):
    """A folder as `segcal evaluate` leaves it, without volumes."""
    save_evaluation(tmp_path / "results" / "evaluation.npz", [f"case_{i:02d}" for i in range(12)])
    return tmp_path / "results"


@pytest.fixture
def server(results):
    with serve_review(results) as running:
        yield running


@pytest.fixture
def client(server):
    return Client(server.url)


@pytest.fixture
def visit(browser):
    """Opens a review in a window of its own; at the end nothing went elsewhere, to the console, or popped up."""

    @contextmanager
    def visited(url: str, *, expected: tuple[str, ...] = ()):
        context = browser.new_context(viewport={"width": 1400, "height": 900})
        page = context.new_page()
        troubles: list[str] = []
        page.on("console", lambda message: troubles.append(message.text))
        page.on("pageerror", lambda error: troubles.append(str(error)))
        page.on("dialog", lambda dialog: (troubles.append(dialog.message), dialog.dismiss()))
        origin = url.split("?")[0]
        page.on("request", lambda request: request.url.startswith(origin) or troubles.append(request.url))
        page.goto(url)
        page.wait_for_selector(".row")
        yield page
        assert [text for text in troubles if not any(word in text for word in expected)] == []
        context.close()

    return visited
