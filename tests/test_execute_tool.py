"""tools/execute.py: the same bytes twice, a loud failure, and no stale notebook."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest

ROOT = Path(__file__).resolve().parent.parent
SOURCE = """---
jupytext:
  text_representation:
    extension: .md
    format_name: myst
kernelspec:
  display_name: Any name
  language: python
  name: python3
---

# Sample

```{code-cell} python3
import random, sys

for i in range(3):
    print("line", i, flush=True)
print("aside", file=sys.stderr)
```

```{code-cell} python3
total = 40 + 2
total
```
"""


@pytest.fixture(scope="module")
def executed(tmp_path_factory):
    """A copy of the tool in a project with one chapter, run once."""
    project = tmp_path_factory.mktemp("executed")
    (project / "tools").mkdir()
    (project / "chapters").mkdir()
    shutil.copy(ROOT / "tools" / "execute.py", project / "tools")
    (project / "chapters" / "ch90_sample.md").write_text(SOURCE)
    first = run(project)
    assert first.returncode == 0, first.stderr
    assert "2 cells ran" in first.stdout
    return project


@pytest.fixture
def project(executed, tmp_path):
    return Path(shutil.copytree(executed, tmp_path / "project"))


def run(project, *arguments):
    command = [sys.executable, project / "tools" / "execute.py", *arguments]
    return subprocess.run(command, capture_output=True, text=True)


def change(project, old, new):
    path = project / "chapters" / "ch90_sample.md"
    text = path.read_text()
    assert text.count(old) == 1
    path.write_text(text.replace(old, new))


def test_two_runs_give_the_same_bytes_and_are_fresh(project):
    notebook = project / "chapters" / "ch90_sample.ipynb"
    bytes_before = notebook.read_bytes()
    assert run(project).returncode == 0
    assert notebook.read_bytes() == bytes_before
    cells = nbformat.read(notebook, 4).cells
    assert cells[1].outputs[0].text == "line 0\nline 1\nline 2\n"
    assert cells[2].outputs[0].data["text/plain"] == "42"
    assert b"Any name" not in bytes_before and not re.search(rb"\d{4}-\d\d-\d\dT", bytes_before)
    fresh = run(project, "--check")
    assert fresh.returncode == 0 and fresh.stdout == "ch90_sample: fresh\n"


def test_a_cell_that_raises_stops_the_run_and_is_named(project):
    notebook = project / "chapters" / "ch90_sample.ipynb"
    before = notebook.read_bytes()
    change(project, "total = 40 + 2", "# a comment\ntotal = 40 / 0")
    failed = run(project)
    assert failed.returncode == 1
    assert "ch90_sample.md: cell 2 failed" in failed.stderr
    assert "total = 40 / 0" in failed.stderr and "ZeroDivisionError" in failed.stderr
    assert notebook.read_bytes() == before  # the last good notebook stays


@pytest.mark.parametrize(
    ("old", "new", "word"),
    [
        ("40 + 2", "40 + 3", "cell 2"),  # code
        ("# Sample", "# Example", "cell 0"),  # prose
        ("total\n```", "total\n```\n\nMore prose.", "4 cells"),
    ],
)
def test_an_edit_without_a_run_is_stale(project, old, new, word):
    change(project, old, new)
    stale = run(project, "--check")
    assert stale.returncode == 1
    assert "ch90_sample: STALE" in stale.stdout and word in stale.stdout
    assert "make notebooks" in stale.stdout


def test_a_missing_and_an_orphaned_notebook_are_stale(project):
    source = project / "chapters" / "ch90_sample.md"
    source.rename(source.with_stem("ch92_other"))
    orphaned = run(project, "--check")
    assert "ch92_other: STALE, has no notebook" in orphaned.stdout
    assert orphaned.returncode == 1 and "no ch90_sample.md beside it" in orphaned.stdout


def test_a_source_that_is_no_notebook_is_refused(project):
    (project / "chapters" / "ch91_prose.md").write_text("# Only prose\n")
    refused = run(project, project / "chapters" / "ch91_prose.md")
    assert refused.returncode == 1 and "no kernelspec" in refused.stderr
