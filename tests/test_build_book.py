"""tools/build_book.py: the cell that a downloaded chapter begins with."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import nbformat

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tools"))

from build_book import begin_with_fetching  # noqa: E402

GIT = ["git", "-c", "user.name=reader", "-c", "user.email=reader@example.org"]


def test_a_downloaded_chapter_begins_with_fetching(tmp_path):
    source, copy = ROOT / "chapters" / "ch02_delta_rule.ipynb", tmp_path / "chapter.ipynb"
    shutil.copy(source, copy)
    begin_with_fetching(copy, "https://example.org/it's.git")
    before, after = (nbformat.read(path, as_version=4) for path in (source, copy))
    nbformat.validate(after)
    assert after.cells[1:] == before.cells
    assert '''"--depth=1", "https://example.org/it's.git", "kda_book"''' in after.cells[0].source


def test_the_cell_fetches_what_is_missing_and_interprets_without_a_gpu(tmp_path):
    """Run with no installed package in sight: stubs of torch and triton, a small repository."""
    repository, reader, stubs = (tmp_path / name for name in ("repository", "reader", "stubs"))
    for name, text in (
        (repository / "kda_edu" / "__init__.py", "WORD = 'fetched'"),
        (stubs / "torch" / "__init__.py", ""),
        (stubs / "torch" / "cuda.py", "def is_available(): return False"),
        (stubs / "triton.py", ""),
    ):
        name.parent.mkdir(parents=True, exist_ok=True)
        name.write_text(text)
    (stubs / "torch" / "__init__.py").write_text("from . import cuda")
    for command in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "all"]):
        subprocess.run([*GIT, *command], cwd=repository, check=True)

    copy = tmp_path / "chapter.ipynb"
    nbformat.write(nbformat.v4.new_notebook(), copy)
    begin_with_fetching(copy, str(repository))
    cell = nbformat.read(copy, as_version=4).cells[0].source
    reader.mkdir()
    ask = "import kda_edu; print(kda_edu.WORD, os.environ['TRITON_INTERPRET'])"
    child = f"subprocess.run([sys.executable, '-S', '-c', {'import os; ' + ask!r}], check=True)"
    environment = {n: x for n, x in os.environ.items() if n != "TRITON_INTERPRET"}
    for _ in range(2):  # the second time the folder is there
        done = subprocess.run(
            [sys.executable, "-S", "-c", f"{cell}\n{ask}\nsys.stdout.flush()\n{child}"],
            env=environment | {"PYTHONPATH": str(stubs)},
            cwd=reader, capture_output=True, text=True,
        )  # fmt: skip
        assert done.stdout.split() == ["fetched", "1"] * 2, done.stderr
