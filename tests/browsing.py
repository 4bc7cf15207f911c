"""Pages in a real browser: how they are opened, what is saved, and what a screen reader would meet."""

from __future__ import annotations

import csv
import io
import shutil
from contextlib import contextmanager

import pytest


@pytest.fixture(scope="module")
def browser():
    chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if chromium is None:
        pytest.skip("no Chromium found to open pages with")
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright drives Chromium")
    flags = "--no-sandbox --use-angle=swiftshader --enable-unsafe-swiftshader"  # WebGL without a graphics card
    flags += " --disable-background-networking --disable-component-update --disable-sync"
    with playwright.sync_playwright() as driver:
        opened = driver.chromium.launch(executable_path=chromium, args=flags.split())
        yield opened
        opened.close()


@pytest.fixture
def watch(browser):
    """Opens a page in a fresh window; at the end nothing was fetched, printed to the console, or popped up."""

    @contextmanager
    def watched(path, **options):
        context = browser.new_context(**{"viewport": {"width": 1400, "height": 900}, **options})
        opened = context.new_page()
        troubles, requests = [], []
        opened.on("console", lambda message: troubles.append(message.text))
        opened.on("pageerror", lambda error: troubles.append(str(error)))
        opened.on("dialog", lambda dialog: (troubles.append(dialog.message), dialog.dismiss()))
        opened.on("request", lambda request: requests.append(request.url))
        opened.goto(path.as_uri())
        for table in opened.locator("#case-table").all():  # its numbers are unpacked first
            table.locator("tbody tr").first.wait_for(state="attached")
        yield opened
        assert troubles == []
        assert {url.split("#")[0] for url in requests if not url.startswith("data:image/")} == {path.as_uri()}
        context.close()

    return watched


def unfold(page):
    page.evaluate("for (const details of document.querySelectorAll('details')) details.open = true")


def rows_of(text):
    """A table as CSV: its headings, and each row by them."""
    headings, *rows = csv.reader(io.StringIO(text, newline=""))
    assert len(set(headings)) == len(headings)
    return [dict(zip(headings, row, strict=True)) for row in rows]


def downloaded(page, button):
    """The name of the file that a button saves, and what it holds."""
    with page.expect_download() as download:
        button.click()
    with open(download.value.path(), encoding="utf-8", newline="") as file:
        return download.value.suggested_filename, file.read()


def violations(page):
    """What axe-core finds that is serious or critical."""
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="it brings axe-core").Axe()
    found = axe.run(page).response
    assert len(found["passes"]) > 20
    return [(each["id"], each["nodes"][0]["html"]) for each in found["violations"] if each["impact"] in GRAVE]


GRAVE = ("serious", "critical")


def reads_by_all(page):
    """Nothing grave in light, in dark, and with all that is folded open."""
    unfold(page)
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)
        assert violations(page) == []


def never_sideways(page):
    unfold(page)
    for width in (420, 1400):
        page.set_viewport_size({"width": width, "height": 900})
        assert page.evaluate("document.documentElement.scrollWidth") <= width


def switches_theme(page):
    """By keyboard, whatever the system has."""

    def background():
        return page.evaluate("getComputedStyle(document.body).backgroundColor")

    page.emulate_media(color_scheme="light")
    light = background()
    page.locator("#theme").focus()
    page.keyboard.press("Enter")
    assert background() != light
    page.emulate_media(media="print")
    assert background() == light == "rgb(255, 255, 255)"


PRINTED_PX = 688  # what A4 leaves at 96 pixels an inch with margins of 14 mm
FOLDED = """
[...document.querySelectorAll('main details:not([open])')].filter((details) => !details.closest('.facts')).length
"""
CUT = """
[...document.querySelectorAll('main:not([hidden]) table, main:not([hidden]) svg, main:not([hidden]) img')].filter(
  (part) => part.getBoundingClientRect().right > innerWidth + 1).map((part) => part.outerHTML.slice(0, 200))
"""


def prints_as_a_document(page):
    """On white, with all that is folded, without buttons; nothing is cut at the edge of the paper."""
    page.emulate_media(color_scheme="dark")
    page.evaluate(f"addEventListener('beforeprint', () => {{ window.folded = {FOLDED}; }})")
    assert page.pdf(format="A4").startswith(b"%PDF")
    assert page.evaluate("window.folded") == 0
    page.emulate_media(media="print")
    page.set_viewport_size({"width": PRINTED_PX, "height": 1000})
    unfold(page)
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert page.locator("nav, .tool").filter(visible=True).count() == 0
    assert page.evaluate(CUT) == []
