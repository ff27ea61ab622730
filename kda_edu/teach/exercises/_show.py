"""Show a task, a hint and a solution: folded HTML in a notebook, plain text elsewhere."""

import html
import re

from ..show import Shown
from ._core import get

# Colours that are the same in a light and a dark page; everything else inherits.
CARD = "border-left:4px solid #8073ac;padding:.4em 1em;margin:.6em 0;"
FOLD = "cursor:pointer;font-weight:600;"
CODE = "overflow-x:auto;padding:.6em .8em;border:1px solid #808080;border-radius:4px;"


def exercise(name):
    """Show the task of an exercise, with its stars and a folded hint. The stub cell follows."""
    made = get(name)
    stars = "★" * made.stars + "☆" * (3 - made.stars)
    heading = f"Exercise: {made.title}"
    page = (
        f'<div class="kda-card kda-exercise" style="{CARD}">'
        f"<p><strong>{html.escape(heading)}</strong> "
        f'<span role="img" aria-label="{made.stars} of 3 stars">{stars}</span></p>'
        f"{rich(made.task)}{_fold('Hint', rich(made.hint))}</div>"
    )
    text = f"{heading} {stars}\n\n{made.task}\n\nHint: {made.hint}"
    return Shown(page, text)


def solution(name):
    """Show the solution of an exercise, folded."""
    made = get(name)
    source = made.source.rstrip("\n")
    code = f'<pre style="{CODE}"><code>{html.escape(source)}</code></pre>'
    page = (
        f'<div class="kda-card kda-solution" style="{CARD}">'
        f"{_fold(f'Solution: {made.title}', code + rich(made.why))}</div>"
    )
    text = f"Solution: {made.title}\n\n{source}" + (f"\n\n{made.why}" if made.why else "")
    return Shown(page, text)


def rich(text):
    """Paragraphs with `code`, **bold** and $formula$ as HTML. Everything else is escaped."""
    if not text:
        return ""
    return "".join(f"<p>{_inline(part)}</p>" for part in text.split("\n\n"))


def _inline(text):
    pieces = re.split(r"(`[^`]+`|\$[^$]+\$|\*\*[^*]+\*\*)", text)
    return "".join(_piece(piece) for piece in pieces)


def _piece(piece):
    safe = html.escape(piece, quote=False)
    if piece.startswith("`"):
        return f"<code>{safe[1:-1]}</code>"
    if piece.startswith("**"):
        return f"<strong>{safe[2:-2]}</strong>"
    if piece.startswith("$"):
        # The classes ask MathJax to look inside, in a notebook and in the book.
        return (
            f'<span class="math notranslate nohighlight tex2jax_process">\\({safe[1:-1]}\\)</span>'
        )
    return safe


def _fold(summary, inside):
    return f'<details><summary style="{FOLD}">{html.escape(summary)}</summary>{inside}</details>'
