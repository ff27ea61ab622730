"""A Sphinx extension: alternative text and captions of pictures in a notebook's outputs.

MyST-NB keeps the pixels of an output and drops its metadata. This reads the notebook again and
gives every image of an output the `alt` that its `Picture` stored, and a numbered figure around
it where there is a caption. An image without alternative text is a warning, hence an error in
a build with -W. In `_config.yml`:

    sphinx:
      extra_extensions: [kda_edu.teach.sphinx_figures]

It also adds a style sheet: pictures and exercise cards are drawn for light and dark pages, so
the theme must not put them on a light panel in its dark mode.
"""

import hashlib
import json
import re
from binascii import a2b_base64
from pathlib import Path

from docutils import nodes
from sphinx.util import logging

logger = logging.getLogger(__name__)

STYLE = """
html[data-theme="dark"] .bd-content div.cell_output img.dark-light,
html[data-theme="dark"] .bd-content div.cell_output div.text_html:has(div.kda-card) {
  background: transparent; color: inherit; padding: 0;
}
.bd-content div.cell_output img.dark-light { max-width: 100%; height: auto; }
.kda-card > p { margin: 0 0 .6em; }
.kda-card summary:focus-visible { outline: 2px solid currentColor; }
"""


def setup(app):
    """Called by Sphinx."""
    app.connect("builder-inited", write_style)
    app.connect("doctree-read", describe_images)
    app.add_css_file("kda_teach.css")
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}


def write_style(app):
    """Put the style sheet where Sphinx looks for it."""
    if app.builder.format == "html":
        folder = Path(app.outdir) / "_static"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "kda_teach.css").write_text(STYLE)


def describe_images(app, doctree):
    """Give each image of a notebook's output its alternative text and caption."""
    path = Path(app.env.doc2path(app.env.docname))
    if path.suffix != ".ipynb":
        return
    stored = stored_metadata(json.loads(path.read_text(encoding="utf-8")))
    for image in list(doctree.findall(nodes.image)):
        metadata = stored.get(Path(image["uri"]).stem)
        if metadata is None:
            continue  # not from an output
        if metadata.get("alt"):
            image["alt"] = metadata["alt"]
            image["classes"] = [*image.get("classes", []), "dark-light"]
        if not image.get("alt"):
            logger.warning(
                "a picture has no alternative text; show it with kda_edu.teach.show",
                location=app.env.docname,
                type="kda_figures",
            )
        if metadata.get("caption") and not isinstance(image.parent, nodes.figure):
            add_caption(doctree, image, metadata["caption"])


def stored_metadata(notebook):
    """SHA-256 of each image in the outputs (its file name in the book) -> its metadata."""
    found = {}
    for cell in notebook["cells"]:
        for output in cell.get("outputs", []):
            for kind, content in output.get("data", {}).items():
                if kind.startswith("image/") and kind != "image/svg+xml":
                    digest = hashlib.sha256(a2b_base64("".join(content))).hexdigest()
                    found[digest] = output.get("metadata", {}).get(kind, {})
    return found


def add_caption(doctree, image, caption):
    """Put a numbered figure with a caption in the image's place."""
    figure = nodes.figure("", image.deepcopy(), nodes.caption("", "", *inline(caption)))
    image.replace_self(figure)
    doctree.set_id(figure)


def inline(text):
    """`code`, **bold** and $formula$ as docutils nodes."""
    kinds = {"`": (nodes.literal, 1), "*": (nodes.strong, 2), "$": (nodes.math, 1)}
    made = []
    for piece in re.split(r"(`[^`]+`|\$[^$]+\$|\*\*[^*]+\*\*)", text):
        kind, marks = kinds.get(piece[:1], (None, 0))
        if kind and len(piece) > 2 * marks and piece.endswith(piece[:marks]):
            inner = piece[marks:-marks]
            made.append(kind(inner, inner))
        elif piece:
            made.append(nodes.Text(piece))
    return made
