"""An anchor for each exercise and solution of a chapter, and the directive that lists them.

    ```{exercise-index}
    ```

A chapter shows an exercise through the output of a cell, which Sphinx does not look into. The
transform finds these outputs and puts the labels exercise-chNN-name and solution-chNN-name before
their cells.
"""

import html
import re

from docutils import nodes
from sphinx import addnodes
from sphinx.transforms import SphinxTransform
from sphinx.util.docutils import SphinxDirective

from kda_edu.teach.exercises import exercise_names, get

CARD = re.compile(r'class="kda-card kda-(exercise|solution)".*?(?:Exercise|Solution): (.*?)<')


def setup(app):
    app.add_transform(Anchors)
    app.add_directive("exercise-index", Index)
    return {"parallel_read_safe": True}


def label(kind, name):
    """The anchor of an exercise or a solution: exercise-ch06-w-backward."""
    return nodes.make_id(f"{kind}-{name}")


def chapter_of(docname):
    """ch06 for chapters/ch06_wy; None for a page that is no chapter."""
    match = re.match(r"chapters/(ch\d\d)_", docname)
    return match and match[1]


class Anchors(SphinxTransform):
    """Before Sphinx collects the labels of the page, at 850."""

    default_priority = 840

    def apply(self):
        chapter = chapter_of(self.env.docname)
        if chapter is None:
            return
        names = [name for name in exercise_names() if name.startswith(f"{chapter}.")]
        titles = {get(name).title: name for name in names}
        for raw in list(self.document.findall(nodes.raw)):
            for kind, title in CARD.findall(raw.astext()):
                self.put(raw, label(kind, titles[html.unescape(title)]))

    def put(self, node, anchor):
        while node.parent is not None and "cell" not in node.get("classes", []):
            node = node.parent
        target = nodes.target("", "", ids=[anchor], names=[anchor])
        self.document.note_explicit_target(target)
        node.parent.insert(node.parent.index(node), target)


class Index(SphinxDirective):
    """A list for each chapter of the book: stars, title, and a link to exercise and solution."""

    def run(self):
        self.env.note_reread()  # which chapters there are is known to the whole book alone
        made = []
        for docname in sorted(filter(chapter_of, self.env.found_docs)):
            chapter = chapter_of(docname)
            names = [name for name in exercise_names() if name.startswith(f"{chapter}.")]
            if names:
                title = nodes.paragraph("", f"{int(chapter[2:])}. ", link("doc", f"/{docname}"))
                made += [title, nodes.bullet_list("", *map(self.entry, names))]
        return made

    def entry(self, name):
        made = get(name)
        stars = "★" * made.stars + "☆" * (3 - made.stars)
        text = nodes.paragraph("", f"{stars} ")
        text += link("ref", label("exercise", name), made.title)
        text += nodes.Text(" · ")
        text += link("ref", label("solution", name), "solution")
        return nodes.list_item("", text)


def link(kind, target, text=None):
    """A cross-reference, to be resolved when every page has been read."""
    options = dict(refdomain="std", reftype=kind, reftarget=target, refwarn=True)
    return addnodes.pending_xref(
        "", nodes.inline("", text or target), refexplicit=text is not None, **options
    )
