"""Every page of the built book in headless Chromium: bright and dark, desktop and phone.

Run by `make test-book` after `make book`. CHROMIUM names the browser where it is not on the PATH.
The pages are opened from disk with the network off, as a reader without a connection would.
"""

import os
import re
import shutil
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

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

# Text that a reader sees, less code and less what MathJax has drawn.
VISIBLE_TEXT = """() => {
  const skip = "pre, code, script, style, noscript, mjx-container";
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  const parts = [];
  while (walker.nextNode())
    if (!walker.currentNode.parentElement.closest(skip)) parts.push(walker.currentNode.data);
  return parts.join("");
}"""

EQUATIONS = """() => ({
  drawn: [...document.querySelectorAll(".math")]
    .filter(e => e.querySelector("mjx-container svg")).length,
  all: document.querySelectorAll(".math").length,
  stray: [...document.querySelectorAll("mjx-container")]
    .filter(e => !e.closest(".math, .cell_output")).map(e => e.parentElement.innerText),
  // An error of syntax, and a command that MathJax does not know, which it prints in red.
  errors: [...document.querySelectorAll("[data-mml-node=merror], [data-mml-node=mtext][fill=red]")]
    .map(e => e.closest("mjx-container").innerText || e.outerHTML.slice(0, 200)),
  numbers: [...document.querySelectorAll(".eqno")].map(e => e.firstChild.textContent),
})"""

IMAGES = """async () => {
  const images = [...document.querySelectorAll("img")];
  for (const image of images) { image.loading = "eager"; await image.decode().catch(() => 0); }
  return images.map(i => ({src: i.src.slice(0, 200), alt: i.alt, width: i.naturalWidth}));
}"""

TOO_WIDE = """() => {
  const room = document.documentElement.clientWidth;
  if (document.documentElement.scrollWidth <= room) return [];
  const wide = [...document.querySelectorAll("body *")]
    .filter(e => e.getBoundingClientRect().right > room + 1)
    .slice(0, 5);
  return [`${document.documentElement.scrollWidth} px of ${room}`,
          ...wide.map(e => e.outerHTML.slice(0, 120))];
}"""


def find_chromium():
    names = [os.environ.get("CHROMIUM"), "chromium", "chromium-browser", "google-chrome"]
    return next(filter(None, (shutil.which(name) for name in names if name)), None)


@pytest.fixture(scope="session")
def browser():
    sync_api = pytest.importorskip("playwright.sync_api")
    if find_chromium() is None:
        pytest.skip("no Chromium: set CHROMIUM or install it, so that pages can be opened")
    with sync_api.sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=find_chromium(), args=FLAGS)
        yield chromium
        chromium.close()


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


class Links(HTMLParser):
    """The ids and the references of one page, read from its file."""

    def __init__(self, text):
        super().__init__()
        self.ids, self.targets = set(), []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        attributes = dict(attributes)
        self.ids |= {attributes[name] for name in ("id", "name") if attributes.get(name)}
        for name in ("href", "src"):
            if attributes.get(name):
                self.targets.append(attributes[name])


@cache
def links_of(path):
    return Links(path.read_text(encoding="utf-8"))


def broken_links(address):
    """References to a file that is not there, or to a place in it that is not there."""
    page = HTML / address
    for target in links_of(page).targets:
        parts = urlsplit(target)
        if parts.scheme or parts.netloc:
            continue
        file = (page.parent / unquote(parts.path)).resolve() if parts.path else page
        if HTML not in file.parents or not file.is_file():
            yield f"broken link: {target}"
        elif parts.fragment and file.suffix == ".html":
            if unquote(parts.fragment) not in links_of(file).ids:
                yield f"no such place in the page: {target}"


def raw_markup(text):
    """Signs that something was written for the book's builder and reached the reader."""
    for sign in (r"\\\(|\\\[", r"\$\$", r"\\begin\{", r"\{[a-z:]+\}`", r"^:::", r"\]\{\.[a-z]"):
        for hit in re.finditer(sign, text, re.M):
            yield f"raw markup: {text[max(0, hit.start() - 20) : hit.end() + 40]!r}"


def image_problems(images):
    for image in images:
        if not image["width"]:
            yield f"image does not show: {image['src']}"
        if not image["alt"].strip() or re.search(r"\.(png|svg|jpe?g|gif|webp)$", image["alt"]):
            yield f"image without alternative text: {image['src']} (alt={image['alt']!r})"


def equation_problems(address, equations):
    if equations["drawn"] != equations["all"]:
        yield f"{equations['all'] - equations['drawn']} equations are not drawn"
    for error in equations["errors"]:
        yield f"MathJax: {error}"
    for text in equations["stray"]:
        yield f"an equation that the book's builder did not see: {text!r}"
    chapter = re.match(r"chapters/ch(\d\d)_", address)
    if chapter:
        start = f"({int(chapter.group(1))}."
        for number in equations["numbers"]:
            if not number.startswith(start):
                yield f"equation {number} does not begin with {start}"


def test_the_book_is_there():
    """The landing page, and a page for every chapter's notebook."""
    root = HTML.parent.parent.parent
    chapters = sorted((root / "chapters").glob("ch*.md"))
    assert HTML.joinpath("index.html").is_file()
    for source in chapters:
        assert f"chapters/{source.stem}.html" in PAGES
    assert len(PAGES) >= 3 + len(chapters)


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("address", PAGES)
def test_page(browser, address, theme):
    with Visit(browser, address, theme) as visit:
        page, problems = visit.page, visit.problems
        shown = page.evaluate("document.documentElement.dataset.theme")
        if shown != theme:
            problems.append(f"asked for {theme}, shown is {shown}")
        problems += broken_links(address)
        problems += raw_markup(page.evaluate(VISIBLE_TEXT))
        problems += equation_problems(address, page.evaluate(EQUATIONS))
        problems += image_problems(page.evaluate(IMAGES))
        for size in (DESKTOP, PHONE):
            page.set_viewport_size(size)
            problems += [f"wider than {size['width']} px: {w}" for w in page.evaluate(TOO_WIDE)]
        if problems:
            pytest.fail("\n  ".join([f"{address}, {theme}:", *problems]), pytrace=False)


def test_index_leads_to_the_landing_page(browser):
    with Visit(browser, "index.html") as visit:
        assert visit.page.url.endswith("/book/index.html")
        assert "Kimi Delta Attention" in visit.page.title()
        assert not visit.problems, visit.problems


def test_search_finds_pages_without_a_server(browser):
    with Visit(browser, "search.html", query="?q=delta") as visit:
        visit.page.wait_for_selector("#search-results ul.search li a")
        found = visit.page.locator("#search-results ul.search li a").all_inner_texts()
        assert "Notation" in found
        assert not visit.problems, visit.problems


def test_the_reader_can_change_the_theme(browser):
    with Visit(browser, "book/index.html", "light") as visit:
        before = visit.page.evaluate("getComputedStyle(document.body).backgroundColor")
        for _ in range(2):  # auto, then light or dark
            visit.page.locator(".theme-switch-button:visible").first.click()
        after = visit.page.evaluate("getComputedStyle(document.body).backgroundColor")
        modes = visit.page.evaluate("document.documentElement.dataset.mode")
        assert modes in ("light", "dark")
        assert (before != after) == (modes == "dark")
