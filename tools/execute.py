"""Turn chapters/NAME.md into an executed chapters/NAME.ipynb.

    python tools/execute.py                     every chapter
    python tools/execute.py chapters/ch02*.md   these chapters
    python tools/execute.py --check             run nothing; fail where .md and .ipynb differ

The Markdown file is the only one that is edited. The notebook is written so that two runs
give the same bytes: cell ids follow from the file name and the cell's place, and no time
stamp, Python version or order of execution of the machine is kept. A cell that raises stops
the run, names itself, and leaves the old notebook as it was.
"""

import argparse
import hashlib
import os
import re
import sys
from pathlib import Path

import jupytext
import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError

ROOT = Path(__file__).resolve().parent.parent
KERNELSPEC = {"display_name": "Python 3", "language": "python", "name": "python3"}
CELL_TIMEOUT = 300  # seconds


def read_source(path):
    """The notebook in a MyST file, with fixed metadata and cell ids, and no outputs."""
    notebook = jupytext.read(path)
    if "kernelspec" not in notebook.metadata:
        raise ValueError(f"{path}: no kernelspec in its first lines, so it is no notebook")
    for place, cell in enumerate(notebook.cells):
        cell["id"] = hashlib.sha1(f"{path.stem}:{place}".encode()).hexdigest()[:8]
    notebook.metadata = nbformat.from_dict({"kernelspec": KERNELSPEC})
    notebook.nbformat, notebook.nbformat_minor = 4, 5
    return notebook


def written_part(notebook):
    """What a person wrote: everything in a notebook but its outputs."""
    return [(cell.id, cell.cell_type, cell.source, {**cell.metadata}) for cell in notebook.cells]


def title_of(cell):
    """The first line of a cell that says something, to find it by."""
    lines = [line.strip() for line in cell.source.splitlines()]
    return next((line for line in lines if line and not line.startswith("#")), "(empty)")


def execute(path):
    """Run the chapter and write its notebook. Returns how many cells ran."""
    notebook = read_source(path)
    where = {"metadata": {"path": str(path.parent)}}
    client = NotebookClient(
        notebook,
        timeout=CELL_TIMEOUT,
        kernel_name=KERNELSPEC["name"],
        record_timing=False,
        extra_arguments=["--log-level=ERROR"],  # no warning that a local kernel speaks plain TCP
        resources=where,
    )
    place = -1

    def remember(cell, cell_index, **_):
        nonlocal place
        place = cell_index

    client.on_cell_start = remember
    try:
        client.execute()
    except (CellExecutionError, CellTimeoutError, DeadKernelError) as error:
        cell = notebook.cells[place]
        trace = re.sub(r"\x1b\[[0-9;]*m", "", str(error))  # without colour codes
        raise RuntimeError(
            f"{path}: cell {place} failed, the one that begins\n    {title_of(cell)}\n{trace}"
        ) from None
    notebook.metadata.pop("language_info", None)
    for cell in notebook.cells:
        merge_streams(cell)
    nbformat.validate(notebook)
    nbformat.write(notebook, path.with_suffix(".ipynb"))
    return sum(cell.cell_type == "code" for cell in notebook.cells)


def merge_streams(cell):
    """Join neighbouring pieces of one stream: how they were cut is a matter of timing."""
    merged = []
    for output in cell.get("outputs", []):
        last = merged[-1] if merged else None
        if last and output.output_type == "stream" == last.output_type and last.name == output.name:
            last.text += output.text
        else:
            merged.append(output)
    if "outputs" in cell:
        cell.outputs = merged


def stale(path):
    """Why the committed notebook does not belong to this source, or None."""
    out = path.with_suffix(".ipynb")
    if not out.exists():
        return "has no notebook"
    want, have = written_part(read_source(path)), written_part(nbformat.read(out, 4))
    if len(want) != len(have):
        return f"has {len(want)} cells, its notebook {len(have)}"
    for place, (a, b) in enumerate(zip(want, have, strict=True)):
        if a != b:
            return f"differs from its notebook, first in cell {place}"
    return None


def check(paths):
    """Print one line a chapter, and return how many are stale."""
    bad = 0
    for path in paths:
        why = stale(path)
        bad += why is not None
        print(f"{path.stem}: {'fresh' if why is None else f'STALE, {why}'}")
    for notebook in sorted((ROOT / "chapters").glob("*.ipynb")):
        if not notebook.with_suffix(".md").exists():
            bad += 1
            print(f"{notebook.stem}: STALE, no {notebook.stem}.md beside it")
    if bad:
        print(f"{bad} notebook(s) not fresh. Run `make notebooks` and commit the result.")
    return bad


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("sources", nargs="*", type=Path, help="default: chapters/*.md")
    parser.add_argument("--check", action="store_true", help="run nothing, only compare")
    args = parser.parse_args()
    paths = args.sources or sorted((ROOT / "chapters").glob("*.md"))
    if args.check:
        return check(paths) > 0
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # the same sums in the same order
    for path in paths:
        try:
            cells = execute(path)
        except (RuntimeError, ValueError) as error:
            print(error, file=sys.stderr)
            return 1
        print(f"{path.with_suffix('.ipynb')}: {cells} cells ran")
    return 0


if __name__ == "__main__":
    sys.exit(main())
