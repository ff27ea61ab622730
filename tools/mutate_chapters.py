"""Flip each sign in the formula cells of a chapter, one at a time: the chapter has to fail.

    python tools/mutate_chapters.py                      every chapter
    python tools/mutate_chapters.py chapters/ch01*.md    these chapters
    python tools/mutate_chapters.py --products           also swap each * and /

A cell that states a formula carries the tag `formula`. For every + and - in such a cell (of two
operands or of one, and += and -=) the tool makes a copy of the chapter with that sign flipped and
runs it until a cell raises. A copy that runs to its end is a survivor: a formula that nothing
checks. Signs inside strings, comments and numbers like 1e-6 are left alone.

The chapter runs once, in this process. At a formula cell the process forks once per sign, so each
copy starts from the state that the reader's cell starts from and leaves no trace. Pictures are
not drawn. The exit status is 1 where a sign survived or a chapter has no formula cell, and 2
where a chapter fails as it stands.
"""

import argparse
import contextlib
import io
import linecache
import os
import signal
import sys
import time
import tokenize
from pathlib import Path
from typing import NamedTuple

import jupytext

ROOT = Path(__file__).resolve().parent.parent
SIGNS = {"+": "-", "-": "+", "+=": "-=", "-=": "+="}
PRODUCTS = {"*": "/", "/": "*", "*=": "/=", "/=": "*="}
TAG = "formula"
SECONDS = 60  # for one mutant; more is an endless loop
DRAWING = ("animate_states", "error_map", "filmstrip", "heatmaps", "show", "state_heatmap")


class Mutant(NamedTuple):
    """One flipped sign: where it stands in its cell, and the cell's text with the flip."""

    line: int  # from 1
    column: int  # from 0
    old: str
    new: str
    source: str


class Result(NamedTuple):
    cell: int
    mutant: Mutant
    caught_by: str | None  # "cell 9: CheckFailed"; None for a survivor


def mutants(source, flips=SIGNS):
    """The mutants of one cell, in the order of its text."""
    lines = source.splitlines(keepends=True)
    found, in_format_string = [], 0
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        kind = tokenize.tok_name[token.type]
        in_format_string += (kind == "FSTRING_START") - (kind == "FSTRING_END")
        if kind != "OP" or in_format_string or token.string not in flips:
            continue
        if token.string == "*" and not _is_product(lines, token):
            continue
        (row, column), new = token.start, flips[token.string]
        line = lines[row - 1]
        changed = line[:column] + new + line[column + len(token.string) :]
        text = "".join([*lines[: row - 1], changed, *lines[row:]])
        found.append(Mutant(row, column, token.string, new, text))
    return found


def _is_product(lines, token):
    """False for the star of `*names` and of a bare `*` among parameters."""
    before = lines[token.start[0] - 1][: token.start[1]].rstrip()
    return bool(before) and (before[-1].isalnum() or before[-1] in "_)]")


def run_cell(source, name, namespace):
    """Execute one cell; its lines are findable, for tracebacks and for triton.jit."""
    lines = source.splitlines(keepends=True)
    linecache.cache[name] = (len(source), None, lines, name)
    exec(compile(source, name, "exec"), namespace)


def run_mutant(cells, place, mutant, namespace):
    """Run the mutated cell and those after it in a fork; what caught it, or None."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read)
        os.write(write, _first_failure(cells, place, mutant, namespace).encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as answer:
        said = answer.read()
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        name = signal.Signals(os.WTERMSIG(status)).name
        return f"stopped after {SECONDS} s" if name == "SIGALRM" else f"died of {name}"
    return said or None


def _first_failure(cells, place, mutant, namespace):
    signal.alarm(SECONDS)
    sys.stdout = sys.stderr = io.StringIO()
    for number in range(place, len(cells)):
        if cells[number].cell_type != "code":
            continue
        source = mutant.source if number == place else cells[number].source
        try:
            run_cell(source, f"<cell {number}>", namespace)
        except BaseException as error:
            return f"cell {number}: {type(error).__name__}"
    return ""


def run_chapter(path, flips=SIGNS):
    """Run a chapter as it stands, and the mutants of each formula cell on the way.

    Returns (number of formula cells, results). Raises RuntimeError where the chapter fails.
    """
    cells = jupytext.read(path).cells
    if torch := sys.modules.get("torch"):
        torch.set_default_dtype(torch.float32)  # whatever the last chapter left
    namespace = {"__name__": "__main__", "display": lambda *_, **__: None}
    results, formulas = [], 0
    for place, cell in enumerate(cells):
        if cell.cell_type != "code":
            continue
        if TAG in cell.metadata.get("tags", []):
            formulas += 1
            for mutant in mutants(cell.source, flips):
                caught = run_mutant(cells, place, mutant, namespace)
                results.append(Result(place, mutant, caught))
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                run_cell(cell.source, f"<cell {place}>", namespace)
        except Exception as error:
            raise RuntimeError(
                f"{path.name}: cell {place} fails as it stands: {type(error).__name__}: {error}"
            ) from error
    return formulas, results


def report(path, formulas, results, seconds, verbose=False):
    """Print what happened, and return whether the chapter is well checked."""
    survivors = [result for result in results if result.caught_by is None]
    print(
        f"{path.stem}: {formulas} formula cells, {len(results)} mutants, "
        f"{len(survivors)} survived ({seconds:.1f} s)"
    )
    for result in results if verbose else survivors:
        cell, mutant, caught_by = result
        line = mutant.source.splitlines()[mutant.line - 1]
        print(f"  cell {cell}, line {mutant.line}: {mutant.old} became {mutant.new}, ", end="")
        print(f"caught by {caught_by}" if caught_by else "and nothing failed")
        print(f"    {line}\n    {' ' * mutant.column}^")
    if not formulas:
        print(f"  no cell has the tag `{TAG}`, so nothing was tested")
    return bool(formulas) and not survivors


def stop_drawing():
    """Replace the functions that turn a figure into bytes. Everything up to that still runs."""
    with contextlib.suppress(ImportError):
        import kda_edu.teach
        import kda_edu.teach.figures

        for name in DRAWING:
            for module in (kda_edu.teach, kda_edu.teach.figures):
                setattr(module, name, lambda *_, **__: None)


def prepare(paths):
    """One CPU thread, no GPU, no windows: a process that can fork."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ["TRITON_INTERPRET"] = "1"
    os.environ["MPLBACKEND"] = "Agg"
    sys.path.insert(0, str(ROOT))
    if any("kda_edu" in path.read_text() for path in paths):
        stop_drawing()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("sources", nargs="*", type=Path, help="default: chapters/ch*.md")
    parser.add_argument("--products", action="store_true", help="also swap * and /")
    parser.add_argument("-v", "--verbose", action="store_true", help="print every mutant")
    args = parser.parse_args()
    if not hasattr(os, "fork"):
        print("This system has no fork(), so no mutant can be run here.")
        return 2
    paths = args.sources or sorted((ROOT / "chapters").glob("ch*.md"))
    prepare(paths)
    flips = SIGNS | PRODUCTS if args.products else SIGNS
    good = True
    for path in paths:
        start = time.perf_counter()
        try:
            formulas, results = run_chapter(path, flips)
        except RuntimeError as error:
            print(error)
            return 2
        good &= report(path, formulas, results, time.perf_counter() - start, args.verbose)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
