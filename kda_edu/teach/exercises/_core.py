"""The exercise itself: its record, the registry, and the sources derived from the solution."""

import importlib
import inspect
import linecache
import pkgutil
import sys
import textwrap
from collections.abc import Callable
from dataclasses import dataclass

BEGIN, END = "# BEGIN SOLUTION", "# END SOLUTION"
TO_WRITE = ["# YOUR CODE HERE", "raise NotImplementedError"]
LEAST_MUTANTS = 5

_registry = {}


@dataclass(frozen=True)
class Exercise:
    """One exercise. `define` makes it; the fields are described there."""

    name: str
    solution: Callable
    title: str
    stars: int
    task: str
    hint: str
    arguments: Callable
    expected: Callable
    outputs: dict
    mutants: dict
    budget: float
    seeds: tuple
    why: str

    @property
    def function(self):
        """The name of the function that the reader writes."""
        return self.solution.__name__

    @property
    def marked(self):
        """The source of the solution, with its region marks."""
        return textwrap.dedent(inspect.getsource(self.solution))

    @property
    def source(self):
        """The source of the solution, without the marks: what `solution` shows."""
        return "".join(line for line in _lines(self.marked) if line.strip() not in (BEGIN, END))

    @property
    def stub(self):
        """The source of the solution with each region replaced by a line that raises."""
        return strip_regions(self.marked)

    def mutant(self, mistake):
        """The source of the solution with one plausible mistake in it."""
        source = self.source
        for old, new in _pairs(self.mutants[mistake]):
            if source.count(old) != 1:
                raise ValueError(
                    f"{self.name}: mutant {mistake!r}: expected exactly one {old!r} in the "
                    f"solution, found {source.count(old)}"
                )
            source = source.replace(old, new)
        return source

    def build(self, source):
        """The function that a source defines, with the names of the exercise's file around it.

        Its lines are findable, for tracebacks and for a Triton kernel inside it.
        """
        namespace = dict(vars(sys.modules[self.solution.__module__]))
        file = f"<{self.name} {hash(source)}>"
        linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
        exec(compile(source, file, "exec"), namespace)
        return namespace[self.function]


def define(
    solution,
    *,
    title,
    stars,
    task,
    hint,
    arguments,
    expected,
    outputs,
    mutants,
    budget=1e-10,
    seeds=(0, 1, 2),
    why="",
):
    """Register the exercise whose answer is the function `solution`.

    title, task, hint   text. Task and hint know `code`, **bold**, $formula$ and empty lines
                        between paragraphs.
    stars               1 easy, 2 a few steps, 3 a small derivation.
    arguments           function of a seed, gives the dict of keyword arguments of one call; it
                        should change the sizes with the seed, be ragged and not square.
    expected            function of the same arguments, gives the right answer by the oracle.
    outputs             dict: name of each returned tensor -> its dims, as in `check`.
    mutants             dict: plausible mistake, in words -> (old, new) or a list of these,
                        replacements in the source of the solution. At least five.
    budget              largest relative error that passes.
    seeds               the calls that are tried, in order.
    why                 a sentence shown below the solution, e.g. what it is used for next.

    Raises ValueError for a field that does not fit.
    """
    name = f"{solution.__module__.rpartition('.')[2]}.{solution.__name__}"
    if stars not in (1, 2, 3):
        raise ValueError(f"{name}: stars: expected 1, 2 or 3, got {stars!r}")
    if len(mutants) < LEAST_MUTANTS:
        raise ValueError(f"{name}: mutants: expected at least {LEAST_MUTANTS}, got {len(mutants)}")
    if not outputs:
        raise ValueError(f"{name}: outputs: expected a name and dims for each result, got none")
    if len(seeds) < 3:
        raise ValueError(f"{name}: seeds: expected three calls or more, got {seeds!r}")
    made = Exercise(
        name=name,
        solution=solution,
        title=title,
        stars=stars,
        task=_flow(task),
        hint=_flow(hint),
        arguments=arguments,
        expected=expected,
        outputs=dict(outputs),
        mutants=dict(mutants),
        budget=budget,
        seeds=tuple(seeds),
        why=_flow(why),
    )
    strip_regions(made.marked, name)
    _registry[name] = made
    return made


def get(name):
    """The exercise of that name. Raises KeyError that lists the names of its chapter."""
    chapter = name.partition(".")[0]
    if chapter in _chapters():
        importlib.import_module(f"{__package__}.{chapter}")
    if name not in _registry:
        known = [known for known in exercise_names() if known.startswith(f"{chapter}.")]
        raise KeyError(f"no exercise {name!r}; those of {chapter}: {', '.join(known) or 'none'}")
    return _registry[name]


def exercise_names():
    """The names of all exercises, in the order of the book."""
    for chapter in _chapters():
        importlib.import_module(f"{__package__}.{chapter}")
    return sorted(_registry, key=lambda name: name.partition(".")[0])


def stub(name):
    """The text of the stub cell of an exercise (no newline at the end)."""
    return get(name).stub.rstrip("\n")


def strip_regions(source, name="exercise"):
    """The source with each marked region replaced by two lines, at the region's indentation."""
    kept, inside, regions = [], False, 0
    for line in _lines(source):
        mark = line.strip()
        if mark == BEGIN:
            if inside:
                raise ValueError(f"{name}: a second {BEGIN!r} before {END!r}")
            inside, regions = True, regions + 1
            margin = line[: len(line) - len(line.lstrip())]
            kept += [f"{margin}{text}\n" for text in TO_WRITE]
        elif mark == END:
            if not inside:
                raise ValueError(f"{name}: {END!r} without {BEGIN!r}")
            inside = False
        elif not inside:
            kept.append(line)
    if inside or not regions:
        raise ValueError(f"{name}: expected {BEGIN!r} and {END!r} around what the reader writes")
    return "".join(kept)


def _chapters():
    import kda_edu.teach.exercises as folder

    found = (module.name for module in pkgutil.iter_modules(folder.__path__))
    return sorted(name for name in found if name.startswith("ch"))


def _lines(source):
    return source.splitlines(keepends=True)


def _pairs(replacement):
    return [replacement] if isinstance(replacement, tuple) else list(replacement)


def _flow(text):
    """Paragraphs joined to one line each, so that a task can be indented where it is written."""
    paragraphs = textwrap.dedent(text).strip().split("\n\n")
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)
