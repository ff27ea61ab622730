"""Build book/_build/kda_edu.pdf with LaTeX, and print its path: `make pdf`, after `make setup`.

It needs xelatex and latexmk, and the font DejaVu. On Debian and Ubuntu:

    apt-get install texlive-xetex texlive-latex-extra texlive-fonts-recommended latexmk fonts-dejavu

Exercises, hints and solutions are printed in full, since paper does not unfold. The page to play
with is text alone.
"""

import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
OUT = ROOT / "book" / "_build" / "latex"
PDF = ROOT / "book" / "_build" / "kda_edu.pdf"
PROGRAMS = ("xelatex", "latexmk")
BUILD = [
    *(sys.executable, "-c", "from jupyter_book.cli.main import main; main()", "build", "."),
    *("--config", "book/_config.yml", "--toc", "book/_toc.yml", "--path-output", "book"),
    *("--all", "--quiet", "--builder", "custom", "--custom-builder", "latex"),
]
LATEXMK = ["latexmk", "-xelatex", "-interaction=nonstopmode", "-halt-on-error", "-silent"]


def without_svg(text):
    """LaTeX reads no SVG: such a figure, in the book only the ladder, keeps its caption alone."""
    return re.sub(r"\\noindent\\sphinxincludegraphics\[[^]]*\]\{\{\w+\}\.svg\}", "", text)


def numbered(text):
    """Chapter NN carries its own number; other pages have none, and a letter in their equations."""
    letters = iter("ABCDEFGHIJKLMNOPQRSTUVWXYZ")

    def settings(match):
        chapter = re.match(r"chapters/ch(\d\d)_", match[2])
        if chapter:
            depth, start, shown = 1, int(chapter[1]) - 1, r"\arabic{chapter}"
        else:
            depth, start, shown = -1, 0, next(letters)
        lines = [
            rf"\setcounter{{secnumdepth}}{{{depth}}}",
            rf"\setcounter{{chapter}}{{{start}}}",
            rf"\gdef\thechapter{{{shown}}}",
            rf"\gdef\theHchapter{{{match[2]}}}",  # so that no two anchors have one name
            # LaTeX leaves the chapter out of a number where it is 0.
            r"\gdef\theequation{\thechapter.\arabic{equation}}",
            r"\gdef\thefigure{\thechapter.\arabic{figure}}",
            r"\setcounter{equation}{0}\setcounter{figure}{0}\setcounter{table}{0}",
        ]
        return "\n".join([*lines, match[0]])

    return re.sub(r"\\chapter(\{.*\})\n?\\label\{\\detokenize\{([^:}]+):", settings, text)


def main():
    missing = [program for program in PROGRAMS if shutil.which(program) is None]
    if missing:
        print(f"Not found: {', '.join(missing)}.", __doc__, sep="\n", file=sys.stderr)
        return 1
    shutil.rmtree(OUT, ignore_errors=True)
    built = subprocess.run(BUILD, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    source = OUT / "kda_edu.tex"
    if not source.exists():
        print(built.stderr.decode(), file=sys.stderr)
        return 1
    text = source.read_text(encoding="utf-8")
    source.write_text(numbered(without_svg(text)), encoding="utf-8")
    made = subprocess.run([*LATEXMK, source.name], cwd=OUT, stdout=subprocess.DEVNULL)
    if made.returncode:
        log = (OUT / "kda_edu.log").read_text(encoding="utf-8", errors="replace")
        print("\n".join(re.findall(r"^!.*(?:\n.*){0,4}", log, re.M)[:5]), file=sys.stderr)
        print(f"LaTeX failed; all it said is in {OUT / 'kda_edu.log'}", file=sys.stderr)
        return 1
    shutil.copyfile(OUT / "kda_edu.pdf", PDF)
    print(f"The PDF is built: {PDF}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
