"""A chapter is numbered by its file name: chapters/ch02_delta_rule is chapter 2.

Sphinx counts the pages of the table of contents from 1. This replaces the first part of each
number that it gave (in titles, the sidebar, equations and figures), so that equation (2.3)
stands in chapter 02, whichever chapters are there.
"""

import re

from docutils import nodes
from sphinx.environment.collectors.toctree import TocTreeCollector


def chapter_of(docname):
    """2 for chapters/ch02_delta_rule; None for a page that is no chapter."""
    match = re.search(r"(?:^|/)ch(\d\d)_", docname)
    return int(match.group(1)) if match else None


def renumber(app, env):
    for docname in env.found_docs:
        chapter = chapter_of(docname)
        if chapter is None or docname not in env.toc_secnumbers:
            continue

        def moved(number, chapter=chapter):
            return (chapter, *number[1:]) if number else number

        numbers = env.toc_secnumbers[docname]
        for anchor in numbers:
            numbers[anchor] = moved(numbers[anchor])
        for figures in env.toc_fignumbers.get(docname, {}).values():
            for label in figures:
                figures[label] = moved(figures[label])
        titles = [env.titles[docname], env.longtitles[docname]]
        for node in [*titles, *env.tocs[docname].findall(nodes.reference)]:
            if "secnumber" in node:
                node["secnumber"] = moved(node["secnumber"])
    return []


def setup(app):
    # After Sphinx's own numbering, which listens to the same event at the usual priority, 500.
    assert TocTreeCollector.get_updated_docs, "Sphinx numbers pages elsewhere now"
    app.connect("env-get-updated", renumber, priority=900)
    return {"parallel_read_safe": True}
