"""Reports in a real browser."""

from __future__ import annotations

import shutil
from contextlib import contextmanager

import pytest


@pytest.fixture(scope="module")
def browser():
    chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if chromium is None:
        pytest.skip("no Chromium found to open the report with")
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright drives Chromium")
    flags = "--no-sandbox --use-angle=swiftshader --enable-unsafe-swiftshader"  # WebGL without a graphics card
    flags += " --disable-background-networking --disable-component-update --disable-sync"
    with playwright.sync_playwright() as driver:
        opened = driver.chromium.launch(executable_path=chromium, args=flags.split())
        yield opened
        opened.close()


@pytest.fixture
def watch(browser):
    """Opens a report in a fresh window; at the end nothing was fetched, printed to the console, or popped up."""

    @contextmanager
    def watched(report):
        context = browser.new_context(viewport={"width": 1400, "height": 900})
        opened = context.new_page()
        troubles, requests = [], []
        opened.on("console", lambda message: troubles.append(message.text))
        opened.on("pageerror", lambda error: troubles.append(str(error)))
        opened.on("dialog", lambda dialog: (troubles.append(dialog.message), dialog.dismiss()))
        opened.on("request", lambda request: requests.append(request.url))
        opened.goto(report.as_uri())
        yield opened
        assert troubles == []
        assert {url.split("#")[0] for url in requests if not url.startswith("data:image/png")} == {report.as_uri()}
        context.close()

    return watched


@pytest.fixture
def page(watch, report):
    """The module's report."""
    with watch(report) as opened:
        yield opened
