"""Exercises: written once, shown as a stub, checked against the oracle, solved in a fold.

A file `chNN.py` in this folder holds the exercises of chapter NN. The solution is an ordinary
function; the lines between `# BEGIN SOLUTION` and `# END SOLUTION` are what the reader writes:

    import torch
    from ._core import define
    from .. import make_inputs

    def erase(S, k):
        \"\"\"Forget what key k [K] points at in the memory S [K, V].\"\"\"
        # BEGIN SOLUTION
        old = S.T @ k  # [V]
        return S - torch.outer(k, old)
        # END SOLUTION

    define(
        erase,
        title="Erase one key",
        stars=1,
        task="Remove from $S$ what the unit key `k` reads.",
        hint="Read the old value first.",
        arguments=erase_arguments,      # seed -> dict of arguments, a new size for each seed
        expected=erase_expected,        # the same arguments -> the answer, by the oracle
        outputs={"S": "KV"},            # name and dims (see `check`) of what is returned
        mutants={                       # plausible mistakes: what is replaced by what
            "the value is added, not removed": ("S - torch", "S + torch"),
            ...                         # five or more
        },
    )

Its name is then "chNN.erase". In the chapter:

    exercise("ch02.erase")              a cell that shows the task
    <the text of stub("ch02.erase")>    the next code cell, which the reader edits
    check_exercise("ch02.erase", erase) a cell that checks it; unsolved, it says so and goes on
    solution("ch02.erase")              a cell that shows the solution, folded

`python -m kda_edu.teach.exercises ch02.erase` prints the stub to paste into the chapter.

Rules that the tests enforce for every exercise: the stub is the solution minus its regions and
counts as not solved; the solution passes; every mutant really changes the code and fails; the
expected answer does not call the solution; each chapter's stub cell is the derived one.
"""

from ._checker import Verdict, check_exercise, judge
from ._core import Exercise, define, exercise_names, get, stub
from ._show import exercise, solution

__all__ = [
    "Exercise",
    "Verdict",
    "check_exercise",
    "define",
    "exercise",
    "exercise_names",
    "get",
    "judge",
    "solution",
    "stub",
]
