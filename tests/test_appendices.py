"""The appendices: what they are made from, and that nothing is missing or misread."""

import ast
import html
import importlib
import inspect
import re
import sys
from pathlib import Path

import pytest
import yaml
from docutils import nodes

import kda_edu
from kda_edu import kernels, teach
from kda_edu.teach import records
from kda_edu.teach.exercises import exercise_names, get
from kda_edu.teach.exercises._show import exercise, solution

ROOT = Path(__file__).resolve().parent.parent
BOOK = ROOT / "book"
sys.path.insert(0, str(BOOK / "_ext"))

import api_reference  # noqa: E402
import exercises  # noqa: E402


def pages():
    """Every page of the table of contents, as a path without its suffix."""
    parts = yaml.safe_load((BOOK / "_toc.yml").read_text())["parts"]
    return [c["file"].removesuffix(".ipynb") for part in parts for c in part["chapters"]]


# -- the reference -----------------------------------------------------------------------------


def test_the_reference_names_every_kernel_and_says_how_it_is_called():
    found = dict(api_reference.public(kernels))
    assert list(found) == kernels.__all__
    for name, node in found.items():
        parameters = inspect.signature(getattr(kda_edu, name)).parameters.values()
        shown = [a.split("=") for a in api_reference.arguments_of(node) if a != "*"]
        assert [a[0] for a in shown] == [p.name for p in parameters]
        has_default = [p.default is not inspect.Parameter.empty for p in parameters]
        assert [len(a) == 2 for a in shown] == has_default
        assert len(max(api_reference.signature(node).splitlines(), key=len)) <= 78


def test_every_public_kernel_has_a_docstring():
    for name, node in api_reference.public(kernels):
        assert len(ast.get_docstring(node) or "") > 20, name


DOCSTRING = """The sum of `x` and y, K ** -0.5.

    o = x + y   indented

Args:
    x, y: numbers [T],
        `float32`.
    The rest is ignored.

Returns:
    (o, state), o of the same
    dtype.

Raises:
    ValueError: x is bad.
"""


def test_a_docstring_becomes_paragraphs_formulas_and_lists():
    made = api_reference.described(DOCSTRING)
    kinds = [type(node).__name__ for node in made]
    assert kinds == [
        *("paragraph", "literal_block", "rubric", "definition_list", "paragraph"),
        *("rubric", "paragraph", "rubric", "definition_list"),
    ]
    assert made[0].astext() == "The sum of x and y, K ** -0.5."
    assert [n.astext() for n in made[0].findall(nodes.literal)] == ["x"]
    assert made[1].astext() == "o = x + y   indented"
    assert [n.astext() for n in made if isinstance(n, nodes.rubric)] == [
        *("Arguments", "Returns", "Raises")
    ]
    terms = [n.astext() for node in made for n in node.findall(nodes.term)]
    assert terms == ["x, y", "ValueError"]
    assert made[3].astext().endswith("numbers [T], float32.")
    assert made[4].astext() == "The rest is ignored."
    assert made[6].astext() == "(o, state), o of the same dtype."


# -- exercises ---------------------------------------------------------------------------------


def test_every_exercise_card_is_recognised():
    """The labels are found in what a chapter's cells show."""
    for name in exercise_names():
        title = get(name).title
        for kind, show in (("exercise", exercise), ("solution", solution)):
            found = exercises.CARD.findall(show(name)._repr_html_())
            assert [(k, html.unescape(t)) for k, t in found] == [(kind, title)]
    labels = {exercises.label("exercise", name) for name in exercise_names()}
    assert len(labels) == len(exercise_names())


def test_titles_are_unique_in_their_chapter():
    titles = [(name[:4], get(name).title) for name in exercise_names()]
    assert len(set(titles)) == len(titles)


# -- glossary ----------------------------------------------------------------------------------


def glossary():
    """{term: its text}"""
    body = (BOOK / "glossary.md").read_text().split(":::{glossary}\n")[1].split("\n:::")[0]
    entries = (entry.split("\n", 1) for entry in body.split("\n\n"))
    return {term: text for term, text in entries}


def test_the_glossary_is_in_order():
    terms = [term.lower() for term in glossary()]
    assert terms == sorted(terms) and len(terms) > 25


@pytest.mark.parametrize("term", glossary())
def test_a_term_occurs_where_the_glossary_says(term):
    (link,) = re.findall(r"\]\(\.\./(chapters/\w+)\.ipynb\)", glossary()[term])[-1:]
    assert link in pages()
    text = (ROOT / f"{link}.md").read_text().lower()
    words = term.removesuffix("s").lower().split(", ")
    missing = [word for word in words if word.split()[0] not in text]
    assert not missing


# -- GPU records -------------------------------------------------------------------------------


def test_the_table_of_a_record():
    table = teach.from_chapter("gpu_records", "table")
    row = {
        "impl": "kda_edu",
        "shape": {"B": 1, "T": 1024, "H": 4},
        "dtype": "bfloat16",
        "mode": "forward",
        **dict(gate="lower bound", lengths=[1000, 24], memory=7_094_272),
        **dict(repeats=10, median=0.5, p20=0.4, p80=0.6, bytes=10**9, flops=10**11),
        **dict(error=0.002, budget=0.006),
    }
    header = dict(name="chunk_forward", gpu="NVIDIA H200", driver="1", torch="2", triton="3")
    record = header | dict(date="2026-12-01", commit="abcdef123456", kernels="old", rows=[row])
    shown = table(records.validate(record))
    sizes = "B 1, T 1024, H 4, 2 sequences; gate: lower bound; 7.09 MB beside the inputs"
    text = f"kda_edu | {sizes} | bfloat16 | 0.5 (0.4 to 0.6) | 2000 | 200.0 | 2.0e-03 (0.006)"
    assert text in repr(shown)
    assert "Recorded on NVIDIA H200 (driver 1)" in repr(shown)
    assert "The kernels have changed since" in repr(shown)
    page = shown._repr_html_()
    assert page.count("<tr>") == 2 and page.count('<th scope="col">') == page.count("<td>") == 7


# -- names -------------------------------------------------------------------------------------


def test_the_map_of_names_holds_every_kernel_and_no_other():
    table = (BOOK / "name_map.md").read_text().split("## Functions")[1].split("## Symbols")[0]
    ours = re.findall(r"^\| [^|]+ \| `(\w+)`", table, re.M)
    assert set(ours) - set(kernels.__all__) == set()
    assert set(kernels.__all__) - set(ours) == {"fused_recurrent_kda_fwd"}


# -- copying -----------------------------------------------------------------------------------

COPYING = (BOOK / "copying.md").read_text()
FOLDER = Path(kernels.__file__).parent


def parts_to_copy():
    """The rows of the table of smaller parts: lists of file names."""
    rows = re.findall(r"^\| .+ \| (`\w+\.py`.*) \|$", COPYING, re.M)
    return [re.findall(r"`(\w+\.py)`", row) for row in rows]


@pytest.mark.parametrize("files", parts_to_copy(), ids=lambda files: files[0])
def test_a_smaller_part_holds_what_it_imports_and_no_more(files):
    needed, waiting = set(), [files[0], *(["l2norm.py"] if files[0] == "gate.py" else [])]
    while waiting:
        name = waiting.pop()
        if name not in needed:
            needed.add(name)
            for node in ast.walk(ast.parse((FOLDER / name).read_text())):
                if isinstance(node, ast.ImportFrom) and node.level == 1:
                    waiting.append(f"{node.module}.py")
    assert set(files) == needed
    assert len(parts_to_copy()) == 3


def test_the_page_counts_what_is_tuned():
    told = re.search(
        r"the gate \((\d)\), its cumulated sum \((\d)\) and the norm \((\d)\)", COPYING
    )
    names = dict(gate="kda_gate_fwd", cumsum="chunk_local_cumsum", l2norm="l2norm_fwd")
    modules = {n: importlib.import_module(f"{kernels.__name__}.{n}") for n in names}
    tuned = [getattr(modules[n], f"{kernel}_kernel").every_config for n, kernel in names.items()]
    assert [int(n) for n in told.groups()] == [len(configs) for configs in tuned]
    wrapped = [path.name for path in FOLDER.glob("*.py") if "\n@autotune(" in path.read_text()]
    assert sorted(wrapped) == ["cumsum.py", "gate.py", "l2norm.py"]
    rules = re.search(r"in the functions (.*) and their like", COPYING)[1]
    written = "".join(path.read_text() for path in FOLDER.glob("*.py"))
    assert all(f"def {name}(" in written for name in re.findall(r"`(\w+)`", rules))


def test_decoding_alone_needs_all_but_one_file():
    recurrent = ast.parse((FOLDER / "recurrent.py").read_text())
    modules = {n.module for n in ast.walk(recurrent) if isinstance(n, ast.ImportFrom)}
    assert "autograd" in modules and "chunk" not in modules
    others = [path for path in FOLDER.glob("*.py") if path.name not in ("__init__.py", "chunk.py")]
    assert not any("from .chunk import" in path.read_text() for path in others)


# -- the table of contents ---------------------------------------------------------------------


def test_every_page_is_in_the_table_of_contents():
    written = {f"book/{path.stem}" for path in BOOK.glob("*.md")} - {"book/index"}
    assert written <= set(pages())
    for page in pages():
        assert (ROOT / f"{page}.md").is_file(), page
