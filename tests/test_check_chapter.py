"""tools/check_chapter.py reads a reader's answers where the reader writes them."""

import os
import sys
from pathlib import Path

import jupytext
import pytest
import torch

from kda_edu.teach.exercises import exercise_names, get, stub

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tools"))

from check_chapter import answer_of, check, code_cells, report  # noqa: E402

CHAPTERS = sorted({name[:4] for name in exercise_names()})
WRITTEN = [c for c in CHAPTERS if list((ROOT / "chapters").glob(f"{c}_*.ipynb"))]


def source_of(chapter):
    (path,) = (ROOT / "chapters").glob(f"{chapter}_*.md")
    return path


def answered(folder, chapter, answers, suffix=".md"):
    """A copy of a chapter in which some stubs are replaced: {name: text of the cell}."""
    notebook = jupytext.read(source_of(chapter))
    for name, text in answers.items():
        cells = [cell for cell in notebook.cells if cell.source == stub(name)]
        assert len(cells) == 1
        cells[0].source = text
    path = folder / f"{source_of(chapter).stem}{suffix}"
    jupytext.write(notebook, path, fmt="md:myst" if suffix == ".md" else None)
    return path


@pytest.mark.parametrize("chapter", WRITTEN)
def test_the_solutions_are_right_in_their_chapter(chapter, tmp_path, capsys):
    """Each runs with the names of the chapter, not with those of the exercise's file."""
    names = [name for name in exercise_names() if name.startswith(f"{chapter}.")]
    path = answered(tmp_path, chapter, {name: get(name).source for name in names}, ".ipynb")
    default = torch.get_default_dtype()
    assert report(chapter, [path]) == 0, capsys.readouterr().out
    assert f"{len(names)} of {len(names)} right" in capsys.readouterr().out
    assert torch.get_default_dtype() == default


@pytest.mark.parametrize("suffix", [".md", ".ipynb"])
def test_each_answer_gets_its_own_verdict(tmp_path, capsys, suffix):
    names = ["ch06.w_backward", "ch06.deltas_by_solve", "ch06.w_u_by_halves"]
    mistake = "the corrections are added"
    answers = {names[0]: get(names[0]).mutant(mistake), names[1]: "%time\n" + get(names[1]).source}
    path = answered(tmp_path, "ch06", answers, suffix)
    assert report("ch06", [path]) == 1
    text = capsys.readouterr().out
    assert "✗ The product in the other order" in text and mistake in text
    assert "first wrong token" in text and f"hint: {get(names[0]).hint}" in text
    assert f"✓ {get(names[1]).title}" in text and f"○ {get(names[2]).title}" in text
    assert "ch06: 1 of 3 right" in text


def test_the_file_that_was_saved_last_counts(tmp_path):
    name = "ch06.w_backward"
    older = answered(tmp_path, "ch06", {name: get(name).source}, ".md")
    newer = answered(tmp_path, "ch06", {name: get(name).source + "\n\nx = 1"}, ".ipynb")
    os.utime(older, (1, 1))
    assert answer_of(name, [older, newer]).path == newer
    os.utime(newer, (0, 0))
    assert answer_of(name, [older, newer]).path == older
    assert answer_of(name, [source_of("ch06")]) is None


@pytest.mark.parametrize(
    "body, said",
    [
        ("    return keys @", "line 2 of your cell: invalid syntax"),
        ("    return undefined_name", "it raised NameError"),
    ],
)
def test_what_cannot_be_run_is_said(tmp_path, body, said):
    name = "ch06.w_backward"
    path = answered(tmp_path, "ch06", {name: f"def w_backward(keys, betas):\n{body}"}, ".ipynb")
    status, text = check(name, answer_of(name, [path]))
    assert status == "wrong" and said in text


def test_a_helper_in_another_cell_is_found(tmp_path):
    name = "ch06.w_backward"
    whole = get(name).source.replace("torch.zeros_like(keys)", "empty_rows(keys)")
    helper = "def empty_rows(like):\n    return torch.zeros(like.shape)\n\n\n"  # in float64 there
    path = answered(tmp_path, "ch06", {name: whole})
    path.write_text(path.read_text() + f"\n```{{code-cell}} ipython3\n{helper}```\n")
    assert "empty_rows" in "".join(code_cells(path))
    assert check(name, answer_of(name, [path]))[0] == "right"
    torch.set_default_dtype(torch.float32)


def test_a_chapter_without_exercises_is_named(capsys):
    assert report("ch99", [source_of("ch06")]) == 2
    assert "ch99: nothing to check" in capsys.readouterr().out
