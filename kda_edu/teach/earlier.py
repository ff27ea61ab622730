"""Definitions of an earlier chapter, taken from its source: nothing is typed twice, nothing drifts.

    scores = from_chapter("ch10", "intra_scores")

runs the definition of `intra_scores` in chapters/ch10_*.md, and of what it uses there: functions,
kernels, constants and imports. The other cells of that chapter do not run.
"""

import ast
import itertools
import linecache
import symtable
from functools import cache
from pathlib import Path

CHAPTERS = Path(__file__).resolve().parents[2] / "chapters"

_count = itertools.count()


def from_chapter(chapter, *names, folder=None):
    """What an earlier chapter defines under `names`: one object, or a tuple in their order.

    chapter  the start of a file name in chapters/, e.g. "ch10".
    names    functions, classes or constants that its cells define at their top level, once.
    folder   where the chapters are, default chapters/ of this project.

    Raises FileNotFoundError for a chapter that is not there, KeyError for a name that it does not
    define, ValueError for one that it defines more than once.
    """
    path = find_chapter(chapter, folder)
    statements = top_level(path)
    source = "\n\n".join(needed(path.stem, statements, names))
    # Triton reads the source of a kernel through linecache, as it does for a notebook's cell.
    place = f"<{path.stem}, part {next(_count)}>"
    linecache.cache[place] = (len(source), None, source.splitlines(keepends=True), place)
    namespace = {"__name__": f"from_{path.stem}"}
    exec(compile(source, place, "exec"), namespace)
    found = tuple(namespace[name] for name in names)
    return found[0] if len(found) == 1 else found


def find_chapter(chapter, folder=None):
    """The one file chapters/<chapter>*.md."""
    folder = Path(folder or CHAPTERS)
    found = sorted(folder.glob(f"{chapter}*.md"))
    if len(found) != 1:
        raise FileNotFoundError(
            f"expected one chapter {folder.name}/{chapter}*.md, found {len(found)}"
        )
    return found[0]


def code_cells(text):
    """The code of each cell of a MyST notebook, without the lines of its options."""
    cells, cell = [], None
    for line in text.splitlines():
        if cell is None and line.startswith("```{code-cell}"):
            cell = []
        elif cell is not None and line.strip() == "```":
            cells.append("\n".join(cell).strip("\n"))
            cell = None
        elif cell is not None and not (line.startswith(":") and not any(cell)):
            cell.append(line)
    return cells


@cache
def top_level(path):
    """(names bound, source) of each statement at the top level of the chapter's cells."""
    found = []
    for cell in code_cells(path.read_text(encoding="utf-8")):
        lines = cell.splitlines()
        for node in ast.parse(cell).body:
            first = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", []))])
            found.append((_bound(node), "\n".join(lines[first - 1 : node.end_lineno])))
    return found


def needed(chapter, statements, names):
    """The sources that define `names` and all they use, in the order of the chapter."""
    where = {}
    for place, (bound, _) in enumerate(statements):
        for name in bound:
            where.setdefault(name, []).append(place)
    wanted, kept = list(names), set()
    while wanted:
        name = wanted.pop()
        places = where.get(name, [])
        if not places and name in names:
            raise KeyError(f"{chapter} does not define {name!r}")
        imports = [statements[place][1] for place in places]
        if len(set(imports)) > 1:
            raise ValueError(f"{chapter} defines {name!r} {len(places)} times, expected once")
        for place in places[:1]:
            if place not in kept:
                kept.add(place)
                wanted += globals_of(statements[place][1])
    return [statements[place][1] for place in sorted(kept)]


def globals_of(source):
    """Names that a statement reads from outside, those in the functions it defines included."""
    found, tables = set(), [symtable.symtable(source, "<statement>", "exec")]
    while tables:
        table = tables.pop()
        tables += table.get_children()
        outer = table.get_type() == "module"
        for symbol in table.get_symbols():
            if symbol.is_referenced() and (outer or symbol.is_global()):
                found.add(symbol.get_name())
    return found


def _bound(node):
    """Names that a statement binds at the top level."""
    if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
        return {node.name}
    if isinstance(node, (ast.Import, ast.ImportFrom)):
        return {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
    names = (n for n in ast.walk(node) if isinstance(n, ast.Name))
    return {name.id for name in names if isinstance(name.ctx, ast.Store)}
