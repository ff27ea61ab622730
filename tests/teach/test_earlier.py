"""Definitions taken from a chapter are the chapter's own, and nothing else of it runs."""

from pathlib import Path

import jupytext
import pytest
import torch
import triton

from kda_edu.teach.earlier import code_cells, find_chapter, from_chapter, globals_of, top_level

CHAPTERS = sorted((Path(__file__).resolve().parents[2] / "chapters").glob("ch*.md"))

SOURCE = '''---
kernelspec: {name: python3}
---

# A chapter

```{code-cell} ipython3
:tags: [formula]

import math
from math import log2 as binary_log

BASE = 2
raise RuntimeError("only definitions may run")
```

```python
def quoted():
    """Not a cell."""
```

```{code-cell} ipython3
x = 1 / 0


def helper(x):
    return binary_log(x) + BASE


def outer(y):
    x = y.real  # a local name and an attribute, both also names of the chapter
    return [helper(x) for _ in range(2)]
```

```{code-cell} ipython3
class Pair:
    first = BASE


def twice():
    return 1


def twice():
    return 2


real = 1 / 0
```
'''


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "ch98_sample.md").write_text(SOURCE)
    return tmp_path


def test_what_a_definition_uses_comes_along_and_nothing_else(folder):
    outer = from_chapter("ch98", "outer", folder=folder)
    assert outer(8.0) == [5.0, 5.0]
    known = set(outer.__globals__) - {"__builtins__", "__name__"}
    assert known == {"outer", "helper", "binary_log", "BASE"}


def test_several_names_share_one_namespace(folder):
    pair, base, outer = from_chapter("ch98", "Pair", "BASE", "outer", folder=folder)
    assert pair.first == base == 2 and outer.__globals__["Pair"] is pair


@pytest.mark.parametrize(
    "names, error, message",
    [
        (("quoted",), KeyError, "ch98_sample does not define 'quoted'"),
        (("twice",), ValueError, "ch98_sample defines 'twice' 2 times, expected once"),
        (("outer", "nothing"), KeyError, "does not define 'nothing'"),
    ],
)
def test_a_name_that_is_not_defined_once_is_refused(folder, names, error, message):
    with pytest.raises(error, match=message):
        from_chapter("ch98", *names, folder=folder)


def test_a_chapter_that_is_not_there(folder):
    with pytest.raises(FileNotFoundError, match=r"expected one chapter .*/ch97\*.md, found 0"):
        from_chapter("ch97", "outer", folder=folder)


@pytest.mark.parametrize("path", CHAPTERS, ids=lambda path: path.stem)
def test_cells_are_those_of_jupytext(path):
    want = [cell.source for cell in jupytext.read(path).cells if cell.cell_type == "code"]
    assert code_cells(path.read_text()) == [source.strip("\n") for source in want]
    assert top_level(path)


def test_names_that_a_statement_reads_from_outside():
    source = (
        "@a.b\ndef f(x: c = d):\n    y = e.g\n    def h(z):\n        return z + y + i\n    return h"
    )
    assert globals_of(source) == {"a", "c", "d", "e", "i"}


def test_the_kernels_of_chapter_10_run_outside_of_it():
    """A kernel, its device functions and constants; the wrappers around them."""
    if not triton.knobs.runtime.interpret and not torch.cuda.is_available():
        pytest.skip("kernels need a GPU, or TRITON_INTERPRET=1 in the environment")
    device = "cpu" if triton.knobs.runtime.interpret else "cuda"
    cumulate, tile = from_chapter("ch10", "cumulate", "tile")
    g = -torch.rand(1, 20, 2, 5, device=device)
    want = torch.cat([g[:, :16].cumsum(1), g[:, 16:].cumsum(1)], dim=1) / torch.log(torch.tensor(2))
    assert (cumulate(g, 16) - want).abs().max() < 1e-4
    assert tile(5) == 16 and find_chapter("ch10").stem == "ch10_intra_kernel"
