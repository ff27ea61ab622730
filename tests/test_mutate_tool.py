"""tools/mutate_chapters.py: it finds the sign that nothing checks, and only that one."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tools"))

import mutate_chapters  # noqa: E402

HEAD = """---
jupytext:
  text_representation: {extension: .md, format_name: myst}
kernelspec: {display_name: Python 3, language: python, name: python3}
---
"""
CELL = "```{{code-cell}} python3\n{tags}{source}\n```\n"


def chapter(tmp_path, *cells, name="ch01_small.md"):
    """Write a chapter; a cell that begins with "formula:" gets the tag."""
    text = HEAD
    for cell in cells:
        tagged = cell.startswith("formula:")
        source = cell.removeprefix("formula:").strip()
        text += CELL.format(tags=":tags: [formula]\n" if tagged else "", source=source)
    path = tmp_path / name
    path.write_text(text)
    return path


def run(*arguments):
    command = [sys.executable, ROOT / "tools" / "mutate_chapters.py", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize(
    ("source", "columns"),
    [
        ("y = a + b - c", [6, 10]),
        ("y = -x ** -2", [4, 10]),
        ("y += 1", [2]),
        ("y = f(x, dim=-1)  # a - b", [13]),
        ("y = 1e-6 * x", []),
        ("y = 'a - b' 'c->d'", []),
        ("y = f'{a - b} - c'", []),
        ("def f(x) -> int:\n    return (\n        x\n        - 1\n    )", [8]),
    ],
)
def test_where_the_signs_are(source, columns):
    found = mutate_chapters.mutants(source)
    assert [mutant.column for mutant in found] == columns
    for mutant in found:
        assert mutant.source != source and len(mutant.source) == len(source)


def test_products_are_swapped_but_not_stars():
    found = mutate_chapters.mutants("y = f(*a, b * c) / d ** 2", mutate_chapters.PRODUCTS)
    assert [(mutant.old, mutant.column) for mutant in found] == [("*", 12), ("/", 17)]


def test_checked_formulas_have_no_survivor(tmp_path):
    path = chapter(tmp_path, "a, b = 3, 2", "formula: y = a - b + 4", "assert y == 5")
    done = run(path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 formula cells, 2 mutants, 0 survived" in done.stdout


def test_an_unchecked_sign_survives_and_is_named(tmp_path):
    path = chapter(
        tmp_path, "a, b = 3, 2", "formula: y = a - b\nz = (a + b) ** 2\n", "assert y == 1"
    )
    done = run(path)
    assert done.returncode == 1
    assert "2 mutants, 1 survived" in done.stdout
    assert "cell 1, line 2: + became -" in done.stdout
    assert "z = (a - b) ** 2" in done.stdout


def test_a_mutant_leaves_no_trace(tmp_path):
    """Both mutants append to a list that the honest cell then finds empty."""
    path = chapter(
        tmp_path,
        "seen = []",
        "formula: seen.append(1 + 1 - 1)",
        "assert seen == [1]",
    )
    assert run(path).returncode == 0


def test_cells_without_the_tag_are_left_alone(tmp_path):
    path = chapter(tmp_path, "x = 2 - 1", "formula: y = x + 1", "assert y == 2")
    assert "1 mutants, 0 survived" in run(path).stdout


def test_a_chapter_that_fails_as_it_stands_is_no_success(tmp_path):
    done = run(chapter(tmp_path, "formula: y = 2 - 1", "assert y == 3"))
    assert done.returncode == 2
    assert "cell 1 fails as it stands: AssertionError" in done.stdout


def test_a_chapter_without_formulas_is_no_success(tmp_path):
    done = run(chapter(tmp_path, "y = 2 - 1"))
    assert done.returncode == 1
    assert "no cell has the tag" in done.stdout


def test_an_endless_mutant_is_stopped(tmp_path, monkeypatch):
    monkeypatch.setattr(mutate_chapters, "SECONDS", 1)
    path = chapter(tmp_path, "n = 0", "formula: while n < 9: n += 1")
    formulas, results = mutate_chapters.run_chapter(path)
    assert formulas == 1
    assert [result.caught_by for result in results] == ["stopped after 1 s"]
