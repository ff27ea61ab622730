"""Every page of the built book in headless Chromium: bright and dark, desktop and phone.

Run by `make test-book` after `make book`. CHROMIUM names the browser where it is not on the PATH.
The pages are opened from disk with the network off, as a reader without a connection would.
"""

import re
from functools import cache
from html.parser import HTMLParser
from urllib.parse import unquote, urlsplit

import pytest
from browser import DESKTOP, HTML, PAGES, PHONE, Visit, open_browser  # noqa: F401  (a fixture)

from kda_edu.teach.palette import COLOURS, contrast

SCREENSHOTS = HTML.parent / "screenshots"

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

# WCAG 2.2 AA (success criterion 1.4.3): text has a contrast of 4.5, large text and the squares
# that stand for a symbol 3. Colours are composited over those of the elements behind.
CONTRAST = """() => {
  const canvas = document.createElement("canvas").getContext("2d", {willReadFrequently: true});
  const parsed = new Map();
  const rgba = text => {
    if (!parsed.has(text)) {
      canvas.clearRect(0, 0, 1, 1);
      canvas.fillStyle = text;
      canvas.fillRect(0, 0, 1, 1);
      const [r, g, b, a] = canvas.getImageData(0, 0, 1, 1).data;
      parsed.set(text, [r, g, b, a / 255]);
    }
    return parsed.get(text);
  };
  const over = (top, under) =>
    [0, 1, 2].map(i => top[3] * top[i] + (1 - top[3]) * under[i]).concat(1);
  const behind = element => {
    if (!element) return rgba(getComputedStyle(document.documentElement).colorScheme === "dark"
      ? "black" : "white");
    const own = rgba(getComputedStyle(element).backgroundColor);
    return own[3] === 1 ? own : over(own, behind(element.parentElement));
  };
  const luminance = c => {
    const [r, g, b] = c.slice(0, 3).map(x => x / 255)
      .map(x => x <= 0.04045 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const ratio = (a, b) => {
    const [high, low] = [luminance(a), luminance(b)].sort((x, y) => y - x);
    return (high + 0.05) / (low + 0.05);
  };
  const found = new Map();
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const element = walker.currentNode.parentElement, text = walker.currentNode.data.trim();
    if (!text || element.closest("script, style, noscript, template, mjx-assistive-mml, option"))
      continue;
    const style = getComputedStyle(element);
    if (!element.checkVisibility({visibilityProperty: true, opacityProperty: true})) continue;
    const colour = element instanceof SVGElement ? style.fill : style.color;
    const ground = behind(element instanceof SVGElement ? element.closest("svg") : element);
    const points = parseFloat(style.fontSize) * 0.75;
    const large = points >= 18 || (points >= 14 && style.fontWeight >= 700);
    const least = large || text === "■" ? 3 : 4.5;
    const got = ratio(over(rgba(colour), ground), ground);
    if (got < least - 0.005)
      found.set(`${colour} ${element.className}`,
        `contrast ${got.toFixed(2)}, below ${least}: "${text.slice(0, 40)}" in ` +
        `<${element.localName} class="${element.getAttribute("class") ?? ""}">`);
  }
  return [...found.values()].slice(0, 12);
}"""

FIGURES = """() => {
  const images = [...document.querySelectorAll(".cell_output img.dark-light")];
  const filters = images.map(i => getComputedStyle(i).filter.match(/brightness\\(([\\d.]+)\\)/));
  const hex = getComputedStyle(document.body).backgroundColor.match(/\\d+/g).slice(0, 3)
    .map(x => Number(x).toString(16).padStart(2, "0")).join("");
  const brightness = images.length ? Math.min(...filters.map(f => f ? Number(f[1]) : 1)) : null;
  return [brightness, "#" + hex];
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


def figure_problems(brightness, background):
    """Text in a picture against the page, after the style sheet's slight change of brightness."""
    if brightness is not None:
        channels = [int(COLOURS["ink"][i : i + 2], 16) for i in (1, 3, 5)]
        shown = "#" + "".join(f"{min(255, round(brightness * c)):02x}" for c in channels)
        if contrast(shown, background) < 4.5:
            yield f"text in figures: {contrast(shown, background):.2f}, below 4.5"


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


def keep_screenshot(page, address, theme, width):
    """What the page looks like, for a person to leaf through: book/_build/screenshots."""
    SCREENSHOTS.mkdir(exist_ok=True)
    name = address.removesuffix(".html").replace("/", "-")
    path = SCREENSHOTS / f"{name}-{theme}-{width}.jpg"
    page.screenshot(path=path, full_page=True, type="jpeg", quality=60)
    assert path.stat().st_size > 5000


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
        problems += figure_problems(*page.evaluate(FIGURES))
        for size in (DESKTOP, PHONE):
            page.set_viewport_size(size)
            problems += [f"wider than {size['width']} px: {w}" for w in page.evaluate(TOO_WIDE)]
            problems += page.evaluate(CONTRAST)
            keep_screenshot(page, address, theme, size["width"])
        if problems:
            pytest.fail("\n  ".join([f"{address}, {theme}:", *problems]), pytrace=False)


def test_index_leads_to_the_landing_page(browser):
    with Visit(browser, "index.html") as visit:
        assert visit.page.url.endswith("/book/index.html")
        assert "Kimi Delta Attention" in visit.page.title()
        assert not visit.problems, visit.problems


def test_search_finds_pages_without_a_server(browser):
    with Visit(browser, "search.html", query="?q=delta") as visit:
        # The results come in one after the other.
        visit.page.wait_for_selector("#search-results ul.search li a:text-is('Notation')")
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
