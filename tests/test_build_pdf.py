"""tools/build_pdf.py: the numbers of chapters, and what it says where LaTeX is missing."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tools"))

from build_pdf import numbered, without_svg  # noqa: E402

SOURCE = r"""
\chapter{Notation}
\label{\detokenize{book/notation:notation}}\label{\detokenize{book/notation::doc}}
\chapter{The \sphinxcode{ladder}}
\label{\detokenize{chapters/ch07_ut_transform:the-ladder}}
\noindent\sphinxincludegraphics[width=480\sphinxpxdimen]{{ladder}.svg}
\caption{Kept.}
\noindent\sphinxincludegraphics{{0a1b}.png}
"""


def test_a_chapter_keeps_its_number_and_a_page_has_none():
    before, notation, chapter = numbered(SOURCE).split(r"\chapter{")
    assert r"\setcounter{secnumdepth}{-1}" in before and r"\gdef\thechapter{A}" in before
    assert r"\setcounter{chapter}{6}" in notation  # \chapter adds one
    assert r"\gdef\thechapter{\arabic{chapter}}" in notation
    assert r"\setcounter{secnumdepth}{1}" in notation
    assert chapter.startswith(r"The \sphinxcode{ladder}}")


def test_a_picture_that_latex_cannot_read_leaves_its_caption():
    text = without_svg(SOURCE)
    assert "svg" not in text and r"\caption{Kept.}" in text and "{0a1b}.png" in text


def test_without_latex_it_says_what_to_install():
    tool = ROOT / "tools" / "build_pdf.py"
    done = subprocess.run(
        [sys.executable, tool],
        env=os.environ | {"PATH": "/nowhere"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert "Not found: xelatex, latexmk." in done.stderr and "texlive-xetex" in done.stderr
