"""Build the book into book/_build/html, with every warning an error, and print where it starts.

Jupyter Book runs from the repository's root, so that pages can link to chapters/ and book/ by the
paths that also work when the files are read as they are.

With REPOSITORY=https://... in the environment, the chapters that a reader downloads begin with a
cell that fetches that repository where kda_edu is not installed, as on Colab.
"""

import os
import subprocess
import sys
from pathlib import Path

import nbformat

ROOT = Path(__file__).resolve().parent.parent
HTML = ROOT / "book" / "_build" / "html"
COMMAND = [
    *(sys.executable, "-c", "from jupyter_book.cli.main import main; main()", "build", "."),
    *("--config", "book/_config.yml", "--toc", "book/_toc.yml", "--path-output", "book"),
    *("--all", "--quiet", "-W", "-n", "--keep-going"),
]

# The package is not installed but put on the path: chapters read their neighbours and the records.
FETCH = """\
# Where this book's package is missing, as on Colab: fetch it, and interpret without a GPU.
import importlib.util, os, subprocess, sys

if importlib.util.find_spec("kda_edu") is None:
    if not os.path.exists("kda_book"):
        subprocess.run(["git", "clone", "-q", "--depth=1", {repository!r}, "kda_book"], check=True)
    sys.path.insert(0, os.path.abspath("kda_book"))
    paths = [sys.path[0], os.environ.get("PYTHONPATH", "")]  # for processes that a chapter starts
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
if importlib.util.find_spec("triton") is None:
    subprocess.run([sys.executable, "-m", "pip", "install", "-q", "triton"], check=True)
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
"""


def begin_with_fetching(path, repository):
    """Put the cell that fetches the repository in front of a downloadable notebook."""
    notebook = nbformat.read(path, as_version=4)
    cell = nbformat.v4.new_code_cell(FETCH.format(repository=repository), id="fetch")
    notebook.cells.insert(0, cell)
    nbformat.write(notebook, path)


def main():
    done = subprocess.run(COMMAND, cwd=ROOT, stdout=subprocess.DEVNULL)  # warnings: stderr
    landing = HTML / "index.html"
    if done.returncode or not landing.exists():
        print("The book was not built; the warnings above count as errors.", file=sys.stderr)
        return done.returncode or 1
    if repository := os.environ.get("REPOSITORY"):
        for path in sorted((HTML / "_sources" / "chapters").glob("*.ipynb")):
            begin_with_fetching(path, repository)
    print(f"The book is built. Open {landing}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
