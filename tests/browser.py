"""Headless Chromium for the tests of the built book, with the network off.

CHROMIUM names the browser where it is not on the PATH.
"""

import os
import shutil
from pathlib import Path
from urllib.parse import urlsplit

import pytest

HTML = Path(__file__).resolve().parent.parent / "book" / "_build" / "html"
PAGES = sorted(
    p.relative_to(HTML).as_posix() for p in HTML.rglob("*.html") if "_static" not in p.parts
)
DESKTOP = {"width": 1280, "height": 900}
PHONE = {"width": 360, "height": 740}
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


def find_chromium():
    names = [os.environ.get("CHROMIUM"), "chromium", "chromium-browser", "google-chrome"]
    return next(filter(None, (shutil.which(name) for name in names if name)), None)


_running = []  # one browser for the whole run, whichever test files import the fixture


@pytest.fixture(name="browser", scope="session")
def open_browser(request):
    """The browser. A test file imports this fixture by the function's name."""
    sync_api = pytest.importorskip("playwright.sync_api")
    if find_chromium() is None:
        pytest.skip("no Chromium: set CHROMIUM or install it, so that pages can be opened")
    if not _running:
        playwright = sync_api.sync_playwright().start()
        request.config.add_cleanup(playwright.stop)
        _running.append(playwright.chromium.launch(executable_path=find_chromium(), args=FLAGS))
    return _running[0]


class Visit:
    """One page, opened and drawn, with what went wrong on the way."""

    def __init__(self, browser, address, theme="light", query=""):
        self.problems = []
        self.context = browser.new_context(color_scheme=theme, viewport=DESKTOP, offline=True)
        self.page = self.context.new_page()
        self.page.set_default_timeout(90_000)  # milliseconds; a busy machine is slow
        self.page.on("console", self.note_console)
        self.page.on("pageerror", lambda error: self.problems.append(f"script error: {error}"))
        self.page.on("request", self.note_request)
        self.page.on(
            "requestfailed", lambda request: self.problems.append(f"not loaded: {request.url}")
        )
        self.page.goto((HTML / address).as_uri() + query)
        if address == "index.html":
            self.page.wait_for_url("**/book/index.html")
        self.page.wait_for_load_state("load")
        self.page.evaluate("() => window.MathJax?.startup?.promise")
        self.page.add_style_tag(content="* { transition: none !important; }")  # colours at rest

    def note_console(self, message):
        if message.type == "error":
            self.problems.append(f"console: {message.text}")

    def note_request(self, request):
        if urlsplit(request.url).scheme not in ("file", "data", "blob"):
            self.problems.append(f"outside request: {request.url}")

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.context.close()
