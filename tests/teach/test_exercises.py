"""Every exercise of the book: the stub fails, the solution passes, each mistake is caught."""

import ast
import html
import inspect
import re
from pathlib import Path

import exercise_sample  # registers one exercise, for the tests of the checker
import jupytext
import pytest
import torch

from kda_edu.teach import check_exercise, exercise, solution, stub
from kda_edu.teach.exercises import exercise_names, get, judge
from kda_edu.teach.exercises._core import BEGIN, END, TO_WRITE, define, strip_regions
from kda_edu.teach.exercises._show import rich

ROOT = Path(__file__).resolve().parents[2]
CHAPTERS = sorted((ROOT / "chapters").glob("ch*.md"))
NAMES = exercise_names()
SAMPLE = f"{exercise_sample.__name__}.parallel_form"
MUTANTS = [(name, mistake) for name in NAMES for mistake in get(name).mutants]


def code_of(source):
    """What the interpreter sees: no comments, no layout."""
    return ast.dump(ast.parse(source))


# -- every exercise ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_the_stub_is_not_solved(name):
    made = get(name)
    verdict = judge(made, made.build(made.stub))
    assert verdict.status == "unsolved"
    assert "not solved yet" in verdict.message


@pytest.mark.parametrize("name", NAMES)
def test_the_solution_is_right(name):
    made = get(name)
    verdict = judge(made, made.build(made.source))
    assert verdict.status == "right", verdict.message


@pytest.mark.parametrize("name, mistake", MUTANTS)
def test_the_mistake_changes_the_code_and_is_caught_by_name(name, mistake):
    made = get(name)
    source = made.mutant(mistake)
    assert code_of(source) != code_of(made.source)
    verdict = judge(made, made.build(source))
    assert verdict.status == "wrong"
    raised = "it raised" in verdict.message or "shape" in verdict.message
    assert mistake in verdict.mistakes or raised, verdict.message


@pytest.mark.parametrize("name", NAMES)
def test_the_stub_is_the_solution_without_its_regions(name):
    made = get(name)
    outside, inside = [], False
    for line in made.marked.splitlines():
        if line.strip() == BEGIN:
            inside = True
        elif line.strip() == END:
            inside = False
        elif not inside:
            outside.append(line)
    shown = [line for line in made.stub.splitlines() if line.strip() not in TO_WRITE]
    assert shown == outside
    assert made.stub.count(TO_WRITE[1]) == made.marked.count(BEGIN) >= 1
    assert BEGIN not in made.source and END not in made.source


@pytest.mark.parametrize("name", NAMES)
def test_the_record_is_complete(name):
    made = get(name)
    assert len(made.mutants) >= 5 and made.title and made.task and made.hint
    assert made.stars in (1, 2, 3)
    assert inspect.getdoc(made.solution), "the stub needs a docstring with the shapes"
    assert all(len(line) <= 100 for line in made.source.splitlines())
    assert made.function not in inspect.getsource(made.expected).split("\n", 1)[1], (
        "the expected answer must come from the oracle, not from the solution"
    )


@pytest.mark.parametrize("name", NAMES)
def test_the_calls_differ_and_repeat(name):
    made = get(name)

    def numbers(seed):
        tensors = [x for x in made.arguments(seed).values() if isinstance(x, torch.Tensor)]
        return [(tuple(x.shape), x.double().sum().item()) for x in tensors]

    calls = [repr(numbers(seed)) for seed in made.seeds]
    if numbers(made.seeds[0]):
        assert len(set(calls)) == len(calls), "two seeds give the same arguments"
    assert [repr(numbers(seed)) for seed in made.seeds] == calls


@pytest.mark.parametrize("name", NAMES)
def test_what_is_shown_is_html_and_text_and_repeats(name):
    for show in (exercise, solution):
        page, text = show(name)._repr_html_(), repr(show(name))
        assert (page, text) == (show(name)._repr_html_(), repr(show(name)))
        assert page.count("<details>") == page.count("</details>") == 1
        assert get(name).title in text and "0x" not in text
    assert html.escape(get(name).source.rstrip()) in solution(name)._repr_html_()
    assert get(name).source.rstrip() not in repr(exercise(name))


# -- the chapters ------------------------------------------------------------------------------


def code_cells(path):
    return [cell.source for cell in jupytext.read(path).cells if cell.cell_type == "code"]


@pytest.mark.parametrize("path", CHAPTERS, ids=lambda path: path.stem)
def test_the_chapter_shows_its_exercises_in_order(path):
    cells = code_cells(path)
    chapter = path.stem.partition("_")[0]
    mine = [name for name in NAMES if name.startswith(f"{chapter}.")]
    shown = []
    for place, source in enumerate(cells):
        for name in re.findall(r"\bexercise\([\"'](.+?)[\"']\)", source):
            shown.append(name)
            assert cells[place + 1].strip() == stub(name), f"{name}: paste stub({name!r})"
            later = "\n".join(cells[place + 2 :])
            function = name.partition(".")[2]
            assert re.search(rf"check_exercise\([\"']{re.escape(name)}[\"'],\s*{function}\)", later)
            assert re.search(rf"\bsolution\([\"']{re.escape(name)}[\"']\)", later)
    assert sorted(shown) == sorted(mine)


# -- the checker -------------------------------------------------------------------------------


def parallel_form(q, k, v):
    return torch.tril(q @ k.T) @ v


def test_check_exercise_prints_and_never_stops(capsys):
    name = SAMPLE
    check_exercise(name, parallel_form)
    assert capsys.readouterr().out == "✓ The parallel form: right on 3 random inputs\n"
    check_exercise(name, get(name).build(stub(name)))
    assert capsys.readouterr().out == "○ The parallel form: not solved yet\n"
    check_exercise(name, lambda q, k, v: None)
    assert "not solved yet" in capsys.readouterr().out
    check_exercise(name, lambda q, k, v: q @ k.T @ v)
    said = capsys.readouterr().out
    assert said.startswith("✗ The parallel form: not right yet\no is wrong: error ")
    assert "first wrong token: 0 of 37" in said
    assert "this is what happens when the mask is missing, so the future leaks in" in said


@pytest.mark.parametrize(
    "wrong, complaint",
    [
        (lambda q, k, v: 1 / 0, "it raised ZeroDivisionError: division by zero"),
        (lambda q, k, v: parallel_form(q, k, v).T, r"o has shape \(5, 37\), expected \(37, 5\)"),
        (lambda q, k, v: (v, v), "it returned 2 results, expected 1: o"),
        (lambda q, k, v: "o", "o is of type str, expected a torch.Tensor"),
        (lambda q, k, v: parallel_form(q, k.mul_(2), v) / 2, "it changed its argument 'k'"),
        (lambda q, k, v: parallel_form(q, k, v) * torch.nan, "was the output ever written"),
        (lambda q, k, v: parallel_form(q, k, v) * 2, "off by the factor 2"),
        (lambda q, k: q, "it raised TypeError"),
    ],
)
def test_a_wrong_answer_is_told_what_is_wrong(wrong, complaint):
    verdict = judge(get(SAMPLE), wrong)
    assert verdict.status == "wrong"
    assert re.search(complaint, verdict.message)


def test_an_answer_right_on_the_first_call_only_is_wrong():
    def lucky(q, k, v):
        return parallel_form(q, k, v) * (1.0 if len(q) == 37 else 1.01)

    assert judge(get(SAMPLE), lucky).status == "wrong"


def test_an_error_of_torch_is_not_taken_for_a_stub():
    def unsupported(q, k, v):
        raise NotImplementedError("no such kernel")

    verdict = judge(get(SAMPLE), unsupported)
    assert verdict.status == "wrong" and "no such kernel" in verdict.message


def test_unknown_names_are_answered_with_the_known_ones():
    with pytest.raises(
        KeyError,
        match="no exercise 'exercise_sample.parallel'; those of exercise_sample: .*parallel_form",
    ):
        stub("exercise_sample.parallel")
    with pytest.raises(KeyError, match="those of ch99: none"):
        exercise("ch99.x")
    with pytest.raises(TypeError, match=f"{SAMPLE}: expected a function, got int"):
        check_exercise(SAMPLE, 3)


# -- the loader --------------------------------------------------------------------------------


def test_regions_become_lines_that_raise():
    source = (
        "def f(x):\n    y = 1\n    # BEGIN SOLUTION\n    y = 2\n\n    z = 3\n    # END SOLUTION\n"
        "    if x:\n        # BEGIN SOLUTION\n        return y\n        # END SOLUTION\n"
    )
    assert strip_regions(source) == (
        "def f(x):\n    y = 1\n    # YOUR CODE HERE\n    raise NotImplementedError\n"
        "    if x:\n        # YOUR CODE HERE\n        raise NotImplementedError\n"
    )


@pytest.mark.parametrize(
    "source",
    [
        "def f(): pass\n",
        "# BEGIN SOLUTION\n",
        "# END SOLUTION\n",
        "# BEGIN SOLUTION\n# BEGIN SOLUTION\n# END SOLUTION\n",
    ],
)
def test_broken_regions_are_refused(source):
    with pytest.raises(ValueError, match="SOLUTION"):
        strip_regions(source)


def test_a_mutant_that_changes_nothing_is_refused():
    made = get(SAMPLE)
    broken = type(made)(**{**vars(made), "mutants": {"a typo": ("no such text", "x")}})
    with pytest.raises(ValueError, match="expected exactly one 'no such text'"):
        broken.mutant("a typo")


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(stars=4), "stars: expected 1, 2 or 3, got 4"),
        (dict(mutants={"one": ("a", "b")}), "mutants: expected at least 5, got 1"),
        (dict(outputs={}), "outputs: expected a name"),
        (dict(seeds=(0,)), "seeds: expected three"),
    ],
)
def test_define_names_what_does_not_fit(change, message):
    made = get(SAMPLE)
    fields = {key: value for key, value in vars(made).items() if key not in ("name", "solution")}
    with pytest.raises(ValueError, match=message):
        define(made.solution, **{**fields, **change})


def test_task_text_is_escaped_and_formulas_are_marked_for_mathjax():
    page = rich("If `a < b` and **not** $x < y$ <script>.\n\nNext.")
    assert page.count("<p>") == 2
    assert "<code>a &lt; b</code>" in page and "<strong>not</strong>" in page
    assert "\\(x &lt; y\\)</span>" in page and "tex2jax_process" in page
    assert "&lt;script&gt;" in page
