"""Check your answers to a chapter's exercises, from the command line: `make check CH=06`.

    python tools/check_chapter.py 06             all exercises of chapter 6
    python tools/check_chapter.py 06 my.ipynb    the answers in another file

Your answers are read from chapters/ch06_*.ipynb and from the .md beside it, whichever you edit;
save the file first. Where both hold an answer, the file that was saved last counts. Only your
function and what it uses in the chapter are run, not the whole chapter. The exit status is 1
where an answer is wrong or cannot be run, and 2 where there is nothing to check.
"""

import argparse
import ast
import re
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

import jupytext
import torch

from kda_edu.teach import earlier
from kda_edu.teach.exercises import exercise_names, get, judge, stub

ROOT = Path(__file__).resolve().parent.parent


class Answer(NamedTuple):
    path: Path
    source: str  # of the cell that defines the function


def code_cells(path):
    """The source of each code cell of a notebook, .ipynb or MyST .md, without magics."""
    cells = [cell.source for cell in jupytext.read(path).cells if cell.cell_type == "code"]
    return [re.sub(r"^\s*[%!].*$", "", cell, flags=re.M) for cell in cells]


def parsed(source):
    try:
        return ast.parse(source)
    except SyntaxError:
        return None


def defines(source, function):
    """Whether a cell defines the function; one with a syntax error by its look."""
    tree = parsed(source)
    if tree is None:
        return re.search(rf"^def {function}\b", source, re.M) is not None
    return any(getattr(node, "name", None) == function for node in tree.body)


def answer_of(name, paths):
    """The reader's answer: a cell with the function that is no longer the stub. None if none is."""
    function = get(name).function
    answers = []
    for path in paths:
        for source in code_cells(path):
            if defines(source, function) and not same_code(source, stub(name)):
                answers.append(Answer(path, source))
    return max(answers, key=lambda answer: answer.path.stat().st_mtime, default=None)


def same_code(a, b):
    """Equal but for comments and layout."""
    trees = parsed(a), parsed(b)
    return None not in trees and ast.dump(trees[0]) == ast.dump(trees[1])


def load(answer, function, chapter):
    """The reader's function, with what it uses of its file. Raises what running it raises."""
    ast.parse(answer.source)  # a syntax error is the reader's to see
    cells = [source for source in code_cells(answer.path) if parsed(source)]
    set_default_dtype(cells)
    with tempfile.TemporaryDirectory() as folder:
        text = "\n\n".join(f"```{{code-cell}}\n{source}\n```" for source in cells)
        Path(folder, f"{chapter}_answers.md").write_text(text, encoding="utf-8")
        return earlier.from_chapter(chapter, function, folder=folder)


def set_default_dtype(cells):
    """As the chapter does: the one setting of its cells that changes what a function computes."""
    for source in cells:
        found = re.search(r"^torch\.set_default_dtype\(torch\.(\w+)\)", source, re.M)
        if found:
            torch.set_default_dtype(getattr(torch, found[1]))


def check(name, answer):
    """(status, text) for one exercise."""
    made = get(name)
    if answer is None:
        return "unsolved", f"○ {made.title}: not solved yet"
    try:
        function = load(answer, made.function, name.partition(".")[0])
        verdict = judge(made, function)
    except SyntaxError as error:
        return "wrong", f"✗ {made.title}: line {error.lineno} of your cell: {error.msg}"
    except Exception as error:
        return "wrong", f"✗ {made.title}: your cell cannot be run: {type(error).__name__}: {error}"
    if verdict.status == "wrong":
        return "wrong", f"{verdict.message}\nhint: {made.hint}"
    return verdict.status, verdict.message


def report(chapter, paths):
    """Print a verdict for each exercise of the chapter; returns the exit status."""
    names = [name for name in exercise_names() if name.startswith(f"{chapter}.")]
    paths = [path for path in paths if path.exists()]
    if not names or not paths:
        known = sorted({name[2:4] for name in exercise_names()})
        print(f"{chapter}: nothing to check. Chapters with exercises: {', '.join(known)}")
        return 2
    default = torch.get_default_dtype()
    statuses = []
    for name in names:
        answer = answer_of(name, paths)
        try:
            status, text = check(name, answer)
        finally:
            torch.set_default_dtype(default)
        statuses.append(status)
        print(text if answer is None else f"{text}\n  ({answer.path.name})")
    print(f"\n{chapter}: {statuses.count('right')} of {len(names)} right")
    return 1 if "wrong" in statuses else 0


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("chapter", help="its number, e.g. 06")
    parser.add_argument("files", nargs="*", type=Path, help="default: its .ipynb and .md")
    args = parser.parse_args()
    number = re.fullmatch(r"(?:ch)?(\d{1,2})", args.chapter)
    if number is None:
        parser.error(f"chapter: expected a number like 06, got {args.chapter!r}")
    chapter = f"ch{int(number[1]):02}"
    folder = ROOT / "chapters"
    return report(chapter, args.files or sorted(folder.glob(f"{chapter}_*.[im]*")))


if __name__ == "__main__":
    sys.exit(main())
