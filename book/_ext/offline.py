"""The book asks nothing of the network: it carries MathJax, and offers no live code."""

import shutil
from importlib.util import find_spec
from pathlib import Path

from sphinx.errors import ExtensionError

SCRIPT = "tex-svg-full.js"  # one file: TeX input, SVG output, every TeX package, glyphs inside


def bundled_script():
    """Where django-static-mathjax keeps the script. The package is static files; no Django runs."""
    spec = find_spec("mathjax")
    if spec is None:
        raise ExtensionError("the bundled MathJax is missing: pip install django-static-mathjax")
    folder = Path(next(iter(spec.submodule_search_locations)))
    return folder / "static" / "mathjax" / "es5" / SCRIPT


def copy_script(app, error):
    if error is None and app.builder.format == "html":
        target = Path(app.outdir) / "_static" / "mathjax" / SCRIPT
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(bundled_script(), target)


def point_to_script(app, config):
    config.mathjax_path = f"mathjax/{SCRIPT}"


def drop_live_code(app, config):
    """Jupyter Book loads sphinx-thebe, whose scripts fetch a kernel; keep only its style sheet."""

    def kept(listener):
        handler = listener.handler
        return handler.__module__ != "sphinx_thebe" or handler.__name__ == "st_static_path"

    for listeners in app.events.listeners.values():
        listeners[:] = filter(kept, listeners)


def setup(app):
    app.connect("config-inited", point_to_script)
    app.connect("config-inited", drop_live_code)
    app.connect("build-finished", copy_script)
    return {"parallel_read_safe": True}
